# SPDX-License-Identifier: Apache-2.0
"""What decides whether a stored prefix is loaded."""

from __future__ import annotations

import enum


class GateMode(enum.Enum):
    MEASURED = "measured"  # what is predicted to be faster, from what was measured
    ALWAYS = "always"  # all that is stored is loaded
    NEVER = "never"  # nothing is
