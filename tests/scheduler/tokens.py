# SPDX-License-Identifier: Apache-2.0
"""The model that is arithmetic: what it says next, and the numbers it leaves in the cache.

Each token's place in each layer holds a number that names the whole prefix up to that token (salt
included), the layer, the rank and the version of the weights. So a byte from anywhere else shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

BLOCK = 16
LAYERS = 3
STATE = -1
"""In place of a sliding window: a group whose layers keep one state that every token changes."""
EOS = 2
MASK = (1 << 62) - 1
DRAFT = 1021
"""What a drafter that has nothing proposes; the model never says it."""


def extend(name: int, token: int) -> int:
    """The name of a prefix that is one token longer."""
    return (name * 6364136223846793005 + token + 1442695040888963407) & MASK


def root_name(salt: str | None) -> int:
    return zlib.crc32(repr(("salt", salt)).encode())


def prefix_names(tokens: Sequence[int], salt: str | None) -> list[int]:
    """For each token a number that names the prefix which ends with it."""
    name = root_name(salt)
    names = []
    for token in tokens:
        name = extend(name, token)
        names.append(name)
    return names


def next_token(name: int, eos_every: int = 0) -> int:
    """What the model says after a prefix; about once in ``eos_every`` that it is over."""
    if eos_every and (name >> 7) % eos_every == 0:
        return EOS
    return name % 1000 + 3


def continuation(
    prompt: Sequence[int], salt: str | None, limit: int, eos_every: int, stops: bool
) -> list[int]:
    """What a request must be answered: up to ``limit`` tokens, or to the end of the sequence."""
    name = root_name(salt)
    for token in prompt:
        name = extend(name, token)
    said: list[int] = []
    while len(said) < limit:
        token = next_token(name, eos_every)
        said.append(token)
        if stops and token == EOS:
            break
        name = extend(name, token)
    return said


def proposals(name: int, count: int, eos_every: int) -> list[int]:
    """What a drafter proposes after a prefix: right for a while, then wrong."""
    right = (name >> 11) % (count + 1)
    drafts = []
    for i in range(count):
        token = next_token(name, eos_every)
        if i >= right:
            token = token % 1000 + 4
        drafts.append(token)
        name = extend(name, token)
    return drafts


def layer_keys(groups: int, rank: int = 0, version: int = 0) -> np.ndarray:
    """``[groups, LAYERS]``: what tells a layer's numbers from those of all others."""
    place = np.arange(groups * LAYERS, dtype=np.uint64).reshape(groups, LAYERS)
    place = place + np.uint64(1000 * rank + 100_000 * version)
    return ((place * np.uint64(0x9E3779B97F4A7C15)) & np.uint64(MASK)).astype(np.int64)


def prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt that shares no prefix with those of other seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 1000, (length,), generator=generator).tolist()
