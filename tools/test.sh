#!/usr/bin/env bash
# All tests but the slow ones. The unit tests run beside the others, a processor each, and those
# that start no engine come first; what the unit tests print comes last.
set -uo pipefail

python=.venv/bin/python
log=$(mktemp)
"$python" -m pytest -m 'not slow' tests/unit >"$log" 2>&1 &
unit=$!
trap 'kill "$unit" 2>/dev/null; rm -f "$log"' EXIT

"$python" -m pytest -m 'not slow' tests/scheduler tests/engine tests/lmcache tests/soak
others=$?
wait "$unit"
units=$?
cat "$log"
exit $((others ? others : units))
