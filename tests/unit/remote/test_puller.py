# SPDX-License-Identifier: Apache-2.0
"""A pull of several parts is good when all are, and its memory is free when that of all is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_kv.remote.transport import Endpoint, Memory, Outcome, Read, ReadResult
from vllm_tiered_kv.worker.remote.plan import Runs
from vllm_tiered_kv.worker.remote.puller import Part, Puller

ONE = np.array([1], dtype=np.int64)


class Script:
    """A transport whose reads end as the test says."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.cancelled: list[int] = []
        self.results: list[ReadResult] = []
        self.free: list[int] = []

    def export(self) -> Endpoint | None:
        return None

    def connect(self, endpoint: Endpoint) -> None: ...

    def disconnect(self, incarnation: str) -> None: ...

    def start_read(self, read: Read) -> None:
        self.reads.append(read)

    def cancel(self, jobs: Sequence[int]) -> None:
        self.cancelled += jobs

    def poll(self) -> list[ReadResult]:
        results, self.results = self.results, []
        return results

    def settled(self) -> list[int]:
        free, self.free = self.free, []
        return free

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self, timeout: float) -> bool:
        return True


def parts(count: int) -> list[Part]:
    return [Part(f"peer {i}", Runs(i, ONE, ONE, ONE)) for i in range(count)]


def started(count: int) -> tuple[Script, Puller]:
    script = Script()
    puller = Puller(script)
    puller.start(7, parts(count), deadline=5.0)
    return script, puller


def test_all_parts_make_a_good_pull() -> None:
    script, puller = started(2)
    assert [(read.peer, read.deadline) for read in script.reads] == [
        ("peer 0", 5.0),
        ("peer 1", 5.0),
    ]
    first, second = (read.job for read in script.reads)
    script.results = [ReadResult(first, Outcome.DONE, nbytes=3, seconds=1.0)]
    assert puller.poll() == []
    script.results = [ReadResult(second, Outcome.DONE, nbytes=4, seconds=2.0)]
    (result,) = puller.poll()
    assert (result.pull, result.outcome, result.memory) == (7, Outcome.DONE, Memory.FREE)
    assert (result.nbytes, result.seconds) == (7, 2.0)
    assert puller.poll() == []
    assert puller.settled() == []


def test_a_bad_part_calls_the_others_off() -> None:
    script, puller = started(3)
    jobs = [read.job for read in script.reads]
    script.results = [ReadResult(jobs[1], Outcome.FAILED, kind="remote_range", reason="why")]
    assert puller.poll() == []
    assert script.cancelled == [jobs[0], jobs[2]]
    script.results = [
        ReadResult(jobs[0], Outcome.GIVEN_UP, Memory.QUARANTINED),
        ReadResult(jobs[2], Outcome.DONE, nbytes=5),
    ]
    (result,) = puller.poll()
    assert (result.outcome, result.memory) == (Outcome.FAILED, Memory.QUARANTINED)
    assert (result.kind, result.reason, result.nbytes) == ("remote_range", "why", 0)
    assert puller.settled() == []
    script.free = [jobs[0]]
    assert puller.settled() == [7]


def test_a_pull_can_be_called_off() -> None:
    script, puller = started(2)
    puller.cancel([7, 8])
    assert script.cancelled == [read.job for read in script.reads]


def test_a_pull_without_parts_is_done() -> None:
    _, puller = started(0)
    (result,) = puller.poll()
    assert (result.outcome, result.memory, result.nbytes) == (Outcome.DONE, Memory.FREE, 0)


@settings(deadline=None)
@given(
    ends=st.lists(
        st.tuples(st.sampled_from(Outcome), st.sampled_from(Memory)), min_size=1, max_size=5
    ),
    data=st.data(),
)
def test_memory_is_free_when_that_of_every_part_is(
    ends: list[tuple[Outcome, Memory]], data: st.DataObject
) -> None:
    script, puller = started(len(ends))
    waiting = {}
    for read, (outcome, memory) in zip(script.reads, ends, strict=True):
        held = outcome is not Outcome.DONE and memory is Memory.QUARANTINED
        waiting[read.job] = ReadResult(
            read.job, outcome, Memory.QUARANTINED if held else Memory.FREE
        )
    quarantined: set[int] = set()
    results, settled = [], []
    while waiting or quarantined:
        if waiting and (not quarantined or data.draw(st.booleans())):
            job = data.draw(st.sampled_from(sorted(waiting)))
            script.results = [waiting.pop(job)]
            if script.results[0].memory is Memory.QUARANTINED:
                quarantined.add(job)
        else:
            job = data.draw(st.sampled_from(sorted(quarantined)))
            quarantined.discard(job)
            script.free = [job]
        results += puller.poll()
        settled += puller.settled()
        for result in results:
            assert not waiting
            free = result.memory is Memory.FREE or settled
            assert bool(free) is not bool(quarantined)
    (result,) = results
    assert settled == ([7] if result.memory is Memory.QUARANTINED else [])
    assert (result.outcome is Outcome.DONE) is all(end is Outcome.DONE for end, _ in ends)
