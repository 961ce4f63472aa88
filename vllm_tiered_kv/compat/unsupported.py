# SPDX-License-Identifier: Apache-2.0
"""What cannot be served."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """This model's KV cache is of a kind that cannot be served; the message says which."""
