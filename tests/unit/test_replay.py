# SPDX-License-Identifier: Apache-2.0
"""Replays: known answers, bounds, and traces that cannot be read."""

from __future__ import annotations

import gzip
import itertools
import lzma
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.policies.admission import Admission
from vllm_tiered_kv.replay import (
    Request,
    Settings,
    TraceError,
    belady,
    endless,
    read_trace,
    replay,
)
from vllm_tiered_kv.replay.synthetic import LOADS
from vllm_tiered_kv.replay.tiers import DiskTier
from vllm_tiered_kv.replay.trace import MAX_LINE, decode_trace

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "conversation_trace.jsonl.xz"
GOOD = b'{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'


def requests_of(*prompts: tuple[int, ...]) -> list[Request]:
    return [Request(0.0, 512 * len(blocks), 1, blocks) for blocks in prompts]


def key(block: int) -> bytes:
    return block.to_bytes(8, "little")


# Prefixes of a small tree: a path of branches is a block, and stands for all that precedes it.
PATHS = [path for n in (1, 2, 3) for path in itertools.product((1, 2), repeat=n)]
PROMPTS = st.sampled_from(PATHS).map(
    lambda path: tuple(PATHS.index(path[: i + 1]) for i in range(len(path)))
)


@pytest.fixture(scope="module")
def trace() -> list[Request]:
    return list(read_trace(TRACE))


def percent(hits: int, trace: list[Request]) -> float:
    return round(100 * hits / sum(len(request.hash_ids) for request in trace), 2)


def test_the_trace_has_what_its_readme_says(trace: list[Request]) -> None:
    assert len(trace) == 12_031
    assert sum(len(request.hash_ids) for request in trace) == 288_500
    assert len({block for request in trace for block in request.hash_ids}) == 182_790
    assert percent(endless(trace), trace) == 36.64


@pytest.mark.parametrize(("blocks", "lru", "best"), [(9_139, 19.58, 36.64), (18_279, 27.89, 36.64)])
def test_known_hit_rates_of_the_trace(
    trace: list[Request], blocks: int, lru: float, best: float
) -> None:
    assert round(100 * replay(trace, Settings(blocks)).hit_rate, 2) == lru
    assert percent(belady(trace, blocks), trace) == best


def test_a_disk_that_knows_no_parents_serves_what_the_tree_does(trace: list[Request]) -> None:
    disk = DiskTier(9_139, 1, 512, Eviction.LRU, Admission())
    hits = 0
    for request in trace:
        keys = [key(block) for block in request.hash_ids]
        hits += len(list(itertools.takewhile(lambda k: k in disk, keys)))
        disk.take_in(keys)
    assert percent(hits, trace) == 19.58


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.COST])
@given(prompts=st.lists(PROMPTS, max_size=60), size=st.integers(1, 8))
@settings(deadline=None)
def test_without_parents_too_the_tail_goes_before_the_head(
    eviction: Eviction, prompts: list[tuple[int, ...]], size: int
) -> None:
    disk = DiskTier(size, 1, 512, eviction, Admission())
    for blocks in prompts:
        disk.take_in([key(block) for block in blocks])
        for path in PATHS:
            if len(path) > 1 and key(PATHS.index(path)) in disk:
                assert key(PATHS.index(path[:-1])) in disk


def most_hits(prompts: list[tuple[int, ...]], size: int) -> int:
    """The most blocks that any choice of what to keep can serve, by trying all of them."""
    best = {frozenset[int](): 0}
    for blocks in prompts:
        then: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            hits += len(list(itertools.takewhile(kept.__contains__, blocks)))
            for n in range(size + 1):
                for choice in itertools.combinations(sorted(kept.union(blocks)), n):
                    chosen = frozenset(choice)
                    then[chosen] = max(then.get(chosen, 0), hits)
        best = then
    return max(best.values())


