# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the benchmark of hand-overs; its engines are run by the benchmark."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks._report import Row
from benchmarks.pd.arms import Arm, consumer_params, moved
from benchmarks.pd.idle import OTHERS, Use, shares, used
from benchmarks.pd.limits import Limit
from benchmarks.pd.results import LengthResult, render, rows, summarise
from benchmarks.pd.run import HandOver, Measured
from tools.serving import Metrics

GIB = 1 << 30
TOKENS = 4_000
NBYTES = 32 << 20
SPINS = """
import sys, threading

def spin():
    sum(range(1_000_000))
    print(flush=True)
    threading.Event().wait()

threading.Thread(target=spin, daemon=True).start()
sys.stdin.read()
"""
"""A thread that has done something and lives on."""


def measured(*, ours: float = 0.05, read: float = 0.01, tokens: int = TOKENS) -> Measured:
    """Three rounds on an ever slower machine; NIXL alone takes 10 ms in the first."""
    found = Measured(limits={tokens: []}, first={Arm.OURS: 0.2})
    for number, slow in enumerate((1.0, 2.0, 4.0)):
        for arm, seconds in ((Arm.OURS, ours), (Arm.NIXL, 0.5)):
            found.handovers.append(
                HandOver(arm, tokens, number, seconds * slow, 0.03 * slow, NBYTES, read * slow)
            )
        found.limits[tokens].append(Limit(NBYTES, 0.01 * slow, 0.005 * slow))
    return found


def only_result(found: Measured) -> LengthResult:
    (result,) = summarise(found)
    return result


def table(found: Measured) -> dict[tuple[str, str], Row]:
    return {(row.metric, row.arm): row for row in rows(summarise(found), found)}


def test_everything_is_paired_by_round() -> None:
    result = only_result(measured())
    assert result.to_peer is not None
    same = pytest.approx
    assert (result.to_peer.low, result.to_peer.high) == same((0.1, 0.1))
    assert (result.ttft[Arm.OURS].low, result.ttft[Arm.OURS].high) == same((50, 200))
    assert (result.handover[Arm.OURS].low, result.handover[Arm.OURS].high) == same((20, 80))
    share, whole = result.read_to_raw[Arm.OURS], result.handover_to_raw[Arm.OURS]
    assert (share.low, share.high, whole.low, whole.high) == same((1, 1, 0.5, 0.5))
    assert result.raw.median == same(NBYTES / 0.02 / GIB)
    assert result.memcpy.median == same(NBYTES / 0.01 / GIB)


def test_a_hand_over_that_cannot_be_told_from_a_cached_prompt_has_no_rate() -> None:
    found = measured(ours=0.03)
    assert only_result(found).handover_to_raw.keys() == {Arm.NIXL}
    assert "| 0.100 (0.100 to 0.100) |" in render(summarise(measured()), measured(), "Where.")
    assert "| 4,000 |" in render(summarise(found), found, "Where.")


@pytest.mark.parametrize(
    ("metric", "kept", "missed"),
    [
        (f"TTFT, {TOKENS} tokens", {"ours": 0.049}, {"ours": 0.051}),
        (f"TTFT / NixlConnector, {TOKENS} tokens", {"ours": 0.49}, {"ours": 0.51}),
        (f"read / NIXL alone, {TOKENS} tokens", {"read": 0.011}, {"read": 0.0112}),
        (f"hand-over / NIXL alone, {TOKENS} tokens", {"ours": 0.041}, {"ours": 0.042}),
    ],
)
def test_goals(metric: str, kept: dict[str, float], missed: dict[str, float]) -> None:
    assert table(measured(**kept))[metric, "ours"].met is True
    assert table(measured(**missed))[metric, "ours"].met is False
    assert all(row.goal is None for (_, arm), row in table(measured()).items() if arm == "nixl")


def test_short_prompts_have_no_goal_for_their_rate() -> None:
    found = table(measured(tokens=512))
    assert found["read / NIXL alone, 512 tokens", "ours"].goal is None
    assert found["TTFT / NixlConnector, 512 tokens", "ours"].goal == 1.0


def test_idle_is_held_for_every_process_of_ours() -> None:
    found = measured()
    one = {"kv_consumer": {"worker": (2.9, 0.4), "engine": (3.1, 0.2)}}
    found.idle = {Arm.OURS: one, Arm.NIXL: one}
    got = table(found)
    assert got["idle, kv_consumer, worker", "ours"].met is True
    assert got["idle, kv_consumer, engine", "ours"].met is False
    assert got["idle, kv_consumer, engine", "nixl"].met is None
    assert "| TieredKVConnector | consumer | engine | 3.1 | 0.2 |" in render([], found, "")


def test_shares_are_of_a_core() -> None:
    before = {"worker": Use(10**9, 0)}
    after = {"worker": Use(10**9 + 3 * 10**8, 10**8), "engine": Use(10**9, 10**9)}
    found = shares(before, after, 10.0)
    assert found["worker"] == pytest.approx((3.0, 1.0))
    assert found["engine"] == pytest.approx((10.0, 10.0))


def test_threads_beside_the_main_one_are_told_apart() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SPINS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = used([process.pid])
        process.communicate()
    assert found.keys() == {OTHERS}
    assert 0 < found[OTHERS].beside_main < found[OTHERS].all


def test_what_the_router_passes_on() -> None:
    answered = {"do_remote_prefill": True, "tiered_kv": {"handoff": "sealed"}}
    passed = consumer_params(Arm.OURS, answered)
    assert passed == {**answered, "tiered_kv": {"handoff": "sealed", "store": False}}
    assert answered["tiered_kv"] == {"handoff": "sealed"}
    assert consumer_params(Arm.NIXL, {"remote_port": 1}) == {"remote_port": 1}
    assert consumer_params(Arm.OURS) == {"tiered_kv": {"store": False}}


def test_reads_are_counted_by_each_connectors_own_metrics() -> None:
    text = """
vllm:tiered_kv_bytes_total{direction="load",tier="peer"} 8
vllm:tiered_kv_bytes_total{direction="load",tier="cpu"} 16
vllm:tiered_kv_seconds_total{direction="load",tier="peer"} 2
vllm:nixl_bytes_transferred_sum{engine="0"} 32
vllm:nixl_xfer_time_seconds_sum{engine="0"} 4
"""
    assert moved(Arm.OURS, Metrics(text)) == (8, 2)
    assert moved(Arm.NIXL, Metrics(text)) == (32, 4)
