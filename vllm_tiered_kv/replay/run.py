# SPDX-License-Identifier: Apache-2.0
"""Replays requests against the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from vllm_tiered_kv.policies import Eviction, Item
from vllm_tiered_kv.policies.admission import Admission
from vllm_tiered_kv.policies.cost import compute_cost
from vllm_tiered_kv.replay.tiers import CpuTier, DiskTier
from vllm_tiered_kv.replay.trace import BLOCK_TOKENS, Request

Observer = Callable[[Request, int, int], None]
"""Told of each request, with its blocks from the CPU tier and those from disk."""


class Settings(msgspec.Struct, frozen=True):
    """The tiers to replay against."""

    cpu_blocks: int
    cpu_eviction: Eviction = Eviction.LRU
    disk_bytes: int = 0
    """0: no disk tier."""
    disk_eviction: Eviction = Eviction.LRU
    min_tokens: int = 0
    store_after: int = 1
    block_tokens: int = BLOCK_TOKENS
    block_bytes: int = 1
    """Of KV; with 1, all that is in bytes is in blocks."""


class Outcome(msgspec.Struct, frozen=True):
    """What was served."""

    requests: int
    blocks: int
    """Blocks asked for; hits are counted until a request's first block that is nowhere."""
    cpu_hits: int
    disk_hits: int
    disk_written: int
    """Bytes."""
    saved: float
    """Of the time to compute all prompts, 0 to 1, by :func:`~.policies.cost.compute_cost`."""

    @property
    def hit_rate(self) -> float:
        """Of both tiers together, 0 to 1."""
        return (self.cpu_hits + self.disk_hits) / self.blocks if self.blocks else 0.0


def replay(
    requests: Iterable[Request], settings: Settings, observe: Observer | None = None
) -> Outcome:
    """Serve requests one after another, each as if it had ended before the next one came.

    A block is taken from the CPU tier, else from disk, up to the first that is in neither; from
    there on the prompt is computed. All of it is then stored in the CPU tier, what came from disk
    as well, and what the CPU tier holds is written to disk by the admission rule.
    """
    cpu = CpuTier(settings.cpu_blocks, settings.cpu_eviction, settings.block_tokens)
    disk: DiskTier | None = None
    if settings.disk_bytes:
        admission = Admission(settings.min_tokens, settings.store_after)
        disk = DiskTier(
            settings.disk_bytes,
            settings.block_bytes,
            settings.block_tokens,
            settings.disk_eviction,
            admission,
        )
    count = blocks = cpu_hits = disk_hits = 0
    costs = _Costs(settings.block_tokens)
    saved = total = 0.0
    for request in requests:
        keys = [block.to_bytes(8, "little") for block in request.hash_ids]
        count += 1
        blocks += len(keys)
        from_cpu = from_disk = 0
        for key in keys:
            if key in cpu:
                from_cpu += 1
            elif disk is not None and key in disk:
                from_disk += 1
            else:
                break
        cpu_hits += from_cpu
        disk_hits += from_disk
        if observe is not None:
            observe(request, from_cpu, from_disk)
        saved += costs.of_first(from_cpu + from_disk)
        total += costs.of_first(len(keys))
        kept = cpu.take_in(keys)
        if disk is not None:
            disk.take_in(keys[:kept])
    written = disk.written if disk is not None else 0
    return Outcome(count, blocks, cpu_hits, disk_hits, written, saved / total if total else 0.0)


class _Costs:
    """What the first blocks of a prompt cost to compute."""

    def __init__(self, block_tokens: int) -> None:
        self._tokens = block_tokens
        self._sums = [0.0]

    def of_first(self, blocks: int) -> float:
        sums = self._sums
        while len(sums) <= blocks:
            item = Item(tokens=self._tokens, position=len(sums) - 1)
            sums.append(sums[-1] + compute_cost(item))
        return sums[blocks]
