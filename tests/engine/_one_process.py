# SPDX-License-Identifier: Apache-2.0
"""vLLM's offline API with engine and worker in this very process; run as a module.

Prints one line of JSON: what a prompt was answered cold and when it came back.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tests.engine._server import prompt, tiered


def main(model: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        distributed_executor_backend="uni",
        kv_transfer_config=tiered({"cpu": {"capacity": "64MiB"}}),
        disable_log_stats=False,
    )
    core = llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)

    def answer(tokens: list[int], **more: Any) -> dict[str, Any]:
        asked = {"prompt_token_ids": tokens, **more}
        (done,) = llm.generate([asked], sampling, use_tqdm=False)
        said = done.outputs[0]
        steps = zip(said.logprobs, said.token_ids, strict=True)
        return {
            "token_ids": list(said.token_ids),
            "logprobs": [step[token].logprob for step, token in steps],
            "cached": done.num_cached_tokens,
        }

    tokens = prompt("one process", 700)
    result = {"executor": type(core.model_executor).__name__}
    result["cold"] = answer(tokens, cache_salt="cold")
    result["first"] = answer(tokens)
    ledger = core.scheduler.connector._scheduler.core.ledger
    deadline = time.monotonic() + 60
    while ledger.stores and time.monotonic() < deadline:
        answer([9, 8, 9])
    assert llm.reset_prefix_cache()
    result["again"] = answer(tokens)
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1])))
