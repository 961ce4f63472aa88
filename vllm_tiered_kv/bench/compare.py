# SPDX-License-Identifier: Apache-2.0
"""A comparison from its settings to its report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from vllm_tiered_kv import __version__
from vllm_tiered_kv.bench import stats
from vllm_tiered_kv.bench.agreement import agreement
from vllm_tiered_kv.bench.config import Compared, Experiment, History, Placement
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.machine import this_machine
from vllm_tiered_kv.bench.report import VERSION, Report
from vllm_tiered_kv.bench.runner import BlockResult, Runner, Watch, api_key
from vllm_tiered_kv.bench.schedule import Schedule, make_schedule
from vllm_tiered_kv.bench.summary import Measured, measured, summarise
from vllm_tiered_kv.bench.workloads.build import build
from vllm_tiered_kv.bench.workloads.content import Content

_LATE_S = 0.02


class Prepared(msgspec.Struct, frozen=True):
    """All that is known before anything runs."""

    experiment: Experiment
    schedule: Schedule
    requests: int
    """On all arms together, with those of warm-ups."""
    notes: tuple[str, ...]


def prepare(experiment: Experiment) -> Prepared:
    """Make the workload.

    Raises:
        BenchError: it cannot be made.
    """
    api_key(experiment)  # a variable that is not there is said now
    prompts = experiment.prompts
    content = Content(experiment.seed, prompts.first_token, prompts.last_token)
    count = experiment.warmup + experiment.sessions
    built = build(experiment.workload, count, content)
    schedule = make_schedule(
        built.sessions,
        experiment.warmup,
        experiment.blocks,
        len(experiment.arms),
        experiment.load,
        experiment.seed,
    )
    starts = 1
    if experiment.placement is Placement.ONE_AT_A_TIME:
        starts = min(experiment.rounds, experiment.blocks)
    steps = [len(session.steps) for session in built.sessions]
    again = (starts - 1) * sum(steps[: experiment.warmup])
    return Prepared(experiment, schedule, (sum(steps) + again) * len(experiment.arms), built.notes)


def compare(
    prepared: Prepared, output: Path, watch: Watch, command: Sequence[str]
) -> tuple[Report, list[Measured]]:
    """Run it. What is cut short gives a report of the blocks that every arm has done.

    Args:
        output: folder for logs, and for what arms keep on disk meanwhile.
        command: as it was typed.

    Raises:
        BenchError: before any block was done.
        KeyboardInterrupt: the same.
    """
    experiment = prepared.experiment
    machine = this_machine()
    started, clock = datetime.now(timezone.utc), time.monotonic()
    runner = Runner(experiment, prepared.schedule, output, watch)
    results: list[tuple[BlockResult, ...]] = []
    ended_early = None
    try:
        with contextlib.closing(runner.results()) as blocks:
            for block in blocks:
                results.append(block)
    except (BenchError, KeyboardInterrupt) as error:
        if not results:
            raise
        ended_early = str(error) or "interrupted"
    found = measured(experiment.arms, results)
    summary = summarise(experiment, found, runner.started)
    report = Report(
        version=VERSION,
        tool=__version__,
        name=experiment.name,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - clock,
        command=tuple(command),
        machine=machine,
        experiment=experiment,
        blocks=len(results),
        arms=summary.arms,
        ratios=summary.ratios,
        agreements=tuple(agreement(found[0].records, each.records) for each in found[1:]),
        notes=(*prepared.notes, *_notes(experiment, found, ended_early)),
        ended_early=ended_early,
    )
    return report, found


def _notes(experiment: Experiment, found: Sequence[Measured], ended_early: str | None) -> list[str]:
    notes = []
    blocks = len(found[0].blocks)
    if ended_early is not None:
        reason = ended_early.partition("\n")[0]
        notes.append(f"Ended early, after {blocks} of {experiment.blocks} blocks: {reason}")
    if blocks < 2:
        notes.append("One block: there are no intervals.")
    elif blocks < stats.FEW_BLOCKS:
        notes.append(
            f"{blocks} blocks: intervals from fewer than {stats.FEW_BLOCKS} tend to be too narrow."
        )
    for arm in found:
        notes += _notes_of(arm, experiment)
    return notes


def _notes_of(arm: Measured, experiment: Experiment) -> list[str]:
    notes = []
    records = arm.records
    answers = [record.answer for record in records if record.answer is not None]
    failed = [record.failed for record in records if record.failed is not None]
    if failed:
        first = " ".join(failed[0].reason.split())[:200]
        notes.append(
            f"{arm.arm}: {len(failed)} of {len(records)} requests failed and are in no latency; "
            f"the first: {failed[0].kind.value}: {first}"
        )
    without = sum(not answer.tokens for answer in answers)
    if without and experiment.compare is Compared.TOKENS:
        stood_in = ", and made-up ones stand in their place in later prompts"
        notes.append(
            f"{arm.arm}: {without} answers came without token ids"
            + (stood_in if experiment.history is History.OWN else "")
        )
    late = sorted(record.late for record in records)
    if late and (worst := late[int(0.99 * (len(late) - 1))]) > _LATE_S:
        notes.append(
            f"{arm.arm}: one request in a hundred was sent {1e3 * worst:.0f} ms or more after it "
            "was due: the client was too slow for this load"
        )
    return notes
