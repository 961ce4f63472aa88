# SPDX-License-Identifier: Apache-2.0
"""A real engine whose pages are taken away and given back between two requests.

vLLM 0.33 calls these hooks around sleep mode, which its CPU platform lacks; so they are called here
in the order in which its GPU worker does, in an engine that runs in this test's process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.engine._server import Models

SCRIPT = """
import sys, time
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

llm = LLM(
    sys.argv[1], dtype="float32", max_model_len=2048, enforce_eager=True,
    num_gpu_blocks_override=200, kv_cache_memory_bytes=64 << 20, kv_transfer_config={
        "kv_connector": "TieredKVConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu": {"capacity": "64MiB"}, "gate": "always"},
    },
)
connector = get_kv_transfer_group()
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
prompt = {"prompt_token_ids": [7 * i % 900 + 10 for i in range(1500)]}

def ask():
    (out,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    deadline = time.monotonic() + 20
    while connector._worker._copying() and time.monotonic() < deadline:
        time.sleep(0.01)
    return out.outputs[0].token_ids, out.num_cached_tokens

def reset(**options):
    assert scheduler.reset_prefix_cache(reset_running_requests=True, **options)

cold, cached = ask()
assert cached == 0
reset()
warm, cached = ask()
assert warm == cold and cached >= 1280, cached

reset(reset_connector=True)
connector.unregister_kv_caches()
for tensor in connector._worker._pages._tensors.values():
    tensor().zero_()  # what the device's memory holds afterwards is anything
connector.restore_kv_caches()

again, cached = ask()
assert again == cold and cached == 0, cached
reset()
warm, cached = ask()
assert warm == cold and cached >= 1280, cached
print("SLEPT AND WOKE")
"""


def test_after_sleep_the_tier_starts_empty_and_serves_again(models: Models) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(models.path("llama-tiny"))],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=root,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert "SLEPT AND WOKE" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
