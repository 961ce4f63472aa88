# SPDX-License-Identifier: Apache-2.0
"""Tiers below the host pool."""
