# SPDX-License-Identifier: Apache-2.0
"""The commands that start an arm, with ports and folders in their places."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_tiered_kv.bench.config import Arm, Experiment, Process
from vllm_tiered_kv.bench.errors import BenchError

_PLACE = re.compile(r"\{(?:(model|folder)|(?:([a-z][a-z0-9_-]*)\.)?port(?::([a-z][a-z0-9_]*))?)\}")

Port = tuple[str, str]
"""The name of a process and the label of one of its ports; "" for its main port."""


class Command(msgspec.Struct, frozen=True):
    """A process, ready to be started."""

    name: str
    words: tuple[str, ...]
    env: dict[str, str]
    """Over this process's own."""
    ready: str
    url: str
    """Where its main port is."""


def ports_of(arm: Arm) -> tuple[Port, ...]:
    """The ports that an arm's processes need.

    Raises:
        BenchError: one is named of a process that there is not.
    """
    names = [process.name for process in arm.processes]
    found: dict[Port, None] = {(name, ""): None for name in names}
    for process in arm.processes:
        for text in _texts(process):
            for fixed, other, label in _PLACE.findall(text):
                if fixed:
                    continue
                if other and other not in names:
                    raise BenchError(f"arm {arm.name!r}: {text!r} names no process of it: {names}")
                found[other or process.name, label] = None
    return tuple(found)


def free_ports(count: int) -> list[int]:
    """Different loopback ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def commands(
    arm: Arm, experiment: Experiment, ports: Mapping[Port, int], folder: Path
) -> tuple[Command, ...]:
    """What to start, in this order.

    Args:
        ports: a number for each of :func:`ports_of`.
        folder: for what the arm keeps on disk.
    """
    return tuple(_command(process, arm, experiment, ports, folder) for process in arm.processes)


def _command(
    process: Process, arm: Arm, experiment: Experiment, ports: Mapping[Port, int], folder: Path
) -> Command:
    places = _Places(process.name, experiment.model or "", ports, folder)
    words = [places.fill(word) for word in process.command]
    port = ports[process.name, ""]
    if not words:
        words = ["vllm", "serve", places.model, "--host", "127.0.0.1", "--port", str(port)]
        words += [places.fill(word) for word in (*experiment.serve, *process.serve)]
        if process.kv_transfer_config is not None:
            filled = places.fill_values(process.kv_transfer_config)
            words += ["--kv-transfer-config", json.dumps(filled)]
    env = {**experiment.env, **process.env}
    return Command(
        name=process.name,
        words=(_executable(words[0], arm.bin), *words[1:]),
        env={key: places.fill(value) for key, value in env.items()},
        ready=places.fill(process.ready),
        url=f"http://127.0.0.1:{port}",
    )


class _Places(msgspec.Struct, frozen=True):
    """What stands for the places in one process's words."""

    name: str
    model: str
    ports: Mapping[Port, int]
    folder: Path

    def fill(self, text: str) -> str:
        return _PLACE.sub(self._value, text)

    def fill_values(self, value: Any) -> Any:
        """The same for all that is in a JSON value; a port and nothing else becomes a number."""
        if isinstance(value, dict):
            return {key: self.fill_values(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.fill_values(inner) for inner in value]
        if not isinstance(value, str):
            return value
        only = _PLACE.fullmatch(value)
        is_port = only is not None and only[1] is None
        return int(self.fill(value)) if is_port else self.fill(value)

    def _value(self, match: re.Match[str]) -> str:
        fixed, other, label = match.groups()
        if fixed == "model":
            return self.model
        if fixed == "folder":
            return str(self.folder)
        return str(self.ports[other or self.name, label or ""])


def _executable(name: str, folder: str | None) -> str:
    """In the arm's folder, beside this interpreter, or wherever PATH leads.

    Raises:
        BenchError: it is nowhere.
    """
    places = ([folder] if folder is not None else []) + [str(Path(sys.executable).parent)]
    if "/" not in name:
        for place in places:
            if found := shutil.which(name, path=place):
                return str(Path(found).absolute())
    if found := shutil.which(name):
        return str(Path(found).absolute())
    raise BenchError(f"{name!r} is not a command here; an arm's bin names a folder to look in")


def _texts(process: Process) -> list[str]:
    texts = [*process.command, *process.serve, *process.env.values(), process.ready]
    texts.append(json.dumps(process.kv_transfer_config))
    return texts
