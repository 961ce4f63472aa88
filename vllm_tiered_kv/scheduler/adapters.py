# SPDX-License-Identifier: Apache-2.0
"""Which LoRA weights a request's KV stands for.

vLLM's block hashes hold an adapter's name and path, not its content, so the content's digest
becomes a part of our keys. The ranks tell it: they digest what they have loaded. Until all of
them have, a look-up waits a moment, and a request that goes on without is neither loaded for
nor stored.

The device's own prefix cache knows names and paths only. Once blocks of two contents may lie
in it under one name and path (a **mixed** alias), a request that found a beginning there is
left alone: its KV may stand for both.

What is followed is bounded. An adapter that is in no rank's memory may be **forgotten** for
another one. Nobody then watches what vLLM computes with it, should it come back, so its aliases
are taken for mixed from then on, also those that are forgotten with it.
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from collections.abc import Sized

import msgspec

from vllm_tiered_kv.identity.adapter import DIGEST_BYTES
from vllm_tiered_kv.protocol import AdapterReport, AdapterState, AdapterUse

MAX_ADAPTERS = 4096
"""Numbers, and pairs of name and path, that are followed at once."""
FORGOTTEN_BITS = 1 << 20


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
    NO_ROOM = "no room"  # too many others are loaded


Names = tuple[str, str]


class _Forgotten:
    """Names and paths that are no longer followed: a bit for each, in fixed memory.

    Who shares another one's bit is taken for forgotten too; who is forgotten is never missed.
    """

    def __init__(self) -> None:
        self._bits = bytearray(FORGOTTEN_BITS // 8)

    def add(self, names: Names) -> None:
        place, bit = self._place(names)
        self._bits[place] |= bit

    def __contains__(self, names: Names) -> bool:
        place, bit = self._place(names)
        return bool(self._bits[place] & bit)

    def clear(self) -> None:
        self._bits = bytearray(FORGOTTEN_BITS // 8)

    def _place(self, names: Names) -> tuple[int, int]:
        number = hash(names) % FORGOTTEN_BITS
        return number >> 3, 1 << (number & 7)


class _Alias:
    """A name and path: what vLLM's device cache tells adapters apart by."""

    __slots__ = ("content", "doubts", "mixed", "names", "users")

    def __init__(self, names: Names, *, mixed: bool) -> None:
        self.names = names
        self.users = 0
        """Adapters that are followed and have it."""
        self.content: bytes | None = None
        """The only content it ever stood for, as far as is known."""
        self.mixed = mixed
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
        """By rank: up to which generation, of those seen, nothing was used undigested."""
        self.content: Content | None = None
        self.tainted = False
        """Was loaded in place."""

    @property
    def is_awaited(self) -> bool:
        """Whether its content is not known and will be in a moment."""
        if self.content is not None or self.tainted:
            return False
        return not any(rank.state in _GONE for rank in self.ranks.values())

    def is_idle(self, world_size: int) -> bool:
        """Whether nothing is kept of it as things are: no rank has it, or none can tell it."""
        if self.tainted:
            return True
        return len(self.ranks) == world_size and all(r.state in _GONE for r in self.ranks.values())


_GONE = (AdapterState.OPAQUE, AdapterState.ABSENT)


class AdapterTable:
    """What the ranks have said about adapters. Scheduler thread only.

    Args:
        world_size: ranks that must agree before a content is known.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._adapters: dict[int, _Adapter] = {}
        self._aliases: dict[Names, _Alias] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Adapters that may be forgotten, the least recently used first."""
        self._forgotten = _Forgotten()
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
        followed = self._follow(lora)
        if followed is None:
            return Verdict.NO_ROOM
        alias, adapter = followed
        if lora.in_place and not adapter.tainted:
            adapter.tainted = True
            adapter.content = None
            self._idle[lora.adapter] = None
            self._unwatch(lora.adapter)
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
        # A rank counts on from where it was when the adapter was forgotten.
        seen = report.state in (AdapterState.KNOWN, AdapterState.DIGESTING)
        adapter.known_generation.setdefault(rank, report.generation - seen)
        if known:
            if report.generation > adapter.known_generation[rank] + 1:
                # Replaced before it was digested: what was computed with it is unknown.
                for alias in adapter.aliases:
                    alias.mixed = True
            adapter.known_generation[rank] = report.generation
        adapter.ranks[rank] = _Rank(report.generation, report.state, report.digest)
        adapter.content = self._content(report.adapter, adapter)
        if not adapter.is_idle(self._world_size):
            self._idle.pop(report.adapter, None)
        elif report.adapter not in self._idle:
            self._idle[report.adapter] = None
        for alias in adapter.aliases:
            if adapter.content is not None:
                if report.adapter in alias.doubts:
                    alias.doubts.discard(report.adapter)
                    alias.note(adapter.content.digest)
            elif report.state is not AdapterState.ABSENT:
                alias.doubts.add(report.adapter)

    def is_current(self, content: Content) -> bool:
        """Whether all ranks still have just these weights, as far as they have said."""
        if content.use is None:
            return True
        adapter = self._adapters.get(content.use.adapter)
        return adapter is not None and adapter.content == content

    def device_emptied(self) -> None:
        """The device's cache holds no block any more, so no alias is mixed."""
        for alias in self._aliases.values():
            alias.mixed = False
            alias.content = None
            alias.doubts.clear()
        self._forgotten.clear()

    def _follow(self, lora: LoraName) -> tuple[_Alias, _Adapter] | None:
        number, names = lora.adapter, (lora.name, lora.path)
        if number in self._idle:
            self._idle.move_to_end(number)
        has_room = number in self._adapters or self._make_room(self._adapters)
        if not has_room or not (names in self._aliases or self._make_room(self._aliases)):
            # It is computed all the same, with what nobody has looked at.
            if (known := self._aliases.get(names)) is not None:
                known.mixed = True
            else:
                self._forgotten.add(names)
            return None
        adapter = self._adapters.get(number)
        if adapter is None:
            adapter = self._adapters[number] = _Adapter()
            self.watch.append(number)
        alias = self._aliases.get(names)
        if alias is None:
            alias = self._aliases[names] = _Alias(names, mixed=names in self._forgotten)
        if alias not in adapter.aliases:
            adapter.aliases.append(alias)
            alias.users += 1
        return alias, adapter

    def _make_room(self, table: Sized) -> bool:
        """Whether one more may be followed, once adapters nobody uses have been forgotten."""
        while len(table) >= MAX_ADAPTERS:
            if not self._idle:
                return False
            number, _ = self._idle.popitem(last=False)
            self._forget(number)
        return True

    def _forget(self, number: int) -> None:
        adapter = self._adapters.pop(number)
        if not adapter.tainted:
            self._unwatch(number)
        for alias in adapter.aliases:
            # A request that still has the number may be computed with other weights next.
            alias.mixed = True
            alias.doubts.discard(number)
            alias.users -= 1
            if not alias.users:
                del self._aliases[alias.names]
                self._forgotten.add(alias.names)

    def _unwatch(self, number: int) -> None:
        if number in self.watch:
            self.watch.remove(number)
        else:
            self.unwatch.append(number)

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
