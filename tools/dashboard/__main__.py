# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.dashboard`` writes ``examples/grafana/dashboard.json``."""

from __future__ import annotations

from pathlib import Path

from tools.dashboard import ROWS, dashboard

TARGET = Path(__file__).resolve().parents[2] / "examples" / "grafana" / "dashboard.json"

if __name__ == "__main__":
    TARGET.write_text(dashboard(ROWS))
    print(f"wrote {TARGET}")
