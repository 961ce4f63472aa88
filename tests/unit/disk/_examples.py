# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import HealthCheck, settings

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How long an example takes is the machine's affair."""
