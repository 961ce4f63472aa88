# SPDX-License-Identifier: Apache-2.0
"""The JSON of ``--kv-transfer-config``, or the part of it that is ours alone."""

from __future__ import annotations

import difflib
import enum
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from vllm_tiered_kv.check.findings import Finding, Level, error, ok, warning
from vllm_tiered_kv.config import Options
from vllm_tiered_kv.mistakes import REFUSED, explain, shown, unknown_key
from vllm_tiered_kv.plugin import ENTRY_POINT, MODULE, NAME

MAX_BYTES = 1 << 20
_MULTI = "MultiConnector"
_POLICY = "kv_load_failure_policy"
_PACKAGE = MODULE.partition(".")[0]


class NotReadable(ValueError):
    """What was given is no JSON object; the message says why."""


class Role(enum.Enum):
    """vLLM's ``kv_role``."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"

    @property
    def sends(self) -> bool:
        return self is not Role.CONSUMER

    @property
    def receives(self) -> bool:
        return self is not Role.PRODUCER


class Policy(enum.Enum):
    """vLLM's ``kv_load_failure_policy``."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``KVTransferConfig`` (0.32), as far as it matters here."""

    kv_connector: str | None = None
    engine_id: Any = None
    kv_buffer_device: Any = None
    kv_role: Role | None = None
    kv_port: Any = None
    kv_connector_extra_config: dict[str, Any] = {}
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: Any = None
    kv_load_failure_policy: Policy = Policy.FAIL


class Ours(msgspec.Struct, frozen=True):
    """What is left when vLLM's part has been looked at."""

    extra: Mapping[str, Any] | None
    """``kv_connector_extra_config``; None if it cannot be told."""
    role: Role | None
    """None if it is not given."""
    findings: tuple[Finding, ...]


