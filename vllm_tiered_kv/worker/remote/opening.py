# SPDX-License-Identifier: Apache-2.0
"""Opens a transport on a thread of its own.

All of a rank's memory, pages and slots, is registered at once and as it is: few and large regions
keep what peers must be told small, and what they have been told never changes. Registering it costs
nothing over tcp and CMA. Over RDMA it pins the memory, so a large pool that isn't faulted in yet
takes as long as faulting it in: no step waits for that longer than for NIXL itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm_tiered_kv.remote.transport import Transport, TransportError


class Opening:
    """A transport on its way.

    Args:
        open_it: opens it; raises `TransportError`, `OSError` or `RuntimeError` if it can't.
    """

    def __init__(self, open_it: Callable[[], Transport]) -> None:
        self._open_it = open_it
        self._transport: Transport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tiered-kv-remote-open", daemon=True)
        self._thread.start()

    def ended(self, timeout: float) -> bool:
        """Whether :meth:`take` has an answer; waits for it at most so many seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def take(self) -> Transport:
        """The transport; once, and after :meth:`ended` has said so.

        Raises:
            TransportError: there is none; says why.
        """
        transport, self._transport = self._transport, None
        if transport is None:
            raise TransportError(str(self._error))
        return transport

    def _run(self) -> None:
        try:
            self._transport = self._open_it()
        except Exception as error:  # noqa: BLE001 - told by take()
            self._error = error
