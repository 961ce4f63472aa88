# SPDX-License-Identifier: Apache-2.0
"""Reading vLLM's configuration one ingredient at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from vllm_tiered_kv.identity.canonical import Canonical, canonical

T = TypeVar("T")

NOTHING = Canonical("")
"""Stands where an ingredient could not be read."""


class Reader:
    """Reads one ingredient at a time and keeps the reasons why one could not be read."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def read(self, what: str, get: Callable[[], T], otherwise: T) -> T:
        """What ``get`` returns, or ``otherwise`` and a reason that names ``what``."""
        try:
            return get()
        except Exception as error:  # noqa: BLE001 - a renamed option must not stop the engine
            self.reasons.append(f"{what} cannot be told: {error or type(error).__name__}")
            return otherwise

    def refuse_if(self, refused: object, reason: str) -> None:
        """Add a reason if ``refused`` is true."""
        if refused:
            self.reasons.append(reason)


def chosen(config: object, names: Iterable[str]) -> Canonical:
    """Some of a configuration's options; one that does not exist is None."""
    return canonical({name: getattr(config, name, None) for name in names})


def dtype_name(dtype: object) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def environment(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Those of some environment variables that are set."""
    return tuple((name, os.environ[name]) for name in sorted(names) if name in os.environ)
