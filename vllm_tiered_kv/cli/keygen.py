# SPDX-License-Identifier: Apache-2.0
"""``vllm-tiered-kv keygen``: makes the key that engines share which hand over KV."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_tiered_kv.remote import keys


def keygen(
    file: Annotated[Path, typer.Argument(help="The file to make; it must not be there yet.")],
) -> None:
    """Make the key file that the option remote.key_file names, the same one for a whole fleet.

    Whoever has it can read the KV of every engine that uses it.
    """
    path = file.expanduser().absolute()
    try:
        key = keys.generate()
        keys.write(path, key)
    except keys.KeyFileError as error:
        typer.echo(f"vllm-tiered-kv: {error}", err=True)
        sys.exit(1)
    typer.echo(f"{path}: key {key.fingerprint}, readable by you alone")
