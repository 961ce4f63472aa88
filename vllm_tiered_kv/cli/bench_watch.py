# SPDX-License-Identifier: Apache-2.0
"""How far a comparison is: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vllm_tiered_kv.bench.config import Experiment
from vllm_tiered_kv.bench.runner import Watch


class _Bar:
    def __init__(self, progress: Progress, task: TaskID, console: Console) -> None:
        self._progress = progress
        self._task = task
        self._console = console

    def stage(self, text: str) -> None:
        if self._console.is_terminal:
            self._progress.update(self._task, description=text)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def watching(requests: int, experiment: Experiment) -> Iterator[Watch]:
    """A bar over so many requests, on stderr."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(experiment.name, total=requests)
        yield _Bar(progress, task, console)
