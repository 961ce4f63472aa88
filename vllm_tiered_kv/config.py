# SPDX-License-Identifier: Apache-2.0
"""The options of ``kv_connector_extra_config``, parsed and checked once, at start.

Every mistake is one :class:`ConfigError` whose message names the key, the value and, for a
key that does not exist, the nearest one that does, or all of them where none is near.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vllm_tiered_kv.gate import GateMode
from vllm_tiered_kv.mistakes import REFUSED, explain, named, structs_of
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.remote.options import RemoteOptions, check_remote

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGTP")},
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGTP")},
    **{p: 1000 ** (i + 1) for i, p in enumerate("KMGTP")},
    **{f"{p}i": 1024 ** (i + 1) for i, p in enumerate("KMGTP")},
}
_UNITS_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"^\s*(-?\d{1,24}(?:\.\d{1,24})?)\s*([A-Za-z]*)\s*$")
_MAX_SIZE = 1 << 60
_CONNECTOR = "kv_connector_extra_config"

_O = TypeVar("_O", bound=msgspec.Struct)


class ConfigError(ValueError):
    """An option that cannot be used; the message is meant for the person who wrote it."""


class Size(int):
    """A number of bytes, written as ``"32GiB"``, ``"500GB"`` or a plain byte count."""

    @classmethod
    def parse(cls, value: object) -> Size:
        """Read one size.

        Raises:
            ValueError: it is neither a whole byte count nor a number with a known unit.
        """
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError('expected a size like "32GiB", "500GB" or a byte count')
        if isinstance(value, int):
            size = value
        else:
            match = _SIZE.match(value)
            if match is None:
                raise ValueError('expected a size like "32GiB", "500GB" or a byte count')
            unit = match[2].lower()
            if unit not in _UNITS_BY_LOWER:
                raise ValueError(f"unknown unit {match[2]!r}: use B, KB..PB or KiB..PiB")
            factor = _UNITS_BY_LOWER[unit]
            size = int(match[1]) * factor if match[1].isdigit() else int(float(match[1]) * factor)
        if size <= 0:
            raise ValueError("a size must be positive")
        if size > _MAX_SIZE:
            raise ValueError(f"a size must be below {format_size(_MAX_SIZE)}")
        return cls(size)


def format_size(size: int) -> str:
    """``1572864`` -> ``"1.5 MiB"``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.2f} {unit}"


class CpuOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The CPU tier."""

    capacity: Size
    """Host memory for this engine's chunks, divided over its ranks."""
    eviction: Eviction = Eviction.LRU
    """What goes first."""


class FolderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder that chunks are kept in."""

    path: str
    """The folder; absolute. Several processes may name the same one."""
    capacity: Size
    """Bytes the whole folder may hold, whoever wrote them."""
    min_free: Size = Size(1 << 30)
    """Bytes of the file system that stay free."""
    high_water: float = 0.95
    """Share of the capacity from which chunks are evicted in the background."""
    low_water: float = 0.9
    """Share of the capacity down to which they are."""
    shared: bool = False
    """Find also what other processes write after this one has started."""
    eviction: Eviction = Eviction.LRU
    """What goes first."""
    io_deadline: float = 30.0
    """Seconds after which an I/O call counts as hung and the folder is left alone for a while."""


class DiskOptions(FolderOptions, frozen=True, forbid_unknown_fields=True):
    """The disk tier."""

    min_tokens: int = 0
    """Prompts shorter than this are not written."""
    store_after: int = 1
    """Write a chunk the n-th time it is seen."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of ``kv_connector_extra_config``."""

    cpu: CpuOptions | None = None
    disk: DiskOptions | None = None
    remote: RemoteOptions | None = None
    gate: GateMode = GateMode.MEASURED
    """What decides whether a stored prefix is loaded or computed again."""
    store_generated: bool = True
    """Also store chunks that hold generated tokens, not only prompt tokens."""
    chunk_tokens: int | None = None
    """Tokens a chunk; a multiple of the scheduler's block size. None: chosen by bytes."""
    load_deadline: float = 10.0
    """Seconds after which a load that has not begun to copy is given up and recomputed."""
    trust_after_reset: bool = False
    """Keep what is stored when vLLM resets its caches. Only where no reset ever follows a change
    of the weights: vLLM does not say why it resets, and pausing and sleeping do it too."""


