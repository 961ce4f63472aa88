# SPDX-License-Identifier: Apache-2.0
"""What lies in the folder: every chunk of every namespace, its bytes, and who goes first.

No I/O. It belongs to the agent's thread; others may ask for :meth:`Catalogue.groups` and
:meth:`Catalogue.masks`, and take from :attr:`Catalogue.gone`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from vllm_tiered_kv.policies import EvictionPolicy, Item
from vllm_tiered_kv.tiers.disk.entries import (
    NEVER,
    ChunkName,
    FileName,
    FoundFile,
    PolicyKey,
    file_bit,
    files_of,
    groups_in,
)
from vllm_tiered_kv.tiers.disk.settings import ENTRY_BYTES
from vllm_tiered_kv.tiers.disk.whole import Whole

MAX_SKIPPED = 64
"""Chunks passed over for one choice of victims, because they are being written."""
MAX_SHARED_INTS = 4096
SORTED_AT_ONCE = 4096
OWN_SCANS = 2
"""Scans for which a file's time may be from a use here."""
MAX_GONE = 1 << 16
"""Chunks that have gone and nobody has asked for yet."""


class _Chunk(msgspec.Struct, gc=False):
    """Its files, as bits ``file_bit``. A plain row: there are millions."""

    parts: int = 0
    seen: int = 0
    """Those that the last scan has met, or that were written since it began."""
    complete: int = 0
    """Bit ``g``: every rank has its part of group ``g``. Only in our own namespace."""
    nbytes: int = 0
    scan: int = 0
    """The scan that :attr:`seen` is of."""
    fresh: bool = False
    """Whether any of its files was written here."""
    used: int = -OWN_SCANS - 1
    """The scan after whose beginning it was last used here."""


