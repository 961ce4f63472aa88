# SPDX-License-Identifier: Apache-2.0
"""An L2 adapter for LMCache's server: its objects in the disk tier's files.

To be named in its ``--l2-adapter``: type ``plugin``, this module, class `TieredKVL2Adapter`. The
contract is ``L2AdapterInterface`` in lmcache/v1/distributed/l2_adapters/base.py, and how the
controllers in lmcache/v1/distributed/storage_controllers/ call it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from vllm_tiered_kv.config import format_size
from vllm_tiered_kv.integrations.lmcache_objects import (
    HOME,
    Names,
    ObjectMemory,
    layout_of,
    layout_text,
)
from vllm_tiered_kv.log import OncePerKind
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.identity_file import read_identity
from vllm_tiered_kv.tiers.objects.names import ObjectId
from vllm_tiered_kv.tiers.objects.settings import parse_object_options
from vllm_tiered_kv.tiers.objects.store import ObjectStore
from vllm_tiered_kv.tiers.objects.tasks import Ended, Kind, LookUp, Wanted

logger = init_logger(__name__)

QUEUE_SHARE = 2
"""Objects that wait to be written may hold one part in so many of LMCache's memory."""
QUEUE_BYTES = 4 << 30
"""What they may hold where LMCache does not say how much it has."""
MAX_RESULTS = 1 << 14
"""Results that nobody has asked for; the oldest are forgotten."""
DELETE_TIMEOUT = 30.0
"""Seconds, as is the next."""
CLOSE_TIMEOUT = 10.0
MAX_PAGE = 10_000
"""Keys in one page of a list."""