def parse_options(raw: Mapping[str, Any]) -> Options:
    """Check and convert ``kv_connector_extra_config``.

    Raises:
        ConfigError: naming the key, the value and the nearest valid key.
    """
    _refuse_unknown_keys(raw, Options, _CONNECTOR)
    if all(raw.get(source) is None for source in ("cpu", "disk", "remote")):
        raise ConfigError(
            "kv_connector_extra_config: no tier is configured; give at least "
            '{"cpu": {"capacity": "32GiB"}} or {"disk": {"path": "/mnt/kv", "capacity": "500GiB"}}'
        )
    options = decode_options(raw, Options, _CONNECTOR)
    if options.chunk_tokens is not None and options.chunk_tokens <= 0:
        raise ConfigError(f"chunk_tokens: {options.chunk_tokens!r} must be positive")
    if not 0 < options.load_deadline <= 3600:
        raise ConfigError(
            f"load_deadline: {options.load_deadline!r} must be above 0 and at most 3600 seconds"
        )
    if options.disk is not None:
        _check_disk(options.disk)
    if options.remote is not None and (wrong := check_remote(options.remote)) is not None:
        key, value, reason = wrong
        raise ConfigError(f"remote.{key}: {value!r} is not valid: {reason}")
    return options


def decode_options(raw: Mapping[str, Any], kind: type[_O], root: str) -> _O:
    """Convert options to a struct.

    Args:
        raw: what was given.
        kind: the struct.
        root: what the whole of ``raw`` is called.

    Raises:
        ConfigError: naming the key, the value and the nearest valid key.
    """
    _refuse_unknown_keys(raw, kind, root)
    try:
        return msgspec.convert(dict(raw), kind, dec_hook=_decode)
    except REFUSED as error:
        raise ConfigError(explain(error, raw, kind, root)) from None


def check_folder(folder: FolderOptions, prefix: str = "") -> None:
    """Refuse values that fit their types and nothing else.

    Args:
        folder: the options.
        prefix: what precedes their keys.

    Raises:
        ConfigError: naming the key and the value.
    """
    if not Path(folder.path).is_absolute() or "\0" in folder.path or not _is_text(folder.path):
        raise ConfigError(f"{prefix}path: {folder.path!r} must be an absolute path")
    if not 0 < folder.high_water <= 1:
        raise ConfigError(
            f"{prefix}high_water: {folder.high_water!r} must be above 0 and at most 1"
        )
    if not 0 < folder.low_water <= folder.high_water:
        raise ConfigError(
            f"{prefix}low_water: {folder.low_water!r} must be above 0 and at most "
            f"{prefix}high_water, {folder.high_water!r}"
        )
    if not 0.1 <= folder.io_deadline <= 3600:
        raise ConfigError(
            f"{prefix}io_deadline: {folder.io_deadline!r} must be from 0.1 to 3600 seconds"
        )


