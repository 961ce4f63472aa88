# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of us: the ``tiered_kv`` part of its ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from vllm_tiered_kv.gate import GateMode
from vllm_tiered_kv.mistakes import REFUSED, explain

KEY = "tiered_kv"


class RequestParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Per-request choices; the default is to use every tier."""

    store: bool = True
    load: bool = True
    gate: GateMode | None = None
    """What decides whether its prefix is loaded; None: the option ``gate``."""
    handoff: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """The ticket of what another engine hands over; see :mod:`.remote.params`."""


DEFAULT = RequestParams()


class ParamsError(ValueError):
    """The ``tiered_kv`` part cannot be read; the request runs with the defaults."""


def parse_params(raw: Mapping[str, Any] | None) -> RequestParams:
    """Read our part; every other key belongs to somebody else and is left alone.

    Raises:
        ParamsError: our part is there and is not what it must be.
    """
    if not isinstance(raw, Mapping) or KEY not in raw:
        return DEFAULT
    try:
        return msgspec.convert(raw[KEY], RequestParams)
    except REFUSED as error:
        path = f"kv_transfer_params.{KEY}"
        raise ParamsError(explain(error, raw[KEY], RequestParams, within=path)) from None
