# SPDX-License-Identifier: Apache-2.0
"""What a user sees when the engine starts, and what is left when it ends."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine._server import Pool, flushed, leftovers, prompt, tiered
from tools.serving import RequestFailed, ServerFailed

CPU = {"cpu": {"capacity": "256MiB"}}


def test_the_start_up_line_and_a_stop_with_work_under_way(servers: Pool) -> None:
    before = leftovers()
    with servers.private(extra_config=CPU) as running:
        lines = [line for line in running.server.tail(2000).splitlines() if "tiered-kv" in line]
        assert any(
            re.search(
                r"tiers: cpu 25\d.* \(\d+ slots on each of 1 ranks\); "
                r"chunk: 128 tokens, 384 KiB a rank; namespace: ([0-9a-f]{8}-[0-9a-f]{8}|layout)",
                line,
            )
            for line in lines
        ), lines
        assert not any("kv_load_failure_policy" in line for line in lines)
        running.client.complete(prompt("before", 500))

        def abandoned() -> None:
            with pytest.raises(RequestFailed):
                running.client.complete(prompt("under way", 2000), max_tokens=2000)

        thread = threading.Thread(target=abandoned)
        thread.start()
        running.client.wait_for_metrics(lambda m: m.value("vllm:num_requests_running") > 0)
        running.server.stop()
        thread.join(30)
        assert not thread.is_alive()
        assert not running.server.alive()
    assert leftovers() <= before


def test_a_policy_that_fails_requests_is_warned_about_and_a_module_path_works(
    servers: Pool,
) -> None:
    config: dict[str, Any] = {
        **tiered(CPU),
        "kv_connector_module_path": "vllm_tiered_kv.connector",
        "kv_load_failure_policy": "fail",
    }
    with servers.private(kv_transfer_config=config, env={"VLLM_PLUGINS": "none"}) as running:
        warnings = re.findall(r"kv_load_failure_policy is .fail.", running.server.tail(2000))
        assert len(warnings) == 1
        client = running.client
        client.complete(prompt("path", 300))
        assert flushed(client)
        assert client.complete(prompt("path", 300)).cached_tokens == 256


@pytest.mark.parametrize(
    ("extra_config", "parts"),
    [
        ({"cpu": {"capcity": "1GiB"}}, ["cpu.capcity", "1GiB", "cpu.capacity"]),
        ({"cpu": {"capacity": "1KiB"}}, ["cpu.capacity", "1 KiB", "chunk"]),
        ({"cpu": {"capacity": "100TiB"}}, ["cpu.capacity", "100 TiB", "machine"]),
    ],
    ids=["unknown key", "below a chunk", "above the machine"],
)
def test_a_mistake_in_the_options_is_one_clear_error(
    servers: Pool, extra_config: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ServerFailed) as failed, servers.private(extra_config=extra_config):
        pass
    (log,) = re.findall(r"(/\S+\.log):", str(failed.value))
    lines = [line for line in Path(log).read_text().splitlines() if "cannot start" in line]
    assert lines
    assert all(part in line for part in parts for line in lines), lines
