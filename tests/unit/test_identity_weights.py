# SPDX-License-Identifier: Apache-2.0
"""The weights' digest: equal for equal content, different for any other, and read once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_tiered_kv import compat
from vllm_tiered_kv.identity import folder, hashing, memory, sources, weights
from vllm_tiered_kv.identity.folder import Family
from vllm_tiered_kv.identity.hashing import Cancelled, FileHasher, Unreadable
from vllm_tiered_kv.identity.memory import DigestMemory, FileKey
from vllm_tiered_kv.identity.namespace import Established, Unestablished, WeightsResult
from vllm_tiered_kv.identity.sources import Part, Plan, Refused, Source
from vllm_tiered_kv.identity.weights import WeightsDigester

WEIGHTS = os.urandom(100_000)
DEADLINE = 30.0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hashing, "SETTLED_NS", -1_000_000_000)  # files of a moment ago count


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch):
    monkeypatch.setattr(compat, "uses_modelscope", lambda: False)
    monkeypatch.setattr(compat, "device_name", lambda: "cpu")
    monkeypatch.setattr(compat, "torch_version", lambda: "2.13")


def make_model(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"model.safetensors": WEIGHTS, "modeling.py": b"x = 1\n", "config.json": b"{}"}
    for name, data in {**contents, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def result(*models: Path | str, load_format: str = "auto", **options: Any) -> WeightsResult:
    plan = Plan(tuple(Source(str(model), load_format, **options) for model in models))
    return WeightsDigester(plan).result()


def digest_of(*models: Path | str, **options: Any) -> str:
    found = result(*models, **options)
    assert isinstance(found, Established), found
    return found.digest


def rewrite(path: Path, data: bytes) -> None:
    """Change a file in place, keeping its modification time, once its clock has moved on."""
    before = path.stat()
    give_up = time.monotonic() + DEADLINE
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        with path.open("r+b") as file:
            file.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert time.monotonic() < give_up
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


class Hasher(FileHasher):
    """Touches a file after each of the first ``changes`` reads."""

    def __init__(self, changes: int) -> None:
        super().__init__(DigestMemory.default(), threading.Event())
        self.changes, self.reads = changes, 0

    def _read(self, path: Path) -> str:
        found = super()._read(path)
        self.reads += 1
        if self.reads <= self.changes:
            rewrite(path, os.urandom(8))
        return found


# What counts


def test_equal_weights_in_two_folders(tmp_path):
    one = make_model(tmp_path / "one")
    two = make_model(tmp_path / "elsewhere" / "two")
    (two / "README.md").write_text("another")
    (two / "tokenizer.json").write_text("{}")
    (two / ".cache").mkdir()
    (two / ".cache" / "model.bin").write_bytes(b"hidden")
    assert digest_of(one) == digest_of(two)


def test_a_flipped_bit_counts(tmp_path):
    model = make_model(tmp_path / "model")
    before = digest_of(model)
    for at in (0, len(WEIGHTS) // 2, len(WEIGHTS) - 1):
        flipped = bytearray(WEIGHTS)
        flipped[at] ^= 1
        other = make_model(tmp_path / f"flipped{at}", **{"model.safetensors": bytes(flipped)})
        assert digest_of(other) != before


@pytest.mark.parametrize(
    "name",
    [
        "modeling.py",
        "layers/attention.py",
        "model.safetensors.index.json",
        "hf_quant_config.json",
        "preprocessor_config.json",
        "whisper/model.safetensors",
        "sparse_linear.pt",
        "scales.npz",
        "model-2.safetensors",
    ],
)
def test_all_that_loads_counts(tmp_path, name):
    usual = digest_of(make_model(tmp_path / "usual"))
    one = digest_of(make_model(tmp_path / "one", **{name: b"1"}))
    two = digest_of(make_model(tmp_path / "two", **{name: b"2"}))
    assert len({usual, one, two}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "optimizer.pt",
        "training_args.bin",
        "original/consolidated.00.pth",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
        "model.gguf",
        ".hidden.safetensors",
    ],
)
def test_what_does_not_load_does_not_count(tmp_path, name):
    usual = digest_of(make_model(tmp_path / "usual"))
    assert digest_of(make_model(tmp_path / "other", **{name: b"{}"})) == usual


def test_names_count(tmp_path):
    one = make_model(tmp_path / "one", **{"a.safetensors": b"a", "b.safetensors": b"b"})
    two = make_model(tmp_path / "two", **{"a.safetensors": b"b", "b.safetensors": b"a"})
    renamed = make_model(tmp_path / "renamed", **{"a.safetensors": b"a", "c.safetensors": b"b"})
    assert len({digest_of(one), digest_of(two), digest_of(renamed)}) == 3


def test_generation_settings_count_where_they_shape_numbers(tmp_path):
    one = make_model(tmp_path / "one", **{"generation_config.json": b'{"a": 1}'})
    two = make_model(tmp_path / "two", **{"generation_config.json": b'{"a": 2}'})
    assert digest_of(one) == digest_of(two)
    assert digest_of(one, generation_config=True) != digest_of(two, generation_config=True)


@pytest.mark.parametrize(
    ("load_format", "files", "family"),
    [
        ("auto", ["a.safetensors", "b.bin"], Family.SAFETENSORS),
        ("auto", ["a.safetensors", "consolidated.safetensors"], Family.MISTRAL),
        ("hf", ["a.safetensors", "consolidated.safetensors"], Family.SAFETENSORS),
        ("auto", ["a.bin", "b.pt"], Family.BIN),
        ("auto", ["b.pt"], Family.PT),
        ("auto", ["transformer/a.safetensors", "vae/b.safetensors"], Family.SAFETENSORS),
        ("pt", ["a.bin", "b.pt"], Family.PT),
        ("npcache", ["a.safetensors", "b.bin"], Family.BIN),
        ("mistral", ["a.safetensors"], Family.MISTRAL),
        ("fastsafetensors", ["a.safetensors", "b.bin"], Family.SAFETENSORS),
    ],
)
def test_the_picked_files_follow_vllms_loader(tmp_path, load_format, files, family):
    for name in files:
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    found, _ = folder.loaded_files(Source("m", load_format), tmp_path / "model")
    assert found is family


def test_the_picked_family_counts(tmp_path):
    model = make_model(tmp_path / "model", **{"extra.bin": b"1"})
    assert digest_of(model, load_format="safetensors") == digest_of(model, load_format="auto")
    assert digest_of(model, load_format="npcache") != digest_of(model, load_format="auto")


def test_a_single_file(tmp_path):
    for name, data in (("a.gguf", b"1"), ("b.gguf", b"1"), ("c.gguf", b"2")):
        (tmp_path / name).write_bytes(data)
    a, b, c = (
        digest_of(tmp_path / name, load_format="gguf") for name in ("a.gguf", "b.gguf", "c.gguf")
    )
    assert a == b != c


def test_several_sources_count_in_order(tmp_path):
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two", **{"more.py": b""})
    found = {digest_of(one), digest_of(two), digest_of(one, two), digest_of(two, one)}
    assert len(found) == 4


def test_a_draft_has_a_digest_of_its_own(tmp_path):
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two", **{"more.py": b""})
    plan = Plan((Source(str(one), "auto"),), (Source(str(two), "auto"),))
    assert WeightsDigester(plan).result() == Established(digest_of(one), digest_of(two))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_plain_file(tmp_path, make):
    model = make_model(tmp_path / "model")
    make(model / "more.safetensors")
    found = result(model)
    if make is os.mkdir:
        assert found == Established(digest_of(make_model(tmp_path / "usual")))
    else:
        assert isinstance(found, Unestablished)
        assert "not a plain file" in found.reason


@pytest.mark.parametrize("missing", ["nowhere", "file"])
def test_weights_that_are_not_there(tmp_path, missing, monkeypatch):
    def no_snapshot(*_: object) -> str:
        raise FileNotFoundError("no snapshot")

    monkeypatch.setattr(compat, "hub_snapshot", no_snapshot)
    (tmp_path / "model").mkdir()
    found = result(tmp_path / "model" if missing == "file" else "owner/nowhere")
    assert isinstance(found, Unestablished)
    assert ("no weight files" if missing == "file" else "hub's cache") in found.reason


def test_a_broken_link_is_a_reason(tmp_path):
    model = make_model(tmp_path / "model")
    (model / "more.safetensors").symlink_to("nothing")
    assert isinstance(result(model), Unestablished)


def test_linked_folders_are_followed_once(tmp_path):
    model = make_model(tmp_path / "model", **{"part/a.safetensors": b"a"})
    before = digest_of(model)
    (model / "part" / "again").symlink_to(model, target_is_directory=True)
    assert digest_of(model) == before


def test_far_too_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MAX_FILES", 2)
    found = result(make_model(tmp_path / "model"))
    assert isinstance(found, Unestablished)
    assert "more than 2 files" in found.reason


# The hub's cache


def make_snapshot(cache: Path, **files: bytes) -> Path:
    """A hub cache with one repository: large files by SHA-256, others by git's SHA-1."""
    repository = cache / "models--owner--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    contents = {"model.safetensors": WEIGHTS, "modeling.py": b"x = 1\n", "config.json": b"{}"}
    for name, data in {**contents, **files}.items():
        large = name.endswith((".safetensors", ".bin"))
        blob = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(data).hexdigest()
        (repository / "blobs" / blob).write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repository / "blobs" / blob, link.parent))
    return snapshot


