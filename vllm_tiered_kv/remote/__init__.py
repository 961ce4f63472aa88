# SPDX-License-Identifier: Apache-2.0
"""Other engines: their leases, their memory, and what is handed over."""
