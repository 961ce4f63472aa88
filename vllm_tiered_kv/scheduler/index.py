# SPDX-License-Identifier: Apache-2.0
"""Where every stored chunk lives: a tree of prefixes.

A node stands for one chunk of a prefix, all KV cache groups together; its key is the hash
of the chunk's last block, which vLLM chains over the whole prefix. Only unpinned leaves are
evicted, so a prefix always loses its tail before its head; which of them goes next is a policy's
choice. Every operation costs the chunks it is given, never the size of the index.

There is one thread here: the scheduler's. No locks.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Protocol

from vllm_tiered_kv.policies import Eviction, EvictionPolicy, Item, Place, make_policy
from vllm_tiered_kv.scheduler.slots import SlotAllocator

ABSENT = -1
"""In ``Node.slots``: this group's part of the chunk is not stored."""


class NodeState(enum.Enum):
    STORING = "storing"  # its slots are being written
    READY = "ready"  # may be offered
    GONE = "gone"  # out of the index; slots are freed when the last pin goes


class Node:
    """One chunk. Mutable, owned by the index; others read it and hold it by pins."""

    __slots__ = (
        "children",
        "coming",
        "key",
        "last_used",
        "parent",
        "pins",
        "position",
        "slots",
        "state",
    )

    def __init__(self, key: bytes, parent: Node | None, slots: Sequence[int], now: int) -> None:
        self.key = key
        self.parent = parent
        self.position = 0
        """Chunks before it in its prefix."""
        self.slots = tuple(slots)
        """By group. No list: there may be a million of these, and the garbage collector stops the
        scheduler's thread to look into each list, but not into tuples of numbers."""
        self.coming: dict[int, int] = {}
        """Slots being written for groups whose part is to be added, by group."""
        self.last_used = now
        self.children = 0
        self.pins = 0
        self.state = NodeState.STORING

    @property
    def parts(self) -> int:
        """Bit ``g``: it has group ``g``'s part."""
        mask = 0
        for group, slot in enumerate(self.slots):
            if slot != ABSENT:
                mask |= 1 << group
        return mask

    @property
    def num_slots(self) -> int:
        """Slots that it has, those being written included."""
        return sum(slot != ABSENT for slot in self.slots) + len(self.coming)

    @property
    def is_empty(self) -> bool:
        """Whether it has no part: the chunks after it can be found through it, and no more."""
        return all(slot == ABSENT for slot in self.slots)

    @property
    def is_arriving(self) -> bool:
        """Whether it, or a part of it, is being written and can be offered then."""
        return self.state is NodeState.STORING or (
            self.state is NodeState.READY and bool(self.coming)
        )


class IndexListener(Protocol):
    """Is told what can be offered; called on the scheduler's thread, must cost next to nothing."""

    def stored(self, node: Node) -> None:
        """A chunk has become READY, or parts that were being added to a READY one have ended."""

    def removed(self, node: Node) -> None:
        """A chunk has left the index, READY or not; its slots are still named in it."""

    def cleared(self) -> None:
        """All chunks have left at once."""


class Guard(Protocol):
    """Knows which slots others may be reading; called on the scheduler's thread. What it says is
    pinned stays so until it unpins it."""

    def stored(self, node: Node) -> None:
        """A chunk has become READY, or has more parts."""

    def lets_go(self, node: Node) -> bool:
        """A chunk is to be evicted; False: it is being read, and pinned."""

    def withdraws(self, node: Node) -> bool:
        """A chunk has left the index; True: it is still being read, and pinned."""

    def clears(self) -> Sequence[Node]:
        """All chunks leave at once; those that are being read are pinned."""


def chunk_policy(eviction: Eviction) -> EvictionPolicy[Node]:
    """A policy for a :class:`ChunkIndex`; what is gone it remembers by the chunk's key."""
    return make_policy(eviction, identity=_key_of)


def _key_of(node: Node) -> Hashable:
    return node.key