def test_a_snapshot_equals_a_plain_copy(tmp_path):
    snapshot = make_snapshot(tmp_path / "hub", **{"part/model.safetensors": b"part"})
    shutil.copytree(snapshot, tmp_path / "copy")
    assert not (tmp_path / "copy" / "model.safetensors").is_symlink()
    assert digest_of(snapshot) == digest_of(tmp_path / "copy")


def test_a_blobs_name_is_believed_without_reading(tmp_path):
    snapshot = make_snapshot(tmp_path / "hub")
    hasher = FileHasher(DigestMemory.default(), threading.Event())
    expected = hashlib.sha256(WEIGHTS).hexdigest()
    assert hasher.digest(snapshot / "model.safetensors") == (len(WEIGHTS), expected)
    assert hasher.bytes_read == 0
    assert hasher.digest(snapshot / "modeling.py")[1] == hashlib.sha256(b"x = 1\n").hexdigest()
    assert hasher.bytes_read == 6


def test_a_name_outside_a_hub_cache_is_not_believed(tmp_path):
    name = "ab" * 32
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / name).write_bytes(b"data")
    model = make_model(tmp_path / "model")
    (model / "more.safetensors").symlink_to(blobs / name)
    other = make_snapshot(tmp_path / "hub")
    (other.parents[1] / "blobs" / name).write_bytes(b"data")
    (model / "other.safetensors").symlink_to(other.parents[1] / "blobs" / name)
    (model / name).write_bytes(b"data")
    hasher = FileHasher(DigestMemory.default(), threading.Event())
    for path in (model / "more.safetensors", model / "other.safetensors", model / name):
        assert hasher.digest(path) == (4, hashlib.sha256(b"data").hexdigest())


