# SPDX-License-Identifier: Apache-2.0
"""How the bytes of a chunk lie.

A stored chunk can be copied into a page only if everything here is equal.
"""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.identity.canonical import Canonical, digest

FORMAT_VERSION = 1
"""Of the bytes in slots and files; raised when their order within a chunk changes."""


class GroupLayout(msgspec.Struct, frozen=True):
    """One KV cache group."""

    kind: str
    """The class of its spec."""
    block_tokens: int
    page_bytes: int
    """One block of one layer, or of all layers where the spec covers layers that differ."""
    heads: int | None
    """KV heads on one rank; None for states without heads."""
    head_size: int | None
    dtypes: tuple[str, ...]
    window: int | None
    """Tokens of a sliding window."""
    layers: tuple[str, ...]
    """Layer names in order."""
    backends: tuple[str, ...]
    """Attention backend classes of its layers, sorted; empty where none could be told."""
    kernel: str
    """Which of the CPU's attention kernels packs the pages; empty on other devices."""
    spec: Canonical
    """All of the spec's fields, those above included."""


class LayoutIdentity(msgspec.Struct, frozen=True):
    """Everything that decides where a value lies among a chunk's bytes."""

    groups: tuple[GroupLayout, ...]
    chunk_tokens: int
    hash_tokens: int | None
    """Tokens a block hash covers."""
    cache_layout: str
    """vLLM's name of the physical order, such as ``LBHNC``."""
    backend_options: Canonical
    """Options that choose among an attention backend's versions."""
    device: str
    """Platform and compute capability."""
    instruction_set: str
    """Of the processor, on the CPU platform; empty on other devices."""
    tensor_parallel: int
    pipeline_parallel: int
    decode_context_parallel: int
    prefill_context_parallel: int
    context_interleave: int
    """Consecutive tokens that context parallelism keeps on one rank."""
    kv_replicas: int
    """Consecutive tensor-parallel ranks that hold the same bytes."""
    environment: tuple[tuple[str, str], ...]
    """Environment variables that change the layout, where set."""
    format_version: int = FORMAT_VERSION
    rank: int | None = None
    """The rank whose share this is; None for the engine as a whole."""

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return digest("layout", self)
