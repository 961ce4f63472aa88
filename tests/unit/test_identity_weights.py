# SPDX-License-Identifier: Apache-2.0
"""The weights' digest: equal for equal content, different for any other."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.unit._weights import DEADLINE, WEIGHTS, Hasher, digest_of, make_model, result, rewrite
from vllm_tiered_kv import compat
from vllm_tiered_kv.identity import folder, hashing
from vllm_tiered_kv.identity.folder import Family
from vllm_tiered_kv.identity.hashing import FileHasher, Unreadable
from vllm_tiered_kv.identity.memory import DigestMemory
from vllm_tiered_kv.identity.namespace import Established, Unestablished
from vllm_tiered_kv.identity.sources import Part, Plan, Source
from vllm_tiered_kv.identity.weights import WeightsDigester

pytestmark = pytest.mark.usefixtures("own_cache", "no_vllm")


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
