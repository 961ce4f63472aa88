# SPDX-License-Identifier: Apache-2.0
"""One server and the requests sent to it, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from demo.scenario import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    MAX_TOKENS,
    Scenario,
    Step,
    Transcript,
)
from tools.serving import Client, Completion, Metrics, ServeSpec, compute_cpus

_FINISHED = "vllm:request_success_total"
_DEVICE_HITS = "vllm:prefix_cache_hits_total"
_CPU_HITS = "vllm:tiered_kv_hit_tokens_total"
_BYTES = "vllm:tiered_kv_bytes_total"


class Measured(msgspec.Struct, frozen=True):
    """One request and what the server's counters said about it."""

    step: Step
    completion: Completion
    device_hits: int
    """Prompt tokens found in the device's prefix cache."""
    cpu_hits: int
    """Prompt tokens loaded from the CPU tier."""
    bytes_loaded: int


def serve_spec(model: Path, capacity: str | None) -> ServeSpec:
    """The server of one arm; ``capacity`` of the CPU tier, None for no connector."""
    args = (
        "--dtype=float32",
        "--enforce-eager",
        f"--block-size={BLOCK_TOKENS}",
        f"--max-model-len={MAX_TOKENS}",
        f"--num-gpu-blocks-override={DEVICE_BLOCKS}",
        "--enable-prompt-tokens-details",
        "--served-model-name=tiny",
    )
    env = {"VLLM_CPU_OMP_THREADS_BIND": compute_cpus()}
    if capacity is None:
        return ServeSpec.make(model, args, env=env)
    return ServeSpec.make(
        model,
        args,
        env=env,
        kv_transfer_config={
            "kv_connector": "TieredKVConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cpu": {"capacity": capacity}, "gate": "always"},
        },
    )


def warm_up(client: Client) -> None:
    """A first request pays for what the server sets up lazily; it is not part of any arm."""
    client.complete("def main():", max_tokens=2, cache_salt="warm-up")


def run_steps(
    client: Client,
    scenario: Scenario,
    transcript: Transcript,
    on_done: Callable[[Measured], None],
    *,
    keep_answers: bool,
) -> list[Measured]:
    """Send every step, each after the one before has finished."""
    results = []
    before = client.metrics()
    for step in scenario.steps(transcript):
        measured, before = _measure(client, step, before)
        if keep_answers:
            transcript.answers[step.name] = measured.completion.token_ids
        results.append(measured)
        on_done(measured)
    return results


def cold_references(client: Client, steps: list[Step]) -> dict[tuple[int, ...], Completion]:
    """Each distinct prompt once more under a salt of its own, so that nothing cached applies."""
    references: dict[tuple[int, ...], Completion] = {}
    for step in steps:
        if step.prompt not in references:
            salt = f"cold-{len(references)}"
            references[step.prompt] = client.complete(
                step.prompt, max_tokens=ANSWER_TOKENS, cache_salt=salt
            )
    return references


def _measure(client: Client, step: Step, before: Metrics) -> tuple[Measured, Metrics]:
    completion = client.complete(step.prompt, max_tokens=ANSWER_TOKENS)
    finished = before.value(_FINISHED) + 1
    after = client.wait_for_metrics(lambda metrics: metrics.value(_FINISHED) >= finished)

    def delta(name: str, **labels: str) -> int:
        return round(after.value(name, **labels) - before.value(name, **labels))

    measured = Measured(
        step=step,
        completion=completion,
        device_hits=delta(_DEVICE_HITS),
        cpu_hits=delta(_CPU_HITS, tier="cpu"),
        bytes_loaded=delta(_BYTES, tier="cpu", direction="load"),
    )
    return measured, after