class Catalogue:
    """The index of the disk tier.

    Args:
        ranks: ranks whose files make a chunk of ours whole.
        policy: who goes first, over all namespaces.
        chunk_tokens: tokens of a chunk of ours.
    """

    def __init__(self, ranks: int, policy: EvictionPolicy[PolicyKey], chunk_tokens: int) -> None:
        self._whole = Whole(ranks)
        self._policy = policy
        self._chunk_tokens = chunk_tokens
        self._own: dict[bytes, _Chunk] = {}
        self._others: dict[ChunkName, _Chunk] = {}
        self._namespace = ""
        self._scan = 0
        # Files of one kind have one size; hardly any is kept for itself.
        self._usual: dict[tuple[str, int, int], int] = {}
        self._unusual: dict[FileName, int] = {}
        self._ints: dict[int, int] = {}
        self._waiting: dict[ChunkName, int] = {}  # found by a scan: their last use
        self._used: dict[ChunkName, int] = {}  # the same of those that others have used
        self._distrusted: set[bytes] = set()
        self._coming: Counter[bytes] = Counter()
        """Of those, how many writes are under way: what is removed now might be there again."""
        self._strays: set[bytes] = set()
        """Chunks of which there may be files that were written here and that nobody knows of ..."""
        self._old_strays: set[bytes] = set()
        """... since before the scan began."""
        self.gone: deque[bytes] | None = None
        """Chunks of ours of which less can be read than before; None where nobody asks."""
        self.missed = 0
        """How many were left out of ``gone``."""
        self.used = 0
        """Bytes of all files."""
        self.files = 0
        self.chunks = 0

    @property
    def namespace(self) -> str:
        """Ours; empty before :meth:`open`."""
        return self._namespace

    def open(self, namespace: str) -> None:
        """Say which namespace is ours, before anything is entered."""
        self._namespace = namespace

    def ranks_have(self, groups: Sequence[int]) -> None:
        """Which groups each rank has layers of, as bits: of the others it has no files.

        Pipeline stages may differ in that. It costs a walk over all chunks if it is news.
        """
        if not self._whole.ranks_have(groups):
            return
        for key, chunk in self._own.items():
            if key not in self._distrusted:
                complete = self._whole.groups(chunk.parts, groups_in(chunk.parts))
                self._offer(key, chunk, complete)

    def a_rank_with(self, group: int) -> int:
        """The first rank that has files of a group."""
        return self._whole.a_rank_with(group)

    def groups(self, key: bytes) -> int:
        """Bit ``g``: group ``g``'s part of this chunk is there on every rank. Any thread."""
        chunk = self._own.get(key)
        return 0 if chunk is None else chunk.complete

    def masks(self, keys: Iterable[bytes]) -> Iterator[int]:
        """:meth:`groups` of many chunks, each looked up when it is asked for. Any thread."""
        get = self._own.get
        return (0 if (chunk := get(key)) is None else chunk.complete for key in keys)

    def __len__(self) -> int:
        """Chunks of our own namespace of which there is anything."""
        return len(self._own)

    # -- what happens to files ---------------------------------------------------------

    def wrote(self, name: FileName, nbytes: int, position: int) -> None:
        """A file has been written here, or was found in its place when it should have been.

        Args:
            name: the file.
            nbytes: its size.
            position: index of the chunk in its prefix.
        """
        chunk, is_new = self._enter(name, nbytes)
        chunk.fresh = True
        chunk.used = self._scan
        if is_new:
            self._policy.add(self._key(name), Item(nbytes, self._chunk_tokens, position))

    def used_now(self, keys: Iterable[bytes]) -> None:
        """Chunks of ours were used once more; those of a prefix are given tail first."""
        self._policy.use(self._known(keys))

    def renew(self, keys: Iterable[bytes]) -> None:
        """Chunks of ours, given tail first, are as new as what was used or written last."""
        self._policy.renew(self._known(keys))

    def _known(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of these chunks of ours that there are; they are used here."""
        known = []
        for key in keys:
            if (chunk := self._own.get(key)) is not None:
                chunk.used = self._scan
                known.append(key)
        return known

    def touch(self, names: Iterable[FileName]) -> None:
        """Files of any namespace were used; a prefix is given whole, tail first."""
        known = []
        for name in names:
            if (chunk := self._get(name)) is not None:
                chunk.used = self._scan
                known.append(self._key(name))
        self._policy.use(known)

    def forget(self, name: FileName) -> int:
        """A file is gone; returns the bytes it took, 0 if it was not here."""
        chunk = self._get(name)
        bit = file_bit(name.rank, name.group)
        if chunk is None or not chunk.parts & bit:
            return 0
        nbytes = self._size_of(name)
        self._unusual.pop(name, None)
        chunk.parts = self._shared(chunk.parts & ~bit)
        chunk.seen = self._shared(chunk.seen & ~bit)
        chunk.nbytes = self._shared(chunk.nbytes - nbytes)
        self.used -= nbytes
        self.files -= 1
        self._policy.resize(self._key(name), chunk.nbytes)
        self._settle(name, chunk)
        return nbytes

    def lose(self, name: FileName) -> int:
        """A file was seen not to be there; it may have been written again meanwhile.

        Returns:
            The bytes it took, 0 if it was not here.
        """
        if (chunk := self._get(name)) is not None and chunk.fresh:
            self.stray(name.key)
        return self.forget(name)

    def stray(self, key: bytes) -> None:
        """A file of a chunk of ours may have been written here that nobody knows of.

        A scan would take it for one that others wrote, and :meth:`distrust` would miss it.
        """
        self._strays.add(key)
        if (chunk := self._own.get(key)) is not None:
            chunk.fresh = True

    def keep(self, name: FileName) -> None:
        """A file that was to be removed could not be: its chunk may be chosen again."""
        chunk, key = self._get(name), self._key(name)
        if chunk is not None and not self._policy.may_evict(key):
            self._policy.add(key, Item(chunk.nbytes, self._chunk_tokens, 0))

    def has(self, name: FileName) -> bool:
        """Whether a file was entered."""
        chunk = self._get(name)
        return chunk is not None and bool(chunk.parts & file_bit(name.rank, name.group))

    def names(self) -> Iterator[FileName]:
        """Every file, in no order."""
        for key, chunk in self._own.items():
            yield from files_of(ChunkName(self._namespace, key), chunk.parts)
        for name, chunk in self._others.items():
            yield from files_of(name, chunk.parts)

    def size(self, name: FileName) -> int:
        """Bytes of a file that is here."""
        return self._size_of(name)

    # -- who goes ----------------------------------------------------------------------

    def victims(
        self, nbytes: int, limit: int, spared: Collection[PolicyKey] = ()
    ) -> list[FileName]:
        """Files to remove so that so many bytes are free: whole chunks, no longer offered.

        They are out of the order of eviction, and counted until :meth:`forget` is told of each.

        Args:
            nbytes: to be freed.
            limit: files; the last chunk may go beyond it.
            spared: chunks that stay for now.
        """
        files: list[FileName] = []
        skipped: list[PolicyKey] = []
        while nbytes > 0 and len(files) < limit and len(skipped) < MAX_SKIPPED:
            key = self._policy.victim()
            if key is None:
                break
            self._policy.evict(key)
            if key in spared:
                skipped.append(key)
                continue
            name = self._name(key)
            chunk = self._get(name)
            if chunk is None:
                continue
            self._offer(name.key, chunk, 0)
            nbytes -= chunk.nbytes + ENTRY_BYTES * chunk.parts.bit_count()
            files.extend(files_of(name, chunk.parts))
        for key in skipped:
            if (chunk := self._get(self._name(key))) is not None:
                self._policy.add(key, Item(chunk.nbytes, self._chunk_tokens, 0))
        return files

    def distrust(self, coming: Iterable[bytes]) -> None:
        """Offer nothing more of what was written in this process's life: it may be wrong.

        Args:
            coming: the chunk of each write under way; :meth:`settle_distrusted` is told of its end.
        """
        self._coming.update(coming)
        self._distrusted.update(self._coming)
        self._distrusted.update(self._strays)
        self._distrusted.update(key for key, chunk in self._own.items() if chunk.fresh)
        for key in self._distrusted:
            if (chunk := self._own.get(key)) is not None:
                self._offer(key, chunk, 0)

    def is_distrusted(self, key: bytes) -> bool:
        """Whether a chunk of ours may be wrong: it is not offered until all its files have gone."""
        return key in self._distrusted

    def settle_distrusted(self, key: bytes) -> None:
        """A write of such a chunk is over; maybe nothing has come of it."""
        self._coming[key] -= 1
        if self._coming[key]:
            return
        del self._coming[key]
        if key not in self._own and key not in self._strays:
            self._distrusted.discard(key)

    @property
    def has_distrusted(self) -> bool:
        """Whether files may be left that may be wrong."""
        return bool(self._distrusted)

    def distrusted(self, limit: int) -> list[FileName]:
        """Files that were written in this process's life and may be wrong; about so many."""
        files: list[FileName] = []
        for key in self._distrusted:
            if len(files) >= limit:
                break
            if key not in self._coming and (chunk := self._own.get(key)) is not None:
                files.extend(files_of(ChunkName(self._namespace, key), chunk.parts))
        return files

    # -- scans -------------------------------------------------------------------------

    def scan_begins(self) -> None:
        """What an earlier scan has found and did not come to enter stays with this one."""
        self._scan += 1
        self._old_strays = set(self._strays)

    def found(self, files: Iterable[FoundFile], since_ns: int = NEVER) -> None:
        """Files that the scan has met.

        Args:
            since_ns: about when the scan before began. What was used since then, and not here,
                others have used.
        """
        for file in files:
            chunk, is_new = self._enter(file.name, file.nbytes)
            name = ChunkName(file.name.namespace, file.name.key)
            if is_new or name in self._waiting:
                self._waiting[name] = max(file.used_ns, self._waiting.get(name, 0))
            elif file.used_ns >= since_ns and chunk.used < self._scan - OWN_SCANS:
                self._used[name] = max(file.used_ns, self._used.get(name, 0))

    def scan_ends(self, *, missed: int = 0) -> None:
        """All has been met: the new enter the order by their last use, the vanished leave.

        Args:
            missed: folders and files that could not be looked at: what was not met may be there.
        """
        for name in self._oldest_first(self._waiting):
            chunk, key = self._get(name), self._key(name)
            if chunk is not None and not self._policy.may_evict(key):
                self._policy.add(key, Item(chunk.nbytes, self._chunk_tokens, 0))
        if self._used:
            newer = self._oldest_first(self._waiting | self._used)
            self._policy.renew([self._key(name) for name in newer])
        self._waiting, self._used = {}, {}
        if missed:
            return
        for name, parts in [*self._vanished()]:
            for file in files_of(name, parts):
                self.forget(file)
        self._strays -= self._old_strays
        for key in self._old_strays & self._distrusted:
            if key not in self._own and key not in self._coming:
                self._distrusted.discard(key)

    def _oldest_first(self, used: Mapping[ChunkName, int]) -> Iterator[ChunkName]:
        """Chunks by their last use; in small sorts, since no other thread runs during one."""
        names = iter(used)
        runs = []
        while run := sorted(itertools.islice(names, SORTED_AT_ONCE), key=used.__getitem__):
            runs.append(run)
        return heapq.merge(*runs, key=used.__getitem__)

    def found_late(self, files: Iterable[FoundFile]) -> None:
        """Files of ours that others have written since the scan."""
        for file in files:
            _, is_new = self._enter(file.name, file.nbytes)
            if is_new:
                item = Item(file.nbytes, self._chunk_tokens, 0)
                self._policy.add(self._key(file.name), item)

    def _vanished(self) -> Iterator[tuple[ChunkName, int]]:
        """Chunks, and those of their files that the last scan has not met."""
        for key, chunk in self._own.items():
            if (parts := self._unseen(chunk)) != 0:
                yield ChunkName(self._namespace, key), parts
        for name, chunk in self._others.items():
            if (parts := self._unseen(chunk)) != 0:
                yield name, parts

    def _unseen(self, chunk: _Chunk) -> int:
        return chunk.parts & ~chunk.seen if chunk.scan == self._scan else chunk.parts

    # -- inside ------------------------------------------------------------------------

    def _enter(self, name: FileName, nbytes: int) -> tuple[_Chunk, bool]:
        """Note a file; returns its chunk, and whether that is new."""
        chunk = self._get(name)
        is_new = chunk is None
        if chunk is None:
            chunk = _Chunk()
            self.chunks += 1
            if name.namespace == self._namespace:
                chunk.fresh = name.key in self._strays
                self._own[name.key] = chunk
            else:
                self._others[ChunkName(name.namespace, name.key)] = chunk
        bit = file_bit(name.rank, name.group)
        before = 0
        if chunk.parts & bit:  # replaced, or found again
            before = self._size_of(name)
        else:
            self.files += 1
        if chunk.scan != self._scan:
            chunk.scan, chunk.seen = self._scan, 0
        chunk.seen = self._shared(chunk.seen | bit)
        chunk.parts = self._shared(chunk.parts | bit)
        chunk.nbytes = self._shared(chunk.nbytes + nbytes - before)
        self.used += nbytes - before
        if not is_new and nbytes != before:
            self._policy.resize(self._key(name), chunk.nbytes)
        if self._usual.setdefault((name.namespace, name.rank, name.group), nbytes) != nbytes:
            self._unusual[name] = nbytes
        elif self._unusual:
            self._unusual.pop(name, None)
        offered = name.namespace == self._namespace and name.key not in self._distrusted
        if offered and self._whole.is_one(chunk.parts, name.group):
            chunk.complete |= 1 << name.group
        return chunk, is_new

    def _size_of(self, name: FileName) -> int:
        """Bytes of a file that is here."""
        usual = self._usual.get((name.namespace, name.rank, name.group), 0)
        return self._unusual.get(name, usual)

    def _shared(self, number: int) -> int:
        """The same object for the same number: hardly any two chunks differ."""
        if len(self._ints) >= MAX_SHARED_INTS:
            self._ints.clear()
        return self._ints.setdefault(number, number)

    def _key(self, name: FileName | ChunkName) -> PolicyKey:
        if name.namespace == self._namespace:
            return name.key
        return ChunkName(name.namespace, name.key)

    def _name(self, key: PolicyKey) -> ChunkName:
        return ChunkName(self._namespace, key) if isinstance(key, bytes) else key

    def _get(self, name: FileName | ChunkName) -> _Chunk | None:
        if name.namespace == self._namespace:
            return self._own.get(name.key)
        return self._others.get(ChunkName(name.namespace, name.key))

    def _settle(self, name: FileName, chunk: _Chunk) -> None:
        """Nothing is offered that is not whole; a chunk without files is no chunk."""
        self._offer(name.key, chunk, self._whole.groups(chunk.parts, chunk.complete))
        if chunk.parts:
            return
        self.chunks -= 1
        self._policy.remove(self._key(name))
        if name.namespace == self._namespace:
            self._own.pop(name.key, None)
            if name.key not in self._coming and name.key not in self._strays:
                self._distrusted.discard(name.key)
        else:
            self._others.pop(ChunkName(name.namespace, name.key), None)

    def _offer(self, key: bytes, chunk: _Chunk, complete: int) -> None:
        """Offer no more than this; only a chunk of ours has ever been offered."""
        if chunk.complete & ~complete and self.gone is not None:
            if len(self.gone) < MAX_GONE:
                self.gone.append(key)
            else:
                self.missed += 1
        chunk.complete = complete
