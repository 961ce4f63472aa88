# SPDX-License-Identifier: Apache-2.0
"""What is published of an index, against what the index holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from vllm_tiered_kv.scheduler.event_log import ChunkFacts, Piece, TierLog
from vllm_tiered_kv.scheduler.index import ABSENT, ChunkIndex, Node, NodeState

SLOTS = 8


def facts(key: bytes) -> ChunkFacts:
    """A chunk of three blocks: siblings share the first one, ``a`` and ``b`` the second one too."""
    parent, letter = key[:-1], key[-1:]
    return ChunkFacts(
        (parent + b"1", parent + (b"2" if letter in b"ab" else b"3"), key), None, (), {}
    )


class Reader:
    """Which blocks can be read, by what was published: ``(group, hash)``."""

    def __init__(self) -> None:
        self.held: set[tuple[int, bytes]] = set()

    def apply(self, piece: Piece) -> None:
        for part in piece.removed:
            gone = part.hashes[part.kept :]
            self.held.difference_update((part.group, h) for h in gone)
        for stored in piece.stored:
            groups = [g for g in (0, 1) if stored.groups >> g & 1]
            self.held.update((g, h) for g in groups for h in stored.facts.hashes)


def ready(index: ChunkIndex) -> set[tuple[int, bytes]]:
    nodes = [n for n in index._nodes.values() if n.state is NodeState.READY]
    parts = [(n, g) for n in nodes for g, slot in enumerate(n.slots) if slot != ABSENT]
    return {(g, h) for n, g in parts for h in facts(n.key).hashes}


class LogMachine(RuleBasedStateMachine):
    """Any order of stores, failures, evictions and resets, read in pieces of any size."""

    stores = Bundle("stores")
    extensions = Bundle("extensions")
    waiting, pieces = 1000, 3

    def __init__(self) -> None:
        super().__init__()
        self.dropped = 0
        self.log = TierLog(
            SLOTS,
            self.drop,
            max_waiting=self.waiting,
            max_stored_events=self.pieces,
            max_removed_hashes=self.pieces,
        )
        self.index = ChunkIndex(SLOTS, 2, self.log)
        # Two kinds of subscribers: a reset of the device means nothing, or everything.
        self.exact, self.forgetful = Reader(), Reader()

    def drop(self) -> None:
        self.dropped += 1

    @rule(
        target=stores,
        path=st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
        groups=st.sampled_from([(0,), (0, 1), ()]),
    )
    def begin_store(self, path: list[str], groups: tuple[int, ...]):
        parent, begun = None, []
        for i in range(len(path)):
            key = "".join(path[: i + 1]).rjust(5, "_").encode()
            node = self.index.get(key)
            if node is not None:
                self.index.adopt(node, parent)
                self.use(node)
            else:
                node = self.index.reserve(key, parent, groups)
                if node is None:
                    break
                if groups:
                    self.log.planned(key, facts(key))
                begun.append(node)
            parent = node
        return begun

    @rule(nodes=consumes(stores), ok=st.booleans())
    def end_store(self, nodes: list[Node], ok: bool) -> None:
        for node in nodes:
            if ok:
                self.index.commit(node)
            else:
                self.index.discard(node)
            self.index.unpin(node)

    @rule(target=extensions, data=st.data())
    def begin_to_extend(self, data):
        nodes = [n for n in self.index._nodes.values() if n.slots[1] == ABSENT and not n.coming]
        if not nodes:
            return None
        node = data.draw(st.sampled_from(nodes))
        if not self.index.extend(node, (1,)):
            return None
        self.log.planned(node.key, facts(node.key))
        return node

    @rule(node=consumes(extensions), ok=st.booleans())
    def end_to_extend(self, node: Node | None, ok: bool) -> None:
        if node is not None:
            self.index.extended(node, (1,), arrived=ok)

    @rule(data=st.data())
    def lose(self, data) -> None:
        if nodes := list(self.index._nodes.values()):
            self.index.discard(data.draw(st.sampled_from(nodes)))

    @rule()
    def reset(self) -> None:
        self.index.clear()

    @rule()
    def reset_device(self) -> None:
        self.log.device_cleared()
        self.forgetful.held.clear()

    @rule()
    def take(self) -> None:
        self.read()

    @rule()
    def use_all(self) -> None:
        for node in list(self.index._nodes.values()):
            self.drain()  # so that the smallest queue takes the next one
            self.use(node)
        self.drain()
        assert self.forgetful.held == self.exact.held == ready(self.index)

    @rule()
    def drain(self) -> None:
        while self.read():
            pass
        if not self.dropped:
            assert self.exact.held == ready(self.index)
        assert self.exact.held <= ready(self.index)
        assert self.forgetful.held <= ready(self.index)
        assert len(self.log._shared) <= len(self.log._told)

    def use(self, node: Node) -> None:
        if not self.log.is_known(node):
            self.log.announce(node, facts(node.key))

    def read(self) -> bool:
        piece = self.log.take()
        assert all(chunk.groups for chunk in piece.stored)
        self.exact.apply(piece)
        self.forgetful.apply(piece)
        return bool(piece.removed or piece.stored)

    @invariant()
    def nothing_grows_without_bound(self) -> None:
        log = self.log
        assert len(log._waiting) <= self.waiting
        assert len(log._told) + len(log._leaving) <= 2 * (SLOTS + 2 * self.waiting)
        assert len(log._planned) <= 2 * SLOTS


class TightLogMachine(LogMachine):
    """A queue that overflows."""

    waiting, pieces = 2, 1


TestLog = LogMachine.TestCase
TestTightLog = TightLogMachine.TestCase
_SETTINGS = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLog.settings = TestTightLog.settings = _SETTINGS
