# SPDX-License-Identifier: Apache-2.0
"""Reads of a peer's memory into ours: the data plane of hand-overs.

One `Transport` a rank. It knows nothing of blocks, leases or requests: only of regions of memory
that are registered once, of peers that have been authenticated elsewhere, and of jobs that read
runs of a peer's bytes into runs of ours.

    transport = open_transport(regions, options)
    transport.export()                 # what a peer must know; sent over the control channel
    transport.connect(endpoint)        # a peer's export(), from an authenticated peer
    transport.start_read(Read(job, endpoint.incarnation, local, remote, nbytes, deadline))
    for result in transport.poll(): ...              # DONE, FAILED or GIVEN_UP: once for each job
    for job in transport.settled(): ...              # now its memory is free as well
    transport.close(timeout)

**When memory is free.** A read that is given up goes on: nothing but its own end, or the end of
the agent that runs it, keeps a peer's bytes from landing. So a result says two things: whether the
bytes arrived, and whether their place is free (`Memory`). A job whose result says `QUARANTINED` may
still write to all of its local runs until `settled()` names it, however long that takes, also after
`disconnect()`, and for ever if `close()` returns False: who owns that memory must neither use it
for anything else nor unmap it.

**Who may be connected.** NIXL's metadata is loaded by native code that ends the process when its
connection part is garbage, and whoever can read through an agent can read all of its process. So
`connect` is for endpoints that came over an authenticated channel alone; that a peer is who it says
isn't checked here.

**On a GPU** streams mean nothing to a read. Who owns memory grants a read of it only when the work
that writes it has ended: when an event recorded behind it has been reached. `Read.after` is the
same for the memory that is written. Kernels launched after a read's `DONE` see its bytes. None of
this has been run on a GPU yet.

No method blocks or raises on the data path, except where said; all may be called from any thread. A
result's `kind` is one of `KINDS`, for counters.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int64s = npt.NDArray[np.int64]

MAX_REGIONS = 4096
MAX_METADATA_BYTES = 1 << 20
"""An agent's metadata is 1 KiB and some 50 bytes a region."""
MAX_RUNS = 1 << 20
"""Runs of one job."""
MAX_JOBS = 4096
"""Jobs that have not ended; a further one fails at once."""

KINDS = (
    "remote_agent",  # NIXL failed in a way that isn't the peer's
    "remote_connect",  # the peer's metadata was refused
    "remote_deadline",
    "remote_disconnected",  # the peer is gone
    "remote_full",  # too many jobs
    "remote_peer",  # a peer that isn't connected, or that doesn't answer
    "remote_range",  # memory outside what was registered, here or there
    "remote_rebuilt",  # the agent was made anew
    "remote_shutdown",
)
"""Kinds of failure."""

Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class TransportError(RuntimeError):
    """The transport can't be had; says why in a sentence for the user."""


class MemoryKind(enum.Enum):
    """Where a region is."""

    DRAM = "dram"
    VRAM = "vram"


class Region(msgspec.Struct, frozen=True):
    """Registered memory: `nbytes` bytes at the address `base` of its process."""

    base: Address
    nbytes: Address
    kind: MemoryKind = MemoryKind.DRAM
    device: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    """A GPU's index in its process; 0 for host memory."""


class Endpoint(msgspec.Struct, frozen=True):
    """What a peer must know to read one rank's memory. Travels over the control channel alone."""

    incarnation: Name
    """A uuid's hexadecimal digits; another one whenever the rank's agent was made anew."""
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]


class Fence(Protocol):
    """Work on our memory that a read must come after: a CUDA event is one."""

    def query(self) -> bool:
        """Whether that work is done. Doesn't wait."""


class Read(msgspec.Struct, frozen=True, eq=False):
    """Copy `nbytes[i]` bytes from `remote[i]` of the peer to `local[i]`, for every `i`.

    The three are int64 `[n]`, n at least 1, lengths above 0; local runs don't overlap. Neighbours
    are joined by the transport.
    """

    job: int
    """Chosen by the caller; never used again."""
    peer: str
    """`Endpoint.incarnation`."""
    local: Int64s
    remote: Int64s
    nbytes: Int64s
    deadline: float
    """`time.monotonic()` at which the job is given up."""
    after: Fence | None = None
    """Earlier work on the local memory (zeroing, say). The order of a device's streams means
    nothing to a read."""


