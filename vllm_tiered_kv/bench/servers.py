# SPDX-License-Identifier: Apache-2.0
"""The processes of an arm, from start to end, whatever happens between."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vllm_tiered_kv.bench.commands import Command, commands, free_ports, ports_of
from vllm_tiered_kv.bench.config import Arm, Experiment
from vllm_tiered_kv.bench.errors import BenchError, ServerLost
from vllm_tiered_kv.bench.group import ProcessGroup

_GRACE_S = 30.0
# Loopback only: a proxy from the environment must not get in between.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Process:
    """A process in a group of its own; leaving the ``with`` block ends all of the group.

    Args:
        log: for everything it prints, replaced if there.

    Raises:
        ServerLost: it ended, or was not ready in time. Nothing is left running.
    """

    def __init__(self, command: Command, log: Path, timeout: float) -> None:
        self.command = command
        self.log = log
        try:
            self._group = ProcessGroup(command.words, log, command.env)
        except (OSError, subprocess.SubprocessError) as error:
            raise ServerLost(f"{command.words[0]} cannot be started: {error}") from None
        try:
            self._wait_ready(timeout)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._group.pid

    def check(self) -> None:
        """Is it still there?

        Raises:
            ServerLost: it has ended.
        """
        status = self._group.status
        if status is not None:
            raise self._lost(f"{self.command.name} ended with status {status}")

    def stop(self) -> None:
        """A polite signal, then a kill of its whole group."""
        self._group.stop(_GRACE_S)

    def _wait_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check()
            if _answers(self.command.ready):
                return
            time.sleep(0.1)
        raise self._lost(f"{self.command.name} was not ready after {timeout:.0f} s")

    def _lost(self, what: str) -> ServerLost:
        return ServerLost(f"{what}; the end of {self.log}:\n{self._group.tail()}")


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


class Target(msgspec.Struct, frozen=True):
    """An arm that can be asked."""

    arm: Arm
    url: str
    scrape: tuple[str, ...]
    """URLs of metrics."""
    processes: tuple[Process, ...] = ()
    words: tuple[tuple[str, ...], ...] = ()
    """What was started."""

    def check(self) -> None:
        """Are all its processes still there?

        Raises:
            ServerLost: one is not.
        """
        for process in self.processes:
            process.check()


@contextlib.contextmanager
def running(arm: Arm, experiment: Experiment, output: Path) -> Iterator[Target]:
    """Start an arm, unless it runs already; leaving the block ends what was started.

    Args:
        output: folder for logs and for what the arm keeps on disk meanwhile.

    Raises:
        ServerLost: a process did not start.
        BenchError: a command is not there.
    """
    if arm.url is not None:
        yield Target(arm, arm.url, _scrapes(arm, {}, f"{arm.url.rstrip('/')}/metrics"))
        return
    slug = re.sub(r"[^A-Za-z0-9]+", "-", arm.name).strip("-").lower() or "arm"
    slug = f"{experiment.arms.index(arm)}-{slug}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_empty(output / "kept" / slug))
        names = ports_of(arm)
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        logs = output / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        started = []
        with _saying_needs(arm):
            filled = commands(arm, experiment, ports, folder)
            for command in filled:
                log = logs / f"{slug}-{command.name}.log"
                process = Process(command, log, experiment.start_timeout)
                started.append(stack.enter_context(process))
        urls = {command.name: command.url for command in filled}
        serving = [p.name for p in arm.processes if not p.command]
        yield Target(
            arm,
            urls[arm.entry or filled[-1].name],
            _scrapes(arm, urls, *(f"{urls[name]}/metrics" for name in serving)),
            tuple(started),
            tuple(command.words for command in filled),
        )


@contextlib.contextmanager
def _saying_needs(arm: Arm) -> Iterator[None]:
    """Where an arm does not start, say what it takes."""
    try:
        yield
    except BenchError as error:
        if not arm.needs:
            raise
        raise type(error)(f"arm {arm.name!r} needs {arm.needs}: {error}") from None


def _scrapes(arm: Arm, urls: dict[str, str], *default: str) -> tuple[str, ...]:
    if not arm.scrape:
        return default
    return tuple(f"{urls[name]}/metrics" if name in urls else name for name in arm.scrape)


@contextlib.contextmanager
def _empty(folder: Path) -> Iterator[Path]:
    """A new folder, and gone after the block."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder.absolute()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
