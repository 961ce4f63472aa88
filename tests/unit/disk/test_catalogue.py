# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from vllm_tiered_kv.policies import Eviction, make_policy
from vllm_tiered_kv.policies.lru import LRU
from vllm_tiered_kv.tiers.disk import catalogue as module
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.entries import FileName, FoundFile

names = st.builds(
    FileName,
    st.sampled_from(["own", "other"]),
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 8).map(lambda i: bytes([i])),
)
sizes = st.sampled_from([8192, 8192, 8192, 4096])
events = st.lists(
    st.one_of(
        st.tuples(st.just("wrote"), names, sizes),
        st.tuples(st.just("forget"), names, sizes),
        st.tuples(st.just("scan"), st.dictionaries(names, sizes, max_size=12), st.integers(0, 1)),
        st.tuples(st.just("late"), names, sizes),
        st.tuples(st.just("victims"), st.integers(0, 40_000), st.integers(1, 5)),
        st.tuples(st.just("keep"), names, sizes),
        st.tuples(st.just("use"), names, sizes),
    ),
    max_size=40,
)


def found(name: FileName, nbytes: int = 8192, used_ns: int = 0) -> FoundFile:
    return FoundFile(name, nbytes, used_ns)


def file(key: int, namespace: str = "own", rank: int = 0, group: int = 0) -> FileName:
    return FileName(namespace, rank, group, bytes([key]))


def opened(ranks: int = 1, eviction: Eviction = Eviction.LRU) -> Catalogue:
    catalogue = Catalogue(ranks, make_policy(eviction), 16)
    catalogue.open("own")
    return catalogue


@settings(max_examples=300, deadline=None)
@given(events, st.sampled_from(Eviction))
def test_it_counts_what_there_is(happened: list[tuple], eviction: Eviction) -> None:  # type: ignore[type-arg]
    catalogue, there = opened(2, eviction), {}
    for what, first, second in happened:
        if what in ("wrote", "late"):
            there[first] = second
            if what == "wrote":
                catalogue.wrote(first, second, 0)
            else:
                catalogue.found_late([found(first, second)])
        elif what == "forget":
            assert catalogue.forget(first) == there.pop(first, 0)
        elif what == "scan":
            catalogue.scan_begins()
            catalogue.found([found(name, nbytes) for name, nbytes in first.items()])
            catalogue.scan_ends(missed=second)
            there = {**there, **first} if second else dict(first)
        elif what == "victims":
            for name in catalogue.victims(first, second):
                assert catalogue.forget(name) == there.pop(name)
        elif what == "keep":
            catalogue.keep(first)
        else:
            catalogue.used_now([first.key])
        assert catalogue.used == sum(there.values())
        assert catalogue.files == len(there)
        assert catalogue.chunks == len({(name.namespace, name.key) for name in there})
        assert all(catalogue.has(name) for name in there)
    for i in range(9):
        for group in range(3):
            whole = all(file(i, rank=rank, group=group) in there for rank in (0, 1))
            assert not catalogue.groups(bytes([i])) >> group & 1 or whole
    while victims := catalogue.victims(1, 1):
        for name in victims:
            assert catalogue.forget(name) == there.pop(name)
    assert not there


def test_the_oldest_found_goes_first_and_a_chunk_is_as_old_as_its_newest_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SORTED_AT_ONCE", 2)
    catalogue = opened()
    catalogue.scan_begins()
    ages = {1: 50, 2: 10, 3: 40, 4: 20, 5: 30}
    catalogue.found([found(file(i), used_ns=age) for i, age in ages.items()])
    catalogue.found([found(file(2, group=1), used_ns=99)])
    catalogue.scan_ends()
    order = [catalogue.victims(1, 1)[0].key[0] for _ in range(5)]
    assert order == [4, 5, 3, 1, 2]


def scan(catalogue: Catalogue, times: dict[FileName, int], since_ns: int) -> None:
    catalogue.scan_begins()
    catalogue.found([found(name, used_ns=at) for name, at in times.items()], since_ns)
    catalogue.scan_ends()


def test_what_others_use_outlives_what_nobody_does() -> None:
    catalogue = opened()
    times = {file(1): 10, file(2): 20, file(3, "other"): 30, file(4, "other"): 40}
    scan(catalogue, times, since_ns=5)
    catalogue.wrote(file(5), 8192, 0)
    times |= {file(5): 60, file(1): 100, file(3, "other"): 90, file(6, "other"): 95}
    scan(catalogue, times, since_ns=50)
    order = [catalogue.victims(1, 1)[0].key[0] for _ in range(6)]
    assert order == [2, 4, 5, 3, 6, 1]


def test_what_is_used_here_is_as_new_as_is_known_here() -> None:
    """Not by its file's time, which is set later and only every few seconds."""
    catalogue = opened()
    scan(catalogue, {file(1): 10, file(2): 20, file(3): 30}, since_ns=5)
    for key in (b"\x03", b"\x02", b"\x01"):
        catalogue.used_now([key])
    for _ in range(2):
        scan(catalogue, {file(1): 60, file(2): 70, file(3): 80}, since_ns=50)
    assert [catalogue.victims(1, 1)[0].key[0] for _ in range(3)] == [3, 2, 1]


def test_what_an_interrupted_scan_has_found_can_be_evicted_after_the_next() -> None:
    catalogue = opened()
    catalogue.scan_begins()
    catalogue.found([found(file(1))])
    catalogue.scan_begins()
    catalogue.found([found(file(1))])
    catalogue.scan_ends()
    assert catalogue.victims(1, 1) == [file(1)]


def test_one_rank_that_lost_its_file_is_seen_by_a_scan() -> None:
    catalogue = opened(ranks=2)
    for rank in (0, 1):
        catalogue.wrote(file(1, rank=rank), 8192, 0)
    assert catalogue.groups(b"\x01") == 1
    catalogue.scan_begins()
    catalogue.found([found(file(1, rank=0))])
    catalogue.scan_ends()
    assert catalogue.groups(b"\x01") == 0
    assert catalogue.used == 8192


def test_what_was_written_during_a_scan_stays() -> None:
    catalogue = opened()
    catalogue.scan_begins()
    catalogue.wrote(file(1), 8192, 0)
    catalogue.scan_ends()
    assert catalogue.groups(b"\x01") == 1


def test_spared_chunks_are_passed_over_and_stay_evictable() -> None:
    catalogue = opened()
    for i in range(3):
        catalogue.wrote(file(i), 8192, 0)
    assert catalogue.victims(1, 9, spared={b"\x00", b"\x01"}) == [file(2)]
    assert catalogue.groups(b"\x00") == 1
    assert catalogue.victims(1 << 20, 9) == [file(0), file(1)]


def test_other_namespaces_are_counted_and_never_offered() -> None:
    catalogue = Catalogue(1, LRU(), 16)
    catalogue.open("own")
    catalogue.wrote(file(1, "other"), 8192, 0)
    assert catalogue.used == 8192
    assert catalogue.groups(b"\x01") == 0
    assert len(catalogue) == 0
