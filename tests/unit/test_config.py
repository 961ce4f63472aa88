# SPDX-License-Identifier: Apache-2.0
"""Options: what is accepted, and what each refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv import config
from vllm_tiered_kv.config import ConfigError, Size, check_capacity, format_size, parse_options
from vllm_tiered_kv.gate import GateMode
from vllm_tiered_kv.params import DEFAULT, ParamsError, RequestParams, parse_params


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("32GiB", 32 << 30),
        ("500GB", 500 * 10**9),
        (" 1.5 MiB ", 3 << 19),
        ("7kb", 7000),
        ("2Gi", 2 << 30),
        ("3G", 3 * 10**9),
        ("12", 12),
        ("12B", 12),
        (4096, 4096),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_options({"cpu": {"capacity": text}}).cpu.capacity == nbytes


@pytest.mark.parametrize(
    "value", ["", "GiB", "1 QiB", "-1GiB", "0", 0, -5, 1.5, True, None, [], "1e9", "9" * 400 + "GB"]
)
def test_a_size_that_is_none_names_key_and_value(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options({"cpu": {"capacity": value}})
    assert "cpu.capacity" in str(error.value)
    assert repr(value) in str(error.value)


DISK = {"path": "/mnt/kv", "capacity": "1GiB"}


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"cpu": {"capcity": "1GiB"}}, ["cpu.capcity", "'1GiB'", "'cpu.capacity'"]),
        ({"cpus": {"capacity": "1GiB"}}, ["cpus", "'cpu'"]),
        ({"cpu": {"capacity": 1}, "load_dedline": 3}, ["load_dedline", "3", "'load_deadline'"]),
        ({"cpu": "1GiB"}, ["cpu", "'1GiB'", "object"]),
        ({"cpu.capacity": "1GiB"}, ["cpu.capacity", '{"cpu": {"capacity": ...}}']),
        ({"capacity": "1GiB"}, ["capacity", '{"cpu": {"capacity": ...}}']),
        ({"cpu": {}}, ["cpu.capacity", "required"]),
        ({}, ["no tier", "cpu"]),
        ({"cpu": {"capacity": 1}, "store_generated": "yes"}, ["store_generated", "'yes'"]),
        (
            {"cpu": {"capacity": 1}, "gate": "sometimes"},
            ["gate", "'sometimes'", "always"],
        ),
        ({"cpu": {"capacity": 1}, "gates": "never"}, ["gates", "'never'", "'gate'"]),
        ({"cpu": {"capacity": 1}, "gate": True}, ["gate", "True"]),
        ({"cpu": {"capacity": 1}, "chunk_tokens": -16}, ["chunk_tokens", "-16"]),
        ({"cpu": {"capacity": 1}, "load_deadline": 0}, ["load_deadline", "0"]),
        ({"cpu": {"capacity": 1}, "load_deadline": "fast"}, ["load_deadline", "'fast'"]),
        ({"disk": {"capacity": 1}}, ["disk.path", "required"]),
        ({"disk": {"path": "kv", "capacity": 1}}, ["disk.path", "'kv'", "absolute"]),
        ({"disk": {**DISK, "high_water": 95}}, ["disk.high_water", "95"]),
        ({"disk": {**DISK, "low_water": 0.99}}, ["disk.low_water", "0.99", "0.95"]),
        ({"disk": {**DISK, "eviction": "LRU"}}, ["disk.eviction", "'LRU'", "lru, s3fifo, arc"]),
        ({"disk": {**DISK, "store_after": 99}}, ["disk.store_after", "99", "15"]),
        ({"disk": {**DISK, "min_tokens": -1}}, ["disk.min_tokens", "-1"]),
        ({"disk": {**DISK, "io_deadline": 0}}, ["disk.io_deadline", "0", "3600"]),
        ({"disk": {**DISK, "shard": True}}, ["disk.shard", "'disk.shared'"]),
        ({"cpu": "1GiB"}, ['write "cpu": {"capacity": ...}']),
        ({"cpu": {"size": 1}}, ["cpu.size", "valid keys are 'cpu.capacity', 'cpu.eviction'"]),
        ({"cpu": {"capacity": 1, "path": "/x"}}, ["cpu.path", "'disk.path'"]),
        ({"cpu": {"capacity": 1, "gate": "never"}}, ["cpu.gate", "nearest valid key is 'gate'"]),
        ({"disk.capacity": 1}, ['{"disk": {"capacity": ...}}']),
        ({"disk_capacity": 1}, ['{"disk": {"capacity": ...}}']),
        ({"kv_role": "kv_both"}, ["kv_role", "valid keys are 'cpu', 'disk'"]),
        ({"cpu": {"capacity": "-1GiB"}}, ["'-1GiB'", "positive"]),
        ({"cpu": {"capacity": 1}, "gate": True}, ["measured, always, never"]),
        ({"cpu": {"capacity": 1}, "chunk_tokens": "16"}, ["whole number, without quotes"]),
        ({"cpu": {"capacity": 1}, "load_deadline": "3s"}, ["number, without quotes and unit"]),
        ({"cpu": {"capacity": 1}, "store_generated": "true"}, ["true or false, without quotes"]),
    ],
)
def test_each_mistake_is_one_error_that_names_it(raw: dict, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options(raw)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@given(st.integers(1, 1 << 59))
def test_a_byte_count_is_itself(nbytes: int) -> None:
    assert Size.parse(nbytes) == Size.parse(str(nbytes)) == nbytes


def test_capacity_is_checked_against_a_chunk_and_against_the_machine() -> None:
    check_capacity("cpu.capacity", 100, floor=100, limit=100)
    with pytest.raises(ConfigError, match=r"cpu\.capacity: 99 B .*100 B"):
        check_capacity("cpu.capacity", 99, floor=100, limit=1000)
    with pytest.raises(ConfigError, match=r"cpu\.capacity: 2 KiB .*1 KiB"):
        check_capacity("cpu.capacity", 2048, floor=1, limit=1024)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    unlimited = tmp_path / "max"
    unlimited.write_text("max\n")
    monkeypatch.setattr(
        config, "_cgroup_limit_files", lambda: [tmp_path / "absent", unlimited, limit]
    )
    assert config.memory_limit() == 1048576


@pytest.mark.parametrize(
    ("limit", "used", "dropped"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_below_a_containers_limit_its_own_use_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, dropped: str
) -> None:
    monkeypatch.setattr(config, "_cgroup_limit_files", lambda: [tmp_path / "absent", file])
    file = tmp_path / limit
    file.write_text("1048576\n")
    assert config.available_memory() > 1048576  # what is used is not known
    (tmp_path / used).write_text("1000000\n")
    assert config.available_memory() == 48576
    (tmp_path / "memory.stat").write_text(f"anon 7\n{dropped} 400000\n")
    assert config.available_memory() == 448576
    (tmp_path / used).write_text("2000000\n")
    assert config.available_memory() == 0


def test_format_size() -> None:
    assert [format_size(n) for n in (1, 1024, 3 << 19, 1 << 40)] == [
        "1 B",
        "1 KiB",
        "1.50 MiB",
        "1 TiB",
    ]


def test_request_params() -> None:
    assert parse_params(None) == DEFAULT
    assert parse_params({"do_remote_prefill": True}) == DEFAULT
    assert parse_params({"tiered_kv": {"store": False}}) == RequestParams(store=False)
    wanted = RequestParams(gate=GateMode.ALWAYS)
    assert parse_params({"tiered_kv": {"gate": "always"}}) == wanted


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"stor": False}, ".stor: unknown key (value False); the nearest valid key is"),
        ({"stor": False}, "'kv_transfer_params.tiered_kv.store'"),
        ({"keep": 1}, "the valid keys are 'kv_transfer_params.tiered_kv.store', "),
        ({"store": "no"}, ".store: 'no' is not valid: expected true or false, without quotes"),
        ({"gate": "alway"}, ".gate: 'alway' is not valid: expected one of measured, always, never"),
        *((bad, f": {bad!r} is not valid: expected an object") for bad in (3, "x", None, [1])),
    ],
)
def test_bad_request_params_name_our_part_only(bad: object, expected: str) -> None:
    with pytest.raises(ParamsError) as error:
        parse_params({"tiered_kv": bad, "other": object()})
    assert str(error.value).startswith("kv_transfer_params.tiered_kv")
    assert expected in str(error.value)


@pytest.mark.parametrize("bad", [{"\ud800": 1}, {"gate": "\ud800"}, "\ud800", {"store": "\ud800"}])
def test_half_of_a_character_is_a_mistake_like_others(bad: object) -> None:
    with pytest.raises(ParamsError, match="half of a character") as error:
        parse_params({"tiered_kv": bad})
    assert str(error.value).encode()
    with pytest.raises(ConfigError) as refused:
        parse_options({"cpu": {"capacity": 1, "eviction": "\ud800"}, "gate": bad})
    assert str(refused.value).encode()
    with pytest.raises(ConfigError, match="unknown key"):
        parse_options({"cpu": {"capacity": 1, "\ud800": 1}})


@pytest.mark.parametrize("bad", [{"x" * 10**6: 1}, {"a\nb": "y" * 10**6}, {"handoff": "z" * 10**6}])
def test_what_a_request_says_does_not_fill_the_log(bad: object) -> None:
    with pytest.raises(ParamsError) as error:
        parse_params({"tiered_kv": bad})
    assert len(str(error.value)) < 2000
    assert "\n" not in str(error.value)
