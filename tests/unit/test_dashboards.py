# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alert rules of ``examples/grafana``, as far as no server is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests import _dashboards as dashboards
from tools.dashboard import ROWS, dashboard
from tools.serving import Metrics
from vllm_tiered_kv.exposition import PromMetrics
from vllm_tiered_kv.metrics import PREFIX

QUERIES = dashboards.all_queries()


@pytest.fixture(scope="module")
def promtool() -> str:
    if (program := dashboards.promtool()) is None:
        pytest.skip("promtool is not here (tools/promtool.sh fetches Debian's)")
    return program


@pytest.fixture(scope="module")
def exposed() -> str:
    """All of our own metrics, without a server."""
    registry = CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **options: kind(registry=registry, **_plain(options))
        for kind in (Counter, Gauge, Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=None)
    exporter = PromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    gauges = {f"{name}|{label}": 1.0 for name, label in GAUGES}
    exporter.observe({"gauges": gauges}, 0)
    return generate_latest(registry).decode()


@pytest.fixture(scope="module")
def declared(exposed: str) -> Metrics:
    return Metrics(exposed)


GAUGES = (
    ("capacity_bytes", "cpu"),
    ("usage_bytes", "cpu"),
    ("jobs_in_flight", "store"),
    ("degraded", "disk"),
)
"""They appear with an engine's first step."""


def _plain(options: dict) -> dict:
    return {key: value for key, value in options.items() if key != "multiprocess_mode"}


def test_the_dashboard_is_what_the_panels_say() -> None:
    """After a change of the panels: ``make dashboard``."""
    assert (dashboards.FOLDER / "dashboard.json").read_text() == dashboard(ROWS)


def test_grafana_knows_every_field() -> None:
    """By the classes that Grafana publishes, which are made from its own schema (here: 10.1's)."""
    register_default_plugins()  # of panels and queries
    raw = json.loads((dashboards.FOLDER / "dashboard.json").read_text())
    known = json.loads(JSONEncoder().encode(models.Dashboard.from_json(raw)))
    assert list(lost(raw, known)) == []
    raw["panels"][1]["options"]["legends"] = {}
    known = json.loads(JSONEncoder().encode(models.Dashboard.from_json(raw)))
    assert list(lost(raw, known)) == [".panels[1].options.legends"]


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """What is in the one and not, or not the same, in the other."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(*pair, f"{path}[{i}]")
    elif ours != theirs:
        yield path


def test_no_panel_lies_on_another_and_each_says_what_to_conclude() -> None:
    panels = dashboards.panels()
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        covered = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not covered & cells, panel["title"]
        cells |= covered
        assert len(panel["description"]) > 60, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all("$model" in target["expr"] for target in panel["targets"])
    assert len({panel["id"] for panel in panels}) == len(panels) > 20


def test_every_metric_of_ours_in_them_is_declared_with_its_labels(declared: Metrics) -> None:
    lacks = dashboards.missing(QUERIES, declared)
    assert [name for name in lacks if name.startswith(PREFIX)] == []
    used = {name for query in QUERIES for name, _ in dashboards.uses(query)}
    assert {f"{PREFIX}hit_tokens_total", "vllm:prompt_tokens_total"} <= used


@pytest.mark.parametrize(
    ("query", "lacks"),
    [
        ("sum(rate(vllm:tiered_kv_hits_total[5m]))", ["vllm:tiered_kv_hits_total"]),
        ("vllm:tiered_kv_bytes > 3 or vllm:tiered_kv_degraded", ["vllm:tiered_kv_bytes"]),
        (
            'sum by (tier) (rate(vllm:tiered_kv_bytes_total{direction="x", kind="y"}[5m]))',
            ["vllm:tiered_kv_bytes_total{kind}"],
        ),
        (
            "sum by (result, tier) (rate(vllm:tiered_kv_lookups_total[5m]))",
            ["vllm:tiered_kv_lookups_total{tier}"],
        ),
        (
            "histogram_quantile(0.5, rate(vllm:tiered_kv_time_to_first_token_seconds_sum[5m]))",
            ["vllm:tiered_kv_time_to_first_token_seconds_sum{le}"],
        ),
        (
            "max_over_time(vllm:nothing[1h:5m] offset 1d) unless -vllm:none",
            ["vllm:none", "vllm:nothing"],
        ),
        ("sum by (instance) (vllm:tiered_kv_degraded)", []),
    ],
)
def test_what_a_server_lacks_is_found(query: str, lacks: list[str], declared: Metrics) -> None:
    assert dashboards.missing([query], declared) == lacks


def test_what_is_no_promql_is_found() -> None:
    with pytest.raises(ValueError, match="promql"):
        list(dashboards.uses("sum by (tier (rate(x[5m])))"))


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    alerts = [rule for rule in dashboards.rules() if "alert" in rule]
    names = {alert["alert"] for alert in alerts}
    assert {
        "TieredKVDegraded",
        "TieredKVHitRateFell",
        "TieredKVLoadsSlowerThanRecompute",
        "TieredKVQuotaPressure",
    } <= names
    tested = (dashboards.FOLDER / "alerts_test.yml").read_text()
    for alert in alerts:
        assert alert["labels"]["severity"] in {"info", "warning", "critical"}
        assert "$labels.instance" in alert["annotations"]["summary"]
        assert len(alert["annotations"]["description"]) > 80
        assert f'alertname="{alert["alert"]}"' in tested


def test_our_names_are_as_prometheus_wants_them(promtool: str, exposed: str) -> None:
    """But for the colon, which is vLLM's."""
    _, said = dashboards.run_promtool(promtool, "check", "metrics", given=exposed)
    lines = said.splitlines()
    assert any("':'" in line for line in lines)
    assert [line for line in lines if "':'" not in line] == []


