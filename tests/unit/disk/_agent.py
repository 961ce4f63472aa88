# SPDX-License-Identifier: Apache-2.0
"""A disk agent with its keeper and its ranks: real threads, sockets and files, in one process."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.unit.disk._files import CALLS
from vllm_tiered_kv.policies.lru import LRU
from vllm_tiered_kv.tiers.disk.active import Ended
from vllm_tiered_kv.tiers.disk.agent import DiskAgent
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.channel import AgentSockets, RankSockets
from vllm_tiered_kv.tiers.disk.direct import aligned_buffer
from vllm_tiered_kv.tiers.disk.executor import DiskExecutor
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import ChunkFacts, file_bytes, padded
from vllm_tiered_kv.tiers.disk.orders import Hello, Outcome, Part, ReadOrder, WriteOrder
from vllm_tiered_kv.tiers.disk.settings import ENTRY_BYTES, FOLDER_BYTES, TierSettings

SPACE = "0123456789abcdef-fedcba9876543210"
PART = 5000
SLOT = padded(PART)
FILE = file_bytes(PART)
SLOTS = 64
PATIENCE = 60.0
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ESTALE, errno.EMFILE)


class FaultyFiles(Files):
    """Fails calls by chance, and holds those a test wants to hang."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rate = 0.0
        """Share of the calls that fail."""
        self.failing: frozenset[str] = frozenset(CALLS)
        self.errors: Sequence[int] = ERRORS
        self.flow = threading.Event()
        """Cleared: calls do not return ..."""
        self.holding: frozenset[str] = frozenset(CALLS)
        """... if they are of these names."""
        self.flow.set()
        self.waiting = threading.Semaphore(0)
        """Counts the calls that came while nothing returned."""
        self.threads: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()


def _faulty(name: str) -> Callable[..., Any]:
    def call(self: FaultyFiles, *args: Any, **kwargs: Any) -> Any:
        self.threads[threading.current_thread().name] += 1
        if not self.flow.is_set() and name in self.holding:
            self.waiting.release()
            self.flow.wait(PATIENCE)
        fails = name in self.failing and self.chance.random() < self.rate
        before = fails and (name == "close" or self.chance.random() < 0.3)
        result = None
        if before or not fails:  # some calls fail after all
            result = getattr(super(FaultyFiles, self), name)(*args, **kwargs)
        if not fails:
            return result
        if name == "open" and isinstance(result, int):
            os.close(result)
        if name == "scandir" and result is not None:
            result.close()
        self.failed[name] += 1
        code = self.chance.choice(self.errors)
        raise OSError(code, os.strerror(code))

    return call


for _name in CALLS:
    setattr(FaultyFiles, _name, _faulty(_name))