def read_given(text: str, stdin: BinaryIO) -> dict[str, Any]:
    """The object that is given: JSON itself, a file's name, or ``-``.

    Raises:
        NotReadable: it is none.
    """
    if not text.strip() or text.lstrip()[0] in '{["':
        data, name = text.encode(errors="surrogateescape"), "what is given"
    elif text == "-":
        data, name = stdin.read(MAX_BYTES + 1), "standard input"
    else:
        data, name = _read(Path(text).expanduser()), text
    if len(data) > MAX_BYTES:
        raise NotReadable(f"{name} is longer than {MAX_BYTES} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as broken:
        raise NotReadable(f"{name} is not JSON: {broken}") from None
    if not isinstance(raw, dict):
        raise NotReadable(f"{name} is not a JSON object")
    return raw


def ours_of(raw: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Ours:
    """Our part of it, and what is to be said of vLLM's."""
    if not any(key in TransferConfig.__struct_fields__ or key.startswith("kv_") for key in raw):
        return Ours(raw, None, (ok("kv_role", "not given: looked at as kv_both"),))
    if raw.get("kv_connector") == _MULTI:
        return _child(raw, environ)
    return _whole(raw, environ)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as broken:
        why = broken.strerror if isinstance(broken, OSError) and broken.strerror else broken
        raise NotReadable(f"{path} cannot be read: {why}") from None


def _whole(raw: Mapping[str, Any], environ: Mapping[str, str]) -> Ours:
    good, findings = _fields(raw)
    config = msgspec.convert(good, TransferConfig)
    if "kv_connector" in good or "kv_connector" not in raw:
        findings += _connector(config, environ)
    findings += _role(config.kv_role, raw)
    if _POLICY in good or _POLICY not in raw:
        findings.append(_policy(config.kv_load_failure_policy))
    extra = raw.get("kv_connector_extra_config", {})
    return Ours(extra if isinstance(extra, dict) else None, config.kv_role, tuple(findings))


def _fields(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """What is as it has to be, and what is said of all else."""
    good: dict[str, Any] = {}
    findings: list[Finding] = []
    for key, value in raw.items():
        if key in Options.__struct_fields__:
            inside = f'{{"kv_connector_extra_config": {{"{key}": ...}}}}'
            findings.append(error(key, f"stands beside vLLM's own options; write {inside}"))
        elif key not in TransferConfig.__struct_fields__:
            known = TransferConfig.__struct_fields__
            what, _, says = unknown_key("", key, value, known).partition(": ")
            findings.append(error(what, f"{says} (of vLLM's options)"))
        else:
            try:
                msgspec.convert({key: value}, TransferConfig)
            except REFUSED as wrong:
                says = explain(wrong, {key: value}, TransferConfig).partition(": ")[2]
                findings.append(error(key, says))
            else:
                good[key] = value
    return good, findings


def _connector(config: TransferConfig, environ: Mapping[str, str]) -> list[Finding]:
    name, module = config.kv_connector, config.kv_connector_module_path
    if name is None:
        return [error("kv_connector", f'without it vLLM uses no connector; write "{NAME}"')]
    if module is not None and module.partition(".")[0] == _PACKAGE:
        return [ok("kv_connector", f"{name} of {module}")]
    if name != NAME:
        near = difflib.get_close_matches(name.lower(), [NAME.lower()], n=1)
        meant = f'; the nearest is "{NAME}"' if near else f': ours is "{NAME}"'
        return [error("kv_connector", f"{shown(name)} is another connector{meant}")]
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and ENTRY_POINT not in plugins.split(","):
        return [
            error(
                "kv_connector",
                f"vLLM does not know {NAME} here: VLLM_PLUGINS is {shown(plugins)}, without "
                f'"{ENTRY_POINT}"; add it, or "kv_connector_module_path": "{MODULE}"',
            )
        ]
    return [ok("kv_connector", name)]


def _role(role: Role | None, raw: Mapping[str, Any]) -> list[Finding]:
    if role is not None:
        return [ok("kv_role", role.value)]
    if raw.get("kv_role") is not None:
        return []  # said already: it is none
    return [error("kv_role", 'required, but not given; "kv_both" is for most engines')]


def _policy(policy: Policy) -> Finding:
    if policy is Policy.RECOMPUTE:
        return ok(_POLICY, "recompute: a chunk that fails to load is computed")
    return warning(
        _POLICY,
        "is \"fail\", vLLM's default: a chunk that fails to load will FAIL the user's request "
        f'instead of being recomputed; write "{_POLICY}": "recompute"',
    )


def _child(raw: Mapping[str, Any], environ: Mapping[str, str]) -> Ours:
    """Our place among the connectors of a ``MultiConnector``."""
    good, findings = _fields(raw)
    config = msgspec.convert(good, TransferConfig)
    if _POLICY in good or _POLICY not in raw:
        findings.append(_policy(config.kv_load_failure_policy))
    findings += [one for one in _role(config.kv_role, raw) if one.level is Level.ERROR]
    given = config.kv_connector_extra_config.get("connectors")
    children = given if isinstance(given, list) else []
    found = [child for child in children if _is_ours(child)]
    where = "kv_connector_extra_config.connectors"
    if len(found) != 1:
        says = (
            f"none of them is {NAME}"
            if not found
            else f"{len(found)} of them are {NAME}: an engine can have one"
        )
        return Ours(None, None, (*findings, error(where, says)))
    findings.append(
        ok(where, f"{NAME} is one of {len(children)}; {_MULTI}'s failure policy counts")
    )
    child = _whole(found[0], environ)
    kept = (one for one in child.findings if one.what != _POLICY)
    return Ours(child.extra, child.role, (*findings, *kept))


def _is_ours(child: object) -> bool:
    if not isinstance(child, dict):
        return False
    module = child.get("kv_connector_module_path")
    ours = isinstance(module, str) and module.partition(".")[0] == _PACKAGE
    return ours or child.get("kv_connector") == NAME
