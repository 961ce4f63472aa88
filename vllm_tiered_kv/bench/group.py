# SPDX-License-Identifier: Apache-2.0
"""A program in a process group of its own, of which nothing is left when it has been ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_KILL_S = 10.0


class ProcessGroup:
    """It is asked to end when this process dies without having ended it.

    Args:
        words: the command.
        log: for everything it prints, replaced if there, only its owner's.
        env: variables over this process's own.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started.
    """

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as output:
            self.leader = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self.leader.pid

    @property
    def status(self) -> int | None:
        """With which it ended; None while it runs."""
        return self.leader.poll()

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                return "".join(deque(file, maxlen=lines))
        except OSError as error:
            return f"(no log: {error})"

    def pause(self) -> None:
        """All its processes stand still until :meth:`resume`, or until it is ended."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """They go on."""
        self._signal(signal.SIGCONT)

    def stop(self, grace_s: float) -> None:
        """A polite signal, then a kill of the whole group."""
        try:
            if self.status is None:
                self.leader.terminate()
                self.resume()  # who stands still hears no signal but the last
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.leader.wait(grace_s)
        finally:
            # Also when the wait was interrupted. The group outlives its leader while one is left.
            self._signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.leader.wait(_KILL_S)

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group, if there is one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
