# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard in ``examples/grafana``: its panels as data, and the JSON made of them."""

from tools.dashboard.grafana import dashboard
from tools.dashboard.requests import FIRST_TOKENS, GATE, HITS, OVERVIEW
from tools.dashboard.tiers import QUEUES, TIERS, TROUBLE

ROWS = (OVERVIEW, HITS, FIRST_TOKENS, GATE, TIERS, QUEUES, TROUBLE)

__all__ = ["ROWS", "dashboard"]
