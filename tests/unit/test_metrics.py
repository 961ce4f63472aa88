# SPDX-License-Identifier: Apache-2.0
"""Counters from the halves to Prometheus, hook timing, what start-up says."""

from __future__ import annotations

import ast
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT
from vllm_tiered_kv import exposition, identity, metrics, profile, startup
from vllm_tiered_kv.log import OncePerKind


def prom(registry: CollectorRegistry) -> exposition.PromMetrics:
    def bind(kind: type) -> object:
        def make(**options: object) -> object:
            return kind(registry=registry, **options)

        return make

    kinds = {kind: bind(kind) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return exposition.PromMetrics(
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


def test_a_histogram_counts_each_value_once() -> None:
    registry = CollectorRegistry()
    exporter = prom(registry)
    key = metrics.FIRST_TOKEN.key("cpu")
    one = metrics.TieredStats(data={"observed": {key: [0.03, 4.0]}})
    two = metrics.TieredStats(data={"observed": {key: [0.5], metrics.FIRST_TOKEN.key("none"): [1]}})
    exporter.observe(one.aggregate(two).to_dict(), 1)
    found = samples(registry)
    name = "vllm:tiered_kv_time_to_first_token_seconds"
    assert found[f"{name}_count", "1", "m", "cpu"] == 3
    assert found[f"{name}_sum", "1", "m", "cpu"] == 4.53
    assert found[f"{name}_bucket", "1", "0.5", "m", "cpu"] == 2
    assert found[f"{name}_count", "0", "m", "cpu"] == 0


def test_all_but_the_profile_exists_before_the_first_event() -> None:
    """So that a rate sees the first event, and an alert is not silent for want of a series."""
    registry = CollectorRegistry()
    prom(registry)
    found = samples(registry)
    for metric in (*metrics.COUNTERS, *metrics.HISTOGRAMS):
        suffix = "_count" if metric.buckets else "_total"
        if metric is metrics.HOOK_SECONDS:
            continue
        there = {key for key in found if key[0] == f"{metrics.PREFIX}{metric.name}{suffix}"}
        assert len(there) == 2 * len(metric.series) > 0, metric.name
        for values in metric.series:
            assert len(values) == len(metric.labels)
        assert all(found[key] == 0 for key in there)


def test_every_kind_of_failure_is_declared() -> None:
    """What is not would appear with its first event, which no rate would see."""
    said = set(
        itertools.chain.from_iterable(map(kinds_said, (ROOT / "vllm_tiered_kv").rglob("*.py")))
    )
    assert {"disk_room", "disk_ranks", "copy_*", "load_*"} <= said  # of each kind of caller one
    for kind in said:
        pattern = re.compile(kind.replace("*", ".+"))
        assert any(map(pattern.fullmatch, metrics.KINDS)), kind


def kinds_said(path: Path) -> Iterator[str]:
    """The kinds that a module's code names where it counts a failure; ``*`` for what varies."""
    if {"objects", "integrations"} & set(path.parts):  # LMCache's server counts for itself
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in {"fail", "_fail", "_trouble"}:
                yield from literals(node.args[0])


def literals(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    elif isinstance(node, ast.Constant):
        yield node.value


def test_every_metric_is_documented_with_its_labels() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for metric in (*metrics.COUNTERS, *metrics.GAUGES, *metrics.HISTOGRAMS):
        suffix = "_total" if metric in metrics.COUNTERS else ""
        name = f"`{metrics.PREFIX}{metric.name}{suffix}`"
        assert name in text, name
        if metric is not metrics.HOOK_SECONDS:
            (row,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
            assert all(f"`{label}`" in row for label in metric.labels), row
    for kind in metrics.KINDS:
        assert f"`{kind}`" in text, kind


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
    assert both.data == {"counters": {hit: 3}, "gauges": {use: 7.0}, "observed": {}}
    assert both.reduce() == {"lookups_hit": 3, "usage_bytes_cpu": 7.0}
    waits = metrics.TieredStats(data={"observed": {metrics.FIRST_TOKEN.key("cpu"): [0.2, 0.4]}})
    assert not waits.is_empty()
    name = "time_to_first_token_seconds_cpu"
    assert waits.aggregate(both).reduce() == {
        **both.reduce(),
        f"{name}_count": 2,
        f"{name}_mean": 0.3,
    }
    assert metrics.TieredStats().is_empty()
    both.reset()
    assert both.is_empty()


def test_a_tally_is_taken_once() -> None:
    tally = metrics.Tally()
    tally.add("a")
    tally.add("a", 2)
    assert tally.take() == {"a": 3}
    assert not tally
    tally.observe("b", 0.5)
    tally.observe("b", 2.0)
    assert tally
    assert tally.take_observed() == {"b": [0.5, 2.0]}
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
