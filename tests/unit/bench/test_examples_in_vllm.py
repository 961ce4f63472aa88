# SPDX-License-Identifier: Apache-2.0
"""The example arms by vLLM's own parser: no option is misspelt or gone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.unit.bench.test_config import ARMS, arm_files, experiment_files
from vllm_tiered_kv.bench import decode
from vllm_tiered_kv.bench.commands import Command, commands, free_ports, ports_of
from vllm_tiered_kv.bench.config import Experiment
from vllm_tiered_kv.config import parse_options
from vllm_tiered_kv.plugin import register


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    register()
    return make_arg_parser(FlexibleArgumentParser())


def serving(experiment: Experiment) -> list[Command]:
    """What is started of its last arm and is ``vllm serve``."""
    arm = experiment.arms[-1]
    names = ports_of(arm)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    # Commands that are not here do not matter.
    mine = [process for process in arm.processes if not process.command]
    found = commands(arm, experiment, ports, Path("/kept"))
    return [each for each in found if each.name in {process.name for process in mine}]


@pytest.fixture
def any_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tiered_kv.bench.commands._executable", lambda name, _: name)


@pytest.mark.parametrize("path", arm_files(), ids=lambda path: path.stem)
def test_vllm_takes_every_arm(
    path: Path, parser: FlexibleArgumentParser, any_command: None
) -> None:
    raw = {"model": "some/model", "arms": [ARMS[0]]}
    started = serving(decode.experiment(raw, [decode.decode_arm(str(path))], str(path)))
    assert started
    for command in started:
        found = parser.parse_args(list(command.words[2:])).kv_transfer_config
        if found is None:
            assert path.stem == "no-connector"
            continue
        assert found.kv_connector in KVConnectorFactory._registry
        if found.kv_connector == "TieredKVConnector":
            assert parse_options(found.kv_connector_extra_config).cpu is not None


@pytest.mark.parametrize("path", experiment_files(), ids=lambda path: path.stem)
def test_vllm_takes_the_arguments_of_every_experiment(
    path: Path, parser: FlexibleArgumentParser, any_command: None
) -> None:
    raw = decode.with_settings(decode.read_options(path), ["model=some/model"])
    arms = [decode.decode_arm(str(arm)) for arm in arm_files()[-2:]]
    (command,) = serving(decode.experiment(raw, arms, str(path)))
    parser.parse_args(list(command.words[2:]))


def test_vllm_refuses_what_it_does_not_know(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["some/model", "--enable-prompt-token-detail", "1"])
    assert "unrecognized arguments" in capsys.readouterr().err
