# SPDX-License-Identifier: Apache-2.0
"""This project beside others. Each module says which one it is for, and what it needs of it."""
