# SPDX-License-Identifier: Apache-2.0
"""The fleet's key: what makes a file trustworthy, and what each refusal says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_tiered_kv.cli.app import app
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.keys import FleetKey, KeyFileError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def path(folder: Path) -> Path:
    path = folder / "fleet.key"
    keys.write(path, keys.generate())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(KeyFileError) as error:
        keys.load(path)
    return str(error.value)


def test_what_is_written_is_read_back(folder: Path) -> None:
    key = keys.generate()
    keys.write(folder / "fleet.key", key)
    assert keys.load(folder / "fleet.key") == key
    assert (folder / "fleet.key").stat().st_mode & 0o777 == 0o600


def test_two_keys_differ_and_nothing_shows_the_secret() -> None:
    first, second = keys.generate(), keys.generate()
    assert first.sealing != second.sealing
    assert first.fingerprint != second.fingerprint
    assert first.secret.hex() not in repr(first)
    assert len({first.public, first.secret, first.sealing}) == 3


def test_a_key_is_never_overwritten(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(KeyFileError, match="never overwritten"):
        keys.write(path, keys.generate())
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o601, 0o777])
def test_a_file_that_others_have_access_to_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert f"mode {mode:04o}" in refusal(path)


def test_a_file_that_only_its_owner_may_read_is_taken(path: Path) -> None:
    path.chmod(0o400)
    assert keys.load(path).secret


def test_a_symbolic_link_is_refused(path: Path, folder: Path) -> None:
    link = folder / "link"
    link.symlink_to(path)
    assert "symbolic link" in refusal(link)
    with pytest.raises(KeyFileError, match="already"):
        keys.write(link, keys.generate())


def test_a_second_name_of_the_file_is_refused(path: Path, folder: Path) -> None:
    (folder / "other").hardlink_to(path)
    assert "2 names" in refusal(path)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_everybody_may_write_to_is_refused(path: Path, mode: int) -> None:
    path.parent.chmod(mode)
    assert "folder" in refusal(path)
    with pytest.raises(KeyFileError, match="folder"):
        keys.write(path.with_name("another"), keys.generate())


def test_somebody_elses_file_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to user {owner}" in refusal(path)


def test_what_is_no_file_is_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "pipe", 0o600)
    assert "regular file" in refusal(folder / "pipe")
    (folder / "inside").mkdir(mode=0o700)
    assert "regular file" in refusal(folder / "inside")
    assert "cannot be read" in refusal(folder / "missing")
    assert f"keygen {folder / 'missing'}" in refusal(folder / "missing")
    assert "cannot be read" in refusal(folder / "missing" / "too")
    assert "absolute" in refusal(Path("fleet.key"))


@given(st.binary(max_size=400))
def test_bytes_that_are_no_key_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("keys") / "fleet.key"
    path.write_bytes(data)
    path.chmod(0o600)
    assert "not a key file" in refusal(path)


@pytest.mark.parametrize("tail", [b"\n", b" ", b"0", b"x" * 4096])
def test_a_key_with_something_after_it_is_refused(path: Path, tail: bytes) -> None:
    with path.open("ab") as file:
        file.write(tail)
    assert "not a key file" in refusal(path)


def test_the_public_half_follows_from_the_secret(path: Path) -> None:
    loaded = keys.load(path)
    assert isinstance(loaded, FleetKey)
    assert len(loaded.public) == len(loaded.secret) == 32


def test_keygen_makes_one_file_once(folder: Path) -> None:
    path = folder / "fleet.key"
    done = CliRunner().invoke(app, ["keygen", str(path)])
    assert done.exit_code == 0
    key = keys.load(path)
    assert key.fingerprint in done.output
    assert key.secret.hex() not in done.output
    again = CliRunner().invoke(app, ["keygen", str(path)])
    assert again.exit_code == 1
    assert "never overwritten" in again.output
    assert keys.load(path) == key
