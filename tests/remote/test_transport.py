# SPDX-License-Identifier: Apache-2.0
"""Reads between two real processes over loopback, and everything that isn't a good read."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest

from tests.remote._peer import Peer, region
from tests.remote._reader import PATIENCE, UNTOUCHED, Reader, expected, shuffled
from vllm_tiered_kv.remote.transport import (
    Memory,
    Options,
    Outcome,
    Read,
    Region,
    TransportError,
    generation,
    open_transport,
)
from vllm_tiered_kv.remote.transport.agent import Agent, AgentError, _head

MIB = 1 << 20


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer(seed=1, nbytes=64 * MIB) as started:
        yield started


@pytest.mark.parametrize("page", [512, 4096 + 64, 128 << 10, 4 * MIB])
def test_shuffled_pages_arrive_byte_for_byte(reader: Reader, peer: Peer, page: int) -> None:
    reader.transport.connect(peer.endpoint)
    runs = shuffled(min(2_000, 48 * MIB // page), page)
    (result,) = reader.wait(reader.start(peer, runs))
    assert (result.outcome, result.memory) == (Outcome.DONE, Memory.FREE)
    assert result.nbytes == sum(nbytes for _, _, nbytes in runs)
    assert np.array_equal(reader.memory, expected(reader, peer, runs))


def test_bytes_arrive_over_tcp(tcp: str) -> None:
    with Peer(2, 32 * MIB, tcp) as peer, Reader(32 * MIB) as reader:
        reader.transport.connect(peer.endpoint)
        runs = shuffled(200, 128 << 10)
        (result,) = reader.wait(reader.start(peer, runs))
        assert result.outcome is Outcome.DONE
        assert np.array_equal(reader.memory, expected(reader, peer, runs))


def test_many_jobs_of_two_peers_at_once(reader: Reader, peer: Peer) -> None:
    with Peer(3, 32 * MIB) as other:
        for each in (peer, other):
            reader.transport.connect(each.endpoint)
        jobs, memory = [], np.full_like(reader.memory, UNTOUCHED)
        for i in range(32):
            source = (peer, other)[i % 2]
            runs = [(i * 2 * MIB + j * 4096, (i * 512 - j) % 4096 * 4096, 4096) for j in range(300)]
            jobs.append(reader.start(source, runs))
            for here, there, nbytes in runs:
                memory[here : here + nbytes] = source.bytes[there : there + nbytes]
        assert all(result.outcome is Outcome.DONE for result in reader.wait(*jobs))
        assert np.array_equal(reader.memory, memory)


def test_two_ranks_read_from_each_other(peer: Peer) -> None:
    """A rank that serves and reads has an agent for each; both see its memory."""
    with Reader(8 * MIB, Options()) as reader:
        own = reader.transport.export()
        assert own is not None
        assert own.incarnation != peer.endpoint.incarnation
        assert own.regions == (region(reader.memory),)
        reader.transport.connect(peer.endpoint)
        (result,) = reader.wait(reader.start(peer, [(0, 5, MIB)]))
        assert result.outcome is Outcome.DONE
        with Reader(8 * MIB) as second:
            second.transport.connect(own)
            read = Read(
                99,
                own.incarnation,
                np.array([second.memory.ctypes.data]),
                np.array([reader.memory.ctypes.data]),
                np.array([MIB]),
                1e12,
            )
            second.transport.start_read(read)
            second.wait(99)
            assert np.array_equal(second.memory[:MIB], peer.bytes[5 : MIB + 5])


@pytest.mark.parametrize(
    "runs",
    [
        [(-1, 0, 10)],
        [(0, -1, 10)],
        [(64 * MIB - 5, 0, 10)],
        [(0, 64 * MIB - 5, 10)],
        [(0, 0, 4096), (8192, 1 << 50, 4096)],
        [(0, 0, 0)],
        [(0, 0, -4096)],
    ],
)
def test_memory_that_is_not_registered_is_never_read(
    reader: Reader, peer: Peer, runs: list[tuple[int, int, int]]
) -> None:
    reader.transport.connect(peer.endpoint)
    (result,) = reader.wait(reader.start(peer, runs))
    assert (result.outcome, result.memory) == (Outcome.FAILED, Memory.FREE)
    assert result.kind == "remote_range"
    assert reader.transport.take_counts() == {"remote_range": 1}
    assert (reader.memory == UNTOUCHED).all()


def test_a_peer_that_is_not_connected_is_not_read(reader: Reader, peer: Peer) -> None:
    (result,) = reader.wait(reader.start(peer, [(0, 0, 10)]))
    assert (result.outcome, result.kind) == (Outcome.FAILED, "remote_peer")


def test_a_peer_that_was_disconnected_is_not_read_until_it_is_connected_again(
    reader: Reader, peer: Peer
) -> None:
    for _ in range(3):
        reader.transport.connect(peer.endpoint)
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        assert result.outcome is Outcome.DONE
        reader.transport.disconnect(peer.endpoint.incarnation)
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        assert result.kind == "remote_peer"


def test_a_peer_that_comes_and_goes_takes_no_more_sockets_each_time(
    reader: Reader, peer: Peer
) -> None:
    sockets = []
    for _ in range(12):
        reader.transport.connect(peer.endpoint)
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        assert result.outcome is Outcome.DONE
        reader.transport.disconnect(peer.endpoint.incarnation)
        sockets.append(psutil.Process().num_fds())
    assert sockets[-1] == sockets[2]


@pytest.mark.parametrize("kept", [0, 1, 40, 60, 200, 300, 450])
def test_metadata_that_is_cut_short_fails_its_reads_alone(
    reader: Reader, peer: Peer, kept: int
) -> None:
    """From a peer that is who it says. Garbage inside it would end the process: see `Transport`."""
    with Peer(4, MIB) as other:
        short = msgspec.structs.replace(other.endpoint, metadata=other.endpoint.metadata[:kept])
        reader.transport.connect(peer.endpoint)
        reader.transport.connect(short)
        (result,) = reader.wait(reader.start(short, [(0, 0, 10)]))
        assert (result.outcome, result.memory) == (Outcome.FAILED, Memory.FREE)
        assert result.kind == "remote_connect"
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        assert result.outcome is Outcome.DONE


@pytest.mark.parametrize("known", [True, False])
def test_metadata_of_another_agent_is_refused(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Also where its form isn't known, and it is loaded before its name can be told."""
    monkeypatch.setattr(Agent, "_begins_with_name", known)
    with Reader(MIB) as reader:
        misnamed = msgspec.structs.replace(peer.endpoint, incarnation="1" * 32)
        reader.transport.connect(misnamed)
        (result,) = reader.wait(reader.start(misnamed, [(0, 0, 10)]))
        assert result.kind == "remote_connect"
        reader.transport.connect(peer.endpoint)
        (result,) = reader.wait(reader.start(peer, [(0, 0, 10)]))
        assert result.outcome is Outcome.DONE


