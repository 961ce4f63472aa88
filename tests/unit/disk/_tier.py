# SPDX-License-Identifier: Apache-2.0
"""A disk tier over a folder that is a dict: its orders and chores wait until a test does them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_tiered_kv.policies.lru import LRU
from vllm_tiered_kv.tiers.disk.active import Ended
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.chores import (
    Chore,
    Measure,
    Measured,
    News,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Remove,
    Removed,
    Scan,
    ScanEnded,
    ScanPiece,
    Trouble,
)
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.entries import FileName, FoundFile
from vllm_tiered_kv.tiers.disk.format import HEADER_BYTES, ChunkFacts
from vllm_tiered_kv.tiers.disk.orders import (
    Order,
    OrderResult,
    Outcome,
    Part,
    RankReport,
    ReadOrder,
    WriteOrder,
)
from vllm_tiered_kv.tiers.disk.settings import ENTRY_BYTES, FOLDER_BYTES, TierSettings
from vllm_tiered_kv.tiers.disk.tier import DiskTier

OWN = "own"
FILE = 8192
ROOM = 24
"""Files that the folder holds."""


def key_of(number: int) -> bytes:
    return bytes([number]) * 8


def facts(index: int = 0) -> ChunkFacts:
    return ChunkFacts((), 1, index, 16)


def settings(ranks: int = 1, groups: int = 1, **changes: Any) -> TierSettings:
    room = ROOM * (FILE + ENTRY_BYTES) + FOLDER_BYTES * ranks
    usual = TierSettings(
        root="/nowhere",
        capacity=room,
        high_water=0.999,
        low_water=0.992,
        min_free=0,
        shared=False,
        io_deadline=10.0,
        ranks=ranks,
        file_bytes=(FILE,) * groups,
        max_queued=8,
    )
    return msgspec.structs.replace(usual, **changes)


class Bench:
    """The tier, what it has said, and the files there are."""

    def __init__(self, ranks: int = 1, groups: int = 1, **changes: Any) -> None:
        self.settings = settings(ranks, groups, **changes)
        self.now = 1000.0
        self.disk: dict[FileName, int] = {}
        self.sent: list[deque[Order]] = [deque() for _ in range(ranks)]
        self.chores: deque[Chore] = deque()
        self.news: deque[News] = deque()
        self.ended: Counter[int] = Counter()
        self.outcomes: dict[int, Outcome] = {}
        self.troubles: Counter[str] = Counter()
        self.unreachable: set[int] = set()
        self.takes_chores = True
        self.free = 1 << 40
        self.full = False
        self.purges = 0
        self.written_after: dict[FileName, int] = {}
        """How many purges there had been when a file was written here."""
        usual = (FILE - HEADER_BYTES,) * groups
        self.part_bytes_of = dict.fromkeys(range(ranks), usual)
        """By rank and KV cache group; 0 where it has no layer of the group."""
        self.catalogue = Catalogue(ranks, LRU(), 16)
        self.tier = DiskTier(
            self.settings,
            self.catalogue,
            send=self._send,
            ask=self._ask,
            tell=self._tell,
            trouble=lambda kind, _: self.troubles.update([kind]),
            clock=lambda: self.now,
        )
        self._jobs = 0
        self.wanted: set[int] = set()
        self.writes: set[int] = set()
        self._ordered_after: dict[int, int] = {}
        self.reads: set[int] = set()

    def _send(self, rank: int, orders: Sequence[Order]) -> bool:
        if rank in self.unreachable:
            return False
        self.sent[rank].extend(orders)
        return True

    def _ask(self, chore: Chore) -> bool:
        if self.takes_chores:
            self.chores.append(chore)
        return self.takes_chores

    def _tell(self, ended: Ended) -> None:
        self.ended[ended.job] += 1
        self.outcomes[ended.job] = ended.outcome

    # -- the scheduler half ------------------------------------------------------------

    def open(self) -> Bench:
        """Until the ranks know the folder."""
        self.tier.open(OWN, {})
        self.keep()
        self.connect()
        assert self.tier.is_readable
        for sent in self.sent:
            sent.clear()
        return self

    def connect(self, ranks: int | None = None) -> None:
        """So many ranks, or all, have said hello."""
        count = self.settings.ranks if ranks is None else ranks
        self.tier.connected({rank: self.part_bytes_of[rank] for rank in range(count)})

    def write(self, key: bytes, groups: Sequence[int] = (0,), index: int = 0) -> int:
        job = self._number()
        parts = tuple(Part(group, job) for group in groups)
        self.writes.add(job)
        self._ordered_after[job] = self.purges
        self.tier.want_write(WriteOrder(job, key, parts, facts(index), 0))
        return job

    def read(self, key: bytes, groups: Sequence[int] = (0,), patience: float = 5.0) -> int:
        job = self._number()
        parts = tuple(Part(group, job) for group in groups)
        self.reads.add(job)
        self.tier.want_reads([ReadOrder(job, key, parts, patience)])
        return job

    def purge(self) -> None:
        """What has been written, and what is being written, may be wrong."""
        self.purges += 1
        self.tier.purge()

    def _known_purges(self, order: WriteOrder) -> int:
        return self._ordered_after[order.job]

    def look_for(self, keys: Sequence[bytes]) -> int:
        job = self._number()
        self.tier.look_for(job, keys)
        return job

    def _number(self) -> int:
        self._jobs += 1
        self.wanted.add(self._jobs)
        return self._jobs

    # -- a rank ------------------------------------------------------------------------

    def orders(self, rank: int = 0) -> list[Order]:
        return [o for o in self.sent[rank] if isinstance(o, ReadOrder | WriteOrder)]

    def do(self, rank: int, order: Order, outcome: Outcome = Outcome.DONE, done: int = 99) -> Any:
        """What a rank answers: the first ``done`` parts go well, then comes the outcome."""
        assert isinstance(order, ReadOrder | WriteOrder)
        self.sent[rank].remove(order)
        names = [FileName(OWN, rank, part.group, order.key) for part in order.parts]
        sizes = [FILE if self.part_bytes_of[rank][name.group] else 0 for name in names]
        if outcome is not Outcome.DONE:
            names = names[: min(done, len(names) - 1)]
        if outcome is Outcome.DROPPED:
            return OrderResult(order.job, outcome)
        if isinstance(order, WriteOrder):
            real = [name for name, size in zip(names, sizes, strict=False) if size]
            new = [name for name in real if name not in self.disk]
            self.disk.update(dict.fromkeys(real, FILE))
            self.written_after.update(dict.fromkeys(new, self._known_purges(order)))
            made = FILE * len(new) if outcome is Outcome.DONE else 0
            return OrderResult(order.job, outcome, made, tuple(sizes[: len(names)]))
        there = 0
        for name, size in zip(names, sizes, strict=False):
            if size and name not in self.disk:
                return OrderResult(order.job, Outcome.MISSING, 0, tuple(sizes[:there]))
            there += 1
        if outcome in (Outcome.DAMAGED, Outcome.MISSING):
            bad = FileName(OWN, rank, order.parts[there].group, order.key)
            self.disk.pop(bad, None)
        return OrderResult(order.job, outcome, 0, tuple(sizes[:there]))

    def answer(self, order: Order, outcome: Outcome = Outcome.DONE, rank: int = 0) -> None:
        self.tier.report(RankReport(rank, (self.do(rank, order, outcome),)))

    def serve(self) -> None:
        """Every rank does all it has been told."""
        for rank in range(self.settings.ranks):
            for order in self.orders(rank):
                self.answer(order, rank=rank)

    # -- the keeper --------------------------------------------------------------------

    def keep(self, stuck: Sequence[FileName] = ()) -> None:
        """Do all chores, also those that come of them."""
        while self.chores:
            self.do_chore(stuck)

    def do_chore(self, stuck: Sequence[FileName] = ()) -> None:
        self.begin_chore(stuck)
        self.hear()

    def hear(self) -> None:
        """Let the tier know what the keeper has done."""
        while self.news:
            self.tier.news(self.news.popleft())

    def begin_chore(self, stuck: Sequence[FileName] = ()) -> None:
        """Do a chore; the tier does not know of it yet."""
        chore = self.chores.popleft()
        news = self.news.append
        match chore:
            case Prepare():
                news(Measured(self.free))
                news(Prepared(IoMode.BUFFERED, self.full))
            case Scan():
                found = [FoundFile(name, size, 7) for name, size in self.disk.items()]
                news(ScanPiece(found))
                news(ScanEnded(0, 0.1, 0))
            case Remove():
                gone = [name for name in chore.files if name not in stuck]
                for name in gone:
                    self.disk.pop(name, None)
                news(Removed(gone, [name for name in chore.files if name in stuck]))
            case Probe():
                there = [n for n in chore.files if n in self.disk]
                news(Probed(chore.job, [FoundFile(n, self.disk[n], 7) for n in there]))
            case Measure():
                news(Measured(self.free))

    def skip_to(self, kind: type[Any]) -> None:
        """Do chores until one of this kind, which is taken away."""
        while not isinstance(self.chores[0], kind):
            self.do_chore()
        self.chores.popleft()

    def fail_chore(self, reason: str = "io") -> None:
        self.news.append(Trouble(self.chores.popleft(), reason))
        self.hear()

    def later(self, seconds: float, keeper_busy_for: float = 0.0) -> None:
        self.now += seconds
        self.tier.tick(keeper_busy_for)


def name(number: int, namespace: str = OWN, rank: int = 0, group: int = 0) -> FileName:
    return FileName(namespace, rank, group, key_of(number))


def written(bench: Bench, *numbers: int) -> None:
    for number in numbers:
        bench.write(key_of(number))
        bench.serve()
        bench.keep()
