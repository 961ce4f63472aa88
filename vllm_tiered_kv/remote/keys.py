# SPDX-License-Identifier: Apache-2.0
"""The fleet's key: one CURVE pair that every engine which hands over KV has.

Its file is one line, a name and the secret half in hexadecimal digits; the public half follows
from it. Both ends of a connection prove that they have it (RFC 26/CurveZMQ).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

NAME = "vllm-tiered-kv-key-1"
"""What a key file begins with."""
_LINE = re.compile(rb"vllm-tiered-kv-key-1 ([0-9a-f]{64})\n?")
_MAX_FILE = 256  # bytes
_TICKETS = b"tiered-kv ticket"  # at most 16 bytes: blake2b's "person"
_FINGERPRINT = b"tiered-kv finger"


class KeyFileError(ValueError):
    """A key file that cannot be used; the message says why, and names no part of the key."""


class FleetKey(msgspec.Struct, frozen=True):
    """One CURVE pair, raw."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"FleetKey({self.fingerprint})"

    @property
    def fingerprint(self) -> str:
        """12 hexadecimal digits for logs: two engines with the same ones have the same key."""
        return hashlib.blake2b(self.public, digest_size=6, person=_FINGERPRINT).hexdigest()

    @property
    def sealing(self) -> bytes:
        """The key that tickets are sealed with, 32 bytes."""
        return hashlib.blake2b(key=self.secret, digest_size=32, person=_TICKETS).digest()


def generate() -> FleetKey:
    """A new key.

    Raises:
        KeyFileError: this libzmq has no CURVE.
    """
    if not zmq.has("curve"):
        raise KeyFileError("this build of ZeroMQ (libzmq) has no CURVE encryption")
    public, secret = zmq.curve_keypair()
    return FleetKey(z85.decode(public), z85.decode(secret))


def write(path: Path, key: FleetKey) -> None:
    """Write a key file, readable by its owner alone. What is there is never overwritten.

    Raises:
        KeyFileError: it is there already, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        _check_folder(path)
        file = os.open(path, flags, 0o600)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(f"{NAME} {key.secret.hex()}\n".encode())
                opened.flush()
                os.fsync(opened.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
    except FileExistsError:
        raise KeyFileError(f"{path}: is there already; a key is never overwritten") from None
    except FileNotFoundError:
        raise KeyFileError(f"{path}: its folder does not exist; make it first") from None
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be written: {error.strerror or error}") from None


def load(path: Path) -> FleetKey:
    """Read a key file that nobody else can have read or exchanged.

    Raises:
        KeyFileError: it is no such file.
    """
    # Not to follow a link, nor to wait for what a pipe may say.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        _check_folder(path)
        file = os.open(path, flags)
    except OSError as error:
        if path.is_symlink():
            raise KeyFileError(f"{path}: is a symbolic link; name the file itself") from None
        if isinstance(error, FileNotFoundError):
            raise KeyFileError(
                f"{path}: cannot be read: there is no such file; copy the fleet's key to it, or "
                f"make one, once for the fleet, with: vllm-tiered-kv keygen {path}"
            ) from None
        raise KeyFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        _check_file(path, os.fstat(file))
        data = os.read(file, _MAX_FILE)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    finally:
        os.close(file)
    match = _LINE.fullmatch(data)
    if match is None:
        raise KeyFileError(
            f"{path}: is not a key file; remove it, and make one with: vllm-tiered-kv keygen {path}"
        )
    secret = bytes.fromhex(match[1].decode())
    try:
        public = zmq.curve_public(z85.encode(secret))
    except (zmq.ZMQError, ValueError) as error:
        raise KeyFileError(f"{path}: this key cannot be used: {error}") from None
    return FleetKey(z85.decode(public), secret)


def _check_folder(path: Path) -> None:
    if not path.is_absolute():
        raise KeyFileError(f"{path}: must be an absolute path")
    if "\0" in str(path):
        raise KeyFileError(f"{str(path)!r}: is not a path")
    folder = path.parent.stat()
    if folder.st_mode & stat.S_IWOTH:
        raise KeyFileError(
            f"{path}: everybody may write to its folder, and so could exchange the file; keep it "
            "in one that only its owner may write to"
        )


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path}: is not a regular file")
    if status.st_uid != os.geteuid():
        raise KeyFileError(
            f"{path}: belongs to user {status.st_uid}, but this process runs as {os.geteuid()}"
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise KeyFileError(f"{path}: others have access to it (mode {mode:04o}): chmod 600 it")
    if status.st_nlink != 1:
        raise KeyFileError(f"{path}: has {status.st_nlink} names (hard links); it must have one")
