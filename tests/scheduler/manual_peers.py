# SPDX-License-Identifier: Apache-2.0
"""Other engines by hand: no message arrives and no read ends before it is let through.

The engine's own agent is the real one, without its thread and its sockets: it has its turn when it
is told to. The others are in :mod:`tests.scheduler.stand_ins`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import xxhash

from tests.scheduler.near import NearTransport
from tests.scheduler.stand_ins import (
    IDENTITY,
    LEASE,
    LIES,
    LIES_ABOUT_BYTES,
    Borrower,
    StandIn,
)
from vllm_tiered_kv import assemble
from vllm_tiered_kv.remote import agent as remote_agent
from vllm_tiered_kv.remote import assembly, keys
from vllm_tiered_kv.remote.agent import GRACE, RemoteAgent
from vllm_tiered_kv.remote.channel import Heard
from vllm_tiered_kv.remote.messages import Found, decode_answer, encode
from vllm_tiered_kv.remote.options import Address
from vllm_tiered_kv.remote.transport import Read

ADDRESSES = (Address("127.0.0.1", 7601), Address("127.0.0.1", 7602))
KEY = keys.generate()


class HandSockets:
    """The control channel: what is said is kept until somebody carries it."""

    turned_away = malformed = 0

    def __init__(self, address: Address) -> None:
        self.address = address
        self.asked: list[tuple[Address, bytes]] = []
        self.replies: list[tuple[bytes, bytes]] = []
        self.arrived = Heard()

    def wait(self, seconds: float, meanwhile: Callable[[], None]) -> Heard:
        meanwhile()
        arrived, self.arrived = self.arrived, Heard()
        return arrived

    def ask(self, address: Address, data: bytes) -> bool:
        self.asked.append((address, data))
        return True

    def reply(self, peer: bytes, data: bytes) -> bool:
        self.replies.append((peer, data))
        return True

    def hang_up(self, address: Address) -> None:
        pass

    def wake(self) -> None:
        pass


class HandTransport(NearTransport):
    """Each read ends when it is told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_held = True

    def end(self, at: int, *, well: bool = True) -> None:
        if self.held:
            read: Read = self.held.pop(at % len(self.held))
            (self._end if well else self._fail)(read)


