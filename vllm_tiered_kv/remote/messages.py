# SPDX-License-Identifier: Apache-2.0
"""What engines say to each other on the control channel.

One byte of version, then MessagePack. A consumer asks, a producer answers; an answer bears its
question's number. Everything is bounded: what is larger, or of another version, is not parsed.

Two conversations: about a prompt that was handed over (from :class:`Hello` on), and about chunks
that an engine may have in its CPU tier (from :class:`Meet` on).
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeVar

import msgspec

from vllm_tiered_kv.remote.facts import Facts
from vllm_tiered_kv.remote.memory import Place, RankLayout
from vllm_tiered_kv.remote.ticket import Count, Incarnation
from vllm_tiered_kv.remote.transport import Endpoint

VERSION = 2
MAX_ASK_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 24
MAX_RANKS = 64
MAX_GROUPS = 16
MAX_BLOCKS = 1 << 20
"""Of one hand-over in one KV cache group."""
SUM_BYTES = 16
"""Of one checksum."""
MAX_SUMS = 1 << 22
"""Bytes of one hand-over's checksums in one KV cache group on one rank, or of one loan's."""
MAX_HOLDS = 256
"""Leases in one message."""
MAX_KEYS = 1792
"""Chunks in one question: of the longest block hashes so many fit in :data:`MAX_ASK_BYTES`."""

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Holder = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Block = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
BlockHash = Annotated[bytes, msgspec.Meta(min_length=8, max_length=32)]
Content = Annotated[bytes, msgspec.Meta(max_length=64)]
MAX_SENTENCE = 1000
_Sentence = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE)]


Sums = Annotated[
    tuple[
        Annotated[
            tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_SUMS)], ...],
            msgspec.Meta(max_length=MAX_GROUPS),
        ],
        ...,
    ],
    msgspec.Meta(max_length=MAX_RANKS),
]
"""Checksums, by rank and KV cache group, see `worker.remote.checksums`; none: there are none."""
ChunkSums = Annotated[bytes, msgspec.Meta(max_length=SUM_BYTES * MAX_RANKS * MAX_GROUPS)]
"""One for each of a chunk's slots: rank after rank, on each KV cache group after group."""


class MessageError(ValueError):
    """Not a message of this protocol."""


class OtherVersion(MessageError):
    """A message of another version of it."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the peer speaks version {version} of the protocol, and we {VERSION}")
        self.version = version


class RankMemory(msgspec.Struct, frozen=True, array_like=True):
    """What a peer must know to read the KV pages of one rank."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    endpoint: Endpoint
    layout: RankLayout

    def __post_init__(self) -> None:
        if self.layout.rank != self.rank:
            raise ValueError(f"the layout of rank {self.layout.rank} as that of {self.rank}")