def _is_text(value: str) -> bool:
    """Whether it is valid Unicode: JSON can hold halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _check_disk(disk: DiskOptions) -> None:
    check_folder(disk, "disk.")
    if not 0 <= disk.min_tokens <= 1 << 30:
        raise ConfigError(f"disk.min_tokens: {disk.min_tokens!r} must be from 0 to {1 << 30}")
    if not 1 <= disk.store_after <= 15:
        raise ConfigError(f"disk.store_after: {disk.store_after!r} must be from 1 to 15")


def _decode(kind: type, value: object) -> object:
    if kind is Size:
        return Size.parse(value)
    raise NotImplementedError(f"no decoder for {kind}")


def _refuse_unknown_keys(raw: object, top: type[msgspec.Struct], root: str) -> None:
    """Refuse keys that ``top`` lacks, on all levels. ``root`` is what the whole is called."""
    levels: list[tuple[str, object, type[msgspec.Struct]]] = [("", raw, top)]
    for path, given, kind in levels:
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        if not isinstance(given, Mapping):
            raise ConfigError(_not_an_object(given, kind, path, root))
        for key, value in given.items():
            name = f"{path}.{key}" if path else str(key)
            if key not in fields:
                hint = _hint(name, path, fields, top)
                shown = f"{path}.{named(key)}" if path else named(str(key))
                raise ConfigError(f"{shown}: unknown key (value {value!r}); {hint}")
            if (nested := _struct(fields[key])) is not None and value is not None:
                levels.append((name, value, nested))


def _not_an_object(given: object, kind: type[msgspec.Struct], path: str, root: str) -> str:
    """What is wrong, and how it is written."""
    wrong = f"{path or root}: expected an object, got {given!r}"
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    if not path or not required:
        return wrong
    inside = ", ".join(f'"{name}": ...' for name in required)
    return f'{wrong}; write "{path}": {{{inside}}}'


def _struct(kind: Any) -> type[msgspec.Struct] | None:
    """The struct that a field holds, also where it may be left out."""
    return next(iter(structs_of(kind)), None)


def _hint(name: str, path: str, fields: Mapping[str, Any], top: type[msgspec.Struct]) -> str:
    """What was probably meant, written as it has to be written; else all that there is."""
    key = name.removeprefix(f"{path}.") if path else name
    leaf = key.rpartition(".")[2]
    nested = {parent: _names(one) for parent, kind in fields.items() if (one := _struct(kind))}
    flat = [(parent, key[len(parent) + 1 :]) for parent in nested if key.startswith(parent)]
    for parent, inner in (*flat, *((parent, leaf) for parent in nested)):
        if inner in nested[parent]:  # written without its level, or with a dot
            return f'the nearest valid key is {parent}.{inner}: {{"{parent}": {{"{inner}": ...}}}}'
    before = f"{path}." if path else ""
    elsewhere = {known: known for known in _names(top)}
    for field in msgspec.structs.fields(top):
        for inner in _names(one) if (one := _struct(field.type)) is not None else ():
            elsewhere.setdefault(inner, f"{field.name}.{inner}")
    if leaf in elsewhere:
        return f"the nearest valid key is {elsewhere[leaf]!r}"
    if near := difflib.get_close_matches(leaf, fields, n=1):
        return f"the nearest valid key is {before + near[0]!r}"
    return "the valid keys are " + ", ".join(repr(before + known) for known in fields)


def _names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind))


def memory_limit() -> int:
    """Bytes this process may use: the machine's memory or the container's limit, the smaller."""
    limits = [_meminfo("MemTotal:")]
    limits += [limit for path in _cgroup_limit_files() if (limit := _read_limit(path)) is not None]
    return min(limits)


def check_capacity(key: str, capacity: int, *, floor: int, limit: int) -> None:
    """Refuse a capacity which cannot hold one chunk, or which the machine does not have.

    Raises:
        ConfigError: ``capacity`` is below ``floor`` or above ``limit`` (bytes).
    """
    if capacity < floor:
        raise ConfigError(
            f"{key}: {format_size(capacity)} cannot hold one chunk over all ranks "
            f"({format_size(floor)}); give at least that"
        )
    if capacity > limit:
        raise ConfigError(
            f"{key}: {format_size(capacity)} is more than this machine or container has "
            f"({format_size(limit)})"
        )


def available_memory() -> int:
    """Bytes the machine can still give without swapping, by the kernel's own estimate, or the
    container below its limit, whichever is less."""
    rooms = [_meminfo("MemAvailable:")]
    rooms += [room for path in _cgroup_limit_files() if (room := _room_below(path)) is not None]
    return max(0, min(rooms))


def _meminfo(field: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return _MAX_SIZE


def _cgroup_limit_files() -> list[Path]:
    """The limit files of this process's control groups and of their parents (v2, then v1)."""
    files = [Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") if not controllers else Path("/sys/fs/cgroup/memory")
        name = "memory.max" if not controllers else "memory.limit_in_bytes"
        folder = root / path.lstrip("/")
        while True:
            files.append(folder / name)
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return files


def _room_below(path: Path) -> int | None:
    """Below the limit in a file; what the kernel would drop first does not count as used."""
    limit = _read_limit(path)
    v2 = path.name == "memory.max"
    used = _read_limit(path.with_name("memory.current" if v2 else "memory.usage_in_bytes"))
    if limit is None or used is None:
        return None
    dropped = 0
    with contextlib.suppress(OSError, ValueError):
        for line in path.with_name("memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == ("inactive_file" if v2 else "total_inactive_file"):
                dropped = int(value)
    return limit - used + dropped


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
