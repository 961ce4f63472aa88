# SPDX-License-Identifier: Apache-2.0
"""Blocks on real servers, in turns, and processes that are always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.conftest import ROOT
from tests.unit.bench._server import Break, Part, Refuse, SseServer, answered, scrape
from vllm_tiered_kv.bench import servers
from vllm_tiered_kv.bench.compare import compare, prepare
from vllm_tiered_kv.bench.config import (
    Arm,
    Experiment,
    History,
    Load,
    Mode,
    Placement,
    Process,
    Prompts,
)
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.group import ProcessGroup
from vllm_tiered_kv.bench.report import Report
from vllm_tiered_kv.bench.runner import BlockResult, Runner
from vllm_tiered_kv.bench.servers import running
from vllm_tiered_kv.bench.workloads.kinds import Chat, Cold


class Quiet:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.done = 0

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def advance(self) -> None:
        self.done += 1


def experiment(arms: tuple[Arm, ...], **changes: Any) -> Experiment:
    base: dict[str, Any] = {
        "workload": Cold(input_tokens=20, output_tokens=3),
        "load": Load(concurrency=2),
        "prompts": Prompts(first_token=1, last_token=99),
        "sessions": 12,
        "warmup": 2,
        "blocks": 4,
        "resamples": 100,
        "request_timeout": 20.0,
        "settle": 0.0,
    }
    return Experiment(**{**base, "arms": arms, **changes})


def play(setting: Experiment, output: Path) -> list[tuple[BlockResult, ...]]:
    runner = Runner(setting, prepare(setting).schedule, output, Quiet())
    with contextlib.closing(runner.results()) as results:
        return list(results)


def report_of(setting: Experiment, output: Path) -> Report:
    return compare(prepare(setting), output, Quiet(), ("bench",))[0]


def test_arms_get_the_same_requests_in_turns(tmp_path: Path) -> None:
    seen: list[str] = []
    with SseServer(seen=seen, name="a") as one, SseServer(seen=seen, name="b") as two:
        setting = experiment((Arm(name="a", url=one.url), Arm(name="b", url=two.url)))
        prepared = prepare(setting)
        watch = Quiet()
        report, found = compare(prepared, tmp_path, watch, ("bench",))
    assert watch.done == prepared.requests == 28
    prompts = [sorted(tuple(request["prompt"]) for request in s.requests) for s in (one, two)]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 14
    # Never both at once: whole blocks of three, behind the warm-ups of two.
    runs = [(name, len(list(group))) for name, group in groupby(seen)]
    orders = ["ab"[arm] for order in prepared.schedule.orders for arm in order]
    expected = [*"aabb", *(name for name in orders for _ in range(3))]
    assert runs == [(name, len(list(group))) for name, group in groupby(expected)]
    assert all(server.most <= 2 for server in (one, two))
    assert [arm.requests for arm in report.arms] == [12, 12]
    assert report.agreements[0].same == report.agreements[0].compared == 12
    assert report.blocks == 4
    assert report.ended_early is None
    assert {record.arm for record in found[1].records} == {"b"}


def test_a_closed_loop_keeps_so_many_under_way(tmp_path: Path) -> None:
    all_here = threading.Barrier(3)

    def plan(request: dict[str, Any]) -> list[Part]:
        all_here.wait(20)  # nobody goes on before three are here
        return answered(request)

    with SseServer(plan) as server:
        arms = (Arm(name="a", url=server.url), Arm(name="b", url=server.url))
        setting = experiment(arms, load=Load(concurrency=3), warmup=0)
        results = play(setting, tmp_path)
    assert server.most == 3
    assert all(r.answer is not None for block in results for each in block for r in each.records)


def test_an_open_loop_waits_for_nobody(tmp_path: Path) -> None:
    """All sessions of a block arrive while none has been answered."""
    all_here = threading.Barrier(12)

    def plan(request: dict[str, Any]) -> list[Part]:
        all_here.wait(20)
        return answered(request)

    with SseServer(plan) as server:
        arms = (Arm(name="a", url=server.url), Arm(name="b", url=server.url))
        load = Load(mode=Mode.OPEN, rate=1000.0)
        results = play(experiment(arms, load=load, warmup=0, blocks=1), tmp_path)
    assert server.most == 12
    for record in (record for block in results for each in block for record in each.records):
        assert record.answer is not None
        assert record.late >= 0


def chat(server: SseServer, history: History, path: Path) -> list[dict[str, Any]]:
    arms = (Arm(name="a", url=server.url), Arm(name="b", url=server.url))
    workload = Chat(system_tokens=5, turns=3, input_tokens=4, output_tokens=3, think=0.0)
    setting = experiment(arms, workload=workload, history=history, sessions=1, blocks=1, warmup=0)
    play(setting, path)
    return server.requests[:3]


def test_a_conversation_goes_on_with_made_up_answers_or_with_its_own(tmp_path: Path) -> None:
    with SseServer() as server:
        first, second, third = (r["prompt"] for r in chat(server, History.REPLAYED, tmp_path))
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    with SseServer() as server:
        asked = chat(server, History.OWN, tmp_path)
    assert asked[0]["prompt"] == first
    base, count = sum(first), asked[0]["max_tokens"]
    own = [(base + i) % 1000 for i in range(count)]
    assert asked[1]["prompt"][len(first) :][:count] == own
    assert asked[1]["prompt"][len(first) + count :] == second[len(first) + count :]


def test_failures_are_counted_by_arm_and_kind(tmp_path: Path) -> None:
    def sometimes(request: dict[str, Any]) -> list[Part] | Refuse:
        return Refuse(503, "busy") if sum(request["prompt"]) % 2 else answered(request)

    with SseServer(metrics=scrape) as good, SseServer(sometimes) as bad:
        arms = (Arm(name="good", url=good.url), Arm(name="bad", url=bad.url))
        report = report_of(experiment(arms, warmup=0, sessions=24), tmp_path)
    whole, part = report.arms
    assert (whole.requests, whole.answered, whole.failures) == (24, 24, ())
    assert 0 < part.answered < part.requests == 24
    (failures,) = part.failures
    assert (failures.kind, failures.count) == ("refused", 24 - part.answered)
    assert failures.example == "HTTP 503: busy"
    assert any("bad: " in note and "requests failed" in note for note in report.notes)
    (agreed,) = report.agreements
    assert (agreed.compared, agreed.not_compared) == (part.answered, failures.count)
    tiers = {hit.tier: hit for hit in whole.hits}
    assert tiers["tiered-kv: cpu"].share.value == pytest.approx(0.5)
    assert tiers["device"].share.value == pytest.approx(0.1)
    assert tiers["device"].tokens == pytest.approx(0.1 * (whole.prompt_tokens or 0))
    assert {hit.tier: hit.tokens for hit in part.hits}["device"] is None


def test_other_outputs_are_found(tmp_path: Path) -> None:
    def other(request: dict[str, Any]) -> list[Part]:
        return answered(request, shift=sum(request["prompt"]) % 2)

    with SseServer() as one, SseServer(other) as two:
        arms = (Arm(name="a", url=one.url), Arm(name="b", url=two.url))
        report = report_of(experiment(arms, sessions=24), tmp_path)
    (agreed,) = report.agreements
    assert agreed.compared == agreed.by_tokens == 24
    assert 0 < agreed.same < 24
    first = agreed.differences[0]
    assert (first.place, int(first.actual) - int(first.expected)) == (0, 1)


def test_a_server_that_refuses_everything_ends_the_run_at_once(tmp_path: Path) -> None:
    with SseServer() as one, SseServer(lambda request: Refuse(404, "no such model")) as two:
        arms = (Arm(name="a", url=one.url), Arm(name="b", url=two.url))
        with pytest.raises(BenchError, match=r"b: every request of the warm-up failed.*no such"):
            report_of(experiment(arms), tmp_path)
    assert len(one.requests) == 2


def served(*children: Path, **options: Any) -> Process:
    """A server of the tests, as a process of its own, with a child for each path."""
    command = (sys.executable, "-m", "tests.unit.bench._server", "{port}", *map(str, children))
    return Process(command=command, env={"PYTHONPATH": str(ROOT)}, **options)


def gone(pids: list[int]) -> bool:
    """Whether all of them have ended, as a kill takes a moment to."""
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[list[int]]:
    """Of processes that the test lets start, ended if the code under test does not."""
    found: list[int] = []
    yield found
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_process_is_started_asked_and_ended_with_its_children(
    tmp_path: Path, pids: list[int]
) -> None:
    child = tmp_path / "child"
    arm = Arm(name="Ours & co", processes=(served(child),), scrape=("server",))
    setting = experiment((arm,))
    with running(arm, setting, tmp_path / "out") as target:
        (process,) = target.processes
        pids += [process.pid, int(child.read_text())]
        assert all(map(alive, pids))
        assert os.getpgid(pids[1]) == pids[0]
        assert target.url.startswith("http://127.0.0.1:")
        assert target.scrape == (f"{target.url}/metrics",)
        log = tmp_path / "out" / "logs" / "0-ours-co-server.log"
        assert log.read_text() == "ready\n"
        assert log.stat().st_mode & 0o777 == 0o600
        kept = tmp_path / "out" / "kept" / "0-ours-co"
        assert list(kept.iterdir()) == []
        target.check()
    assert gone(pids)
    assert not kept.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_processes_are_ended_whatever_happens(
    tmp_path: Path, pids: list[int], error: type[BaseException]
) -> None:
    arm = Arm(name="a", processes=(served(), served(name="second")))

    def fail() -> None:
        with running(arm, experiment((arm,)), tmp_path) as target:
            pids.extend(process.pid for process in target.processes)
            raise error

    with pytest.raises(error):
        fail()
    assert len(pids) == 2
    assert gone(pids)


def test_a_group_is_killed_even_when_the_wait_for_it_is_interrupted(
    tmp_path: Path, pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = Arm(name="a", processes=(served(),))

    def interrupt() -> None:
        with running(arm, experiment((arm,)), tmp_path) as target:
            (process,) = target.processes
            pids.append(process.pid)
            inner = process._group.leader
            wait = inner.wait

            def interrupted(timeout: float | None = None) -> int:
                monkeypatch.setattr(inner, "wait", wait)
                raise KeyboardInterrupt

            monkeypatch.setattr(inner, "wait", interrupted)
            monkeypatch.setattr(inner, "terminate", lambda: None)

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert gone(pids)


def test_a_group_that_stands_still_hears_that_it_is_to_end(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    group = ProcessGroup([sys.executable, "-c", code], tmp_path / "log", {})
    try:
        while "up" not in group.tail() and group.status is None:
            time.sleep(0.01)
        group.pause()
    finally:
        group.stop(60.0)
    assert group.status == 3


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (
            Process(command=(sys.executable, "-c", "print('no room'); raise SystemExit(3)")),
            "no room",
        ),
        (Process(command=(sys.executable, "-c", "raise SystemExit(3)")), "ended with status 3"),
        (served(ready="http://127.0.0.1:{port}/never"), "was not ready after 2 s"),
        (Process(command=("/dev/null",)), "is not a command here"),
    ],
)
def test_a_server_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: Process, message: str
) -> None:
    started = []
    popen = servers.subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(servers.subprocess, "Popen", start)
    arm = Arm(name="a", processes=(process,))
    setting = experiment((arm,), start_timeout=2.0)
    with pytest.raises(BenchError, match=message), running(arm, setting, tmp_path):
        pass
    assert gone([each.pid for each in started])


def test_who_does_not_start_beside_another_may_need_the_machine_alone(tmp_path: Path) -> None:
    fails = Process(command=(sys.executable, "-c", "raise SystemExit(3)"))
    arms = (Arm(name="a", processes=(served(),)), Arm(name="b", processes=(fails,)))
    with pytest.raises(BenchError, match=r"b did not start beside a; .* --one-at-a-time\. .*3;"):
        play(experiment(arms), tmp_path)
    with pytest.raises(BenchError, match=r"^server ended with status 3;"):
        play(experiment(arms[::-1]), tmp_path)


@pytest.mark.parametrize("command", [(sys.executable, "-c", "raise SystemExit(3)"), ("/dev/null",)])
def test_what_an_arm_needs_is_said_where_it_does_not_start(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    arm = Arm(name="a", needs="a GPU", processes=(Process(command=command),))
    said = r"arm 'a' needs a GPU: .*(status 3|not a command)"
    with pytest.raises(BenchError, match=said), running(arm, experiment((arm,)), tmp_path):
        pass


def test_a_server_that_is_lost_ends_the_run_with_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after the second block; two blocks are reported."""
    arms = (Arm(name="a", processes=(served(),)), Arm(name="b", processes=(served(),)))
    setting = experiment(arms)
    original = Runner._run

    def run(self: Runner, target: Any, model: str, block: Any) -> BlockResult:
        if block.number == 2:
            os.kill(target.processes[0].pid, signal.SIGKILL)
            target.processes[0]._group.leader.wait(20)
        return original(self, target, model, block)

    monkeypatch.setattr(Runner, "_run", run)
    report = report_of(setting, tmp_path)
    assert report.blocks == 2
    assert report.ended_early is not None
    assert "server ended with status -9" in report.ended_early
    assert any(note.startswith("Ended early, after 2 of 4 blocks") for note in report.notes)
    assert [arm.requests for arm in report.arms] == [6, 6]


