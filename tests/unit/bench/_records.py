# SPDX-License-Identifier: Apache-2.0
"""Records and blocks for tests."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.bench.records import Answer, Counted, Failed, Failure, Record
from vllm_tiered_kv.bench.runner import BlockResult


def answer(
    ttft: float = 0.1,
    gaps: Sequence[float] = (0.01, 0.01),
    *,
    tokens: Sequence[int] = (1, 2, 3),
    logprobs: Sequence[float] = (-1.0, -1.0, -1.0),
    text: str = "abc",
    prompt_tokens: int | None = 100,
    cached_tokens: int | None = 50,
    counted: Counted = Counted.USAGE,
) -> Answer:
    return Answer(
        ttft=ttft,
        gaps=tuple(gaps),
        seconds=ttft + sum(gaps),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=len(gaps) + 1,
        counted=counted,
        text=text,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
    )


def record(
    found: Answer | None,
    *,
    arm: str = "a",
    block: int = 0,
    session: int = 0,
    step: int = 0,
    prompt: str = "p",
    late: float = 0.0,
) -> Record:
    failed = None if found is not None else Failed(Failure.BROKEN, "cut <off>", 0.5)
    return Record(arm, block, session, step, prompt, 0.0, late, found, failed)


def block(
    arm: str,
    number: int,
    answers: Sequence[Answer | None],
    *,
    seconds: float = 1.0,
    counted: dict[str, float] | None = None,
) -> BlockResult:
    records = tuple(
        record(each, arm=arm, block=number, session=1000 * number + place)
        for place, each in enumerate(answers)
    )
    return BlockResult(arm, number, seconds, records, counted)
