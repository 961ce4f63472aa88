# SPDX-License-Identifier: Apache-2.0
"""The worker half: moves bytes between device pages, slots and files, one instance a rank."""