def test_a_repository_is_found_in_the_cache_without_a_network(tmp_path):
    pytest.importorskip("huggingface_hub")
    snapshot = make_snapshot(tmp_path / "hub")
    options = {"cache_folder": str(tmp_path / "hub")}
    assert digest_of("owner/model", **options) == digest_of(snapshot)
    assert digest_of("owner/model", revision="0" * 40, **options) == digest_of(snapshot)
    for name, revision in (("owner/model", "1" * 40), ("owner/other", None), ("a/b/c:d", None)):
        found = result(name, revision=revision, **options)
        assert isinstance(found, Unestablished)
        assert "hub's cache" in found.reason


def test_remote_code_of_another_repository_counts(tmp_path):
    pytest.importorskip("huggingface_hub")
    options = {"cache_folder": str(tmp_path / "hub"), "part": Part.CODE}
    make_snapshot(tmp_path / "hub")
    before = digest_of("owner/model", **options)
    shutil.rmtree(tmp_path / "hub")
    make_snapshot(tmp_path / "hub", **{"model.safetensors": b"other"})
    assert digest_of("owner/model", **options) == before
    shutil.rmtree(tmp_path / "hub")
    make_snapshot(tmp_path / "hub", **{"modeling.py": b"x = 2\n"})
    assert digest_of("owner/model", **options) != before


