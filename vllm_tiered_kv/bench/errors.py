# SPDX-License-Identifier: Apache-2.0
"""What a comparison says when it cannot go on."""

from __future__ import annotations


class BenchError(ValueError):
    """The message is for the person who asked."""


class ServerLost(BenchError):
    """A server did not start, or ended while it was needed."""
