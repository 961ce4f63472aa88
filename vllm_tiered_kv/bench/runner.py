# SPDX-License-Identifier: Apache-2.0
"""Blocks of sessions to one arm after another, so that only one is measured at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vllm_tiered_kv.bench.client import Asking, Client, connected, digest
from vllm_tiered_kv.bench.config import Experiment, History, Mode, Placement
from vllm_tiered_kv.bench.errors import BenchError, ServerLost
from vllm_tiered_kv.bench.records import Answer, Failed, Failure, Record
from vllm_tiered_kv.bench.schedule import Block, Schedule, split
from vllm_tiered_kv.bench.scrape import increase
from vllm_tiered_kv.bench.servers import Target, running
from vllm_tiered_kv.bench.workloads.build import Session, Step, prompts


class Watch(Protocol):
    """Told how far it is."""

    def stage(self, text: str) -> None:
        """What begins now."""

    def advance(self) -> None:
        """One request is done."""


class BlockResult(msgspec.Struct, frozen=True):
    """What one arm made of one block."""

    arm: str
    block: int
    seconds: float
    """From the first request's sending to the last one's end."""
    records: tuple[Record, ...]
    counted: dict[str, float] | None
    """What the server's counters of tokens grew by; None where it shows none."""


class Runner:
    """Runs the schedule of an experiment.

    Args:
        output: folder for logs, and for what arms keep on disk meanwhile.
    """

    def __init__(
        self, experiment: Experiment, schedule: Schedule, output: Path, watch: Watch
    ) -> None:
        self._experiment = experiment
        self._schedule = schedule
        self._output = output
        self._watch = watch
        self.started: dict[str, tuple[tuple[str, ...], ...]] = {}
        """By arm the commands that were started."""

    def results(self) -> Generator[tuple[BlockResult, ...], None, None]:
        """Each block when all arms have done it. Close the generator to end the servers.

        Raises:
            BenchError: an arm did not start, was lost, or answered nothing in its warm-up.
        """
        if self._experiment.placement is Placement.TOGETHER:
            return self._together()
        return self._one_at_a_time()

    def _together(self) -> Generator[tuple[BlockResult, ...], None, None]:
        with contextlib.ExitStack() as stack:
            targets: list[Target] = []
            for arm in self._experiment.arms:
                self._watch.stage(f"starting {arm.name}")
                with _saying_who_is_up(arm.name, targets):
                    target = stack.enter_context(running(arm, self._experiment, self._output))
                targets.append(target)
            models = [self._warm_up(target) for target in targets]
            for block, order in zip(self._schedule.blocks, self._schedule.orders, strict=True):
                yield tuple(self._run(targets[arm], models[arm], block) for arm in order)

    def _one_at_a_time(self) -> Generator[tuple[BlockResult, ...], None, None]:
        blocks, orders = self._schedule.blocks, self._schedule.orders
        for number, part in enumerate(split(len(blocks), self._experiment.rounds)):
            found: list[list[BlockResult]] = [[] for _ in part]
            for index in orders[number]:
                arm = self._experiment.arms[index]
                self._watch.stage(f"starting {arm.name}")
                with running(arm, self._experiment, self._output) as target:
                    model = self._warm_up(target)
                    for results, block in zip(found, part, strict=True):
                        results.append(self._run(target, model, blocks[block]))
            yield from map(tuple, found)

    def _warm_up(self, target: Target) -> str:
        """The name of the model, once it has answered."""
        self.started[target.arm.name] = target.words
        model = target.arm.model or asyncio.run(_first_model(target, self._experiment))
        result = self._run(target, model, self._schedule.warmup)
        failures = [record.failed for record in result.records if record.failed is not None]
        if failures and len(failures) == len(result.records):
            raise BenchError(
                f"{target.arm.name}: every request of the warm-up failed; the first: "
                f"{failures[0].kind.value}: {failures[0].reason}"
            )
        return model

    def _run(self, target: Target, model: str, block: Block) -> BlockResult:
        part = "warm-up" if block.number < 0 else f"block {block.number + 1}"
        self._watch.stage(f"{part}, {target.arm.name}")
        result = asyncio.run(_Play(self._experiment, target, model, block, self._watch).play())
        target.check()
        _check_answers(target, part, result)
        return result


