# SPDX-License-Identifier: Apache-2.0
"""The command, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.unit.check.test_folder import tree
from tests.unit.check.test_model import LLAMA_8B
from vllm_tiered_kv.check import bounded, folder, report
from vllm_tiered_kv.check.report import CheckReport
from vllm_tiered_kv.cli.app import app
from vllm_tiered_kv.config import ConfigError, parse_options
from vllm_tiered_kv.remote import keys

ROOT = Path(__file__).parents[3]


def run(*arguments: str | Path, given: str | None = None) -> Result:
    done = CliRunner().invoke(app, ["check", *map(str, arguments)], input=given)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def ask(config: dict[str, Any], *arguments: str | Path) -> CheckReport:
    done = run(json.dumps(config), *arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    found = msgspec.json.decode(done.stdout, type=CheckReport)
    assert done.exit_code == (found.errors > 0)
    return found


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    home = tmp_path / "all"
    home.mkdir(mode=0o700)
    keys.write(home / "fleet.key", keys.generate())
    return {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu": {"capacity": "64MiB"},
            "disk": {"path": str(home / "kv"), "capacity": "128MiB", "min_free": 1},
            "remote": {"listen": "127.0.0.1:0", "key_file": str(home / "fleet.key")},
        },
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def test_all_is_well_and_nothing_is_left(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    before = tree(tmp_path)
    done = run(json.dumps(config))
    assert done.exit_code == 0, done.output
    assert "0 errors, " in done.stdout
    whats = {"cpu.capacity", "disk.path", "disk.capacity", "remote.key_file", "remote.listen"}
    assert whats < {one.what for one in ask(config).findings}
    assert tree(tmp_path) == before


def test_a_file_and_standard_input(tmp_path: Path, config: dict[str, Any]) -> None:
    del config["kv_connector_extra_config"]["remote"]
    file = tmp_path / "kv.json"
    file.write_text(json.dumps(config))
    answers = [
        run(file, "--json").stdout,
        run("-", "--json", given=file.read_text()).stdout,
        run(file.read_text(), "--json").stdout,
    ]
    levels = [
        [(one["level"], one["what"]) for one in json.loads(each)["findings"]] for each in answers
    ]
    assert levels[0] == levels[1] == levels[2]


@pytest.mark.parametrize(
    "extra",
    [
        {"cpu": {"capcity": "1GiB"}},
        {"cpu": {"capacity": "1 QiB"}},
        {"cpu": "1GiB"},
        {},
        {"cpu": {"capacity": 1}, "gate": "sometimes"},
        {"cpu": {"capacity": 1}, "load_deadline": 0},
        {"disk": {"path": "kv", "capacity": 1}},
        {"disk": {"capacity": 1}},
        {"remote": {"listen": "x", "key_file": "/k"}},
    ],
)
def test_an_option_is_refused_as_the_engine_refuses_it(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options(extra)
    found = ask(extra)
    assert found.errors == 1
    says = {f"{one.what}: {one.says}" for one in found.findings}
    assert str(error.value) in says


def test_with_a_model(config: dict[str, Any], model: Path) -> None:
    del config["kv_connector_extra_config"]["remote"]
    found = ask(config, "--model", model, "--tp", "2", "--kv-dtype", "fp8")
    assert found.model is not None
    assert found.model.bytes_per_token == 65_536
    assert [tier.tokens for tier in found.model.tiers] == [1024, 2048]
    assert found.warnings >= 2
    text = run(json.dumps(config), "--model", model).stdout
    assert "less than one request of 32K" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{",), "what is given is not JSON"),
        (("/no/such/file",), "/no/such/file cannot be read"),
        (('{"cpu": {"capacity": 1}}', "--model", "/no/model"), "/no/model: no such file"),
        (("[]",), "is not a JSON object"),
    ],
)
def test_what_cannot_be_checked_is_said_in_one_line(
    arguments: tuple[str, ...], message: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert not done.stdout
    assert message in done.stderr
    assert done.stderr.startswith("vllm-tiered-kv: ")
    assert done.stderr.count("\n") == 1


def test_a_command_that_is_not_typed_right() -> None:
    assert run().exit_code == 2
    assert run("{}", "--tp", "0").exit_code == 2


def test_what_is_given_is_printed_as_it_is() -> None:
    done = run('{"cpu": {"capacity": 1, "[red]x[/]": "[bold]"}}')
    assert done.exit_code == 1
    assert "[red]x[/]" in done.stdout
    assert "[bold]" in done.stdout


def test_a_role_without_hand_overs(config: dict[str, Any]) -> None:
    del config["kv_connector_extra_config"]["remote"]
    config["kv_role"] = "kv_producer"
    says = [one.says for one in ask(config).findings if one.what == "kv_role"]
    assert any("there is no remote" in one for one in says)


def test_a_folder_that_hangs(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()
    monkeypatch.setattr(report, "FOLDER_SECONDS", 0.05)
    monkeypatch.setattr(folder, "look", lambda disk: over.wait(60))
    del config["kv_connector_extra_config"]["remote"]
    try:
        found = ask(config)
    finally:
        over.set()
    (says,) = (one.says for one in found.findings if one.what.startswith("disk"))
    assert "does not answer within 0.05 s" in says


def test_what_answers_in_time_counts() -> None:
    over = Event()
    try:
        found = bounded.answers({"a": lambda: 1, "b": lambda: over.wait(60) and 2}, 0.2)
    finally:
        over.set()
    assert found.get("b") is None
    assert bounded.answers({"a": lambda: 1, "b": lambda: 2}, 60) == {"a": 1, "b": 2}
    with pytest.raises(ZeroDivisionError):
        bounded.answers({"a": lambda: 1 / 0}, 60)


def test_neither_vllm_nor_torch_is_imported(config: dict[str, Any], model: Path) -> None:
    program = (
        "import sys\n"
        "from vllm_tiered_kv.cli.app import app\n"
        "try:\n"
        f"    app(['check', {json.dumps(config)!r}, '--model', {str(model)!r}])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(*{'vllm', 'torch', 'nixl', 'numpy', 'matplotlib'} & sys.modules.keys())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
