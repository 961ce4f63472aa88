# SPDX-License-Identifier: Apache-2.0
"""What a comparison is made of, as it is written in a file: servers, a workload, a load.

All of it has bounds, so that a slip of the pen neither fills memory nor runs for a week.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_tiered_kv.bench.workloads.kinds import Shared, Workload

Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=60,
        pattern=r"\A[^\x00-\x1f\x7f]+\Z",
        description="1 to 60 characters, none of them a control character",
    ),
]
ProcessName = Annotated[
    str,
    Meta(
        pattern=r"\A[a-z][a-z0-9_-]{0,30}\Z",
        description='a lower-case letter and at most 30 more, digits, "-" or "_"',
    ),
]
Url = Annotated[
    str,
    Meta(
        pattern=r"\Ahttps?://[^\s/]+(/\S*)?\Z",
        max_length=2000,
        description='an address like "http://127.0.0.1:8000"',
    ),
]
Text = Annotated[str, Meta(max_length=100_000)]
Words = Annotated[tuple[Text, ...], Meta(max_length=1000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Milliseconds = Annotated[float, Meta(gt=0, le=86_400_000)]
MAX_ARMS = 16


class Mode(str, enum.Enum):
    """What decides when a session begins."""

    CLOSED = "closed"
    """The end of another: so many are always under way."""
    OPEN = "open"
    """The clock: they begin whether or not others have ended."""


class Placement(str, enum.Enum):
    """Which servers are up at the same time."""

    TOGETHER = "together"
    ONE_AT_A_TIME = "one-at-a-time"


class PromptFormat(str, enum.Enum):
    """How prompts are sent."""

    TOKENS = "tokens"
    """Token ids: exactly as long as asked for."""
    TEXT = "text"
    """Short words, about one token each."""


class Compared(str, enum.Enum):
    """What outputs are compared by."""

    TOKENS = "tokens"
    """Token ids and log-probabilities, which are asked for; text where a server gives none."""
    TEXT = "text"


class History(str, enum.Enum):
    """What stands for earlier answers in the prompts of a conversation."""

    REPLAYED = "replayed"
    """Made-up ones, so that every server gets the same prompts."""
    OWN = "own"
    """The server's own."""


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key that is not known is a mistake."""


class Process(_Options, frozen=True):
    """One process of an arm: ``vllm serve`` with ``serve`` behind it, or ``command``.

    Words may hold ``{model}``, ``{folder}`` (a folder of the arm's own, empty at its start and gone
    after its end), ``{port}`` (a free one), ``{port:LABEL}`` (another) and ``{NAME.port}`` or
    ``{NAME.port:LABEL}`` (of another process of the arm).
    """

    name: ProcessName = "server"
    serve: Words = ()
    kv_transfer_config: dict[str, Any] | None = None
    """vLLM's; a value that is a port's place and nothing else becomes a number."""
    command: Words = ()
    """A whole command, instead of ``vllm serve``."""
    env: dict[str, Text] = {}
    ready: Text = "http://127.0.0.1:{port}/health"
    """Answers 200 when the process is ready for the next one to be started."""


class Arm(_Options, frozen=True):
    """One of the server configurations that are compared."""

    name: Name
    url: Url | None = None
    """Of a server that runs already; nothing is started then."""
    processes: Annotated[tuple[Process, ...], Meta(min_length=1, max_length=16)] = (Process(),)
    """Started one after another, ended in the reverse order."""
    entry: ProcessName | None = None
    """The process that requests go to; None: the last one."""
    scrape: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Processes, or URLs, whose metrics count; by default each ``vllm serve``, or ``url``."""
    model: Text | None = None
    """The name that the server knows; None: the first that it answers to."""
    bin: Text | None = None
    """A folder in which commands are looked for first, such as another environment's ``bin``."""
    needs: Annotated[str, Meta(max_length=1000)] = ""
    """What it takes besides vLLM and the model; said where it does not start."""


class Load(_Options, frozen=True):
    """How sessions come."""

    mode: Mode = Mode.CLOSED
    concurrency: Annotated[int, Meta(ge=1, le=4096)] = 4
    """Closed: sessions under way at once; one that thinks is under way, too."""
    rate: Annotated[float, Meta(gt=0, le=100_000)] = 1.0
    """Open: sessions that begin in a second on average, in a Poisson process; traces have times of
    their own."""


class Slo(_Options, frozen=True):
    """What a request must meet to count as good; None: no matter."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class Prompts(_Options, frozen=True):
    """What prompts are made of."""

    format: PromptFormat = PromptFormat.TOKENS
    first_token: Annotated[int, Meta(ge=0, le=1 << 24)] = 1000
    last_token: Annotated[int, Meta(ge=0, le=1 << 24)] = 20_999
    """Token ids are drawn from the first to the last, which should avoid special tokens."""


class Experiment(_Options, frozen=True):
    """All of it."""

    name: Name = "ab"
    model: Text | None = None
    """A folder or a name, for servers that are started."""
    serve: Words = ()
    """Arguments of every ``vllm serve``, before a process's own."""
    env: dict[str, Text] = {}
    """Of every process that is started."""
    arms: Annotated[tuple[Arm, ...], Meta(max_length=MAX_ARMS)] = ()
    """The first is what the others are compared with."""
    workload: Workload = Shared()
    load: Load = Load()
    slo: Slo = Slo()
    prompts: Prompts = Prompts()
    sessions: Annotated[int, Meta(ge=1, le=1_000_000)] = 60
    """That are measured on each arm."""
    warmup: Annotated[int, Meta(ge=0, le=100_000)] = 5
    """Sessions before them that are not counted."""
    blocks: Annotated[int, Meta(ge=1, le=10_000)] = 12
    """Parts into which sessions are cut; each part goes to every arm before the next begins."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    placement: Placement = Placement.TOGETHER
    rounds: Annotated[int, Meta(ge=1, le=100)] = 2
    """One at a time: how often each arm is started."""
    settle: Annotated[float, Meta(ge=0, le=600)] = 0.5
    """Seconds after a block in which what an arm still does is not yet beside the next one."""
    compare: Compared = Compared.TOKENS
    history: History = History.REPLAYED
    request: dict[str, Any] = {}
    """Further fields of each request, over the ones set here."""
    api_key_env: Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,100}\Z")] | None = None
    """The environment variable with the key that all servers ask for. The key is in no report."""
    start_timeout: Seconds = 600.0
    """Until a process has to be ready."""
    request_timeout: Seconds = 300.0
    resamples: Annotated[int, Meta(ge=100, le=100_000)] = 2000
    """For the intervals."""