class _Play:
    """One block on one arm."""

    def __init__(
        self, experiment: Experiment, target: Target, model: str, block: Block, watch: Watch
    ) -> None:
        self._experiment = experiment
        self._target = target
        self._block = block
        self._watch = watch
        self._asking = Asking(
            model=model,
            format=experiment.prompts.format,
            compare=experiment.compare,
            seed=experiment.seed,
            further=experiment.request,
        )
        self._records: list[Record] = []
        self._began = 0.0

    async def play(self) -> BlockResult:
        timeout = self._experiment.request_timeout
        key = api_key(self._experiment)
        async with connected(self._target.url, timeout, key) as client:
            before = await client.scrape(self._target.scrape)
            # Encoded now, so that nobody's encoding delays another's clock.
            plans = [self._plan(session) for session in self._block.sessions]
            self._began = time.perf_counter()
            if self._experiment.load.mode is Mode.CLOSED:
                await self._closed(client, plans)
            else:
                await self._open(client, plans)
            seconds = time.perf_counter() - self._began
            await asyncio.sleep(self._experiment.settle)
            after = await client.scrape(self._target.scrape)
        self._records.sort(key=lambda record: (record.session, record.step))
        return BlockResult(
            arm=self._target.arm.name,
            block=self._block.number,
            seconds=seconds,
            records=tuple(self._records),
            counted=None if before is None or after is None else increase(before, after),
        )

    async def _closed(self, client: Client, plans: list[_Plan]) -> None:
        waiting = iter(plans)

        async def take_turns() -> None:
            for plan in waiting:
                await self._converse(client, plan, due=None)

        await _all(take_turns() for _ in range(self._experiment.load.concurrency))

    async def _open(self, client: Client, plans: list[_Plan]) -> None:
        starts = zip(plans, self._block.starts, strict=True)
        await _all(self._converse(client, plan, self._began + due) for plan, due in starts)

    async def _converse(self, client: Client, plan: _Plan, due: float | None) -> None:
        said: tuple[int, ...] = ()
        for number, step in enumerate(plan.session.steps):
            if number:
                due = time.perf_counter() + step.pause
            if due is not None:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            said += step.added
            body, name = plan.requests[number] if plan.requests else self._encode(said, step)
            sent = time.perf_counter()
            result = await client.complete(body)
            answer = result if isinstance(result, Answer) else None
            self._records.append(
                Record(
                    arm=self._target.arm.name,
                    block=self._block.number,
                    session=plan.session.number,
                    step=number,
                    prompt=name,
                    sent=sent - self._began,
                    late=sent - due if due is not None else 0.0,
                    answer=answer,
                    failed=result if isinstance(result, Failed) else None,
                )
            )
            own = answer.tokens if answer is not None and self._own else ()
            said += own or step.answer
            self._watch.advance()

    @property
    def _own(self) -> bool:
        return self._experiment.history is History.OWN

    def _plan(self, session: Session) -> _Plan:
        if self._own:
            return _Plan(session, ())
        steps = zip(prompts(session), session.steps, strict=True)
        return _Plan(session, tuple(self._encode(prompt, step) for prompt, step in steps))

    def _encode(self, prompt: tuple[int, ...], step: Step) -> tuple[bytes, str]:
        return self._asking.body(prompt, step.output_tokens), digest(prompt)


class _Plan(msgspec.Struct, frozen=True):
    """A session, and where prompts do not depend on answers its requests and their digests."""

    session: Session
    requests: tuple[tuple[bytes, str], ...]


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them together; where one raises, end the others before that goes on."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _saying_who_is_up(name: str, targets: Sequence[Target]) -> Iterator[None]:
    """The first server on a GPU leaves no memory for another."""
    try:
        yield
    except ServerLost as error:
        up = [target.arm.name for target in targets if target.processes]
        if not up:
            raise
        raise ServerLost(
            f"{name} did not start beside {', '.join(up)}; if they do not fit the machine "
            f"together: --one-at-a-time. {error}"
        ) from None


async def _first_model(target: Target, experiment: Experiment) -> str:
    """What the server calls it; of one that was started and does not say so, what it serves."""
    async with connected(target.url, timeout=30.0, key=api_key(experiment)) as client:
        try:
            return await client.first_model()
        except BenchError:
            if experiment.model is None or target.arm.url is not None:
                raise
            return experiment.model


def api_key(experiment: Experiment) -> str | None:
    """The key that requests carry.

    Raises:
        BenchError: there is no such variable.
    """
    name = experiment.api_key_env
    if name is None:
        return None
    if not os.environ.get(name):
        raise BenchError(f"api_key_env: {name} is not in the environment")
    return os.environ[name]


_SILENT = frozenset({Failure.BROKEN, Failure.TIMEOUT})


def _check_answers(target: Target, part: str, result: BlockResult) -> None:
    """Whether there is a server at all; of those that run already no process can be looked at.

    Raises:
        ServerLost: no request was answered, not even refused.
    """
    failures = [record.failed for record in result.records]
    silent = [failed for failed in failures if failed is not None and failed.kind in _SILENT]
    if silent and len(silent) == len(failures):
        raise ServerLost(
            f"{target.arm.name} has answered nothing in {part}; the first: "
            f"{silent[0].kind.value}: {silent[0].reason}"
        )
