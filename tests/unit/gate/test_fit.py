# SPDX-License-Identifier: Apache-2.0
"""A model learns what is so, through noise, drift and accidents, and forgets what was."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.gate.fit import Fit, non_negative
from vllm_tiered_kv.gate.load import MOST_STEPS, Backlog, LoadModel
from vllm_tiered_kv.gate.prefill import PrefillModel, Work

TRUE = (0.004, 2e-5, 3e-9)
"""Seconds: a step, a token, a pair."""


def seconds(work: Work, true: tuple[float, float, float] = TRUE) -> float:
    return true[0] + true[1] * work.tokens + true[2] * work.attention


def steps(rng: random.Random, budget: int = 2048) -> list[Work]:
    """Prefill steps of one prompt, with requests that decode beside it."""
    tokens, works, done = rng.randrange(40, 12_000), [], 0
    decoding = [rng.randrange(4000) for _ in range(rng.randrange(20))]
    while done < tokens:
        count = min(tokens - done, budget - len(decoding))
        pairs = count * (done + count / 2) + sum(decoding)
        works.append(Work(count + len(decoding), pairs, is_prefill=count >= 16))
        done += count
    return works


def learn(
    model: PrefillModel,
    rng: random.Random,
    prompts: int,
    *,
    noise: float = 0.0,
    true: tuple[float, float, float] = TRUE,
    accidents: float = 0.0,
) -> None:
    for _ in range(prompts):
        for work in steps(rng):
            took = seconds(work, true) * (1 + rng.gauss(0, noise))
            if rng.random() < accidents:
                took += 10.0
            model.observe(work, max(0.0, took))


def worst(model: PrefillModel, true: tuple[float, float, float] = TRUE) -> float:
    """The largest relative error of a recompute, over prompts and what they begin with."""
    curve = model.curve(is_busy=False)
    assert curve is not None
    errors = [0.0]
    for start, end in itertools.product((0, 100, 3000), (200, 1000, 4000, 10_000)):
        if start < end:
            n = end - start
            want = true[0] * max(1, n / 2048) + true[1] * n + true[2] * (end**2 - start**2) / 2
            errors.append(abs(curve.seconds(start, end) - want) / want)
    return max(errors)


def test_nothing_is_known_before_a_few_steps() -> None:
    model = PrefillModel(2048)
    for _ in range(4):
        model.observe(Work(100, 5000.0, is_prefill=True), 0.01)
        assert model.curve(is_busy=False) is None
    model.observe(Work(100, 5000.0, is_prefill=True), 0.01)
    assert model.curve(is_busy=False) is not None


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_it_converges_through_noise(noise: float) -> None:
    model = PrefillModel(2048)
    learn(model, random.Random(1), 60, noise=noise)
    assert worst(model) < 0.02 + noise / 2


def test_accidents_move_nothing() -> None:
    """A step that took ten seconds, now and then, and one by itself."""
    model = PrefillModel(2048)
    rng = random.Random(2)
    learn(model, rng, 100, noise=0.05, accidents=0.03)
    assert worst(model) < 0.1
    before = worst(model)
    model.observe(Work(1000, 500_000.0, is_prefill=True), 10.0)
    assert abs(worst(model) - before) < 0.02


def test_an_accident_among_the_first_steps_is_no_measure() -> None:
    model = PrefillModel(2048)
    model.observe(Work(1000, 500_000.0, is_prefill=True), 60.0)  # kernels are compiled
    learn(model, random.Random(3), 40, noise=0.05)
    assert worst(model) < 0.1


@pytest.mark.parametrize("factor", [0.2, 3.0, 10.0])
def test_it_follows_a_change(factor: float) -> None:
    model = PrefillModel(2048)
    rng = random.Random(4)
    learn(model, rng, 60, noise=0.05)
    slower = (TRUE[0] * factor, TRUE[1] * factor, TRUE[2] * factor)
    learn(model, rng, 60, noise=0.05, true=slower)
    assert worst(model, slower) < 0.1


def test_it_follows_a_slow_drift() -> None:
    model = PrefillModel(2048)
    rng = random.Random(5)
    learn(model, rng, 60, noise=0.05)
    for i in range(200):
        factor = 1 + i / 100
        drifted = (TRUE[0] * factor, TRUE[1] * factor, TRUE[2] * factor)
        learn(model, rng, 1, noise=0.05, true=drifted)
    assert worst(model, drifted) < 0.1


def test_months_of_equal_prompts_do_not_unlearn_the_rest() -> None:
    model = PrefillModel(2048)
    rng = random.Random(6)
    learn(model, rng, 100, noise=0.02)
    for _ in range(20_000):
        work = Work(256, 256 * 128.0, is_prefill=True)
        model.observe(work, seconds(work) * (1 + rng.gauss(0, 0.02)))
    assert worst(model) < 0.25


def test_decoding_steps_say_nothing_of_prefill() -> None:
    """They follow another line, and there are thousands of them."""
    model = PrefillModel(2048)
    rng = random.Random(7)
    learn(model, rng, 60)
    for _ in range(5000):
        model.observe(Work(64), 0.03)
    assert worst(model) < 0.02
    idle, busy = model.curve(is_busy=False), model.curve(is_busy=True)
    assert idle is not None
    assert busy is not None
    assert busy.step == pytest.approx(0.03, rel=0.01)
    assert idle.step < 0.01


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=8),
    st.lists(st.floats(-10, 10), min_size=3, max_size=3),
)
def test_the_solution_is_the_best_that_is_not_negative(
    rows: list[list[float]], right: list[float]
) -> None:
    matrix = [
        [sum(r[i] * r[j] for r in rows) + (0.1 if i == j else 0.0) for j in range(3)]
        for i in range(3)
    ]
    w = non_negative(matrix, right)
    gradient = [sum(matrix[i][j] * w[j] for j in range(3)) - right[i] for i in range(3)]
    slack = 1e-6 * (1 + max(map(abs, right)))
    for value, slope in zip(w, gradient, strict=True):
        assert value >= 0
        assert slope >= -slack  # more of it makes nothing better
        assert value == 0 or slope <= slack  # and neither does less


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(1e-6, 100)), min_size=1, max_size=60))
def test_whatever_it_is_told_it_predicts_something(told: list[tuple[int, float]]) -> None:
    fit = Fit(lambda _, seconds: (seconds, 0.0), memory=10, first=3, change=3)
    for x, y in told:
        fit.observe((1.0, float(x)), y)
    predicted = fit.predict((1.0, 50.0))
    assert (predicted is None) == (len(told) < 3)
    assert predicted is None or 0 <= predicted < 1e6


def test_a_tier_is_learned_as_latency_and_bandwidth() -> None:
    model, rng = LoadModel(2e9, first=3), random.Random(8)
    for _ in range(40):
        nbytes = rng.randrange(1 << 20, 1 << 28)
        model.observe(nbytes, (0.002 + nbytes / 3e9) * (1 + rng.gauss(0, 0.1)))
    for nbytes in (1 << 20, 1 << 24, 1 << 28):
        assert model.seconds(nbytes) == pytest.approx(0.002 + nbytes / 3e9, rel=0.15)
    assert model.queueing(3_000_000_000) == pytest.approx(1.0, rel=0.1)


def test_small_jobs_alone_do_not_make_a_tier_look_slow() -> None:
    model = LoadModel(2e9, first=3)
    for _ in range(10):
        model.observe(400_000, 0.002)
    assert model.seconds(40_000_000) < 0.04  # and not a hundred times as long


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_tier_that_changes_is_followed_within_a_few_jobs(factor: float) -> None:
    model, rng = LoadModel(2e9, first=3), random.Random(9)
    for _ in range(40):
        nbytes = rng.randrange(1 << 22, 1 << 26)
        model.observe(nbytes, 0.002 + nbytes / 3e9)
    for _ in range(10):
        nbytes = rng.randrange(1 << 22, 1 << 26)
        model.observe(nbytes, factor * (0.002 + nbytes / 3e9))
    assert model.seconds(1 << 25) == pytest.approx(factor * (0.002 + (1 << 25) / 3e9), rel=0.2)


def test_one_slow_job_is_an_accident() -> None:
    model = LoadModel(2e9, first=3)
    for _ in range(20):
        model.observe(1 << 25, 0.012)
    model.observe(1 << 25, 5.0)
    assert model.seconds(1 << 25) == pytest.approx(0.012, rel=0.05)


def test_steps_that_a_job_costs_are_learned() -> None:
    model = LoadModel(2e9, first=3)
    assert model.delay(0.05) == pytest.approx(0.1)
    for step in (0.01, 0.03, 0.1, 0.02, 0.05):
        model.noticed(1.5 * step, step)
    assert model.delay(0.05) == pytest.approx(0.075, rel=0.1)


def test_small_jobs_that_wait_say_nothing_of_the_bandwidth() -> None:
    """Else no large one would be tried any more, and nobody would learn that it is fast."""
    model, rng = LoadModel(2e9, first=3), random.Random(10)
    for _ in range(20):
        nbytes = rng.randrange(1 << 20, 1 << 28)
        model.observe(nbytes, 0.002 + nbytes / 3e9)
    for _ in range(10):  # beside a long prefill
        model.observe(1 << 21, 0.08)
    assert model.seconds(1 << 21) == pytest.approx(0.08, rel=0.1)
    assert model.seconds(1 << 30) == pytest.approx(0.08 + (1 << 30) / 3e9, rel=0.15)
    for _ in range(5):
        model.observe(1 << 21, 0.003)
    assert model.seconds(1 << 21) == pytest.approx(0.003, rel=0.1)
    assert model.seconds(1 << 30) == pytest.approx(0.002 + (1 << 30) / 3e9, rel=0.5)


def test_after_a_change_values_on_both_sides_are_believed() -> None:
    """What changed is not known by one value: those that follow must not count as accidents."""
    model = LoadModel(2e9, first=3)
    for _ in range(40):
        model.observe(1 << 20, 0.002)
        model.observe(1 << 26, 0.024)
    for _ in range(3):
        model.observe(1 << 24, 0.09)  # ten times as slow as was predicted
    for _ in range(6):
        model.observe(1 << 20, 0.02)
        model.observe(1 << 26, 0.24)
    for nbytes, seconds in ((1 << 20, 0.02), (1 << 26, 0.24)):
        assert model.seconds(nbytes) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize("seconds", [20.0, -20.0])
def test_a_queue_is_not_counted_in_steps(seconds: float) -> None:
    """Requests that waited for somebody's prefill, or for less than seemed to be queued."""
    model = LoadModel(2e9, first=3)
    for _ in range(20):
        model.noticed(seconds, 0.002)
    assert 0 < model.delay(0.002) <= MOST_STEPS * 0.002 * 1.001
    for _ in range(20):
        model.noticed(0.004, 0.002)
    assert model.delay(0.002) == pytest.approx(0.004, rel=0.2)


