# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: plans; touches no bytes, does no I/O, waits for nothing."""
