# SPDX-License-Identifier: Apache-2.0
"""Random lives of a disk tier: its real parts over real files, in one thread.

Whatever a thread does in reality happens here when chance says so: also in the middle of a file
call, which is how a slow one looks to all others. Calls fail by chance, and what lies in the folder
is damaged, moved and removed.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.scheduler.manual_disk import ManualAgent, ManualExecutor
from tests.unit.disk._files import CALLS, FACTS
from vllm_tiered_kv.policies import Eviction, make_policy
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.chores import Trouble
from vllm_tiered_kv.tiers.disk.direct import IoMode, aligned_buffer
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import file_bytes, padded
from vllm_tiered_kv.tiers.disk.orders import OpenFolder, Order, Outcome, Part, ReadOrder, WriteOrder
from vllm_tiered_kv.tiers.disk.settings import ENTRY_BYTES, FOLDER_BYTES, TierSettings
from vllm_tiered_kv.tiers.disk.store import RankFolder

OWN, ANOTHER = "own-1", "another-2"
PART = 200
SLOT = padded(PART)
FILE = file_bytes(PART)
SLOTS = 48
ROOM = 24
"""Files that fit."""
KEYS = [bytes([i % 3, i]) * 16 for i in range(24)]
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ESTALE, errno.EMFILE)


class FickleFiles(Files):
    """Calls that fail by chance, before or after they were done, and let others do things."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rate = 0.0
        self.errors = ERRORS
        self.meanwhile: Callable[[], None] = lambda: None
        self.failed = 0


def _fickle(name: str) -> Callable[..., Any]:
    def call(self: FickleFiles, *args: Any, **kwargs: Any) -> Any:
        self.meanwhile()
        fails = self.chance.random() < self.rate
        done = not fails or name == "close" or self.chance.random() < 0.3
        result = getattr(super(FickleFiles, self), name)(*args, **kwargs) if done else None
        if not fails:
            return result
        if name == "open" and isinstance(result, int):
            os.close(result)
        if name == "scandir" and result is not None:
            result.close()
        self.failed += 1
        code = self.chance.choice(self.errors)
        raise OSError(code, os.strerror(code))

    return call


for _name in CALLS:
    setattr(FickleFiles, _name, _fickle(_name))


class _Executor(ManualExecutor):
    """Its folders notice by the life's clock that they were moved."""

    clock: Callable[[], float]

    def take(self, order: Order) -> None:
        if not isinstance(order, OpenFolder):
            super().take(order)
            return
        self._folder = RankFolder(
            Path(order.root),
            order.namespace,
            self._rank,
            files=self._files,
            mode=IoMode.BUFFERED,
            clock=self.clock,
        )


