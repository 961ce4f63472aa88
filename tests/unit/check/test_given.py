# SPDX-License-Identifier: Apache-2.0
"""What is given, and what is said of vLLM's part of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_tiered_kv.check.findings import Level
from vllm_tiered_kv.check.given import (
    MAX_BYTES,
    NotReadable,
    Ours,
    Policy,
    Role,
    TransferConfig,
    ours_of,
    read_given,
)

EXTRA = {"cpu": {"capacity": "1GiB"}}
GOOD = {
    "kv_connector": "TieredKVConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": EXTRA,
}


def multi(*children: dict[str, Any], **changes: Any) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {
        **GOOD,
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": extra,
        **changes,
    }


def told(ours: Ours, level: Level) -> dict[str, str]:
    return {one.what: one.says for one in ours.findings if one.level is level}


def test_text_a_file_and_standard_input_are_the_same(tmp_path: Path) -> None:
    text = json.dumps(GOOD)
    file = tmp_path / "kv.json"
    file.write_text(text)
    nothing = io.BytesIO()
    assert read_given(text, nothing) == GOOD
    assert read_given(f"\n {text}", nothing) == GOOD
    assert read_given(str(file), nothing) == GOOD
    assert read_given("-", io.BytesIO(text.encode())) == GOOD


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('"x"', "is not a JSON object"),
        ("/no/such.json", "/no/such.json cannot be read: No such file"),
        ("/tmp", "/tmp cannot be read: Is a directory"),
        ("a\0b", "cannot be read"),
        ("-", "standard input is not JSON"),
        ('{"a": ' * 100_000, "is not JSON"),
        ('{"a": "' + "x" * MAX_BYTES + '"}', "is longer than"),
    ],
)
def test_what_is_no_object_is_said(text: str, why: str) -> None:
    with pytest.raises(NotReadable) as error:
        read_given(text, io.BytesIO(b"\xff"))
    assert why in str(error.value)


def test_a_whole_configuration() -> None:
    ours = ours_of(GOOD, {})
    assert (ours.extra, ours.role) == (EXTRA, Role.BOTH)
    assert {one.what for one in ours.findings} == GOOD.keys() - {"kv_connector_extra_config"}
    assert all(one.level is Level.OK for one in ours.findings)


@pytest.mark.parametrize("extra", [EXTRA, {"cpus": {}}, {}])
def test_our_part_alone(extra: dict[str, Any]) -> None:
    ours = ours_of(extra, {})
    assert (ours.extra, ours.role) == (extra, None)
    assert not told(ours, Level.ERROR)


@pytest.mark.parametrize(
    ("change", "what", "says"),
    [
        ({"kv_rol": 1}, "kv_rol", "unknown key (value 1); the nearest valid key is 'kv_role'"),
        ({"cpu": {}}, "cpu", 'write {"kv_connector_extra_config": {"cpu": ...}}'),
        ({"kv_role": "both"}, "kv_role", "expected one of kv_both, kv_producer, kv_consumer"),
        ({"kv_role": "\ud800"}, "kv_role", "half of a character"),
        ({"kv_role": None}, "kv_role", "required, but not given"),
        ({"kv_load_failure_policy": "retry"}, "kv_load_failure_policy", "recompute, fail"),
        ({"kv_connector": "TieredKvConnector"}, "kv_connector", 'nearest is "TieredKVConnector"'),
        ({"kv_connector": "LMCache"}, "kv_connector", 'ours is "TieredKVConnector"'),
        ({"kv_connector": None}, "kv_connector", "uses no connector"),
        ({"kv_connector": 3}, "kv_connector", "3 is not valid: expected text in quotes"),
        ({"kv_connector_extra_config": 3}, "kv_connector_extra_config", "expected an object"),
    ],
)
def test_a_mistake_in_vllms_part(change: dict[str, Any], what: str, says: str) -> None:
    errors = told(ours_of({**GOOD, **change}, {}), Level.ERROR)
    assert errors.keys() == {what}
    assert says in errors[what]


def test_what_is_missing_in_vllms_part() -> None:
    ours = ours_of({"kv_connector_extra_config": EXTRA}, {})
    assert told(ours, Level.ERROR).keys() == {"kv_connector", "kv_role"}
    assert ours.extra == EXTRA


def test_vllms_default_policy_is_warned_about() -> None:
    for raw in ({**GOOD, "kv_load_failure_policy": "fail"}, {**GOOD}):
        if raw["kv_load_failure_policy"] == "recompute":
            del raw["kv_load_failure_policy"]
        warnings = told(ours_of(raw, {}), Level.WARNING)
        assert '"kv_load_failure_policy": "recompute"' in warnings["kv_load_failure_policy"]


def test_a_connector_by_its_module() -> None:
    by_module = {
        **GOOD,
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "vllm_tiered_kv.integrations.dynamo",
    }
    assert not told(ours_of(by_module, {"VLLM_PLUGINS": ""}), Level.ERROR)
    other = {**by_module, "kv_connector_module_path": "vllm_tiered_kv_of_others"}
    assert told(ours_of(other, {}), Level.ERROR).keys() == {"kv_connector"}


@pytest.mark.parametrize(("plugins", "known"), [("", False), ("a,b", False), ("a,tiered_kv", True)])
def test_a_connector_that_is_left_out_of_the_plugins(plugins: str, known: bool) -> None:
    errors = told(ours_of(GOOD, {"VLLM_PLUGINS": plugins}), Level.ERROR)
    assert ("kv_connector" not in errors) == known


def test_one_of_several_connectors() -> None:
    child = {**GOOD, "kv_role": "kv_producer", "kv_load_failure_policy": "fail"}
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    ours = ours_of(multi(other, child), {})
    assert (ours.extra, ours.role) == (EXTRA, Role.PRODUCER)
    assert not told(ours, Level.ERROR)
    assert not told(ours, Level.WARNING)  # the parent's policy counts
    parent = multi(other, child, kv_load_failure_policy="fail")
    assert "kv_load_failure_policy" in told(ours_of(parent, {}), Level.WARNING)


@pytest.mark.parametrize(
    ("children", "says"),
    [((), "none of them"), (("x",), "none of them"), ((GOOD, GOOD), "an engine can have one")],
)
def test_none_or_two_of_several_connectors(children: tuple[Any, ...], says: str) -> None:
    ours = ours_of(multi(*children), {})
    assert ours.extra is None
    (text,) = told(ours, Level.ERROR).values()
    assert says in text


def test_vllm_has_these_options() -> None:
    kv_transfer = pytest.importorskip("vllm.config.kv_transfer")
    fields = kv_transfer.KVTransferConfig.__dataclass_fields__
    assert set(TransferConfig.__struct_fields__) == set(fields)
    assert {role.value for role in Role} == set(kv_transfer.get_args(kv_transfer.KVRole))
    default = msgspec.convert({}, TransferConfig).kv_load_failure_policy
    assert default is Policy(fields["kv_load_failure_policy"].default)
