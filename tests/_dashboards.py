# SPDX-License-Identifier: Apache-2.0
"""What the dashboard and the alert rules ask Prometheus for, held against what a server exposes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

from tests.conftest import ROOT
from tools.serving import Metrics

FOLDER = ROOT / "examples" / "grafana"
OF_THE_SCRAPE = frozenset({"instance", "job"})
"""Labels that Prometheus adds."""
CHOSEN = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
"""What Grafana puts in: all models, all servers."""
_VARIABLE = re.compile(r"label_values\((?P<expr>.+), *(?P<label>\w+)\)")


def panels() -> list[dict[str, Any]]:
    content = json.loads((FOLDER / "dashboard.json").read_text())
    return [panel for panel in content["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def panel_queries() -> list[str]:
    """As Prometheus gets them."""
    return [_filled(target["expr"]) for panel in panels() for target in panel["targets"]]


def variable_queries() -> list[str]:
    """What the dashboard's variables take their values from, summed by the label they take."""
    content = json.loads((FOLDER / "dashboard.json").read_text())
    found = []
    for variable in content["templating"]["list"]:
        if variable["type"] == "query":
            match = _VARIABLE.fullmatch(variable["query"]["query"])
            assert match is not None, variable
            found.append(_filled(f"sum by ({match['label']}) ({match['expr']})"))
    return found


def all_queries() -> list[str]:
    return [*panel_queries(), *variable_queries(), *(rule["expr"] for rule in rules())]


def uses(query: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Each metric that a query reads, with all labels that it filters, groups or matches by.

    Raises:
        ValueError: it is no PromQL.
    """
    yield from _uses(promql.parse(query), frozenset())


def missing(queries: Iterable[str], metrics: Metrics) -> list[str]:
    """What the queries use and a scrape has not: names, or labels of a name."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    labels: dict[str, set[str]] = {}
    for sample in metrics:
        labels.setdefault(sample.name, set()).update(sample.labels)
    lacks = set()
    for query in queries:
        for name, wanted in uses(query):
            if name in recorded:
                continue
            if name not in labels:
                lacks.add(name)
            lacks |= {f"{name}{{{x}}}" for x in wanted - labels.get(name, wanted) - OF_THE_SCRAPE}
    return sorted(lacks)


def promtool() -> str | None:
    """The program, if it is here."""
    ours = ROOT / "build" / "promtool" / "promtool"
    return shutil.which("promtool") or (str(ours) if ours.exists() else None)


def run_promtool(program: str, *arguments: object, given: str = "") -> tuple[int, str]:
    """Its exit code, and what it says; ``given`` is what it reads."""
    command = [program, *map(str, arguments)]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def without_result(program: str, queries: Iterable[str], metrics: Metrics, folder: Path) -> str:
    """What Prometheus finds nothing for, in a server whose counters all rise; empty if none.

    Every series of the scrape is there, with all its labels, so what is joined wrongly shows.
    """
    queries = list(queries)
    names = {name for query in queries for name, _ in uses(query)}
    series = [
        {"series": _written(sample.name, sample.labels), "values": _values(sample.name)}
        for sample in metrics
        if sample.name in names
    ]
    asked = [{"expr": f"absent({query})", "eval_time": "10m"} for query in queries]
    case = {"interval": "15s", "input_series": series, "promql_expr_test": asked}
    file = folder / "queries_test.yml"
    file.write_text(json.dumps({"tests": [case]}))  # which is YAML too
    code, said = run_promtool(program, "test", "rules", file)
    return said if code else ""


def _values(name: str) -> str:
    rises = name.endswith(("_total", "_bucket", "_count", "_sum"))
    return "1+1x50" if rises else "1x50"


def _written(name: str, labels: dict[str, str]) -> str:
    labels = {**labels, "job": "vllm", "instance": "server:8000"}
    inside = ", ".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
    return f"{name}{{{inside}}}"


def _filled(query: str) -> str:
    for name, value in CHOSEN.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def _uses(node: Any, outer: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    if isinstance(node, promql.VectorSelector):
        yield node.name, outer | {matcher.name for matcher in node.matchers.matchers}
    elif isinstance(node, promql.MatrixSelector):
        yield from _uses(node.vector_selector, outer)
    elif isinstance(node, promql.AggregateExpr):
        by = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
        yield from _uses(node.expr, outer | by)
    elif isinstance(node, promql.Call):
        inner = outer | {"le"} if node.func.name == "histogram_quantile" else outer
        for argument in node.args:
            yield from _uses(argument, inner)
    elif isinstance(node, promql.BinaryExpr):
        yield from _uses(node.lhs, outer)
        yield from _uses(node.rhs, outer)
    elif isinstance(node, promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr):
        yield from _uses(node.expr, outer)
    elif not isinstance(node, promql.NumberLiteral | promql.StringLiteral):
        raise TypeError(f"a kind of PromQL that is not known here: {node!r}")
