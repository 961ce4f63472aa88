# SPDX-License-Identifier: Apache-2.0
"""What we count as Prometheus objects, in vLLM's front end."""

from __future__ import annotations

from typing import Any

from prometheus_client import Histogram

from vllm_tiered_kv.compat import KVConnectorPromMetrics
from vllm_tiered_kv.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, SEPARATOR


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus side; every time series whose labels are known is there from the start."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for counter in COUNTERS:
            self._metrics[counter.name] = self._counter_cls(
                name=PREFIX + counter.name,
                documentation=counter.doc,
                labelnames=[*labelnames, *counter.labels],
            )
        for histogram in HISTOGRAMS:
            self._metrics[histogram.name] = metric_types[Histogram](
                name=PREFIX + histogram.name,
                documentation=histogram.doc,
                labelnames=[*labelnames, *histogram.labels],
                buckets=list(histogram.buckets),
            )
        for gauge in GAUGES:
            self._metrics[gauge.name] = self._gauge_cls(
                name=PREFIX + gauge.name,
                documentation=gauge.doc,
                multiprocess_mode="mostrecent",
                labelnames=[*labelnames, *gauge.labels],
            )
        self._series: dict[tuple[int, str], Any] = {}
        for metric in (*COUNTERS, *HISTOGRAMS):
            for values in metric.series:
                for engine_idx in per_engine_labelvalues:
                    self._find(engine_idx, metric.key(*values))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.get("counters", {}).items():
            if (series := self._find(engine_idx, key)) is not None and value >= 0:
                series.inc(value)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            if (series := self._find(engine_idx, key)) is not None:
                series.set(value)
        for key, values in transfer_stats_data.get("observed", {}).items():
            if (series := self._find(engine_idx, key)) is not None:
                for value in values:
                    series.observe(value)

    def _find(self, engine_idx: int, key: str) -> Any | None:
        series = self._series.get((engine_idx, key))
        if series is not None:
            return series
        name, *values = key.split(SEPARATOR)
        metric = self._metrics.get(name)
        engine = self.per_engine_labelvalues.get(engine_idx)
        if metric is None or engine is None:
            return None
        series = metric.labels(*engine, *values)
        self._series[engine_idx, key] = series
        return series
