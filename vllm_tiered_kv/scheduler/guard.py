# SPDX-License-Identifier: Apache-2.0
"""Methods that only note something: a mistake of ours there costs a measurement, not an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from vllm_tiered_kv.scheduler.core import Core


class _HasCore(Protocol):
    _core: Core


_P = ParamSpec("_P")
_Owner = TypeVar("_Owner", bound=_HasCore)


def never_fatal(
    method: Callable[Concatenate[_Owner, _P], None],
) -> Callable[Concatenate[_Owner, _P], None]:
    """Count and log what the method raises, and go on."""

    @functools.wraps(method)
    def guarded(self: _Owner, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:  # noqa: BLE001
            self._core.bug("the gate")

    return guarded
