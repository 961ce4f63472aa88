# SPDX-License-Identifier: Apache-2.0
"""Files and options, and what is said of mistakes in them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_kv.bench import decode
from vllm_tiered_kv.bench.commands import commands, free_ports, ports_of
from vllm_tiered_kv.bench.compare import prepare
from vllm_tiered_kv.bench.config import Arm, Experiment, Load, Mode, Process
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.workloads.kinds import Chat, Rag, Shared

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "bench"
ARMS = [{"name": "a", "url": "http://x"}, {"name": "b", "url": "http://y"}]


def parsed(raw: dict[str, Any]) -> Experiment:
    return decode.experiment({"arms": ARMS, **raw}, (), "file")


def message(raw: dict[str, Any]) -> str:
    with pytest.raises(BenchError) as error:
        parsed(raw)
    return str(error.value)


def test_defaults() -> None:
    found = parsed({})
    assert [arm.name for arm in found.arms] == ["a", "b"]
    assert found.workload == Shared()
    assert found.load == Load()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"sesions": 3},
            "sesions: unknown key (value 3); the nearest valid key is 'sessions'",
        ),
        ({"load": {"concurency": 3}}, "load.concurency: unknown key (value 3)"),
        ({"load": {"concurency": 3}}, "the nearest valid key is 'load.concurrency'"),
        ({"workload": {"kind": "chat", "turn": 2}}, "nearest valid key is 'workload.turns'"),
        ({"arms": [ARMS[0], {"name": "b", "procesess": []}]}, "arms[1].procesess: unknown key"),
        (
            {"arms": [{"name": "b", "processes": [{"kv_transfer": {}}]}]},
            "nearest valid key is 'arms[0].processes[0].kv_transfer_config'",
        ),
        ({"arms": [{"url": "http://x"}]}, "file: arms[0].name: required, but not given"),
        ({"load": {"mode": "ajar"}}, "file: load.mode: 'ajar' is not valid: expected one of "),
        ({"load": {"mode": "ajar"}}, "expected one of closed, open"),
        (
            {"workload": {"kind": "chatt"}},
            "workload.kind: 'chatt' is not valid: expected one",
        ),
        ({"workload": {"kind": "chatt"}}, "one of shared-prompt, chat, rag, agent, trace, cold"),
        ({"workload": {"turns": 3}}, "file: workload.kind: required, but not given"),
        ({"workload": {"kind": "trace"}}, "file: workload.path: required, but not given"),
        ({"sessions": "many"}, "file: sessions: 'many' is not valid: expected a whole number"),
        ({"sessions": 0}, "file: sessions: 0 is not valid: expected a whole number of at"),
        ({"load": {"rate": 0}}, "file: load.rate: 0 is not valid: expected a number above 0"),
        ({"slo": {"ttft_ms": -1}}, "file: slo.ttft_ms: -1 is not valid: expected a number above 0"),
        ({"env": {"A": 3}}, "file: env.A: 3 is not valid: expected text in quotes"),
        ({"arms": [{"name": "a\nb"}]}, "'a\\nb' is not valid: expected 1 to 60 characters"),
        ({"arms": [{"name": "a", "url": "ftp://x"}]}, "arms[0].url: 'ftp://x' is not valid"),
        ({"arms": [{"name": "a", "url": "ftp://x"}]}, 'an address like "http://127.0.0.1:8000"'),
        ({"arms": 3}, "file: arms: 3 is not valid: expected a list"),
        ({"arms": ARMS[:1]}, "file: 1 of the two arms that a comparison needs; add --arm"),
        ({"arms": [ARMS[0], ARMS[0]]}, "file: two arms are called 'a'"),
        ({"sessions": 3, "blocks": 4}, "file: 4 blocks of 3 sessions"),
        ({"prompts": {"first_token": 30_000}}, "prompts.first_token is above prompts.last_token"),
        ({"history": "own", "compare": "text"}, 'file: history = "own" needs token ids'),
        ({"arms": [{"name": "a"}, ARMS[1]]}, "arm 'a' serves a model, and none is named"),
    ],
)
def test_a_mistake_is_named(raw: dict[str, Any], expected: str) -> None:
    assert expected in message(raw)


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ({"processes": [{}, {}]}, "two processes have one name"),
        ({"entry": "router"}, "entry 'router' is none of server"),
        ({"scrape": ["decode"]}, "scrape 'decode' is neither a URL nor one of ['server']"),
        ({"processes": [{"command": ["x"], "serve": ["-v"]}]}, "server has a command of its own"),
        ({"processes": [{"serve": ["--host=0.0.0.0"]}]}, "--host=0.0.0.0: servers listen on a"),
        ({"processes": []}, "arms[0].processes: [] is not valid"),
    ],
)
def test_an_arm_that_contradicts_itself(arm: dict[str, Any], expected: str) -> None:
    assert expected in message({"model": "m", "arms": [{"name": "c", **arm}, *ARMS]})
    assert "--port: servers listen" in message(
        {"model": "m", "serve": ["--port", "80"], "arms": [{"name": "c"}, *ARMS]}
    )


def test_settings_over_a_file() -> None:
    raw = {"load": {"rate": 2.0}, "name": "x"}
    found = decode.with_settings(
        raw,
        ["load.mode=open", "sessions=70", "workload.kind=chat", "workload.think=0.5", "name=a=b"],
    )
    assert found == {
        "load": {"rate": 2.0, "mode": "open"},
        "sessions": 70,
        "workload": {"kind": "chat", "think": 0.5},
        "name": "a=b",
    }
    assert raw == {"load": {"rate": 2.0}, "name": "x"}
    experiment = parsed(found)
    assert experiment.load == Load(mode=Mode.OPEN, rate=2.0)
    assert experiment.workload == Chat(think=0.5)
    for wrong in ("sessions", "=3", "name.x=3"):
        with pytest.raises(BenchError, match=r"^--set "):
            decode.with_settings(raw, [wrong])


def test_arms_of_the_command_line(tmp_path: Path) -> None:
    assert decode.decode_arm("ours=http://h:1/") == Arm(name="ours", url="http://h:1/")
    path = tmp_path / "arm=.json"
    path.write_text('{"name": "x", "processes": [{"serve": ["-v"]}]}')
    assert decode.decode_arm(str(path)) == Arm(name="x", processes=(Process(serve=("-v",)),))
    with pytest.raises(BenchError, match=r"expected a \.toml or \.json file, or NAME=URL"):
        decode.decode_arm("ours")
    with pytest.raises(BenchError, match=r"--arm =http://h: name: '' is not valid"):
        decode.decode_arm("=http://h")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def fails(name: str, content: bytes | None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(BenchError) as error:
            decode.read_options(path)
        return str(error.value)

    assert "cannot be read: No such file" in fails("no.toml", None)
    assert "expected a .toml or .json file" in fails("x.yaml", b"")
    assert "bad.toml is not TOML: " in fails("bad.toml", b"a = = 3")
    assert "bad.json is not JSON: " in fails("bad.json", b"{")
    assert "binary.toml is not TOML: " in fails("binary.toml", b"a = '\xff'")
    assert "expected a table" in fails("list.json", b"[]")
    assert "larger than" in fails("large.json", b" " * (decode.MAX_FILE + 1))


def arm_files() -> list[Path]:
    return sorted((EXAMPLES / "arms").glob("*"))


def experiment_files() -> list[Path]:
    return sorted(path for path in EXAMPLES.glob("*") if path.is_file())


def test_there_are_examples_of_all_that_is_promised() -> None:
    assert {path.stem for path in arm_files()} >= {
        *("no-connector", "tiered-kv-cpu", "tiered-kv-cpu-disk", "lmcache", "offloading-gpu"),
        *("pd-nixl", "pd-tiered-kv"),
    }
    assert experiment_files()


@pytest.fixture
def any_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each command that examples name can be found."""
    for name in ("vllm", "vllm-router", "lmcache"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


@pytest.mark.parametrize("path", arm_files(), ids=lambda path: path.stem)
def test_every_example_of_an_arm_can_be_started(path: Path, any_command: Path) -> None:
    text = str(path)
    raw = {"model": "some/model", "serve": ["--enforce-eager"], "arms": [ARMS[0]]}
    experiment = decode.experiment(raw, [decode.decode_arm(text)], text)
    arm = experiment.arms[1]
    names = ports_of(arm)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    assert len(set(ports.values())) == len(ports)
    for command, process in zip(
        commands(arm, experiment, ports, Path("/kept")), arm.processes, strict=True
    ):
        line = shlex.join(command.words)
        assert "port}" not in line
        assert "{folder}" not in line
        assert command.ready.startswith("http://127.0.0.1:")
        if not process.command:
            assert command.words[1:5] == ("serve", "some/model", "--host", "127.0.0.1")
            assert "--enforce-eager" in command.words
        if process.kv_transfer_config is not None:
            sent = json.loads(command.words[command.words.index("--kv-transfer-config") + 1])
            assert sent["kv_connector"] == process.kv_transfer_config["kv_connector"]


@pytest.mark.parametrize("path", experiment_files(), ids=lambda path: path.stem)
def test_every_example_of_an_experiment_makes_a_workload(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    raw = decode.with_settings(decode.read_options(path), ["model=m"])
    arms = [decode.decode_arm(str(arm)) for arm in arm_files()[:2]]
    prepared = prepare(decode.experiment(raw, arms, str(path)))
    assert len(prepared.schedule.blocks) >= 10  # or intervals are too narrow
    assert prepared.requests > 0


def test_places_are_filled(any_command: Path) -> None:
    arm = Arm(
        name="x",
        processes=(
            Process(name="store", command=("lmcache", "{port}", "{port:http}", "{ports}", "{x}")),
            Process(
                name="server",
                serve=("--at={store.port:http}", "{folder}/a"),
                kv_transfer_config={
                    "port": "{store.port}",
                    "url": "tcp://h:{store.port}",
                    "deep": [
                        {"own": "{port}", "number": 3, "path": "{folder}", "model": "{model}"}
                    ],
                },
                env={"PORT": "{port:side}", "B": "own"},
            ),
        ),
    )
    experiment = Experiment(model="m", arms=(arm,), env={"A": "all", "B": "all"})
    names = ports_of(arm)
    assert set(names) == {("store", ""), ("store", "http"), ("server", ""), ("server", "side")}
    ports = {name: number for number, name in enumerate(names, 1000)}
    store, server = commands(arm, experiment, ports, Path("/kept"))
    assert store.words[0] == str(any_command / "lmcache")
    first, http = ports["store", ""], ports["store", "http"]
    assert store.words[1:] == (str(first), str(http), "{ports}", "{x}")
    own = ports["server", ""]
    assert server.words[:7] == (
        *(str(any_command / "vllm"), "serve", "m", "--host", "127.0.0.1", "--port", str(own)),
    )
    assert server.words[7:10] == (f"--at={http}", "/kept/a", "--kv-transfer-config")
    assert json.loads(server.words[10]) == {
        "port": first,
        "url": f"tcp://h:{first}",
        "deep": [{"own": own, "number": 3, "path": "/kept", "model": "m"}],
    }
    assert server.env == {"A": "all", "B": "own", "PORT": str(ports["server", "side"])}
    assert server.ready == f"http://127.0.0.1:{own}/health"
    assert server.url == f"http://127.0.0.1:{own}"


def test_a_port_of_nobody_and_a_command_that_is_nowhere(any_command: Path) -> None:
    arm = Arm(name="x", processes=(Process(command=("lmcache", "{other.port}")),))
    with pytest.raises(BenchError, match="names no process of it"):
        ports_of(arm)
    arm = Arm(name="x", processes=(Process(command=("nowhere",)),))
    with pytest.raises(BenchError, match="'nowhere' is not a command here"):
        commands(arm, Experiment(), {("server", ""): 1}, Path("/kept"))


def test_an_arms_own_folder_of_commands_comes_first(any_command: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "vllm").write_text("")
    (folder / "vllm").chmod(0o755)
    for where, expected in ((str(folder), folder), (None, any_command)):
        arm = Arm(name="x", bin=where)
        (command,) = commands(arm, Experiment(model="m"), {("server", ""): 1}, Path("/kept"))
        assert command.words[0] == str(expected / "vllm")


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml, plain = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('[workload]\nkind = "rag"\nshown = 4\n')
    plain.write_text('{"workload": {"kind": "rag", "shown": 4}}')
    assert decode.read_options(toml) == decode.read_options(plain)
    assert parsed(decode.read_options(toml)).workload == Rag(shown=4)
