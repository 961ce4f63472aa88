# SPDX-License-Identifier: Apache-2.0
"""What a consumer needs to fetch a hand-over, sealed by the producer with the fleet's key.

It travels through routers and clients, which can pass it on and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Annotated

import msgspec

VERSION = 1
MAX_SEALED = 1024  # characters
PROOF_BYTES = 32
_SEAL_BYTES = 32

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Incarnation = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
"""One life of one engine process."""
Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
"""A digest of the tokens, and of all else that their KV depends on."""


class TicketError(ValueError):
    """Not a ticket of this fleet; says why without quoting it."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One hand-over."""

    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)]
    engine: Incarnation
    """The producer's."""
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    lease: Count
    """The producer's number for it."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    """How many tokens' KV there is."""
    proof: Proof
    """Of which tokens."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


def seal(ticket: Ticket, key: bytes) -> str:
    """Text that :func:`unseal` opens with the same key; safe in JSON and in a URL."""
    data = _encoder.encode(ticket)
    return base64.urlsafe_b64encode(_seal(data, key) + data).rstrip(b"=").decode()


def unseal(text: str, key: bytes) -> Ticket:
    """Open a ticket. What does not bear the key's seal is not parsed.

    Raises:
        TicketError: it was not sealed with this key, or is of another version.
    """
    if len(text) > MAX_SEALED or not text.isascii():
        raise TicketError("it is no ticket")
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise TicketError("it is no ticket") from None
    data = raw[_SEAL_BYTES:]
    if not hmac.compare_digest(raw[:_SEAL_BYTES], _seal(data, key)):
        raise TicketError(
            "it was not sealed with this engine's key: the prefill engine has another one, or what "
            "it answered was changed on the way"
        )
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        raise TicketError("it is of another version of this connector") from None


def _seal(data: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=_SEAL_BYTES).digest()
