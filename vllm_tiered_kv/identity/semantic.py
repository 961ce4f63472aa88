# SPDX-License-Identifier: Apache-2.0
"""What the numbers in a KV cache mean.

Two engines may read each other's KV only if everything here is equal. What can change
rounding alone is left out: the degree of parallelism, most kernels, compilation, batch shapes.
"""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.identity.canonical import Canonical, digest


class DraftIdentity(msgspec.Struct, frozen=True):
    """A draft model whose KV lives in the same blocks as the target's."""

    method: str
    model: Canonical
    """Its resolved configuration."""
    dtype: str
    cache_dtype: str
    quantization: str | None
    options: Canonical
    """Settings of speculative decoding that shape the draft's KV."""
    weights: str = ""
    """Digest of its weights; empty until known."""


class SemanticIdentity(msgspec.Struct, frozen=True):
    """Everything that shapes the values of keys, values and states.

    Fields of type ``Canonical`` hold configuration in canonical JSON.
    """

    vllm_version: str
    architecture: str
    """The model class vLLM resolved."""
    model: Canonical
    """The resolved model configuration, overrides applied, paths and versions left out."""
    model_options: Canonical
    """The other options of vLLM's model configuration that may shape numbers."""
    attention_type: str
    """Decoder, encoder, hybrid, ...: whether tokens see what follows them."""
    dtype: str
    quantization: str | None
    quantization_config: Canonical
    rope: Canonical
    """Rope settings of the text model, overrides applied."""
    max_model_len: int | None
    """Only where the numbers depend on it, see :mod:`.length`; None elsewhere."""
    sliding_window: int | None
    sliding_window_disabled: bool
    attention_options: Canonical
    cache_dtype: str
    cache_dtype_skip_layers: tuple[str, ...]
    calculated_scales: bool
    """Whether KV scales come from the first batch instead of from the checkpoint."""
    cache_options: Canonical
    """The other cache options that may shape states."""
    engine_options: Canonical
    """Diffusion, Mamba, platform options, and which kernels serve quantized layers."""
    multimodal: Canonical | None
    """How images, video and audio become embeddings; None for a text model."""
    lora: Canonical | None
    """How adapters are applied; None with LoRA off."""
    draft: DraftIdentity | None
    hash_algorithm: str
    hash_seed: str
    environment: tuple[tuple[str, str], ...]
    """Environment variables that change what is computed, where set."""
    weights: str = ""
    """Digest of all that loads, remote code included; empty until known."""
    adapter: str | None = None
    """Digest of a LoRA adapter's content, for chunks that belong to one."""
    process: str | None = None
    """A random value of this process where something could not be established, so that
    nothing is shared beyond it; None when everything was."""

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return digest("semantic", self)
