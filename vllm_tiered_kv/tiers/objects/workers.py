# SPDX-License-Identifier: Apache-2.0
"""Threads that read and write objects' files, each with memory of its own for the file calls.

A call that never returns holds its thread and that memory, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

from vllm_tiered_kv.tiers.disk.direct import IoMode, aligned_buffer
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import ChunkFacts, padded
from vllm_tiered_kv.tiers.disk.identity_file import write_identity
from vllm_tiered_kv.tiers.disk.results import Read, ReadStatus, WriteStatus, Written
from vllm_tiered_kv.tiers.disk.store import RankFolder
from vllm_tiered_kv.tiers.objects.tasks import Kind, Part

MOST_FOLDERS = 8
"""Namespaces whose folders stay open."""
MOST_DESCRIBED = 4096
"""Namespaces of which it is known that they say what they are."""
FOLDER_DESCRIPTORS = 258
DESCRIPTOR_SHARE = 4
"""Of the descriptors that this process may have, one in so many is ours."""
LOOK = 0.5
"""Seconds a thread sleeps at most before it looks whether all is over."""
WRITER_NICE = 10
"""Writers stand back behind the threads that answer requests."""

NO_FACTS = ChunkFacts((), 0, 0, 0)

Result = Written | Read | None
"""None: the host's memory was not to be had any more."""


class Workers:
    """Does parts of tasks.

    Args:
        root: the folder.
        files: what makes the file calls.
        readers: threads.
        writers: threads.
        report: takes each part with its result, once; called on the part's thread.
    """

    def __init__(
        self,
        root: Path,
        files: Files,
        readers: int,
        writers: int,
        report: Callable[[Part, Result], None],
    ) -> None:
        self._root = root
        self._files = files
        self._report = report
        self._wake = threading.Condition()
        self._reads: deque[Part] = deque()
        self._writes: deque[Part] = deque()
        self._closing = False
        self._folders: OrderedDict[str, RankFolder] = OrderedDict()
        self._most_folders = most_folders()
        self._described: set[str] = set()
        self._mode = IoMode.BUFFERED
        self._threads = [
            *(self._thread(f"tiered-kv-read-{i}", self._reads) for i in range(readers)),
            *(self._thread(f"tiered-kv-write-{i}", self._writes) for i in range(writers)),
        ]
        for thread in self._threads:
            thread.start()

    def prepared(self, mode: IoMode) -> None:
        """The root is ready, maybe anew; files are read and written like this. Any thread."""
        with self._wake:
            self._mode = mode
            self._described.clear()

    def do(self, part: Part) -> None:
        """Any thread; does not wait."""
        with self._wake:
            (self._reads if part.task.kind is Kind.LOAD else self._writes).append(part)
            self._wake.notify_all()

    def close(self, timeout: float) -> bool:
        """End the threads; whether they have ended within so many seconds."""
        with self._wake:
            self._closing = True
            self._reads.clear()
            self._writes.clear()
            self._wake.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        for folder in self._folders.values():
            folder.close()
        return True

    def _thread(self, name: str, queue: deque[Part]) -> threading.Thread:
        return threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)

    def _run(self, queue: deque[Part]) -> None:
        buffer = aligned_buffer()
        if queue is self._writes:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)
        while True:
            with self._wake:
                while not queue and not self._closing:
                    self._wake.wait(LOOK)
                if self._closing:
                    return
                part = queue.popleft()
            result: Result
            reading = part.task.kind is Kind.LOAD
            try:
                if buffer.nbytes < padded(part.nbytes):
                    buffer = aligned_buffer(padded(part.nbytes))
                view = buffer[: padded(part.nbytes)]
                result = self._read(part, view) if reading else self._write(part, view)
            except Exception:  # noqa: BLE001 - the part fails, the thread lives
                other = FailureReason.OTHER
                result = (
                    Read(ReadStatus.FAILED, other)
                    if reading
                    else Written(WriteStatus.FAILED, reason=other)
                )
            self._report(part, result)

    def _read(self, part: Part, view: memoryview) -> Result:
        name = part.file
        got = self._folder(name.namespace).read(name.key, name.group, view, part.nbytes)
        if got.status is not ReadStatus.OK:
            return got
        if not part.claim.begin():
            return None
        try:
            return got if part.memory.write(view[: part.nbytes]) else None
        finally:
            part.claim.end()

    def _write(self, part: Part, view: memoryview) -> Result:
        if not part.claim.begin():
            return None
        try:
            if not part.memory.read(view[: part.nbytes]):
                return None
        finally:
            part.claim.end()
        name = part.file
        reason = self._describe(part)
        if reason is not None:
            return Written(WriteStatus.FAILED, reason=reason)
        folder = self._folder(name.namespace)
        return folder.write(name.key, name.group, view, part.nbytes, NO_FACTS, part.used_ns)

    def _describe(self, part: Part) -> FailureReason | None:
        """Say what a namespace is, before its first file; why that could not be done."""
        namespace = part.file.namespace
        with self._wake:
            if namespace in self._described:
                return None
        reason = write_identity(self._files, self._root, namespace, part.identity or {})
        if reason is None:
            with self._wake:
                if len(self._described) >= MOST_DESCRIBED:
                    self._described.clear()
                self._described.add(namespace)
        return reason

    def _folder(self, namespace: str) -> RankFolder:
        closing: list[RankFolder] = []
        with self._wake:
            folder = self._folders.get(namespace)
            if folder is None or folder.mode is not self._mode:
                if folder is not None:
                    closing.append(folder)
                folder = RankFolder(self._root, namespace, 0, files=self._files, mode=self._mode)
                self._folders[namespace] = folder
            self._folders.move_to_end(namespace)
            while len(self._folders) > self._most_folders:
                closing.append(self._folders.popitem(last=False)[1])
        for old in closing:
            old.close()
        return folder


def most_folders() -> int:
    """Namespaces whose folders may stay open, each with :data:`FOLDER_DESCRIPTORS`."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MOST_FOLDERS
    return max(1, min(MOST_FOLDERS, allowed // DESCRIPTOR_SHARE // FOLDER_DESCRIPTORS))