def test_a_server_of_others_that_is_lost_ends_the_run_as_well(tmp_path: Path) -> None:
    def two_blocks(request: dict[str, Any]) -> list[Part] | Break:
        return answered(request) if len(two.requests) <= 2 + 2 * 3 else Break([])

    with SseServer() as one, SseServer(two_blocks) as two:
        arms = (Arm(name="a", url=one.url), Arm(name="b", url=two.url))
        report = report_of(experiment(arms), tmp_path)
    assert report.blocks == 2
    assert (report.ended_early or "").startswith("b has answered nothing in block 3; the first: b")
    assert [arm.answered for arm in report.arms] == [6, 6]


def test_a_key_goes_with_requests_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SseServer(metrics=scrape) as server:
        arms = (Arm(name="a", url=server.url), Arm(name="b", url=server.url))
        setting = experiment(arms, api_key_env="BENCH_TEST_KEY")
        monkeypatch.delenv("BENCH_TEST_KEY", raising=False)
        with pytest.raises(BenchError, match="BENCH_TEST_KEY is not in the environment"):
            prepare(setting)
        monkeypatch.setenv("BENCH_TEST_KEY", "s3cret")
        report = report_of(setting, tmp_path)
    assert server.keys == {
        "/v1/models": {"Bearer s3cret"},
        "/v1/completions": {"Bearer s3cret"},
        "/metrics": {None},
    }
    assert b"s3cret" not in msgspec.json.encode(report)


