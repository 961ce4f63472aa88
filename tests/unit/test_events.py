# SPDX-License-Identifier: Apache-2.0
"""Our events say of a chunk what vLLM's own say of the same blocks on the device."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests._kv_subscriber import CPU, Clears, Subscriber
from vllm_tiered_kv import compat
from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.scheduler.event_log import RemovedPart, StoredChunk
from vllm_tiered_kv.scheduler.events import EventConverter

HASH = 16
CHUNK = 64
GROUPS = (compat.EventGroup("full_attention", None), compat.EventGroup("sliding_window", 40))


def request(tokens: int = 300, **options: Any) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id="r",
        prompt_token_ids=list(range(7, 7 + tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(HASH, sha256),
        **options,
    )


def geometry(*block_tokens: int) -> Geometry:
    kinds = (GroupKind.FULL, GroupKind.WINDOW)
    groups = tuple(GroupGeometry(k, n, 64) for k, n in zip(kinds, block_tokens, strict=False))
    return Geometry(CHUNK, HASH, groups)


def device_events(of: Request, block_tokens: int, group: int, chunk: int) -> list[Any]:
    """What vLLM publishes when it enters the blocks of one chunk in its prefix cache."""
    pool = BlockPool(64, True, HASH, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(of.num_tokens // block_tokens)
    first, stop = chunk * CHUNK // block_tokens, (chunk + 1) * CHUNK // block_tokens
    pool.cache_full_blocks(of, blocks, first, stop, block_tokens, group)
    return pool.take_events()


@pytest.mark.parametrize("as_int", ["0", "1"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_salt": "salt"},
        {"lora_request": LoRARequest("adapter", 3, "/adapter")},
        {"session_id": "session"},
    ],
    ids=["plain", "salted", "adapter", "session"],
)
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_stored_chunk_reads_like_the_devices_own_blocks(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], chunk: int, as_int: str
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_int)
    of = request(**options)
    sizes = (16, 32)
    converter = EventConverter(geometry(*sizes), GROUPS)
    ours = converter.stored(StoredChunk(converter.facts(of, chunk), 0b11), compat.CPU_MEDIUM)
    for group, event in enumerate(ours):
        [theirs] = device_events(of, sizes[group], group, chunk)
        # vLLM's cache manager adds the kind to its own events later; the rest is where it lies.
        theirs.kv_cache_spec_kind = GROUPS[group].kind
        theirs.kv_cache_spec_sliding_window = GROUPS[group].window
        theirs.medium, theirs.locality = "CPU", "LOCAL"
        assert event == theirs


def test_of_a_state_only_the_last_block_of_a_chunk_is_named() -> None:
    of = request()
    group = GroupGeometry(GroupKind.STATE, 16, 64)
    converter = EventConverter(Geometry(CHUNK, HASH, (group,)), [compat.EventGroup("mamba", None)])
    facts = converter.facts(of, 1)
    [ours] = converter.stored(StoredChunk(facts, 1), compat.CPU_MEDIUM)
    pool = BlockPool(64, True, HASH, enable_kv_cache_events=True)
    pool.cache_full_blocks(of, pool.get_new_blocks(8), 7, 8, 16, 0)
    [theirs] = pool.take_events()
    theirs.kv_cache_spec_kind, theirs.medium, theirs.locality = "mamba", "CPU", "LOCAL"
    assert ours == theirs
    for kept in (0, 2):
        [gone] = converter.removed([RemovedPart(facts.hashes, 0, kept)], compat.CPU_MEDIUM)
        assert gone.block_hashes == ours.block_hashes
    assert not converter.removed([RemovedPart(facts.hashes, 0, 4)], compat.CPU_MEDIUM)


def test_only_groups_that_have_a_part_are_named() -> None:
    converter = EventConverter(geometry(16, 16), GROUPS)
    facts = converter.facts(request(), 1)
    for groups in (0b01, 0b10, 0b11):
        events = converter.stored(StoredChunk(facts, groups), compat.DISK_MEDIUM)
        assert sum(1 << event.group_idx for event in events) == groups
        assert {event.medium for event in events} == {"STORAGE"}
    removed = converter.removed(
        [RemovedPart(facts.hashes, 1), RemovedPart(facts.hashes, 0, kept=3)], compat.CPU_MEDIUM
    )
    assert [(e.group_idx, len(e.block_hashes)) for e in removed] == [(1, 4), (0, 1)]
    assert removed[1].block_hashes == removed[0].block_hashes[3:]


def test_a_removal_names_what_was_stored() -> None:
    converter = EventConverter(geometry(16, 64), GROUPS)
    subscriber = Subscriber(Clears.EVERYTHING)
    of = request()
    for chunk in range(4):
        facts = converter.facts(of, chunk)
        subscriber.apply(converter.stored(StoredChunk(facts, 0b11), compat.CPU_MEDIUM))
    for group, size in enumerate((16, 64)):
        assert len(subscriber.held(CPU, group)) == 4 * CHUNK // size
    lengths = [len(subscriber.prefix(b, 1)) for b in subscriber.held(CPU, 1)]
    assert sorted(lengths) == [64, 128, 192, 256]
    parts = [RemovedPart(converter.facts(of, c).hashes, g) for c in range(4) for g in (0, 1)]
    subscriber.apply(converter.removed(parts, compat.CPU_MEDIUM))
    assert not subscriber.held(CPU, 0)
    assert not subscriber.held(CPU, 1)
