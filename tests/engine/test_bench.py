# SPDX-License-Identifier: Apache-2.0
"""``vllm-tiered-kv bench ab`` against real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engine._server import BLOCK_TOKENS, Models, Pool, tiered
from tests.engine.test_cpu_tier import CPU
from tools.serving.process import ENVIRONMENT, compute_cpus
from vllm_tiered_kv.cli.app import app

PROMPTS = {"first_token": 8, "last_token": 4095}


def bench(folder: Path, experiment: dict[str, Any]) -> dict[str, Any]:
    """What ``report.json`` says of it."""
    file = folder / "experiment.json"
    file.write_text(json.dumps({"resamples": 200, "prompts": PROMPTS, **experiment}))
    done = CliRunner().invoke(app, ["bench", "ab", str(file), "--out", str(folder / "out")])
    assert done.exit_code == 0, (done.output, done.exception)
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    return report


def tokens_of(arm: dict[str, Any]) -> dict[str, float | None]:
    return {hit["tier"]: hit["tokens"] for hit in arm["hits"]}


def test_an_engine_against_itself(servers: Pool, tmp_path: Path) -> None:
    """The second arm finds on the device what the first has asked for."""
    url = servers.get(extra_config=CPU).url
    report = bench(
        tmp_path,
        {
            "arms": [{"name": "first", "url": url}, {"name": "second", "url": url}],
            "workload": {
                "kind": "chat",
                "system_tokens": 300,
                "turns": 2,
                "output_tokens": 6,
                "think": 0.01,
            },
            "history": "own",
            "sessions": 6,
            "warmup": 0,
            "blocks": 3,
            "load": {"concurrency": 2},
        },
    )
    (agreed,) = report["agreements"]
    assert agreed["same"] == agreed["compared"] == agreed["by_tokens"] == 12
    assert agreed["worst_logprob"] < 1e-3
    for arm in report["arms"]:
        assert (arm["requests"], arm["answered"], arm["counted_by_chunks"]) == (12, 12, 0)
        gaps_and_ends = sum(latency["values"] for latency in arm["latencies"][2:])
        # An engine that is ahead of its front end sends two tokens at once.
        assert 2 * arm["answered"] < gaps_and_ends <= arm["output_tokens"]
        found = tokens_of(arm)
        assert (found["device"] or 0) > 0
        assert found["device"] + found["connector"] == found["by the answers"]
        assert found["tiered-kv: cpu"] is not None


@pytest.mark.slow
def test_without_and_with_the_connector(models: Models, tmp_path: Path) -> None:
    """Both engines are started; what comes back has left the device, which only one can load."""
    report = bench(
        tmp_path,
        {
            "model": str(models.path("llama-tiny")),
            "serve": [
                *("--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"),
                *("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS)),
                *("--num-gpu-blocks-override", "20"),
            ],
            "env": {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": compute_cpus()},
            "arms": [
                {"name": "no connector"},
                {"name": "ours", "processes": [{"kv_transfer_config": tiered(CPU)}]},
            ],
            "workload": {
                "kind": "shared-prompt",
                "system_prompts": 6,
                "system_tokens": 5 * BLOCK_TOKENS,
                "input_tokens": 20,
                "output_tokens": 6,
                "skew": 0.0,
            },
            "sessions": 36,
            "warmup": 12,
            "blocks": 12,
            "load": {"concurrency": 2},
            "slo": {"ttft_ms": 60_000},
        },
    )
    none, ours = report["arms"]
    assert none["answered"] == ours["answered"] == 36
    (agreed,) = report["agreements"]
    assert agreed["same"] == agreed["compared"] == 36
    assert agreed["worst_logprob"] < 1e-3
    assert tokens_of(none)["tiered-kv: cpu"] is None
    assert tokens_of(ours)["tiered-kv: cpu"] > 5 * BLOCK_TOKENS
    assert tokens_of(ours)["by the answers"] > (tokens_of(none)["by the answers"] or 0)
    assert [rate["metric"] for rate in ours["rates"]][2:] == [
        *("goodput, requests/s", "SLO met, share"),
    ]
    assert "--kv-transfer-config" in ours["commands"][0]
    out = tmp_path / "out"
    names = {"report.json", "report.md", "report.html", "requests.jsonl", "logs", "kept"}
    assert names <= {path.name for path in out.iterdir()}
    assert len(list(out.glob("*.png"))) == 4
