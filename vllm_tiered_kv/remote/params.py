# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params`` of a hand-over: vLLM's names, so that routers need to know nothing of us.

They come from clients and routers. Two flags say what is wanted; of the rest only the ticket is
read, whose seal is checked elsewhere. ``docs/routers.md`` says what routers do with them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_tiered_kv.mistakes import REFUSED, explain
from vllm_tiered_kv.params import KEY, ParamsError, RequestParams
from vllm_tiered_kv.remote.ticket import Ticket


class Wish(enum.Enum):
    """What a request asks of us."""

    NOTHING = "nothing"
    SEND = "send"  # hand its KV over when it ends
    RECEIVE = "receive"  # go on from KV that was handed over


class _Flags(msgspec.Struct, frozen=True):
    """The keys we read.

    Where the producer is says the ticket: a router may have put an address of its own beside it, or
    have made floats of the numbers.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class RemoteParams(msgspec.Struct, frozen=True):
    """What a request's parameters say of a hand-over."""

    wish: Wish
    handoff: str = ""
    """The sealed ticket, where KV is to be received."""


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
    except REFUSED as error:
        why = explain(error, known, _Flags, within="kv_transfer_params")
        raise ParamsError(why) from None
    if flags.do_remote_prefill:
        if flags.do_remote_decode:
            raise ParamsError("kv_transfer_params: do_remote_prefill and do_remote_decode at once")
        if not ours.handoff:
            raise ParamsError(
                f"kv_transfer_params: do_remote_prefill without {KEY}.handoff: the KV is another "
                "connector's, or the router has not passed on all of the prefill's answer"
            )
        return RemoteParams(Wish.RECEIVE, ours.handoff)
    return RemoteParams(Wish.SEND) if flags.do_remote_decode else NOTHING


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


def refusal() -> dict[str, Any]:
    """What a producer returns that was asked and hands nothing over: the consumer computes.

    Without any answer some routers fail the request.
    """
    return {"do_remote_prefill": False, "do_remote_decode": False}
