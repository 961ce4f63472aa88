# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder load, as vLLM's own loader picks them."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from vllm_tiered_kv import compat
from vllm_tiered_kv.identity.sources import Part, Refused, Source

MAX_FILES = 100_000
"""In one folder, counting those of no interest."""

_WEIGHT_SUFFIXES = frozenset(
    {
        ".bin",
        ".ckpt",
        ".gguf",
        ".npy",
        ".npz",
        ".pt",
        ".pth",
        ".safetensors",
    }
)
_IGNORED_JSON = (
    "added_tokens.json",
    "chat_template.json",
    "config.json",  # the resolved configuration is an ingredient of its own
    "generation_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer*.json",
    "trainer_state.json",
    "vocab.json",
)
_NOT_LOADED = (
    "optimizer.bin",
    "optimizer.pt",
    "rng_state*.pth",
    "scaler.pt",
    "scheduler.pt",
    "training_args.bin",
)
_IGNORED_FOLDERS = frozenset({"original"})
"""As in vLLM's own default for ``ignore_patterns``."""


class Family(enum.Enum):
    """The set of weight files that vLLM picks in a folder which may hold several."""

    SAFETENSORS = "safetensors"
    MISTRAL = "mistral"
    BIN = "bin"
    PT = "pt"
    NONE = "none"  # not a folder of weights


_SUFFIXES: Mapping[Part, frozenset[str]] = {
    Part.ALL: _WEIGHT_SUFFIXES | {".json", ".py"},
    Part.SETTINGS: frozenset({".json", ".py"}),
    Part.CODE: frozenset({".py"}),
}

_SHADOWED: Mapping[Family, tuple[str, ...]] = {
    Family.SAFETENSORS: ("consolidated*.pth", "pytorch_model*.bin*", "*.gguf"),
    Family.MISTRAL: ("consolidated*.pth", "model*.safetensors*", "pytorch_model*.bin*", "*.gguf"),
    Family.BIN: ("consolidated*.pth", "*.gguf"),
    Family.PT: ("consolidated*.pth", "*.gguf"),
    Family.NONE: (),
}
"""Other copies of the same weights that are passed over; anything else in a folder counts."""


def resolve(source: Source) -> Path:
    """The folder or file a source stands for, looked up on this machine alone.

    Raises:
        Refused: there is none.
    """
    path = Path(source.model)
    if path.exists():
        return path
    if compat.uses_modelscope():
        raise Refused(f"{source.model} comes from ModelScope, whose cache is not understood")
    try:
        return Path(compat.hub_snapshot(source.model, source.revision, source.cache_folder))
    except (OSError, ValueError) as error:
        raise Refused(f"{source.model} is neither a folder nor in the hub's cache") from error


def loaded_files(source: Source, root: Path) -> tuple[Family, dict[str, Path]]:
    """The files that count, by their name relative to ``root``.

    Raises:
        Refused: there is no weight file, or far too many files.
        OSError: a folder cannot be listed.
    """
    if root.is_file():
        return Family.NONE, {f"*{root.suffix}": root}
    found = dict(_walk(root))
    family = _family(source.load_format, found) if source.part is Part.ALL else Family.NONE
    kept = {name: path for name, path in found.items() if _counts(name, family, source)}
    if source.part is Part.ALL and not any(_suffix(name) in _WEIGHT_SUFFIXES for name in kept):
        raise Refused(f"{root} holds no weight files")
    return family, kept


def _walk(root: Path) -> Iterable[tuple[str, Path]]:
    """Every file below ``root`` with its relative name; hidden ones are not looked at."""
    visited = set()
    count = 0
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_raise):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and f not in _IGNORED_FOLDERS
        )
        count += len(names)
        if count > MAX_FILES:
            raise Refused(f"{root} holds more than {MAX_FILES} files")
        for name in names:
            if not name.startswith("."):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def _raise(error: OSError) -> None:
    raise error


def _family(load_format: str, found: Iterable[str]) -> Family:
    """Which files vLLM's loader picks, as its ``DefaultModelLoader`` does."""
    top = [name for name in found if "/" not in name]
    if load_format in ("safetensors", "fastsafetensors", "instanttensor"):
        return Family.SAFETENSORS
    if load_format == "mistral":
        return Family.MISTRAL
    if load_format == "pt":
        return Family.PT
    if load_format == "npcache":
        return Family.BIN
    mistral = (fnmatch(PurePosixPath(name).name, "consolidated*.safetensors") for name in found)
    if load_format == "auto" and any(mistral):
        return Family.MISTRAL
    for family in (Family.SAFETENSORS, Family.BIN):
        if any(name.endswith(f".{family.value}") for name in top):
            return family
    # Models that keep everything in subfolders ask for safetensors.
    return Family.PT if any(name.endswith(".pt") for name in top) else Family.SAFETENSORS


def _counts(name: str, family: Family, source: Source) -> bool:
    path = PurePosixPath(name)
    if path.suffix not in _SUFFIXES[source.part]:
        return False
    if path.name == "generation_config.json":
        return source.generation_config
    shadowed = _SHADOWED[family] if len(path.parts) == 1 else ()
    unread = _IGNORED_JSON if path.suffix == ".json" else _NOT_LOADED
    return not _matches(path.name, (*shadowed, *unread))


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
