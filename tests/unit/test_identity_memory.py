# SPDX-License-Identifier: Apache-2.0
"""What has been digested is remembered, safely, and read once."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.unit._weights import make_model, result
from vllm_tiered_kv.identity import memory
from vllm_tiered_kv.identity.memory import DigestMemory, FileKey
from vllm_tiered_kv.identity.namespace import Established

pytestmark = pytest.mark.usefixtures("own_cache", "no_vllm")


def key(path: str = "/m/a", size: int = 1) -> FileKey:
    return FileKey(path, size, 2, 3, 4, 5)


SHA = "ab" * 32


def remember(path: Path, entries: int = 1) -> DigestMemory:
    made = DigestMemory(path)
    for number in range(entries):
        made.put(key(f"/m/{number}"), SHA)
    made.save()
    return made


def test_memory_lasts_and_is_private(tmp_path):
    path = tmp_path / "deep" / "kept" / "weights.json"
    remember(path)
    assert DigestMemory(path).get(key("/m/0")) == SHA
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["weights.json"]


@pytest.mark.parametrize("field", FileKey.__struct_fields__)
def test_every_part_of_the_key_counts(tmp_path, field):
    path = tmp_path / "weights.json"
    remember(path)
    assert DigestMemory(path).get(key("/m/0")) == SHA
    other = "/m/1" if field == "path" else 99
    assert DigestMemory(path).get(msgspec.structs.replace(key("/m/0"), **{field: other})) is None


def test_two_writers_keep_each_others_entries(tmp_path):
    path = tmp_path / "weights.json"
    one, two = DigestMemory(path), DigestMemory(path)
    one.put(key("/m/one"), SHA)
    one.save()
    two.put(key("/m/two"), SHA)
    two.save()
    found = DigestMemory(path)
    assert found.get(key("/m/one")) == found.get(key("/m/two")) == SHA


def test_a_file_is_remembered_in_its_last_state_only(tmp_path):
    path = tmp_path / "weights.json"
    made = DigestMemory(path)
    for size in range(10):
        made.put(key(size=size), SHA)
    made.save()
    assert len(json.loads(path.read_bytes())["entries"]) == 1


def test_memory_is_bounded_to_the_last_used(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MAX_ENTRIES", 8)
    path = tmp_path / "weights.json"
    clock = iter(range(1000))
    monkeypatch.setattr(memory, "time", SimpleNamespace(time=lambda: float(next(clock))))
    made = DigestMemory(path)
    for number in range(20):
        made.put(key(f"/m/{number}"), SHA)
    assert made.get(key("/m/0")) == SHA
    made.save()
    kept = {e["file"]["path"] for e in json.loads(path.read_bytes())["entries"]}
    assert kept == {"/m/0", *(f"/m/{n}" for n in range(13, 20))}


def test_long_paths_do_not_make_a_file_that_is_too_large_to_read(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MAX_ENTRIES", 80)
    monkeypatch.setattr(memory, "MAX_FILE_BYTES", 64_000)
    path = tmp_path / "weights.json"
    made = DigestMemory(path)
    for number in range(80):
        made.put(key("/" + "x" * 4000 + str(number)), SHA)
    made.save()
    assert path.stat().st_size <= 64_000
    assert DigestMemory(path).get(key("/" + "x" * 4000 + "79")) == SHA


def broken(path: Path, how: str) -> None:
    remember(path)
    good = path.read_bytes()
    content = json.loads(good)
    if how == "not JSON":
        path.write_bytes(good[:-5])
    elif how == "not text":
        path.write_bytes(os.urandom(200))
    elif how == "another shape":
        path.write_text('{"entries": [1, 2]}')
    elif how == "another format":
        path.write_text(json.dumps({**content, "format": 99}))
    elif how == "no digest":
        content["entries"][0]["sha256"] = "x" * 64
        path.write_text(json.dumps(content))
    elif how == "deep":
        path.write_text("[" * 100_000)
    elif how == "oversized":
        path.write_bytes(good + b" " * memory.MAX_FILE_BYTES)
    elif how == "writable by others":
        path.chmod(0o666)
    elif how == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "empty":
        path.write_bytes(b"")


@pytest.mark.parametrize(
    "how",
    [
        "not JSON",
        "not text",
        "another shape",
        "another format",
        "no digest",
        "deep",
        "oversized",
        "writable by others",
        "a link",
        "a pipe",
        "empty",
    ],
)
def test_memory_that_is_wrong_is_ignored_and_rewritten(tmp_path, how):
    path = tmp_path / "weights.json"
    broken(path, how)
    made = DigestMemory(path)
    assert made.get(key("/m/0")) is None
    made.put(key("/m/new"), SHA)
    made.save()
    assert DigestMemory(path).get(key("/m/new")) == SHA
    assert stat.S_ISREG(path.lstat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_memory_of_somebody_else_is_ignored(tmp_path, monkeypatch):
    path = tmp_path / "weights.json"
    remember(path)
    monkeypatch.setattr(memory.os, "geteuid", lambda: 12345)
    assert DigestMemory(path).get(key("/m/0")) is None


def test_memory_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "weights.json"
    remember(path)
    assert DigestMemory(path).get(key("/m/0")) is None


def test_a_user_without_a_home_has_no_lasting_memory(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(memory.os.path, "expanduser", lambda path: path)
    model = make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert isinstance(result(model), Established)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("value", ["", "relative/path", None])
def test_the_cache_folder_falls_back_to_the_users(monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert memory.cache_home() == tmp_path / ".cache"


# What loads, from vLLM's configuration
