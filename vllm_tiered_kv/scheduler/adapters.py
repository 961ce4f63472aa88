# SPDX-License-Identifier: Apache-2.0
"""Which LoRA weights a request's KV stands for.

vLLM's block hashes hold an adapter's name and path, not its content, so the content's digest
becomes a part of our keys. The ranks tell it: they digest what they have loaded. Until all of
them have, a look-up waits a moment, and a request that goes on without is neither loaded for
nor stored.

The device's own prefix cache knows names and paths only. Once blocks of two contents may lie
in it under one name and path (a **mixed** alias), a request that found a beginning there is
left alone: its KV may stand for both.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

from vllm_tiered_kv.identity.adapter import DIGEST_BYTES
from vllm_tiered_kv.protocol import AdapterReport, AdapterState, AdapterUse

MAX_ADAPTERS = 4096
"""Numbers, and pairs of name and path, that are followed; requests with others are computed."""


class LoraName(msgspec.Struct, frozen=True):
    """What a request says about its adapter."""

    adapter: int
    """The number the ranks know it by."""
    name: str
    path: str
    in_place: bool
    """vLLM reads the files of such an adapter again in every step."""


class Content(msgspec.Struct, frozen=True):
    """The weights a request is computed with."""

    digest: bytes
    """Goes into the keys of its chunks; empty without an adapter."""
    use: AdapterUse | None
    """Goes out with its jobs."""


BASE_MODEL = Content(b"", None)


class Verdict(enum.Enum):
    """Why there is no content to go by."""

    ASK_AGAIN = "ask again"  # being digested
    GO_WITHOUT = "go without"  # not known in time to come
    NEVER = "never"  # may change under the request, or has


class _Alias:
    """A name and path: what vLLM's device cache tells adapters apart by."""

    __slots__ = ("content", "doubts", "mixed")

    def __init__(self) -> None:
        self.content: bytes | None = None
        """The only content it ever stood for, as far as is known."""
        self.mixed = False
        self.doubts: set[int] = set()
        """Adapters of this alias that may have computed with what is not yet known."""

    def note(self, content: bytes) -> None:
        if self.content is None:
            self.content = content
        elif self.content != content:
            self.mixed = True


class _Rank(msgspec.Struct, frozen=True):
    generation: int
    state: AdapterState
    digest: bytes


class _Adapter:
    """A number."""

    __slots__ = ("aliases", "content", "known_generation", "ranks", "tainted")

    def __init__(self) -> None:
        self.aliases: list[_Alias] = []
        self.ranks: dict[int, _Rank] = {}
        self.known_generation: dict[int, int] = {}
        """By rank: up to which generation nothing was used without being digested."""
        self.content: Content | None = None
        self.tainted = False
        """Was loaded in place."""

    @property
    def is_awaited(self) -> bool:
        """Whether its content is not known and will be in a moment."""
        if self.content is not None or self.tainted:
            return False
        states = {rank.state for rank in self.ranks.values()}
        return not states & {AdapterState.OPAQUE, AdapterState.ABSENT}


class AdapterTable:
    """What the ranks have said about adapters. Scheduler thread only.

    Args:
        world_size: ranks that must agree before a content is known.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._adapters: dict[int, _Adapter] = {}
        self._aliases: dict[tuple[str, str], _Alias] = {}
        self.watch: list[int] = []
        """For the next plan."""
        self.unwatch: list[int] = []
        """For the next plan."""

    def look(self, lora: LoraName, computed: int) -> Content | Verdict:
        """What a request's KV stands for, asked before any of it is computed.

        Args:
            lora: the request's adapter.
            computed: tokens of it that the device's own cache holds already.
        """
        alias, adapter = self._follow(lora)
        if alias is None:
            return Verdict.NEVER
        if adapter is None:
            alias.mixed = True
            return Verdict.NEVER
        if lora.in_place and not adapter.tainted:
            adapter.tainted = True
            adapter.content = None
            self.unwatch.append(lora.adapter)
        if adapter.tainted:
            for each in adapter.aliases:
                each.mixed = True
            return Verdict.NEVER
        if adapter.content is None:
            return Verdict.ASK_AGAIN if adapter.is_awaited else Verdict.GO_WITHOUT
        alias.note(adapter.content.digest)
        if computed and alias.mixed:
            return Verdict.NEVER
        if computed and alias.doubts:
            # What was unloaded before it was digested will never be known.
            awaited = any(self._adapters[number].is_awaited for number in alias.doubts)
            return Verdict.ASK_AGAIN if awaited else Verdict.GO_WITHOUT
        return adapter.content

    def went_without(self, lora: LoraName) -> None:
        """A request is computed with weights nobody can name yet."""
        alias = self._aliases.get((lora.name, lora.path))
        adapter = self._adapters.get(lora.adapter)
        if alias is not None and adapter is not None and adapter.content is None:
            alias.doubts.add(lora.adapter)

    def report(self, rank: int, report: AdapterReport) -> None:
        """Take in what a rank has seen."""
        adapter = self._adapters.get(report.adapter)
        if adapter is None or adapter.tainted or not 0 <= rank < self._world_size:
            return
        known = report.state is AdapterState.KNOWN
        if known and len(report.digest) != DIGEST_BYTES:
            return
        if known:
            if report.generation > adapter.known_generation.get(rank, 0) + 1:
                # Replaced before it was digested: what was computed with it is unknown.
                for alias in adapter.aliases:
                    alias.mixed = True
            adapter.known_generation[rank] = report.generation
        adapter.ranks[rank] = _Rank(report.generation, report.state, report.digest)
        adapter.content = self._content(report.adapter, adapter)
        for alias in adapter.aliases:
            if adapter.content is not None:
                if report.adapter in alias.doubts:
                    alias.doubts.discard(report.adapter)
                    alias.note(adapter.content.digest)
            elif report.state is not AdapterState.ABSENT:
                alias.doubts.add(report.adapter)

    def device_emptied(self) -> None:
        """The device's cache holds no block any more, so no alias is mixed."""
        for alias in self._aliases.values():
            alias.mixed = False
            alias.content = None
            alias.doubts.clear()

    def _follow(self, lora: LoraName) -> tuple[_Alias | None, _Adapter | None]:
        names = (lora.name, lora.path)
        alias = self._aliases.get(names)
        if alias is None and len(self._aliases) < MAX_ADAPTERS:
            alias = self._aliases[names] = _Alias()
        adapter = self._adapters.get(lora.adapter)
        if adapter is None and len(self._adapters) < MAX_ADAPTERS:
            adapter = self._adapters[lora.adapter] = _Adapter()
            self.watch.append(lora.adapter)
        if alias is not None and adapter is not None and alias not in adapter.aliases:
            adapter.aliases.append(alias)
        return alias, adapter

    def _content(self, number: int, adapter: _Adapter) -> Content | None:
        """All ranks' digests in one; a rank may hold a part of the adapter only."""
        ranks = [adapter.ranks.get(rank) for rank in range(self._world_size)]
        hasher = hashlib.sha256()
        generations = []
        for rank in ranks:
            if rank is None or rank.state is not AdapterState.KNOWN:
                return None
            hasher.update(rank.digest)
            generations.append(rank.generation)
        return Content(hasher.digest(), AdapterUse(number, tuple(generations)))
