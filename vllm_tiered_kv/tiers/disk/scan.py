# SPDX-License-Identifier: Apache-2.0
"""What is on disk, and ways to be rid of it. No file is opened, no link below the root followed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import close, open_folder, open_path
from vllm_tiered_kv.tiers.disk.names import (
    IDENTITY_FILE,
    TEMP_FOLDER,
    chunk_file,
    is_temp_file,
    rank_folder,
    shard_folder,
    valid_namespace,
)
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
    "remove_found",
    "remove_namespace",
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


def remove_namespace(files: Files, root: Path, namespace: str) -> Iterator[Found | FoundTemp]:
    """Removes a namespace: our files, then the folders that are empty. Foreign files stay.

    Works as it is asked for the next one removed. Never raises OSError.
    """
    if not valid_namespace(namespace):
        return
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        top = open_path(files, root, [], stack)
        for step in Walk(files).namespace(top, namespace):
            if isinstance(step, Left):
                if step.name == namespace and step.folder == top:
                    _remove_identity(files, top, namespace)
                with contextlib.suppress(OSError):
                    files.rmdir(step.name, dir_fd=step.folder)
            elif isinstance(step.item, (Found, FoundTemp)) and _unlinked(
                files, step.name, step.folder
            ):
                yield step.item
            elif isinstance(step.item, FoundMark):
                _unlinked(files, step.name, step.folder)


def remove_found(files: Files, root: Path, found: Found | FoundTemp) -> bool:
    """Whether there was such a file, of whatever namespace and rank, and it is gone."""
    folders = (
        [found.namespace] if found.rank is None else [found.namespace, rank_folder(found.rank)]
    )
    if isinstance(found, Found):
        name = chunk_file(found.key, found.group)
        folders.append(shard_folder(found.key))
    else:
        name = found.name if is_temp_file(found.name) else None
        folders += [] if found.rank is None else [TEMP_FOLDER]
    if name is None or not valid_namespace(found.namespace):
        return False
    with contextlib.ExitStack() as stack:
        try:
            folder = open_path(files, root, folders, stack)
        except OSError:
            return False
        return _unlinked(files, name, folder)


def _remove_identity(files: Files, top: int, namespace: str) -> None:
    with contextlib.suppress(OSError):
        folder = open_folder(files, namespace, top)
        _unlinked(files, IDENTITY_FILE, folder)
        close(files, folder)


def _unlinked(files: Files, name: str, folder: int) -> bool:
    try:
        files.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True