class Engine:
    """One engine's disk tier and the slots its orders are for."""

    def __init__(self, life: Life, ranks: int, eviction: Eviction) -> None:
        self.life, self.ranks = life, ranks
        settings = TierSettings(
            root=str(life.root),
            capacity=ROOM * (FILE + ENTRY_BYTES) + FOLDER_BYTES * ranks + 4 * 4096,
            high_water=0.999,
            low_water=0.98,
            min_free=0,
            shared=life.chance.random() < 0.3,
            io_deadline=10.0,
            ranks=ranks,
            file_bytes=(FILE, FILE),
            max_queued=12,
        )
        self.catalogue = Catalogue(ranks, make_policy(eviction), 16)
        self.agent = ManualAgent(settings, self.catalogue, lambda: life.now)
        self._keeping = False
        keeper = self.agent._keeper
        keeper._files, keeper.do = life.files, self._keep
        self.slots = [aligned_buffer(SLOTS * SLOT) for _ in range(ranks)]
        for rank in range(ranks):
            executor = _Executor(rank, self.agent.reports.append, self._view(rank), (PART, PART))
            executor._files, executor.clock = life.files, lambda: life.now
            self.agent.executors[rank] = executor
        self.agent.open(OWN, {})
        self.orders: dict[int, WriteOrder | ReadOrder] = {}
        self.looks: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self._free = list(range(SLOTS))
        self.jobs = 0
        self._was_degraded = False

    def _view(self, rank: int) -> Callable[[int, int], memoryview]:
        return lambda slot, nbytes: self.slots[rank][slot * SLOT : slot * SLOT + nbytes]

    @property
    def tier(self) -> Any:
        return self.agent._tier

    def _keep(self) -> None:
        keeper = self.agent._keeper
        if keeper.chores:
            chore = keeper.chores.popleft()
            try:
                keeper._do(chore)
            except OSError as error:
                keeper._tell(Trouble(chore, str(error)))

    def number(self) -> int:
        self.jobs += 1
        return self.jobs

    def _slots(self, groups: tuple[int, ...]) -> tuple[Part, ...]:
        if len(self._free) < len(groups):
            return ()
        return tuple(Part(group, self._free.pop(0)) for group in groups)

    def write(self, key: bytes, groups: tuple[int, ...]) -> None:
        if not (parts := self._slots(groups)):
            return
        order = WriteOrder(self.number(), key, parts, FACTS, 1)
        for rank in range(self.ranks):
            for part in parts:
                self._view(rank)(part.slot, PART)[:] = payload(key, rank, part.group)
        self.orders[order.job] = order
        assert self.agent.write(order)

    def read(self, key: bytes, groups: tuple[int, ...]) -> None:
        if not (parts := self._slots(groups)):
            return
        order = ReadOrder(self.number(), key, parts, 5.0)
        self.orders[order.job] = order
        assert self.agent.read([order])

    def look_for(self, keys: list[bytes]) -> None:
        job = self.number()
        self.looks.add(job)
        assert self.agent.look_for(job, keys)

    def take(self) -> None:
        """Take in what has ended, and look at what was read."""
        counts = self.life.counts
        for ended in self.agent.take():
            assert ended.job not in self.outcomes, "an order ended twice"
            self.outcomes[ended.job] = ended.outcome
            if ended.job in self.looks:
                continue
            order = self.orders.pop(ended.job)
            reading = isinstance(order, ReadOrder)
            counts[f"{'read' if reading else 'write'} {ended.outcome.value}"] += 1
            if reading and ended.outcome is Outcome.DONE:
                self._check(order)
            self._free += [part.slot for part in order.parts]
        kinds = self.agent.take_failures()
        assert "internal" not in kinds
        counts.update(kinds)
        if self._was_degraded and not self.tier.is_degraded:
            counts["recovered"] += 1
        self._was_degraded = self.tier.is_degraded

    def _check(self, order: WriteOrder | ReadOrder) -> None:
        for rank in range(self.ranks):
            for part in order.parts:
                got = bytes(self._view(rank)(part.slot, PART))
                assert got == payload(order.key, rank, part.group), "wrong bytes"

    def progress(self, steps: int) -> None:
        """Whatever its threads have to do, so many times."""
        agent, chance = self.agent, self.life.chance
        for _ in range(steps):
            what = chance.choice("eeeerrttk")
            if what == "e":
                agent.executors[chance.randrange(self.ranks)].do(chance.randrange(8))
            elif what == "r":
                agent.hear(chance.randrange(8))
            elif what == "t":
                agent.think()
            elif not self._keeping:  # it is one thread
                self._keeping = True
                agent.keep()
                self._keeping = False


