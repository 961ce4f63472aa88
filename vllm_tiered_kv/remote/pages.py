# SPDX-License-Identifier: Apache-2.0
"""What must be equal for one engine's pages to be of use in another one's."""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.identity.canonical import Canonical, digest
from vllm_tiered_kv.identity.layout_id import GroupLayout, LayoutIdentity

_SHARED_OUT = frozenset({"num_kv_heads", "page_size_padded"})
"""Fields of a KV cache spec that say how heads are shared out over ranks."""
_CUT = frozenset({"block_size"})
"""A field that says how tokens are cut into blocks; held against each other by themselves."""


class _Group(msgspec.Struct, frozen=True):
    kind: str
    head_size: int | None
    dtypes: tuple[str, ...]
    window: int | None
    backends: tuple[str, ...]
    kernel: str
    spec: object


class Contents(msgspec.Struct, frozen=True):
    """What a page's bytes mean.

    Which ranks have which layers and heads is left out, and how many tokens a block has: those are
    compared when it is planned what to read.
    """

    groups: tuple[_Group, ...]
    cache_layout: str
    backend_options: Canonical
    device: str
    instruction_set: str
    decode_context_parallel: int
    prefill_context_parallel: int
    context_interleave: int
    environment: tuple[tuple[str, str], ...]
    hash_tokens: int | None


def contents_of(layout: LayoutIdentity) -> str:
    """A digest of what a page's bytes mean, 32 hexadecimal digits."""
    return digest("pages", page_contents(layout))


def page_contents(layout: LayoutIdentity) -> Contents:
    """The same in words."""
    return Contents(
        groups=tuple(_group(group) for group in layout.groups),
        cache_layout=layout.cache_layout,
        backend_options=layout.backend_options,
        device=layout.device,
        instruction_set=layout.instruction_set,
        decode_context_parallel=layout.decode_context_parallel,
        prefill_context_parallel=layout.prefill_context_parallel,
        context_interleave=layout.context_interleave,
        environment=layout.environment,
        hash_tokens=layout.hash_tokens,
    )


def _group(group: GroupLayout) -> _Group:
    return _Group(
        kind=group.kind,
        head_size=group.head_size,
        dtypes=group.dtypes,
        window=group.window,
        backends=group.backends,
        kernel=group.kernel,
        spec=_without(msgspec.json.decode(group.spec), _SHARED_OUT | _CUT),
    )


def _without(value: object, names: frozenset[str]) -> object:
    if isinstance(value, dict):
        return {key: _without(each, names) for key, each in value.items() if key not in names}
    if isinstance(value, list):
        return [_without(each, names) for each in value]
    return value
