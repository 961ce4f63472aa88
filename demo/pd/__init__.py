# SPDX-License-Identifier: Apache-2.0
"""``python -m demo.pd``: prefill hands over to decode, beside a single server."""
