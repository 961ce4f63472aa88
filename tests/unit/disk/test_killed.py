# SPDX-License-Identifier: Apache-2.0
"""A process that writes is killed at any moment: what has a chunk's name is whole."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.disk._files import payload_of, rank_folder, read, temp_files
from tests.unit.disk._writer import KEYS, NBYTES
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.scan import Foreign, Found, scan_root
from vllm_tiered_kv.tiers.disk.store import ReadStatus

LONGEST_S = 0.1


@pytest.mark.parametrize("moments", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_files_are_whole_whenever_their_writer_is_killed(tmp_path: Path, moments: int) -> None:
    expected = {key: payload_of(key, NBYTES) for key in KEYS}
    folder = rank_folder(tmp_path)
    seen = 0
    for _ in range(moments):
        write_until_killed(tmp_path)
        items = list(scan_root(Files(), tmp_path))
        assert not [item for item in items if isinstance(item, Foreign)]
        for item in items:
            if isinstance(item, Found):
                result, payload = read(folder, item.key, item.group, NBYTES)
                assert (result.status, payload) == (ReadStatus.OK, expected[item.key])
                seen += 1
        list(scan_root(Files(), tmp_path, lambda _: True))
        assert temp_files(tmp_path) == []
    assert seen > 0


def write_until_killed(root: Path) -> None:
    """From the first file on, for a time that chance decides."""
    command = [sys.executable, "-m", "tests.unit.disk._writer", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            time.sleep(random.uniform(0, LONGEST_S))
        finally:
            process.kill()
            process.wait(30)
