# SPDX-License-Identifier: Apache-2.0
"""The check when the connector is imported: one line that says what is wrong, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.contract import live
from vllm_tiered_kv.contract.compare import Findings, compare
from vllm_tiered_kv.contract.needs import NEEDS
from vllm_tiered_kv.contract.structs import Need
from vllm_tiered_kv.contract.versions import Standing, standing, supported_words

MAX_PROBLEMS = 3
"""More in one line help nobody."""


class UnsupportedVllm(RuntimeError):
    """This vLLM cannot be worked with; the message says why, in one line."""


class Verdict(msgspec.Struct, frozen=True):
    """A vLLM that we can work with."""

    version: str
    standing: Standing
    notes: tuple[str, ...] = ()


def accept(version: str, needs: Sequence[Need] = NEEDS) -> Verdict:
    """Hold the vLLM that is running, which calls itself ``version``, against what we need.

    Raises:
        UnsupportedVllm: it is too old, or its members differ in a way that would break us.
    """
    where = standing(version)
    if where is Standing.TOO_OLD:
        raise _unsupported(version, f"too old; supported are {supported_words()}")
    needs = live.relevant(needs)
    findings = compare(needs, live.members(needs))
    if findings.problems:
        raise _unsupported(version, _words(findings))
    return Verdict(version, where, findings.notes)


def warn(verdict: Verdict, logger: logging.Logger) -> None:
    """Say once that a version is not one we know."""
    if verdict.standing is Standing.UNKNOWN:
        logger.warning(
            "tiered-kv: vLLM %s was not tested (tested are %s); everything we use of it is as we "
            "know it%s",
            verdict.version,
            supported_words(),
            "".join(f"; {note}" for note in verdict.notes),
        )


def _unsupported(version: str, why: str) -> UnsupportedVllm:
    return UnsupportedVllm(f"tiered-kv: vLLM {version} is not supported: {why}")


def _words(findings: Findings) -> str:
    problems = findings.problems
    more = len(problems) - MAX_PROBLEMS
    words = "; ".join(problems[:MAX_PROBLEMS])
    return f"{words}; and {more} more" if more > 0 else words
