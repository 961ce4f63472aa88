# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of each request."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_tiered_kv.params import RequestParams
from vllm_tiered_kv.remote.params import NOTHING, RemoteParams
from vllm_tiered_kv.scheduler.adapters import BASE_MODEL, Content, LoraName
from vllm_tiered_kv.scheduler.index import Node

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import Request
    from vllm_tiered_kv.remote.handoff import Handoff
    from vllm_tiered_kv.scheduler.fetch import Fetch, Look
    from vllm_tiered_kv.scheduler.jobs import ActiveLoad
    from vllm_tiered_kv.scheduler.peers import PeerLook
    from vllm_tiered_kv.scheduler.readying import HandOver
    from vllm_tiered_kv.scheduler.ruling import Ruling

NEVER = 1 << 62


class Offer(msgspec.Struct, frozen=True):
    """What a look-up promised; it holds only until the same scheduling step's allocation."""

    start: int
    """Tokens the device already holds."""
    first: int
    """Chunk index of ``nodes[0]``."""
    nodes: tuple[Node, ...]

    def tokens(self, chunk_tokens: int) -> int:
        return (self.first + len(self.nodes)) * chunk_tokens - self.start

    def tokens_of(self, nodes: Container[Node], taken: int, chunk_tokens: int) -> int:
        """How many of the first ``taken`` tokens are of these nodes."""
        end = self.start + taken
        count = 0
        for i, node in enumerate(self.nodes, self.first):
            if node in nodes:
                first, last = i * chunk_tokens, (i + 1) * chunk_tokens
                count += max(0, min(end, last) - max(self.start, first))
        return count


class RequestState:
    """One request between its arrival and its end. Mutable; scheduler thread only."""

    __slots__ = (
        "arrived_at",
        "awaited",
        "awaits_token",
        "began_with",
        "content",
        "counted",
        "epoch",
        "failed_loads",
        "fetch",
        "handing",
        "handoff",
        "is_crowded",
        "load",
        "loaded_from",
        "look",
        "lora",
        "next_chunk",
        "next_store_at",
        "offer",
        "params",
        "peers",
        "planned",
        "proven",
        "pull",
        "remote",
        "request",
        "ruling",
        "tail",
        "unsure",
        "used",
        "used_ns",
        "waiting_since",
    )

    def __init__(
        self,
        request: Request,
        params: RequestParams,
        lora: LoraName | None = None,
        arrived_at: float = 0.0,
    ) -> None:
        self.request = request
        self.params = params
        self.lora = lora
        self.content: Content | None = BASE_MODEL if lora is None else None
        """What its KV stands for besides its tokens; None: not known, nothing is kept."""
        self.epoch = -1
        """The epoch in which all of its device blocks were computed or loaded."""
        self.offer: Offer | None = None
        self.remote: RemoteParams = NOTHING
        """What it asks of hand-overs between engines."""
        self.handoff: Handoff | None = None
        """What another engine hands over to it; it is to be given back."""
        self.handing: HandOver | None = None
        """What of it is being got ready for another engine."""
        self.proven: Handoff | None = None
        """A hand-over that was seen to be of its prompt."""
        self.pull: tuple[int, int] | None = None
        """The tokens, first and end, that a look-up promised beside :attr:`offer`; as long."""
        self.load: ActiveLoad | None = None
        """The load vLLM waits for."""
        self.next_chunk = 0
        """The first chunk not yet stored or found stored."""
        self.used = 0
        """Chunks of its head that it has used: it stored them, or what was there is used once."""
        self.used_ns = 0
        """When it was looked up last, nanoseconds since the epoch: so old are its files."""
        self.planned = 0
        """Its tokens that are computed once the steps planned so far have run."""
        self.tail: Node | None = None
        """The node of the chunk before ``next_chunk``."""
        self.next_store_at = NEVER
        """Computed tokens from which ``next_chunk`` is complete; NEVER: stores nothing."""
        self.waiting_since: float | None = None
        """Since when its look-up is answered with "ask again"."""
        self.awaited: Node | None = None
        """The chunk its look-up waited for."""
        self.fetch: Fetch | None = None
        """What is read from disk for its look-up; it holds pins until it is given up."""
        self.look: Look | None = None
        """What other engines were seen to have written for it."""
        self.peers: PeerLook | None = None
        """What became of the question whether other engines have chunks of it."""
        self.is_crowded = False
        """Its load would take the room that others need to run."""
        self.failed_loads = 0
        """Loads of this request that did not arrive."""
        self.unsure = True
        """vLLM has not scheduled it since it was looked up, or since a load failed: what it
        counts as computed may never have arrived."""
        self.ruling: Ruling | None = None
        """What the gate decided, until the first token."""
        self.counted = False
        """Whether this admission's look-up is in the counters."""
        self.arrived_at = arrived_at
        """When it came to the scheduler, by the scheduler's clock."""
        self.awaits_token = True
        """No step planned so far gives its first token."""
        self.loaded_from: str | None = None
        """The furthest tier that a load has brought something of its prompt from."""
        self.began_with = "none"
        """Where what was not computed of its prompt came from: one of ``metrics.SOURCES``,
        or ``metrics.PEER``."""

    @property
    def is_reading(self) -> bool:
        """Whether something was read for its look-up, or is being read."""
        return self.fetch is not None or (self.peers is not None and self.peers.fetch is not None)

    @property
    def fetches(self) -> Iterator[Fetch]:
        """What was read for its look-up, or is being read."""
        if self.fetch is not None:
            yield self.fetch
        if self.peers is not None and self.peers.fetch is not None:
            yield self.peers.fetch

    def uncomputed(self, hash_tokens: int) -> Sequence[bytes]:
        """Hashes of its blocks that no step planned so far fills.

        Of draft tokens that were rejected ``planned`` knows nothing; but of the tokens that are
        known only the last, which was sampled, may still have to be computed.
        """
        computed = min(self.planned, self.request.num_tokens - 1)
        hashes: Sequence[bytes] = self.request.block_hashes[computed // hash_tokens :]
        return hashes

    def restart(self, epoch: int, chunk_tokens: int) -> None:
        """Nothing of it is computed: it is new, or was preempted, or its load failed."""
        self.epoch = epoch
        self.offer = None
        self.loaded_from = None
        self.pull = None
        self.next_chunk = 0
        self.tail = None
        self.unsure = True
        self.used_ns = time.time_ns()
        keeps = self.params.store and self.content is not None
        self.next_store_at = chunk_tokens if keeps else NEVER
