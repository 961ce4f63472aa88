# SPDX-License-Identifier: Apache-2.0
"""KV caches in every memory layout that vLLM knows, made without vLLM, and their naive pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
}
"""Memory order of the axes [L, B, H, N, C], for layouts whose pages are one run of bytes."""
SCATTERED = {"LHBNC": (0, 2, 1, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Shape:
    order: tuple[int, ...] = ORDERS["LBHNC"]
    layers: int = 3
    blocks: int = 4
    ratio: int = 1  # kernel blocks in a block
    heads: int = 2
    tokens: int = 2  # in a kernel block
    content: int = 3  # elements of a token and head
    dtype: torch.dtype = torch.bfloat16
    padding: int = 0  # elements after a page (layers outermost) or after a block
    offset: int = 0  # elements before the first page


@dataclass(frozen=True)
class Cache:
    """One group's cache tensors over one buffer of random bytes."""

    shape: Shape
    buffer: torch.Tensor  # uint8
    tensors: list[torch.Tensor]  # [B * ratio, H, N, C] a layer

    @property
    def image_bytes(self) -> int:
        return sum(self.page(layer, 0).numel() for layer in range(self.shape.layers))

    def entries(self, layer: int, block: int) -> torch.Tensor:
        """The logical tensor of one block: what a load has to set, and nothing else."""
        ratio = self.shape.ratio
        return self.tensors[layer][block * ratio : (block + 1) * ratio]

    def page(self, layer: int, block: int) -> torch.Tensor:
        """A copy of a page's bytes in memory order, found through the logical tensor."""
        inside = [axis - 1 for axis in self.shape.order if axis >= 2]
        page = self.entries(layer, block).permute(0, *inside).contiguous()
        return page.flatten().view(torch.uint8)

    def image(self, block: int) -> torch.Tensor:
        return torch.cat([self.page(layer, block) for layer in range(self.shape.layers)])


def make_cache(shape: Shape, seed: int = 0) -> Cache:
    size = shape.dtype.itemsize
    kernel_page = shape.heads * shape.tokens * shape.content
    page = kernel_page * shape.ratio
    extents = (shape.layers, shape.blocks * shape.ratio, shape.heads, shape.tokens, shape.content)
    strides = [0] * 5
    step = 1
    for axis in reversed(shape.order):
        strides[axis] = step
        step *= extents[axis]
        last_inside_block = (
            math.prod(extents[2:]) if shape.order[0] == 0 else math.prod((extents[0], *extents[2:]))
        )
        if shape.padding and step == last_inside_block and axis != 1:
            step += shape.padding
    total = shape.offset + step + page
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randint(0, 256, (total * size,), dtype=torch.uint8, generator=generator)
    typed = buffer.view(shape.dtype)
    whole = typed.as_strided(extents, strides, shape.offset)
    return Cache(shape, buffer, [whole[layer] for layer in range(shape.layers)])


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    name = draw(st.sampled_from(sorted(ORDERS)))
    layers = draw(st.integers(1, 4))
    blocks = draw(st.integers(1, 6))
    # Kernel blocks subdivide a block only where it is dense, as in vLLM.
    dense = name.startswith("LB")
    ratio = draw(st.sampled_from((1, 2, 4))) if dense else 1
    return Shape(
        order=ORDERS[name],
        layers=layers,
        blocks=blocks,
        ratio=ratio,
        heads=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 5)),
        content=draw(st.sampled_from((1, 3, 16, 64))),
        dtype=draw(st.sampled_from(DTYPES)),
        padding=draw(st.sampled_from((0, 1, 16))) if ratio == 1 else 0,
        offset=draw(st.sampled_from((0, 1, 32))),
    )
