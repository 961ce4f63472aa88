# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are on this machine. Nothing is asked of the network."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from vllm_tiered_kv.sizing.errors import SizingError

CONFIG = "config.json"

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")


def find_config(model: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The ``config.json`` of a model.

    Args:
        model: a folder, a file, or a name in the local hub cache (``org/name``).
        environ: says where that cache is, as it does to ``huggingface_hub``.

    Raises:
        SizingError: there is none.
    """
    try:
        path = Path(model).expanduser()
        if path.is_file():
            return path
        if path.is_dir():
            if not (path / CONFIG).is_file():
                raise SizingError(f"the folder {path} holds no {CONFIG}")
            return path / CONFIG
    except (OSError, RuntimeError) as error:  # too long a name, or ~ of somebody who is not there
        reason = getattr(error, "strerror", None) or error
        raise SizingError(f"{model[:200]} cannot be looked at: {reason}") from None
    cache = hub_cache(environ)
    if _NAME.fullmatch(model) is None or ".." in model:
        raise SizingError(f"{model}: no such file or folder")
    folder = cache / ("models--" + model.replace("/", "--"))
    if not folder.is_dir():
        raise SizingError(
            f"{model}: no such file or folder, nor such a name in the local hub cache, {cache}; "
            f"'hf download {model} --include \"*.json\"' puts it there"
        )
    snapshot = _snapshot(folder)
    if snapshot is None or not (snapshot / CONFIG).is_file():
        raise SizingError(f"{model}: the local hub cache, {folder}, holds no {CONFIG} of it")
    return snapshot / CONFIG


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder in which ``huggingface_hub`` keeps what it has downloaded."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    base = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "huggingface" / "hub"


def _snapshot(folder: Path) -> Path | None:
    """That of ``main``, else the only one."""
    try:
        with (folder / "refs" / "main").open() as file:
            revision = file.read(256).strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    if _REVISION.fullmatch(revision) and (folder / "snapshots" / revision).is_dir():
        return folder / "snapshots" / revision
    try:
        snapshots = [entry for entry in (folder / "snapshots").iterdir() if entry.is_dir()]
    except OSError:
        return None
    return snapshots[0] if len(snapshots) == 1 else None