class Life:
    """One life; in a lone one nobody else writes to the folder, and the quota is exact."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.root = root
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        self.files = FickleFiles(self.chance)
        self.lone = self.chance.random() < 0.6
        self._depth = 0
        self._restless = 0.0
        self._away = 0
        self._leave_behind()
        ranks = self.chance.choice([1, 1, 2])
        eviction = self.chance.choice(list(Eviction))
        self.engines = [Engine(self, ranks, eviction) for _ in range(1 if self.lone else 2)]
        self.files.meanwhile = self._meanwhile

    def _leave_behind(self) -> None:
        """What another model's engine left in the folder."""
        other = RankFolder(self.root, ANOTHER, 0, files=Files(), mode=IoMode.BUFFERED)
        for key in self.chance.sample(KEYS, self.chance.choice([0, 0, 3, 20])):
            view = aligned_buffer(SLOT)
            other.write(key, 0, view, PART, FACTS, self.chance.randrange(1 << 62))
        other.close()

    def _meanwhile(self) -> None:
        """Others go on while a call has not returned."""
        if self._depth < 3 and self.chance.random() < self._restless:
            self._depth += 1
            self.counts["interleaved"] += 1
            self.chance.choice(self.engines).progress(1)
            self._depth -= 1

    # -- what happens ------------------------------------------------------------------

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
            for engine in self.engines:
                engine.take()
            if self.lone:
                assert bytes_in(self.root) <= self.engines[0].agent.settings.capacity
        self.counts["evicted"] += sum(engine.agent.evicted for engine in self.engines)
        self.counts["failed calls"] += self.files.failed

    def _step(self) -> None:
        chance, engine = self.chance, self.chance.choice(self.engines)
        what = chance.random()
        if what < 0.35:
            for _ in range(chance.choice([1, 1, 4])):
                engine.write(chance.choice(KEYS), chance.choice([(0,), (1,), (0, 1)]))
        elif what < 0.55:
            key = chance.choice([k for k in KEYS if engine.agent.groups(k)] or KEYS)
            engine.read(key, tuple(g for g in (0, 1) if engine.agent.groups(key) >> g & 1) or (0,))
        elif what < 0.6:
            self._say(engine)
        elif what < 0.7:
            self._weather()
        elif what < 0.76:
            self._harm()
        engine.progress(chance.choice([2, 6, 12]))
        self.now += chance.choice([0.05] * 30 + [1.0] * 8 + [12.0, 70.0])
        engine.agent.look_round()

    def _say(self, engine: Engine) -> None:
        chance = self.chance
        what = chance.random()
        if what < 0.3:
            engine.agent.used_now(chance.sample(KEYS, 4), chance.sample(KEYS, 2))
        elif what < 0.5:
            engine.agent.renew(chance.sample(KEYS, 6))
        elif what < 0.7:
            engine.agent.cancel([j for j, o in engine.orders.items() if isinstance(o, ReadOrder)])
        elif what < 0.9:
            engine.look_for(chance.sample(KEYS, 3))
        else:
            engine.agent.purge()

    def _weather(self) -> None:
        """How well file calls go from now on; mostly well."""
        self.files.rate = self.chance.choice([0.0] * 5 + [0.03, 0.2, 1.0])
        self.files.errors = self.chance.choice([ERRORS, ERRORS[:2], (errno.ENOSPC,)])
        self._restless = self.chance.choice([0.0, 0.05, 0.3])

    def _harm(self) -> None:
        """What users, other programs and bad devices do to files."""
        chance = self.chance
        what = chance.random()
        files = sorted(self.root.rglob("*.kv"))
        if what < 0.05:
            shutil.rmtree(self.root, ignore_errors=True)
        elif what < 0.1 and self.root.is_dir():
            self._away += 1
            self.root.rename(self.root.with_name(f"{self.root.name}.away{self._away}"))
            self.now += 10.0  # until that is noticed, it is filled where it is
        elif files:
            self.counts["harmed"] += 1
            self._harm_file(chance.choice(files), chance.choice(files))

    def _harm_file(self, path: Path, other: Path) -> None:
        chance = self.chance
        how = chance.choice(["flip", "cut", "empty", "swap", "gone", "link", "pipe", "folder"])
        if not stat.S_ISREG(path.lstat().st_mode):
            return
        if how == "flip":
            data = bytearray(path.read_bytes())
            if data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        elif how == "cut":
            os.truncate(path, chance.randrange(path.stat().st_size + 1))
        elif how == "empty":
            os.truncate(path, 0)
        elif how == "swap":
            if stat.S_ISREG(other.lstat().st_mode):
                path.write_bytes(other.read_bytes())
        else:
            path.unlink()
            if how == "link":
                path.symlink_to("/etc/hostname")
            elif how == "pipe":
                os.mkfifo(path)
            elif how == "folder":
                path.mkdir()

    # -- the end -----------------------------------------------------------------------

    def end(self) -> None:
        """Nothing fails any more: it all comes right by itself, within some minutes."""
        self.files.rate, self._restless = 0.0, 0.0
        for _ in range(12):
            self.pass_time()
        for engine in self.engines:
            self._check(engine)

    def pass_time(self, seconds: float = 61.0) -> None:
        self.now += seconds
        for engine in self.engines:
            engine.agent.look_round()
            engine.agent.finish()
            engine.take()

    def _check(self, engine: Engine) -> None:
        tier, agent = engine.tier, engine.agent
        assert not engine.orders, "orders that never end"
        assert not tier.is_degraded
        assert agent.is_readable
        assert tier.is_idle
        assert not tier._removal.is_under_way
        assert not engine.catalogue._distrusted
        for _ in range(3):  # scans: what is too much by the first goes, and the next sees that
            self.pass_time(1000.0)
        there = chunk_files(self.root)
        assert engine.catalogue.used == sum(there.values())
        assert engine.catalogue.files == len(there)
        assert tier._quota.reserved == tier._quota.doubtful == 0
        assert agent.used <= agent.settings.capacity
        key = b"the end" * 4
        for ask in (engine.write, engine.read):
            ask(key, (0, 1))
            job = engine.jobs
            for _ in range(3):
                self.pass_time(1.0)
            assert engine.outcomes[job] is Outcome.DONE

    def close(self) -> None:
        for engine in self.engines:
            for executor in engine.agent.executors.values():
                executor.close(0)
            engine.agent.shutdown()


def payload(key: bytes, rank: int, group: int) -> bytes:
    return random.Random(b"%s.%d.%d" % (key, rank, group)).randbytes(PART)


def chunk_files(root: Path) -> dict[Path, int]:
    """Plain files that are named as chunks, with their bytes."""
    found = {path: path.lstat() for path in root.rglob("*.kv")}
    return {path: s.st_size for path, s in found.items() if stat.S_ISREG(s.st_mode)}


def bytes_in(root: Path) -> int:
    """Of all files, temporary ones included, and of their folders."""
    return sum(_sizes(root))


def _sizes(root: Path) -> Iterator[int]:
    folders = [str(root)] if root.is_dir() else []
    while folders:
        for entry in os.scandir(folders.pop()):
            yield entry.stat(follow_symlinks=False).st_size
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
