# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.unit.disk._files import NAMESPACE, WatchedFiles
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.identity_file import write_identity


def test_what_a_namespace_stands_for_is_written_as_json(tmp_path: Path) -> None:
    for model in ("first", "second"):
        assert write_identity(Files(), tmp_path / "root", NAMESPACE, {"model": model}) is None
    folder = tmp_path / "root" / NAMESPACE
    assert json.loads((folder / "identity.json").read_text()) == {"model": "second"}
    assert [path.name for path in folder.iterdir()] == ["identity.json"]
    assert stat.S_IMODE((folder / "identity.json").stat().st_mode) == 0o600


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / NAMESPACE).mkdir()
    (tmp_path / NAMESPACE / "identity.json").symlink_to(outside)
    assert write_identity(Files(), tmp_path, NAMESPACE, {}) is None
    assert outside.read_text() == "mine"
    assert not (tmp_path / NAMESPACE / "identity.json").is_symlink()


@pytest.mark.parametrize(
    ("namespace", "facts", "reason"),
    [
        ("..", {}, FailureReason.NAME),
        (NAMESPACE, {"model": object()}, FailureReason.INVALID),
        (NAMESPACE, {"model": "\ud800"}, FailureReason.INVALID),
    ],
)
def test_what_cannot_be_written_is_told(
    tmp_path: Path, namespace: str, facts: dict[str, object], reason: FailureReason
) -> None:
    assert write_identity(Files(), tmp_path, namespace, facts) is reason
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_namespaces_place_is_left(tmp_path: Path) -> None:
    (tmp_path / NAMESPACE).write_text("mine")
    assert write_identity(Files(), tmp_path, NAMESPACE, {}) is FailureReason.FOREIGN
    assert (tmp_path / NAMESPACE).read_text() == "mine"


def test_a_folder_in_its_place_is_left_and_keeps_nobody_from_working(tmp_path: Path) -> None:
    place = tmp_path / NAMESPACE / "identity.json"
    place.mkdir(parents=True)
    assert write_identity(Files(), tmp_path, NAMESPACE, {}) is None
    assert list((tmp_path / NAMESPACE).iterdir()) == [place]


def test_a_huge_file_in_its_place_is_replaced_unread(tmp_path: Path) -> None:
    place = tmp_path / NAMESPACE / "identity.json"
    place.parent.mkdir(parents=True)
    with place.open("wb") as file:
        file.truncate(1 << 40)
    files = WatchedFiles()
    assert write_identity(files, tmp_path, NAMESPACE, {}) is None
    assert "preadv" not in files.names
    assert place.stat().st_size < 100
