# SPDX-License-Identifier: Apache-2.0
"""A queue by age from which members can be taken for a while and put back where they were."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic

from vllm_tiered_kv.policies.heap import Heap, HeapNode
from vllm_tiered_kv.policies.policy import K


class Member(HeapNode, Generic[K]):
    """An entry; in one :class:`Queue` at a time, whose bytes it counts to also while it is held."""

    __slots__ = ("held", "key", "nbytes", "queue")

    def __init__(self, key: K, nbytes: int, queue: Queue[K]) -> None:
        super().__init__((0,))
        self.key = key
        self.nbytes = nbytes
        self.queue = queue
        self.held = False
        queue.join(self)


class Queue(Generic[K]):
    """Members by when they joined. Joining and leaving are O(1), coming back O(log n).

    Who never leaves for a while stands in a list; who comes back stands in a heap, by age.
    """

    def __init__(self) -> None:
        self._line: OrderedDict[Member[K], None] = OrderedDict()  # oldest first
        self._back: Heap[Member[K]] = Heap()
        self._joined = 0
        self.nbytes = 0

    def join(self, member: Member[K]) -> None:
        """Take in a member of no queue, as the newest."""
        member.queue = self
        self.nbytes += member.nbytes
        self._stand_last(member)

    def leave(self, member: Member[K]) -> None:
        """Let a member go."""
        self.nbytes -= member.nbytes
        self._step_out(member)

    def resize(self, member: Member[K], nbytes: int) -> None:
        """A member takes so many bytes now."""
        self.nbytes += nbytes - member.nbytes
        member.nbytes = nbytes

    def renew(self, member: Member[K]) -> None:
        """Make a member the newest."""
        if not member.held:
            self._step_out(member)
        self._stand_last(member)

    def hold(self, member: Member[K]) -> None:
        """Pass a member over until :meth:`release`."""
        if not member.held:
            self._step_out(member)
            member.held = True

    def release(self, member: Member[K]) -> None:
        """Put a member back where it belongs by its age."""
        if not member.held:
            return
        member.held = False
        if member.rank[0] == self._joined:
            self._line[member] = None
        else:
            self._back.push(member)

    def oldest(self) -> Member[K] | None:
        """The oldest that is not held."""
        first = next(iter(self._line), None)
        back = self._back.least()
        if first is None or back is None:
            return first or back
        return first if first.rank < back.rank else back

    def _stand_last(self, member: Member[K]) -> None:
        self._joined += 1
        member.rank = (self._joined,)
        if not member.held:
            self._line[member] = None

    def _step_out(self, member: Member[K]) -> None:
        if member.inside:
            self._back.take_out(member)
        else:
            self._line.pop(member, None)