Ranks = Annotated[tuple[RankMemory, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


def _check_ranks(ranks: Ranks) -> None:
    """See that each is named once.

    Raises:
        ValueError: one is named twice.
    """
    if len({memory.rank for memory in ranks}) < len(ranks):
        raise ValueError("a rank is named twice")


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What must be equal in both engines."""

    semantic: Digest
    """Of what the numbers mean."""
    pages: Digest
    """Of how they lie in a page."""


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """One holder of one lease."""

    lease: Count
    holder: Holder


Holds = Annotated[tuple[Hold, ...], msgspec.Meta(min_length=1, max_length=MAX_HOLDS)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Where is your memory?"""

    number: Count
    engine: Incarnation
    """Who is meant."""
    identity: Identity


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """I want to read what was handed over."""

    number: Count
    engine: Incarnation
    identity: Identity
    hold: Hold


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """I still want to read these."""

    number: Count
    engine: Incarnation
    holds: Holds


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """I read these no more, nor does any read of mine go on. Not answered."""

    engine: Incarnation
    holds: Holds


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet"):
    """Who are you, and where is your memory? I may ask you for chunks."""

    number: Count
    asker: Incarnation
    identity: Identity


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """Which of these chunks of a prompt have you, from the first on? I want to read them."""

    number: Count
    engine: Incarnation
    """Who is meant."""
    holder: Holder
    content: Content
    """What every chunk's key ends with: a digest of LoRA weights, or nothing."""
    hashes: Annotated[tuple[BlockHash, ...], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    """What each chunk's key begins with: the hash of its last block, head first."""


class Return(msgspec.Struct, frozen=True, array_like=True, tag="return"):
    """I read the chunks of these leases no more, nor does any read of mine go on. Not answered."""

    engine: Incarnation
    holds: Holds


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Our memory."""

    number: Count
    generation: Count
    """Another one whenever it has changed."""
    ranks: Ranks

    def __post_init__(self) -> None:
        _check_ranks(self.ranks)


class Granted(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """Read, for so many seconds from when you asked."""

    number: Count
    seconds: Seconds
    generation: Count
    """Of the memory that the blocks are in."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    blocks: Annotated[
        tuple[Annotated[tuple[Block, ...], msgspec.Meta(max_length=MAX_BLOCKS)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_GROUPS),
    ]
    """By KV cache group, to the prompt's last token; slots, if that is the place. They begin with
    the first token, or where the last token's sliding window begins."""
    place: Place = Place.PAGES
    sums: Sums = ()


class Coming(msgspec.Struct, frozen=True, array_like=True, tag="coming"):
    """It is being got ready; the question will be answered."""

    number: Count


class Renewed(msgspec.Struct, frozen=True, array_like=True, tag="renewed"):
    """These are good for so many seconds from when you asked; those not named are over."""

    number: Count
    seconds: Seconds
    holds: Annotated[tuple[Hold, ...], msgspec.Meta(max_length=MAX_HOLDS)]


class Met(msgspec.Struct, frozen=True, array_like=True, tag="met"):
    """Who we are, and our memory."""

    number: Count
    engine: Incarnation
    generation: Count
    ranks: Ranks

    def __post_init__(self) -> None:
        _check_ranks(self.ranks)


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """Read these, for so many seconds from when you asked."""

    number: Count
    lease: Count
    """Of no meaning where there are no slots."""
    seconds: Seconds
    generation: Count
    """Of the memory that the slots are in."""
    slots: Annotated[
        tuple[Annotated[tuple[Block, ...], msgspec.Meta(max_length=MAX_KEYS)], ...],
        msgspec.Meta(max_length=MAX_GROUPS),
    ]
    """By KV cache group, of the chunks that are here, from the first on; empty where none is."""
    sums: Annotated[tuple[ChunkSums, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()
    """Of each of these chunks; none: none are made."""


class Reason(enum.Enum):
    """Why something is refused."""

    VERSION = "version"
    SEMANTIC = "semantic"  # the models differ
    PAGES = "pages"  # the memory layouts differ
    ENGINE = "engine"  # another life of the engine is meant
    NOT_READY = "not ready"
    LEASE = "lease"  # over, or never there
    LIMIT = "limit"
    SELF = "self"  # who asks is who is asked
    LENDS_NOTHING = "lends nothing"  # it has no CPU tier


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """No."""

    number: Count
    reason: Reason
    sentence: _Sentence
    """For a log."""
    facts: Facts = ()
    """What the identity is made of that differs, ours."""


Ask = Hello | Take | Renew | Release | Meet | Find | Return
Answer = Welcome | Granted | Coming | Renewed | Met | Found | Refused

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_asks: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Ask)
_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


def encode(message: Ask | Answer) -> bytes:
    return bytes((VERSION,)) + _encoder.encode(message)


def decode_ask(data: bytes) -> Ask:
    """Read a question.

    Raises:
        OtherVersion: it is of another version.
        MessageError: it is none.
    """
    ask: Ask = _decode(data, _asks, MAX_ASK_BYTES)
    return ask


def decode_answer(data: bytes) -> Answer:
    """Read an answer.

    Raises:
        OtherVersion: it is of another version.
        MessageError: it is none.
    """
    answer: Answer = _decode(data, _answers, MAX_ANSWER_BYTES)
    return answer


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[Any], limit: int) -> Any:
    if not data or len(data) > limit:
        raise MessageError("empty or too large")
    if data[0] != VERSION:
        raise OtherVersion(data[0])
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(str(error)) from None
