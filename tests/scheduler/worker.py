# SPDX-License-Identifier: Apache-2.0
"""What a model runner knows: the tokens of each request, as far as it has been told or said them.

The scheduler counts draft tokens as computed before it knows which of them were accepted; with
steps in flight a runner therefore takes off what it has rejected since.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tests.scheduler.tokens import (
    DRAFT,
    extend,
    next_token,
    prefix_names,
    proposals,
    root_name,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One request in one step, as the scheduler has it when it plans the step."""

    request_id: str
    start: int
    count: int
    drafts: list[int]
    """-1: whatever the runner's own drafter proposed."""
    tables: Sequence[Sequence[int]]
    tokens: list[int] | None
    """Of a request that is new to the batch or resumed: its whole sequence."""
    salt: str | None
    ahead: list[int]
    """Steps in flight that ran this request since it was last admitted."""


class Stream:
    """One request in the runner's batch."""

    def __init__(self, tokens: Sequence[int], salt: str | None) -> None:
        self.names = prefix_names(tokens, salt)
        self.root = root_name(salt)
        self.drafts: list[int] = []
        self.rejected: dict[int, int] = {}


class Streams:
    """All requests in the runner's batch."""

    def __init__(self, drafts: int, eos_every: int, *, asynchronous: bool) -> None:
        self._num_drafts = drafts
        self._eos_every = eos_every
        self._asynchronous = asynchronous
        self._streams: dict[str, Stream] = {}
        self.accepted = 0
        self.rejected = 0

    def run(self, number: int, row: Row) -> tuple[int, list[int], list[int]]:
        """Run one request in step ``number``.

        Returns:
            The first position computed, the names of the prefixes up to each position that is
            written (those of drafts included), and the tokens sampled.
        """
        if row.tokens is not None:
            self._streams[row.request_id] = Stream(row.tokens, row.salt)
        stream = self._streams[row.request_id]
        start = row.start - sum(stream.rejected.get(step, 0) for step in row.ahead)
        known = start + row.count - len(row.drafts)
        assert start < known <= len(stream.names), (row, start, known, len(stream.names))
        names = stream.names[:known]
        if known < len(stream.names):
            assert not row.drafts
            return start, names, []
        drafts = self._drafts(stream, row.drafts)
        name = names[-1]
        for draft in drafts:
            name = extend(name, draft)
            names.append(name)
        said = self._sample(stream, drafts)
        stream.rejected[number] = len(drafts) + 1 - len(said)
        self.accepted += len(said) - 1
        self.rejected += stream.rejected[number]
        stream.drafts = self._propose(stream.names[-1])
        return start, names, said

    def take_drafts(self, request_ids: Iterable[str]) -> tuple[list[str], list[list[int]]]:
        """What is proposed for the next step."""
        ids = list(request_ids)
        return ids, [list(self._streams[request_id].drafts) for request_id in ids]

    def _drafts(self, stream: Stream, told: list[int]) -> list[int]:
        own = stream.drafts if self._asynchronous else []
        return [
            draft if draft >= 0 else (own[i] if i < len(own) else DRAFT)
            for i, draft in enumerate(told)
        ]

    def _sample(self, stream: Stream, drafts: Sequence[int]) -> list[int]:
        said: list[int] = []
        for draft in (*drafts, None):
            token = next_token(stream.names[-1], self._eos_every)
            said.append(token)
            stream.names.append(extend(stream.names[-1], token))
            if token != draft:
                break
        return said

    def _propose(self, name: int) -> list[int]:
        count = self._num_drafts
        if not self._asynchronous and count:
            count = (name >> 5) % (count + 1)  # a drafter on the host may find fewer, or none
        return proposals(name, count, self._eos_every)
