# SPDX-License-Identifier: Apache-2.0
"""The same load on several servers, in turns, and what it says of them. Imports no vLLM."""
