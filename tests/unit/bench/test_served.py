# SPDX-License-Identifier: Apache-2.0
"""Tables of documents that ``bench ab`` measures."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks import served
from benchmarks.served import BENCHES, Bench
from tests.conftest import ROOT
from tests.unit.bench.test_reports import made
from vllm_tiered_kv.bench.config import Experiment
from vllm_tiered_kv.cli.app import app

BENCH = Bench(Path("README.md"), "What was asked:", ("no-connector",), slo=(80, 20))


def test_a_table_has_values_ratios_and_the_command() -> None:
    report, _ = made()
    lines = served.render(BENCH, "rag", report).splitlines()
    assert lines[0] == "What was asked:"
    assert lines[2].startswith("|  | plain |")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line[:2] == "| "}
    assert "| 100 (100 to 100) | 50.0 (50.0 to 50.0) |" in rows["time to first token, p50, ms"]
    assert sum(line.startswith("| ... of plain |  | 0.5 (0.5 to 0.5) |") for line in lines) == 2
    assert rows["those within 80 ms and 20 ms a token"].startswith(
        "| those within 80 ms and 20 ms a token | 0 (0 to 0) |"
    )
    assert rows["outputs equal to the first column's"].endswith("| 12 of 24 |")
    text = "\n".join(lines)
    shown = text.partition("```console\n")[2].partition("\n```")[0]
    assert shlex.split(shown.replace("\\\n", " ")) == BENCH.command("rag")
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_a_run_that_ended_early_is_no_table(tmp_path: Path) -> None:
    report, _ = made()
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(report))
    assert served.read(path) == report
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(report, ended_early="why")))
    with pytest.raises(ValueError, match="ended early: why"):
        served.read(path)


@pytest.mark.parametrize("name", BENCHES)
def test_each_command_is_one_and_has_a_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Experiment] = []

    def run(experiment: Experiment, *_: Any, **__: Any) -> None:
        ran.append(experiment)
        raise InterruptedError

    monkeypatch.setattr("vllm_tiered_kv.cli.bench._run", run)
    monkeypatch.chdir(ROOT)
    bench = BENCHES[name]
    done = CliRunner().invoke(app, bench.command(name)[1:])
    assert isinstance(done.exception, InterruptedError), (done.output, done.exception)
    (experiment,) = ran
    assert len(experiment.arms) == len(bench.arms)
    assert experiment.workload.__struct_config__.tag == name
    assert f"<!-- table:served_{name} -->" in (ROOT / bench.document).read_text()
