# SPDX-License-Identifier: Apache-2.0
"""A peer that is read from serves on, whatever becomes of one of its readers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.remote._peer import Peer
from tests.remote._reader import Reader, expected, shuffled
from tests.remote._victim import Victim
from vllm_tiered_kv.remote.transport import Outcome

MIB = 1 << 20
LARGE = 64 * MIB


def assert_serves(peer: Peer, reader: Reader) -> None:
    runs = shuffled(16, MIB)
    reader.memory[:] = 0
    (result,) = reader.wait(reader.start(peer, runs))
    assert result.outcome is Outcome.DONE
    assert np.array_equal(reader.memory, expected(reader, peer, runs))


def test_readers_that_are_killed_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not over tcp, where UCX 1.23 now and then ends the peer for it; see `docs/transport.md`."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    transports = ""
    with Peer(1, LARGE, transports) as peer, Reader(16 * MIB) as reader:
        reader.transport.connect(peer.endpoint)
        for _ in range(2):
            with Victim(peer, transports) as victim:
                victim.kill()
                assert_serves(peer, reader)
                reader.watch(0.3)
                assert_serves(peer, reader)
        assert peer.is_alive


def test_a_reader_that_stands_still_and_goes_on(transports: str) -> None:
    with (
        Peer(1, LARGE, transports) as peer,
        Reader(16 * MIB) as reader,
        Victim(peer, transports) as victim,
    ):
        reader.transport.connect(peer.endpoint)
        victim.stop()
        for _ in range(3):
            assert_serves(peer, reader)
        victim.resume()
        for _ in range(3):
            victim.wait_for(b"read\n")
        assert_serves(peer, reader)
