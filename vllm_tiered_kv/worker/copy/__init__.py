# SPDX-License-Identifier: Apache-2.0
"""The copy engine: device pages <-> slots, behind one small interface."""

from vllm_tiered_kv.worker.copy.base import (
    BlockCopies,
    Copier,
    CopyError,
    Direction,
    Transfer,
    open_copier,
)

__all__ = ["BlockCopies", "Copier", "CopyError", "Direction", "Transfer", "open_copier"]
