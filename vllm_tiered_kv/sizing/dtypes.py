# SPDX-License-Identifier: Apache-2.0
"""Numbers' formats, by the names that config files and vLLM's options use."""

from __future__ import annotations

import enum

from vllm_tiered_kv.sizing.errors import SizingError


class Dtype(enum.Enum):
    """A format of numbers in a KV cache or in weights."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def nbytes(self) -> int:
        return _BYTES[self]


_BYTES = {Dtype.FP32: 4, Dtype.FP16: 2, Dtype.BF16: 2, Dtype.FP8: 1}

_NAMES = {
    "fp32": Dtype.FP32,
    "float32": Dtype.FP32,
    "float": Dtype.FP32,
    "fp16": Dtype.FP16,
    "float16": Dtype.FP16,
    "half": Dtype.FP16,
    "bf16": Dtype.BF16,
    "bfloat16": Dtype.BF16,
    "fp8": Dtype.FP8,
    "fp8_e4m3": Dtype.FP8,
    "fp8_e5m2": Dtype.FP8,
    "fp8_inc": Dtype.FP8,
    "float8_e4m3fn": Dtype.FP8,
    "float8_e5m2": Dtype.FP8,
}


def parse_dtype(name: str) -> Dtype:
    """``"torch.bfloat16"`` -> :attr:`Dtype.BF16`.

    Raises:
        SizingError: the format is not known here.
    """
    found = _NAMES.get(name.strip().lower().removeprefix("torch."))
    if found is None:
        known = ", ".join(sorted(_NAMES))
        raise SizingError(f"{name!r} is not a format of numbers known here: {known}")
    return found
