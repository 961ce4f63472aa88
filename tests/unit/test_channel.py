# SPDX-License-Identifier: Apache-2.0
"""Reports between the halves: their encoding, the side channel, counting each result once."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.channel import SchedulerEndpoint, WorkerEndpoint
from vllm_tiered_kv.protocol import (
    BlockCopy,
    Direction,
    JobResult,
    JobStatus,
    WorkerReport,
    decode_report,
    encode_report,
)
from vllm_tiered_kv.scheduler.index import Node
from vllm_tiered_kv.scheduler.jobs import ActiveLoad, ActiveStore, JobLedger

results = st.builds(
    JobResult,
    st.integers(0, 1 << 40),
    st.sampled_from(Direction),
    st.sampled_from(JobStatus),
    st.lists(st.integers(0, 1000), max_size=4).map(tuple),
    st.integers(0, 1 << 40),
    st.floats(0, 1e6),
)


@given(st.builds(WorkerReport, st.integers(0, 7), st.lists(results, max_size=5).map(tuple)))
def test_a_report_survives_its_encoding(report: WorkerReport) -> None:
    assert decode_report(encode_report(report)) == report


@given(st.binary(max_size=64))
def test_anything_else_is_refused(data: bytes) -> None:
    try:
        report = decode_report(data)
    except msgspec.DecodeError:
        return
    assert isinstance(report, WorkerReport)  # some bytes happen to be one


def receive(endpoint: SchedulerEndpoint, count: int) -> list[WorkerReport]:
    got: list[WorkerReport] = []
    deadline = time.monotonic() + 10
    while len(got) < count and time.monotonic() < deadline:
        got += endpoint.drain()
    return got


def test_reports_arrive_and_what_is_none_is_counted() -> None:
    endpoint = SchedulerEndpoint()
    worker = WorkerEndpoint(endpoint.address, endpoint.secret)
    report = WorkerReport(1, (JobResult(5, Direction.STORE, JobStatus.DONE),))
    try:
        assert endpoint.drain() == []
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(endpoint.address)
            stranger.send(encode_report(report))  # well formed, but from nobody we know
            stranger.send(b"x" * 16 + encode_report(report))
            stranger.send(endpoint.secret + b"\xc1 not a report")
            stranger.send(b"")
            assert worker.send(report)
            assert receive(endpoint, 1) == [report]
            deadline = time.monotonic() + 10
            while endpoint.malformed < 4 and time.monotonic() < deadline:
                assert endpoint.drain() == []
        assert endpoint.malformed == 4
    finally:
        worker.close()
        endpoint.close()
    assert worker.send(report) is False


def test_two_engines_do_not_share_a_channel() -> None:
    one, two = SchedulerEndpoint(), SchedulerEndpoint()
    assert one.address != two.address
    assert one.secret != two.secret
    one.close()
    two.close()


def test_a_worker_without_a_scheduler_never_waits() -> None:
    worker = WorkerEndpoint("ipc://@nobody listens here", b"s" * 16)
    report = WorkerReport(0)
    sent = [worker.send(report) for _ in range(2000)]
    assert not all(sent)
    worker.close()
    worker.close()


def store_result(job: int, status: JobStatus = JobStatus.DONE) -> JobResult:
    return JobResult(job, Direction.STORE, status, nbytes=5, seconds=1.0)


def test_a_store_ends_when_every_rank_has_reported_it_once() -> None:
    ledger = JobLedger(2)
    job = ledger.add_store(ActiveStore(Node(b"", None, [0], 0), (3, 4)))
    assert set(ledger.void_readers(9)) == set()
    assert ledger.store_result(0, store_result(job)) is None
    assert ledger.store_result(0, store_result(job)) is None  # again, by the other way
    ended = ledger.store_result(1, store_result(job, JobStatus.DROPPED))
    assert ended.status is JobStatus.DROPPED
    assert ended.nbytes == 10
    assert ended.seconds == 1.0
    assert set(ledger.void_readers(3)) == set()
    assert ledger.store_result(1, store_result(job)) is None
    assert ledger.store_result(0, store_result(99)) is None


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (JobStatus.FAILED, JobStatus.DONE),
        (JobStatus.FAILED, JobStatus.LATE),
        (JobStatus.DROPPED, JobStatus.LATE),
        (JobStatus.LATE, JobStatus.DONE),
    ],
)
def test_the_worst_rank_decides(order: list[int], bad: JobStatus, good: JobStatus) -> None:
    ledger = JobLedger(2)
    copies = (BlockCopy(0, 0, 0, (1,)), BlockCopy(0, 1, 0, (2,)))
    load = ActiveLoad("r", (), copies, (0, 0), 0)
    job = ledger.add_load(load)
    reports = [
        JobResult(job, Direction.LOAD, bad, (1,)),
        JobResult(job, Direction.LOAD, good, (0,) if good is not JobStatus.DONE else ()),
    ]
    for rank in order:
        ended = ledger.load_result(rank, reports[rank])
    assert ended.status is bad
    assert ended.failed == ({1} if good is JobStatus.DONE else {0, 1})


def test_ends_that_are_dropped_in_a_cycle_are_closed() -> None:
    """As those of an engine that fails to start: a traceback holds it, and it itself."""
    receiver = SchedulerEndpoint()
    sender = WorkerEndpoint(receiver.address, receiver.secret)
    contexts = receiver._context, sender._context
    ends = SimpleNamespace(receiver=receiver, sender=sender)
    ends.itself = ends
    del receiver, sender, ends
    gc.collect()
    assert all(context.closed for context in contexts)
