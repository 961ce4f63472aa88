# SPDX-License-Identifier: Apache-2.0
"""Sessions of a workload. A session is one or more requests, each with all before it as prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

import msgspec

from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.workloads.content import MAX_TOKENS, Content, length, zipf
from vllm_tiered_kv.bench.workloads.kinds import Agent, Chat, Cold, Rag, Shared, Trace, Workload
from vllm_tiered_kv.replay import BLOCK_TOKENS, Request, TraceError, read_trace


class Step(msgspec.Struct, frozen=True, gc=False):
    """One request."""

    added: tuple[int, ...]
    """What the prompt has behind the last prompt and its answer."""
    output_tokens: int
    answer: tuple[int, ...] = ()
    """Stands for the answer in the prompts that follow; empty in a session's last step."""
    pause: float = 0.0
    """Seconds between the answer before it and this request."""


class Session(msgspec.Struct, frozen=True):
    """Requests that follow one another."""

    number: int
    steps: tuple[Step, ...]
    due: float | None = None
    """When it begins, in seconds of a trace; None: as the load says."""


class Built(msgspec.Struct, frozen=True):
    """What was made, and what there is to say about it."""

    sessions: tuple[Session, ...]
    notes: tuple[str, ...] = ()


def build(workload: Workload, count: int, content: Content) -> Built:
    """The first ``count`` sessions.

    Raises:
        BenchError: there are fewer in the trace, it cannot be read, or it is too much for memory.
    """
    if isinstance(workload, Trace):
        return _of_trace(workload, count, content)
    return Built(_bounded(_MAKERS[type(workload)](workload, content), count))


def prompts(session: Session) -> Iterator[tuple[int, ...]]:
    """The prompt of each step, made-up answers included."""
    before: tuple[int, ...] = ()
    for step in session.steps:
        before += step.added
        yield before
        before += step.answer


def _bounded(steps: Iterator[tuple[Step, ...]], count: int) -> tuple[Session, ...]:
    found, tokens = [], 0
    for number, each in enumerate(islice(steps, count)):
        tokens += sum(len(step.added) + len(step.answer) for step in each)
        if tokens > MAX_TOKENS:
            raise BenchError(f"the workload has more than {MAX_TOKENS} tokens; ask for less")
        found.append(Session(number, each))
    return tuple(found)


def _shared(workload: Shared, content: Content) -> Iterator[tuple[Step, ...]]:
    weights = zipf(workload.system_prompts, workload.skew)
    rng = content.rng("shared")
    number = 0
    while True:
        kind = _choose(rng, weights)
        system = content.shared(f"system {kind}", workload.system_tokens)
        asked = length(rng, workload.input_tokens, workload.spread)
        answer = length(rng, workload.output_tokens, workload.spread)
        yield (Step(system + content.tokens(f"question {number}", asked), answer),)
        number += 1


def _cold(workload: Cold, content: Content) -> Iterator[tuple[Step, ...]]:
    rng = content.rng("cold")
    number = 0
    while True:
        asked = length(rng, workload.input_tokens, workload.spread)
        answer = length(rng, workload.output_tokens, workload.spread)
        yield (Step(content.tokens(f"prompt {number}", asked), answer),)
        number += 1


def _rag(workload: Rag, content: Content) -> Iterator[tuple[Step, ...]]:
    weights = zipf(workload.documents, workload.skew)
    rng = content.rng("rag")
    system = content.shared("system", workload.system_tokens)
    number = 0
    while True:
        prompt = system
        # Sorted, so that prompts with the same first documents share a prefix.
        for document in sorted(_choose_some(rng, weights, workload.shown)):
            size = length(
                content.rng(f"size {document}"), workload.document_tokens, workload.spread
            )
            prompt += content.shared(f"document {document}", size)
        asked = length(rng, workload.input_tokens, workload.spread)
        answer = length(rng, workload.output_tokens, workload.spread)
        yield (Step(prompt + content.tokens(f"question {number}", asked), answer),)
        number += 1


class _Dialogue(msgspec.Struct, frozen=True):
    """What chats and agents have in common."""

    beginnings: int
    system_tokens: int
    steps: int
    input_tokens: int
    output_tokens: int
    pause: float
    skew: float
    spread: float


def _chat(workload: Chat, content: Content) -> Iterator[tuple[Step, ...]]:
    return _dialogues(
        _Dialogue(
            beginnings=workload.system_prompts,
            system_tokens=workload.system_tokens,
            steps=workload.turns,
            input_tokens=workload.input_tokens,
            output_tokens=workload.output_tokens,
            pause=workload.think,
            skew=workload.skew,
            spread=workload.spread,
        ),
        content,
    )


