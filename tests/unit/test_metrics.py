# SPDX-License-Identifier: Apache-2.0
"""Counters from the halves to Prometheus, hook timing, what start-up says."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from vllm_tiered_kv import identity, metrics, profile, startup
from vllm_tiered_kv.log import OncePerKind


def prom(registry: CollectorRegistry) -> metrics.PromMetrics:
    def bind(kind: type) -> object:
        def make(**options: object) -> object:
            return kind(registry=registry, **options)

        return make

    kinds = {kind: bind(kind) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return metrics.PromMetrics(
        config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    from prometheus_client import generate_latest

    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                key = (sample.name, *(v for _, v in sorted(sample.labels.items())))
                found[key] = sample.value
    return found


def test_counters_add_up_and_gauges_are_the_latest() -> None:
    registry = CollectorRegistry()
    exporter = prom(registry)
    for value in (2.0, 3.0):
        stats = metrics.TieredStats(
            data={
                "counters": {metrics.BYTES.key("load", "cpu"): value},
                "gauges": {metrics.USAGE.key("cpu"): value},
            }
        )
        exporter.observe(stats.to_dict(), 1)
    found = samples(registry)
    assert found["vllm:tiered_kv_bytes_total", "load", "1", "m", "cpu"] == 5
    assert found["vllm:tiered_kv_usage_bytes", "1", "m", "cpu"] == 3


def test_counters_exist_before_the_first_event() -> None:
    registry = CollectorRegistry()
    prom(registry)
    found = samples(registry)
    assert found["vllm:tiered_kv_failures_total", "0", "internal", "m"] == 0
    assert found["vllm:tiered_kv_lookups_total", "1", "m", "hit"] == 0


@pytest.mark.parametrize(
    "data", [{}, {"counters": {"unknown|x": 1}}, {"counters": {metrics.LOOKUPS.key("hit"): -1}}]
)
def test_what_is_not_ours_is_passed_over(data: dict) -> None:
    registry = CollectorRegistry()
    prom(registry).observe(data, 0)
    prom(CollectorRegistry()).observe({"gauges": {metrics.USAGE.key("cpu"): 1}}, 9)
    assert not any(v for k, v in samples(registry).items() if k[0].startswith("vllm:tiered"))


def test_stats_of_several_steps_add_up() -> None:
    hit, use = metrics.LOOKUPS.key("hit"), metrics.USAGE.key("cpu")
    one = metrics.TieredStats(data={"counters": {hit: 1}, "gauges": {use: 10.0}})
    two = metrics.TieredStats(data={"counters": {hit: 2}, "gauges": {use: 7.0}})
    both = one.aggregate(two)
    assert both.data == {"counters": {hit: 3}, "gauges": {use: 7.0}}
    assert both.reduce() == {"lookups_hit": 3, "usage_bytes_cpu": 7.0}
    assert metrics.TieredStats().is_empty()
    both.reset()
    assert both.is_empty()


def test_a_tally_is_taken_once() -> None:
    tally = metrics.Tally()
    tally.add("a")
    tally.add("a", 2)
    assert tally.take() == {"a": 3}
    assert not tally


def test_hooks_are_timed_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        value = 7

        def hook(self, x: int) -> int:
            return x + self.value

    counts: dict[str, float] = {}
    half = Half()
    assert profile.timed(half, "scheduler", counts.__setitem__) is half
    monkeypatch.setenv(profile.VARIABLE, "1")
    timed = profile.timed(half, "scheduler", counts.__setitem__)
    assert timed.value == 7
    assert timed.hook(1) == timed.hook(1) == 8
    assert set(counts) == {
        metrics.HOOK_SECONDS.key("scheduler", "hook", clock) for clock in ("cpu", "wall")
    }


def test_each_kind_of_trouble_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trouble = OncePerKind(logging.getLogger("trouble"))
    for _ in range(3):
        trouble.warn("a", "first")
        trouble.warn("b", "second")
    assert [r.getMessage().split(" (")[0] for r in caplog.records] == [
        "tiered-kv: first",
        "tiered-kv: second",
    ]


def test_an_engine_without_a_name_for_its_chunks_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("moved")

    monkeypatch.setattr(identity, "collect", broken)
    task = startup.NamespaceTask(None, None, 128)
    assert task.first_words() == "none (this process only)"
    assert task.namespace is None
    task.close()
