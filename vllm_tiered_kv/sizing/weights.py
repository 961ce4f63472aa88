# SPDX-License-Identifier: Apache-2.0
"""How many bytes a model's weights take on the GPUs: read where that can be, else estimated."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec

from vllm_tiered_kv.sizing.dtypes import Dtype
from vllm_tiered_kv.sizing.hf_config import HfConfig
from vllm_tiered_kv.sizing.parameters import Parameters, estimate

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20
MAX_FILES = 10_000

_Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class Weights(msgspec.Struct, frozen=True):
    """Of a model."""

    nbytes: int
    source: str


class _Metadata(msgspec.Struct, frozen=True):
    total_size: _Number | None = None
    total_parameters: _Number | None = None


class _Index(msgspec.Struct, frozen=True):
    metadata: _Metadata | None = None


def find_weights(folder: Path | None) -> Weights | None:
    """What the files in a folder say.

    Args:
        folder: that of ``config.json``; None where there is none.
    """
    if folder is None:
        return None
    index = _read_index(folder / INDEX)
    if index is not None and index.total_size:
        return Weights(int(index.total_size), f"total_size in {INDEX}")
    total = _files_size(folder)
    return Weights(total, "sizes of *.safetensors") if total else None


def find_parameters(folder: Path | None, config: HfConfig) -> Parameters | None:
    """What the index of the weights says, else an estimate, else None.

    An index knows the total alone: those of one token are then the estimate's share of it.
    """
    index = _read_index(folder / INDEX) if folder is not None else None
    estimated = estimate(config)
    if index is None or not index.total_parameters:
        return estimated
    total = int(index.total_parameters)
    share = estimated.active / estimated.total if estimated is not None else 1.0
    return Parameters(total, round(total * share), f"total_parameters in {INDEX}")


def estimate_weights(parameters: Parameters, config: HfConfig, dtype: Dtype) -> Weights:
    """Bytes of parameters in the format that the file names."""
    bits: float = 8 * dtype.nbytes
    of = dtype.value
    quantisation = config.quantization_config
    if quantisation:
        found = _quantised_bits(quantisation)
        method = str(quantisation.get("quant_method") or _modelopts(quantisation))[:40]
        bits, of = (found, method) if found else (bits, f"{of}, though quantised by {method}")
    return Weights(
        int(parameters.total * bits / 8), f"{parameters.total / 1e9:.1f}e9 parameters in {of}"
    )


def _quantised_bits(quantisation: dict[str, Any]) -> float | None:
    """A weight's bits; None where they cannot be told."""
    method = str(quantisation.get("quant_method", "")).lower()
    if method in ("fp8", "fbgemm_fp8"):
        return 8
    if method == "mxfp4":
        return 4.25  # 32 numbers of 4 bits share a scale of 8 bits (OCP MX 1.0)
    algorithm = _modelopts(quantisation)
    if algorithm.startswith("FP8"):
        return 8
    if algorithm == "NVFP4":
        return 4.5  # 16 numbers of 4 bits share a scale of 8 bits
    bits = quantisation.get("bits", quantisation.get("w_bit"))
    if isinstance(bits, int) and 1 <= bits <= 16:
        return bits
    groups = quantisation.get("config_groups")
    if isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            bits = weights.get("num_bits") if isinstance(weights, dict) else None
            if isinstance(bits, int) and 1 <= bits <= 16:
                return bits
    return None


def _modelopts(quantisation: dict[str, Any]) -> str:
    """What ModelOpt calls the way it has quantised them."""
    inner = quantisation.get("quantization")
    return str(inner.get("quant_algo") if isinstance(inner, dict) else "an unknown method")


def _read_index(path: Path) -> _Metadata | None:
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=_Index).metadata
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _files_size(folder: Path) -> int:
    total = 0
    for number, path in enumerate(folder.glob("*.safetensors")):
        if number >= MAX_FILES:
            return 0
        try:
            found = path.stat()
        except OSError:
            return 0
        total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
