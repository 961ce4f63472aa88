# SPDX-License-Identifier: Apache-2.0
"""The object tier under anything that may happen, in any order; its folder is a dict."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from tests.unit.objects._rig import HOME, HostMemory, file_of, object_id
from vllm_tiered_kv.policies.lru import LRU
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
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.format import Reason, file_bytes
from vllm_tiered_kv.tiers.disk.results import Read, ReadStatus, WriteStatus, Written
from vllm_tiered_kv.tiers.disk.settings import ENTRY_BYTES, FOLDER_BYTES, TierSettings
from vllm_tiered_kv.tiers.disk.survey import PAGE
from vllm_tiered_kv.tiers.objects.holds import LOCK_LIFE
from vllm_tiered_kv.tiers.objects.tasks import Delete, Ended, Kind, LookUp, Part, Wanted
from vllm_tiered_kv.tiers.objects.tier import ObjectTier

NBYTES = 5000
FILE = file_bytes(NBYTES)
ROOM = 12
"""Files that the folder holds."""
NUMBERS = 20
NAMESPACE_BYTES = 2 * PAGE
"""Of a namespace without files: its folder, and the file that says what it is."""
FOLDERS = NAMESPACE_BYTES + FOLDER_BYTES
"""What the namespace of the objects takes besides their files."""
NEW_FOLDERS = NUMBERS * PAGE
"""What may be taken to be folders made since a scan."""


class World:
    """The tier and all around it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.refuses = 0.01
        """How often the keeper has too many chores."""
        self.trouble_rate = self.chance.choice([0.0, 0.01, 0.05])
        self.disk: dict[FileName, int] = {file_of(0): FILE}
        self.other = NAMESPACE_BYTES + FOLDERS
        """Bytes that lie there besides files of objects."""
        self.chores: deque[Chore] = deque()
        self.said: deque[News] = deque()
        self.parts: list[Part] = []
        self.results: list[tuple[Part, Written | Read | None]] = []
        self.asked: set[int] = set()
        self.ended_tasks: dict[int, Ended] = {}
        self.told: dict[FileName, int] = {}
        self.locks: dict[int, float] = {}
        self.deletes: list[Delete] = []
        room = ROOM * (FILE + ENTRY_BYTES) + NEW_FOLDERS
        self.capacity = room + FOLDER_BYTES + NAMESPACE_BYTES + FOLDERS
        settings = TierSettings(
            root="/nowhere",
            capacity=self.capacity,
            high_water=0.999,
            low_water=0.992,
            min_free=0,
            shared=self.chance.random() < 0.3,
            io_deadline=10.0,
            ranks=1,
            file_bytes=(),
            max_queued=0,
        )
        self.tier = ObjectTier(
            settings,
            HOME,
            Catalogue(1, LRU(), 16),
            self,
            self,
            readers=2,
            writers=1,
            max_queued=6 * NBYTES,
            clock=lambda: self.now,
            now_ns=lambda: int(self.now * 1e9),
        )
        self.tier.open()

    # -- what the tier says ------------------------------------------------------------

    def ask(self, chore: Chore) -> bool:
        if self.chance.random() < self.refuses:
            return False
        self.chores.append(chore)
        return True

    def do(self, part: Part) -> None:
        self.parts.append(part)

    def prepared(self, news: Prepared) -> None:
        pass

    def tell(self, ended: Ended) -> None:
        assert ended.task in self.asked
        assert ended.task not in self.ended_tasks
        self.ended_tasks[ended.task] = ended

    def trouble(self, kind: str, message: str) -> None:
        pass

    def stored(self, task: int, files: Sequence[tuple[FileName, int]]) -> None:
        for file, nbytes in files:
            assert (file in self.told) == (nbytes == 0)
            self.told.setdefault(file, nbytes)

    def loaded(self, task: int, files: Sequence[FileName]) -> None:
        pass

    def removed(self, files: Sequence[tuple[FileName, int]]) -> None:
        for file, nbytes in files:
            assert self.told.pop(file) == nbytes

    # -- what happens ------------------------------------------------------------------

    def some(self) -> list[int]:
        first = self.chance.randrange(NUMBERS)
        return list(range(first, min(NUMBERS, first + self.chance.randrange(1, 5))))

    def task(self) -> int:
        self.asked.add(len(self.asked))
        return len(self.asked) - 1

    def host(self) -> None:
        numbers, what = self.some(), self.chance.randrange(6)
        if what == 0:
            wanted = [Wanted(file_of(n), HostMemory(bytes(NBYTES))) for n in numbers]
            self.tier.store(self.task(), wanted, {})
        elif what == 1:
            self.tier.load(
                self.task(), [Wanted(file_of(n), HostMemory(bytes(NBYTES))) for n in numbers]
            )
        elif what == 2:
            task = self.task()
            names = tuple(object_id(n) for n in numbers)
            places = () if self.chance.random() < 0.3 else (file_of(0).namespace,)
            self.tier.look_up(LookUp(task, names, (places,) * len(names)))
        elif what == 3:
            for _ in range(4):
                self.tier.unlock([object_id(n) for n in range(NUMBERS)])
        elif what == 4:
            delete = Delete([object_id(n) for n in numbers])
            self.deletes.append(delete)
            self.tier.delete(delete)
        else:  # another process
            for n in numbers:
                if self.chance.random() < 0.3:
                    self.disk.pop(file_of(n), None)

    def thread(self) -> None:
        """A thread does a part; what it has to say is heard later."""
        if not self.parts:
            return
        part = self.parts.pop(self.chance.randrange(len(self.parts)))
        luck = self.chance.random()
        if luck < self.trouble_rate or not part.claim.begin():
            self.results.append((part, None))
            return
        part.claim.end()
        self.results.append((part, self.outcome(part, luck)))

    def outcome(self, part: Part, luck: float) -> Written | Read:
        if part.task.kind is Kind.STORE:
            if luck < 2 * self.trouble_rate:
                reason = self.chance.choice([FailureReason.IO, FailureReason.NO_SPACE])
                return Written(WriteStatus.FAILED, reason=reason)
            existed = part.file in self.disk
            self.disk[part.file] = FILE
            return Written(WriteStatus.EXISTED if existed else WriteStatus.WRITTEN, FILE)
        if luck < 2 * self.trouble_rate:
            return Read(ReadStatus.FAILED, FailureReason.IO)
        if part.file not in self.disk:
            return Read(ReadStatus.MISSING)
        if luck < 0.2:
            if self.chance.random() < 0.5:  # else it cannot be removed
                del self.disk[part.file]
            return Read(ReadStatus.DAMAGED, Reason.PAYLOAD)
        return Read(ReadStatus.OK, nbytes=FILE)

    def hear(self) -> None:
        """The tier hears of a part, or of a chore."""
        if self.results and self.chance.random() < 0.5:
            part, result = self.results.pop(self.chance.randrange(len(self.results)))
            if part.task.kind is Kind.STORE:
                assert not isinstance(result, Read)
                self.tier.wrote(part, result)
            else:
                assert not isinstance(result, Written)
                self.tier.read(part, result)
        elif self.said:
            self.tier.news(self.said.popleft())

    def keeper(self, *, fails: bool) -> None:
        if not self.chores:
            return
        chore = self.chores.popleft()
        if fails and self.chance.random() < self.trouble_rate:
            self.said.append(Trouble(chore, "io"))
            return
        match chore:
            case Prepare():
                self.said.append(Prepared(IoMode.BUFFERED))
            case Scan():
                found = [FoundFile(name, size, 0) for name, size in self.disk.items()]
                self.said += (ScanPiece(found), ScanEnded(self.other, 0.01, 0))
            case Remove():
                stuck = [n for n in chore.files if fails and self.chance.random() < 0.02]
                gone = [name for name in chore.files if name not in stuck]
                for name in gone:
                    self.disk.pop(name, None)
                self.said.append(Removed(gone, stuck))
            case Probe():
                there = [FoundFile(n, self.disk[n], 0) for n in chore.files if n in self.disk]
                self.said.append(Probed(chore.job, there))
            case Measure():
                self.said.append(Measured(1 << 40))

    def step(self) -> None:
        what = self.chance.randrange(13)
        if what < 3:
            self.host()
        elif what < 6:
            self.thread()
        elif what < 8:
            self.keeper(fails=True)
        elif what < 12:
            self.hear()
        else:
            self.now += self.chance.choice([0.05, 0.05, 0.3, 1.0, 5.0])
            self.tier.tick(0.0)
        self.check()

    def check(self) -> None:
        assert sum(self.disk.values()) + self.other <= self.capacity
        if self.tier.is_scanned:
            # Nothing lies there uncounted.
            assert sum(self.disk.values()) <= self.tier.used - self.other

    def settle(self) -> None:
        """All threads go on and nothing fails, until nothing is left to do."""
        self.refuses = 0.0
        for _ in range(400):
            self.thread()
            self.keeper(fails=False)
            for _ in range(4):
                self.hear()
            self.now += 1.0
            self.tier.tick(0.0)
        assert not self.parts
        assert not self.results


