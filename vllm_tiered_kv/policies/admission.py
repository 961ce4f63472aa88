# SPDX-License-Identifier: Apache-2.0
"""What a tier lets in.

Flash wears out with what is written to it, and much of what is computed is never asked for again.
So a disk tier may wait until a chunk has been seen a second or third time, and leave alone short
prefixes, which are computed again about as fast as they are read.
"""

from __future__ import annotations

import xxhash

DEFAULT_WINDOW = 1 << 18

_PROBES = 4
_COUNTERS_PER_KEY = 8
_FULL = 255


class Sightings:
    """Counts how often keys are seen, in a fixed amount of memory.

    A count-min sketch with conservative update (Graham Cormode and S. Muthukrishnan, "An improved
    data stream summary: the count-min sketch and its applications", Journal of Algorithms 2005;
    Cristian Estan and George Varghese, "New directions in traffic measurement and accounting",
    SIGCOMM 2002) in two generations: when one has counted ``window`` new keys, the one before is
    forgotten.

    It never counts less than was seen within the last ``window`` new keys. It may count more: at
    the end of a generation a new key collides in all its counters, and is taken for one that has
    been seen, with a probability of 2.4%, so 4.8% in both together at most. What that costs is a
    chunk that is written before its time.

    Args:
        window: new keys a generation; it takes 16 bytes for each.
        seed: of the hash.
    """

    def __init__(self, window: int = DEFAULT_WINDOW, seed: int = 0) -> None:
        self._window = max(window, 1)
        self._seed = seed
        self._width = self._window * _COUNTERS_PER_KEY
        self._now = bytearray(self._width)
        self._before = bytearray(self._width)
        self._new = 0

    def see(self, key: bytes) -> int:
        """Count one sighting; how many there have been, this one included, 510 at most."""
        digest = xxhash.xxh3_128_intdigest(key, self._seed)
        places = [(digest >> 32 * i & 0xFFFFFFFF) % self._width for i in range(_PROBES)]
        now = self._now
        recent = min(now[place] for place in places)
        earlier = min(self._before[place] for place in places)
        if recent < _FULL:
            for place in places:
                if now[place] == recent:
                    now[place] = recent + 1
            recent += 1
        if recent == 1:
            self._new += 1
            if self._new >= self._window:
                self._before, self._now = now, bytearray(self._width)
                self._new = 0
        return recent + earlier


class Admission:
    """Whether a chunk is let in.

    Args:
        min_tokens: a prefix of fewer tokens is not kept.
        store_after: a chunk is let in when it is seen for this time; 1 lets in all and counts
            nothing.
        window: see :class:`Sightings`.

    Raises:
        ValueError: ``min_tokens`` is below 0 or ``store_after`` not in 1 to 255.
    """

    def __init__(
        self, min_tokens: int = 0, store_after: int = 1, window: int = DEFAULT_WINDOW
    ) -> None:
        if min_tokens < 0 or not 1 <= store_after <= _FULL:
            raise ValueError("min_tokens must be 0 or more, store_after 1 to 255")
        self._min_tokens = min_tokens
        self._store_after = store_after
        self._sightings = Sightings(window) if store_after > 1 else None

    def keeps(self, prefix_tokens: int) -> bool:
        """Whether a prefix of so many tokens is long enough."""
        return prefix_tokens >= self._min_tokens

    def admits(self, key: bytes) -> bool:
        """Count a sighting of a chunk that is not kept; whether it is to be kept now.

        One request is one sighting, whether the chunk was computed for it or found in a tier above.
        """
        return self._sightings is None or self._sightings.see(key) >= self._store_after
