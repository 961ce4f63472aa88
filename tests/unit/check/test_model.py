# SPDX-License-Identifier: Apache-2.0
"""What the tiers are said to hold of a model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.sizing import _configs as c
from vllm_tiered_kv.check.findings import Finding, Level
from vllm_tiered_kv.check.model import ModelReport, Served, judge
from vllm_tiered_kv.config import parse_options

LLAMA_8B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
WINDOWS = {
    **LLAMA_8B,
    "layer_types": ["sliding_attention", "full_attention"] * 16,
    "sliding_window": 1024,
}
STATES = {
    **LLAMA_8B,
    "layer_types": ["linear_attention", "full_attention"] * 16,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
CHUNKED = {
    **LLAMA_8B,
    "layer_types": ["chunked_attention", "full_attention"] * 16,
    "attention_chunk_size": 8192,
}


def asked(
    options: dict[str, Any], config: dict[str, Any] = LLAMA_8B, **served: Any
) -> tuple[ModelReport, list[Finding]]:
    return judge(parse_options(options), Served("llama", c.read(config), **served))


def told(*args: Any, **served: Any) -> list[tuple[str, Level, str]]:
    return [(one.what, one.level, one.says) for one in asked(*args, **served)[1]]


def test_a_chunk_and_what_the_tiers_hold() -> None:
    options = {
        "cpu": {"capacity": "32GiB"},
        "disk": {"path": "/x", "capacity": "320GiB"},
    }
    report, findings = asked(options, tp=2, block_tokens=16)
    assert (report.bytes_per_token, report.chunk_tokens) == (131_072, 16)
    assert report.chunk_bytes == 16 * 131_072
    assert [(tier.name, tier.tokens, tier.requests) for tier in report.tiers] == [
        ("cpu", 262_144, 8),
        ("disk", 2_621_440, 80),
    ]
    assert all(one.level is Level.OK for one in findings)
    assert "32 GiB hold 262,144 tokens, 8 requests of 32K" in [one.says for one in findings]


def test_the_cut_follows_block_size_and_option() -> None:
    for block, chunk, expected in ((None, None, 16), (128, None, 128), (16, 64, 64)):
        given = {"cpu": {"capacity": "32GiB"}, "chunk_tokens": chunk}
        report, findings = asked(given, block_tokens=block)
        assert report.chunk_tokens == expected
        assumed = any("give --block-size" in one.says for one in findings)
        assert assumed == (block is None)


def test_a_chunk_that_no_block_fits() -> None:
    options = {"cpu": {"capacity": "32GiB"}, "chunk_tokens": 100}
    for block, level in ((16, Level.ERROR), (None, Level.WARNING)):
        found = [one for one in told(options, block_tokens=block) if one[0] == "chunk_tokens"]
        ((_, found_level, says),) = found
        assert found_level is level
        assert says.startswith("100 is not a multiple of this model's block size, 16 tokens")


def test_a_tier_that_holds_less_than_one_request() -> None:
    says = "3.99 GiB hold 32,686 tokens, less than one request of 32K"
    capacity = {"cpu": {"capacity": 32_686 * 131_072}}
    assert ("cpu.capacity", Level.WARNING, says) in told(capacity)
    short = {**LLAMA_8B, "max_position_embeddings": 8192}
    assert "3.99 GiB hold 32,686 tokens, 3 requests of 8K" in [
        one[2] for one in told(capacity, short)
    ]
    just = {"cpu": {"capacity": 32_768 * 131_072}}
    assert ("cpu.capacity", Level.OK, "4 GiB hold 32,768 tokens, one request of 32K") in told(just)


def test_a_disk_that_holds_no_more_than_memory() -> None:
    for nbytes, is_small in (("32GiB", True), ("33GiB", False)):
        options = {"cpu": {"capacity": "32GiB"}, "disk": {"path": "/x", "capacity": nbytes}}
        small = [one for one in told(options) if "no more than the CPU tier" in one[2]]
        assert bool(small) == is_small


def test_what_an_engine_refuses_of_a_tier() -> None:
    options = {"cpu": {"capacity": "1MiB"}, "disk": {"path": "/x", "capacity": "1MiB"}}
    errors = {what: says for what, level, says in told(options) if level is Level.ERROR}
    assert errors.keys() == {"cpu.capacity", "disk.capacity"}
    assert all("cannot hold one chunk over all ranks" in says for says in errors.values())


REMOTE = {"listen": "127.0.0.1:0", "key_file": "/x"}


@pytest.mark.parametrize(
    ("config", "remote", "says"),
    [
        (WINDOWS, None, None),
        (WINDOWS, REMOTE, None),
        (WINDOWS, {**REMOTE, "peers": ["127.0.0.1:1"]}, "cannot be lent to peers yet"),
        (STATES, REMOTE, "recurrent states (Mamba, linear attention) cannot be handed over"),
        (CHUNKED, None, "chunked local attention"),
        (LLAMA_8B, REMOTE, None),
    ],
)
def test_what_an_engine_refuses_of_a_model(
    config: dict[str, Any], remote: dict[str, Any] | None, says: str | None
) -> None:
    report, findings = asked({"cpu": {"capacity": "32GiB"}, "remote": remote}, config)
    errors = [one.says for one in findings if one.level is Level.ERROR]
    assert len(errors) == (says is not None)
    assert says is None or says in errors[0]
    assert (report.chunk_tokens is None) == (config is not LLAMA_8B)
