# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tiered_kv import compat
from vllm_tiered_kv.identity import hashing


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are remembered in the test's own folder, also those of files of a moment ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hashing, "SETTLED_NS", -1_000_000_000)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM would say of the machine is fixed."""
    monkeypatch.setattr(compat, "uses_modelscope", lambda: False)
    monkeypatch.setattr(compat, "device_name", lambda: "cpu")
    monkeypatch.setattr(compat, "torch_version", lambda: "2.13")
