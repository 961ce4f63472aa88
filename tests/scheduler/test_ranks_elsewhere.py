# SPDX-License-Identifier: Apache-2.0
"""Engines whose ranks the disk tier cannot reach are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.disks import disk
from tests.scheduler.sim import Sim
from vllm_tiered_kv import assemble
from vllm_tiered_kv.config import ConfigError

Make = Callable[..., Sim]


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the scheduler half built with other fields of the parallel configuration."""
    real = assemble.build_scheduler

    def become(**fields: Any) -> None:
        def build(vllm_config: Any, kv_cache_config: Any) -> Any:
            with monkeypatch.context() as patch:
                for name, value in fields.items():
                    patch.setattr(vllm_config.parallel_config, name, value)
                return real(vllm_config, kv_cache_config)

        monkeypatch.setattr(assemble, "build_scheduler", build)

    return become


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nnodes": 2}, "on 2 hosts"),
        ({"nnodes": 4, "data_parallel_size": 2, "data_parallel_size_local": 1}, "on 2 hosts"),
        ({"distributed_executor_backend": "external_launcher", "world_size": 2}, "external"),
    ],
)
def test_ranks_on_other_hosts_cannot_have_a_disk_tier(
    sim: Make, tmp_path: Path, parallel: Callable[..., None], fields: dict[str, Any], words: str
) -> None:
    parallel(**fields)
    with pytest.raises(ConfigError, match=words) as error:
        sim(extra=disk(tmp_path))
    assert str(error.value).startswith("disk: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fields",
    [
        {"nnodes": 2, "data_parallel_size": 2, "data_parallel_size_local": 1},
        {"distributed_executor_backend": "external_launcher"},
    ],
)
def test_an_engine_on_one_host_can(
    sim: Make, tmp_path: Path, parallel: Callable[..., None], fields: dict[str, Any]
) -> None:
    parallel(**fields)
    assert sim(extra=disk(tmp_path)).half.core.disk is not None


def test_the_cpu_tier_needs_no_common_host(sim: Make, parallel: Callable[..., None]) -> None:
    parallel(nnodes=2)
    assert sim().half.core.disk is None
