# SPDX-License-Identifier: Apache-2.0
"""From a peer's blocks and ours to addresses: what is read from where."""
