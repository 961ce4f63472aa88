# SPDX-License-Identifier: Apache-2.0
"""Build a model folder once; several processes may ask for the same one."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.tinymodels.tokenizer import save_tokenizer
from tools.tinymodels.variants import (
    LORA_BASE,
    LORA_VARIANT,
    MODEL_VARIANTS,
    VISION_VARIANTS,
    model_config,
    vision_config,
)
from tools.tinymodels.weights import save_adapter, save_image_processor, save_weights

_STAMP = "built-from.json"
_FORMAT = 2  # raise it when the same parameters would give other files


def build_model(variant: str, out: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Build a model with its tokenizer in ``out`` unless it is there already; returns ``out``.

    Raises:
        KeyError: no such variant.
    """
    shape = {**MODEL_VARIANTS, **VISION_VARIANTS}[variant]

    def fill(folder: Path) -> None:
        if variant in VISION_VARIANTS:
            config = vision_config(variant, dtype)
            auto = "AutoModelForImageTextToText"
            save_weights(config, folder, dtype=dtype, seed=seed, auto=auto)
            save_tokenizer(folder, images=True)
            save_image_processor(config, folder)
            return
        save_weights(model_config(variant, dtype), folder, dtype=dtype, seed=seed)
        save_tokenizer(folder)

    return _build(out, _stamp(variant, dtype, seed) | {"shape": shape}, fill)


def build_lora(out: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Build a LoRA adapter for ``llama-tiny`` in ``out`` unless it is there; returns ``out``."""

    def fill(folder: Path) -> None:
        config = model_config(LORA_BASE, dtype)
        save_adapter(config, folder, base=LORA_BASE, dtype=dtype, seed=seed)

    return _build(out, _stamp(LORA_VARIANT, dtype, seed), fill)


def _stamp(variant: str, dtype: str, seed: int) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "variant": variant,
        "dtype": dtype,
        "seed": seed,
        "python": platform.python_version(),
        **{name: version(name) for name in ("tokenizers", "torch", "transformers")},
    }


def _build(out: Path, stamp: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    if _is_built(out, stamp):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        fill(scratch)
        (scratch / _STAMP).write_text(json.dumps(stamp, indent=2, sort_keys=True) + "\n")
        scratch.chmod(0o755)
        if out.exists() and not _is_built(out, stamp):
            shutil.rmtree(out)
        try:
            scratch.rename(out)
        except OSError:
            if not _is_built(out, stamp):  # else another process was quicker with the same
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out


def _is_built(out: Path, stamp: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((out / _STAMP).read_text()) == stamp)
    except (OSError, ValueError):
        return False