def test_this_nixl_writes_metadata_in_the_known_form(peer: Peer) -> None:
    endpoint = peer.endpoint
    assert endpoint.metadata.startswith(_head(endpoint.incarnation))


def test_regions_of_a_peer_that_make_no_sense_are_refused(reader: Reader, peer: Peer) -> None:
    bad = msgspec.structs.replace(peer.endpoint, regions=(Region(100, 0),))
    reader.transport.connect(bad)
    assert reader.transport.take_counts() == {"remote_connect": 1}
    (result,) = reader.wait(reader.start(peer, [(0, 0, 10)]))
    assert result.kind == "remote_peer"


class Gate:
    """Work that is done when the test says so."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.is_done = False

    def query(self) -> bool:
        self.asked.set()
        return self.is_done


def test_a_read_comes_after_the_work_that_it_must_come_after(reader: Reader, peer: Peer) -> None:
    reader.transport.connect(peer.endpoint)
    gate = Gate()
    job = reader.start(peer, [(0, 0, MIB)], after=gate)
    assert gate.asked.wait(PATIENCE)
    reader.watch(0.05)
    assert (reader.memory == UNTOUCHED).all()
    assert job not in reader.results
    gate.is_done = True
    (result,) = reader.wait(job)
    assert result.outcome is Outcome.DONE


def test_a_read_whose_turn_never_comes_is_given_up_and_holds_nothing(
    reader: Reader, peer: Peer
) -> None:
    reader.transport.connect(peer.endpoint)
    (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)], seconds=0.05, after=Gate()))
    assert (result.outcome, result.memory) == (Outcome.GIVEN_UP, Memory.FREE)
    assert result.kind == "remote_deadline"


def test_a_read_that_is_called_off_is_no_failure(reader: Reader, peer: Peer) -> None:
    reader.transport.connect(peer.endpoint)
    job = reader.start(peer, [(0, 0, MIB)], after=Gate())
    reader.transport.cancel([job, 12345])
    (result,) = reader.wait(job)
    assert (result.outcome, result.memory, result.kind) == (Outcome.GIVEN_UP, Memory.FREE, "")
    assert reader.transport.take_counts() == {}


def test_a_hundred_reads_called_off_leave_nothing_behind(reader: Reader, peer: Peer) -> None:
    reader.transport.connect(peer.endpoint)
    jobs = []
    for i in range(100):
        jobs.append(reader.start(peer, [(i * 4096, 0, 4096)]))
        reader.transport.cancel(jobs[-1:] if i % 2 else [])
    results = reader.wait(*jobs)
    held = [result.job for result in results if result.memory is Memory.QUARANTINED]
    reader.wait_settled(*held)
    (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
    assert result.outcome is Outcome.DONE


def test_it_tells_once_when_there_is_something_to_poll(peer: Peer) -> None:
    told = queue.SimpleQueue[None]()
    memory = np.zeros(MIB, dtype=np.uint8)
    options = Options(serves=False)
    transport = open_transport([region(memory)], options, notify=lambda: told.put(None))
    try:
        transport.connect(peer.endpoint)
        where = (np.array([memory.ctypes.data]), np.array([peer.region.base]), np.array([MIB]))
        for job in range(200):
            transport.start_read(Read(job, peer.endpoint.incarnation, *where, deadline=1e12))
            told.get(timeout=PATIENCE)
            (result,) = transport.poll()
            assert (result.job, result.outcome) == (job, Outcome.DONE)
    finally:
        assert transport.close(30.0)


def test_an_error_that_may_leave_something_under_way_ends_with_its_agent(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(8 * MIB, Options(serves=False, quarantine_seconds=0.05)) as reader:
        reader.transport.connect(peer.endpoint)
        post = Agent.post
        reader.wait(reader.start(peer, [(0, 0, MIB)]))

        def fail(agent: Agent, handle: int) -> None:
            post(agent, handle)
            raise AgentError("a backend error")

        monkeypatch.setattr(Agent, "post", fail)
        job = reader.start(peer, [(0, 0, MIB)])
        (result,) = reader.wait(job)
        assert (result.outcome, result.memory) == (Outcome.FAILED, Memory.QUARANTINED)
        assert result.kind == "remote_agent"
        monkeypatch.setattr(Agent, "post", post)
        reader.wait_settled(job)
        assert reader.transport.take_counts() == {"remote_agent": 1, "remote_rebuilt": 1}
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        assert result.outcome is Outcome.DONE


def test_no_thread_dies_of_an_error_that_nobody_thought_of(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_PARKED", 0)
    with Reader(8 * MIB, Options(serves=False, quarantine_seconds=0.05)) as reader:
        reader.transport.connect(peer.endpoint)

        def fail(*arguments: object) -> None:
            raise ZeroDivisionError

        for name in ("prepare", "post", "connect"):
            with monkeypatch.context() as patch:
                patch.setattr(Agent, name, fail)
                reader.transport.disconnect(peer.endpoint.incarnation)
                reader.transport.connect(peer.endpoint)
                job = reader.start(peer, [(0, 0, MIB)], seconds=0.5)
                (result,) = reader.wait(job)
                assert result.outcome is not Outcome.DONE
            if result.memory is Memory.QUARANTINED:
                reader.wait_settled(job)
            reader.transport.connect(peer.endpoint)
            (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
            assert result.outcome is Outcome.DONE


def test_reads_after_the_end_fail(peer: Peer) -> None:
    reader = Reader(MIB)
    reader.transport.connect(peer.endpoint)
    assert reader.close()
    assert reader.close()
    (result,) = reader.wait(reader.start(peer, [(0, 0, 10)]))
    assert (result.outcome, result.kind) == (Outcome.FAILED, "remote_shutdown")
    assert reader.transport.export() is None


def test_without_nixl_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransportError, match=r"remote needs NIXL.*pip install nixl"):
        open_transport([Region(4096, 4096)], Options())


def test_a_nixl_of_another_make_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import nixl._bindings

    monkeypatch.delattr(nixl._bindings, "nixlXferDList")
    with pytest.raises(TransportError, match="no nixlXferDList"):
        open_transport([Region(4096, 4096)], Options())


def test_regions_that_overlap_are_refused() -> None:
    with pytest.raises(TransportError, match="overlap"):
        open_transport([Region(4096, 4096), Region(8000, 4096)], Options())
