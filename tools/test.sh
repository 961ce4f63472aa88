#!/usr/bin/env bash
# All tests but the slow ones and those of `make test-pd`, in two lanes, a processor each: those that
# mostly wait for engines to start, and the others. What the second lane prints comes last.
set -uo pipefail

python=.venv/bin/python
log=$(mktemp)
"$python" -m pytest -m 'not slow' --hypothesis-profile=repeatable tests/unit tests/scheduler tests/remote tests/soak \
    --ignore=tests/scheduler/test_peers_apart.py >"$log" 2>&1 &
second=$!
trap 'kill "$second" 2>/dev/null; rm -f "$log"' EXIT

"$python" -m pytest -m 'not slow' tests/engine tests/lmcache \
    --ignore-glob='tests/engine/test_handover*.py' --ignore=tests/engine/test_peers.py
first=$?
wait "$second"
others=$?
cat "$log"
exit $((first ? first : others))
