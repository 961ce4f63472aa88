# SPDX-License-Identifier: Apache-2.0
"""On disk too, LoRA adapters are told apart by their weights, also by another engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from tests.scheduler.adapters import AdapterSim
from tests.scheduler.disks import disk, files, opened
from tests.scheduler.sim import prompt


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the KV of ``prompt(100)`` under an adapter whose weights are 7."""
    monkeypatch.setattr("vllm_tiered_kv.scheduler.loads.ADAPTER_PATIENCE", 60.0)
    engine = opened(AdapterSim(extra=disk(tmp_path)))
    engine.load_adapter(1, 7)
    engine.complete("cold", prompt(100), 1, lora=LoRARequest("one", 1, "/adapters/one"))
    engine.settle()
    assert len(files(tmp_path)) == 6
    engine.check_quiet()
    engine.close()
    return tmp_path


@pytest.mark.parametrize(("weights", "hit"), [(7, 96), (8, 0)])
def test_an_adapter_is_known_by_its_weights(folder: Path, weights: int, hit: int) -> None:
    engine = opened(AdapterSim(extra=disk(folder)))
    engine.load_adapter(2, weights)
    engine.complete("warm", prompt(100), 1, lora=LoRARequest("one", 2, "/adapters/one"))
    assert engine.counter("hit_tokens", "disk") == hit
    engine.check_quiet()
    engine.close()


def test_the_base_model_finds_nothing_of_an_adapters(folder: Path) -> None:
    engine = opened(AdapterSim(extra=disk(folder)))
    engine.complete("base", prompt(100), 1)
    assert engine.counter("hit_tokens", "disk") == 0
    engine.check_quiet()
    engine.close()
