# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is asked, and what it is told.

A policy orders entries; it holds no bytes and makes no room. Its owner tells it what happens to
each entry and asks for a victim when room is short. Two kinds of owner are provided for:

A **tree** knows each chunk's parent and pins. It calls :meth:`~EvictionPolicy.hold` for a chunk
that has a child or is pinned and :meth:`~EvictionPolicy.release` when it has neither, so only
unpinned leaves are ever victims and a prefix loses its tail before its head, whatever the policy.

A **flat** owner knows no parents. It uses a prefix whole, tail first. Where chunks of it are new it
holds those that are there, so that they do not give way to their own tail, adds the new ones tail
first, then uses those that are there tail first, and releases them in the same order: of two chunks
of a prefix the head is never the older one. Under :class:`~.lru.LRU` and :class:`~.cost.Cost` tails
then go before heads. Under :class:`~.s3fifo.S3FIFO` and :class:`~.arc.ARC` they mostly do: which
queue an entry is in depends on its own history. What is left without its head costs room until its
turn comes, and nothing else.

Every operation is O(1) or O(log n); none walks over the entries. An owner's calls come from one
thread at a time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)

Identity = Callable[[K], Hashable]
"""What an entry is remembered by when it is gone: the same for the same bytes stored again."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """What a policy may weigh of an entry."""

    nbytes: int = 1
    """Its size, in any unit that is the same for all entries of the policy."""
    tokens: int = 1
    """Tokens it covers."""
    position: int = 0
    """How many entries of as many tokens precede it in its prefix."""


class Place(enum.Enum):
    """Where an entry that can be evicted again belongs, in policies that do not know its age."""

    NEWEST = "newest"  # it was in use until now
    OLDEST = "oldest"  # nobody has used it since what was evicted just before was used


class EvictionPolicy(Protocol[K]):
    """Orders entries by who goes next. A key that is not here is ignored, but by `release`."""

    def add(self, key: K, item: Item) -> None:
        """A new entry, just used, which may be evicted. Its key is not known yet."""

    def use(self, keys: Iterable[K]) -> None:
        """One use of these entries together; a flat owner names a prefix tail first.

        A request uses what it finds once, however often it comes back to it.
        """

    def renew(self, keys: Iterable[K]) -> None:
        """A use that was counted goes on: what it is of is the newest again, and used no more."""

    def resize(self, key: K, nbytes: int) -> None:
        """The entry takes so many bytes now; its age and its uses stay."""

    def hold(self, key: K) -> None:
        """The entry cannot be evicted until it is released; holding it twice is holding it once."""

    def release(self, key: K, place: Place = Place.NEWEST) -> None:
        """An entry that is here can be evicted again."""

    def victim(self, coming: Hashable | None = None) -> K | None:
        """Who goes next; stays where it is until :meth:`evict`.

        Args:
            coming: the identity of the entry that room is made for, where that is known.

        Returns:
            None if nothing may be evicted.
        """

    def evict(self, key: K) -> None:
        """The victim has been evicted; the policy may remember that it was here."""

    def remove(self, key: K) -> None:
        """The entry is gone for another reason, and is forgotten."""

    def clear(self) -> None:
        """All entries are gone, and so is what was remembered of others."""

    def may_evict(self, key: K) -> bool:
        """Whether the entry is here and not held."""


def itself(key: K) -> Hashable:
    """The :data:`Identity` of keys that name the bytes themselves."""
    return key