# Changes


def test_a_change_in_place_is_seen_though_size_and_time_are_the_same(tmp_path):
    model = make_model(tmp_path / "model")
    before = digest_of(model)
    assert digest_of(model) == before
    rewrite(model / "model.safetensors", b"otherwise")
    assert digest_of(model) != before


def test_remembered_files_are_not_read_again(tmp_path):
    path = make_model(tmp_path / "model") / "model.safetensors"
    for expected in (len(WEIGHTS), 0):
        hasher = FileHasher(DigestMemory.default(), threading.Event())
        assert hasher.digest(path)[1] == hashlib.sha256(WEIGHTS).hexdigest()
        assert hasher.bytes_read == expected


def test_what_changed_a_moment_ago_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "SETTLED_NS", 3_600_000_000_000)
    path = make_model(tmp_path / "model") / "model.safetensors"
    for _ in range(2):
        hasher = FileHasher(DigestMemory.default(), threading.Event())
        hasher.digest(path)
        assert hasher.bytes_read == len(WEIGHTS)


@pytest.mark.parametrize("changes", [1, hashing.ATTEMPTS - 1])
def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path, changes):
    path = make_model(tmp_path / "model") / "model.safetensors"
    hasher = Hasher(changes)
    assert hasher.digest(path)[1] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert hasher.reads == changes + 1


def test_a_file_that_keeps_changing_has_no_digest(tmp_path):
    path = make_model(tmp_path / "model") / "model.safetensors"
    hasher = Hasher(100)
    with pytest.raises(Unreadable, match="keeps changing"):
        hasher.digest(path)
    assert hasher.reads == hashing.ATTEMPTS


def test_a_file_that_changed_after_the_start_is_not_what_was_loaded(tmp_path):
    model = make_model(tmp_path / "model")
    plan = Plan((Source(str(model), "auto"),))
    now = time.time_ns()
    fresh = WeightsDigester(plan, unchanged_since_ns=now + 10**12).result()
    assert fresh == Established(digest_of(model))
    stale = WeightsDigester(plan, unchanged_since_ns=now - 10**12).result()
    assert isinstance(stale, Unestablished)
    assert "after this engine started" in stale.reason


def test_a_link_pointed_elsewhere_after_the_start_is_refused(tmp_path):
    target = make_model(tmp_path / "model") / "model.safetensors"
    link = tmp_path / "link.safetensors"
    link.symlink_to(target)
    between = target.stat().st_ctime_ns
    give_up = time.monotonic() + DEADLINE
    while link.lstat().st_ctime_ns <= between:
        link.unlink()
        link.symlink_to(target)
        assert time.monotonic() < give_up
    hasher = FileHasher(DigestMemory.default(), threading.Event(), between)
    assert hasher.digest(target)[0] == len(WEIGHTS)
    with pytest.raises(Unreadable, match="after this engine started"):
        hasher.digest(link)


@pytest.mark.parametrize("how", ["renamed", "linked"])
def test_a_folder_put_in_anothers_place_after_the_start_is_refused(tmp_path, how):
    model = make_model(tmp_path / "made")
    place = tmp_path / "place"
    since = max(p.lstat().st_ctime_ns for p in (model, *model.iterdir()))
    give_up = time.monotonic() + DEADLINE
    while not place.is_symlink() and model.stat().st_ctime_ns <= since:
        assert time.monotonic() < give_up
        if how == "renamed":  # and back, until the clock has moved on
            model.rename(place)
            place.rename(model)
        elif time.time_ns() > since + 10**8:
            place.symlink_to(model)
    if how == "renamed":
        model.rename(place)
    plan = Plan((Source(str(place), "auto"),))
    assert WeightsDigester(plan, unchanged_since_ns=None).result() == Established(digest_of(place))
    found = WeightsDigester(plan, unchanged_since_ns=since).result()
    assert isinstance(found, Unestablished)
    assert f"{place} changed after this engine started" in found.reason


