# SPDX-License-Identifier: Apache-2.0
"""What vLLM sees: one class, built twice, that forwards each hook to its half."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_tiered_kv import assemble, compat, metrics
from vllm_tiered_kv.config import ConfigError
from vllm_tiered_kv.exposition import PromMetrics
from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.profile import timed
from vllm_tiered_kv.protocol import StepPlan, WorkerReport
from vllm_tiered_kv.scheduler.half import SchedulerHalf
from vllm_tiered_kv.worker.half import LoadOutcome, WorkerHalf

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import (
        BlockPool,
        CacheHitSource,
        KVCacheBlocks,
        KVCacheConfig,
        KVConnectorOutput,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVTransferConfig,
        Request,
        SchedulerOutput,
        VllmConfig,
    )

logger = get_logger(__name__)


class StepMetadata(compat.KVConnectorMetadata):  # type: ignore[misc]
    """Carries a step's plan to the ranks."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class ReportMetadata(compat.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Carries the ranks' reports back with a step's output."""

    def __init__(self, reports: tuple[WorkerReport, ...]) -> None:
        self.reports = reports

    def aggregate(self, other: Any) -> ReportMetadata:
        return ReportMetadata(self.reports + other.reports)


@contextlib.contextmanager
def _refusals_said() -> Iterator[None]:
    """vLLM prints a traceback for every process; the line that says what is wrong stands out."""
    try:
        yield
    except (ConfigError, compat.UnsupportedModel) as error:
        logger.error("tiered-kv cannot start: %s", error)
        raise


class TieredKVConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):  # type: ignore[misc]
    """Saves KV blocks to CPU and disk tiers; loads them back when a prompt prefix returns."""

    _cache_hit_source = compat.CacheHitSource.HOST

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._bad_blocks: set[int] = set()
        self._delivers = False
        with _refusals_said():
            self._build(vllm_config, role, kv_cache_config)

    def _build(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if role is compat.KVConnectorRole.SCHEDULER:
            half = assemble.build_scheduler(vllm_config, kv_cache_config)
            self._scheduler: SchedulerHalf = timed(half, "scheduler", half.core.tally.add)
            self._delivers = half.delivers
        else:
            worker = assemble.build_worker(vllm_config, kv_cache_config)
            self._worker: WorkerHalf = timed(worker, "worker", worker.count)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache does not: a lost store is a later miss. Who hands KV over does: vLLM must not end
        a request whose blocks it has taken away."""
        return self._delivers

    # -- scheduler half ----------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        with _refusals_said():
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.find(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if num_external_tokens <= 0:
            return {}
        disk, peers = self._scheduler.sources(request, num_external_tokens)
        sources = {
            compat.CacheHitSource.HOST: num_external_tokens - disk - peers,
            compat.CacheHitSource.DISK: disk,
            compat.CacheHitSource.P2P: peers,
        }
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return StepMetadata(self._scheduler.build_plan(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        reports = meta.reports if isinstance(meta, ReportMetadata) else ()
        self._scheduler.update(connector_output, reports)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        handed = self._scheduler.finished(request, block_ids)
        return (handed.waits, handed.params) if handed is not None else (False, None)

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    # -- worker half, in the order of a step ----------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        self._worker.restore()

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        self._worker.before_step(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.mark()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if (plan := self._plan()) is not None:
            self._worker.start_loads(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a step never computes on blocks that are being loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores begin after the whole forward pass."""

    def wait_for_save(self) -> None:
        if (plan := self._plan()) is not None:
            self._worker.start_stores(plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        plan = self._plan()
        outcome: LoadOutcome = self._worker.take_loads(idle=plan is not None and plan.idle)
        self._bad_blocks = outcome.bad_blocks
        return compat.KVConnectorTransferResults(
            finished_sending=outcome.sent,
            finished_recving=outcome.finished,
            failed_recving=outcome.failed,
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        report = self._worker.take_report()
        return ReportMetadata((report,)) if report is not None else None

    def _plan(self) -> StepPlan | None:
        meta = self._connector_metadata
        return meta.plan if isinstance(meta, StepMetadata) else None

    @classmethod
    def supports_sleep_mode(
        cls,
        kv_transfer_config: KVTransferConfig | None,
    ) -> bool:
        # Peers may be reading pages that sleep would take away.
        extra = kv_transfer_config and kv_transfer_config.kv_connector_extra_config
        return not (extra and extra.get("remote"))

    # -- both --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> compat.KVConnectorStats | None:
        if self.role is compat.KVConnectorRole.SCHEDULER:
            self._scheduler.step_ended()  # vLLM asks once for every output it takes in
            return self._scheduler.take_stats()
        return None  # ranks report to the scheduler half, which counts

    def shutdown(self) -> None:
        if self.role is compat.KVConnectorRole.SCHEDULER:
            self._scheduler.shutdown()
        else:
            self._worker.shutdown()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> compat.KVConnectorStats | None:
        return metrics.TieredStats(data=data) if data else metrics.TieredStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> compat.KVConnectorPromMetrics | None:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
