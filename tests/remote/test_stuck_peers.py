# SPDX-License-Identifier: Apache-2.0
"""Peers that die, stand still and come back: no byte lands in memory that was called free.

Over tcp a read can be caught in the middle, since nothing moves without the peer. With all
transports a peer on the same machine is read even while it stands still, once the two have met;
before that, nothing comes until it goes on.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.remote._peer import Peer
from tests.remote._reader import UNTOUCHED, Reader, expected
from vllm_tiered_kv.remote.transport import Memory, Options, Outcome

MIB = 1 << 20
CANARY = 0xA5
LARGE = 96 * MIB
PATIENT = Options(serves=False, quarantine_share=1.0)
IMPATIENT = Options(serves=False, quarantine_seconds=0.1)
"""Makes the agent anew as soon as a read hangs."""


def begin_large(reader: Reader, peer: Peer, seconds: float) -> int:
    """A read of everything, with its first bytes already here."""
    job = reader.start(peer, [(0, 0, len(reader.memory))], seconds=seconds)
    reader.until(lambda: bool((reader.memory[:: 4 * MIB] != UNTOUCHED).any()))
    return job


def stop_in_the_middle(reader: Reader, peer: Peer, seconds: float = 0.2) -> int:
    """A read that ends in quarantine; now and then one is over before the peer stands still."""
    for _ in range(20):
        reader.memory[:] = UNTOUCHED
        job = begin_large(reader, peer, seconds)
        peer.stop()
        (result,) = reader.wait(job)
        if result.outcome is Outcome.GIVEN_UP:
            assert result.memory is Memory.QUARANTINED
            return job
        peer.resume()
    raise AssertionError("every read was over before the peer stood still")


def test_late_bytes_do_land_until_the_read_has_settled(tcp: str) -> None:
    """What quarantine is for: a read that was given up goes on when its peer does."""
    with Peer(1, LARGE, tcp) as peer, Reader(LARGE, PATIENT) as reader:
        reader.transport.connect(peer.endpoint)
        job = stop_in_the_middle(reader, peer)
        reader.watch(0.2)
        assert job not in reader.settled
        missing = np.flatnonzero(reader.memory == UNTOUCHED)
        assert len(missing)
        peer.resume()
        reader.wait_settled(job)
        assert (reader.memory[missing] != UNTOUCHED).any()


def test_nothing_lands_after_the_read_has_settled(tcp: str) -> None:
    with Peer(1, LARGE, tcp) as peer, Reader(LARGE, PATIENT) as reader:
        reader.transport.connect(peer.endpoint)
        for _ in range(3):
            job = stop_in_the_middle(reader, peer)
            peer.resume()
            reader.wait_settled(job)
            reader.memory[:] = CANARY
            reader.watch(0.3)
            assert (reader.memory == CANARY).all()


def test_nothing_lands_after_the_agent_was_destroyed(tcp: str) -> None:
    """The peer goes on only when its read has settled, since the agent is gone."""
    with Peer(1, LARGE, tcp) as peer, Reader(LARGE, IMPATIENT) as reader:
        reader.transport.connect(peer.endpoint)
        job = stop_in_the_middle(reader, peer)
        reader.wait_settled(job)
        assert reader.transport.take_counts()["remote_rebuilt"] == 1
        reader.memory[:] = CANARY
        peer.resume()
        reader.watch(0.5)
        assert (reader.memory == CANARY).all()
        # UCX may have ended the peer; if not, the new agent can read from it.
        reader.memory[:] = UNTOUCHED
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        if result.outcome is Outcome.DONE:
            assert np.array_equal(reader.memory, expected(reader, peer, [(0, 0, MIB)]))
        else:
            assert not peer.is_alive


def test_a_peer_that_stands_still_before_the_first_read(transports: str) -> None:
    with Peer(1, 32 * MIB, transports) as peer, Reader(32 * MIB, IMPATIENT) as reader:
        peer.stop()
        reader.transport.connect(peer.endpoint)
        job = reader.start(peer, [(0, 0, 32 * MIB)], seconds=0.2)
        (result,) = reader.wait(job)
        assert (result.outcome, result.memory) == (Outcome.GIVEN_UP, Memory.QUARANTINED)
        # Meanwhile it is left alone.
        (result,) = reader.wait(reader.start(peer, [(0, 0, 10)]))
        assert result.kind == "remote_peer"
        reader.wait_settled(job)
        reader.memory[:] = CANARY
        peer.resume()
        reader.watch(0.3)
        assert (reader.memory == CANARY).all()
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        assert result.outcome is Outcome.DONE


def test_a_peer_that_goes_on_before_its_agent_is_destroyed(transports: str) -> None:
    with Peer(1, 32 * MIB, transports) as peer, Reader(32 * MIB, PATIENT) as reader:
        peer.stop()
        reader.transport.connect(peer.endpoint)
        job = reader.start(peer, [(0, 0, 32 * MIB)], seconds=0.2)
        reader.wait(job)
        peer.resume()
        reader.wait_settled(job)
        reader.memory[:] = CANARY
        reader.watch(0.3)
        assert (reader.memory == CANARY).all()


def test_reads_of_others_go_on_while_the_agent_is_replaced(tcp: str) -> None:
    with (
        Peer(1, LARGE, tcp) as stuck,
        Peer(2, 32 * MIB, tcp) as good,
        Reader(LARGE, IMPATIENT) as reader,
    ):
        reader.transport.connect(stuck.endpoint)
        reader.transport.connect(good.endpoint)
        job = stop_in_the_middle(reader, stuck)
        while job not in reader.settled:
            (result,) = reader.wait(reader.start(good, [(0, 0, 32 * MIB)]))
            assert result.outcome is Outcome.DONE
            # The stuck read covers the same memory, but its peer stands still.
            assert np.array_equal(reader.memory[: 32 * MIB], good.bytes)
        assert reader.transport.take_counts()["remote_rebuilt"] == 1


def test_much_memory_in_quarantine_is_reason_enough_for_a_new_agent(tcp: str) -> None:
    options = Options(serves=False, quarantine_share=0.5)
    with Peer(1, LARGE, tcp) as peer, Reader(LARGE, options) as reader:
        reader.transport.connect(peer.endpoint)
        job = stop_in_the_middle(reader, peer)
        reader.wait_settled(job)


def test_a_killed_peer_before_during_and_after_a_read(tcp: str) -> None:
    with Reader(LARGE) as reader:
        for when in ("before", "during", "after"):
            with Peer(1, LARGE, tcp) as peer:
                reader.transport.connect(peer.endpoint)
                reader.memory[:] = UNTOUCHED
                if when == "before":
                    peer.kill()
                    job = reader.start(peer, [(0, 0, LARGE)])
                elif when == "during":
                    job = begin_large(reader, peer, 60.0)
                    peer.kill()
                else:
                    job = reader.start(peer, [(0, 0, LARGE)])
                    (result,) = reader.wait(job)
                    assert result.outcome is Outcome.DONE
                    peer.kill()
                    job = reader.start(peer, [(0, 0, LARGE)])
                (result,) = reader.wait(job)
                assert result.outcome is Outcome.FAILED, when
                if result.memory is Memory.QUARANTINED:  # of a read in pieces one may be on its way
                    reader.wait_settled(job)
                # Who is gone before it was connected to is refused by its host.
                assert result.kind in ("remote_disconnected", "remote_connect")
                reader.memory[:] = CANARY
                reader.watch(0.1)
                assert (reader.memory == CANARY).all()


def test_a_killed_peer_is_a_failure_with_all_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with Reader(32 * MIB) as reader, Peer(1, 32 * MIB) as peer:
        reader.transport.connect(peer.endpoint)
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        assert result.outcome is Outcome.DONE
        peer.kill()
        job = reader.start(peer, [(0, 0, 32 * MIB)])
        (result,) = reader.wait(job)
        assert result.outcome is Outcome.FAILED


def test_a_peer_that_was_started_again_is_another_one(transports: str) -> None:
    with Reader(32 * MIB) as reader:
        first = Peer(1, 32 * MIB, transports)
        reader.transport.connect(first.endpoint)
        reader.wait(reader.start(first, [(0, 0, MIB)]))
        first.close()
        with Peer(2, 32 * MIB, transports) as second:
            (result,) = reader.wait(reader.start(first, [(0, 0, MIB)]))
            assert result.outcome is Outcome.FAILED
            reader.transport.disconnect(first.endpoint.incarnation)
            reader.transport.connect(second.endpoint)
            reader.memory[:] = UNTOUCHED
            (result,) = reader.wait(reader.start(second, [(0, 0, MIB)]))
            assert result.outcome is Outcome.DONE
            assert np.array_equal(reader.memory, expected(reader, second, [(0, 0, MIB)]))


def test_a_peer_is_forgotten_while_its_read_hangs(tcp: str) -> None:
    """It can't be removed from the agent yet; its memory stays in quarantine."""
    with Peer(1, LARGE, tcp) as peer, Reader(LARGE, PATIENT) as reader:
        reader.transport.connect(peer.endpoint)
        job = stop_in_the_middle(reader, peer)
        reader.transport.disconnect(peer.endpoint.incarnation)
        reader.watch(0.2)
        assert job not in reader.settled
        peer.resume()
        reader.wait_settled(job)
        reader.memory[:] = CANARY
        reader.watch(0.3)
        assert (reader.memory == CANARY).all()
        reader.transport.connect(peer.endpoint)
        (result,) = reader.wait(reader.start(peer, [(0, 0, MIB)]))
        assert result.outcome is Outcome.DONE


def test_the_end_comes_also_while_a_read_hangs(tcp: str) -> None:
    with Peer(1, LARGE, tcp) as peer:
        reader = Reader(LARGE, PATIENT)
        reader.transport.connect(peer.endpoint)
        job = stop_in_the_middle(reader, peer)
        other = reader.start(peer, [(0, 0, 10)])
        assert reader.close()
        reader.collect()
        assert job in reader.settled
        assert other in reader.results
        reader.memory[:] = CANARY
        peer.resume()
        reader.watch(0.3)
        assert (reader.memory == CANARY).all()
