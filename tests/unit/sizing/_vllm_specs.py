# SPDX-License-Identifier: Apache-2.0
"""Prints what vLLM keeps of small models: it builds each without weights and says its specs.

    python -m tests.unit.sizing._vllm_specs

A program of its own, since it changes torch's and vLLM's global state.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import vllm.distributed as distributed
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from tests.unit.sizing._configs import ARCHITECTURES

CASES = ((1, "auto"), (4, "auto"), (1, "fp8"))
"""Numbers of ranks, and formats of the cache."""


def specs(folder: Path, tp: int, kv_dtype: str) -> dict[str, Any]:
    """Bytes of one rank: a token's in full attention, each window's, and of all states."""
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        load_format="dummy",
        kv_cache_dtype=kv_dtype,
    )
    config = arguments.create_engine_config()
    full = states = 0
    windows: dict[int, int] = {}
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as store:
        distributed.init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)
        try:
            # As if there were others: nothing is sent while a model is built.
            config.parallel_config.tensor_parallel_size = tp
            parallel_state._TP.world_size = tp
            torch.set_default_dtype(config.model_config.dtype)
            with torch.device("meta"):
                initialize_model(vllm_config=config)
            for layer in config.compilation_config.static_forward_context.values():
                spec = _spec(layer, config)
                if spec is None:
                    continue
                if not isinstance(spec, AttentionSpec):
                    states += spec.page_size_bytes
                    continue
                token = spec.page_size_bytes // spec.block_size
                if isinstance(spec, FullAttentionSpec):
                    full += token
                    continue
                window = getattr(spec, "sliding_window", None) or spec.attention_chunk_size
                windows[window] = windows.get(window, 0) + token
        finally:
            torch.set_default_dtype(torch.float32)
            parallel_state._TP.world_size = 1
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
    return {"full": full, "windows": sorted(windows.items()), "states": states}


def _spec(layer: object, config: Any) -> Any:
    shares = getattr(layer, "kv_sharing_target_layer_name", None)
    if not isinstance(layer, AttentionLayerBase) or shares:
        return None
    return layer.get_kv_cache_spec(config)


def main() -> None:
    # vLLM looks at each model's class in a process of its own; here it is imported anyway.
    registry._run_in_subprocess = lambda call: call()
    for name in sys.argv[1:] or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(ARCHITECTURES[name]))
            for tp, kv_dtype in CASES:
                try:
                    found = specs(Path(folder), tp, kv_dtype)
                except Exception:  # noqa: BLE001 - vLLM fails in many ways; the test tells which
                    found = {"error": traceback.format_exc(limit=-4)}
                line = {"name": name, "tp": tp, "kv_dtype": kv_dtype, **found}
                print("SPECS " + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
