# SPDX-License-Identifier: Apache-2.0
"""An object store with a host that is a few dictionaries: real threads and files."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.unit.disk._agent import FaultyFiles
from vllm_tiered_kv.config import Size
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.objects.names import Family, ObjectId, namespace_of, object_key
from vllm_tiered_kv.tiers.objects.settings import ObjectOptions
from vllm_tiered_kv.tiers.objects.store import ObjectStore
from vllm_tiered_kv.tiers.objects.tasks import Ended, LookUp, Wanted

HOME = "host"
NBYTES = 9000
LAYOUT = "float32[2,1125]"
FAMILY = Family(HOME, "model").prefix
PATIENCE = 60.0


def object_id(number: int) -> ObjectId:
    key = object_key(random.Random(number).randbytes(32), 7, "")
    assert key is not None
    return ObjectId(FAMILY, 0, key)


def file_of(number: int, layout: str = LAYOUT) -> FileName:
    return object_id(number).file(namespace_of(FAMILY, layout))


def payload(number: int, nbytes: int = NBYTES) -> bytes:
    return random.Random(f"payload {number}").randbytes(nbytes)


class HostMemory:
    """Memory that notices who touches it after its task has ended."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self.is_over = False
        self.touched_late = False
        self.is_valid = True
        self.while_copying: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def read(self, into: memoryview) -> bool:
        self.touched_late |= self.is_over
        self.while_copying()
        into[:] = self.content
        self.touched_late |= self.is_over
        return self.is_valid

    def write(self, content: memoryview) -> bool:
        self.touched_late |= self.is_over
        self.while_copying()
        if not self.is_valid:
            return False
        self.content[:] = content
        self.touched_late |= self.is_over
        return True


class Rig:
    """The host, and the store it uses."""

    def __init__(self, root: Path, files: FaultyFiles, **changes: Any) -> None:
        usual: dict[str, Any] = {
            "path": str(root),
            "capacity": Size(64 << 20),
            "min_free": Size(1),
            "io_deadline": 30.0,
        }
        self.files = files
        self.root = root
        self.results: dict[int, Ended] = {}
        self.memory: dict[int, list[HostMemory]] = {}
        self.sizes: dict[FileName, int] = {}
        """What the host believes to be stored."""
        self.wrong: list[str] = []
        self.kinds: list[str] = []
        self._tasks = 0
        self._wake = threading.Condition()
        self.is_scanned = threading.Event()
        max_queued = changes.pop("max_queued_bytes", 64 << 20)
        self.store = ObjectStore(
            ObjectOptions(**{**usual, **changes}), HOME, max_queued, self, files
        )
        self.store.start()

    # -- what the store tells ----------------------------------------------------------

    def ended(self, ended: Ended) -> None:
        with self._wake:
            if ended.task in self.results:
                self.wrong.append(f"task {ended.task} ended twice")
            self.results[ended.task] = ended
            for memory in self.memory.get(ended.task, ()):
                memory.is_over = True
            self._wake.notify_all()

    def stored(self, task: int, files: Sequence[tuple[FileName, int]]) -> None:
        for file, nbytes in files:
            if (file in self.sizes) != (nbytes == 0):
                self.wrong.append("stored twice, or not for the first time")
            self.sizes.setdefault(file, nbytes)

    def loaded(self, task: int, files: Sequence[FileName]) -> None:
        pass

    def removed(self, files: Sequence[tuple[FileName, int]]) -> None:
        for file, nbytes in files:
            if self.sizes.pop(file, None) != nbytes:
                self.wrong.append("removed, and never stored like this")

    def trouble(self, kind: str, message: str) -> None:
        self.kinds.append(kind)

    def bug(self) -> None:
        self.wrong.append("a bug")

    def degraded(self, *, is_degraded: bool) -> None:
        pass

    def scanned(self, objects: int, used: int) -> None:
        self.is_scanned.set()

    # -- what the host asks for --------------------------------------------------------

    def submit_store(
        self, numbers: Sequence[int], nbytes: int = NBYTES, layout: str = LAYOUT
    ) -> int:
        memory = [HostMemory(payload(n, nbytes)) for n in numbers]
        return self._submit(numbers, memory, "store", layout)

    def submit_load(self, numbers: Sequence[int], nbytes: int = NBYTES) -> int:
        return self._submit(numbers, [HostMemory(bytes(nbytes)) for _ in numbers], "load")

    def _submit(
        self, numbers: Sequence[int], memory: list[HostMemory], what: str, layout: str = LAYOUT
    ) -> int:
        self._tasks += 1
        task = self._tasks
        self.memory[task] = memory
        wanted = [Wanted(file_of(n, layout), m) for n, m in zip(numbers, memory, strict=True)]
        if what == "store":
            identities = {file_of(0, layout).namespace: {"what": "a test"}}
            assert self.store.store(task, wanted, identities)
        else:
            assert self.store.load(task, wanted)
        return task

    def submit_look_up(self, numbers: Sequence[int], layout: str | None = LAYOUT) -> int:
        self._tasks += 1
        names = tuple(object_id(n) for n in numbers)
        places = () if layout is None else (namespace_of(FAMILY, layout),)
        assert self.store.look_up(LookUp(self._tasks, names, (places,) * len(names)))
        return self._tasks

    def wait(self, task: int) -> tuple[bool, ...]:
        with self._wake:
            assert self._wake.wait_for(lambda: task in self.results, PATIENCE)
        return self.results[task].done

    def stores(self, *numbers: int, nbytes: int = NBYTES) -> tuple[bool, ...]:
        return self.wait(self.submit_store(numbers, nbytes))

    def loads(self, *numbers: int, nbytes: int = NBYTES) -> tuple[bool, ...]:
        """Load; whatever is said to be loaded must be what was stored."""
        task = self.submit_load(numbers, nbytes)
        done = self.wait(task)
        for number, ok, memory in zip(numbers, done, self.memory[task], strict=True):
            if ok and memory.content != payload(number, nbytes):
                self.wrong.append(f"wrong bytes for {number}")
        return done

    def finds(self, *numbers: int, layout: str | None = LAYOUT) -> tuple[bool, ...]:
        """Look up, and take the locks off again."""
        done = self.wait(self.submit_look_up(numbers, layout))
        self.unlock(*(n for n, ok in zip(numbers, done, strict=True) if ok))
        return done

    def unlock(self, *numbers: int) -> None:
        self.store.unlock([object_id(n) for n in numbers])

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self, timeout: float = 10.0) -> bool:
        return self.store.close(timeout)

    def check(self) -> None:
        """Nothing has gone wrong so far."""
        assert not self.wrong
        late = [m for memory in self.memory.values() for m in memory if m.touched_late]
        assert not late


@contextlib.contextmanager
def rig(root: Path, files: FaultyFiles | None = None, **changes: Any) -> Iterator[Rig]:
    """A store that knows its folder; closed, and checked, at the end."""
    host = Rig(root, files or FaultyFiles(0), **changes)
    try:
        assert host.is_scanned.wait(PATIENCE)
        yield host
    finally:
        host.files.rate = 0.0
        host.files.flow.set()
        host.close()
    host.check()


def on_disk(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def total(root: Path) -> int:
    """Bytes of all files that are there; some may go meanwhile."""
    nbytes = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            nbytes += path.lstat().st_size
    return nbytes
