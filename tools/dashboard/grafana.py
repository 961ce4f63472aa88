# SPDX-License-Identifier: Apache-2.0
"""Panels laid out in rows and written as a dashboard that Grafana 10 and later imports.

The form is that of Grafana's documentation, "Dashboard JSON model", with schema version 38, which
is Grafana 10.0's; later ones bring it up to date when they load it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

SCHEMA_VERSION = 38
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
DESCRIPTION = (
    "What vllm-tiered-kv does for a vLLM server: what it saves, what it costs, and whether it is "
    "well. Each panel's description says what to conclude from it."
)


class Style(enum.Enum):
    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"


class Query(msgspec.Struct, frozen=True):
    """One expression and how its lines are called."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True):
    """One panel."""

    title: str
    says: str
    """What a reader should conclude."""
    unit: str
    """One of Grafana's: ``s``, ``Bps``, ``percentunit``, ..."""
    queries: tuple[Query, ...]
    style: Style = Style.LINES
    steps: tuple[tuple[float, str], ...] = ()
    """From which value on it has which colour; below the first it is green."""
    most: float | None = None
    """The end of the scale, where there is one."""
    width: int = 8
    height: int = 8


class Row(msgspec.Struct, frozen=True):
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


def dashboard(rows: Sequence[Row]) -> str:
    """The file's content."""
    content = {
        "uid": "vllm-tiered-kv",
        "title": "vLLM tiered KV",
        "description": DESCRIPTION,
        "tags": ["vllm", "kv-cache"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": list(_placed(rows)),
    }
    return json.dumps(content, indent=2) + "\n"


def _variables() -> list[dict[str, Any]]:
    known = "vllm:tiered_kv_lookups_total"
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
        },
        _choice("model", "Model", f"label_values({known}, model_name)"),
        _choice("instance", "Server", f'label_values({known}{{model_name=~"$model"}}, instance)'),
    ]


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,  # with the time range: servers come and go
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _placed(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right; as many in a line as fit."""
    number, y = 0, 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            number += 1
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    is_number = panel.style is Style.NUMBER
    return {
        "type": "stat" if is_number else "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "range": True,
            }
            for i, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _number_options() if is_number else _graph_options(),
    }


def _field(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.steps]
    field: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.most is not None:
        field["max"] = panel.most
    if panel.style is Style.NUMBER:
        return {**field, "color": {"mode": "thresholds"}, "noValue": "no traffic"}
    stacked = panel.style is Style.STACKED
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if stacked else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
        "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
    }
    return {**field, "color": {"mode": "palette-classic"}, "custom": custom}


def _number_options() -> dict[str, Any]:
    return {
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "value",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }


def _graph_options() -> dict[str, Any]:
    return {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["mean", "max"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
