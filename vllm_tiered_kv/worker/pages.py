# SPDX-License-Identifier: Apache-2.0
"""The device's pages as long as vLLM lets us have them.

Sleep mode takes them away and gives them back. Nobody tells us the tensors a second time, and none
may be kept alive here: vLLM's own are remembered weakly, and asked for their memory anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from vllm_tiered_kv.layout import GroupPages, LayoutError, group_pages


class DevicePages:
    """The pages of one rank, by KV cache group.

    Args:
        group_layers: the layer names of each group.
        num_blocks: device blocks.
    """

    def __init__(self, group_layers: Sequence[Sequence[str]], num_blocks: int) -> None:
        self._group_layers = group_layers
        self._num_blocks = num_blocks
        self._tensors: dict[str, weakref.ref[torch.Tensor]] = {}
        self.groups: tuple[GroupPages, ...] = ()
        """Empty while there are none."""

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """These are the pages, by layer name.

        Raises:
            LayoutError: they are not contiguous.
        """
        found = (
            [tensors[name] for name in layers if name in tensors] for layers in self._group_layers
        )
        self.groups = tuple(
            group_pages(group, self._num_blocks) if group else GroupPages.none(self._num_blocks)
            for group in found
        )
        self._tensors = {name: weakref.ref(tensor) for name, tensor in tensors.items()}

    @property
    def are_on_device(self) -> bool:
        """Whether they lie in a GPU's memory, and not in the host's."""
        return any(row.is_cuda for group in self.groups for row in group.rows)

    def drop(self) -> None:
        """Let go of them. May be called again."""
        self.groups = ()

    def take_again(self) -> None:
        """The pages are there again, wherever they are now.

        Raises:
            LayoutError: a tensor is gone, or is not what it was; vLLM has to register new ones.
        """
        tensors = {name: ref() for name, ref in self._tensors.items()}
        there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if not there or len(there) < len(tensors):
            raise LayoutError(f"{len(tensors) - len(there)} of {len(tensors)} tensors are gone")
        self.take(there)
