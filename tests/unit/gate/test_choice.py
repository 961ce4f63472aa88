# SPDX-License-Identifier: Apache-2.0
"""Of all that could be loaded what is best under the models, found by looking at few ends."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_kv.gate import Choice, Gate, GateMode, Option, Question, Reason, Work
from vllm_tiered_kv.gate.choice import (
    AS_GOOD,
    AS_GOOD_FOR_OTHERS,
    decide,
    ends_to_try,
    forced,
    kinks,
)
from vllm_tiered_kv.gate.prefill import Curve

CHUNK = 16
RATE = st.one_of(st.just(0.0), st.floats(1e-7, 1.0))
ANY_CURVE = st.builds(Curve, RATE, RATE, st.floats(0, 1e-3), st.integers(1, 2000))


def times(unit: float) -> st.SearchStrategy[float]:
    """Of one size, so that any choice may be the best."""
    return st.integers(0, 40).map(lambda count: count * unit)


STEP, TOKEN, PAIR = times(2e-3), times(1e-5), times(1e-9)
CURVES = st.one_of(st.builds(Curve, STEP, TOKEN, PAIR, st.integers(16, 500)), ANY_CURVE)
ENDS = st.one_of(
    st.integers(0, 60).map(lambda chunks: [True] * chunks),
    st.lists(st.booleans(), max_size=60),
)
"""For each chunk whether a load can stop behind it: with windows or states not behind each."""
EXTRA = st.one_of(st.floats(0.1, 0.9), st.floats(-1, 2), st.just(1e9))
"""What a token more costs than computing it, in shares of a step that is full. From 0 to 1 loading
pays just so long as it saves a step."""
SOURCE = st.tuples(st.one_of(st.just(0.0), STEP, RATE), EXTRA, ENDS)
"""Seconds before the first token comes, what a token costs, ends."""
TAIL = st.tuples(st.one_of(st.just(0.0), TOKEN), st.integers(1, 10))
"""Seconds of a chunk in layers with windows or states, and how many chunks of a hit they need."""


@settings(max_examples=2000, deadline=None)
@given(
    curve=CURVES,
    start=st.integers(0, 100),
    rest=st.integers(1, 40),
    fixed=st.one_of(st.just(0.0), STEP, RATE),
    sources=st.tuples(SOURCE, SOURCE),
    tail=TAIL,
)
def test_no_end_is_better(
    curve: Curve,
    start: int,
    rest: int,
    fixed: float,
    sources: tuple[tuple[float, float, list[bool]], tuple[float, float, list[bool]]],
    tail: tuple[float, int],
) -> None:
    first = start // CHUNK
    (_, near_extra, near), (far_latency, far_extra, far) = sources
    near_token, far_token = (
        max(0.0, curve.token + extra * curve.step / curve.budget)
        for extra in (near_extra, far_extra)
    )
    total = len(near) + len(far)
    prompt = max(start, (first + total) * CHUNK) + rest
    ends = [n for n, is_end in enumerate([*near, *far], 1) if is_end]
    here = [n for n in ends if n <= len(near)]
    beyond = ends[len(here) :]
    known = here[-1] if here else 0

    def moved(chunks: int, token: float) -> float:
        return chunks * CHUNK * token + min(chunks, tail[1]) * tail[0]

    def load(chunks: int) -> float:
        seconds = fixed + moved(chunks, near_token)  # all passes through the nearer one
        if chunks > known:
            seconds += far_latency + moved(chunks - known, far_token)
        return seconds

    every = {n: load(n) + curve.seconds((first + n) * CHUNK, prompt) for n in ends}
    best = min([*every.values(), curve.seconds(start, prompt)])

    below, above = (token // CHUNK - first for token in kinks(prompt, curve.budget, CHUNK))
    looked_at = ends_to_try(here, 0, below, above) + ends_to_try(beyond, known, below, above)
    options = [Option((first + n) * CHUNK, load(n), n > known) for n in looked_at]
    assert len(options) <= 6
    decision = decide(Question(start, prompt, tuple(options)), curve)
    assert decision.total is not None
    assert decision.total <= (1 + AS_GOOD) * best * (1 + 1e-9) + 1e-12
    for option in options:  # nothing that is as good takes less of the accelerator
        if option.end > decision.end:
            assert option.load + curve.seconds(option.end, prompt) > (1 + AS_GOOD) * min(
                [decision.total / (1 + AS_GOOD), best]
            )


@given(ANY_CURVE, st.integers(0, 500), st.integers(1, 500), st.integers(1, 500))
def test_pieces_of_a_recompute_add_up(curve: Curve, start: int, a: int, b: int) -> None:
    free = Curve(0.0, curve.token, curve.pair, curve.budget)
    whole = free.seconds(start, start + a + b)
    parts = free.seconds(start, start + a) + free.seconds(start + a, start + a + b)
    assert abs(whole - parts) <= 1e-9 * (whole + 1)


def test_what_is_as_good_and_spares_the_accelerator_is_taken() -> None:
    curve = Curve(0.0, 1e-3, 0.0, 10_000)
    question = Question(0, 1000, (Option(900, 0.91),))
    assert decide(question, curve).choice is Choice.ALL  # 1.01 s against 1 s
    refusal = decide(Question(0, 1000, (Option(900, 0.95),)), curve)
    assert refusal.choice is Choice.NONE
    assert refusal.instead is not None
    assert abs(refusal.instead - 1.05) < 1e-9


def test_a_prefix_is_loaded_where_the_rest_is_slower() -> None:
    curve = Curve(0.01, 1e-3, 0.0, 10_000)
    question = Question(0, 1000, (Option(400, 0.02), Option(960, 5.0, reads=True)))
    decision = decide(question, curve)
    assert (decision.choice, decision.end) == (Choice.PART, 400)
    assert decision.replaced is not None
    assert abs(decision.replaced - 0.4) < 1e-9


def taught(gate: Gate, token: float = 1e-4, copy: float = 1e-9, read: float = 1e-9) -> Gate:
    for i in range(40):
        tokens = 100 + 50 * i
        gate.prefill.observe(Work(tokens, tokens**2 / 2, is_prefill=True), token * tokens)
        gate.copy.observe((1 + i) << 20, copy * ((1 + i) << 20))
        gate.disk.observe((1 + i) << 20, read * ((1 + i) << 20))
    return gate


def test_an_engine_that_knows_nothing_loads() -> None:
    gate = Gate(2048, 10.0)
    question = Question(0, 1000, (Option(960, 100.0),))
    decision = gate.decide(question, GateMode.MEASURED, is_busy=False)
    assert (decision.choice, decision.reason) == (Choice.ALL, Reason.LEARNING)
    assert decision.instead is None  # so there is no regret either


def test_always_is_always() -> None:
    question = Question(0, 1000, (Option(960, 100.0),))
    decision = taught(Gate(2048, 10.0)).decide(question, GateMode.ALWAYS, is_busy=False)
    assert (decision.choice, decision.reason) == (Choice.ALL, Reason.FORCED)
    assert decision.instead is not None
    assert decision.instead < 0.2
    assert forced(Question(0, 1000, ()), Reason.FORCED, None).choice is Choice.NONE


def test_what_is_refused_is_tried_within_an_allowance() -> None:
    """One hundredth of the time that requests take, and no more."""
    gate = taught(Gate(2048, 10.0))
    question = Question(0, 1000, (Option(960, 0.2),))  # 0.1 s to compute
    small = Question(0, 1000, (Option(128, 0.1),))
    spent, lost, tries = 0.0, 0.0, 0
    for _ in range(1000):
        refused = gate.decide(question, GateMode.MEASURED, is_busy=False)
        assert refused.choice is Choice.NONE
        decision = gate.explore(refused, small, is_busy=False)
        assert decision == gate.explore(refused, small, is_busy=False)  # there was no room for it
        gate.admitted(decision)
        assert decision.total is not None
        gate.took(decision.total)
        spent += decision.total
        if decision.reason is Reason.EXPLORING:
            assert decision.instead is not None
            tries, lost = tries + 1, lost + decision.total - decision.instead
    assert tries >= 5
    assert lost <= 0.011 * spent


def tries(gate: Gate, load: float, requests: int) -> list[int]:
    """Which of some equal requests were tried, of a tier that is expected to take so long."""
    question = Question(0, 1000, (Option(960, load + 1.0),))
    small = Question(0, 1000, (Option(128, load),))
    tried = []
    for i in range(requests):
        refused = gate.decide(question, GateMode.MEASURED, is_busy=False)
        assert refused.choice is Choice.NONE
        decision = gate.explore(refused, small, is_busy=False)
        gate.admitted(decision)
        if decision.reason is Reason.EXPLORING:
            tried.append(i)
        gate.took(0.1)
    return tried


def test_what_is_thought_to_take_for_ever_is_tried_as_well() -> None:
    """Three accidents make any tier look so, and only a trial shows that it is not."""
    tried = tries(taught(Gate(2048, 10.0)), 60.0, 20_000)
    assert 1 <= len(tried) <= 6
    pauses = [b - a for a, b in itertools.pairwise(tried)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 3 * tried[0]  # and ever more rarely


def test_what_was_saved_up_is_not_spent_on_one_trial_after_the_other() -> None:
    gate = taught(Gate(2048, 10.0))
    for _ in range(10_000):
        gate.took(0.1)
    assert 1 <= len(tries(gate, 0.15, 40)) <= 2


def test_beside_others_a_recompute_must_be_worth_a_little_more() -> None:
    """Their tokens come later by all that it takes; within what nobody would measure."""
    gate = taught(Gate(2048, 10.0))
    alone, beside = (gate.curve(is_busy=busy) for busy in (False, True))
    assert alone == beside
    assert alone is not None
    nothing = alone.seconds(0, 1000)
    for more, choices in (
        (0.5 * AS_GOOD, (Choice.ALL, Choice.ALL)),
        (0.5 * (AS_GOOD + AS_GOOD_FOR_OTHERS), (Choice.NONE, Choice.ALL)),
        (1.1 * AS_GOOD_FOR_OTHERS, (Choice.NONE, Choice.NONE)),
    ):
        option = Option(960, (1 + more) * nothing - alone.seconds(960, 1000))
        question = Question(0, 1000, (option,))
        for is_busy, choice in zip((False, True), choices, strict=True):
            assert gate.decide(question, GateMode.MEASURED, is_busy=is_busy).choice is choice
