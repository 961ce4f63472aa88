# SPDX-License-Identifier: Apache-2.0
"""The whole check, and all that it says, as ``--json`` prints it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from typing import Any

import msgspec

from vllm_tiered_kv.check import folder, memory
from vllm_tiered_kv.check import model as models
from vllm_tiered_kv.check.bounded import answers
from vllm_tiered_kv.check.findings import (
    Finding,
    Level,
    count,
    error,
    ok,
    refused,
    warning,
)
from vllm_tiered_kv.check.given import Role, ours_of
from vllm_tiered_kv.check.model import ModelReport, Served
from vllm_tiered_kv.check.remote import check_remote
from vllm_tiered_kv.config import ConfigError, DiskOptions, Options, parse_options
from vllm_tiered_kv.contract.versions import Standing, standing, supported_words

FOLDER_SECONDS = 15.0
"""Until a folder counts as one that hangs."""


class CheckReport(msgspec.Struct, frozen=True):
    """The answer."""

    level: Level
    """The worst of all findings."""
    errors: int
    warnings: int
    user: int
    """Who has checked: keys and folders are looked at with this user's rights."""
    findings: tuple[Finding, ...]
    model: ModelReport | None = None
    """None where no model is named, or the options cannot be used."""


def check(raw: Mapping[str, Any], served: Served | None = None, ranks: int = 1) -> CheckReport:
    """Check what is given on this machine.

    Args:
        raw: the object of ``--kv-transfer-config``, or ``kv_connector_extra_config`` alone.
        served: the model, if one is named.
        ranks: that share the CPU tier.

    Raises:
        SizingError: the model's layers cannot be divided over so many GPUs.
    """
    ours = ours_of(raw)
    findings = [_vllm(), *ours.findings]
    report = None
    if ours.extra is not None:
        try:
            options = parse_options(ours.extra)
        except ConfigError as wrong:
            findings.append(refused(str(wrong)))
        else:
            findings += _options(options, ours.role, ranks)
            if served is not None:
                report, said = models.judge(options, served)
                findings += said
    errors, warnings = count(findings, Level.ERROR), count(findings, Level.WARNING)
    level = Level.ERROR if errors else Level.WARNING if warnings else Level.OK
    return CheckReport(level, errors, warnings, os.geteuid(), tuple(findings), report)


def _options(options: Options, role: Role | None, ranks: int) -> list[Finding]:
    findings = []
    if options.cpu is not None:
        findings.append(memory.judge(options.cpu, memory.look(options.cpu, ranks)))
    if options.disk is not None:
        findings += _disk(options.disk)
    if options.remote is not None:
        findings += check_remote(options, options.remote, role or Role.BOTH)
    elif role in (Role.PRODUCER, Role.CONSUMER):
        says = f"{role.value} says who hands over to whom, and there is no remote; write kv_both"
        findings.append(warning("kv_role", says))
    return findings


def _disk(disk: DiskOptions) -> list[Finding]:
    found = answers({disk.path: partial(folder.look, disk)}, FOLDER_SECONDS)
    if disk.path not in found:
        says = f"{disk.path} does not answer within {FOLDER_SECONDS:g} s: does its mount hang?"
        return [error("disk.path", says)]
    return folder.judge(disk, found[disk.path])


def _vllm() -> Finding:
    """By what is installed: nothing of it is imported."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return warning("vllm", "is not installed in this environment")
    where = standing(version)
    if where is Standing.TOO_OLD:
        return error("vllm", f"{version} is too old; supported are {supported_words()}")
    if where is Standing.UNKNOWN:
        return warning("vllm", f"{version} was not tested (tested are {supported_words()})")
    return ok("vllm", version)
