# SPDX-License-Identifier: Apache-2.0
"""The few shapes of PromQL that the panels are made of.

``$__rate_interval`` is Grafana's: four scrapes at least, so that a rate always has two samples.
Nothing is divided by zero: where nothing happened there is no point, instead of a wrong one.
"""

from __future__ import annotations

CHOSEN = 'model_name=~"$model",instance=~"$instance"'
"""What the dashboard's variables choose."""


def series(name: str, where: str = "") -> str:
    """The chosen time series of one of vLLM's metrics, ours included."""
    return f"vllm:{name}{{{CHOSEN}{',' if where else ''}{where}}}"


def total(name: str, by: str = "", where: str = "") -> str:
    """The sum of gauges."""
    return f"sum{_by(by)} ({series(name, where)})"


def rate(name: str, by: str = "", where: str = "") -> str:
    """What a counter gains in a second, summed."""
    return f"sum{_by(by)} (rate({series(name, where)}[$__rate_interval]))"


def gain(name: str, by: str = "", where: str = "") -> str:
    """What a counter gains in the time of a point, summed; nothing where it stands still."""
    return f"sum{_by(by)} (increase({series(name, where)}[$__rate_interval])) > 0"


def quantile(q: float, name: str, by: str = "", where: str = "") -> str:
    """Of a histogram, interpolated within its buckets."""
    buckets = rate(f"{name}_bucket", f"le, {by}" if by else "le", where)
    return f"histogram_quantile({q:g}, {buckets})"


def ratio(upper: str, lower: str, extra: str = "") -> str:
    """One by the other.

    Args:
        extra: labels of the upper one that the lower one has not.
    """
    match = f" ignoring ({extra}) group_left ()" if extra else ""
    return f"{upper} /{match} ({lower} > 0)"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
