# SPDX-License-Identifier: Apache-2.0
"""Runs the control channel beside the scheduler's thread, whether the engine steps or not.

The scheduler half says what it wants and takes what came of it; both cost it a queue's append. No
lock is shared between the two, so nobody waits for a socket.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from vllm_tiered_kv.errands import Errands
from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.remote.asking import Client
from vllm_tiered_kv.remote.channel import ControlSockets
from vllm_tiered_kv.remote.facts import UNTOLD, IdentityFacts
from vllm_tiered_kv.remote.finding import Finder
from vllm_tiered_kv.remote.handoff import Handoff, PeerMemory
from vllm_tiered_kv.remote.inquiry import Inquiry, InquiryState
from vllm_tiered_kv.remote.leases import LeaseTable
from vllm_tiered_kv.remote.loans import ChunkLender
from vllm_tiered_kv.remote.memory import RankLayout
from vllm_tiered_kv.remote.messages import (
    Identity,
    MessageError,
    OtherVersion,
    RankMemory,
    Reason,
    Refused,
    decode_answer,
)
from vllm_tiered_kv.remote.names import Resolver
from vllm_tiered_kv.remote.options import Address
from vllm_tiered_kv.remote.serving import Offer, Server
from vllm_tiered_kv.remote.shelf import Shelf
from vllm_tiered_kv.remote.ticket import VERSION, Ticket, seal, unseal
from vllm_tiered_kv.remote.transport import Endpoint
from vllm_tiered_kv.worker.remote.plan import Refusal, plan_routes, plan_slot_routes

logger = get_logger(__name__)

T = TypeVar("T")

GRACE = 5.0
"""Seconds by which a producer's memory outlives the time of a holder that says nothing."""
MAX_FAILURES = 4096
"""Failures not yet taken; older ones are not counted."""
TICK = 0.2
"""Seconds between two looks at deadlines."""
CLOSE_TIMEOUT = 5.0


class RemoteSettings(msgspec.Struct, frozen=True):
    """What the agent is built from."""

    ranks: int
    lease: float
    """Seconds."""
    max_leases: int
    sealing: bytes
    """The key that tickets are sealed with."""
    sends: bool
    """This engine hands KV over."""
    receives: bool
    """This engine goes on from KV that was handed over."""
    lends: int = 0
    """Slots of the CPU tier that peers may hold leases on at once; 0: none are lent."""
    peers: tuple[Address, ...] = ()
    """Engines that are asked for chunks; names are looked up."""
    verify: bool = False
    """Chunks without checksums are not borrowed."""