def _agent(workload: Agent, content: Content) -> Iterator[tuple[Step, ...]]:
    return _dialogues(
        _Dialogue(
            beginnings=workload.agents,
            system_tokens=workload.system_tokens,
            steps=workload.steps,
            input_tokens=workload.result_tokens,
            output_tokens=workload.output_tokens,
            pause=workload.tool_seconds,
            skew=workload.skew,
            spread=workload.spread,
        ),
        content,
    )


def _dialogues(shape: _Dialogue, content: Content) -> Iterator[tuple[Step, ...]]:
    weights = zipf(shape.beginnings, shape.skew)
    rng = content.rng("dialogues")
    number = 0
    while True:
        kind = _choose(rng, weights)
        opening = content.shared(f"system {kind}", shape.system_tokens)
        steps = []
        for turn in range(shape.steps):
            asked = length(rng, shape.input_tokens, shape.spread)
            output = length(rng, shape.output_tokens, shape.spread)
            # Drawn in any case, so that a workload does not change with its pauses.
            pause = rng.expovariate(1.0) * shape.pause
            last = turn + 1 == shape.steps
            steps.append(
                Step(
                    added=opening + content.tokens(f"turn {number} {turn}", asked),
                    output_tokens=output,
                    answer=() if last else content.tokens(f"answer {number} {turn}", output),
                    pause=pause if turn else 0.0,
                )
            )
            opening = ()
        yield tuple(steps)
        number += 1


def _of_trace(workload: Trace, count: int, content: Content) -> Built:
    scale = workload.block_tokens / BLOCK_TOKENS
    found: list[Session] = []
    left_out = cut = tokens = 0
    try:
        for request in read_trace(Path(workload.path)):
            if len(found) == count:
                break
            size = max(1, round(request.input_length * scale))
            if size > workload.max_input_tokens:
                left_out += 1
                continue
            tokens += size
            if tokens > MAX_TOKENS:
                raise BenchError(f"the workload has more than {MAX_TOKENS} tokens; ask for less")
            output = max(1, round(request.output_length * scale))
            cut += output > workload.max_output_tokens
            step = Step(
                _trace_prompt(request, size, len(found), workload.block_tokens, content),
                min(output, workload.max_output_tokens),
            )
            due = request.timestamp / 1e3 / workload.speed
            found.append(Session(len(found), (step,), due))
    except TraceError as error:
        raise BenchError(str(error)) from None
    except OSError as error:
        raise BenchError(f"{workload.path} cannot be read: {error.strerror or error}") from None
    if len(found) < count:
        raise BenchError(
            f"{workload.path} has {len(found)} requests of at most {workload.max_input_tokens} "
            f"tokens, and {count} are asked for (sessions and warmup)"
        )
    notes = []
    if left_out:
        notes.append(f"{left_out} requests of the trace are longer than max_input_tokens: left out")
    if cut:
        notes.append(f"{cut} answers of the trace were cut to max_output_tokens")
    return Built(tuple(found), tuple(notes))


def _trace_prompt(
    request: Request, size: int, number: int, block_tokens: int, content: Content
) -> tuple[int, ...]:
    prompt: tuple[int, ...] = ()
    for block in request.hash_ids:
        prompt += content.tokens(f"block {block}", block_tokens)
    # Where a trace gives fewer blocks than the length has, the rest is shared with nobody.
    return (prompt + content.tokens(f"rest {number}", max(0, size - len(prompt))))[:size]


def _choose(rng: Random, weights: list[float]) -> int:
    return rng.choices(range(len(weights)), cum_weights=weights)[0]


def _choose_some(rng: Random, weights: list[float], count: int) -> set[int]:
    """So many different ones, or all; where chance is slow to find them, the first."""
    count = min(count, len(weights))
    chosen: set[int] = set()
    for _ in range(20 * count):
        if len(chosen) < count:
            chosen.add(_choose(rng, weights))
    rest = (rank for rank in range(len(weights)) if rank not in chosen)
    return chosen | set(islice(rest, count - len(chosen)))


_MAKERS: dict[type, Callable[..., Iterator[tuple[Step, ...]]]] = {
    Shared: _shared,
    Chat: _chat,
    Rag: _rag,
    Agent: _agent,
    Cold: _cold,
}
