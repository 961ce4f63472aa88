# SPDX-License-Identifier: Apache-2.0
"""What the two halves say to each other.

Each step the scheduler half sends one :class:`StepPlan` to every rank; each rank answers
with :class:`WorkerReport` objects, through vLLM's worker metadata and through the side
channel. A result may arrive twice; ``(job, rank)`` makes it count once.
"""

from __future__ import annotations

import enum

import msgspec

from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.memory import Place, RankLayout
from vllm_tiered_kv.remote.messages import ChunkSums, Sums
from vllm_tiered_kv.remote.transport import Endpoint

MAX_RESULTS = 4096
"""Results in one report; the rest follows in the next."""


class Direction(enum.Enum):
    STORE = "store"  # device pages -> slots
    LOAD = "load"  # slots -> device pages


class JobStatus(enum.Enum):
    DONE = "done"
    FAILED = "failed"  # an error; the chunk's bytes are not to be trusted
    DROPPED = "dropped"  # given up before the copy began: fence, cancel, deadline, shutdown
    LATE = "late"  # given up on the way: doing without the rest is faster


class AdapterState(enum.Enum):
    """What a rank knows of a LoRA adapter's content."""

    KNOWN = "known"
    DIGESTING = "digesting"  # it will be known in a moment
    ABSENT = "absent"  # not in memory: it is read again when a request needs it
    OPAQUE = "opaque"  # cannot be known here


