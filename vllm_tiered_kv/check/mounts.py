# SPDX-License-Identifier: Apache-2.0
"""Which file system a folder is on."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True):
    """One line of ``/proc/self/mountinfo`` (proc(5))."""

    point: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}, mounted at {self.point}"


def find_mount(folder: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount that ``folder`` is below; None if it cannot be told."""
    try:
        lines = table.read_text(errors="replace").splitlines()
        target = folder.resolve()
    except (OSError, RuntimeError):
        return None
    best: Mount | None = None
    for line in lines:
        fields, dash, rest = line.partition(" - ")
        words, kind = fields.split(" "), rest.partition(" ")[0]
        if not dash or len(words) < 5:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), words[4])
        if not target.is_relative_to(point):
            continue
        if best is None or len(point) >= len(best.point):  # of two at one place the later is seen
            best = Mount(point, kind)
    return best
