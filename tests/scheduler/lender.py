# SPDX-License-Identifier: Apache-2.0
"""A process with an engine that lends what it has computed, over NIXL; and the handle on it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.scheduler.sim import Sim, prompt
from vllm_tiered_kv import assemble
from vllm_tiered_kv.remote.agent import RemoteAgent
from vllm_tiered_kv.remote.messages import Identity

IDENTITY = Identity("a" * 32, "b" * 32)
START_SECONDS = 120.0


class Lender:
    """A process whose engine has computed prompts of these seeds.

    Args:
        key: the fleet's key file.
        tokens: of each prompt.
        seeds: of the prompts.
        port: of its control channel; 0 for any.
    """

    def __init__(self, key: Path, tokens: int, seeds: range, port: int = 0) -> None:
        wanted = [str(key), str(tokens), str(seeds.start), str(seeds.stop), str(port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.scheduler.lender", *wanted],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.port: int = json.loads(self._line())["port"]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        # The signal is on its way until the kernel says that all threads stand still.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def _line(self) -> str:
        """What it says first that is ours; vLLM says other things there."""
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if select.select([stdout], [], [], 1.0)[0] and (
                line := stdout.readline().decode()
            ).startswith("{"):
                return line
            assert self._process.poll() is None, "it ended"
        raise AssertionError("it does not start")

    def __enter__(self) -> Lender:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _introduce(agent: RemoteAgent, namespace: object) -> None:
    agent.identify(IDENTITY)  # as if this model had weights


def main(key: str, tokens: str, first: str, end: str, port: str) -> None:
    assemble.introduce = _introduce  # type: ignore[assignment]
    remote = {"listen": f"127.0.0.1:{port}", "key_file": key, "peers": []}
    engine = Sim(extra={"remote": remote}, capacity_chunks=1000)
    for seed in range(int(first), int(end)):
        engine.complete(f"r{seed}", prompt(int(tokens), seed=seed), 2)
        engine.settle()  # before its blocks are handed out again
    agent = engine.half.remote.agent
    while not agent._server.is_ready:
        engine.step()
        time.sleep(0.01)
    print(json.dumps({"port": agent.address.port}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
