# SPDX-License-Identifier: Apache-2.0
"""Files and options into an :class:`Experiment`, with mistakes in words.

A mistake names the file, the key, the value and, for a key that does not exist, the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vllm_tiered_kv.bench.config import Arm, Compared, Experiment, History, PromptFormat
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.mistakes import explain

MAX_FILE = 1 << 20

_O = TypeVar("_O", bound=msgspec.Struct)


def read_options(path: Path) -> dict[str, Any]:
    """What a ``.toml`` or ``.json`` file holds.

    Raises:
        BenchError: it cannot be read.
    """
    if path.suffix not in (".toml", ".json"):
        raise BenchError(f"{path}: expected a .toml or .json file")
    try:
        if path.stat().st_size > MAX_FILE:
            raise BenchError(f"{path}: larger than {MAX_FILE} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror or error}") from None
    return _parsed(path, content)


def decode(raw: Mapping[str, Any], kind: type[_O], root: str) -> _O:
    """Options as a struct; ``root`` is what they are called.

    Raises:
        BenchError: naming the key, the value and what would be valid.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise BenchError(f"{root}: {explain(error, raw, kind)}") from None


def decode_arm(text: str) -> Arm:
    """An arm as it is named on the command line: a file, or ``NAME=URL``.

    Raises:
        BenchError: it is neither.
    """
    name, sign, url = text.partition("=")
    if sign and url.startswith(("http://", "https://")):
        return decode({"name": name, "url": url}, Arm, f"--arm {text}")
    if not text.endswith((".toml", ".json")):
        raise BenchError(f"--arm {text}: expected a .toml or .json file, or NAME=URL")
    return decode(read_options(Path(text)), Arm, text)


def with_settings(raw: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """``raw`` with each ``KEY=VALUE`` in it; a dot in the key is a level.

    Values are read as TOML, and as plain text where they are not: ``load.concurrency=8``,
    ``workload.kind=chat``.

    Raises:
        BenchError: there is no ``=``, or the key leads through what is no table.
    """
    result: dict[str, Any] = _copy(raw)
    for setting in settings:
        key, sign, text = setting.partition("=")
        *levels, leaf = key.strip().split(".")
        if not sign or not leaf:
            raise BenchError(f"--set {setting}: expected KEY=VALUE, like load.concurrency=8")
        table = result
        for level in levels:
            table = table.setdefault(level, {})
            if not isinstance(table, dict):
                raise BenchError(f"--set {setting}: {level} has no keys below it")
        table[leaf] = _value(text.strip())
    return result


def experiment(raw: Mapping[str, Any], arms: Sequence[Arm], root: str) -> Experiment:
    """The whole, checked.

    Args:
        raw: an experiment's options.
        arms: further ones.
        root: what ``raw`` is called.

    Raises:
        BenchError: something is wrong, missing or contradictory.
    """
    found = decode(raw, Experiment, root)
    found = msgspec.structs.replace(found, arms=(*found.arms, *arms))
    names = [arm.name for arm in found.arms]
    if len(names) < 2:
        raise BenchError(
            f"{root}: {len(names)} of the two arms that a comparison needs; add --arm FILE or "
            "--arm NAME=URL"
        )
    if double := next((name for name in names if names.count(name) > 1), None):
        raise BenchError(f"{root}: two arms are called {double!r}")
    if found.prompts.first_token > found.prompts.last_token:
        raise BenchError(f"{root}: prompts.first_token is above prompts.last_token")
    if found.blocks > found.sessions:
        raise BenchError(
            f"{root}: {found.blocks} blocks of {found.sessions} sessions; there can be one block a "
            "session at most"
        )
    if found.history is History.OWN and (
        found.compare is Compared.TEXT or found.prompts.format is PromptFormat.TEXT
    ):
        raise BenchError(
            f'{root}: history = "own" needs token ids: compare and prompts.format must be "tokens"'
        )
    for arm in found.arms:
        _check_arm(arm, found, root)
    return found


def _check_arm(arm: Arm, experiment: Experiment, root: str) -> None:
    where = f"{root}: arm {arm.name!r}"
    if arm.url is not None:
        return
    names = [process.name for process in arm.processes]
    if len(set(names)) < len(names):
        raise BenchError(f"{where}: two processes have one name")
    if arm.entry is not None and arm.entry not in names:
        raise BenchError(f"{where}: entry {arm.entry!r} is none of {', '.join(names)}")
    for name in arm.scrape:
        if name not in names and not name.startswith(("http://", "https://")):
            raise BenchError(f"{where}: scrape {name!r} is neither a URL nor one of {names}")
    for process in arm.processes:
        if process.command and (process.serve or process.kv_transfer_config is not None):
            raise BenchError(
                f"{where}: {process.name} has a command of its own, so serve and "
                "kv_transfer_config have no place"
            )
        if experiment.model is None and not process.command:
            raise BenchError(f"{where} serves a model, and none is named: give --model")
        for word in (*experiment.serve, *process.serve):
            if word.split("=")[0] in ("--host", "--port", "--uds"):
                raise BenchError(f"{where}: {word}: servers listen on a free port of 127.0.0.1")


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            found = msgspec.json.decode(content)
        else:
            found = msgspec.toml.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} is not {path.suffix[1:].upper()}: {error}") from None
    except ImportError:
        raise BenchError(
            f"{path}: TOML needs tomli before Python 3.11: "
            'pip install "vllm-tiered-kv[bench]", or write it as JSON'
        ) from None
    if not isinstance(found, dict):
        raise BenchError(f"{path}: expected a table of options")
    return found


def _value(text: str) -> Any:
    try:
        return msgspec.toml.decode(f"value = {text}")["value"]
    except (msgspec.DecodeError, ImportError):
        pass
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return value