def test_the_hubs_cache_may_have_been_filled_by_this_very_start(tmp_path):
    snapshot = make_snapshot(tmp_path / "hub")
    plan = Plan((Source(str(snapshot), "auto"),))
    found = WeightsDigester(plan, unchanged_since_ns=time.time_ns() - 10**12).result()
    assert found == Established(digest_of(snapshot))


def test_the_start_of_this_process_is_known():
    started = hashing.process_start_ns()
    assert started is not None
    assert 0 < time.time_ns() - started < 3600 * 10**9


# Memory


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


def engine(
    model: str = "m", load_format: str = "auto", auto_map: object = None, **changes: Any
) -> Any:
    """What is read of a ``VllmConfig``."""
    content = {"hidden_size": 8, "model_type": "llama"}
    hf_config = SimpleNamespace(auto_map=auto_map, to_dict=lambda: content)
    model_config = SimpleNamespace(
        model=model,
        model_weights="",
        revision=None,
        code_revision=None,
        hf_config=hf_config,
        dtype="bfloat16",
        quantization=None,
        seed=0,
        trust_remote_code=False,
        multimodal_config=None,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
    )
    load = SimpleNamespace(load_format=load_format, download_dir=None)
    for name, value in changes.items():
        for part in (model_config, parallel, load, hf_config):
            if hasattr(part, name):
                setattr(part, name, value)
    return SimpleNamespace(
        model_config=model_config,
        parallel_config=parallel,
        load_config=load,
        speculative_config=changes.get("speculative_config"),
    )


def dummy(**changes: Any) -> str:
    found = WeightsDigester(sources.plan(engine(load_format="dummy", **changes))).result()
    assert isinstance(found, Established)
    return found.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"to_dict": lambda: {"hidden_size": 16}},
    ],
    ids=lambda c: next(iter(c)),
)
def test_random_weights_are_identified_by_what_makes_them(changes):
    assert dummy() == dummy(model="elsewhere") == dummy(data_parallel_size=2)
    assert dummy(**changes) != dummy()


@pytest.mark.parametrize("part", ["device_name", "torch_version"])
def test_random_weights_depend_on_their_generator(monkeypatch, part):
    before = dummy()
    monkeypatch.setattr(compat, part, lambda: "other")
    assert dummy() != before


@pytest.mark.parametrize(
    "load_format",
    [
        "bitsandbytes",
        "ipc_cache",
        "modelexpress",
        "my_own_loader",
        "runai_streamer",
        "runai_streamer_sharded",
        "sharded_state",
        "tensorizer",
    ],
)
def test_streamed_weights_are_refused(load_format):
    with pytest.raises(Refused, match=load_format):
        sources.plan(engine(load_format=load_format))


@pytest.mark.parametrize(
    "changes", [{"model": "s3://bucket/model"}, {"model_weights": "s3://bucket/model"}]
)
def test_weights_in_object_storage_are_refused(changes):
    with pytest.raises(Refused, match="s3://bucket/model"):
        sources.plan(engine(**changes))


def test_modelscope_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "uses_modelscope", lambda: True)
    found = result("owner/model")
    assert isinstance(found, Unestablished)
    assert "ModelScope" in found.reason


def test_remote_code_elsewhere_is_a_source_of_its_own():
    auto_map = {"AutoModel": "owner/code--m.Model", "AutoTokenizer": ["x.Y", "other/z--t.T", None]}
    trusting = sources.plan(engine(auto_map=auto_map, trust_remote_code=True, code_revision="r"))
    assert [(s.model, s.part) for s in trusting.target] == [
        ("m", Part.ALL),
        ("other/z", Part.CODE),
        ("owner/code", Part.CODE),
    ]
    own = engine(auto_map={"AutoModel": "m--m.Model"}, trust_remote_code=True)
    assert len(sources.plan(own).target) == 1
    assert trusting.target[1].revision == "r"
    assert len(sources.plan(engine(auto_map=auto_map)).target) == 1


def test_parts_and_scales_kept_elsewhere_are_sources():
    config = engine()
    config.model_config.hf_config.text_model_id = "owner/text"
    config.model_config.multimodal_config = SimpleNamespace(mm_encoder_fp8_scale_path="/s.json")
    assert [s.model for s in sources.plan(config).target] == ["m", "owner/text", "/s.json"]


