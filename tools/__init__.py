# SPDX-License-Identifier: Apache-2.0
"""What the tests, the demo and the benchmarks share; not part of the installed package."""
