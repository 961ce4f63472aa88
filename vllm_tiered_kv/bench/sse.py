# SPDX-License-Identifier: Apache-2.0
"""Server-sent events out of bytes, as the HTML standard has them (section 9.2.6)."""

from __future__ import annotations

MAX_EVENT = 1 << 22


class EventTooLong(ValueError):
    """An event larger than :data:`MAX_EVENT` bytes."""


class EventParser:
    """Takes bytes as they come, cut anywhere; gives the data of whole events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that these bytes complete.

        Raises:
            EventTooLong: one has no end.
        """
        text = self._rest + chunk
        # A carriage return at the very end may be half of a line's end.
        held = b"\r" if text.endswith(b"\r") else b""
        text = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest = rest + held
        found = [event for line in lines if (event := self._line(line)) is not None]
        if self._size + len(self._rest) > MAX_EVENT:
            raise EventTooLong(f"an event of more than {MAX_EVENT} bytes")
        return found

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._size = self._data, [], 0
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
        return None
