# SPDX-License-Identifier: Apache-2.0
"""Sets of small numbers as the bits of an integer."""

from __future__ import annotations

from collections.abc import Iterable


def bit_mask(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def bits_of(mask: int) -> tuple[int, ...]:
    return tuple([bit for bit in range(mask.bit_length()) if mask >> bit & 1])