def test_prometheus_takes_the_rules_and_each_alert_fires_where_it_should(promtool: str) -> None:
    code, said = dashboards.run_promtool(
        promtool, "check", "rules", dashboards.FOLDER / "alerts.yml"
    )
    assert code == 0, said
    code, said = dashboards.run_promtool(
        promtool, "test", "rules", dashboards.FOLDER / "alerts_test.yml"
    )
    assert code == 0, said


def test_the_rules_tests_can_fail(promtool: str, tmp_path: Path) -> None:
    """Each alert is made a bit too dull or, the last one, too keen: each case finds its own."""
    changes = {
        "Degraded": ("> 0.5\n", "> 1.5\n"),
        "HitRateFell": ("< 0.5 * avg", "< 0.05 * avg"),
        "LoadsSlowerThanRecompute": ("> 1.2 * sum", "> 2.2 * sum"),
        "QuotaPressure": ("< 900 * sum", "< 90 * sum"),
        "NoRoomOnDisk": ('kind="disk_room"', 'kind="disk_read"'),
        "StoresLost": ('"stored"}[15m]))\n        for: 30m', '"stored"}[15m]))\n        for: 90m'),
        "LoadsFail": ("> 0.05 * sum", "> 0.005 * sum"),
    }
    content = (dashboards.FOLDER / "alerts.yml").read_text()
    for old, new in changes.values():
        assert content.count(old) == 1, old
        content = content.replace(old, new)
    (tmp_path / "alerts.yml").write_text(content)
    file = tmp_path / "alerts_test.yml"
    file.write_text((dashboards.FOLDER / "alerts_test.yml").read_text())
    code, said = dashboards.run_promtool(promtool, "test", "rules", file)
    assert code != 0
    for name in changes:
        assert f'alertname="TieredKV{name}"' in said, said


def test_prometheus_finds_something_for_what_it_has(
    promtool: str, declared: Metrics, tmp_path: Path
) -> None:
    """And nothing where labels do not match, which no check of names sees."""
    up = "sum by (tier) (vllm:tiered_kv_usage_bytes)"
    good = f"{up} / ignoring (tier) group_left () sum(vllm:tiered_kv_capacity_bytes)"
    bad = f"{up} / sum(vllm:tiered_kv_capacity_bytes)"
    assert dashboards.without_result(promtool, [good], declared, tmp_path) == ""
    assert bad in dashboards.without_result(promtool, [good, bad], declared, tmp_path)
