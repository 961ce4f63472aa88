# SPDX-License-Identifier: Apache-2.0
"""The digest of all that a model loads: the same for the same content on every node.

It is computed on a thread of its own after the engine has started, since a large model takes
minutes to read; until it is known, chunks stay in the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_tiered_kv.identity import folder, sources
from vllm_tiered_kv.identity.canonical import Unidentifiable, digest
from vllm_tiered_kv.identity.hashing import Cancelled, FileHasher, Unreadable, process_start_ns
from vllm_tiered_kv.identity.memory import DigestMemory
from vllm_tiered_kv.identity.namespace import Established, Unestablished, WeightsResult

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import VllmConfig
from vllm_tiered_kv.log import get_logger

logger = get_logger(__name__)

_NICENESS = 10
"""Of the thread, added to the process's: tokens come first."""


class _Folder(msgspec.Struct, frozen=True):
    """One source's content: which files were picked, and (name, bytes, SHA-256) of each."""

    family: str
    files: tuple[tuple[str, int, str], ...]


class _Content(msgspec.Struct, frozen=True):
    folders: tuple[_Folder, ...] = ()
    dummy: str | None = None


class WeightsDigester:
    """Computes one digest in the background.

    Args:
        plan: what loads.
        memory: digests of earlier starts; None for the user's own.
        unchanged_since_ns: see :class:`.FileHasher`.
    """

    def __init__(
        self,
        plan: sources.Plan | Unestablished,
        *,
        memory: DigestMemory | None = None,
        unchanged_since_ns: int | None = None,
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._unchanged_since_ns = unchanged_since_ns
        self._cancelled = threading.Event()
        self._delivery = threading.RLock()
        self._thread: threading.Thread | None = None

    def start(self, on_done: Callable[[WeightsResult], None]) -> None:
        """Begin. ``on_done`` is called once, on the digester's thread, unless cancelled.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("a digester starts only once")
        self._thread = threading.Thread(
            target=self._run, args=(on_done,), name="tiered-kv-weights", daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        """Stop within one block. ``on_done`` is not called once this has returned."""
        self._cancelled.set()
        with self._delivery:
            pass  # a call under way ends first

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the thread; whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> WeightsResult:
        """Compute it here and now; every failure is an :class:`.Unestablished`."""
        if isinstance(self._plan, Unestablished):
            return self._plan
        try:
            memory = self._memory if self._memory is not None else DigestMemory.default()
            hasher = FileHasher(memory, self._cancelled, self._unchanged_since_ns)
            return _establish(self._plan, hasher)
        except Cancelled:
            return Unestablished("the digest of the weights was cancelled")
        except (sources.Refused, Unreadable, Unidentifiable) as error:
            return Unestablished(str(error))
        except OSError as error:
            return Unestablished(f"the weights cannot be read: {error}")
        except Exception as error:  # a digest must never stop the engine
            logger.warning("the digest of the weights failed", exc_info=True)
            return Unestablished(f"the digest of the weights failed: {error!r}")

    def _run(self, on_done: Callable[[WeightsResult], None]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        result = self.result()
        with self._delivery:
            if self._cancelled.is_set():
                return
            try:
                on_done(result)
            except Exception:
                logger.exception("the weights' digest could not be delivered")


def start_weights(
    vllm_config: VllmConfig, on_done: Callable[[WeightsResult], None]
) -> WeightsDigester:
    """Start computing the digest of this engine's weights. Never raises.

    ``on_done`` is called on another thread, once, possibly before this returns. A file that
    changed after this process started is refused: it may not be what was loaded.
    """
    digester = WeightsDigester(_plan(vllm_config), unchanged_since_ns=process_start_ns())
    digester.start(on_done)
    return digester


def _plan(vllm_config: VllmConfig) -> sources.Plan | Unestablished:
    try:
        return sources.plan(vllm_config)
    except (sources.Refused, Unidentifiable) as error:
        return Unestablished(str(error))
    except Exception as error:  # noqa: BLE001 - a renamed option must not stop the engine
        return Unestablished(f"how the weights load cannot be told: {error!r}")


def _establish(plan: sources.Plan, hasher: FileHasher) -> Established:
    if plan.dummy is not None:
        made = digest("weights", _Content(dummy=plan.dummy))
        return Established(made, None if plan.draft is None else made)
    draft = None if plan.draft is None else _combine(plan.draft, hasher)
    return Established(_combine(plan.target, hasher), draft)


def _combine(parts: Sequence[sources.Source], hasher: FileHasher) -> str:
    return digest("weights", _Content(tuple(_folder(part, hasher) for part in parts)))


def _folder(source: sources.Source, hasher: FileHasher) -> _Folder:
    root = folder.resolve(source)
    hasher.check_root(root)
    family, found = folder.loaded_files(source, root)
    digests = tuple((name, *hasher.digest(path)) for name, path in sorted(found.items()))
    return _Folder(family.value, digests)
