# SPDX-License-Identifier: Apache-2.0
"""What is asked: the same for the same seed, and shared as each kind says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.workloads import build as building
from vllm_tiered_kv.bench.workloads import content as content_of
from vllm_tiered_kv.bench.workloads.build import Session, build, prompts
from vllm_tiered_kv.bench.workloads.content import Content, length, words, zipf
from vllm_tiered_kv.bench.workloads.kinds import Agent, Chat, Cold, Rag, Shared, Trace, Workload

SMALL: list[Workload] = [
    Shared(system_tokens=40, input_tokens=10, output_tokens=5),
    Chat(system_tokens=20, input_tokens=8, output_tokens=6),
    Rag(system_tokens=10, documents=7, document_tokens=20, input_tokens=5, output_tokens=3),
    Agent(system_tokens=30, steps=5, result_tokens=7, output_tokens=3),
    Cold(input_tokens=30, output_tokens=4),
]


def made(workload: Workload, count: int = 40, seed: int = 0) -> tuple[Session, ...]:
    return build(workload, count, Content(seed, 100, 999)).sessions


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def first_prompts(sessions: Sequence[Session]) -> list[tuple[int, ...]]:
    return [session.steps[0].added for session in sessions]


@pytest.mark.parametrize("workload", SMALL, ids=lambda each: type(each).__name__)
def test_a_seed_decides_everything(workload: Workload) -> None:
    assert made(workload) == made(workload)
    assert made(workload)[:10] == made(workload, count=10)
    assert made(workload) != made(workload, seed=1)
    for session in made(workload):
        for prompt, step in zip(prompts(session), session.steps, strict=True):
            assert all(100 <= token <= 999 for token in prompt)
            assert step.output_tokens >= 1


def test_shared_prompts_share_one_of_a_few_heads_and_nothing_more() -> None:
    asked = first_prompts(made(Shared(system_prompts=3, system_tokens=40, input_tokens=20)))
    heads = [prompt[:40] for prompt in asked]
    assert len(set(heads)) == 3
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert counts[0] > counts[2]
    assert len({prompt[40:] for prompt in asked}) == len(asked)
    assert len({len(prompt) for prompt in asked}) > 5
    alike = first_prompts(made(Shared(system_tokens=40, input_tokens=20, spread=0.0)))
    assert {len(prompt) for prompt in alike} == {60}


def test_turns_of_a_chat_repeat_all_before_them() -> None:
    chat = Chat(system_prompts=2, system_tokens=30, turns=4, input_tokens=10, think=2.0)
    sessions = made(chat)
    for session in sessions:
        asked = list(prompts(session))
        assert len(asked) == 4
        for before, step, after in zip(asked, session.steps, asked[1:], strict=False):
            assert after[: len(before)] == before
            assert after[len(before) :][: step.output_tokens] == step.answer
            assert len(step.answer) == step.output_tokens
        assert session.steps[0].pause == 0
        assert session.steps[-1].answer == ()
    pauses = [step.pause for session in sessions for step in session.steps[1:]]
    assert 1.0 < sum(pauses) / len(pauses) < 3.0
    assert len({prompt[:30] for prompt in first_prompts(sessions)}) == 2
    hasty = made(Chat(system_prompts=2, system_tokens=30, turns=4, input_tokens=10, think=0.0))
    assert [list(prompts(s)) for s in hasty] == [list(prompts(s)) for s in sessions]
    assert {step.pause for session in hasty for step in session.steps} == {0.0}


def test_an_agent_goes_on_from_step_to_step() -> None:
    agent = Agent(agents=2, system_tokens=50, steps=6, result_tokens=10, output_tokens=4)
    for session in made(agent, 10):
        lengths = [len(prompt) for prompt in prompts(session)]
        assert len(lengths) == 6
        assert lengths == sorted(lengths)
        assert lengths[0] > 50


def test_questions_about_the_same_documents_share_a_prefix() -> None:
    rag = Rag(system_tokens=10, documents=6, document_tokens=50, shown=2, input_tokens=5)
    asked = first_prompts(made(rag, 60))
    shared = {common(a, b) for i, a in enumerate(asked) for b in asked[:i]}
    assert min(shared) >= 10  # the system prompt
    assert len([size for size in shared if size > 60]) > 2  # both documents
    everything = Rag(documents=3, shown=9, document_tokens=50, input_tokens=5, skew=10.0)
    (size,) = {common(a, b) for a, b in [first_prompts(made(everything, 2))]}
    assert size > 3 * 20


def test_cold_prompts_share_nothing() -> None:
    asked = first_prompts(made(Cold(input_tokens=100), 50))
    assert max(common(a, b) for i, a in enumerate(asked) for b in asked[:i]) < 3


def write_trace(path: Path, rows: Sequence[tuple[float, int, int, Sequence[int]]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    path.write_text("\n".join(lines))
    return str(path)


ROWS = (
    (0.0, 1200, 40, (1, 2, 3)),
    (500.0, 1300, 50, (1, 2, 4)),
    (2500.0, 5000, 60, tuple(range(10, 20))),
    (3000.0, 700, 500, (1, 9)),
)


def test_a_trace_keeps_what_is_shared(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", ROWS)
    built = build(Trace(path=path, speed=2.0), 4, Content(0, 100, 999))
    first, second, third, fourth = first_prompts(built.sessions)
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [1200, 1300, 5000, 700]
    assert common(first, second) == 1024
    assert common(first, fourth) == 512
    assert common(first, third) < 3
    assert [session.due for session in built.sessions] == [0.0, 0.25, 1.25, 1.5]
    assert [session.steps[0].output_tokens for session in built.sessions] == [40, 50, 60, 500]
    assert built.notes == ()


def test_a_trace_shrinks_as_a_whole(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", ROWS)
    small = Trace(path=path, block_tokens=64, max_input_tokens=400, max_output_tokens=50)
    built = build(small, 3, Content(0, 100, 999))
    first, second, fourth = first_prompts(built.sessions)
    assert [len(prompt) for prompt in (first, second, fourth)] == [150, 162, 88]
    assert common(first, second) == 128
    assert common(first, fourth) == 64
    assert built.sessions[2].steps[0].output_tokens == 50
    assert built.notes == (
        "1 requests of the trace are longer than max_input_tokens: left out",
        "1 answers of the trace were cut to max_output_tokens",
    )


def test_a_trace_that_cannot_be_played(tmp_path: Path) -> None:
    content = Content(0, 100, 999)
    path = write_trace(tmp_path / "trace.jsonl", ROWS)
    with pytest.raises(BenchError, match=r"has 4 requests .*, and 5 are asked for"):
        build(Trace(path=path), 5, content)
    with pytest.raises(BenchError, match="cannot be read: No such file"):
        build(Trace(path=str(tmp_path / "no.jsonl")), 5, content)
    (tmp_path / "bad.jsonl").write_text('{"timestamp": "soon"}')
    with pytest.raises(BenchError, match=r"line 1: timestamp: 'soon' is not valid: expected a"):
        build(Trace(path=str(tmp_path / "bad.jsonl")), 1, content)


def test_too_much_is_refused_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "MAX_TOKENS", 3000)
    path = write_trace(tmp_path / "trace.jsonl", ROWS)
    for workload in (Cold(input_tokens=1000), Trace(path=path)):
        with pytest.raises(BenchError, match="more than 3000 tokens"):
            made(workload, 4)


@pytest.mark.parametrize(
    "workload",
    [
        Rag(document_tokens=500, documents=1000, shown=1000),
        Chat(turns=1_000_000, input_tokens=500),
    ],
)
def test_one_session_alone_may_be_too_much(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_of, "MAX_TOKENS", 20_000)
    with pytest.raises(BenchError, match="more than 20000 tokens"):
        made(workload, 1)


@given(st.text(max_size=20), st.integers(0, 200), st.integers(0, 200))
def test_a_shorter_piece_is_the_head_of_a_longer_one(name: str, first: int, second: int) -> None:
    content = Content(7, 8, 4095)
    short, long = sorted((first, second))
    assert content.tokens(name, long)[:short] == content.tokens(name, short)


def test_lengths_have_the_mean_they_are_named_after() -> None:
    rng = Content(0, 0, 1).rng("lengths")
    drawn = [length(rng, 500, 0.5) for _ in range(4000)]
    assert 480 < sum(drawn) / len(drawn) < 520
    assert max(drawn) > 1000
    assert zipf(4, 1.0) == pytest.approx([1, 1.5, 11 / 6, 25 / 12])
    assert zipf(3, 0.0) == [1, 2, 3]


def test_words_keep_equal_heads_equal() -> None:
    tokens = Content(0, 8, 4095).tokens("a", 50)
    text = words(tokens)
    assert text.startswith(words(tokens[:20]) + " ")
    assert len(text.split()) == 50
