# SPDX-License-Identifier: Apache-2.0
"""What a model keeps of a request, layer by layer, and how it is spread over GPUs: integers."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from vllm_tiered_kv.sizing.errors import SizingError


class Reach(enum.Enum):
    """Which tokens of a prefix an attention layer reads."""

    FULL = "full"
    WINDOW = "window"  # the last ones
    CHUNK = "chunk"  # those of the same chunk of the prompt


class AttentionLayers(msgspec.Struct, frozen=True):
    """Attention layers that are alike."""

    count: int
    kv_heads: int
    """1 where all heads share one latent vector (MLA)."""
    key_dim: int
    """Numbers a head and token; of a latent vector, all of them."""
    value_dim: int
    """0 where the keys' numbers serve as values too."""
    element_bytes: int
    """Of one number."""
    reach: Reach = Reach.FULL
    window: int = 0
    """Tokens at most, where the reach is not full."""
    what: str = "attention"
    """A word for people."""

    @property
    def head_bytes(self) -> int:
        """Of one head and token in all of these layers."""
        return self.count * (self.key_dim + self.value_dim) * self.element_bytes

    def heads_on_rank(self, tp: int) -> int:
        """Heads are divided over ``tp`` GPUs; fewer heads than GPUs are copied.

        Raises:
            SizingError: they cannot be divided evenly.
        """
        most, least = max(self.kv_heads, tp), min(self.kv_heads, tp)
        if most % least:
            raise SizingError(f"{self.kv_heads} KV heads cannot be spread over {tp} GPUs evenly")
        return max(1, self.kv_heads // tp)


class StateLayers(msgspec.Struct, frozen=True):
    """Recurrent layers that are alike: a state of fixed size for each request."""

    count: int
    what: str
    """``"mamba2"``, for instance."""
    split_bytes: int
    """Of one layer's state, what is divided over GPUs."""
    groups: int = 1
    group_bytes: int = 0
    """Of one group of a layer's state; a single group is copied to every GPU."""

    def bytes_on_rank(self, tp: int) -> int:
        """Of all of these layers.

        Raises:
            SizingError: the state cannot be divided evenly.
        """
        if self.split_bytes % tp:
            raise SizingError(f"the {self.what} state cannot be spread over {tp} GPUs evenly")
        if self.groups % tp and self.groups != 1:
            raise SizingError(f"{self.groups} {self.what} groups do not fit {tp} GPUs")
        groups = max(1, self.groups // tp)
        return self.count * (self.split_bytes // tp + groups * self.group_bytes)


class WindowBytes(msgspec.Struct, frozen=True):
    """Layers that keep a bounded number of tokens."""

    tokens: int
    bytes_per_token: int


class Footprint(msgspec.Struct, frozen=True):
    """Bytes that a request's KV takes in one place."""

    bytes_per_token: int
    """Of the layers that keep every token."""
    windows: tuple[WindowBytes, ...] = ()
    state_bytes: int = 0
    """Of recurrent layers, whatever the length."""

    @property
    def window_bytes(self) -> int:
        """Of all windows once they are full."""
        return sum(window.tokens * window.bytes_per_token for window in self.windows)

    @property
    def fixed_bytes(self) -> int:
        """What a long request takes beside its bytes a token."""
        return self.window_bytes + self.state_bytes

    @property
    def tier_bytes_per_token(self) -> int:
        """Windows included: a prefix may be taken up again at any of its tokens."""
        return self.bytes_per_token + sum(window.bytes_per_token for window in self.windows)

    def request_bytes(self, tokens: int) -> int:
        """What a request of ``tokens`` tokens needs to go on from its end."""
        windows = sum(min(tokens, w.tokens) * w.bytes_per_token for w in self.windows)
        return tokens * self.bytes_per_token + windows + self.state_bytes

    def stored_bytes(self, tokens: int) -> int:
        """What a prefix of ``tokens`` tokens takes in a tier, with one recurrent state."""
        return tokens * self.tier_bytes_per_token + self.state_bytes

    def times(self, factor: int) -> Footprint:
        return Footprint(
            self.bytes_per_token * factor,
            tuple(WindowBytes(w.tokens, w.bytes_per_token * factor) for w in self.windows),
            self.state_bytes * factor,
        )


class Shape(msgspec.Struct, frozen=True):
    """All layers of a model that keep something."""

    attention: tuple[AttentionLayers, ...] = ()
    states: tuple[StateLayers, ...] = ()

    def one_copy(self) -> Footprint:
        """Every number once."""
        sizes = [(group, group.kv_heads * group.head_bytes) for group in self.attention]
        states = sum(group.bytes_on_rank(1) for group in self.states)
        return _footprint(sizes, states)

    def on_rank(self, tp: int) -> Footprint:
        """On each of ``tp`` GPUs that share every layer (tensor parallelism).

        Raises:
            SizingError: the layers cannot be divided evenly.
        """
        sizes = [(group, group.heads_on_rank(tp) * group.head_bytes) for group in self.attention]
        return _footprint(sizes, sum(group.bytes_on_rank(tp) for group in self.states))

    def on_all_ranks(self, tp: int) -> Footprint:
        """On all of ``tp`` GPUs together, copies included.

        Raises:
            SizingError: the layers cannot be divided evenly.
        """
        return self.on_rank(tp).times(tp)


def _footprint(sizes: Iterable[tuple[AttentionLayers, int]], state_bytes: int) -> Footprint:
    full = 0
    windows: dict[int, int] = {}
    for group, nbytes in sizes:
        if group.reach is Reach.FULL:
            full += nbytes
        else:
            windows[group.window] = windows.get(group.window, 0) + nbytes
    found = tuple(WindowBytes(tokens, nbytes) for tokens, nbytes in sorted(windows.items()))
    return Footprint(full, found, state_bytes)
