#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prefill on one engine and decode on another, on this machine, behind vllm-router. Needs vLLM 0.32 or
# later, this package with its extra "nixl", and vllm-router in one environment.
#
#   examples/serve-pd.sh MODEL [CAPACITY] [further arguments of vllm serve, for both engines]
#
# CAPACITY is host memory for KV blocks of the decode engine, all ranks together (default 32GiB).
# Variables, with their defaults:
#
#   PORT=8110 ROUTER_METRICS_PORT=29000      of the router
#   PREFILL_PORT=8101 DECODE_PORT=8102       of the engines
#   HOST=127.0.0.1                           where all of them listen
#   PREFILL_DEVICES=0 DECODE_DEVICES=1       CUDA_VISIBLE_DEVICES of the engines
#   KEY=~/.config/vllm-tiered-kv/fleet.key   the fleet's key; made if it is not there
#
# It ends when one of the three does, and takes the others with it.
set -euo pipefail

if [[ $# -lt 1 ]]; then
    sed -n '3,17s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
model=$1
shift
capacity=32GiB
if [[ $# -gt 0 && $1 != -* ]]; then
    capacity=$1
    shift
fi
host=${HOST:-127.0.0.1}
prefill=${PREFILL_PORT:-8101}
decode=${DECODE_PORT:-8102}
key=${KEY:-$HOME/.config/vllm-tiered-kv/fleet.key}

if [[ ! -e $key ]]; then
    mkdir -p -m 0700 "$(dirname "$key")"
    vllm-tiered-kv keygen "$key"
fi

# engine ROLE PORT DEVICES TIERS [ARGUMENT...]
engine() {
    CUDA_VISIBLE_DEVICES=$3 exec vllm serve "$model" --host "$host" --port "$2" \
        --kv-transfer-config "$(
            cat <<JSON
{
  "kv_connector": "TieredKVConnector",
  "kv_role": "$1",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {
    ${4:+$4,}
    "remote": {"listen": "$host:0", "key_file": "$key"}
  }
}
JSON
        )" "${@:5}"
}

children=()
end() {
    trap - EXIT
    kill "${children[@]}" 2>/dev/null || true
    wait
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

engine kv_producer "$prefill" "${PREFILL_DEVICES:-0}" "" "$@" &
children+=($!)
engine kv_consumer "$decode" "${DECODE_DEVICES:-1}" "\"cpu\": {\"capacity\": \"$capacity\"}" "$@" &
children+=($!)
# It waits for both.
vllm-router --vllm-pd-disaggregation --kv-connector nixl --host "$host" --port "${PORT:-8110}" \
    --prometheus-port "${ROUTER_METRICS_PORT:-29000}" \
    --prefill "http://$host:$prefill" --decode "http://$host:$decode" &
children+=($!)
wait -n