class TieredKVL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """LMCache's objects in files with checksums, below a quota.

    Args:
        params: the ``adapter_params``.
        l1_memory_desc: LMCache's own memory, where it says how much there is.
        files: what makes the file calls.

    Raises:
        ConfigError: an option that cannot be used. A folder that cannot be used is no error.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        l1_memory_desc: Any = None,
        *,
        files: Files | None = None,
    ) -> None:
        options = parse_object_options(params, "adapter_params")
        super().__init__(max_capacity_bytes=int(options.capacity))
        queue = int(options.max_queued or _share_of(l1_memory_desc))
        self._names = Names(options.revision)
        self._files = files or Files()
        self._trouble = OncePerKind(logger, "this adapter's status")
        self._failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False
        self._next_task = 0
        self._signals = {kind: create_event_notifier() for kind in Kind}
        self._results: dict[Kind, OrderedDict[int, Ended]] = {k: OrderedDict() for k in Kind}
        self._keys: dict[FileName, Any] = {}
        """LMCache's keys of what it was told to be stored; the store's thread alone uses it."""
        self._pending: dict[int, dict[FileName, Any]] = {}
        """Keys of what is being stored and loaded, by task."""
        self._store = ObjectStore(options, HOME, queue, self, self._files)
        self._store.start()
        logger.info(
            "tiered-kv: objects go to %s: at most %s, %d readers, %d writers",
            options.path,
            format_size(options.capacity),
            options.readers,
            options.writers,
        )

    def get_store_event_fd(self) -> int:
        return int(self._signals[Kind.STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._signals[Kind.LOOK_UP].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._signals[Kind.LOAD].fileno())

    # -- what LMCache asks for ---------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        task = self._new_task()
        wanted = self._all_wanted(task, keys, objects)
        identities = {
            one.file.namespace: self._names.identity(key.model_name, layout_of(memory))
            for key, memory, one in zip(keys, objects, wanted, strict=True)
            if one is not None
        }
        if not self._store.store(task, wanted, identities):
            self.ended(Ended(task, Kind.STORE, (False,) * len(keys)))
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            results, self._results[Kind.STORE] = self._results[Kind.STORE], OrderedDict()
        return {task: L2StoreResult(all(e.done), e.nbytes) for task, e in results.items()}

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        task = self._new_task()
        layouts = {
            group: layout_text(desc.shapes, desc.dtypes)
            for group, desc in group_layout_descs.items()
        }
        names = tuple(self._names.object_id(key) for key in keys)
        places = tuple(
            () if name is None else self._names.places(name, layouts.get(name.group))
            for name in names
        )
        if not self._store.look_up(LookUp(task, names, places)):
            self.ended(Ended(task, Kind.LOOK_UP, (False,) * len(keys)))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._bitmap(Kind.LOOK_UP, task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._store.unlock(self._object_ids(keys))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        task = self._new_task()
        if not self._store.load(task, self._all_wanted(task, keys, objects)):
            self.ended(Ended(task, Kind.LOAD, (False,) * len(keys)))
        return task

    def query_load_result(self, task_id: int) -> Any:
        return self._bitmap(Kind.LOAD, task_id)

    def delete(self, keys: list[Any]) -> None:
        """Remove objects that are not locked; waits."""
        timeout = min(DELETE_TIMEOUT, self._store.options.io_deadline)
        if keys and not self._store.delete(self._object_ids(keys), timeout):
            logger.warning("tiered-kv: %d objects were not removed in %g s", len(keys), timeout)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """Keys of files; not of those whose salt has not been used since the start.

        Raises:
            ValueError: ``page_size`` is not positive or ``cursor`` is not one of ours.
            RuntimeError: it cannot be told now.
        """
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, not {page_size}")
        models: dict[str, str | None] = {}
        page = self._store.page(
            _parse_cursor(cursor), min(page_size, MAX_PAGE), self._names.is_ours
        )
        if page is None:
            raise RuntimeError("the folder's list cannot be had now")
        entries = []
        for file, nbytes in page:
            if file.namespace not in models:
                models[file.namespace] = self._model(file.namespace)
            model = models[file.namespace]
            if model is None or model_name not in (None, model):
                continue
            key = self._names.listed(file, model)
            if key is not None:
                encoded = EncodedObjectKey(
                    key.chunk_hash.hex(),
                    key.model_name,
                    key.kv_rank,
                    key.object_group_id,
                    key.cache_salt,
                )
                entries.append(KeyEntry(key=encoded, size_bytes=nbytes))
        more = len(page) == min(page_size, MAX_PAGE)
        return KeyListPage(
            entries=tuple(entries), next_page_token=_cursor(page[-1][0]) if more else None
        )

    def get_usage(self) -> Any:
        """Bytes of the whole folder; by salt only what was stored since the start."""
        return dataclasses.replace(super().get_usage(), total_bytes_used=self._store.used)

    def report_status(self) -> dict[str, Any]:
        status, options = self._store.status(), self._store.options
        return {
            "is_healthy": status.is_alive,
            "type": type(self).__name__,
            "path": options.path,
            "capacity_bytes": int(options.capacity),
            "used_bytes": status.used,
            "objects": status.objects,
            "evicted": status.evicted,
            "degraded": status.is_degraded,
            "scanned": status.is_scanned,
            "direct_io": status.direct_io,
            **status.figures,
            **status.counts,
            "failures": {**status.failures, **self._failures},
        }

    def close(self) -> None:
        if not self._store.close(CLOSE_TIMEOUT):
            logger.warning("tiered-kv: a thread is held up by its I/O and is left behind")
        with self._lock:
            self._closed = True
            for signal in self._signals.values():
                signal.close()

    # -- what the store tells; on its thread -------------------------------------------

    def ended(self, ended: Ended) -> None:
        self._pending.pop(ended.task, None)
        with self._lock:
            results = self._results[ended.kind]
            results[ended.task] = ended
            while len(results) > MAX_RESULTS:
                results.popitem(last=False)
            if not self._closed:  # else the descriptor may be another's by now
                self._signals[ended.kind].notify()

    def stored(self, task: int, files: Sequence[tuple[FileName, int]]) -> None:
        keys = self._pending.get(task, {})
        told = [(keys[file], file, nbytes) for file, nbytes in files if file in keys]
        self._keys.update((file, key) for key, file, _ in told)
        self._notify(self._notify_keys_stored, [key for key, _, _ in told], [n for _, _, n in told])

    def loaded(self, task: int, files: Sequence[FileName]) -> None:
        keys = self._pending.get(task, {})
        self._notify(self._notify_keys_accessed, [keys[file] for file in files if file in keys])

    def removed(self, files: Sequence[tuple[FileName, int]]) -> None:
        told = [(self._keys.pop(file), nbytes) for file, nbytes in files if file in self._keys]
        self._notify(self._notify_keys_deleted, [key for key, _ in told], [n for _, n in told])

    def trouble(self, kind: str, message: str) -> None:
        self._trouble.warn(kind, message)

    def bug(self) -> None:
        self._trouble.error("internal", "unexpected error")

    def degraded(self, *, is_degraded: bool) -> None:
        if is_degraded:
            logger.warning("tiered-kv: the folder is in trouble; LMCache goes on without it")
        else:
            logger.info("tiered-kv: the folder works again")

    def scanned(self, objects: int, used: int) -> None:
        logger.info(
            "tiered-kv: %d objects in %s; all in it: %s of %s",
            objects,
            self._store.options.path,
            format_size(used),
            format_size(self._store.options.capacity),
        )

    # -- inside ------------------------------------------------------------------------

    def _notify(self, tell: Callable[..., None], keys: list[Any], *sizes: list[int]) -> None:
        """Tell LMCache's listeners, whatever they make of it."""
        if not keys:
            return
        try:
            tell(keys, *sizes)
        except Exception:  # noqa: BLE001 - theirs; the task still has to end
            self._failures["listener"] += 1
            self._trouble.error("listener", "one of LMCache's listeners failed")

    def _new_task(self) -> int:
        with self._lock:
            self._next_task += 1
            return self._next_task

    def _bitmap(self, kind: Kind, task: int) -> Any:
        with self._lock:
            ended = self._results[kind].pop(task, None)
        if ended is None:
            return None
        bitmap = Bitmap(len(ended.done))
        for i, done in enumerate(ended.done):
            if done:
                bitmap.set(i)
        return bitmap

    def _all_wanted(
        self, task: int, keys: Sequence[Any], objects: Sequence[Any]
    ) -> list[Wanted | None]:
        wanted = [self._wanted(key, memory) for key, memory in zip(keys, objects, strict=True)]
        pairs = zip(keys, wanted, strict=True)
        self._pending[task] = {one.file: key for key, one in pairs if one is not None}
        return wanted

    def _wanted(self, key: Any, memory: Any) -> Wanted | None:
        name = self._names.object_id(key)
        if name is None:
            self._failures["key"] += 1
            self._trouble.warn("key", "a key of LMCache's cannot be kept: its group or its length")
            return None
        try:
            view, layout = ObjectMemory(memory), layout_of(memory)
        except Exception:  # noqa: BLE001 - what has no bytes says so in any way it likes
            self._failures["memory"] += 1
            self._trouble.error("memory", "an object of LMCache's has no bytes in host memory")
            return None
        return Wanted(name.file(self._names.namespace(name.family, layout)), view)

    def _object_ids(self, keys: Sequence[Any]) -> list[ObjectId]:
        return [name for key in keys if (name := self._names.object_id(key)) is not None]

    def _model(self, namespace: str) -> str | None:
        known = self._names.model_of(namespace, None)
        if known is not None:
            return known
        root = Path(self._store.options.path)
        return self._names.model_of(namespace, read_identity(self._files, root, namespace))


def _share_of(l1_memory_desc: Any) -> int:
    size = int(getattr(l1_memory_desc, "size", 0) or 0)
    return max(size // QUEUE_SHARE, 1) if size > 0 else QUEUE_BYTES


def _cursor(file: FileName) -> str:
    return f"{file.namespace}.{file.rank}.{file.group}.{file.key.hex()}"


def _parse_cursor(cursor: str | None) -> tuple[object, ...]:
    if cursor is None:
        return ()
    parts = cursor.split(".")
    if len(parts) != 4:
        raise ValueError(f"not a cursor: {cursor!r}")
    return FileName(parts[0], int(parts[1]), int(parts[2]), bytes.fromhex(parts[3]))
