# SPDX-License-Identifier: Apache-2.0
"""The options by which a model is named or described, and what they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from vllm_tiered_kv.sizing.dtypes import parse_dtype
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.find import find_config
from vllm_tiered_kv.sizing.hf_config import HfConfig, read_config
from vllm_tiered_kv.sizing.parameters import Parameters
from vllm_tiered_kv.sizing.read import Choices, Model, read_model
from vllm_tiered_kv.sizing.units import parse_number, parse_size, parse_tokens
from vllm_tiered_kv.sizing.weights import (
    Weights,
    estimate_weights,
    find_parameters,
    find_weights,
)

DEFAULT_CONTEXTS = tuple(1 << power for power in range(12, 21))
"""4K to 1M tokens."""

_LAYERS = "The model, where there is no config.json, or instead of what it says"

ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder with a config.json, the file, or a name in the local hub cache.",
        show_default=False,
    ),
]
Layers = Annotated[int | None, typer.Option(help="Layers.", rich_help_panel=_LAYERS, min=1)]
KvHeads = Annotated[int | None, typer.Option(help="KV heads.", rich_help_panel=_LAYERS, min=1)]
HeadDim = Annotated[
    int | None, typer.Option(help="Numbers of a head.", rich_help_panel=_LAYERS, min=1)
]
Heads = Annotated[
    int | None, typer.Option(help="Heads that ask (query heads).", rich_help_panel=_LAYERS, min=1)
]
LatentDim = Annotated[
    int | None,
    typer.Option(help="MLA: rank of the latent vector.", rich_help_panel=_LAYERS, min=1),
]
RopeDim = Annotated[
    int | None,
    typer.Option(help="MLA: numbers that are rotated.", rich_help_panel=_LAYERS, min=1),
]
SlidingWindow = Annotated[
    int | None, typer.Option(help="Tokens of sliding windows.", rich_help_panel=_LAYERS, min=1)
]
WindowPattern = Annotated[
    int | None,
    typer.Option(
        help="Every n-th layer has full attention; without this all have windows.",
        rich_help_panel=_LAYERS,
        min=1,
    ),
]
Params = Annotated[str | None, typer.Option(help="Parameters: 70B, 70e9.", rich_help_panel=_LAYERS)]
ActiveParams = Annotated[
    str | None,
    typer.Option(help="Of them, those a token passes through.", rich_help_panel=_LAYERS),
]
WeightsSize = Annotated[
    str | None, typer.Option("--weights", help="Bytes of weights: 140GB.", rich_help_panel=_LAYERS)
]
KvDtype = Annotated[
    str | None,
    typer.Option(help="Format of the KV cache: auto, bf16, fp16, fp32, fp8.", show_default="auto"),
]
StateDtype = Annotated[
    str | None,
    typer.Option(
        help="Format of recurrent states, as vLLM's --mamba-ssm-cache-dtype.", show_default="auto"
    ),
]
Utilisation = Annotated[
    float,
    typer.Option("--utilization", help="As vLLM's --gpu-memory-utilization.", min=0.01, max=1.0),
]
Memory = Annotated[str | None, typer.Option(help="Memory of one GPU: 80GB.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


class Flags(msgspec.Struct, frozen=True):
    """What of a model is given by options; None: not."""

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    heads: int | None = None
    latent_dim: int | None = None
    rope_dim: int | None = None
    window: int | None = None
    window_pattern: int | None = None
    params: str | None = None
    active_params: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    state_dtype: str | None = None


class Described(msgspec.Struct, frozen=True):
    """A model, and what is known of its weights."""

    name: str
    model: Model
    parameters: Parameters | None
    weights: Weights | None


def describe(name: str | None, flags: Flags) -> Described:
    """The model that is named, described, or both.

    Raises:
        SizingError: it cannot be found, or something is missing.
    """
    path = find_config(name) if name is not None else None
    config = read_config(path) if path is not None else HfConfig()
    config = _with_flags(config, flags, named=path is not None)
    asked = flags.kv_dtype if flags.kv_dtype != "auto" else None
    state = flags.state_dtype if flags.state_dtype != "auto" else None
    choices = Choices(
        parse_dtype(asked) if asked is not None else None,
        parse_dtype(state) if state is not None else None,
    )
    model = read_model(config, choices)
    folder = path.parent if path is not None else None
    parameters = _parameters(folder, model, flags)
    return Described(
        name if name is not None else "described by options",
        model,
        parameters,
        _weights(folder, model, flags, parameters),
    )


def contexts_of(given: list[str] | None) -> tuple[int, ...]:
    """Lengths, each once, in order.

    Raises:
        SizingError: one is not a length.
    """
    if not given:
        return DEFAULT_CONTEXTS
    tokens = {parse_tokens(part) for text in given for part in text.split(",")}
    return tuple(sorted(tokens))


def _with_flags(config: HfConfig, flags: Flags, *, named: bool) -> HfConfig:
    given = {
        "num_hidden_layers": flags.layers,
        "num_key_value_heads": flags.kv_heads,
        "head_dim": flags.head_dim,
        "num_attention_heads": flags.heads,
        "kv_lora_rank": flags.latent_dim,
        "qk_rope_head_dim": flags.rope_dim,
        "sliding_window": flags.window,
        "sliding_window_pattern": flags.window_pattern,
    }
    changes = {field: value for field, value in given.items() if value is not None}
    if not named and not changes:
        raise SizingError(
            "name a model, or describe one: --layers, --kv-heads and --head-dim, or for MLA "
            "--layers, --latent-dim and --rope-dim"
        )
    if not named and flags.kv_heads is None and flags.heads is None and not flags.latent_dim:
        raise SizingError("the number of KV heads is missing; give --kv-heads")
    return msgspec.structs.replace(config, **changes)


def _parameters(folder: Path | None, model: Model, flags: Flags) -> Parameters | None:
    found = find_parameters(folder, model.config)
    total = int(parse_number(flags.params)) if flags.params is not None else None
    active = int(parse_number(flags.active_params)) if flags.active_params is not None else None
    if total is None and active is None:
        return found
    if total is not None:
        return Parameters(total, active if active is not None else total, "--params")
    if found is None or active is None:
        raise SizingError("--active-params is given, but all parameters are missing: --params")
    return Parameters(found.total, active, f"{found.source}, --active-params")


def _weights(
    folder: Path | None, model: Model, flags: Flags, parameters: Parameters | None
) -> Weights | None:
    if flags.weights is not None:
        return Weights(parse_size(flags.weights), "--weights")
    found = find_weights(folder)
    if found is not None or parameters is None:
        return found
    estimated = estimate_weights(parameters, model.config, model.dtype)
    return Weights(estimated.nbytes, f"{estimated.source} ({parameters.source})")
