# SPDX-License-Identifier: Apache-2.0
"""What a namespace stands for, in plain words, for whoever looks into the tier's folder."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_tiered_kv.tiers.disk.failures import FailureReason, reason_of
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import close, open_path
from vllm_tiered_kv.tiers.disk.names import (
    IDENTITY_FILE,
    IDENTITY_TOKEN,
    temp_file,
    valid_namespace,
)
from vllm_tiered_kv.tiers.disk.transfer import transfer

MAX_IDENTITY = 1 << 18
"""Bytes of such a file that are read."""


def write_identity(
    files: Files, root: Path, namespace: str, facts: Mapping[str, object]
) -> FailureReason | None:
    """Puts `facts` as JSON into the namespace's folder, which is made if need be.

    Never raises OSError. The file is replaced as a whole; it names things, and decides nothing. A
    folder which has its name is left there.

    Returns:
        None, or why there is no such file now.
    """
    if not valid_namespace(namespace):
        return FailureReason.NAME
    try:
        content = msgspec.json.format(msgspec.json.encode(facts, order="sorted")) + b"\n"
    except (TypeError, ValueError):
        return FailureReason.INVALID
    with contextlib.ExitStack() as opened:
        try:
            folder = open_path(files, root, [namespace], opened, make=True)
            _replace(files, folder, content)
        except IsADirectoryError:
            return None
        except OSError as error:
            return reason_of(error)
    return None


def read_identity(files: Files, root: Path, namespace: str) -> bytes | None:
    """What the file holds; None where there is none that can be read. Never raises OSError."""
    if not valid_namespace(namespace):
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        folder = open_path(files, root, [namespace], opened)
        fd = files.open(IDENTITY_FILE, flags, dir_fd=folder)
        opened.callback(close, files, fd)
        nbytes = files.fstat(fd).st_size
        content = memoryview(bytearray(min(nbytes, MAX_IDENTITY)))
        if 0 < nbytes <= MAX_IDENTITY and transfer(files.preadv, fd, [content]):
            return bytes(content)
    return None


def _replace(files: Files, folder: int, content: bytes) -> None:
    temp = temp_file(f"{IDENTITY_TOKEN}{secrets.token_hex(12)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = files.open(temp, flags, dir_fd=folder)
    try:
        try:
            if not transfer(files.pwritev, fd, [memoryview(content)]):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        finally:
            files.close(fd)
        files.rename(temp, IDENTITY_FILE, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(temp, dir_fd=folder)
        raise
