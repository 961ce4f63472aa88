# SPDX-License-Identifier: Apache-2.0
"""The name under which chunks are kept: what they mean and how they lie."""

from __future__ import annotations

import os
import secrets

import msgspec

from vllm_tiered_kv.identity.layout_id import LayoutIdentity
from vllm_tiered_kv.identity.semantic import SemanticIdentity


class Established(msgspec.Struct, frozen=True):
    """The weights' content is known."""

    digest: str
    """32 hexadecimal digits."""
    draft: str | None = None
    """The same of a draft model's weights; None without one."""


class Unestablished(msgspec.Struct, frozen=True):
    """The weights' content cannot be told, so chunks are not kept beyond the process."""

    reason: str


WeightsResult = Established | Unestablished


class Namespace(msgspec.Struct, frozen=True):
    """Files and slots are shared where both digests are equal.

    A peer needs the semantic digest equal; the layout may be converted.
    """

    semantic: SemanticIdentity
    layout: LayoutIdentity
    reason: str | None = None
    """Why chunks must not outlive this process; None when they may."""

    @property
    def persistent(self) -> bool:
        """Whether chunks may be kept beyond this process and shared with others."""
        return self.reason is None

    @property
    def semantic_digest(self) -> str:
        return self.semantic.digest

    @property
    def layout_digest(self) -> str:
        return self.layout.digest

    @property
    def name(self) -> str:
        """65 characters, safe in a path: both digests."""
        return f"{self.semantic_digest}-{self.layout_digest}"

    @property
    def short(self) -> str:
        """For logs: the first digits of both digests."""
        return f"{self.semantic_digest[:8]}-{self.layout_digest[:8]}"

    def layout_for_rank(self, rank: int) -> str:
        """The layout digest of one rank's share of a chunk."""
        return msgspec.structs.replace(self.layout, rank=rank).digest

    def with_adapter(self, adapter: str | None) -> Namespace:
        """The namespace of chunks computed with a LoRA adapter of this content digest."""
        semantic = msgspec.structs.replace(self.semantic, adapter=adapter)
        return msgspec.structs.replace(self, semantic=semantic)


class Identity(msgspec.Struct, frozen=True):
    """What is known at start, before the weights' digest."""

    semantic_without_weights: SemanticIdentity
    layout: LayoutIdentity
    reasons: tuple[str, ...] = ()
    """What could not be established, each a clause for the start-up log line."""

    def namespace(self, weights: WeightsResult) -> Namespace:
        """The namespace with these weights.

        Where anything is not established it holds a random value of this process: it is
        equal to itself for the life of the process and to nothing else.
        """
        reasons = self.reasons
        changes: dict[str, object] = {}
        if isinstance(weights, Established):
            changes["weights"] = weights.digest
            draft = self.semantic_without_weights.draft
            if draft is not None and weights.draft is None:
                reasons = (*reasons, "the draft model's weights have no digest")
            elif draft is not None:
                changes["draft"] = msgspec.structs.replace(draft, weights=weights.draft)
        else:
            reasons = (*reasons, weights.reason)
        changes["process"] = _process_value() if reasons else None
        semantic = msgspec.structs.replace(self.semantic_without_weights, **changes)
        return Namespace(semantic, self.layout, "; ".join(reasons) or None)


_process_values: dict[int, str] = {}


def _process_value() -> str:
    """Kept by process id: a forked child must not share its parent's value."""
    return _process_values.setdefault(os.getpid(), secrets.token_hex(16))
