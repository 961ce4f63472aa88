# SPDX-License-Identifier: Apache-2.0
"""What people write on a command line, and how figures are printed."""

from __future__ import annotations

import math
import re

from vllm_tiered_kv.config import Size, format_size
from vllm_tiered_kv.sizing.errors import SizingError

_TOKENS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([KM]?)", re.IGNORECASE)
_NAME = re.compile(r"\w[\w .:/+-]{0,39}")
_SECONDS = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*(us|ms|s|min|m|h|d)?", re.IGNORECASE)
_SECONDS_OF = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
_NUMBER = re.compile(r"(\d{1,24}(?:\.\d{1,24})?(?:e[+]?\d{1,2})?)\s*([KMGBTP]?)", re.IGNORECASE)

MAX_CONTEXT = 1 << 24


def parse_tokens(text: str) -> int:
    """``"128K"`` -> 131072.

    Raises:
        SizingError: it is not a number of tokens from 1 to 16M.
    """
    match = _TOKENS.fullmatch(text.strip())
    scale = {"": 1, "K": 1 << 10, "M": 1 << 20}
    tokens = int(float(match[1]) * scale[match[2].upper()]) if match is not None else 0
    if not 1 <= tokens <= MAX_CONTEXT:
        raise SizingError(
            f'{text!r} is not a number of tokens from 1 to 16M, like "8192" or "128K"'
        )
    return tokens


def parse_size(text: str) -> int:
    """``"64GiB"`` -> bytes.

    Raises:
        SizingError: it is not a size.
    """
    try:
        return int(Size.parse(text))
    except ValueError as error:
        raise SizingError(f"{text!r}: {error}") from None


def parse_rate(text: str) -> float:
    """``"50GB/s"`` -> bytes a second.

    Raises:
        SizingError: it is not a rate, has no unit, or is one of bits.
    """
    size = text.strip().removesuffix("/s")
    if size.isdigit():
        raise SizingError(f'{text!r} is not a rate like "50GB/s": it has no unit')
    if size.endswith(("b", "bit", "bps")):  # networks' rates are in bits, an eighth as much
        raise SizingError(f'{text!r}: bits? A rate is in bytes with a capital B, like "50GB/s"')
    return float(parse_size(size))


def parse_seconds(text: str) -> float:
    """``"2ms"`` -> 0.002.

    Raises:
        SizingError: it is not a time.
    """
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise SizingError(f'{text!r} is not a time like "2ms", "30s" or "24h"')
    return float(match[1]) * _SECONDS_OF[(match[2] or "s").lower()]


def parse_number(text: str) -> float:
    """``"70B"``, ``"70e9"``, ``"1979T"`` -> a number.

    Raises:
        SizingError: it is not a positive number.
    """
    match = _NUMBER.fullmatch(text.strip())
    value = float(match[1]) * _PREFIXES[match[2].upper()] if match is not None else 0.0
    if not 0 < value < 1e30 or math.isinf(value):
        raise SizingError(f'{text!r} is not a positive number like "70B", "70e9" or "1979T"')
    return value


def parse_named(text: str) -> tuple[str, str]:
    """``"cpu=64GiB"`` -> its two sides.

    Raises:
        SizingError: there is no name, or nothing behind it.
    """
    name, sign, value = text.partition("=")
    if not sign or not value.strip() or _NAME.fullmatch(name.strip()) is None:
        raise SizingError(f"{text!r}: expected NAME=VALUE, like cpu=64GiB")
    return name.strip(), value.strip()


def show_tokens(tokens: int) -> str:
    """131072 -> ``"128K"``."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"


def show_bytes(nbytes: float) -> str:
    """42949672960 -> ``"42.9 GB"``: decimal units, as makers of memory and links count."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"


def show_capacity(nbytes: int) -> str:
    """As it is written in the connector's options: ``"64 GiB"``."""
    return format_size(nbytes)


def show_rate(rate: float) -> str:
    return f"{show_bytes(rate)}/s"


def show_seconds(seconds: float) -> str:
    """0.17043 -> ``"0.17 s"``."""
    if seconds < 0:
        return f"-{show_seconds(-seconds)}"
    if seconds < 0.1:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