@given(prompts=st.lists(PROMPTS, max_size=7), size=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_nothing_serves_more_than_who_knows_the_future(
    prompts: list[tuple[int, ...]], size: int
) -> None:
    assert belady(requests_of(*prompts), size) == most_hits(prompts, size)


@pytest.mark.parametrize("eviction", Eviction)
@given(prompts=st.lists(PROMPTS, max_size=40), size=st.integers(1, 10), disk=st.integers(0, 10))
@settings(max_examples=40, deadline=None)
def test_no_policy_serves_more_than_the_bounds(
    eviction: Eviction, prompts: list[tuple[int, ...]], size: int, disk: int
) -> None:
    trace = requests_of(*prompts)
    outcome = replay(trace, Settings(size, eviction, disk, eviction))
    hits = outcome.cpu_hits + outcome.disk_hits
    assert hits <= belady(trace, size + disk) <= endless(trace)
    assert outcome.requests == len(prompts)
    assert 0 <= outcome.saved <= 1


def test_what_left_the_cpu_tier_is_found_on_disk_and_comes_back() -> None:
    trace = requests_of((1, 2), (3, 4), (1, 2), (1, 2))
    outcome = replay(trace, Settings(cpu_blocks=2, disk_bytes=4_000, block_bytes=1_000))
    assert (outcome.cpu_hits, outcome.disk_hits) == (2, 2)
    assert outcome.disk_written == 4_000


def test_a_chunk_is_written_when_it_is_seen_often_enough() -> None:
    trace = requests_of((1, 2), (1, 2), (1, 3), (1, 2))
    written = [
        replay(trace, Settings(9, disk_bytes=9, store_after=n)).disk_written for n in (1, 2, 3)
    ]
    assert written == [3, 2, 2]
    once = replay(trace, Settings(9, disk_bytes=9, store_after=4))
    assert once.disk_written == 1
    assert once.cpu_hits == 5


def test_a_short_prefix_is_not_written() -> None:
    trace = requests_of((1,), (2, 3))
    outcome = replay(trace, Settings(9, disk_bytes=9, min_tokens=1024))
    assert outcome.disk_written == 2


def test_nothing_is_written_behind_a_gap() -> None:
    disk = DiskTier(9, 1, 512, Eviction.LRU, Admission(store_after=2))
    disk.take_in([key(2)])
    disk.take_in([key(1), key(2)])
    assert key(2) not in disk
    disk.take_in([key(1), key(2)])
    assert key(1) in disk
    assert key(2) in disk


@pytest.mark.parametrize("load", LOADS)
def test_a_synthetic_load_is_a_trace_and_the_same_for_a_seed(load: str) -> None:
    first, again, other = (list(itertools.islice(LOADS[load](seed), 300)) for seed in (1, 1, 2))
    assert first == again != other
    assert [r.timestamp for r in first] == sorted(r.timestamp for r in first)
    assert all(-(-r.input_length // 512) == len(r.hash_ids) for r in first)
    lines = [msgspec.json.encode(request) for request in first]
    assert list(decode_trace(lines, load)) == first  # one prefix for each id, too
    assert endless(first) > 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[]", "the line: [] is not valid: expected an object"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 1}', "hash_ids: required"),
        (GOOD.replace(b"600", b"-1"), "input_length: -1 is not valid: expected a whole number of"),
        (GOOD.replace(b"[1, 2]", b'["1"]'), "hash_ids[0]: '1' is not valid: expected a whole"),
        (b"[" * 100_000, "not JSON"),
        (GOOD.replace(b"[1, 2]", b"[%d]" % (1 << 64)), "hash_ids"),
        (GOOD.replace(b"[1, 2]", b"[7, 2]"), "block 2 follows 7 here and followed 1 before"),
        (GOOD.replace(b"[1, 2]", b"[8, 9, 8]"), "block 8 follows 9"),
        (GOOD + b" " * MAX_LINE, "longer than"),
        (b"\xff", "line 3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"", line, GOOD]))
    with pytest.raises(TraceError, match="line 3") as caught:
        list(read_trace(path))
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_packed_trace_is_unpacked_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    for suffix, pack in ((".gz", gzip.compress), (".xz", lzma.compress)):
        path = tmp_path / f"trace.jsonl{suffix}"
        path.write_bytes(pack(GOOD))
        assert [r.hash_ids for r in read_trace(path)] == [(1, 2)]
        path.write_bytes(pack(GOOD)[:-10])
        with pytest.raises(TraceError, match="unpacked"):
            list(read_trace(path))
        path.write_bytes(b"not packed")
        with pytest.raises(TraceError, match="unpacked"):
            list(read_trace(path))
