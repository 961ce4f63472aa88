# SPDX-License-Identifier: Apache-2.0
"""Measurements that anyone can repeat: `python -m benchmarks.NAME [--quick]`.

Each prints a table and writes `build/bench/NAME.json`: rows of metric, arm, value, unit and spread,
and whether a goal was met where there is one. What is compared runs interleaved in one process.
"""