@pytest.mark.parametrize("seed", range(25))
def test_any_history(seed: int) -> None:
    world = World(seed)
    for _ in range(800):
        world.step()
    world.settle()
    assert world.ended_tasks.keys() == world.asked
    assert all(delete.over.is_set() for delete in world.deletes)
    assert world.tier.figures["active"] == world.tier.figures["queued_stores"] == 0
    assert not world.tier.is_degraded

    # Whoever locked it has forgotten it, and a scan has looked.
    world.now += LOCK_LIFE + 3600
    world.settle()
    assert world.tier.figures["locked"] == 0
    assert world.tier.objects == len(world.disk)
    assert world.told.keys() <= world.disk.keys()

    delete = Delete([object_id(n) for n in range(NUMBERS)])
    world.tier.delete(delete)
    world.settle()
    assert delete.over.is_set()
    world.now += 3600
    world.settle()  # a scan has looked
    assert not world.disk
    assert not world.told
    assert world.tier.objects == 0
    assert world.tier.used == world.other


@pytest.mark.parametrize("seed", range(10))
def test_closed_at_any_time_every_task_ends(seed: int) -> None:
    world = World(seed)
    for _ in range(100 + 10 * seed):
        world.step()
    copying = [part for part in world.parts[:1] if part.claim.begin()]
    assert world.tier.close() is not any(not part.answered for part in copying)
    for part in copying:
        part.claim.end()
    assert world.tier.close()
    assert world.ended_tasks.keys() == world.asked
    assert not any(part.claim.begin() for part in world.parts)
    assert all(delete.over.is_set() for delete in world.deletes)
