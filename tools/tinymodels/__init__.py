# SPDX-License-Identifier: Apache-2.0
"""Small models with real random weights, built on this machine, the same for the same seed.

Weights that vLLM makes up itself (``--load-format dummy``) are so small that the output hardly
depends on the KV cache: a wrong byte there goes unseen. These are scaled so that it shows.
"""

from tools.tinymodels.build import build_lora, build_model
from tools.tinymodels.variants import LORA_VARIANT, MODEL_VARIANTS

__all__ = ["LORA_VARIANT", "MODEL_VARIANTS", "build_lora", "build_model"]
