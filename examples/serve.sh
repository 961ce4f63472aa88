#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a model with the CPU tier. Needs vLLM 0.32 or later and this package in one environment.
#
#   examples/serve.sh MODEL [CAPACITY] [further arguments of vllm serve]
#
# CAPACITY is host memory for KV blocks of this engine, all ranks together (default 32GiB).
set -euo pipefail

if [[ $# -lt 1 ]]; then
    sed -n '3,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
model=$1
shift
capacity=32GiB
if [[ $# -gt 0 && $1 != -* ]]; then
    capacity=$1
    shift
fi

exec vllm serve "$model" --kv-transfer-config "$(
    cat <<JSON
{
  "kv_connector": "TieredKVConnector",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"cpu": {"capacity": "$capacity"}}
}
JSON
)" "$@"
