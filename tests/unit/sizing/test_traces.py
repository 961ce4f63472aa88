# SPDX-License-Identifier: Apache-2.0
"""Traces through tiers: known answers, and seconds that add up."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import msgspec
import pytest

from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.replay import Request
from vllm_tiered_kv.sizing import trace_report, traces
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.layers import Footprint
from vllm_tiered_kv.sizing.timing import Compute, Link, Work
from vllm_tiered_kv.sizing.trace_report import SHARES, replay_trace
from vllm_tiered_kv.sizing.traces import (
    Tiers,
    Times,
    load_trace,
    replay_tiers,
    trace_facts,
)

TRACE = Path(__file__).parents[3] / "benchmarks" / "traces" / "conversation_trace.jsonl.xz"
BLOCK = 512 * 131_072
TIMES = Times(
    footprint=Footprint(131_072),
    cpu=Link("cpu", 50e9, 2e-3, "test"),
    disk=Link("disk", 5e9, 2e-3, "test"),
    work=Work(8_000_000_000),
    compute=Compute(1e15, 0.4, 1),
)


def requests_of(*prompts: tuple[int, ...]) -> list[Request]:
    return [Request(60e3 * i, 512 * len(b), 1, b) for i, b in enumerate(prompts)]


@pytest.fixture(scope="module")
def trace() -> tuple[Request, ...]:
    return load_trace(TRACE, 1_000_000)


def test_facts_of_the_published_trace(trace: tuple[Request, ...]) -> None:
    facts = trace_facts(trace, BLOCK)
    assert (facts.requests, facts.blocks, facts.distinct_blocks) == (12_031, 288_500, 182_790)
    assert facts.distinct_bytes == 182_790 * BLOCK
    assert facts.endless_hit_rate == pytest.approx(0.3664, abs=5e-5)
    assert facts.seconds == pytest.approx(3537, abs=1)


def test_known_hit_rates_of_the_published_trace(trace: tuple[Request, ...]) -> None:
    tiers = Tiers(3_655 * BLOCK, 36_558 * BLOCK, Eviction.LRU)
    found = replay_tiers(trace, tiers, TIMES, 3537.0)
    # A disk of a fifth of the blocks below a CPU tier of 2%: docs/policies.md
    assert found.disk_hit_rate == pytest.approx(0.266, abs=5e-4)
    assert found.bytes_written / 2**30 == pytest.approx(11_804, abs=1)
    assert found.bytes_written_per_day == pytest.approx(found.bytes_written * 86_400 / 3537)


def test_times_of_a_trace_of_three_requests() -> None:
    trace = requests_of((1, 2), (3, 4), (1, 2))
    tiers = Tiers(2 * BLOCK, 10 * BLOCK, Eviction.LRU)
    found = replay_tiers(trace, tiers, TIMES, 120.0)
    assert (found.cpu_hit_rate, found.disk_hit_rate) == (0.0, 2 / 6)
    assert found.bytes_written == 4 * BLOCK
    second = 2 * 8e9 / 4e14  # a token's
    assert found.ttft == pytest.approx(3 * 1024 * second)
    # The last token is always computed; what is on disk comes through memory.
    loaded = 2 * 2e-3 + 1023 * 131_072 * (1 / 50e9 + 1 / 5e9)
    assert found.ttft_saved == pytest.approx(1023 * second - loaded)
    assert found.ttft_saved_where_it_pays == found.ttft_saved


def test_a_slow_disk_costs_where_it_is_always_read_and_nothing_where_it_does_not_pay() -> None:
    trace = requests_of((1, 2), (3, 4), (1, 2))
    slow = msgspec.structs.replace(TIMES, disk=Link("disk", 1e8, 0.0, "test"))
    found = replay_tiers(trace, Tiers(2 * BLOCK, 10 * BLOCK, Eviction.LRU), slow, 120.0)
    assert found.ttft_saved < 0
    assert found.ttft_saved_where_it_pays == 0


def test_nothing_is_found_and_nothing_is_saved() -> None:
    found = replay_tiers(requests_of((1,), (2,)), Tiers(BLOCK, 0, Eviction.ARC), TIMES, 0.0)
    assert (found.cpu_hit_rate, found.disk_hit_rate, found.bytes_written) == (0.0, 0.0, 0)
    assert (found.bytes_written_per_day, found.ttft_saved) == (0.0, 0.0)


def write_trace(path: Path, requests: list[Request]) -> Path:
    path.write_bytes(b"\n".join(msgspec.json.encode(request) for request in requests))
    return path


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_whole_report_is_the_same_with_any_number_of_processes(tmp_path: Path, jobs: int) -> None:
    requests = requests_of(*[(i % 5, 100 + i % 5, 200 + i) for i in range(60)])
    path = write_trace(tmp_path / "trace.jsonl", requests)
    tiers = [Tiers(4 * BLOCK, 20 * BLOCK, policy) for policy in (Eviction.LRU, Eviction.COST)]
    told: list[tuple[int, int]] = []
    report = replay_trace(
        path, 50, tiers, TIMES, jobs=jobs, advance=lambda done, total: told.append((done, total))
    )
    assert report.facts.requests == 50
    assert report.outcomes == tuple(
        replay_tiers(requests[:50], each, TIMES, report.facts.seconds) for each in tiers
    )
    assert [point.policy for point in report.curve[:: len(SHARES)]] == [
        *("lru", "cost", "knows the future")
    ]
    by_policy = {point.policy: point.hit_rate for point in report.curve if point.share == 1.0}
    assert set(by_policy.values()) == {report.facts.endless_hit_rate}
    assert told == [(n + 1, 17) for n in range(17)]


def test_blocks_of_another_size() -> None:
    trace = [Request(0.0, 32, 1, (1, 2)), Request(1.0, 32, 1, (1, 2))]
    times = msgspec.structs.replace(TIMES, block_tokens=16)
    assert times.block_bytes == 16 * 131_072
    found = replay_tiers(trace, Tiers(2 * times.block_bytes, 0, Eviction.LRU), times, 1.0)
    assert found.cpu_hit_rate == 0.5
    assert found.ttft == pytest.approx(2 * 32 * 2 * 8e9 / 4e14)


def test_a_trace_of_other_blocks_than_are_meant_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "small.jsonl", [Request(0.0, 33, 1, (1, 2, 3))])
    with pytest.raises(SizingError, match=r"3 blocks of a prompt of 33 tokens.* for 512 each"):
        load_trace(path, 10)
    assert len(load_trace(path, 10, block_tokens=16)) == 1
    with pytest.raises(SizingError, match="for 17 each"):
        load_trace(path, 10, block_tokens=17)


def test_a_trace_that_is_too_much_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", requests_of((1, 2), (3, 4), (5, 6)))
    monkeypatch.setattr(traces, "MAX_BLOCKS", 4)
    with pytest.raises(SizingError, match=r"more than 4 blocks.*--max-requests 2"):
        load_trace(path, 10)
    assert len(load_trace(path, 2)) == 2


def test_processes_take_no_more_memory_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(*[(i % 5, 100 + i % 5, 200 + i) for i in range(60)])
    path = write_trace(tmp_path / "trace.jsonl", requests)
    monkeypatch.setattr(trace_report, "memory_limit", lambda: 1 << 10)
    monkeypatch.setattr(trace_report, "ProcessPoolExecutor", None)  # none is made
    replay_trace(path, 60, [Tiers(4 * BLOCK, 0, Eviction.LRU)], TIMES, jobs=64)


def test_an_interrupt_ends_the_processes(tmp_path: Path) -> None:
    requests = requests_of(*[(i % 5, 100 + i % 5, 200 + i) for i in range(60)])
    path = write_trace(tmp_path / "trace.jsonl", requests)
    started: list[multiprocessing.process.BaseProcess] = []

    def interrupt(done: int, total: int) -> None:
        started.extend(multiprocessing.active_children())
        raise KeyboardInterrupt

    tiers = [Tiers(4 * BLOCK, 20 * BLOCK, Eviction.LRU)]
    with pytest.raises(KeyboardInterrupt):
        replay_trace(path, 60, tiers, TIMES, jobs=2, advance=interrupt)
    assert [process.exitcode for process in started] == [-signal.SIGTERM] * 2


def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(SizingError, match="cannot be read: No such file"):
        load_trace(tmp_path / "none", 10)
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n")
    with pytest.raises(SizingError, match="holds no requests"):
        load_trace(empty, 10)
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b"{}")
    with pytest.raises(SizingError, match="line 1"):
        load_trace(broken, 10)
    with pytest.raises(SizingError, match="does not hold one block"):
        replay_tiers(requests_of((1,)), Tiers(BLOCK - 1, 0, Eviction.LRU), TIMES, 0.0)
