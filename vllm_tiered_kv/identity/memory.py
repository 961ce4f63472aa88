# SPDX-License-Identifier: Apache-2.0
"""Digests of files remembered from one start to the next, so that weights are read once.

One small JSON file in the user's cache folder. It is an optimisation only: anything wrong
with it, and it is as if it were empty. Several processes may write it; the last one wins,
after merging what it finds.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from pathlib import Path

import msgspec

MAX_ENTRIES = 4096
MAX_FILE_BYTES = 8 << 20

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORMAT = 1


class FileKey(msgspec.Struct, frozen=True):
    """A file as the system knows it; content that changes changes at least one of these.

    ``ctime_ns`` is set by the system alone, so it also tells a file rewritten in place and
    given back its old modification time.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> FileKey:
        return cls(
            path,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
            status.st_dev,
        )

    @property
    def changed_ns(self) -> int:
        """When it last changed, nanoseconds since the epoch, by its file system's clock."""
        return max(self.mtime_ns, self.ctime_ns)


class _Entry(msgspec.Struct, frozen=True):
    file: FileKey
    sha256: str
    used: float


class _Content(msgspec.Struct, frozen=True):
    format: int
    entries: list[_Entry]


class DigestMemory:
    """Remembers the SHA-256 of at most :data:`MAX_ENTRIES` files, the last used ones.

    Not safe for threads to share.
    """

    def __init__(self, path: Path | None) -> None:
        """``path``: where it is kept; None for one that does not outlive this object."""
        self._path = path
        self._entries = self._read()

    @classmethod
    def default(cls) -> DigestMemory:
        """The user's own: ``$XDG_CACHE_HOME/vllm-tiered-kv/weights.json``."""
        home = cache_home()
        return cls(None if home is None else home / "vllm-tiered-kv" / "weights.json")

    def get(self, key: FileKey) -> str | None:
        """64 hexadecimal digits, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries[key] = msgspec.structs.replace(entry, used=time.time())
        return entry.sha256

    def put(self, key: FileKey, sha256: str) -> None:
        """Remember a digest; :meth:`save` makes it last."""
        self._entries[key] = _Entry(key, sha256, time.time())

    def save(self) -> None:
        """Write the file anew. A failure is not reported: the next start reads again."""
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._path, {**self._read(), **self._entries})

    @staticmethod
    def _write(path: Path, entries: dict[FileKey, _Entry]) -> None:
        # One file has one current state; what it was before is of no use.
        by_path = {entry.file.path: entry for entry in sorted(entries.values(), key=_used)}
        kept = sorted(by_path.values(), key=_used)[-MAX_ENTRIES:]
        data = msgspec.json.encode(_Content(_FORMAT, kept))
        if len(data) > MAX_FILE_BYTES:
            kept = kept[-MAX_ENTRIES // 8 :]
            data = msgspec.json.encode(_Content(_FORMAT, kept))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _read(self) -> dict[FileKey, _Entry]:
        if self._path is None:
            return {}
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError):
            return {}
        try:
            with os.fdopen(descriptor, "rb") as file:
                if not _ours(os.fstat(file.fileno())):
                    return {}
                content = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_Content)
        except (OSError, ValueError, RecursionError):
            return {}
        if content.format != _FORMAT:
            return {}
        good = (e for e in content.entries[-MAX_ENTRIES:] if _SHA256.fullmatch(e.sha256))
        return {entry.file: entry for entry in good}


def cache_home() -> Path | None:
    """``$XDG_CACHE_HOME`` where it is an absolute path, as its specification asks; else
    ``~/.cache``; None for a user without a home."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if configured.is_absolute():
        return configured
    usual = Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 - unlike Path's it does not raise
    return usual if usual.is_absolute() else None


def _ours(status: os.stat_result) -> bool:
    """A plain file of this user that nobody else can write, of a plausible size."""
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        and status.st_size <= MAX_FILE_BYTES
    )


def _used(entry: _Entry) -> float:
    return entry.used
