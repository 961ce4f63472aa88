# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params`` of a hand-over: vLLM's names, so that routers need to know nothing of us.

They come from clients and routers. Of what they say only the ticket is believed, whose seal is
checked elsewhere; the rest says what is wanted.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from vllm_tiered_kv.params import KEY, ParamsError, RequestParams
from vllm_tiered_kv.remote.ticket import Ticket

_Text = Annotated[str, msgspec.Meta(max_length=512)]


class Wish(enum.Enum):
    """What a request asks of us."""

    NOTHING = "nothing"
    SEND = "send"  # hand its KV over when it ends
    RECEIVE = "receive"  # go on from KV that was handed over


class _Flags(msgspec.Struct, frozen=True):
    """The keys we read; others are somebody else's."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: _Text | None = None
    remote_request_id: _Text | None = None
    remote_host: _Text | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None


class RemoteParams(msgspec.Struct, frozen=True):
    """What a request's parameters say of a hand-over."""

    wish: Wish
    handoff: str = ""
    """The sealed ticket, where KV is to be received."""
    host: str = ""
    port: int = 0
    """As the parameters say, to be held against the ticket."""


NOTHING = RemoteParams(Wish.NOTHING)


def parse_remote(raw: Mapping[str, Any] | None, ours: RequestParams) -> RemoteParams:
    """What is asked of us.

    Args:
        raw: ``kv_transfer_params``, from outside.
        ours: its ``tiered_kv`` part, parsed.

    Raises:
        ParamsError: something is asked, and not as it has to be.
    """
    if not isinstance(raw, Mapping):
        return NOTHING
    try:
        known = {key: raw[key] for key in _Flags.__struct_fields__ if key in raw}
        flags = msgspec.convert(known, _Flags)
    except msgspec.ValidationError as error:
        raise ParamsError(f"kv_transfer_params: {error}") from None
    if flags.do_remote_prefill:
        if flags.do_remote_decode:
            raise ParamsError("kv_transfer_params: do_remote_prefill and do_remote_decode at once")
        if not ours.handoff:
            raise ParamsError(
                f"kv_transfer_params: do_remote_prefill without {KEY}.handoff: the KV is another "
                "connector's, or the router has not passed on all of the prefill's answer"
            )
        return RemoteParams(
            Wish.RECEIVE, ours.handoff, flags.remote_host or "", flags.remote_port or 0
        )
    return RemoteParams(Wish.SEND) if flags.do_remote_decode else NOTHING


def check_ticket(params: RemoteParams, ticket: Ticket) -> None:
    """Refuse a ticket beside another address: one of both was not meant for this request.

    Raises:
        ParamsError: they differ.
    """
    if params.host not in ("", ticket.host) or params.port not in (0, ticket.port):
        raise ParamsError("kv_transfer_params: remote_host and remote_port are not the ticket's")


def answer(
    ticket: Ticket,
    sealed: str,
    *,
    engine_id: str,
    request_id: str,
    blocks: Sequence[Sequence[int]],
    tensor_parallel: int,
) -> dict[str, Any]:
    """What a producer returns, to be passed on to a consumer as it is."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": ticket.host,
        "remote_port": ticket.port,
        "remote_block_ids": [list(group) for group in blocks],
        "remote_num_tokens": ticket.tokens,
        "tp_size": tensor_parallel,
        KEY: {"handoff": sealed},
    }
