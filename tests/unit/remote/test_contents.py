# SPDX-License-Identifier: Apache-2.0
"""Which differences between two engines' pages matter to a hand-over by themselves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllm_tiered_kv.identity.canonical import canonical
from vllm_tiered_kv.identity.layout_id import GroupLayout, LayoutIdentity
from vllm_tiered_kv.remote.pages import contents_of

SPEC = {"block_size": 16, "num_kv_heads": 4, "head_size": 64, "dtype": "bf16", "inner": [1]}
NOTHING = canonical({})


def layout(group: dict[str, Any] | None = None, **changes: Any) -> LayoutIdentity:
    fields: dict[str, Any] = {
        "kind": "FullAttentionSpec",
        "block_tokens": 16,
        "page_bytes": 4096,
        "heads": 4,
        "head_size": 64,
        "dtypes": ("bf16",),
        "window": None,
        "layers": ("a", "b"),
        "backends": ("CPU",),
        "kernel": "vec",
        "spec": canonical(SPEC),
        **(group or {}),
    }
    whole = LayoutIdentity(
        groups=(GroupLayout(**fields),),
        chunk_tokens=128,
        hash_tokens=16,
        cache_layout="LBHNC",
        backend_options=NOTHING,
        device="cpu",
        instruction_set="avx2",
        tensor_parallel=1,
        pipeline_parallel=1,
        decode_context_parallel=1,
        prefill_context_parallel=1,
        context_interleave=1,
        kv_replicas=1,
        environment=(),
    )
    return msgspec.structs.replace(whole, **changes)


@pytest.mark.parametrize(
    "other",
    [
        layout(chunk_tokens=256),
        layout(tensor_parallel=2, kv_replicas=2, rank=1),
        layout(pipeline_parallel=2),
        layout({"heads": 2, "page_bytes": 2048, "spec": canonical({**SPEC, "num_kv_heads": 2})}),
        layout({"layers": ("a",)}),
    ],
)
def test_what_is_compared_when_reads_are_planned(other: LayoutIdentity) -> None:
    assert contents_of(other) == contents_of(layout())


@pytest.mark.parametrize(
    "other",
    [
        layout(instruction_set="avx512"),
        layout(cache_layout="LBNHC"),
        layout(device="cuda 9.0"),
        layout(decode_context_parallel=2),
        layout(environment=(("A", "1"),)),
        layout({"dtypes": ("fp8",)}),
        layout({"head_size": 128}),
        layout({"kernel": "amx"}),
        layout({"backends": ("Other",)}),
        layout({"window": 128}),
        layout({"kind": "MLAAttentionSpec"}),
        layout({"spec": canonical({**SPEC, "inner": [2]})}),
    ],
)
def test_what_a_page_means(other: LayoutIdentity) -> None:
    assert contents_of(other) != contents_of(layout())
