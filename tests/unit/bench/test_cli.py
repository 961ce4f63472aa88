# SPDX-License-Identifier: Apache-2.0
"""``vllm-tiered-kv bench ab`` as it is typed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.unit.bench._server import Part, Refuse, SseServer, answered, scrape
from tests.unit.bench.test_runner import gone
from vllm_tiered_kv.bench.config import Experiment
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.cli.app import app, main

SMALL = (
    *("--workload", "cold", "--set", "workload.input_tokens=20"),
    *("--set", "workload.output_tokens=3", "--set", "sessions=12", "--set", "blocks=4"),
    *("--set", "resamples=100", "--set", "warmup=1", "--set", "settle=0"),
)


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["bench", "ab", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def pair() -> Iterator[tuple[str, ...]]:
    with SseServer(metrics=scrape) as one, SseServer() as two:
        yield ("--arm", f"none={one.url}", "--arm", f"ours [/b]={two.url}")


def test_two_servers_that_run_already(tmp_path: Path, pair: tuple[str, ...]) -> None:
    text = run(*pair, *SMALL, "--out", tmp_path, "--no-plots", "--slo-ttft-ms", "1000")
    for part in (
        *("Time to first token, ms", "goodput", "TTFT at most 1000 ms", "not reported"),
        *("Outputs against those of none", "100.0%", "tiered-kv: cpu", "ours [/b]"),
        "4 blocks: intervals from fewer than 10 tend to be too narrow.",
    ):
        assert part in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert [arm["answered"] for arm in report["arms"]] == [12, 12]
    assert not list(tmp_path.glob("*.png"))


def test_json_pictures_and_a_file(tmp_path: Path, pair: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "experiment.toml"
    file.write_text('seed = 3\nsessions = 12\nblocks = 4\n[workload]\nkind = "cold"\n')
    text = run(file, *pair, *SMALL, "--seed", "7", "--out", tmp_path / "out", "--json")
    report = json.loads(text)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["experiment"]["seed"] == 7
    assert report["agreements"][0]["same"] == 12
    assert len(list((tmp_path / "out").glob("*.png"))) == 4


def failing(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm-tiered-kv", "bench", "ab", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1


def test_mistakes_are_one_line(
    tmp_path: Path,
    pair: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        ((), "options: 0 of the two arms"),
        ((*pair, "--set", "sesions=3"), "nearest valid key is 'sessions'"),
        ((*pair, "--workload", "chatt"), "expected one of shared-prompt, chat"),
        ((*pair, "--slo-ttft-ms", "-5"), "slo.ttft_ms: -5.0 is not valid"),
        (("no.toml", *pair), "no.toml cannot be read"),
        ((*pair[:2], "--arm", "b=http://127.0.0.1:1", *SMALL, "--no-plots"), "cannot be reached"),
    ):
        failing(monkeypatch, *arguments)
        error = [line for line in capsys.readouterr().err.splitlines() if ":" in line]
        assert message in error[-1]
        assert error[-1].startswith("vllm-tiered-kv: ")


def test_a_folder_for_nothing_is_said_before_anything_runs(pair: tuple[str, ...]) -> None:
    with pytest.raises(BenchError, match="/proc cannot be written to"):
        run(*pair, *SMALL, "--out", "/proc", "--no-plots")


def test_what_cannot_be_written_is_shown(
    tmp_path: Path,
    pair: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "report.md").mkdir()
    failing(monkeypatch, *pair, *SMALL, "--out", tmp_path, "--no-plots")
    shown = capsys.readouterr()
    assert "Time to first token, ms" in shown.out
    assert shown.err.endswith(f"{tmp_path}/report.md: Is a directory\n")


def test_an_arm_that_refuses_everything_is_a_failure(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SseServer() as one, SseServer(lambda _: Refuse(404, "no such model")) as two:
        arms = ("--arm", f"none={one.url}", "--arm", f"ours={two.url}")
        failing(monkeypatch, *arms, *SMALL, "--set", "warmup=0", "--out", tmp_path, "--no-plots")
    shown = capsys.readouterr()
    assert "Time to first token, ms" in shown.out
    assert shown.err.endswith("vllm-tiered-kv: no request was answered by ours\n")


@pytest.mark.parametrize("name", ["aiohttp", "numpy", "matplotlib"])
def test_a_missing_package_is_said_in_one_sentence(
    name: str, tmp_path: Path, pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.util.find_spec

    def find(wanted: str, package: str | None = None) -> Any:
        return None if wanted == name else original(wanted, package)

    monkeypatch.setattr("importlib.util.find_spec", find)
    expected = f'bench needs {name}: pip install "vllm-tiered-kv[bench]"'
    with pytest.raises(BenchError, match=re.escape(expected)):
        run(*pair, *SMALL, "--out", tmp_path)
    if name == "matplotlib":
        run(*pair, *SMALL, "--out", tmp_path, "--no-plots")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from vllm_tiered_kv.cli.app import app\n"
        "try:\n    app(['bench', 'ab', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(*{'vllm', 'torch', 'matplotlib', 'numpy', 'aiohttp'} & sys.modules.keys())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_servers_and_reports_what_is_done(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The signal comes in the second block, from the server that is asked."""
    command: subprocess.Popen[str] | None = None

    def plan(request: dict[str, Any]) -> list[Part]:
        if len(server.requests) == 1 + 3 + 1 and command is not None:
            os.kill(command.pid, number)
        return answered(request)

    child = tmp_path / "child"
    arm = tmp_path / "arm.json"
    started = [sys.executable, "-m", "tests.unit.bench._server", "{port}", str(child)]
    arm.write_text(json.dumps({"name": "started", "processes": [{"command": started}]}))
    with SseServer(plan) as server:
        words = ["bench", "ab", "--arm", str(arm), "--arm", f"asked={server.url}", *SMALL]
        words += ["--no-plots", "--set", "load.concurrency=1"]
        command = subprocess.Popen(
            [sys.executable, "-m", "vllm_tiered_kv.cli", *words, "--out", str(tmp_path / "out")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Where tests run in the background, an interrupt may be ignored by inheritance.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        output, errors = command.communicate(timeout=120)
    assert command.returncode == 1
    assert "ended early: interrupted" in errors.splitlines()[-1]
    assert "Ended early, after 1 of 4 blocks: interrupted" in output
    assert gone([int(child.read_text())])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["blocks"] == 1
    assert report["ended_early"] == "interrupted"


def documented() -> list[list[str]]:
    """The commands that the documents and the examples show."""
    found = []
    for path in (ROOT / "docs" / "bench.md", ROOT / "docs" / "benchmarks.md", ROOT / "README.md"):
        text = path.read_text().replace("\\\n", " ")
        found += re.findall(r"^(?:\$ )?vllm-tiered-kv (bench ab .*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


class Stopped(Exception):
    """Instead of a run."""


def test_every_command_that_is_shown_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Experiment] = []

    def run(experiment: Experiment, *_: Any, **__: Any) -> None:
        ran.append(experiment)
        raise Stopped

    monkeypatch.setattr("vllm_tiered_kv.cli.bench._run", run)
    monkeypatch.chdir(ROOT)
    commands = documented()
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, Stopped), (words, done.output, done.exception)
    assert len(ran) == len(commands) >= 4
