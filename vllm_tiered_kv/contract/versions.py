# SPDX-License-Identifier: Apache-2.0
"""The vLLM versions that are supported, and what that rests on."""

from __future__ import annotations

import enum
import re

import msgspec


class Evidence(enum.Enum):
    """How a version was looked at."""

    RUN = "run"  # the test suite runs with it, real engines included
    SIGNATURES = "signatures"  # its source was compared with what we need; not run


class Supported(msgspec.Struct, frozen=True):
    """One minor version of vLLM."""

    series: str
    evidence: Evidence
    recorded: str
    """The release whose members are in ``tools/contract/recorded``."""


SUPPORTED = (
    Supported("0.32", Evidence.RUN, "0.32.0"),
    Supported("0.33", Evidence.SIGNATURES, "0.33.0"),
)


class Standing(enum.Enum):
    """Where a version stands to :data:`SUPPORTED`."""

    KNOWN = "known"
    UNKNOWN = "unknown"  # newer, or nothing that reads as a release: its members decide
    TOO_OLD = "too old"


_RELEASE = re.compile(r"(\d+)\.(\d+)(\.\d+)*([a-z+].*|\.post\d+.*)?$")


def standing(version: str) -> Standing:
    """Where ``version``, as vLLM gives it, stands."""
    if any(version == s.series or version.startswith(s.series + ".") for s in SUPPORTED):
        return Standing.KNOWN
    match = _RELEASE.match(version)
    if match is None:
        return Standing.UNKNOWN  # such as a build from a checkout without tags
    oldest = tuple(map(int, SUPPORTED[0].series.split(".")))
    release = (int(match[1]), int(match[2]))
    return Standing.TOO_OLD if release < oldest else Standing.UNKNOWN


def supported_words() -> str:
    """``"0.32, 0.33"``."""
    return ", ".join(supported.series for supported in SUPPORTED)
