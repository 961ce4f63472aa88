# SPDX-License-Identifier: Apache-2.0
"""What is said at start, and the namespace that becomes known while the engine starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm_tiered_kv import identity
from vllm_tiered_kv.config import Options, available_memory, format_size
from vllm_tiered_kv.geometry import Geometry, describe

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import KVCacheConfig, VllmConfig
from vllm_tiered_kv.log import get_logger

logger = get_logger(__name__)

PATIENCE = 1.0
"""Seconds the first line waits for the weights' digest; a remembered one takes none."""
CANCEL_TIMEOUT = 2.0


class NamespaceTask:
    """Finds the namespace in the background and says it, at the latest with a second line."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        chunk_tokens: int,
        on_known: Callable[[str, Mapping[str, object]], None] | None = None,
        on_namespace: Callable[[identity.Namespace], None] | None = None,
    ) -> None:
        """``on_known`` is given the namespace's name and, in plain words, what it stands for,
        ``on_namespace`` the namespace itself; both on another thread."""
        self._on_known = on_known
        self._on_namespace = on_namespace
        self._lock = threading.Lock()
        self._announced = False
        self.namespace: identity.Namespace | None = None
        """None until the weights' digest is known, or where there is none."""
        self._identity: identity.Identity | None = None
        self._digester: identity.WeightsDigester | None = None
        try:
            self._identity = identity.collect(vllm_config, kv_cache_config, chunk_tokens)
            self._digester = identity.start_weights(vllm_config, self._done)
        except Exception:
            logger.exception("tiered-kv: the namespace cannot be established")

    @property
    def layout(self) -> identity.LayoutIdentity | None:
        """How the bytes lie; known at once, or never."""
        return self._identity.layout if self._identity is not None else None

    def first_words(self) -> str:
        """The namespace for the start-up line, or what is still missing of it."""
        if self._digester is None or self._identity is None:
            return "none (this process only)"
        self._digester.join(PATIENCE)
        with self._lock:
            self._announced = True
            if self.namespace is not None:
                return _words(self.namespace)
        return "layout " + self._identity.layout.digest[:8] + ", weights being digested"

    def close(self) -> None:
        if self._digester is not None:
            self._digester.cancel()
            self._digester.join(CANCEL_TIMEOUT)

    def _done(self, weights: identity.WeightsResult) -> None:
        if self._identity is None:
            return
        namespace = self._identity.namespace(weights)
        with self._lock:
            self.namespace = namespace
            late = self._announced
        if late:
            logger.info("tiered-kv: namespace: %s", _words(namespace))
        if self._on_namespace is not None:
            self._on_namespace(namespace)
        if self._on_known is None:
            return
        if not namespace.persistent:
            logger.warning(
                "tiered-kv: WHAT THIS ENGINE WRITES TO DISK IS LOST WITH IT: no other engine, and "
                "not this one after a restart, can find it, because %s",
                namespace.reason,
            )
        self._on_known(namespace.name, describe_namespace(namespace))


def announce(
    options: Options, geometry: Geometry, num_slots: int, ranks: int, namespace: str
) -> None:
    """The start-up line."""
    memory = "cpu" if options.cpu is not None else "host memory to pass through"
    disk = ""
    if options.disk is not None:
        disk = f", disk {format_size(options.disk.capacity)} in {options.disk.path}"
    logger.info(
        "tiered-kv: tiers: %s %s (%d slots on each of %d ranks)%s; chunk: %s; namespace: %s",
        memory,
        format_size(num_slots * geometry.slot_bytes * ranks),
        num_slots,
        ranks,
        disk,
        describe(geometry),
        namespace,
    )


def describe_namespace(namespace: identity.Namespace) -> dict[str, object]:
    """What a namespace stands for, as plain data."""
    return {
        "namespace": namespace.name,
        "means": msgspec.to_builtins(namespace.semantic),
        "layout": msgspec.to_builtins(namespace.layout),
        "kept_beyond_the_process": namespace.persistent,
        "why_not": namespace.reason,
    }


def warn_about_memory(capacity: int) -> None:
    """A tier that fits the machine may still not fit beside what runs on it."""
    available = available_memory()
    if capacity > available:
        logger.warning(
            "tiered-kv: cpu.capacity is %s, but only %s of memory is available now; the tier fills "
            "it in the background, and the kernel may end processes",
            format_size(capacity),
            format_size(available),
        )


def warn_about_policy(vllm_config: VllmConfig) -> None:
    """vLLM's default policy turns a lost chunk into a lost request."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        logger.warning(
            'tiered-kv: kv_load_failure_policy is "%s": a chunk that fails to load will FAIL '
            "the user's request instead of being recomputed. Set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config.',
            policy,
        )


def warn_about_role(vllm_config: VllmConfig) -> None:
    """A role between engines says nothing without the option that has them meet."""
    role = vllm_config.kv_transfer_config.kv_role
    if role in ("kv_producer", "kv_consumer"):
        logger.warning(
            "tiered-kv: kv_role is %s, and there is no option remote: this engine hands nothing "
            "over and takes nothing that is handed over. Set remote.listen and remote.key_file in "
            "kv_connector_extra_config, or kv_role to kv_both.",
            role,
        )


def _words(namespace: identity.Namespace) -> str:
    if namespace.persistent:
        return namespace.short
    return f"{namespace.short} (this process only: {namespace.reason})"
