# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV events: their format, and what its own device's events say of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm import envs
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class EventGroup(msgspec.Struct, frozen=True):
    """How KV events name the kind of a KV cache group."""

    kind: str
    window: int | None
    """Tokens of the sliding window."""


class EventMedium(msgspec.Struct, frozen=True):
    """Where subscribers are told that a block lies."""

    name: str
    locality: str = "LOCAL"
    """Seen from the engine that publishes."""


CPU_MEDIUM = EventMedium(MEDIUM_CPU)
DISK_MEDIUM = EventMedium(MEDIUM_STORAGE)


def event_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[EventGroup, ...] | None:
    """Each KV cache group as vLLM's own events describe it; None where KV events are off."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return tuple(
        EventGroup(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
        for spec in specs
    )


def event_extra_keys(request: Request, starts: Iterable[int], block_tokens: int) -> Any:
    """For blocks of a request what went into their hashes beside tokens, one entry a block."""
    keys = [
        generate_block_hash_extra_keys(request, start, start + block_tokens, 0)[0]
        for start in starts
    ]
    return to_event_extra_keys(keys)


def event_origin(request: Request) -> tuple[int | None, str | None, str | None]:
    """``(LoRA id, LoRA name, session id)`` of a request, as its device's events have them."""
    lora = request.lora_request
    if lora is None:
        return None, None, request.session_id
    return lora.adapter_id, lora.name, request.session_id


def block_stored(
    *,
    block_hashes: Sequence[bytes],
    parent: bytes | None,
    token_ids: Sequence[int],
    block_tokens: int,
    extra_keys: Any,
    origin: tuple[int | None, str | None, str | None],
    group_id: int,
    group: EventGroup,
    medium: EventMedium,
) -> BlockStored:
    """The event for consecutive blocks of one KV cache group that have become readable.

    Args:
        parent: hash of the block before; None at the start of a prompt.
        token_ids: all the blocks' tokens.
        block_tokens: tokens a block.
        extra_keys: see :func:`event_extra_keys`.
        origin: see :func:`event_origin`.
    """
    lora_id, lora_name, session_id = origin
    return BlockStored(
        block_hashes=_published(block_hashes),
        parent_block_hash=_published((parent,))[0] if parent is not None else None,
        token_ids=list(token_ids),
        block_size=block_tokens,
        lora_id=lora_id,
        medium=medium.name,
        lora_name=lora_name,
        extra_keys=extra_keys,
        group_idx=group_id,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=group.window,
        locality=medium.locality,
        session_id=session_id,
    )


def block_removed(
    block_hashes: Sequence[bytes], group_id: int, medium: EventMedium
) -> BlockRemoved:
    """The event for blocks of one KV cache group that can no longer be read."""
    return BlockRemoved(
        block_hashes=_published(block_hashes),
        medium=medium.name,
        group_idx=group_id,
        locality=medium.locality,
    )


def _published(block_hashes: Sequence[bytes]) -> list[bytes] | list[int]:
    """Hashes as events have them; vLLM's own conversion asks the environment for each one."""
    if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        return list(block_hashes)
    return [int.from_bytes(block_hash[-8:], "big") for block_hash in block_hashes]