class ChunkIndex:
    """The index of the CPU tier.

    Args:
        num_slots: slots of the tier; one holds one group's part of one chunk.
        num_groups: KV cache groups.
        listener: who is told of changes; None for nobody.
        policy: who goes next, from :func:`chunk_policy`; None for least recently used. It counts
            sizes in slots.
        chunk_tokens: tokens of a chunk, which a policy may weigh.
    """

    def __init__(
        self,
        num_slots: int,
        num_groups: int,
        listener: IndexListener | None = None,
        policy: EvictionPolicy[Node] | None = None,
        chunk_tokens: int = 1,
    ) -> None:
        self._slots = SlotAllocator(num_slots)
        self._max_nodes = 2 * num_slots  # those that are empty hold no slot
        self._num_groups = num_groups
        self._listener = listener
        self._guard: Guard | None = None
        self._nodes: dict[bytes, Node] = {}
        self._policy = policy if policy is not None else chunk_policy(Eviction.LRU)
        self._chunk_tokens = chunk_tokens
        self._pinned: set[Node] = set()
        self._late: dict[Node, list[int]] = {}
        """Slots of parts that came to nothing, until nobody holds their node."""
        self._clock = 0
        self.evicted = 0
        """Chunks evicted so far."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_slots(self) -> int:
        return self._slots.total

    @property
    def used_slots(self) -> int:
        return self._slots.used

    @property
    def free_slots(self) -> int:
        return self._slots.free

    def limit(self, num_slots: int) -> None:
        """A rank has room for so many slots only: store in no others from now on."""
        self._slots.limit(num_slots)

    def guard(self, guard: Guard) -> None:
        """Have others read chunks from now on."""
        self._guard = guard

    @property
    def pinned(self) -> int:
        """Nodes that are being read or written."""
        return len(self._pinned)

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def ready_run(self, keys: Sequence[bytes], start: int) -> list[Node]:
        """The longest run of READY nodes ``keys[start], keys[start + 1], ...``."""
        nodes = self._nodes
        run = []
        for i in range(start, len(keys)):
            node = nodes.get(keys[i])
            if node is None or node.state is not NodeState.READY:
                break
            run.append(node)
        return run

    def touch(self, nodes: Sequence[Node], *, again: Sequence[Node] = ()) -> None:
        """Make these the most recently used; a prefix is given whole, head first.

        Args:
            nodes: those that are used once more.
            again: those that are in use still, or came into the index for this very use.
        """
        self._clock += 1
        now = self._clock
        for node in (*nodes, *again):
            node.last_used = now
        self._policy.use(nodes[::-1])
        if again:
            self._policy.renew(again[::-1])

    # -- storing ---------------------------------------------------------------

    def reserve(
        self, key: bytes, parent: Node | None, groups: Sequence[int], later: Sequence[int] = ()
    ) -> Node | None:
        """Room for a chunk that is not in the index, evicting what the policy names.

        The node starts STORING and pinned once. ``parent`` is never evicted for its child.

        Args:
            key: the chunk's key, absent from the index.
            parent: the node of the chunk before, None for the first chunk of a prefix.
            groups: the groups whose part will be stored; none where all have lost it.
            later: those of them that are written apart from the rest, and whose end
                :meth:`extended` is told; the node is pinned once more for them.

        Returns:
            None if there is no room that may be taken.
        """
        taken = self._take(len(groups), key, keep=parent)
        if taken is None:
            return None
        self._clock += 1
        slots = [ABSENT] * self._num_groups
        for group, slot in zip(groups, taken, strict=True):
            slots[group] = slot
        now = [ABSENT if group in later else slot for group, slot in enumerate(slots)]
        node = Node(key, None, now, self._clock)
        node.coming.update((group, slots[group]) for group in later)
        self._nodes[key] = node
        self.adopt(node, parent)
        self._policy.add(node, Item(len(taken), self._chunk_tokens, node.position))
        self.pin(node)
        if later:
            self.pin(node)
        return node

    def borrow(self, groups: Sequence[int]) -> Node | None:
        """Slots for bytes that are nobody's chunk, evicting if need be.

        The node is not in the index and never will be; its slots are free with its last pin, of
        which it has one. None if there is no room.
        """
        taken = self._take(len(groups), b"", keep=None)
        if taken is None:
            return None
        slots = [ABSENT] * self._num_groups
        for group, slot in zip(groups, taken, strict=True):
            slots[group] = slot
        node = Node(b"", None, slots, self._clock)
        node.state = NodeState.GONE
        node.pins = 1
        self._pinned.add(node)
        return node

    def extend(self, node: Node, groups: Sequence[int]) -> bool:
        """Room for parts that a stored chunk lacks; False if there is none.

        The node is pinned once more, until :meth:`extended` has said how it ended.

        Args:
            node: a node that is in the index.
            groups: groups whose part the node has not, and that are not on their way either.
        """
        taken = self._take(len(groups), node.key, keep=node)
        if taken is None:
            return False
        node.coming.update(zip(groups, taken, strict=True))
        self._policy.resize(node, node.num_slots)
        self.pin(node)
        return True

    def extended(self, node: Node, groups: Sequence[int], *, arrived: bool) -> None:
        """The parts have been written, or will never be; gives up the pin."""
        for group in groups:
            slot = node.coming.pop(group)
            if arrived and node.state is not NodeState.GONE and node.slots[group] == ABSENT:
                node.slots = (*node.slots[:group], slot, *node.slots[group + 1 :])
            else:  # whoever else holds the node may be reading it
                self._late.setdefault(node, []).append(slot)
        self._policy.resize(node, node.num_slots)
        if node.state is NodeState.READY:
            self._tell_stored(node)
        self.unpin(node)

    def adopt(self, node: Node, parent: Node | None) -> None:
        """Tie a node to the chunk before it, if it has lost it or never had it."""
        if parent is None or parent.state is NodeState.GONE:
            return
        if node.parent is not None and node.parent.state is not NodeState.GONE:
            return
        node.parent = parent
        node.position = parent.position + 1
        parent.children += 1
        self._policy.hold(parent)

    def commit(self, node: Node) -> None:
        """Its slots are written on every rank: it may be offered."""
        if node.state is not NodeState.STORING:
            return
        node.state = NodeState.READY
        self._tell_stored(node)

    def discard(self, node: Node) -> None:
        """Forget a chunk at once; its slots are free when nobody reads or writes them."""
        if node.state is NodeState.GONE:
            return
        node.state = NodeState.GONE
        if self._nodes.get(node.key) is node:
            del self._nodes[node.key]
        if self._listener is not None:
            self._listener.removed(node)
        if self._guard is not None and self._guard.withdraws(node):
            self.pin(node)
        self._policy.remove(node)
        if (parent := self._leave_parent(node)) is not None:
            self._policy.release(parent)
        if node.pins == 0:
            self._free_slots(node)

    # -- pins ------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Keep the node's slots while they are read or written."""
        if node.pins == 0:
            self._pinned.add(node)
        self._hold(node)

    def unpin(self, node: Node) -> None:
        """Give up one :meth:`pin`."""
        if node.pins == 1:
            self._pinned.discard(node)
        self._release(node)

    def clear(self) -> None:
        """Forget everything; slots that are read or written follow when their pins go."""
        if self._guard is not None:
            for node in self._guard.clears():
                self.pin(node)
        for node in self._pinned:
            node.state = NodeState.GONE
            node.parent = None
            node.children = 0
        held = [slot for node in self._pinned for slot in node.slots if slot != ABSENT]
        held += [slot for node in self._pinned for slot in node.coming.values()]
        held += [slot for slots in self._late.values() for slot in slots]
        self._slots.reset(held)
        self._nodes = {}
        self._policy.clear()
        if self._listener is not None:
            self._listener.cleared()

    # -- inside ----------------------------------------------------------------

    def _take(self, count: int, coming: bytes, *, keep: Node | None) -> list[int] | None:
        """Free slots for a chunk, evicting others, but never ``keep``."""
        if keep is not None:
            self._hold(keep)
        taken: list[int] = []
        room = len(self._nodes) < self._max_nodes or self._evict_one(coming)
        while room and len(taken) < count:
            slot = self._slots.take()
            if slot is not None:
                taken.append(slot)
            elif not self._evict_one(coming):
                break
        if keep is not None:
            self._release(keep)
        if room and len(taken) == count:
            return taken
        for slot in taken:
            self._slots.give_back(slot)
        return None

    def _tell_stored(self, node: Node) -> None:
        if self._listener is not None:
            self._listener.stored(node)
        if self._guard is not None:
            self._guard.stored(node)

    def _hold(self, node: Node) -> None:
        node.pins += 1
        if node.state is not NodeState.GONE:
            self._policy.hold(node)

    def _release(self, node: Node) -> None:
        node.pins -= 1
        if node.pins:
            return
        if self._late:
            for slot in self._late.pop(node, ()):
                self._slots.give_back(slot)
        if node.state is NodeState.GONE:
            self._free_slots(node)
        elif node.children == 0:
            self._policy.release(node)

    def _evict_one(self, coming: bytes) -> bool:
        node = self._policy.victim(coming)
        while node is not None and self._guard is not None and not self._guard.lets_go(node):
            self.pin(node)
            node = self._policy.victim(coming)
        if node is None:
            return False
        self._policy.evict(node)
        node.state = NodeState.GONE
        self._nodes.pop(node.key, None)
        if self._listener is not None:
            self._listener.removed(node)
        if (parent := self._leave_parent(node)) is not None:
            # As old as the child it lost, unless it was used without it since then.
            unused = parent.last_used <= node.last_used
            self._policy.release(parent, Place.OLDEST if unused else Place.NEWEST)
        self.evicted += not node.is_empty
        self._free_slots(node)
        return True

    def _leave_parent(self, node: Node) -> Node | None:
        """Untie a node; returns its parent if that has become a leaf that can be evicted."""
        parent, node.parent = node.parent, None
        if parent is None or parent.state is NodeState.GONE:
            return None
        parent.children -= 1
        return None if parent.children or parent.pins else parent

    def _free_slots(self, node: Node) -> None:
        for slot in node.slots:
            if slot != ABSENT:
                self._slots.give_back(slot)
        node.slots = (ABSENT,) * self._num_groups
