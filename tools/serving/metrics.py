# SPDX-License-Identifier: Apache-2.0
"""One scrape of a Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.parser import text_string_to_metric_families


class Sample(msgspec.Struct, frozen=True):
    """One line of a scrape."""

    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """The samples of one scrape; counters carry their ``_total`` suffix."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                self._samples.setdefault(name, []).append(Sample(name, dict(labels), value))

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def __iter__(self) -> Iterator[Sample]:
        for samples in self._samples.values():
            yield from samples

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples that carry these labels; 0 when there are none."""
        return sum(
            sample.value
            for sample in self._samples.get(name, ())
            if all(sample.labels.get(key) == want for key, want in labels.items())
        )

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """``{'name{label="value"}': number}`` of every sample whose name starts with ``prefix``."""
        return {_line(sample): sample.value for sample in self if sample.name.startswith(prefix)}


def _line(sample: Sample) -> str:
    if not sample.labels:
        return sample.name
    labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}"