class HandChecker:
    """Checksums are made and compared when it is told to."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.work: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> bool:
        self.work.append(work)
        return True

    def do(self) -> None:
        if self.work:
            self.work.popleft()()

    def close(self, timeout: float) -> bool:
        return True


class _NoThread:
    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self, timeout: float) -> None:
        pass


class _ToldAtOnce:
    """Stands for who looks up names."""

    def __init__(self, peers: Sequence[Address], tell: Callable[[Any], None]) -> None:
        tell(peers)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def remote_by_hand(clock: Callable[[], float], named: threading.Event) -> Iterator[None]:
    """Engines made meanwhile have agents that are run by hand.

    Args:
        clock: theirs.
        named: set when what their KV means has been said to them, on another thread.
    """

    def introduce(agent: RemoteAgent, _: object) -> None:
        agent.identify(IDENTITY)  # as if this model had weights
        named.set()

    with (
        mock.patch.object(assemble, "introduce", introduce),
        mock.patch.object(assembly, "is_nixl_there", return_value=True),
        mock.patch.object(assembly.keys, "load", return_value=KEY),
        mock.patch.object(assembly, "_listen", lambda _, address, **__: HandSockets(address)),
        mock.patch.object(assembly, "RemoteAgent", lambda *given: RemoteAgent(*given, clock)),
        mock.patch.object(remote_agent, "threading", SimpleNamespace(Thread=_NoThread)),
        mock.patch.object(remote_agent, "Resolver", _ToldAtOnce),
    ):
        yield


def options(*, verify: bool) -> dict[str, Any]:
    """``remote`` of an engine that asks all of these, and lends."""
    return {
        "listen": "127.0.0.1:7600",
        "key_file": "/none",
        "peers": [str(address) for address in ADDRESSES],
        "lease": LEASE,
        "verify": verify,
    }


class Peers:
    """All other engines, and what is on its way to and from them.

    Args:
        sim: the engine, a :class:`~tests.scheduler.manual.ManualSim`.
        verify: whether all compare checksums.
    """

    def __init__(self, sim: Any, *, verify: bool) -> None:
        self._sim = sim
        self._verify = verify
        self.agent: RemoteAgent = sim.half.remote.agent
        self._sockets: Any = self.agent._sockets
        self.stand_ins: dict[Address, StandIn] = {}
        self._ended: list[StandIn] = []
        """Their memory stays mapped: reads may be under way."""
        self.answers: list[tuple[Address, bytes]] = []
        """On their way to us."""
        self.borrower = Borrower()
        self.gone: set[str] = set()

    @property
    def transports(self) -> list[HandTransport]:
        sides = [rank.tiered._worker.remote for rank in self._sim.ranks]
        return [side._pulls._transport for side in sides if side._pulls is not None]

    @property
    def checkers(self) -> list[HandChecker]:
        sides = [rank.tiered._worker.remote for rank in self._sim.ranks]
        return [side._checker for side in sides if side._checker is not None]

    @property
    def is_busy(self) -> bool:
        """Whether anything is held for, or by, other engines."""
        remote = self._sim.half.remote
        peers, shelving = remote.peers, remote.shelving
        ours = peers.reads or peers._claims or peers.quarantined or shelving.summing
        return bool(ours or shelving.lent_slots)

    # -- what happens --------------------------------------------------------------------

    def think(self) -> None:
        """The agent has its turn, and so have those of the others."""
        agent = self.agent
        agent._turn(agent.clock())
        agent._finder.tick()
        agent._client.tick()
        agent._server.expire()
        for stand_in in self.stand_ins.values():
            stand_in.server.expire()
            stand_in.shelf.take_returned()
        if not self.stand_ins and len(agent._layouts) == len(self._sim.ranks):
            for address in ADDRESSES:
                self.stand_ins[address] = self._start()
        for _, data in self._take(self._sockets.replies):
            self.borrower.hear(data)

    def carry(self, at: int) -> None:
        """A question reaches whom it is for."""
        asked = self._sockets.asked
        if asked:
            address, data = asked.pop(at % len(asked))
            self._ask(address, data)

    def hear(self, at: int, lie: str = "", *, again: bool = False) -> None:
        """An answer reaches us, perhaps not as it was given, and perhaps not for the last time."""
        if not self.answers:
            return
        at %= len(self.answers)
        address, data = self.answers[at]
        if not again:
            del self.answers[at]
        answer = decode_answer(data)
        change = LIES.get(lie) or (LIES_ABOUT_BYTES.get(lie) if self._verify else None)
        if change is not None and isinstance(answer, Found) and answer.slots:
            data = encode(change(answer))
        self._sockets.arrived.answers.append((address, data))

    def say(self, at: int, data: bytes) -> None:
        """One of them says something that nobody asked for."""
        address = ADDRESSES[at % len(ADDRESSES)]
        self._sockets.arrived.answers.append((address, data))

    def lose(self, at: int) -> None:
        """A message is lost."""
        waiting = self._sockets.asked if at % 2 else self.answers
        if waiting:
            del waiting[at // 2 % len(waiting)]

    def restart(self, at: int) -> None:
        """One of them ends; another engine is at its address."""
        address = ADDRESSES[at % len(ADDRESSES)]
        old = self.stand_ins.get(address)
        if old is not None:
            old.end()
            self._ended.append(old)
            self.gone.update(old.endpoints)
            self.stand_ins[address] = self._start()

    def borrow(self, wanted: Sequence[bytes]) -> None:
        data = self.borrower.ask(self.agent.engine, wanted, self._sim.now)
        self._sockets.arrived.asks.append((b"borrower", data))

    def give_back(self, at: int) -> None:
        if self.borrower.held:
            data = self.borrower.give_back(self.agent.engine, at)
            self._sockets.arrived.asks.append((b"borrower", data))

    def talk(self) -> None:
        """All messages arrive; reads go on."""
        busy = True
        while busy:
            self.think()
            busy = bool(self._sockets.asked or self.answers)
            while self._sockets.asked:
                self.carry(0)
            while self.answers:
                self.hear(0)

    def let_leases_end(self) -> None:
        """Time passes, and the others need their room."""
        self._sim.now += LEASE + GRACE + 1
        for stand_in in self.stand_ins.values():
            stand_in.server.expire()
            stand_in.shelf.take_returned()
            for key in stand_in.known:
                stand_in.forget(key)

    def finish(self) -> None:
        """All messages arrive, and all that was begun ends."""
        self.talk()
        for transport in self.transports:
            while transport.held:
                transport.end(0)
            transport.land()
        for checker in self.checkers:
            while checker.work:
                checker.do()

    def goes_on(self, step: int) -> None:
        """A message here, a read there."""
        self.think()
        self.carry(0)
        self.hear(0)
        for transport, checker in zip(self.transports, self.checkers, strict=True):
            if step % 2:
                transport.end(0)
                checker.do()

    def _start(self) -> StandIn:
        layouts = [self.agent._layouts[rank] for rank in sorted(self.agent._layouts)]
        return StandIn(layouts, lambda: self._sim.now, verify=self._verify)

    def _ask(self, address: Address, data: bytes) -> None:
        stand_in = self.stand_ins.get(address)
        answer = stand_in.server.answer(b"engine", data) if stand_in is not None else None
        if answer is not None:
            self.answers.append((address, answer))

    @staticmethod
    def _take(queue: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        taken = queue[:]
        queue.clear()
        return taken

    # -- what must hold ------------------------------------------------------------------

    def check(self) -> None:
        """What somebody may be reading of ours is what was computed, and others are asked well."""
        for stand_in in (*self.stand_ins.values(), *self._ended):
            assert not stand_in.complaints, stand_in.complaints
        for found, wanted, until, _ in self.borrower.held:
            if self._sim.now >= until:
                continue
            for i, slots in enumerate(zip(*found.slots, strict=True)):
                self._check_lent(wanted[i], slots, found.sums[i] if found.sums else b"")

    def _check_lent(self, key: bytes, slots: Sequence[int], sums: bytes) -> None:
        made = b""
        for rank in self._sim.ranks:
            pool = rank.tiered._worker._pool
            image = pool.tensor.numpy().view(np.int64).reshape(pool.num_slots, -1)
            for group, slot in enumerate(slots):
                want = self._sim.image(key, rank.number, group)
                assert np.array_equal(image[slot, : len(want)], want), f"lent slot {slot}"
                layout = self.agent._layouts[rank.number].slots
                assert layout is not None
                nbytes = layout.groups[group].image_bytes
                made += xxhash.xxh3_128_digest(image[slot].tobytes()[:nbytes])
        assert bool(sums) == self._verify
        assert sums in (b"", made)

    def come_to_rest(self) -> None:
        """At the end nothing is held, here or there."""
        self.borrower.held.clear()
        self._sim.now += LEASE + GRACE + 1  # a message that was lost costs that
        for _ in range(20):
            self.finish()
            self._sim.half.drain()
            if not self.is_busy:
                break
            self._sim.step()
        self.finish()
        assert not self.is_busy
        for stand_in in self.stand_ins.values():
            assert stand_in.shelf.lent_slots == 0
