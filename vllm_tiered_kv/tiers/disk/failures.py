# SPDX-License-Identifier: Apache-2.0
"""What a failed file call means to the tier."""

from __future__ import annotations

import enum
import errno


class FailureReason(enum.Enum):
    """Why nothing was written or read. Nothing on disk is known to be wrong."""

    NO_SPACE = "no_space"
    """The file system or a quota is full."""
    READ_ONLY = "read_only"
    PERMISSION = "permission"
    IO = "io"
    """The device, or the server behind it."""
    GONE = "gone"
    """A folder vanished, also when it was made again."""
    NAME = "name"
    """No file can be named like this: the key or the group is out of bounds."""
    FOREIGN = "foreign"
    """A link, or something else that is not ours, stands where a folder or file should."""
    OCCUPIED = "occupied"
    """The same in the place of one chunk's file, or of the few whose folder it is."""
    DESCRIPTORS = "descriptors"
    """The process or the system has no file descriptor left."""
    INVALID = "invalid"
    """The caller's memory or facts don't fit together."""
    OTHER = "other"


GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""May mean that an open folder is not the one its name leads to any more."""

_REASONS: dict[int, FailureReason] = {
    errno.ENOSPC: FailureReason.NO_SPACE,
    errno.EDQUOT: FailureReason.NO_SPACE,
    errno.EFBIG: FailureReason.NO_SPACE,
    errno.EROFS: FailureReason.READ_ONLY,
    errno.EACCES: FailureReason.PERMISSION,
    errno.EPERM: FailureReason.PERMISSION,
    errno.EIO: FailureReason.IO,
    errno.ESTALE: FailureReason.IO,
    errno.ETIMEDOUT: FailureReason.IO,
    errno.ENODEV: FailureReason.IO,
    errno.EREMOTEIO: FailureReason.IO,
    errno.ENOTCONN: FailureReason.IO,
    errno.EHOSTDOWN: FailureReason.IO,
    errno.ENOENT: FailureReason.GONE,
    errno.ENAMETOOLONG: FailureReason.NAME,
    errno.ELOOP: FailureReason.FOREIGN,
    errno.ENOTDIR: FailureReason.FOREIGN,
    errno.EISDIR: FailureReason.FOREIGN,
    errno.ENXIO: FailureReason.FOREIGN,
    errno.EMFILE: FailureReason.DESCRIPTORS,
    errno.ENFILE: FailureReason.DESCRIPTORS,
}


FOREIGN = frozenset(code for code, reason in _REASONS.items() if reason is FailureReason.FOREIGN)
"""Something else than a folder or file of ours stands there."""

OF_ONE_CHUNK = frozenset(
    {FailureReason.NAME, FailureReason.OCCUPIED, FailureReason.INVALID},
)
"""Say nothing about the device, nor about any other chunk."""


class Occupied(OSError):
    """A chunk's place is taken; see :attr:`FailureReason.OCCUPIED`."""


def reason_of(error: OSError) -> FailureReason:
    if isinstance(error, Occupied):
        return FailureReason.OCCUPIED
    return _REASONS.get(error.errno or 0, FailureReason.OTHER)
