# SPDX-License-Identifier: Apache-2.0
"""Whether the disk tier can use its folder. Nothing is made: what is written has no name."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from vllm_tiered_kv.check.findings import Finding, error, ok, warning
from vllm_tiered_kv.check.mounts import Mount, find_mount
from vllm_tiered_kv.config import DiskOptions, format_size
from vllm_tiered_kv.tiers.disk.direct import IoMode, try_folder
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import close, is_open_to_others, open_root
from vllm_tiered_kv.tiers.disk.scan import Found, scan_root

SCAN_SECONDS = 3.0
"""What is in the folder is counted for so long."""
_MEMORY = ("tmpfs", "ramfs")
_LAYERS = ("overlay", "aufs")


class Held(msgspec.Struct, frozen=True):
    """What is in the folder already."""

    nbytes: int
    files: int
    complete: bool
    """False: there was no time to count all."""


class Folder(msgspec.Struct, frozen=True):
    """What was found. Bytes; None where it was not looked at, or is not known."""

    nearest: str
    """The folder itself, else the nearest one above it that there is."""
    problem: str | None = None
    """Why it cannot be used."""
    is_there: bool = False
    open_to_others: bool = False
    mount: Mount | None = None
    total: int | None = None
    free: int | None = None
    io: IoMode | None = None
    held: Held | None = None


def look(disk: DiskOptions, files: Files | None = None) -> Folder:
    """What there is. May hang where a mount does; see :mod:`.bounded`."""
    files = files or Files()
    path = Path(disk.path)
    try:
        nearest, fd = _open_nearest(files, path)
    except OSError as failed:
        return Folder(disk.path, f"{failed.filename or disk.path}: {failed.strerror or failed}")
    try:
        return _look(files, path, nearest, fd)
    finally:
        close(files, fd)


def _look(files: Files, path: Path, nearest: Path, fd: int) -> Folder:
    is_there = nearest == path
    status = files.fstat(fd)
    found = Folder(
        str(nearest),
        is_there=is_there,
        open_to_others=is_there and is_open_to_others(status, os.geteuid()),
        mount=find_mount(nearest),
    )
    if not is_there and path.is_symlink():
        return msgspec.structs.replace(found, problem=f"{path}: is a link that leads nowhere")
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        mode = f"user {status.st_uid}, mode {status.st_mode & 0o7777:04o}"
        why = f"{nearest}: may not be written to by user {os.geteuid()} (it is of {mode})"
        return msgspec.structs.replace(found, problem=why)
    try:
        io = try_folder(files, fd)
        room = files.statvfs(fd)
    except OSError as failed:
        why = f"{nearest}: nothing can be written there: {failed.strerror or failed}"
        return msgspec.structs.replace(found, problem=why)
    return msgspec.structs.replace(
        found,
        io=io,
        # Some file systems do not say.
        total=room.f_blocks * room.f_frsize or None,
        free=room.f_bavail * room.f_frsize if room.f_blocks else None,
        held=_count(files, path) if is_there else Held(0, 0, complete=True),
    )


def _open_nearest(files: Files, path: Path) -> tuple[Path, int]:
    """Raises: OSError: what is there is no folder, or may not be opened."""
    for folder in (path, *path.parents):
        try:
            return folder, open_root(files, folder)
        except FileNotFoundError:
            continue
    raise FileNotFoundError(path)


def _count(files: Files, root: Path) -> Held:
    nbytes = number = 0
    deadline = time.monotonic() + SCAN_SECONDS
    for item in scan_root(files, root):
        if isinstance(item, Found):
            nbytes += item.size
            number += 1
        if time.monotonic() > deadline:
            return Held(nbytes, number, complete=False)
    return Held(nbytes, number, complete=True)


def judge(disk: DiskOptions, folder: Folder) -> list[Finding]:
    """Pure."""
    if folder.problem is not None:
        return [error("disk.path", folder.problem)]
    return [*_path(disk, folder), *_room(disk, folder), _io(folder)]


def _path(disk: DiskOptions, folder: Folder) -> list[Finding]:
    where = f" ({folder.mount})" if folder.mount is not None else ""
    if folder.is_there:
        findings = [ok("disk.path", f"{disk.path}{where} can be used")]
    else:
        says = f"{disk.path} is not there; it will be made below {folder.nearest}{where}"
        findings = [ok("disk.path", says)]
    if folder.open_to_others:
        findings.append(
            warning(
                "disk.path",
                f"other users may write to {disk.path}: whoever can may put there what prompts "
                "are answered from; name a folder that is yours alone",
            )
        )
    kind = folder.mount.kind if folder.mount is not None else ""
    if kind in _MEMORY:
        findings.append(warning("disk.path", f"{kind} is memory, and is lost with the machine"))
    if kind in _LAYERS:
        says = f"{kind} is mostly a container's own layer, and is lost with it; mount a volume"
        findings.append(warning("disk.path", says))
    return findings


def _room(disk: DiskOptions, folder: Folder) -> list[Finding]:
    held, free = folder.held, folder.free
    if held is None or free is None:
        return [ok("disk.capacity", f"{_capacity(disk)}; how much room there is cannot be told")]
    holds = f"{'' if held.complete else 'at least '}{format_size(held.nbytes)}"
    inside = f", and {holds} in {held.files:,} files of the tier's own" if held.files else ""
    room = f"{format_size(free)} are free{inside}"
    if free + held.nbytes <= disk.min_free and held.complete:
        kept = format_size(disk.min_free)
        return [error("disk.min_free", f"nothing can be written: {room}, and {kept} stay free")]
    if held.nbytes > disk.capacity:
        says = f"{_capacity(disk)}, and {holds} are in it: what is over goes when an engine starts"
        return [warning("disk.capacity", says)]
    reach = free + held.nbytes - disk.min_free
    if disk.capacity > reach and held.complete:
        says = (
            f"{_capacity(disk)}, but {room}: with disk.min_free {format_size(disk.min_free)} it "
            f"holds {format_size(reach)} at most"
        )
        return [warning("disk.capacity", says)]
    return [ok("disk.capacity", f"{_capacity(disk)}; {room}")]


def _capacity(disk: DiskOptions) -> str:
    return format_size(disk.capacity)


def _io(folder: Folder) -> Finding:
    if folder.io is IoMode.DIRECT:
        return ok("disk", "files can be written and read, past the page cache (O_DIRECT)")
    return ok(
        "disk",
        "files can be written and read; the file system refuses O_DIRECT, so they also take room "
        "in the page cache",
    )