class RemoteAgent:
    """The scheduler half's side of hand-overs.

    But for the constructor, :meth:`identify` and :meth:`shutdown`, every method is for the
    scheduler's thread: none waits, none raises but where said.

    Args:
        settings: what the agent is built from.
        sockets: the control channel; the agent's from now on.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        sockets: ControlSockets,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.engine = secrets.token_hex(16)
        """This engine's incarnation."""
        self.clock = clock
        self._sockets = sockets
        self._errands = Errands(sockets.wake)
        self._freed: deque[int] = deque()
        self._gone: deque[str] = deque()
        self._failures: deque[str] = deque(maxlen=MAX_FAILURES)
        self._trouble_log = OncePerKind(logger)
        self._numbers = itertools.count(1)
        self._outstanding = 0
        """Leases that have not been given back; the scheduler's count."""
        self._ready = False
        self._closed = False
        self._stopping = False
        self._malformed = self._turned_away = 0
        self._leases = LeaseTable(settings.lease, GRACE, settings.max_leases)
        self.shelf: Shelf[Any] | None = None
        """What peers may read of the CPU tier; None where nothing is lent."""
        self._lender: ChunkLender | None = None
        if settings.lends and sockets.address is not None:
            self.shelf = Shelf(settings.lends)
            leases = LeaseTable(settings.lease, GRACE, settings.max_leases)
            self._lender = ChunkLender(self.shelf, leases, clock)
        self._server = Server(
            self.engine, settings.ranks, self._leases, clock, self._trouble, self._lender
        )
        pages = functools.partial(self._refusal, plan_routes)
        self._client = Client(sockets.ask, self._hang_up, pages, clock, self._trouble)
        slots = functools.partial(self._refusal, plan_slot_routes)
        self._finder = Finder(
            self.engine,
            sockets.ask,
            self._hang_up,
            slots,
            clock,
            self._trouble,
            verify=settings.verify,
        )
        self._layouts: dict[int, RankLayout] = {}
        self._identity: Identity | None = None
        self._facts = UNTOLD
        self._thread = threading.Thread(target=self._run, name="tiered-kv-remote", daemon=True)
        self._thread.start()
        self._resolver: Resolver | None = None
        if settings.peers:
            self._resolver = Resolver(
                settings.peers, lambda found: self._errands.insist(self._finder.know, found)
            )

    @property
    def address(self) -> Address | None:
        """Where consumers reach this engine; None where it serves nobody."""
        return self._sockets.address

    # -- what there is -----------------------------------------------------------------

    @property
    def sends(self) -> bool:
        """Whether something may be handed over now."""
        return self._ready and not self._closed and self.settings.sends

    @property
    def receives(self) -> bool:
        """Whether hand-overs may be accepted now."""
        return not self._closed and self.settings.receives

    @property
    def asks(self) -> bool:
        """Whether peers may be asked for chunks now."""
        return bool(self.settings.peers) and not self._closed

    @property
    def lends(self) -> bool:
        """Whether peers may read chunks now."""
        return self._ready and not self._closed and self.shelf is not None

    @property
    def leases(self) -> int:
        """Hand-overs whose memory is not free yet."""
        return self._outstanding

    def take_freed(self) -> list[int]:
        """Leases whose memory is free since the last call; each once."""
        freed = _drain(self._freed)
        self._outstanding -= len(freed)
        return freed

    def take_gone(self) -> list[str]:
        """Engines that are not read from any more."""
        return _drain(self._gone)

    def take_failures(self) -> list[str]:
        """Kinds of failures since the last call, one entry each."""
        return _drain(self._failures)

    # -- what is wanted: a producer ----------------------------------------------------

    def identify(self, identity: Identity, facts: IdentityFacts = UNTOLD) -> None:
        """What this engine's KV means is known, and in words; any thread."""
        self._errands.insist(self._server.identify, identity, facts)
        self._errands.insist(self._client.identify, identity, facts)
        self._errands.insist(self._identified, identity, facts)

    def remember(self, layout: RankLayout, endpoint: Endpoint | None) -> None:
        """How a rank's pages lie, and how peers can read them."""
        self._errands.insist(self._learn, layout, endpoint)

    def promise(self, tokens: int, proof: bytes) -> tuple[Ticket, str] | None:
        """Hand the KV of so many tokens over to who comes with the ticket.

        Who comes waits until :meth:`settle` has said where it is.

        Returns:
            The ticket, and the same sealed; None if nothing can be handed over now. Else the memory
            is the lease's until :meth:`take_freed` names it.
        """
        address = self._sockets.address
        if address is None or not self.sends or self._outstanding >= self.settings.max_leases:
            return None
        ticket = Ticket(
            VERSION,
            self.engine,
            address.host,
            address.port,
            next(self._numbers),
            tokens,
            proof,
        )
        if not self._errands.tell(self._server.promise, ticket.lease):
            return None
        self._outstanding += 1
        return ticket, seal(ticket, self.settings.sealing)

    def settle(self, lease: int, offer: Offer) -> None:
        """What was promised is there."""
        self._errands.insist(self._server.settle, lease, offer)

    def withdraw(self, lease: int) -> None:
        """What was promised is not there."""
        self._errands.insist(self._server.withdraw, lease)

    # -- what is wanted: a consumer ----------------------------------------------------

    def open(self, sealed: str) -> Handoff:
        """Ask for what was handed over; its state tells what comes of it.

        Raises:
            TicketError: it is not this fleet's.
        """
        ticket = unseal(sealed, self.settings.sealing)
        handoff = Handoff(ticket, f"{self.engine}.{next(self._numbers)}")
        if not self._errands.tell(self._client.open, handoff):
            handoff.end("the agent is busy")
        return handoff

    def release(self, handoff: Handoff) -> None:
        """It is not wanted any more, and no read of it goes on."""
        self._errands.insist(self._client.release, handoff)

    def lapse(self, handoff: Handoff) -> None:
        """It is not wanted any more; a read of it may go on until :meth:`release`."""
        self._errands.insist(self._client.lapse, handoff)

    # -- what is wanted: chunks ----------------------------------------------------------

    def ask(self, keys: Sequence[bytes], content: bytes) -> Inquiry:
        """Ask all peers who has these chunks; its state tells what comes of it.

        Args:
            keys: head first.
            content: what each key ends with.
        """
        inquiry = Inquiry(keys, content)
        if not self.asks or not self._errands.tell(self._finder.open, inquiry):
            inquiry.state = InquiryState.OVER
        return inquiry

    def give_back(self, inquiry: Inquiry) -> None:
        """Nothing of it is wanted any more, and no read of it goes on."""
        self._errands.insist(self._finder.give_back, inquiry)

    # -- the end -----------------------------------------------------------------------

    def close(self, why: str) -> None:
        """Neither offer nor accept anything from now on: KV here may not be what it was."""
        if self._closed:
            return
        self._closed = True
        self._errands.insist(self._server.close, why)
        self._errands.insist(self._client.stop, why)
        self._errands.insist(self._finder.stop)

    def revoke(self) -> None:
        """Grant nobody what is offered now: it may be wrong."""
        self._errands.insist(self._server.revoke)

    def shutdown(self) -> None:
        """End the thread and close the sockets."""
        self._closed = self._stopping = True
        if self._resolver is not None:
            self._resolver.close()
        self._errands.close()
        self._thread.join(CLOSE_TIMEOUT)

    # -- the agent's thread ------------------------------------------------------------

    def _run(self) -> None:
        next_tick = self.clock() + TICK
        while not self._stopping:
            try:
                due = self._finder.due
                self._turn(next_tick if due is None else min(next_tick, due))
                now = self.clock()
                if due is not None and now >= due:
                    self._finder.tick()
                if now >= next_tick:
                    next_tick = now + TICK
                    self._client.tick()
                    self._finder.tick()
                    self._server.expire()
                    self._look_at_sockets()
            except Exception:  # noqa: BLE001 - see _do
                self._note_bug()
                time.sleep(TICK)  # should it happen again and again
        self._do(self._sockets.close)

    def _turn(self, until: float) -> None:
        """Sleep until something happens, and see to it."""
        with self._errands.sleep() as idle:
            wait = max(0.0, until - self.clock()) if idle else 0.0
            heard = self._sockets.wait(wait, self._obey)
        for peer, data in heard.asks:
            self._do(self._serve, peer, data)
        for address, data in heard.answers:
            self._do(self._hear, address, data)
        self._freed.extend(self._server.take_freed())
        for peer, answer in self._server.take_late():
            self._do(self._reply, peer, answer)
        for side in (self._client, self._finder):
            gone, side.gone = side.gone, []
            # The other one may be having it read from just now.
            self._gone.extend(engine for engine in gone if not self._is_known(engine))
        self._ready = self._server.is_ready

    def _obey(self) -> None:
        for call in self._errands.take():
            self._do(call)

    def _learn(self, layout: RankLayout, endpoint: Endpoint | None) -> None:
        self._layouts[layout.rank] = layout
        self._client.recheck()
        self._greet_peers()
        if endpoint is not None:
            self._server.remember(RankMemory(layout.rank, endpoint, layout))

    def _identified(self, identity: Identity, facts: IdentityFacts) -> None:
        self._identity, self._facts = identity, facts
        self._greet_peers()

    def _greet_peers(self) -> None:
        """Once all is known that a peer's memory is held against."""
        whole = len(self._layouts) == self.settings.ranks
        if self._identity is not None and whole and not self._closed:
            self._finder.identify(self._identity, self._facts)

    def _refusal(
        self, plan: Callable[[RankLayout, Sequence[RankLayout]], object], memory: PeerMemory
    ) -> str | None:
        """Why another engine's memory cannot be read into ours; None if it can, as far as is known.

        Args:
            plan: of its pages, or of its slots.
        """
        layouts = [rank.layout for rank in memory.ranks]
        try:
            for layout in self._layouts.values():
                plan(layout, layouts)
        except Refusal as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever a peer says of its memory
            return f"what it says of its memory makes no sense: {error!r}"
        return None

    def _hear(self, address: Address, data: bytes) -> None:
        try:
            answer = decode_answer(data)
        except OtherVersion as error:
            self._part_ways(address, str(error))
        except MessageError as error:
            self._trouble("remote_message", f"an answer of {address} cannot be read: {error}")
        else:
            if isinstance(answer, Refused) and answer.reason is Reason.VERSION:
                self._part_ways(address, answer.sentence)
            elif not self._finder.heard(address, answer):
                self._client.heard(address, answer)

    def _part_ways(self, address: Address, sentence: str) -> None:
        """Who is there speaks another version."""
        self._finder.is_of_another_version(address, sentence)
        self._client.is_of_another_version(address, sentence)

    def _is_known(self, engine: str) -> bool:
        return self._client.knows(engine) or self._finder.knows(engine)

    def _hang_up(self, address: Address) -> None:
        """One of the two that talk to a peer has no more to say."""
        if address not in self._client and address not in self._finder:
            self._sockets.hang_up(address)

    def _serve(self, peer: bytes, data: bytes) -> None:
        answer = self._server.answer(peer, data)
        if answer is not None:
            self._reply(peer, answer)

    def _reply(self, peer: bytes, answer: bytes) -> None:
        self._sockets.reply(peer, answer)

    def _do(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception:  # noqa: BLE001 - the channel must not end, or lose what comes next
            self._note_bug()

    def _look_at_sockets(self) -> None:
        sockets = self._sockets
        if sockets.turned_away != self._turned_away:
            self._turned_away = sockets.turned_away
            self._trouble("remote_key", "somebody tried to connect with another key")
        if sockets.malformed != self._malformed:
            self._malformed = sockets.malformed
            self._trouble("remote_message", "a peer's message has not one part")

    def _note_bug(self) -> None:
        self._failures.append("internal")
        self._trouble_log.error("internal", "unexpected error in the agent of hand-overs")

    def _trouble(self, kind: str, message: str) -> None:
        self._failures.append(kind)
        self._trouble_log.warn(kind, message)


def _drain(queue: deque[T]) -> list[T]:
    return [queue.popleft() for _ in range(len(queue))]
