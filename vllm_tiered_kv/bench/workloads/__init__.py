# SPDX-License-Identifier: Apache-2.0
"""What is asked of the servers: made from a seed alone, the same for each of them."""
