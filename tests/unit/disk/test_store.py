# SPDX-License-Identifier: Apache-2.0
"""What is kept and read back on real files, and everything that must not be accepted."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.disk._examples import unhurried
from tests.unit.disk._files import (
    FACTS,
    KEY,
    NAMESPACE,
    NBYTES,
    USED_NS,
    WatchedFiles,
    mode_of,
    open_descriptors,
    path_of,
    payload_of,
    rank_folder,
    read,
    temp_files,
    write,
)
from vllm_tiered_kv.tiers.disk.direct import IoMode, aligned_buffer, is_aligned
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import ChunkFacts, Reason, file_bytes
from vllm_tiered_kv.tiers.disk.store import RankFolder, ReadStatus, WriteStatus

OTHER = b"other key"


@pytest.fixture(params=list(IoMode), ids=lambda mode: str(mode.value))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> RankFolder:
    if request.param is IoMode.DIRECT and mode_of(tmp_path) is not IoMode.DIRECT:
        pytest.skip("no O_DIRECT here")
    return rank_folder(tmp_path, mode=request.param)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1])
def test_what_was_written_is_read(folder: RankFolder, nbytes: int) -> None:
    written = write(folder, nbytes=nbytes)
    assert (written.status, written.nbytes) == (WriteStatus.WRITTEN, file_bytes(nbytes))
    assert path_of(folder.root).stat().st_size == file_bytes(nbytes)
    result, payload = read(folder, nbytes=nbytes)
    assert (result.status, result.facts, result.nbytes) == (ReadStatus.OK, FACTS, written.nbytes)
    assert payload == payload_of(KEY, nbytes)
    assert temp_files(folder.root) == []


def test_memory_at_an_odd_address_is_written_and_read_through_the_page_cache(
    folder: RankFolder,
) -> None:
    memory = memoryview(bytearray(2 * 8192))
    start = 1 if is_aligned(memory[:8192]) else 0
    odd = memory[start : start + 8192]
    assert not is_aligned(odd)
    odd[:5000] = payload_of(KEY, 5000)
    assert folder.write(KEY, 0, odd, 5000, FACTS, USED_NS).status is WriteStatus.WRITTEN
    odd[:] = bytes(8192)
    assert folder.read(KEY, 0, odd, 5000).status is ReadStatus.OK
    assert odd[:5000] == payload_of(KEY, 5000)


def test_what_is_there_already_is_not_written_again(folder: RankFolder) -> None:
    write(folder)
    before = path_of(folder.root).stat()
    again = write(folder, payload=payload_of(OTHER), used_ns=USED_NS + 10**9)
    after = path_of(folder.root).stat()
    assert (again.status, again.nbytes) == (WriteStatus.EXISTED, before.st_size)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, USED_NS + 10**9)


def test_a_file_of_another_size_is_replaced(folder: RankFolder) -> None:
    write(folder)
    with path_of(folder.root).open("ab") as file:
        file.write(b"x")
    assert write(folder).status is WriteStatus.WRITTEN
    assert read(folder)[0].status is ReadStatus.OK


def test_a_files_time_is_that_of_its_last_use(folder: RankFolder) -> None:
    write(folder)
    assert path_of(folder.root).stat().st_mtime_ns == USED_NS
    read(folder)
    assert path_of(folder.root).stat().st_mtime_ns > USED_NS


@pytest.mark.parametrize("used_ns", [-1, 1 << 80])
def test_a_time_out_of_bounds_is_no_reason_not_to_write(folder: RankFolder, used_ns: int) -> None:
    assert write(folder, used_ns=used_ns).status is WriteStatus.WRITTEN
    assert read(folder)[0].status is ReadStatus.OK


def test_a_removed_file_is_missing(folder: RankFolder) -> None:
    assert read(folder)[0].status is ReadStatus.MISSING
    assert not folder.remove(KEY, 0)
    write(folder)
    assert folder.remove(KEY, 0)
    assert not folder.remove(KEY, 0)
    assert read(folder)[0].status is ReadStatus.MISSING


def test_reading_and_removing_make_no_folders(tmp_path: Path) -> None:
    folder = rank_folder(tmp_path / "root")
    read(folder)
    folder.remove(KEY, 0)
    assert list(tmp_path.iterdir()) == []


def test_parts_of_groups_ranks_and_namespaces_are_apart(tmp_path: Path) -> None:
    places = list(itertools.product(("a", "b"), (0, 1), (KEY, OTHER), (0, 1)))
    folders = {
        (ns, rank): rank_folder(tmp_path, namespace=ns, rank=rank) for ns, rank, _, _ in places
    }
    for ns, rank, key, group in places:
        payload = payload_of(f"{ns}{rank}{key!r}{group}".encode())
        assert write(folders[ns, rank], key, group, payload=payload).status is WriteStatus.WRITTEN
    for ns, rank, key, group in places:
        assert read(folders[ns, rank], key, group)[1] == payload_of(
            f"{ns}{rank}{key!r}{group}".encode()
        )


@pytest.mark.parametrize("key", [b"", bytes(97)])
def test_a_key_without_a_file_name_fails(tmp_path: Path, key: bytes) -> None:
    folder = rank_folder(tmp_path)
    assert write(folder, key, payload=payload_of(KEY)).reason is FailureReason.NAME
    assert read(folder, key)[0].reason is FailureReason.NAME
    assert not folder.remove(key, 0)


@pytest.mark.parametrize(
    ("view", "nbytes"),
    [
        (memoryview(bytes(4096)), 4096),
        (memoryview(bytearray(4095)), 4095),
        (memoryview(bytearray(8192)), 4096),
        (memoryview(bytearray(4096)), 4097),
        (memoryview(bytearray(4096)), 0),
        (memoryview(bytearray(0)), 0),
        (memoryview(bytearray(8192))[::2], 4096),
        (memoryview(bytearray(4096)).cast("I"), 4096),
    ],
)
def test_memory_that_does_not_fit_fails(tmp_path: Path, view: memoryview, nbytes: int) -> None:
    folder = rank_folder(tmp_path)
    assert folder.write(KEY, 0, view, nbytes, FACTS, 0).reason is FailureReason.INVALID
    assert folder.read(KEY, 0, view, nbytes).reason is FailureReason.INVALID


def test_facts_out_of_bounds_are_not_written(tmp_path: Path) -> None:
    folder = rank_folder(tmp_path)
    assert write(folder, facts=ChunkFacts((), -1, 0, 0)).reason is FailureReason.INVALID
    assert read(folder)[0].status is ReadStatus.MISSING
    assert temp_files(tmp_path) == []


@pytest.mark.parametrize(("namespace", "rank"), [("", 0), ("../x", 0), ("a", -1), ("a", 65536)])
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, namespace: str, rank: int) -> None:
    with pytest.raises(ValueError, match="no folder"):
        rank_folder(tmp_path, namespace=namespace, rank=rank)


# What must not be accepted


def changed_byte(data: st.DataObject, content: bytearray) -> None:
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))


def cut_off(data: st.DataObject, content: bytearray) -> None:
    del content[data.draw(st.integers(0, len(content) - 1)) :]


def extended(data: st.DataObject, content: bytearray) -> None:
    content += bytes(data.draw(st.integers(1, 9000)))


def zeroed(data: st.DataObject, content: bytearray) -> None:
    start = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(start + 1, len(content)))
    content[start:end] = bytes(end - start)


def moved(data: st.DataObject, content: bytearray) -> None:
    distance = data.draw(st.integers(1, len(content) - 1))
    content[:] = content[distance:] + content[:distance]


@settings(unhurried, max_examples=100)
@given(data=st.data(), nbytes=st.integers(1, 20_000))
@pytest.mark.parametrize("damage", [changed_byte, cut_off, extended, zeroed, moved])
def test_a_changed_file_is_refused_removed_and_can_be_written_again(
    damage: Callable[[st.DataObject, bytearray], None], data: st.DataObject, nbytes: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = rank_folder(Path(name))
        write(folder, nbytes=nbytes)
        path = path_of(folder.root)
        good = path.read_bytes()
        content = bytearray(good)
        damage(data, content)
        assume(content != good)
        path.write_bytes(content)
        assert refused(folder, nbytes=nbytes)
        folder.close()


def refused(folder: RankFolder, key: bytes = KEY, group: int = 0, nbytes: int = NBYTES) -> bool:
    """Read as damaged and removed; the next write succeeds and is read back."""
    assert read(folder, key, group, nbytes)[0].status is ReadStatus.DAMAGED
    assert not path_of(
        folder.root, key, group, rank=folder.rank, namespace=folder.namespace
    ).exists()
    assert write(folder, key, group, nbytes).status is WriteStatus.WRITTEN
    result, payload = read(folder, key, group, nbytes)
    assert temp_files(folder.root) == []
    return result.status is ReadStatus.OK and payload == payload_of(key, nbytes)


PLACES = list(itertools.product(("a", "b"), (0, 1), (KEY, OTHER), (0, 1)))
WHY = (Reason.NAMESPACE, Reason.RANK, Reason.KEY, Reason.GROUP)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PLACES, 2)))
def test_two_files_that_were_swapped_are_both_refused(
    tmp_path: Path,
    first: tuple[str, int, bytes, int],
    second: tuple[str, int, bytes, int],
) -> None:
    paths = []
    for ns, rank, key, group in (first, second):
        write(rank_folder(tmp_path, namespace=ns, rank=rank), key, group)
        paths.append(path_of(tmp_path, key, group, rank=rank, namespace=ns))
    aside = tmp_path / "aside"
    paths[0].rename(aside)
    paths[1].rename(paths[0])
    aside.rename(paths[1])
    expected = next(why for why, a, b in zip(WHY, first, second, strict=True) if a != b)
    for (ns, rank, key, group), path in zip((first, second), paths, strict=True):
        result, _ = read(rank_folder(tmp_path, namespace=ns, rank=rank), key, group)
        assert (result.status, result.reason) == (ReadStatus.DAMAGED, expected)
        assert not path.exists()
        assert refused_after_rename(tmp_path, ns, rank, key, group)


def refused_after_rename(root: Path, ns: str, rank: int, key: bytes, group: int) -> bool:
    """A good file under a wrong name."""
    folder = rank_folder(root, namespace=ns, rank=rank)
    write(folder, b"k" * 96, 9)
    source = path_of(root, b"k" * 96, 9, rank=rank, namespace=ns)
    source.rename(path_of(root, key, group, rank=rank, namespace=ns))
    return refused(folder, key, group)


@unhurried
@given(nbytes=st.integers(1, 9000), asked=st.integers(1, 9000))
def test_a_file_of_another_length_is_refused(nbytes: int, asked: int) -> None:
    assume(nbytes != asked)
    with tempfile.TemporaryDirectory() as name:
        folder = rank_folder(Path(name))
        write(folder, nbytes=nbytes)
        assert refused(folder, nbytes=asked)
        folder.close()


def test_a_good_file_that_took_a_damaged_ones_place_is_left(tmp_path: Path) -> None:
    """Put there when the damaged one has been read and is about to be removed."""

    class Replacing(Files):
        def rename(self, src: str, dst: str, **folders: int) -> None:
            if src.endswith(".kv"):
                path_of(tmp_path).unlink()
                write(rank_folder(tmp_path))
            super().rename(src, dst, **folders)

    write(rank_folder(tmp_path), payload=payload_of(OTHER))
    content = bytearray(path_of(tmp_path).read_bytes())
    content[5000] ^= 1
    path_of(tmp_path).write_bytes(content)
    folder = rank_folder(tmp_path, files=Replacing())
    assert read(folder)[0].status is ReadStatus.DAMAGED
    result, payload = read(rank_folder(tmp_path))
    assert (result.status, payload) == (ReadStatus.OK, payload_of(KEY))
    assert temp_files(tmp_path) == []


# Folders


def test_folders_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(rank_folder(tmp_path / "a" / "root"))
    finally:
        os.umask(before)
    made = list((tmp_path / "a").rglob("*"))
    assert len(made) == 6
    for path in [tmp_path / "a", *made]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


@pytest.mark.parametrize("level", [".", NAMESPACE, f"{NAMESPACE}/r0", f"{NAMESPACE}/r0/00"])
def test_folders_that_were_deleted_are_made_again(tmp_path: Path, level: str) -> None:
    folder = rank_folder(tmp_path / "root")
    write(folder)
    shutil.rmtree(tmp_path / "root" / level)
    assert read(folder)[0].status is ReadStatus.MISSING
    assert not folder.remove(KEY, 0)
    assert write(folder).status is WriteStatus.WRITTEN
    assert read(folder)[0].status is ReadStatus.OK


@pytest.mark.parametrize("call", ["read", "write", "remove"])
@pytest.mark.parametrize("level", [".", NAMESPACE, f"{NAMESPACE}/r0", f"{NAMESPACE}/r0/00"])
def test_folders_that_another_process_made_anew_are_found(
    tmp_path: Path, level: str, call: str
) -> None:
    folder = rank_folder(tmp_path / "root")
    write(folder)
    shutil.rmtree(tmp_path / "root" / level)
    write(rank_folder(tmp_path / "root"))
    if call == "read":
        assert read(folder)[0].status is ReadStatus.OK
    elif call == "write":
        assert write(folder, OTHER).status is WriteStatus.WRITTEN
        assert path_of(tmp_path / "root", OTHER).exists()
    else:
        assert folder.remove(KEY, 0)
        assert not path_of(tmp_path / "root").exists()


def test_a_folder_for_temporary_files_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    folder = rank_folder(tmp_path)
    write(folder)
    shutil.rmtree(tmp_path / NAMESPACE / "r0" / "tmp")
    assert write(folder, OTHER).status is WriteStatus.WRITTEN
    assert read(folder, OTHER)[0].status is ReadStatus.OK


LEVELS = [NAMESPACE, f"{NAMESPACE}/r0", f"{NAMESPACE}/r0/00", f"{NAMESPACE}/r0/tmp"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path, level: str) -> None:
    root = tmp_path / "root"
    write(rank_folder(root))
    outside = tmp_path / "outside"
    (root / level).rename(outside)
    (root / level).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    folder = rank_folder(root)
    of_one_chunk = level.endswith("00")
    reason = FailureReason.OCCUPIED if of_one_chunk else FailureReason.FOREIGN
    assert write(folder, KEY[:1] + OTHER).reason is reason
    if of_one_chunk:
        assert read(folder)[0].status is ReadStatus.MISSING
    elif not level.endswith("tmp"):
        assert read(folder)[0].reason is FailureReason.FOREIGN
    if not level.endswith("tmp"):
        assert not folder.remove(KEY, 0)
    assert sorted(outside.rglob("*")) == before


def test_a_link_in_place_of_a_file_is_not_followed_and_may_be_replaced(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = rank_folder(root)
    write(folder)
    outside = tmp_path / "outside"
    path_of(root).rename(outside)
    path_of(root).symlink_to(outside)
    result, _ = read(folder)
    assert result.status is ReadStatus.MISSING
    assert path_of(root).is_symlink()
    before = outside.stat()
    assert write(folder).status is WriteStatus.WRITTEN
    assert not path_of(root).is_symlink()
    assert read(folder)[0].status is ReadStatus.OK
    after = outside.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    folder = rank_folder(tmp_path / "root")
    write(folder)
    assert read(folder)[0].status is ReadStatus.OK
    assert path_of(tmp_path / "real").exists()


def make_socket(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_socket])
def test_what_is_no_file_is_left_alone(
    folder: RankFolder, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    mode = folder.mode
    write(folder)
    path_of(tmp_path).unlink()
    make(path_of(tmp_path))
    result, _ = read(folder)
    assert result.status is ReadStatus.MISSING
    assert path_of(tmp_path).exists()
    assert folder.mode is mode  # it says nothing about files


def test_only_a_plain_file_counts_as_there(tmp_path: Path) -> None:
    """A folder may have a chunk's size."""

    class Folders(Files):
        def stat(self, *args: object, **kwargs: object) -> os.stat_result:
            fields = [*super().stat(*args, **kwargs)]  # type: ignore[arg-type]
            return os.stat_result([stat.S_IFDIR | 0o700, *fields[1:]])

    write(rank_folder(tmp_path))
    assert write(rank_folder(tmp_path, files=Folders())).status is WriteStatus.WRITTEN


