# SPDX-License-Identifier: Apache-2.0
"""From records to figures, against answers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.bench._records import answer, block, record
from vllm_tiered_kv.bench.compare import _notes
from vllm_tiered_kv.bench.config import Arm, Experiment, History, Slo
from vllm_tiered_kv.bench.records import Counted
from vllm_tiered_kv.bench.report import ArmReport, Hits, Ratio
from vllm_tiered_kv.bench.runner import BlockResult
from vllm_tiered_kv.bench.summary import (
    BY_ANSWERS,
    Measured,
    Summary,
    good,
    measured,
    summarise,
)

ARMS = (Arm(name="a", url="http://x"), Arm(name="b", url="http://y"))


def summed(
    first: Sequence[BlockResult], second: Sequence[BlockResult], **changes: object
) -> Summary:
    experiment = Experiment(arms=ARMS, resamples=200, **changes)  # type: ignore[arg-type]
    found = measured(ARMS, list(zip(first, second, strict=True)))
    return summarise(experiment, found, {"a": (("vllm", "serve"),)})


def values(arm: ArmReport, metric: str) -> list[float | None]:
    latency = next(each for each in arm.latencies if each.metric == metric)
    return [percentile.estimate.value for percentile in latency.percentiles]


def ratio_of(summary: Summary, metric: str, share: float | None = None) -> Ratio:
    return next(r for r in summary.ratios if (r.metric, r.share) == (metric, share))


def rate(arm: ArmReport, metric: str) -> float | None:
    return next(each for each in arm.rates if each.metric == metric).estimate.value


def test_latencies_and_throughput() -> None:
    times = [0.1 * (n + 1) for n in range(11)]
    one = [block("a", 0, [answer(t) for t in times], seconds=2.0)]
    two = [block("b", 0, [answer(t / 2, (0.02, 0.04)) for t in times], seconds=1.0)]
    first, second = summed(one, two).arms
    assert values(first, "ttft") == pytest.approx([600, 1000, 1090])
    assert values(first, "itl") == pytest.approx([10, 10, 10])
    assert values(first, "tpot") == pytest.approx([10, 10, 10])
    assert values(second, "tpot") == pytest.approx([30, 30, 30])
    assert values(second, "itl") == pytest.approx([30, 40, 40])
    assert values(first, "e2e")[0] == pytest.approx(620)
    assert rate(first, "requests/s") == 5.5
    assert rate(first, "output tokens/s") == 16.5
    summary = summed(one, two)
    assert ratio_of(summary, "ttft", 0.5).estimate.value == pytest.approx(0.5)
    assert ratio_of(summary, "requests/s").estimate.value == pytest.approx(2.0)
    assert ratio_of(summary, "ttft", 0.5).estimate.low is None  # one block


def test_percentiles_of_too_few_values_are_marked() -> None:
    (latency, *_) = (
        summed([block("a", 0, [answer()] * 60)], [block("b", 0, [answer()] * 60)]).arms[0].latencies
    )
    assert (latency.metric, latency.values) == ("ttft", 60)
    assert [percentile.few for percentile in latency.percentiles] == [False, False, True]


def test_intervals_come_from_blocks() -> None:
    one = [block("a", n, [answer(0.1 * (1 + n % 3))] * 5) for n in range(12)]
    two = [block("b", n, [answer(0.05 * (1 + n % 3))] * 5) for n in range(12)]
    summary = summed(one, two)
    median = summary.arms[0].latencies[0].percentiles[0].estimate
    assert median.value == pytest.approx(200)
    assert median.low == pytest.approx(100)
    assert median.high == pytest.approx(300)
    paired = ratio_of(summary, "ttft", 0.5).estimate
    assert (paired.low, paired.value, paired.high) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (Slo(), True),
        (Slo(ttft_ms=100), True),
        (Slo(ttft_ms=99), False),
        (Slo(tpot_ms=20), True),
        (Slo(tpot_ms=19), False),
        (Slo(e2e_ms=140), True),
        (Slo(ttft_ms=100, tpot_ms=20, e2e_ms=139), False),
    ],
)
def test_what_is_good(slo: Slo, expected: bool) -> None:
    found = answer(0.1, (0.02, 0.02))
    assert found.tpot == pytest.approx(0.02)
    found = answer(0.1 - 1e-9, (0.02 - 1e-9, 0.02 - 1e-9))
    assert good(record(found), slo) is expected
    assert not good(record(None), slo)
    assert good(record(answer(0.01, ())), Slo(tpot_ms=1))  # one token: nothing to hold against


def test_goodput_counts_failures_as_not_good() -> None:
    one = [block("a", 0, [answer(0.1), answer(0.9), None, answer(0.1)], seconds=2.0)]
    two = [block("b", 0, [answer(0.1)] * 4, seconds=2.0)]
    first, second = summed(one, two, slo=Slo(ttft_ms=500)).arms
    assert rate(first, "goodput, requests/s") == 1.0
    assert rate(first, "SLO met, share") == 0.5
    assert rate(first, "requests/s") == 1.5
    assert rate(second, "SLO met, share") == 1.0
    assert {each.metric for each in summed(one, two).arms[0].rates} == {
        "requests/s",
        "output tokens/s",
    }


def hits(arm: ArmReport) -> dict[str, Hits]:
    return {each.tier: each for each in arm.hits}


def test_a_tier_that_serves_nothing_is_not_shown_but_for_the_first() -> None:
    idle = {"prompt tokens": 1000.0, "tiered-kv: cpu": 0.0, "tiered-kv: disk": 0.0}
    one, two = ([block(arm, n, [answer()], counted=idle) for n in range(3)] for arm in "ab")
    first, _ = summed(one, two).arms
    assert list(hits(first)) == ["device", "connector", "tiered-kv: cpu", BY_ANSWERS]


def test_hits_by_tier() -> None:
    ours = {"prompt tokens": 1000.0, "device": 100.0, "connector": 500.0}
    ours |= {"tiered-kv: cpu": 300.0, "tiered-kv: disk": 200.0, "tiered-kv: peer": 0.0}
    ours |= {"vLLM's source: device": 100.0, "vLLM's source: host": 7.0, "vLLM's source: p2p": 0.0}
    none = {"prompt tokens": 1000.0, "device": 150.0}
    one = [block("a", n, [answer(cached_tokens=None)], counted=none) for n in range(3)]
    two = [block("b", n, [answer()], counted=ours) for n in range(3)]
    first, second = (hits(arm) for arm in summed(one, two).arms)
    tiers = ["device", "connector", "vLLM's source: host"]
    tiers += ["tiered-kv: cpu", "tiered-kv: disk", BY_ANSWERS]
    assert list(first) == list(second) == tiers
    assert first["device"].share.value == pytest.approx(0.15)
    for missing in ("connector", "tiered-kv: cpu", BY_ANSWERS):
        assert first[missing].tokens is None
        assert first[missing].share.value is None
    assert second["tiered-kv: disk"].tokens == 600
    assert second["tiered-kv: disk"].share.value == pytest.approx(0.2)
    assert second[BY_ANSWERS].tokens == 150


def test_hits_without_a_count_of_prompt_tokens_are_over_what_answers_say() -> None:
    one = [block("a", 0, [answer(prompt_tokens=400)] * 2, counted={"device": 200.0})]
    two = [block("b", 0, [answer()], counted=None)]
    first, second = summed(one, two).arms
    assert hits(first)["device"].share.value == 0.25
    assert hits(second)["device"].tokens is None


def test_hits_are_not_known_where_a_block_does_not_say() -> None:
    """A server that was started anew, or did not answer once: no sum rather than a part of it."""
    some = {"prompt tokens": 100.0, "device": 40.0}
    one = [block("a", 0, [answer()], counted=some), block("a", 1, [answer()], counted=None)]
    two = [block("b", n, [answer()], counted=some) for n in range(2)]
    first, second = summed(one, two).arms
    assert hits(first)["device"].tokens is None
    assert hits(second)["device"].tokens == 80


def test_totals_and_failures() -> None:
    chunks = answer(counted=Counted.CHUNKS, prompt_tokens=None)
    one = [block("a", 0, [answer(), None]), block("a", 1, [chunks, None], seconds=0.5)]
    two = [block("b", 0, [answer()]), block("b", 1, [answer()])]
    first, second = summed(one, two).arms
    assert (first.requests, first.answered, first.counted_by_chunks) == (4, 2, 1)
    assert [(each.kind, each.count) for each in first.failures] == [("broken", 2)]
    assert first.prompt_tokens is None
    assert second.prompt_tokens == 200
    assert (first.output_tokens, first.seconds) == (6, 1.5)
    assert first.commands == (("vllm", "serve"),)
    assert second.commands == ()


def test_an_arm_that_answered_nothing_has_no_figures() -> None:
    one = [block("a", n, [answer()]) for n in range(3)]
    two = [block("b", n, [None]) for n in range(3)]
    summary = summed(one, two)
    assert values(summary.arms[1], "ttft") == [None, None, None]
    assert ratio_of(summary, "ttft", 0.5).estimate.value is None


def test_notes_say_what_is_wrong() -> None:
    late = record(answer(), late=0.5)
    bare = record(answer(tokens=()))
    results = (BlockResult("a", 0, 1.0, (late, bare, record(None)), None),)
    experiment = Experiment(blocks=4, history=History.OWN)
    text = "\n".join(_notes(experiment, [Measured("a", results)], "lost\nand more"))
    assert "Ended early, after 1 of 4 blocks: lost" in text
    assert "and more" not in text
    assert "One block: there are no intervals." in text
    assert "a: 1 of 3 requests failed and are in no latency; the first: broken: cut <off>" in text
    assert "1 answers came without token ids, and made-up ones stand in their place" in text
    assert "the client was too slow" not in text  # one of three is not one of a hundred
    slow = BlockResult("a", 0, 1.0, (late,) * 3, None)
    assert "the client was too slow" in "\n".join(
        _notes(experiment, [Measured("a", (slow,))], None)
    )
    four = Measured("a", tuple(block("a", n, [answer()]) for n in range(4)))
    assert _notes(experiment, [four], None) == [
        "4 blocks: intervals from fewer than 10 tend to be too narrow."
    ]
