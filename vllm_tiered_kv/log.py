# SPDX-License-Identifier: Apache-2.0
"""Log each kind of trouble once; the counters say how often it came."""

from __future__ import annotations

import threading
from typing import Any


class OncePerKind:
    """Warns the first time a kind of failure is seen."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, kind: str, message: str, *args: object) -> None:
        with self._lock:
            if kind in self._seen:
                return
            self._seen.add(kind)
        self._logger.warning(
            "tiered-kv: " + message + " (said once; counted as failures{kind=%r})", *args, kind
        )
