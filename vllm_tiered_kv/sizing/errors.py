# SPDX-License-Identifier: Apache-2.0
"""What the sizing tools say when they cannot answer."""

from __future__ import annotations


class SizingError(ValueError):
    """Something is missing or makes no sense; the message is for the person who asked."""