class Rig:
    """An engine's disk tier. What is in a slot is what the last write or read put there."""

    def __init__(
        self, root: Path, files: FaultyFiles, ranks: int = 1, groups: int = 2, **changes: Any
    ) -> None:
        self.root, self.files, self.ranks = root, files, ranks
        usual = {
            "root": str(root),
            "capacity": 40 * (FILE + ENTRY_BYTES) + FOLDER_BYTES * ranks + (1 << 14),
            "high_water": 0.99,
            "low_water": 0.97,
            "min_free": 0,
            "shared": False,
            "io_deadline": 30.0,
            "ranks": ranks,
            "file_bytes": (FILE,) * groups,
            "max_queued": 16,
        }
        self.catalogue = Catalogue(ranks, LRU(), 16)
        self.agent = DiskAgent(
            TierSettings(**{**usual, **changes}), self.catalogue, AgentSockets(), files
        )
        self.slots = [aligned_buffer(SLOTS * SLOT) for _ in range(ranks)]
        self.executors = [
            DiskExecutor(
                rank,
                RankSockets(rank, *self.agent.addresses, Hello((PART,) * groups)),
                lambda slot, nbytes, rank=rank: self.view(rank, slot, nbytes),
                (PART,) * groups,
                files,
            )
            for rank in range(ranks)
        ]
        self._free = list(range(SLOTS))
        self.orders: dict[int, WriteOrder | ReadOrder] = {}
        self.outcomes: dict[int, Outcome] = {}
        self._jobs = 0
        self.wrong: list[bytes] = []
        self.failures: Counter[str] = Counter()

    def view(self, rank: int, slot: int, nbytes: int) -> memoryview | None:
        return self.slots[rank][slot * SLOT : slot * SLOT + nbytes]

    def open(self) -> Rig:
        self.agent.open(SPACE, {"means": "a test"})
        self.wait(lambda: self.agent.is_readable, "it did not open")
        return self

    # -- what the scheduler half does --------------------------------------------------

    def write(self, key: bytes, groups: Sequence[int] = (0, 1)) -> int | None:
        """None if it could not be asked for."""
        if len(self._free) < len(groups):
            return None
        order = WriteOrder(
            self._number(), key, self._take(groups), ChunkFacts((key,), 1, 0, 16), time.time_ns()
        )
        for rank in range(self.ranks):
            for part in order.parts:
                view = self.view(rank, part.slot, SLOT)
                assert view is not None
                view[:PART] = payload(key, rank, part.group)
        return self._keep(order, self.agent.write(order))

    def read(self, key: bytes, groups: Sequence[int] = (0, 1), patience: float = 20) -> int | None:
        if len(self._free) < len(groups):
            return None
        order = ReadOrder(self._number(), key, self._take(groups), patience)
        for rank in range(self.ranks):
            for part in order.parts:
                view = self.view(rank, part.slot, SLOT)
                assert view is not None
                view[:] = b"\xee" * SLOT
        return self._keep(order, self.agent.read([order]))

    def _number(self) -> int:
        self._jobs += 1
        return self._jobs

    def _take(self, groups: Sequence[int]) -> tuple[Part, ...]:
        return tuple(Part(group, self._free.pop(0)) for group in groups)

    def _keep(self, order: WriteOrder | ReadOrder, asked: bool) -> int | None:
        if not asked:
            self._free += [part.slot for part in order.parts]
            return None
        self.orders[order.job] = order
        return order.job

    def take(self) -> None:
        """Take in what has ended; look at what was read."""
        self.failures.update(self.agent.take_failures())
        for ended in self.agent.take():
            self._end(ended)

    def _end(self, ended: Ended) -> None:
        assert ended.job not in self.outcomes, "an order ended twice"
        order = self.orders.pop(ended.job)
        self.outcomes[ended.job] = ended.outcome
        if isinstance(order, ReadOrder) and ended.outcome is Outcome.DONE:
            for rank in range(self.ranks):
                for part in order.parts:
                    view = self.view(rank, part.slot, PART)
                    if view is None or bytes(view) != payload(order.key, rank, part.group):
                        self.wrong.append(order.key)
        self._free += [part.slot for part in order.parts]

    # -- waiting -----------------------------------------------------------------------

    def wait(self, what: Callable[[], Any], why: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, why
            self.take()
            time.sleep(0.002)

    def settle(self) -> None:
        """Until every order has ended."""
        self.wait(lambda: not self.orders, f"orders that never end: {self.orders}")

    def ask(self, call: Callable[[], Any]) -> Any:
        """Have the agent's thread do something."""
        done: list[Any] = []
        self.agent._errands.insist(lambda: done.append(call()))
        self.wait(lambda: done, "the agent's thread is gone")
        return done[0]

    def rescan(self) -> None:
        """Have the folder looked at again, until its catalogue is of what is there."""
        tier = self.agent._tier
        self.wait(lambda: not tier._upkeep.is_scanning, "the scan never ended")

        def begin() -> int:
            # What a failed write left may be found late; here all of them have ended.
            deadline, tier._upkeep._io_deadline = tier._upkeep._io_deadline, 0.0
            tier._upkeep.begin_scan(time.monotonic())
            tier._upkeep._io_deadline = deadline
            tier._catalogue.scan_begins()
            return self.catalogue._scan

        self.ask(begin)
        self.wait(lambda: not tier._upkeep.is_scanning, "the scan never ended")

    def close(self) -> bool:
        """Whether every thread has ended."""
        self.agent.shutdown()
        ended = [executor.close(10.0) for executor in self.executors]
        return all(ended) and not self.agent._thread.is_alive()


def payload(key: bytes, rank: int, group: int) -> bytes:
    return random.Random(b"%s.%d.%d" % (key, rank, group)).randbytes(PART)


def key_of(number: int) -> bytes:
    return bytes([number, 255 - number]) * 16


def on_disk(root: Path) -> dict[str, int]:
    """Bytes of each file of a chunk."""
    return {str(p.relative_to(root)): p.stat().st_size for p in root.rglob("*.kv")}


@contextlib.contextmanager
def rig(root: Path, files: FaultyFiles | None = None, **changes: Any) -> Iterator[Rig]:
    made = Rig(root, files or FaultyFiles(0), **changes)
    try:
        yield made
    finally:
        made.files.rate = 0.0
        made.files.flow.set()
        made.close()
