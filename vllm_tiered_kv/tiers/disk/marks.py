# SPDX-License-Identifier: Apache-2.0
"""Marks in a namespace's folder: what was written since a time may be wrong, and is being removed.

A mark is made before the first removal and taken away after the last. Who finds one at its start
is the heir of a process that did not come to its end, and removes what that one had to: every file
that was changed since. Also those of engines that were right: better lost than wrong.

A mark is an empty file that says all in its name, so that it can be made on a full disk and there
is nothing in it to read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from vllm_tiered_kv.tiers.disk.failures import FailureReason, reason_of
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import open_path
from vllm_tiered_kv.tiers.disk.names import mark_file, parse_mark_file, valid_namespace
from vllm_tiered_kv.tiers.disk.walk import Found, FoundMark, Left, Unreadable, Walk

MARGIN = 600.0
"""Seconds by which the clocks of two hosts may differ."""


def set_mark(files: Files, root: Path, namespace: str, since_ns: int) -> FailureReason | None:
    """Makes a mark, unless it is there. Never raises OSError.

    Args:
        since_ns: nanoseconds since the epoch.

    Returns:
        None, or why there is none.
    """
    name = mark_file(since_ns)
    if name is None or not valid_namespace(namespace):
        return FailureReason.NAME
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with contextlib.ExitStack() as opened:
        try:
            folder = open_path(files, root, [namespace], opened)
            with contextlib.suppress(FileExistsError):
                files.close(files.open(name, flags, dir_fd=folder))
        except OSError as error:
            return reason_of(error)
    return None


def clear_mark(files: Files, root: Path, namespace: str, since_ns: int) -> None:
    """Takes a mark away. Never raises OSError."""
    name = mark_file(since_ns)
    if name is None or not valid_namespace(namespace):
        return
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        files.unlink(name, dir_fd=open_path(files, root, [namespace], opened))


def inherit(
    files: Files, root: Path, namespace: str, go_on: Callable[[], bool]
) -> FailureReason | None:
    """Removes what the namespace's marks speak of, then the marks. Never raises OSError.

    Costs the listing of one folder where there is no mark.

    Args:
        go_on: called before each file; False stops it.

    Returns:
        None, or why files may be left that are wrong.
    """
    if not valid_namespace(namespace):
        return FailureReason.NAME
    with contextlib.ExitStack() as opened:
        try:
            folder = open_path(files, root, [namespace], opened)
            marks = _marks(files, folder)
            if not marks:
                return None
            since_ns = min(marks.values()) - int(MARGIN * 1e9)
            reason = _remove_since(files, root, namespace, since_ns, go_on)
            if reason is not None:
                return reason
            for name in marks:
                with contextlib.suppress(FileNotFoundError):
                    files.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            return reason_of(error)
    return None


def _marks(files: Files, folder: int) -> dict[str, int]:
    with files.scandir(folder) as entries:
        found = ((entry.name, parse_mark_file(entry.name)) for entry in entries)
        return {name: since_ns for name, since_ns in found if since_ns is not None}


def _remove_since(
    files: Files, root: Path, namespace: str, since_ns: int, go_on: Callable[[], bool]
) -> FailureReason | None:
    with contextlib.ExitStack() as opened:
        top = open_path(files, root, [], opened)
        for step in Walk(files).namespace(top, namespace):
            if not go_on():
                return FailureReason.OTHER
            if isinstance(step, Left) or isinstance(step.item, FoundMark):
                continue
            if isinstance(step.item, Unreadable):
                return step.item.reason
            if not isinstance(step.item, Found):
                continue
            with contextlib.suppress(FileNotFoundError):
                # Unlike the time of use, nobody can set this one.
                if files.stat(step.name, dir_fd=step.folder).st_ctime_ns >= since_ns:
                    files.unlink(step.name, dir_fd=step.folder)
    return None
