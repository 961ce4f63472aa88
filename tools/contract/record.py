# SPDX-License-Identifier: Apache-2.0
"""Records: what a release has of what we need, kept in the repository."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools.contract.source import Source
from vllm_tiered_kv.contract.needs import NEEDS
from vllm_tiered_kv.contract.structs import Record

FOLDER = Path(__file__).parent / "recorded"


def make(version: str, source: Source) -> Record:
    """What one vLLM has of our needs."""
    return Record(version, dict(sorted(source.members(NEEDS).items())))


def save(record: Record, folder: Path = FOLDER) -> Path:
    """Write ``VERSION.json``."""
    path = folder / f"{record.version}.json"
    # A member a line, so that a change of vLLM's shows as the lines that changed.
    members = ",\n".join(
        f'"{name}":{msgspec.json.encode(member).decode()}'
        for name, member in record.members.items()
    )
    path.write_text(f'{{"version":"{record.version}","members":{{\n{members}\n}}}}\n')
    return path


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        OSError, msgspec.DecodeError: it is not one.
    """
    return msgspec.json.decode(path.read_bytes(), type=Record)


def recorded() -> dict[str, Record]:
    """All records of the repository, by version."""
    return {path.stem: load(path) for path in sorted(FOLDER.glob("*.json"))}