class Outcome(enum.Enum):
    """How a job ended."""

    DONE = "done"  # every byte is there
    FAILED = "failed"  # some bytes may be there
    GIVEN_UP = "given_up"  # past its deadline, or called off; likewise


class Memory(enum.Enum):
    """Whether a job that ended may still write."""

    FREE = "free"
    QUARANTINED = "quarantined"


class ReadResult(msgspec.Struct, frozen=True):
    """One job's end."""

    job: int
    outcome: Outcome
    memory: Memory = Memory.FREE
    nbytes: int = 0
    """Bytes read; 0 unless DONE."""
    seconds: float = 0.0
    """From `start_read` on."""
    kind: str = ""
    """One of `KINDS`; empty when DONE, and when called off."""
    reason: str = ""
    """For a log."""


class Options(msgspec.Struct, frozen=True):
    """What a user or a test may choose."""

    host: str = "127.0.0.1"
    """The address that the control channel listens on: data goes over its interface."""
    serves: bool = True
    """Whether peers read from this rank."""
    reads: bool = True
    """Whether this rank reads from peers."""
    threads: int = 2
    """Threads that read. In host memory the copying itself takes place on them."""
    piece_bytes: int = 16 << 20
    """A job is read in pieces of about this size."""
    max_pieces: int = 4
    """Pieces under way for one peer on one thread."""
    quarantine_share: float = 0.25
    """With more than this share of the registered memory in quarantine ..."""
    quarantine_seconds: float = 300.0
    """... or a job for longer than this, the agent that reads is made anew.

    Not soon: a peer that stood still, is read over tcp, and goes on when its reader's agent is
    gone, is ended by UCX (seen with 1.23: "unexpected error" where the answer can't be sent). A
    peer that is dead ends its reads without this.
    """


class Transport(Protocol):
    """One rank's reads."""

    def export(self) -> Endpoint | None:
        """What peers must know to read from here; None where they can't."""

    def connect(self, endpoint: Endpoint) -> None:
        """From now on `endpoint.incarnation` can be read from.

        Takes place in the background: where it fails, reads fail with `remote_connect`. Does
        nothing if that peer is connected.
        """

    def disconnect(self, incarnation: str) -> None:
        """Call off this peer's reads and forget it, as soon as none of its reads is under way."""

    def start_read(self, read: Read) -> None:
        """Queue a read. Whatever is wrong with it is told by its result."""

    def cancel(self, jobs: Sequence[int]) -> None:
        """Give these jobs up now. Jobs that have ended are passed over."""

    def poll(self) -> list[ReadResult]:
        """Jobs that ended since the last call; every job once."""

    def settled(self) -> list[int]:
        """Jobs that were polled as quarantined, and whose memory is free now; every one once."""

    def take_counts(self) -> dict[str, int]:
        """Failures by kind since the last call, those included that ended no job."""

    def close(self, timeout: float) -> bool:
        """End all reads and the agents, within about `timeout` seconds. May be called again.

        Every job has a result afterwards. False if something still runs: then the registered
        memory must not be given back as long as the process lives.
        """


def open_transport(
    regions: Sequence[Region], options: Options, *, notify: Callable[[], Any] | None = None
) -> Transport:
    """A transport over NIXL for these regions: few and large, none overlapping another.

    Args:
        regions: the memory to register. It must stay mapped until `close()` has returned True.
        options: see there.
        notify: called when there is something to `poll()`: on a thread of the transport, or on one
            that calls it; never within its lock.

    Raises:
        TransportError: NIXL isn't installed, or an agent can't be had.
    """
    # Imported here: NIXL is loaded where it is used, and nowhere else.
    from vllm_tiered_kv.remote.transport.nixl_transport import NixlTransport

    return NixlTransport(regions, options, notify=notify)
