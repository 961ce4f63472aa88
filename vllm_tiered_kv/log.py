# SPDX-License-Identifier: Apache-2.0
"""Loggers that vLLM shows, and each kind of trouble said once."""

from __future__ import annotations

import logging
import threading


def get_logger(module: str) -> logging.Logger:
    """A module's logger, below ``vllm``: vLLM gives only its own loggers a level and handlers."""
    return logging.getLogger("vllm." + module.removeprefix("vllm_"))


_LINE = "tiered-kv: %s (said once; counted in %s, kind %r)"


class OncePerKind:
    """Warns the first time a kind of failure is seen.

    Args:
        logger: takes the lines.
        counted: where all of them are counted.
    """

    def __init__(
        self, logger: logging.Logger, counted: str = "vllm:tiered_kv_failures_total"
    ) -> None:
        self._logger = logger
        self._counted = counted
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, kind: str, message: str) -> None:
        """Log a failure without a traceback."""
        if self._first(kind):
            self._logger.warning(_LINE, message, self._counted, kind)

    def error(self, kind: str, message: str) -> None:
        """Log the exception being handled with its traceback."""
        if self._first(kind):
            self._logger.exception(_LINE, message, self._counted, kind)

    def _first(self, kind: str) -> bool:
        with self._lock:
            if kind in self._seen:
                return False
            self._seen.add(kind)
            return True
