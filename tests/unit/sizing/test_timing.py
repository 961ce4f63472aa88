# SPDX-License-Identifier: Apache-2.0
"""Fetching against computing: the worked example, break-even, and windows of hits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sizing import _configs as c
from vllm_tiered_kv.replay import Request, Settings, endless, replay
from vllm_tiered_kv.replay.synthetic import LOADS
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.gpus import GPUS, Precision, find_gpu
from vllm_tiered_kv.sizing.hit_window import WorkingSet, capacity_for, working_set
from vllm_tiered_kv.sizing.layers import Footprint, WindowBytes
from vllm_tiered_kv.sizing.timing import (
    MAX_TOKENS,
    Compute,
    Link,
    Pairs,
    Work,
    break_even,
    fetch_seconds,
)
from vllm_tiered_kv.sizing.work import attention_pairs

H100 = find_gpu("h100")


def test_the_worked_example() -> None:
    footprint = c.read(c.LLAMA_3_70B).shape.one_copy()
    link = Link("tier", 252e9, 0.0, "test")
    assert fetch_seconds(footprint, link, 131_072) == pytest.approx(0.1704, abs=1e-4)
    work = Work(70_000_000_000)
    peak, precision = H100.peak(Precision.FP8)
    assert (peak, precision) == (1_979e12, Precision.FP8)
    assert work.seconds(131_072, Compute(peak, 0.4, 1)) == pytest.approx(23.18, abs=0.01)
    assert work.seconds(131_072, Compute(peak, 0.4, 8)) == pytest.approx(2.90, abs=0.01)


def test_attention_counts_pairs() -> None:
    (pairs,) = attention_pairs(c.read(c.LLAMA_3_70B))
    assert pairs == Pairs(4 * 80 * 64 * 128)
    assert pairs.of_prompt(131_072) == pytest.approx(2.25e16, rel=0.01)
    (latent,) = attention_pairs(c.read(c.DEEPSEEK_V3))
    assert latent == Pairs(61 * 2 * 128 * (192 + 128))
    shared = attention_pairs(c.read(c.ARCHITECTURES["gemma3n"]))
    layer = 4 * 8 * 32
    assert shared == (Pairs(2 * layer), Pairs(8 * layer, 64))


@given(tokens=st.integers(0, 300), window=st.integers(0, 400))
def test_pairs_are_what_counting_them_gives(tokens: int, window: int) -> None:
    counted = sum(min(i + 1, window or i + 1) for i in range(tokens))
    assert Pairs(1, window).of_prompt(tokens) == counted


FOOTPRINTS = st.builds(
    Footprint,
    bytes_per_token=st.integers(0, 1 << 20),
    windows=st.lists(
        st.builds(
            WindowBytes, tokens=st.integers(1, 5000), bytes_per_token=st.integers(1, 1 << 20)
        ),
        max_size=2,
    ).map(tuple),
    state_bytes=st.integers(0, 1 << 28),
)
WORKS = st.builds(
    Work,
    parameters=st.integers(1, 10**12),
    pairs=st.lists(
        st.builds(Pairs, flops=st.integers(1, 10**7), window=st.integers(0, 5000)), max_size=2
    ).map(tuple),
)
LINKS = st.builds(
    Link,
    name=st.just("tier"),
    bandwidth=st.floats(1e6, 1e12),
    latency=st.floats(0, 10),
    source=st.just("test"),
)


@given(footprint=FOOTPRINTS, work=WORKS, link=LINKS, flops=st.floats(1e9, 1e16))
def test_fetching_pays_from_the_break_even_on_and_not_before(
    footprint: Footprint, work: Work, link: Link, flops: float
) -> None:
    compute = Compute(flops, 1.0, 1)

    def pays(tokens: int) -> bool:
        return fetch_seconds(footprint, link, tokens) <= work.seconds(tokens, compute)

    found = break_even(footprint, link, work, compute)
    lengths = [2**power for power in range(25)]
    if found is None:
        assert not any(map(pays, lengths))
        return
    assert pays(found)
    assert found == 1 or not pays(found - 1)
    assert all(pays(n) is (n >= found) for n in lengths)


def test_break_even_of_a_slow_tier_is_never() -> None:
    footprint, work = Footprint(131_072), Work(8_000_000_000)
    compute = Compute(1e15, 0.4, 1)
    assert break_even(footprint, Link("slow", 1e9, 0.0, "test"), work, compute) is None
    # 2 ms of latency over 40 us a token to compute, less 1.3 us to fetch.
    assert break_even(footprint, Link("fast", 1e11, 2e-3, "test"), work, compute) == 52
    assert fetch_seconds(footprint, Link("slow", 1e9, 0.0, "test"), MAX_TOKENS) > 0


def test_gpus_by_name() -> None:
    assert find_gpu("NVIDIA H100 80GB") is find_gpu("H100-SXM") is GPUS["h100"]
    assert find_gpu("AMD Instinct MI300X").memory == 192 * 10**9
    assert find_gpu("a100").peak(Precision.FP8) == (312e12, Precision.BF16)
    with pytest.raises(SizingError, match="'v100' is not a GPU known here: a10, a100"):
        find_gpu("v100")


def test_capacity_of_a_hit_window() -> None:
    footprint = Footprint(100, (WindowBytes(10, 5),), 1_000)
    assert capacity_for(footprint, 60.0, 2.0, 50) == 120 * (50 * 105 + 1_000)


def requests_of(*prompts: tuple[float, tuple[int, ...]]) -> list[Request]:
    return [Request(1e3 * at, 512 * len(blocks), 1, blocks) for at, blocks in prompts]


def test_a_working_set() -> None:
    trace = requests_of((0, (1, 2)), (5, (1, 3)), (10, (1, 2)), (20, (1, 2, 4)), (21, (9, 1)))
    assert working_set(trace, 10.0) == WorkingSet(10.0, 4, 1 + 2 + 2, 11)
    assert working_set(trace, 5.0) == WorkingSet(5.0, 4, 2, 11)


PATHS = [path for n in (1, 2, 3) for path in itertools.product((1, 2), repeat=n)]
PROMPTS = st.sampled_from(PATHS).map(
    lambda path: tuple(PATHS.index(path[: i + 1]) for i in range(len(path)))
)


@given(st.lists(st.tuples(st.integers(0, 50), PROMPTS), max_size=30), st.integers(0, 60))
def test_a_tier_as_large_as_the_working_set_serves_it(
    arrivals: list[tuple[int, tuple[int, ...]]], seconds: int
) -> None:
    trace = requests_of(*sorted(arrivals))
    found = working_set(trace, seconds)
    assert found.hits <= endless(trace)
    if found.largest:
        assert found.hits <= replay(trace, Settings(found.largest)).cpu_hits


def test_a_window_without_end_is_an_endless_tier() -> None:
    trace = list(itertools.islice(LOADS["chat"](3), 400))
    found = working_set(trace, 1e9)
    assert found.hits == endless(trace)
    assert found.largest == len({block for request in trace for block in request.hash_ids})