def test_a_closed_folder_holds_no_descriptors_and_opens_again(tmp_path: Path) -> None:
    before = open_descriptors()
    folder = rank_folder(tmp_path)
    for first in range(40):
        write(folder, bytes([first]) * 8)
    assert open_descriptors() == before + 42
    folder.close()
    folder.close()
    assert open_descriptors() == before
    assert read(folder, b"\x01" * 8)[0].status is ReadStatus.OK
    folder.close()
    assert open_descriptors() == before


def test_a_process_without_descriptors_gets_those_of_folders(tmp_path: Path) -> None:
    short = False
    files = WatchedFiles(lambda _, name: errno.EMFILE if short and name == "open" else None)
    before = open_descriptors()
    folder = rank_folder(tmp_path, files=files)
    for first in range(4):
        write(folder, bytes([first]) * 32)
    assert open_descriptors() > before
    short = True
    assert read(folder, bytes(32))[0].reason is FailureReason.DESCRIPTORS
    assert open_descriptors() == before
    short = False
    assert read(folder, bytes(32))[0].status is ReadStatus.OK


def test_a_folder_is_closed_after_the_last_call_in_it(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Waiting(Files):
        def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            reached.set()
            assert go_on.wait(30)
            return super().preadv(fd, buffers, offset)

    before = open_descriptors()
    folder = rank_folder(tmp_path, files=Waiting())
    write(folder)
    found: list[ReadStatus] = []
    thread = threading.Thread(target=lambda: found.append(read(folder)[0].status))
    thread.start()
    assert reached.wait(30)
    folder.close()
    while_reading = open_descriptors() - before
    go_on.set()
    thread.join(30)
    assert found == [ReadStatus.OK]
    assert while_reading == 4  # the rank's, the shard's, that of temporary files; the chunk's
    assert open_descriptors() == before


def test_few_calls_are_made_once_the_folders_are_open(tmp_path: Path) -> None:
    files = WatchedFiles()
    folder = rank_folder(tmp_path, files=files)
    write(folder)
    files.calls.clear()
    write(folder, KEY[:1] + OTHER)
    assert files.names == ["stat", "open", "pwritev", "utime", "close", "rename"]
    files.calls.clear()
    read(folder)
    assert files.names == ["open", "fstat", "preadv", "utime", "close"]
    files.calls.clear()
    folder.remove(KEY, 0)
    assert files.names == ["unlink"]


def test_nothing_is_opened_before_it_is_needed(tmp_path: Path) -> None:
    files = WatchedFiles()
    rank_folder(tmp_path, files=files).close()
    assert files.calls == []


def test_a_slots_padding_is_set_to_zero_in_place(tmp_path: Path) -> None:
    view = aligned_buffer(8192)
    view[:] = b"\xff" * 8192
    assert rank_folder(tmp_path).write(KEY, 0, view, 5000, FACTS, 0).status is WriteStatus.WRITTEN
    assert bytes(view) == b"\xff" * 5000 + bytes(3192)


def test_a_folder_in_a_chunks_place_costs_that_chunk_alone(tmp_path: Path) -> None:
    folder = rank_folder(tmp_path)
    write(folder)
    path_of(tmp_path).unlink()
    path_of(tmp_path).mkdir()
    assert write(folder).reason is FailureReason.OCCUPIED
    assert not temp_files(tmp_path)
    assert write(folder, KEY[:1] + OTHER).status is WriteStatus.WRITTEN