def test_settings_in_the_usual_cache_count_beside_a_download_folder(tmp_path, monkeypatch):
    made = sources.plan(engine(model="owner/model", download_dir="/weights")).target
    assert [(s.cache_folder, s.part) for s in made] == [
        ("/weights", Part.ALL),
        (None, Part.SETTINGS),
    ]
    assert len(sources.plan(engine(model=str(tmp_path), download_dir="/weights")).target) == 1
    model = make_model(tmp_path / "model", **{"preprocessor_config.json": b"{}"})
    _, found = folder.loaded_files(Source("m", "auto", part=Part.SETTINGS), model)
    assert set(found) == {"modeling.py", "preprocessor_config.json"}


@pytest.mark.parametrize(
    ("method", "expected"), [("eagle", ("draft",)), ("ngram", None), ("suffix", None)]
)
def test_a_draft_counts_where_it_keeps_kv(method, expected):
    speculative = SimpleNamespace(
        method=method,
        draft_model_config=engine(model="draft").model_config,
        draft_load_config=None,
    )
    found = sources.plan(engine(speculative_config=speculative)).draft
    assert (found and tuple(s.model for s in found)) == expected


# The background


def wait_for(calls: list[Any], event: threading.Event) -> Any:
    assert event.wait(DEADLINE)
    assert len(calls) == 1
    return calls[0]


def test_the_result_is_delivered_once_on_another_thread(tmp_path):
    model = make_model(tmp_path / "model")
    calls: list[Any] = []
    done = threading.Event()

    def deliver(found: WeightsResult) -> None:
        calls.append((found, threading.current_thread()))
        done.set()

    digester = WeightsDigester(Plan((Source(str(model), "auto"),)))
    digester.start(deliver)
    found, thread = wait_for(calls, done)
    assert found == Established(digest_of(model))
    assert thread is not threading.current_thread()
    assert digester.join(DEADLINE)
    with pytest.raises(RuntimeError):
        digester.start(deliver)


def test_cancelling_stops_within_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 1000)

    class AfterThree(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 3

    path = make_model(tmp_path / "model") / "model.safetensors"
    hasher = FileHasher(DigestMemory.default(), AfterThree())
    with pytest.raises(Cancelled):
        hasher.digest(path)
    assert hasher.bytes_read == 3000


def test_a_cancelled_digest_is_not_delivered(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    reading, go_on = threading.Event(), threading.Event()
    listing = folder.loaded_files

    def slow(*arguments: Any) -> Any:
        reading.set()
        assert go_on.wait(DEADLINE)
        return listing(*arguments)

    monkeypatch.setattr(folder, "loaded_files", slow)
    calls: list[WeightsResult] = []
    digester = WeightsDigester(Plan((Source(str(model), "auto"),)))
    digester.start(calls.append)
    assert reading.wait(DEADLINE)
    assert not digester.join(0)
    digester.cancel()
    go_on.set()
    assert digester.join(DEADLINE)
    assert calls == []
    assert "cancelled" in digester.result().reason


def test_a_digest_that_never_started_is_over():
    assert WeightsDigester(Plan()).join(0)


def test_a_callback_that_fails_harms_nobody(tmp_path, caplog):
    def fail(_: WeightsResult) -> None:
        raise RuntimeError("no")

    digester = WeightsDigester(Plan((Source(str(make_model(tmp_path / "m")), "auto"),)))
    digester.start(fail)
    assert digester.join(DEADLINE)
    assert "could not be delivered" in caplog.text


def test_a_surprise_is_a_reason(tmp_path, monkeypatch):
    def explode(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(folder, "loaded_files", explode)
    found = result(make_model(tmp_path / "model"))
    assert isinstance(found, Unestablished)
    assert "boom" in found.reason


@pytest.mark.parametrize("config", [None, SimpleNamespace(), engine(load_format="tensorizer")])
def test_starting_never_raises(config):
    calls: list[WeightsResult] = []
    done = threading.Event()
    digester = weights.start_weights(config, lambda r: (calls.append(r), done.set()))
    found = wait_for(calls, done)
    assert isinstance(found, Unestablished)
    assert found.reason
    assert digester.join(DEADLINE)
