# SPDX-License-Identifier: Apache-2.0
"""Files and options into an :class:`Experiment`, with mistakes in words.

A mistake names the file, the key, the value and, for a key that does not exist, the nearest one.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec

from vllm_tiered_kv.bench.config import Arm, Compared, Experiment, History, PromptFormat
from vllm_tiered_kv.bench.errors import BenchError

MAX_FILE = 1 << 20

_O = TypeVar("_O", bound=msgspec.Struct)
_PART = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


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
        raise BenchError(f"{root}: {_explain(error, raw, kind)}") from None


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
        raise BenchError(f"{path}: {error}") from None
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


def _explain(error: msgspec.ValidationError, raw: Mapping[str, Any], kind: type) -> str:
    reason, _, where = str(error).partition(" - at `")
    path = where.strip("`").removeprefix("$")
    parts = [name or int(index) for name, index in _PART.findall(path)]
    value, at = _follow(raw, kind, parts)
    shown = path.removeprefix(".")
    if unknown := re.search(r"unknown field `(.*)`$", reason):
        key = f"{shown}.{unknown[1]}" if shown else unknown[1]
        inside = value.get(unknown[1]) if isinstance(value, Mapping) else None
        text = f"{key}: unknown key (value {inside!r})"
        near = difflib.get_close_matches(unknown[1], _keys(at), n=1, cutoff=0.0)
        if not near:
            return text
        nearest = f"{shown}.{near[0]}" if shown else near[0]
        return f"{text}; the nearest valid key is {nearest!r}"
    if missing := re.search(r"missing required field `(\w+)`", reason):
        return f"{f'{shown}.' if shown else ''}{missing[1]}: required, but not given"
    choices = _choices(at) or _tags(raw, kind, parts)
    if choices:
        reason = f"expected one of {', '.join(choices)}"
    return f"{shown or 'this'}: {value!r} is not valid: {reason}"


def _follow(raw: Any, kind: Any, parts: Sequence[str | int]) -> tuple[Any, Any]:
    """The value at a path, and the type that is expected there."""
    for part in parts:
        if isinstance(part, int):
            kind = next(iter(_inside(kind)), None)
            raw = raw[part] if isinstance(raw, (list, tuple)) and part < len(raw) else None
        else:
            kind = _field(kind, part, raw)
            raw = raw.get(part) if isinstance(raw, Mapping) else None
    return raw, _chosen(kind, raw)


def _inside(kind: Any) -> list[Any]:
    """What a container of that type holds."""
    for each in _alternatives(kind):
        if get_origin(each) is tuple:
            return [get_args(each)[0]]
    return []


def _field(kind: Any, name: str, raw: Any) -> Any:
    chosen = _chosen(kind, raw)
    if not isinstance(chosen, type) or not issubclass(chosen, msgspec.Struct):
        return None
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(chosen)}
    return fields.get(name)


def _chosen(kind: Any, raw: Any) -> Any:
    """Of several structs the one whose tag is given."""
    structs = _structs(kind)
    if len(structs) < 2:
        return structs[0] if structs else kind
    tag = raw.get("kind") if isinstance(raw, Mapping) else None
    return next((each for each in structs if each.__struct_config__.tag == tag), None)


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    found = _alternatives(kind)
    return [each for each in found if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def _alternatives(kind: Any) -> list[Any]:
    """The members of a union, without annotations."""
    if hasattr(kind, "__metadata__"):
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) is tuple or not get_args(kind) or get_origin(kind) is dict:
        return [kind]
    return [each for member in get_args(kind) for each in _alternatives(member)]


def _keys(kind: Any) -> list[str]:
    fields = (msgspec.structs.fields(each) for each in _structs(kind))
    return list(dict.fromkeys(field.encode_name for each in fields for field in each))


def _choices(kind: Any) -> tuple[str, ...]:
    for each in _alternatives(kind):
        if isinstance(each, type) and issubclass(each, enum.Enum):
            return tuple(str(member.value) for member in each)
    return ()


def _tags(raw: Any, kind: Any, parts: Sequence[str | int]) -> tuple[str, ...]:
    """Where a tag was wrong: those that exist."""
    if not parts or parts[-1] != "kind":
        return ()
    for part in parts[:-1]:
        kind = _field(kind, cast(str, part), raw)
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return tuple(str(each.__struct_config__.tag) for each in _structs(kind))
