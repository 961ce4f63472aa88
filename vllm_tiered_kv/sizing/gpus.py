# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: peak rates and memory as their makers publish them.

Rates are dense ones; datasheets print twice as much "with sparsity", which a prefill does not have.
GB are 10**9 bytes; drivers show up to 7% more on some.
"""

from __future__ import annotations

import enum
import re
from types import MappingProxyType

import msgspec

from vllm_tiered_kv.sizing.errors import SizingError


class Precision(enum.Enum):
    """The format of the numbers that are multiplied."""

    BF16 = "bf16"
    FP8 = "fp8"


class Gpu(msgspec.Struct, frozen=True):
    """One GPU."""

    name: str
    memory: int
    """Bytes."""
    bf16_flops: float
    """Operations a second at most."""
    fp8_flops: float | None
    """None where there is no such unit."""
    source: str

    def peak(self, precision: Precision) -> tuple[float, Precision]:
        """Operations a second, and the format in which they are reached."""
        if precision is Precision.FP8 and self.fp8_flops is not None:
            return self.fp8_flops, Precision.FP8
        return self.bf16_flops, Precision.BF16


def _gpu(name: str, gb: int, bf16: float, fp8: float | None, source: str) -> Gpu:
    return Gpu(name, gb * 10**9, bf16 * 1e12, None if fp8 is None else fp8 * 1e12, source)


GPUS = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            _gpu("a10", 24, 125, None, "NVIDIA A10 datasheet"),
            _gpu("a100", 80, 312, None, "NVIDIA A100 80GB datasheet"),
            _gpu("a100-40gb", 40, 312, None, "NVIDIA A100 40GB datasheet"),
            _gpu("b200", 180, 2250, 4500, "NVIDIA HGX B200 datasheet"),
            _gpu("h100", 80, 989.5, 1979, "NVIDIA H100 SXM datasheet"),
            _gpu("h100-nvl", 94, 835.5, 1671, "NVIDIA H100 NVL datasheet"),
            _gpu("h100-pcie", 80, 756, 1513, "NVIDIA H100 PCIe datasheet"),
            _gpu("h200", 141, 989.5, 1979, "NVIDIA H200 SXM datasheet"),
            _gpu("l4", 24, 121, 242.5, "NVIDIA L4 datasheet"),
            _gpu("l40s", 48, 362, 733, "NVIDIA L40S datasheet"),
            _gpu("mi300x", 192, 1307.4, 2614.9, "AMD Instinct MI300X datasheet"),
            _gpu("mi325x", 256, 1307.4, 2614.9, "AMD Instinct MI325X datasheet"),
        )
    }
)


_SAYS_NOTHING = re.compile(r"nvidia|amd|instinct|sxm\d?|hbm\d\w?|80gb|oam")
"""Words of longer names that the shorter ones do without."""
_OTHERWISE = MappingProxyType({"a100-pcie": "a100", "a100-pcie-40gb": "a100-40gb"})


def find_gpu(name: str) -> Gpu:
    """``"H100"``, ``"NVIDIA H100 NVL"``, also as nvidia-smi prints it -> the GPU.

    Raises:
        SizingError: it is not in the table.
    """
    words = re.split(r"[\s_-]+", name.strip().lower())
    key = "-".join(word for word in words if _SAYS_NOTHING.fullmatch(word) is None)
    key = _OTHERWISE.get(key, key)
    if key not in GPUS:
        raise SizingError(
            f"{name!r} is not a GPU known here: {', '.join(GPUS)}; give --peak-flops and --memory"
        )
    return GPUS[key]