def test_a_prompt_that_is_alone_gets_the_whole_step() -> None:
    """``long_prefill_token_threshold`` is for those that are not."""
    model = PrefillModel(8192, 512)
    for i in range(20):
        tokens = 100 + 300 * i
        model.observe(Work(tokens, 0.0, is_prefill=True), 0.01 + 1e-5 * tokens)
    alone, beside = model.curve(is_busy=False), model.curve(is_busy=True)
    assert alone is not None
    assert beside is not None
    assert alone.seconds(0, 8192) == pytest.approx(0.092, rel=0.1)
    assert beside.seconds(0, 8192) == pytest.approx(0.242, rel=0.1)


def test_of_what_is_queued_what_was_moved_meanwhile_is_not_counted() -> None:
    backlog = Backlog()
    assert backlog.left(5.0, 0.0) == 0
    backlog.add(1000, 5.0, 100.0)
    backlog.add(500, 5.0, 100.0)
    assert backlog.left(5.0, 100.0) == 1500
    assert backlog.left(13.0, 100.0) == 700
    assert backlog.left(12.0, 100.0) == 700  # a clock that went back
    backlog.ended(1000)
    assert backlog.left(13.0, 100.0) == 500  # it was faster than that
    backlog.ended(500)
    assert backlog.left(13.0, 100.0) == 0
    backlog.add(300, 100.0, 0.0)  # nothing is known yet
    assert backlog.left(200.0, 0.0) == 300
    assert backlog.left(200.0, 1e9) == 300
    assert backlog.left(201.0, 1e9) == 0
