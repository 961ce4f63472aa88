# SPDX-License-Identifier: Apache-2.0
"""A process with an engine that lends what it has computed, over NIXL; and the handle on it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.scheduler.sim import Sim, prompt
from tools.child import Child
from vllm_tiered_kv import assemble
from vllm_tiered_kv.remote.agent import RemoteAgent
from vllm_tiered_kv.remote.messages import Identity

IDENTITY = Identity("a" * 32, "b" * 32)
START_SECONDS = 120.0


class Lender(Child):
    """A process whose engine has computed prompts of these seeds.

    Args:
        key: the fleet's key file.
        tokens: of each prompt.
        seeds: of the prompts.
        port: of its control channel; 0 for any.
    """

    def __init__(self, key: Path, tokens: int, seeds: range, port: int = 0) -> None:
        wanted = [str(key), str(tokens), str(seeds.start), str(seeds.stop), str(port)]
        super().__init__("tests.scheduler.lender", *wanted, stderr=subprocess.DEVNULL)
        self.port: int = json.loads(self.line(START_SECONDS))["port"]


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
