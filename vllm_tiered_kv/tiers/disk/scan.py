# SPDX-License-Identifier: Apache-2.0
"""What is on disk, and ways to be rid of it. No file is opened, no link below the root followed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import close, open_folder, open_path
from vllm_tiered_kv.tiers.disk.names import IDENTITY_FILE, is_models_namespace
from vllm_tiered_kv.tiers.disk.walk import (
    FolderMade,
    Foreign,
    Found,
    FoundIdentity,
    FoundMark,
    FoundTemp,
    Item,
    Left,
    Step,
    Unreadable,
    Walk,
)

__all__ = [
    "FolderMade",
    "Foreign",
    "Found",
    "FoundIdentity",
    "FoundMark",
    "FoundTemp",
    "Item",
    "Unreadable",
    "remove_vacant",
    "scan_root",
]


def scan_root(
    files: Files, root: Path, is_left: Callable[[FoundTemp], bool] = lambda _: False
) -> Iterator[Item]:
    """Everything below `root`, in no order, as it is asked for; memory and descriptors are bounded.

    What vanishes or appears meanwhile may be told or not. Close the iterator to stop early. Never
    raises OSError.

    Args:
        is_left: whether a temporary file was left behind: it is removed, and not told.
    """
    for step in Walk(files).root(root):
        if not isinstance(step, Step):
            continue
        item = step.item
        if (
            isinstance(item, FoundTemp)
            and is_left(item)
            and _unlinked(files, step.name, step.folder)
        ):
            continue
        yield item


def remove_vacant(files: Files, root: Path, namespace: str, since_ns: int) -> bool:
    """Removes a model's namespace that holds nothing; whether it did. Never raises OSError.

    Only empty folders go, and the file that says what it was: its time is when an engine last used
    the namespace.

    Args:
        since_ns: one used later stays; nanoseconds since the epoch.
    """
    if not is_models_namespace(namespace):
        return False
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        top = open_path(files, root, [], opened)
        folder = open_folder(files, namespace, top)
        opened.callback(close, files, folder)
        used_ns = _used_ns(files, folder)
        if (files.fstat(folder).st_mtime_ns if used_ns is None else used_ns) >= since_ns:
            return False
        steps = opened.enter_context(contextlib.closing(Walk(files).namespace(top, namespace)))
        for step in steps:
            if isinstance(step, Left) and step.name != namespace:
                files.rmdir(step.name, dir_fd=step.folder)
        if (_used_ns(files, folder) or 0) >= since_ns:
            return False
        _unlinked(files, IDENTITY_FILE, folder)
        files.rmdir(namespace, dir_fd=top)
        return True
    return False


def _used_ns(files: Files, folder: int) -> int | None:
    try:
        return files.stat(IDENTITY_FILE, dir_fd=folder).st_mtime_ns
    except FileNotFoundError:
        return None


def _unlinked(files: Files, name: str, folder: int) -> bool:
    try:
        files.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True
