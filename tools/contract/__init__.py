# SPDX-License-Identifier: Apache-2.0
"""What a release of vLLM has of what we need, read from its source and never run."""