def test_an_interrupt_before_any_block_leaves_nothing(
    tmp_path: Path, pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Runner, target: Any, model: str, block: Any) -> BlockResult:
        pids.append(target.processes[0].pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "_run", run)
    arms = (Arm(name="a", processes=(served(),)), Arm(name="b", processes=(served(),)))
    with pytest.raises(KeyboardInterrupt):
        report_of(experiment(arms), tmp_path)
    assert pids
    assert gone(pids)


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm is started anew in each round, warmed up again, and alone."""
    up: list[str] = []
    most = 0
    original = running

    @contextlib.contextmanager
    def watched(arm: Arm, *rest: Any) -> Iterator[Any]:
        nonlocal most
        with original(arm, *rest) as target:
            up.append(arm.name)
            most = max(most, len(up))
            yield target
            up.remove(arm.name)

    monkeypatch.setattr("vllm_tiered_kv.bench.runner.running", watched)
    arms = (Arm(name="a", processes=(served(),)), Arm(name="b", processes=(served(),)))
    setting = experiment(arms, placement=Placement.ONE_AT_A_TIME, rounds=2)
    prepared = prepare(setting)
    watch = Quiet()
    report, found = compare(prepared, tmp_path, watch, ("bench",))
    assert most == 1
    assert sum(stage.startswith("starting") for stage in watch.stages) == 4
    assert sum(stage.startswith("warm-up") for stage in watch.stages) == 4
    assert watch.done == prepared.requests == 2 * (12 + 2 * 2)
    assert [[block.block for block in arm.blocks] for arm in found] == [[0, 1, 2, 3]] * 2
    assert report.agreements[0].same == 12
    assert report.arms[0].commands[0][-3:-1] == ("-m", "tests.unit.bench._server")


def test_a_model_that_is_served_may_go_without_saying(tmp_path: Path) -> None:
    with SseServer(models=b"") as server:
        arm = Arm(name="a", url=server.url)
        named = Arm(name="b", url=server.url, model="mine")
        unnamed = experiment((arm, named), model="served")
        with pytest.raises(BenchError, match="does not say what model it serves"):
            play(unnamed, tmp_path)
        play(experiment((named, Arm(name="c", url=server.url, model="other"))), tmp_path)
    assert {request["model"] for request in server.requests} == {"mine", "other"}
