# SPDX-License-Identifier: Apache-2.0
"""How much of a stored run is loaded: a pure function of what each part would take.

The time to the first token, with the run loaded up to token ``e``, is what it takes to get the run
plus what it takes to compute the rest. Within one source the first grows in proportion (or ever
more slowly: what a window sees, or a state, is loaded once), and the second is concave in ``e`` on
either side of the point where the rest fits into one step. A concave function is least at an end of
its interval, and where a source begins it is not below what the one before it takes. So of all ends
at which a load can stop few need be looked at (:func:`ends_to_try`).
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.gate.prefill import Curve

AS_GOOD = 0.02
"""Two predictions that differ by less are as good: then what takes less of the accelerator wins."""
AS_GOOD_FOR_OTHERS = 0.04
"""The same where others are running, whose tokens all come later by what a recompute takes."""


class Choice(enum.Enum):
    ALL = "all"
    PART = "part"
    NONE = "none"


class Reason(enum.Enum):
    """Why it was chosen."""

    PREDICTED = "predicted"  # the least time to the first token
    LEARNING = "learning"  # too little was measured: all is loaded
    EXPLORING = "exploring"  # slower by prediction, to see whether it still is
    FORCED = "forced"  # the option or the request says so


class Option(msgspec.Struct, frozen=True):
    """One way to go."""

    end: int
    """Tokens of the prompt that are then on the device."""
    load: float
    """Seconds until they are."""
    reads: bool = False
    """Whether anything of it is read from a slow source."""


class Question(msgspec.Struct, frozen=True):
    """What there is for one request."""

    start: int
    """Tokens that the device holds."""
    prompt: int
    """Tokens of the prompt."""
    options: tuple[Option, ...]
    """What could be loaded, shortest first; loading nothing need not be said."""


class Decision(msgspec.Struct, frozen=True):
    """What is done, and what it was expected to take, in seconds."""

    choice: Choice
    reason: Reason
    end: int
    """Tokens that will be on the device."""
    load: float
    """Until what is loaded has arrived; 0 where nothing is."""
    total: float | None
    """To the first token; None: not known."""
    instead: float | None
    """To the first token the other way: computing all where something is loaded, and the best load
    where nothing is."""
    replaced: float | None = None
    """Of the recompute that the load replaces."""


def kinks(prompt: int, budget: int, step: int) -> tuple[int, int]:
    """The last end at which the rest fills more than one step, and the first at which it fits.

    Args:
        prompt: tokens of the prompt.
        budget: tokens that fit in a step.
        step: ends are multiples of it.
    """
    point = prompt - budget
    below = point // step * step
    return below, below if below == point else below + step


def ends_to_try(ends: Sequence[int], begin: int, below: int, above: int) -> list[int]:
    """Of all ends within one source some of which one is the best, unless none is worth it.

    Args:
        ends: where a load can stop, ascending.
        begin: where what the source before it has ends; in the units of ``ends``, as is the rest.
        below: see :func:`kinks`.
        above: likewise.
    """
    places = {bisect_right(ends, below), len(ends)}
    if above > begin:
        places.add(bisect_left(ends, above) + 1)
    return [ends[place - 1] for place in sorted(places) if 0 < place <= len(ends)]


def decide(question: Question, curve: Curve, as_good: float = AS_GOOD) -> Decision:
    """The best choice; of those that are as good the longest load."""
    start, prompt = question.start, question.prompt
    nothing = curve.seconds(start, prompt)
    totals = [option.load + curve.seconds(option.end, prompt) for option in question.options]
    if not totals:
        return Decision(Choice.NONE, Reason.PREDICTED, start, 0.0, nothing, None)
    good_enough = (1 + as_good) * min(nothing, *totals)
    for option, total in zip(reversed(question.options), reversed(totals), strict=True):
        if total <= good_enough:
            return _loads(question, option, total, nothing, Reason.PREDICTED)
    return Decision(Choice.NONE, Reason.PREDICTED, start, 0.0, nothing, min(totals))


def _loads(
    question: Question, option: Option, total: float, nothing: float, reason: Reason
) -> Decision:
    choice = Choice.ALL if option is question.options[-1] else Choice.PART
    replaced = nothing - (total - option.load)
    return Decision(choice, reason, option.end, option.load, total, nothing, replaced)


def forced(question: Question, reason: Reason, curve: Curve | None) -> Decision:
    """All is loaded, whatever it takes."""
    options: Sequence[Option] = question.options
    if not options:
        return Decision(Choice.NONE, reason, question.start, 0.0, None, None)
    last = options[-1]
    if curve is None:
        return Decision(Choice.ALL, reason, last.end, last.load, None, None)
    nothing = curve.seconds(question.start, question.prompt)
    total = last.load + curve.seconds(last.end, question.prompt)
    return _loads(question, last, total, nothing, reason)
