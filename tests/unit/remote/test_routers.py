# SPDX-License-Identifier: Apache-2.0
"""What routers send to a producer, and what they pass on to a consumer; ``docs/routers.md``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from vllm_tiered_kv.params import ParamsError, parse_params
from vllm_tiered_kv.remote.params import (
    NOTHING,
    RemoteParams,
    Wish,
    answer,
    parse_remote,
    refusal,
)
from vllm_tiered_kv.remote.ticket import VERSION, Ticket, seal, unseal

Params = dict[str, Any]

KEY = b"k" * 32
TICKET = Ticket(VERSION, "ab" * 16, "10.0.0.5", 7600, 17, 1234, b"p" * 32)
SAID = answer(
    TICKET,
    seal(TICKET, KEY),
    engine_id="prefill-0",
    request_id="cmpl-1",
    blocks=((1, 2, 3), (4,)),
    tensor_parallel=2,
)
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def by_json(params: Params) -> Params:
    return json.loads(json.dumps(params))  # type: ignore[no-any-return]


def by_floats(params: Params) -> Params:
    """JSON whose numbers are all floats: protobuf's ``Struct``."""
    return json.loads(json.dumps(params), parse_int=float)  # type: ignore[no-any-return]


def by_value(params: Params) -> Params:
    return params


class Router(NamedTuple):
    asked: Params
    """What prefill gets."""
    pass_on: Callable[[Params], Params]
    """What decode gets, of what prefill has answered."""


ROUTERS = {
    "vllm-router": Router(ASKED, by_json),
    "vllm-router, gRPC": Router(ASKED, by_floats),
    "llm-d, sidecar": Router(ASKED, by_json),
    "llm-d, sidecar with a source for offloaded KV": Router(
        {
            **ASKED,
            "remote_kv_source": {
                "kv_request_id": "5b1c",
                "remote_host": "10.0.0.9",
                "remote_port": 7777,
            },
        },
        by_json,
    ),
    "llm-d, coordinator": Router(
        ASKED,
        lambda said: {**by_json(said), "do_remote_decode": False, "do_remote_prefill": True},
    ),
    "production-stack": Router(
        ASKED, lambda said: {**by_json(said), "remote_host": "prefill.default.svc"}
    ),
    "Dynamo": Router(ASKED, by_json),
    "Ray Serve": Router(ASKED, by_value),
    "Ray Serve, tokens of the prompt": Router(
        ASKED, lambda said: {**said, "prompt_token_ids": [1, 2, 3]}
    ),
}
pytestmark = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


def read(raw: Params) -> RemoteParams:
    return parse_remote(raw, parse_params(raw))


def test_what_prefill_gets_asks_for_a_hand_over(router: Router) -> None:
    assert read(by_json(router.asked)) == RemoteParams(Wish.SEND)


def test_what_decode_gets_has_the_ticket(router: Router) -> None:
    params = read(router.pass_on(SAID))
    assert params.wish is Wish.RECEIVE
    assert unseal(params.handoff, KEY) == TICKET


def test_without_a_hand_over_decode_computes(router: Router) -> None:
    passed = router.pass_on(refusal())
    if passed["do_remote_prefill"]:
        with pytest.raises(ParamsError, match="without"):
            read(passed)
    else:
        assert read(passed) == NOTHING
