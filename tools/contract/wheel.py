# SPDX-License-Identifier: Apache-2.0
"""A release's wheel: fetched, and read without being installed or unpacked."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.contract.source import Source

MAX_FILE = 16 << 20
"""Bytes of one source file; more is not source."""
FETCH_SECONDS = 1800


class WheelError(RuntimeError):
    """A wheel cannot be had or read; says why."""


def fetch(version: str, folder: Path) -> Path:
    """The wheel of a release, from the index that pip is set up with.

    Raises:
        WheelError: there is none for this machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(folder.glob(f"vllm-{version}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", str(folder), f"vllm=={version}"],
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
            check=False,
        )
        found = sorted(folder.glob(f"vllm-{version}-*.whl"))
        if done.returncode or not found:
            raise WheelError(f"vllm {version} cannot be fetched: {done.stderr.strip()[-500:]}")
    return found[0]


def open_wheel(path: Path) -> tuple[str, Source]:
    """``(version, source)`` of a wheel.

    Raises:
        WheelError: it is not a wheel of vLLM.
    """
    parts = path.name.split("-")
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise WheelError(f"{path} cannot be read: {error}") from error
    sizes = {info.filename: info.file_size for info in archive.infolist()}
    if len(parts) < 5 or parts[0] != "vllm" or "vllm/__init__.py" not in sizes:
        raise WheelError(f"{path} is not a wheel of vLLM")

    def read(name: str) -> bytes | None:
        size = sizes.get(name)
        if size is None:
            return None
        if size > MAX_FILE:
            raise WheelError(f"{name} has {size} bytes")
        return archive.read(name)

    return parts[1], Source(read)


def open_installed() -> tuple[str, Source]:
    """``(version, source)`` of the vLLM in this environment; it is not imported.

    Raises:
        WheelError: there is none.
    """
    try:
        distribution = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise WheelError("vLLM is not installed here") from error

    def read(name: str) -> bytes | None:
        path = Path(str(distribution.locate_file(name)))
        return path.read_bytes() if path.is_file() else None

    return distribution.version.partition("+")[0], Source(read)
