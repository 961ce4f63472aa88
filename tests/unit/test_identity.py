# SPDX-License-Identifier: Apache-2.0
"""Digests: every ingredient counts, and nothing else does."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv import identity
from vllm_tiered_kv.identity import length, namespace
from vllm_tiered_kv.identity.canonical import Canonical, Unidentifiable, canonical, digest
from vllm_tiered_kv.identity.memory import FileKey
from vllm_tiered_kv.identity.sources import Plan, Source

DRAFT = identity.DraftIdentity(
    method="eagle",
    model=Canonical("{}"),
    dtype="bfloat16",
    cache_dtype="auto",
    quantization=None,
    options=Canonical("{}"),
)
SEMANTIC = identity.SemanticIdentity(
    vllm_version="0.32.0",
    architecture="LlamaForCausalLM",
    model=Canonical("{}"),
    model_options=Canonical("{}"),
    attention_type="decoder",
    dtype="bfloat16",
    quantization=None,
    quantization_config=Canonical("null"),
    rope=Canonical("{}"),
    max_model_len=None,
    sliding_window=None,
    sliding_window_disabled=False,
    attention_options=Canonical("{}"),
    cache_dtype="auto",
    cache_dtype_skip_layers=(),
    calculated_scales=False,
    cache_options=Canonical("{}"),
    engine_options=Canonical("{}"),
    multimodal=None,
    lora=None,
    draft=DRAFT,
    hash_algorithm="sha256",
    hash_seed="vllm-none-hash",
    environment=(),
    weights="ab" * 16,
)
GROUP = identity.GroupLayout(
    kind="FullAttentionSpec",
    block_tokens=16,
    page_bytes=4096,
    heads=2,
    head_size=32,
    dtypes=("bfloat16",),
    window=None,
    layers=("layers.0", "layers.1"),
    backends=("FlashAttentionBackend",),
    kernel="",
    spec=Canonical("{}"),
)
LAYOUT = identity.LayoutIdentity(
    groups=(GROUP,),
    chunk_tokens=128,
    hash_tokens=16,
    cache_layout="LBHNC",
    backend_options=Canonical("{}"),
    device="cuda 9.0",
    instruction_set="",
    tensor_parallel=1,
    pipeline_parallel=1,
    decode_context_parallel=1,
    prefill_context_parallel=1,
    context_interleave=1,
    kv_replicas=1,
    environment=(),
)

OTHER_DRAFT = {
    "method": "mtp",
    "model": Canonical('{"a":1}'),
    "dtype": "float16",
    "cache_dtype": "fp8",
    "quantization": "fp8",
    "options": Canonical('{"parallel_drafting":true}'),
    "weights": "cd" * 16,
}
OTHER_SEMANTIC = {
    "vllm_version": "0.33.0",
    "architecture": "Qwen3ForCausalLM",
    "model": Canonical('{"hidden_size":1}'),
    "model_options": Canonical('{"model_impl":"vllm"}'),
    "attention_type": "hybrid",
    "dtype": "float16",
    "quantization": "awq",
    "quantization_config": Canonical("{}"),
    "rope": Canonical('{"rope_theta":1.0}'),
    "max_model_len": 4096,
    "sliding_window": 1024,
    "sliding_window_disabled": True,
    "attention_options": Canonical('{"use_non_causal":true}'),
    "cache_dtype": "fp8",
    "cache_dtype_skip_layers": ("0",),
    "calculated_scales": True,
    "cache_options": Canonical('{"use_replayssm":true}'),
    "engine_options": Canonical('{"diffusion":1}'),
    "multimodal": Canonical("{}"),
    "lora": Canonical("{}"),
    "draft": None,
    "hash_algorithm": "xxhash",
    "hash_seed": "0",
    "environment": (("VLLM_CPU_INT4_W4A8", "0"),),
    "weights": "ef" * 16,
    "adapter": "01" * 16,
    "process": "02" * 16,
}
OTHER_GROUP = {
    "kind": "SlidingWindowSpec",
    "block_tokens": 32,
    "page_bytes": 8192,
    "heads": 1,
    "head_size": 64,
    "dtypes": ("float16",),
    "window": 1024,
    "layers": ("layers.1", "layers.0"),
    "backends": ("FlashInferBackend",),
    "kernel": "amx",
    "spec": Canonical('{"sink_len":4}'),
}
OTHER_LAYOUT = {
    "groups": (GROUP, GROUP),
    "chunk_tokens": 256,
    "hash_tokens": 32,
    "cache_layout": "LBNHC",
    "backend_options": Canonical('{"flash_attn_version":3}'),
    "device": "cuda 10.0",
    "instruction_set": "x86_64 avx2",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "decode_context_parallel": 2,
    "prefill_context_parallel": 2,
    "context_interleave": 16,
    "kv_replicas": 2,
    "environment": (("VLLM_PP_LAYER_PARTITION", "1,3"),),
    "format_version": identity.FORMAT_VERSION + 1,
    "rank": 0,
}
CASES: list[tuple[msgspec.Struct, dict[str, Any]]] = [
    (DRAFT, OTHER_DRAFT),
    (SEMANTIC, OTHER_SEMANTIC),
    (GROUP, OTHER_GROUP),
    (LAYOUT, OTHER_LAYOUT),
]


def changed(base: msgspec.Struct, field: str, value: object) -> identity.Namespace:
    """A namespace in which one ingredient differs from the usual one."""
    part = msgspec.structs.replace(base, **{field: value})
    semantic, layout = SEMANTIC, LAYOUT
    if isinstance(part, identity.DraftIdentity):
        semantic = msgspec.structs.replace(SEMANTIC, draft=part)
    elif isinstance(part, identity.GroupLayout):
        layout = msgspec.structs.replace(LAYOUT, groups=(part,))
    elif isinstance(part, identity.SemanticIdentity):
        semantic = part
    elif isinstance(part, identity.LayoutIdentity):
        layout = part
    return identity.Namespace(semantic, layout)


@pytest.mark.parametrize(("base", "others"), CASES, ids=lambda v: type(v).__name__)
def test_every_ingredient_has_a_case(base, others):
    assert set(others) == set(base.__struct_fields__)
    for field, value in others.items():
        assert value != getattr(base, field), field


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        pytest.param(base, field, value, id=f"{type(base).__name__}.{field}")
        for base, others in CASES
        for field, value in others.items()
    ],
)
def test_an_ingredient_changes_its_digest_and_no_other(base, field, value):
    usual, other = identity.Namespace(SEMANTIC, LAYOUT), changed(base, field, value)
    is_semantic = isinstance(base, (identity.SemanticIdentity, identity.DraftIdentity))
    assert (other.semantic_digest != usual.semantic_digest) is is_semantic
    assert (other.layout_digest != usual.layout_digest) is not is_semantic
    assert other.name != usual.name


def test_no_two_changes_meet():
    names = [changed(base, field, value).name for base, o in CASES for field, value in o.items()]
    assert len(set(names)) == len(names)


def test_swapping_two_values_is_a_change():
    one = msgspec.structs.replace(SEMANTIC, dtype="a", cache_dtype="b")
    two = msgspec.structs.replace(SEMANTIC, dtype="b", cache_dtype="a")
    assert one.digest != two.digest


def test_semantic_and_layout_digests_are_of_different_kinds():
    assert digest("semantic", SEMANTIC) == SEMANTIC.digest
    assert digest("layout", SEMANTIC) != SEMANTIC.digest


SCRIPT = """
from tests.unit.test_identity import LAYOUT, SEMANTIC
from vllm_tiered_kv.identity.canonical import canonical
print(SEMANTIC.digest, LAYOUT.digest)
print(canonical({"set": {"a", "b", "c", 1, 2.5, None}, **{k: 1 for k in {"x", "y", "z"}}}))
"""


def test_a_field_that_cannot_be_spelled_still_has_a_digest():
    odd = [msgspec.structs.replace(SEMANTIC, dtype=v) for v in ("\ud800", "\ud801", object())]
    digests = {one.digest for one in odd}
    assert len(digests) == 3
    assert all(one.digest in digests for one in odd)


def test_equal_in_processes_with_other_string_hashes():
    root = Path(__file__).parents[2]
    outputs = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=90,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert outputs.pop().split()[:2] == [SEMANTIC.digest, LAYOUT.digest]


# Canonical text


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: object = None


class Config:
    def __init__(self, **content):
        self.content = content

    def to_dict(self):
        return self.content


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    | st.binary(max_size=3)
    | st.sampled_from([*Colour, Fraction(1, 2), Path("a"), int, str])
)
keys = st.text("$abm", max_size=3) | st.integers(-1, 2)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def strict(value: object) -> object:
    """Equal exactly for values of equal types and content."""
    if isinstance(value, dict):
        return ("dict", frozenset((strict(k), strict(v)) for k, v in value.items()))
    if isinstance(value, list):
        return ("list", tuple(strict(v) for v in value))
    return (type(value).__name__, repr(value))


@given(values, values)
def test_equal_text_exactly_for_equal_values(one, two):
    assert (canonical(one) == canonical(two)) is (strict(one) == strict(two))


@given(st.dictionaries(keys, values, max_size=5), st.randoms(use_true_random=False))
def test_order_of_keys_does_not_matter(content, random):
    items = list(content.items())
    random.shuffle(items)
    assert canonical(dict(items)) == canonical(content)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (1, "1"),
        (None, "null"),
        (None, math.nan),
        (math.inf, math.nan),
        (b"ab", "ab"),
        ({1, 2}, [1, 2]),
        ({1: "a"}, {"1": "a"}),
        ({"$set": [1]}, {1}),
        ({"$bytes": "00"}, b"\0"),
        ({"$$a": 1}, {"$a": 1}),
        (Colour.RED, Colour.BLUE),
        (Colour.RED, 1),
        (Point(1, 2), Point(1, 3)),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Config(a=1), Config(a=2)),
        (1 << 80, str(1 << 80)),
        (1 << 80, (1 << 80) + 1),
        (Path("a"), "a"),
        (int, "builtins.int"),
    ],
)
def test_what_looks_alike_differs(one, two):
    assert canonical(one) != canonical(two)


def test_lists_and_tuples_are_alike():
    assert canonical([1, (2, 3)]) == canonical((1, [2, 3]))


def test_omitted_keys_are_left_out_at_every_depth():
    inner = {"keep": Config(skip=1, keep=2), "skip": object()}
    assert canonical({"a": [inner]}, omit={"skip"}) == canonical(
        {"a": [{"keep": Config(keep=2)}]}, omit=()
    )


@pytest.mark.parametrize(
    "value", [object(), print, lambda: None, {"a": object()}, "\ud800", {"\udfff": 1}]
)
def test_what_has_no_content_is_refused(value):
    with pytest.raises(Unidentifiable):
        canonical(value)


def test_endless_nesting_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(Unidentifiable, match="nests"):
        canonical(value)


# Namespaces


def known(**changes: Any) -> identity.Identity:
    semantic = msgspec.structs.replace(SEMANTIC, weights="", **changes)
    return identity.Identity(semantic, LAYOUT)


def test_established_weights_make_a_lasting_namespace():
    made = known(draft=None).namespace(identity.Established("aa" * 16))
    assert made.persistent
    assert made.reason is None
    assert made.semantic.weights == "aa" * 16
    assert made.semantic.process is None
    assert re.fullmatch(r"[0-9a-f]{32}-[0-9a-f]{32}", made.name)
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{8}", made.short)
    assert made == known(draft=None).namespace(identity.Established("aa" * 16))


def test_the_drafts_weights_count():
    one = known().namespace(identity.Established("aa" * 16, "bb" * 16))
    two = known().namespace(identity.Established("aa" * 16, "cc" * 16))
    assert one.persistent
    assert one.semantic.draft is not None
    assert one.semantic.draft.weights == "bb" * 16
    assert one.semantic_digest != two.semantic_digest


def test_a_draft_without_a_digest_is_not_kept():
    made = known().namespace(identity.Established("aa" * 16))
    assert not made.persistent
    assert "draft" in made.reason


def test_unestablished_weights_are_shared_with_no_other_process(monkeypatch):
    weights = identity.Unestablished("weights are streamed")
    here = known().namespace(weights)
    assert here == known().namespace(weights)
    assert not here.persistent
    assert here.reason == "weights are streamed"
    monkeypatch.setattr(namespace.os, "getpid", lambda: 1)
    assert known().namespace(weights).semantic_digest != here.semantic_digest


def test_a_reason_of_the_identity_makes_the_namespace_private():
    reasons = ("the hash seed is random",)
    made = msgspec.structs.replace(known(), reasons=reasons).namespace(
        identity.Established("aa" * 16, "bb" * 16)
    )
    assert made.reason == "the hash seed is random"
    assert made.semantic.process is not None


def test_each_rank_has_a_layout_of_its_own():
    made = identity.Namespace(SEMANTIC, LAYOUT)
    digests = {made.layout_digest, *(made.layout_for_rank(rank) for rank in range(8))}
    assert len(digests) == 9


def test_an_adapter_changes_what_the_numbers_mean():
    base = identity.Namespace(SEMANTIC, LAYOUT)
    one, two = base.with_adapter("aa" * 16), base.with_adapter("bb" * 16)
    assert len({base.semantic_digest, one.semantic_digest, two.semantic_digest}) == 3
    assert {one.layout_digest, two.layout_digest} == {base.layout_digest}
    assert one.with_adapter(None) == base


# Where the maximum length counts


@pytest.mark.parametrize(
    ("config", "depends"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, True),
        ({"text_config": {"rope_parameters": {"rope_type": "longrope"}}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, True),
        ({"rope_parameters": [{"rope_type": "dynamic"}]}, True),
        ({"model_type": "llama4_text"}, True),
        ({"text_config": {"model_type": "llama4_text"}}, True),
        ({}, False),
        ({"rope_theta": 10000.0}, False),
        ({"something": {"type": "dynamic"}}, False),
        *(
            ({"rope_parameters": {"rope_type": kind}}, False)
            for kind in ("default", "linear", "ntk", "llama3", "yarn", "deepseek_yarn", "mrope")
        ),
    ],
)
def test_where_the_maximum_length_counts(config, depends):
    assert length.depends_on_length(config, multimodal=False) is depends
    assert length.depends_on_length(config, multimodal=True)


def test_structs_are_frozen():
    for struct in (SEMANTIC, LAYOUT, GROUP, DRAFT, Plan(), Source("m", "auto")):
        with pytest.raises(AttributeError):
            setattr(struct, struct.__struct_fields__[0], None)
    assert hash(FileKey("p", 1, 2, 3, 4, 5)) == hash(FileKey("p", 1, 2, 3, 4, 5))
