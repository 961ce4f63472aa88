# SPDX-License-Identifier: Apache-2.0
"""Whether this vLLM is one we can work with.

Imported before anything else here, so that a name which vLLM no longer has is said in the check's
one line, and not by whichever import comes to it first.
"""

from __future__ import annotations

from vllm import __version__

from vllm_tiered_kv.contract.check import accept

VERDICT = accept(str(__version__))
