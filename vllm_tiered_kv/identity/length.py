# SPDX-License-Identifier: Apache-2.0
"""Where a key depends on the engine's maximum length, checked against vLLM 0.32.

``max_model_len`` is mostly a limit, and engines that differ in it may share chunks. It
shapes numbers in these cases:

* ``longrope`` (once named ``su``): the long factors are used for every position if and only
  if ``max_model_len`` is above the original maximum.
* ``dynamic``: the base follows the length of the table, which some models cut or stretch to
  ``max_model_len``; with the Transformers backend it follows the longest sequence seen.
* Llama 4: attention temperature is on by default above 32,768 tokens. It scales queries,
  so it reaches the keys of all later layers.
* multimodal models: some processors choose an image's or a video's resolution by it.

Every other kind (``default``, ``linear``, ``ntk``, ``llama3``, ``yarn``, ``deepseek_yarn``,
``proportional``, multimodal rope, dual chunk) takes its numbers from the model configuration
alone; there the maximum length only sizes a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "su", "dynamic"})
TEMPERATURE_MODELS = frozenset({"llama4", "llama4_text"})

_LEGACY_CONTAINERS = frozenset({"rope_scaling", "rope_parameters"})


def depends_on_length(config: Mapping[str, object], *, multimodal: bool) -> bool:
    """Whether the maximum length shapes the numbers.

    Args:
        config: the model configuration as plain data, nested configurations included.
        multimodal: whether the engine takes images, video or audio.
    """
    return (
        multimodal
        or scales_by_temperature(config)
        or any(kind in LENGTH_DEPENDENT_ROPE for kind in rope_types(config))
    )


def scales_by_temperature(config: Mapping[str, object]) -> bool:
    """Whether this is a model whose attention temperature vLLM switches by length."""
    return any(level.get("model_type") in TEMPERATURE_MODELS for _, level in _mappings(config, ""))


def rope_types(config: Mapping[str, object]) -> frozenset[str]:
    """Every rope type named anywhere in a configuration, per layer type or per part."""
    found = set()
    for name, level in _mappings(config, ""):
        kind = level.get("rope_type")
        if kind is None and name in _LEGACY_CONTAINERS:
            kind = level.get("type")
        if isinstance(kind, str):
            found.add(kind)
    return frozenset(found)


def _mappings(value: object, name: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Every mapping in ``value`` with the key it was found under."""
    if isinstance(value, Mapping):
        yield name, value
        for key, part in value.items():
            yield from _mappings(part, str(key))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for part in value:
            yield from _mappings(part, name)