class AdapterReport(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has loaded under an adapter's number."""

    adapter: int
    generation: int
    """Grows whenever other weights are found in the place of the last; 0: none seen yet."""
    state: AdapterState
    digest: bytes = b""
    """SHA-256 of the weights where they are known."""


class AdapterUse(msgspec.Struct, frozen=True, array_like=True):
    """The LoRA weights that a job's blocks were computed with."""

    adapter: int
    generations: tuple[int, ...]
    """By rank."""


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Some consecutive blocks of one chunk in one group, and where they lie in a slot."""

    group: int
    slot: int
    first: int
    """Index within the chunk of the first block."""
    blocks: tuple[int, ...]
    """Device block ids."""


class StoreJob(msgspec.Struct, frozen=True, array_like=True):
    """Copy one chunk out of the device after this step's forward pass."""

    job: int
    copies: tuple[BlockCopy, ...]
    adapter: AdapterUse | None = None
    """Without these weights the chunk is not what its key says."""


class PullJob(msgspec.Struct, frozen=True, array_like=True):
    """Read a peer's pages into a waiting request's device blocks."""

    engine: str
    """The peer's incarnation; a plan has said where its memory is."""
    local: tuple[tuple[int, ...], ...]
    """Device blocks that are written, by KV cache group."""
    remote: tuple[tuple[int, ...], ...]
    """The peer's blocks, or slots, that were handed over, by group."""
    deadline: float
    """Seconds this may take."""
    skips: tuple[int, ...]
    """Tokens at the head of :attr:`remote` that come before :attr:`local`, by group: not read."""
    place: Place = Place.PAGES
    """What the numbers in :attr:`remote` are of."""
    sums: Sums = ()
    """The peer's checksums of all of :attr:`remote`, to be compared; none: nothing is."""


class SumJob(msgspec.Struct, frozen=True, array_like=True):
    """Make checksums of what is handed over."""

    lease: int
    tokens: int
    place: Place
    tables: tuple[tuple[int, ...], ...]
    """Blocks, or slots, by KV cache group, to the prompt's last token."""
    firsts: tuple[int, ...]
    """Tokens of the prompt before these, by group."""


class SlotSumJob(msgspec.Struct, frozen=True, array_like=True):
    """Make checksums of chunks that peers may read."""

    job: int
    slots: tuple[tuple[int, ...], ...]
    """By KV cache group, as many in each."""


class RankSums(msgspec.Struct, frozen=True, array_like=True):
    """One rank's checksums of a hand-over, or of chunks."""

    number: int
    """The lease's, or the job's."""
    groups: tuple[bytes, ...]
    """By KV cache group, see `worker.remote.checksums`; none: they could not be made."""


class LoadJob(msgspec.Struct, frozen=True, array_like=True):
    """Copy chunks into a waiting request's device blocks."""

    job: int
    request_id: str
    copies: tuple[BlockCopy, ...]
    deadline: float
    """Seconds this may wait before its first copy."""
    adapter: AdapterUse | None = None
    """The weights the request will be computed with."""
    pull: PullJob | None = None
    """What comes from another engine at the same time."""
    worth: float | None = None
    """Seconds of the recompute that it replaces. What has not begun after ``deadline`` is given up
    if it would take longer than computing it. None: a load that has begun is finished."""


class SlotRead(msgspec.Struct, frozen=True, array_like=True):
    """Read slots of a peer into ours."""

    job: int
    engine: str
    """The peer's incarnation; a plan has said where its memory is."""
    local: tuple[tuple[int, ...], ...]
    """Slots that are written, by KV cache group."""
    remote: tuple[tuple[int, ...], ...]
    """The peer's slots they are read from, as many in each group."""
    deadline: float
    """Seconds this may take."""
    sums: tuple[ChunkSums, ...] = ()
    """The peer's checksums of each chunk, to be compared; none: nothing is."""


class RemoteSetup(msgspec.Struct, frozen=True, array_like=True):
    """What a rank must know to read other engines' memory, and to let them read its own."""

    host: str
    """The address that peers reach this engine at."""
    sends: bool
    receives: bool
    contents: str
    """A digest of what the bytes in a page mean, KV heads apart."""


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """What a rank must know before its first job; the same in every plan."""

    endpoint: str
    """Side channel address of the scheduler half; empty: none."""
    secret: bytes
    """What messages on the side channel begin with."""
    num_slots: int
    chunk_tokens: int
    disk_reports: str = ""
    """Where a rank's reports to the disk agent go; empty: there is no disk tier."""
    disk_orders: str = ""
    """Where the agent's orders come from."""
    disk_secret: bytes = b""
    """What messages from and to the agent begin with."""
    remote: RemoteSetup | None = None
    """None: nothing is handed over."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """New work of one scheduler step."""

    setup: Setup
    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    fences: tuple[int, ...] = ()
    """Store jobs whose device blocks are about to be overwritten."""
    cancels: tuple[int, ...] = ()
    """Load jobs that must end as failed, whatever they have copied."""
    refail: tuple[str, ...] = ()
    """Requests whose success was held back: report them again, as failed."""
    idle: bool = False
    """This step computes nothing: a rank may wait a little for its loads."""
    watch: tuple[int, ...] = ()
    """LoRA adapters, by number, whose content is of interest from now on."""
    unwatch: tuple[int, ...] = ()
    """LoRA adapters whose content is of no interest any more."""
    peers: tuple[PeerMemory, ...] = ()
    """Other engines' memory, before the first pull from it."""
    gone: tuple[str, ...] = ()
    """Engines that are not read from any more."""
    sums: tuple[SumJob, ...] = ()
    sent: tuple[str, ...] = ()
    """Requests that vLLM is to be told of: their blocks are not needed any more."""
    reads: tuple[SlotRead, ...] = ()
    uncalled: tuple[int, ...] = ()
    """Reads of slots that nobody waits for any more."""
    slot_sums: tuple[SlotSumJob, ...] = ()


class PullResult(msgspec.Struct, frozen=True, array_like=True):
    """What was read from a peer on one rank."""

    nbytes: int
    seconds: float
    ended: float
    """When it had arrived, and been compared; by the monotonic clock of the rank's host."""
    may_write: bool
    """It was given up, and its device blocks may still be written."""


class SlotReadEnd(msgspec.Struct, frozen=True, array_like=True):
    """How one :class:`SlotRead` ended on one rank."""

    job: int
    status: JobStatus
    result: PullResult


class JobResult(msgspec.Struct, frozen=True, array_like=True):
    """How one job ended on one rank."""

    job: int
    direction: Direction
    status: JobStatus
    failed: tuple[int, ...] = ()
    """For a load that failed or was late: indices into ``LoadJob.copies`` that did not arrive."""
    nbytes: int = 0
    seconds: float = 0.0
    pulled: PullResult | None = None


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """What happened on one rank since its last report."""

    rank: int
    results: tuple[JobResult, ...] = ()
    counters: tuple[tuple[str, float], ...] = ()
    """Increments of this rank's own counters, by the keys of ``metrics``."""
    adapters: tuple[AdapterReport, ...] = ()
    """Of adapters that were asked for, in the order it happened."""
    slots: int | None = None
    """Slots there are, said once by a rank that has room for fewer than it was to have."""
    layout: RankLayout | None = None
    """How pages lie on this rank; said once where KV is handed over."""
    endpoint: Endpoint | None = None
    """How peers can read them; said with the layout, where they may."""
    settled: tuple[int, ...] = ()
    """Loads, and reads of slots, that were given up and can write no more."""
    sums: tuple[RankSums, ...] = ()
    reads: tuple[SlotReadEnd, ...] = ()
    slot_sums: tuple[RankSums, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerReport)


def encode_report(report: WorkerReport) -> bytes:
    return _encoder.encode(report)


def decode_report(data: bytes) -> WorkerReport:
    """Read a report.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _decoder.decode(data)
