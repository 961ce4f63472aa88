# SPDX-License-Identifier: Apache-2.0
"""NIXL as used here: one agent, the only module that calls it.

The bindings are used below NIXL's own Python layer, which doesn't let the pause of an agent's
progress thread be chosen (without one the thread spins) and whose handles call NIXL when they are
collected. Run with nixl_cu12 1.5.1 on a machine without a GPU: host memory over CMA and tcp.
Descriptors of GPU memory have not been run.

What is kept to, from NIXL's source (`nixl_agent.cpp`, `ucx_backend.cpp`): an error of a post may
leave parts of it under way, unless it says that the peer is gone. A handle is deleted by NIXL
itself when its peer was removed meanwhile, and releasing it then is fatal: so a peer is removed
only when none of its handles is left. And from tests: nothing but the agent's end ends a transfer
that hangs.
"""

from __future__ import annotations

import enum
import functools
import gc
import importlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from vllm_tiered_kv.remote.transport import Endpoint, MemoryKind, Region, TransportError
from vllm_tiered_kv.remote.transport.pieces import Piece

PROGRESS_PAUSE_US = 1000
"""NIXL's progress thread looks this often whether a peer wants something."""

Result = TypeVar("Result")


class State(enum.Enum):
    """How far a posted piece is."""

    DONE = "done"
    UNDER_WAY = "under way"


class AgentError(Exception):
    """NIXL refused or failed; says what it said.

    Attributes:
        disconnected: the peer is gone, and with it all that was under way to it.
        deleted: NIXL may have deleted the handle that it was about.
    """

    def __init__(self, message: str, *, disconnected: bool = False, deleted: bool = False) -> None:
        super().__init__(message)
        self.disconnected = disconnected
        self.deleted = deleted


def load_bindings() -> Any:
    """NIXL's bindings. The environment must be prepared before.

    Raises:
        TransportError: NIXL isn't installed, or isn't one that is known here.
    """
    try:
        importlib.import_module("nixl")
        bindings = importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise TransportError(
            "remote needs NIXL, which can't be imported here "
            f"(pip install nixl, or nixl-cu12 for CUDA 12): {error}"
        ) from error
    needed = ("nixlAgent", "nixlAgentConfig", "nixlXferDList", "nixlRegDList", "NIXL_READ")
    missing = [name for name in needed if not hasattr(bindings, name)]
    if missing:
        raise TransportError(f"remote needs NIXL 1.x; the one installed has no {missing[0]}")
    return bindings


class Agent:
    """One NIXL agent with its regions registered.

    Threads may call it at the same time, but for `destroy`: nothing may be called with it or after
    it. Every method but that one raises `AgentError`.

    Args:
        bindings: from `load_bindings`.
        name: a fresh uuid: metadata of another agent of the same name would be refused.
        progress: whether NIXL has a thread that serves peers meanwhile.
        workers: threads that post; each has UCX's state for itself.
        regions: memory to register.

    Raises:
        AgentError: it can't be had.
    """

    def __init__(
        self, bindings: Any, name: str, *, progress: bool, workers: int, regions: Iterable[Region]
    ) -> None:
        self.name = name
        self._nixl = bindings
        self._agent: Any = self._call(self._make, name, progress)
        self._kinds = {
            MemoryKind.DRAM: bindings.DRAM_SEG,
            MemoryKind.VRAM: bindings.VRAM_SEG,
        }
        self._ucx: list[int] = []
        options = {"num_workers": str(workers)}
        self._ucx.append(self._call(self._agent.createBackend, "UCX", options))
        regions = tuple(regions)
        for kind in MemoryKind:
            chosen = [(r.base, r.nbytes, r.device, "") for r in regions if r.kind is kind]
            if chosen:
                self._call(self._register, kind, chosen)

    def metadata(self) -> bytes:
        """What a peer loads to read from here."""
        return bytes(self._call(self._agent.getLocalMD))

    def connect(self, endpoint: Endpoint) -> None:
        """Load a peer's metadata. It must be authentic: garbage inside it ends the process."""
        if self._begins_with_name and not endpoint.metadata.startswith(_head(endpoint.incarnation)):
            # Not even tried: what is loaded under another peer's name can cost that one its own.
            raise AgentError("the metadata is cut short, or another agent's")
        name = self._call(self._agent.loadRemoteMD, endpoint.metadata)
        name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        if name != endpoint.incarnation:
            self.disconnect(name)
            raise AgentError("the metadata is another agent's")

    def disconnect(self, peer: str) -> None:
        """Forget a peer. None of its handles may be left."""
        self._call(self._agent.invalidateRemoteMD, peer)

    def prepare(self, peer: str, piece: Piece) -> int:
        """A handle for reading a piece. Nothing is read yet."""
        return int(self._call(self._create, peer, piece))

    def post(self, handle: int) -> State:
        """Start reading. Host memory may be copied inside this call, without the GIL."""
        return self._state(self._call(self._agent.postXferReq, handle))

    def check(self, handle: int) -> State:
        """Whether a posted piece is done; this also moves it on."""
        return self._state(self._call(self._agent.getXferStatus, handle))

    def release(self, handle: int) -> None:
        """Let go of a handle whose piece is done or has failed."""
        self._call(self._agent.releaseXferReq, handle)

    def destroy(self, handles: Iterable[int]) -> bool:
        """End the agent, and with it whatever its `handles` still read.

        False if something else keeps it alive.
        """
        for handle in handles:
            try:
                self._call(self._agent.releaseXferReq, handle)
            except AgentError:
                continue  # ends with the agent
        if self._agent is None:
            return False
        alive = weakref.ref(self._agent)
        self._agent = None
        if alive() is not None:
            gc.collect()  # an error's traceback may refer to it
        return alive() is None

    @functools.cached_property
    def _begins_with_name(self) -> bool:
        """Whether this NIXL writes metadata in the form that is known here."""
        return self.metadata().startswith(_head(self.name))

    def _make(self, name: str, progress: bool) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = progress
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        config.pthrDelay = PROGRESS_PAUSE_US
        return self._nixl.nixlAgent(name, config)

    def _register(self, kind: MemoryKind, regions: list[tuple[int, int, int, str]]) -> None:
        self._agent.registerMem(self._nixl.nixlRegDList(self._kinds[kind], regions), self._ucx)

    def _create(self, peer: str, piece: Piece) -> int:
        local = self._nixl.nixlXferDList(self._kinds[piece.local_kind], piece.local)
        remote = self._nixl.nixlXferDList(self._kinds[piece.remote_kind], piece.remote)
        return int(
            self._agent.createXferReq(self._nixl.NIXL_READ, local, remote, peer, "", self._ucx)
        )

    def _state(self, status: Any) -> State:
        return State.DONE if status == self._nixl.NIXL_SUCCESS else State.UNDER_WAY

    def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        # NIXL raises a dozen types that are RuntimeErrors by accident of its bindings, and
        # others where arguments don't fit: whatever it is, the read fails and the engine goes on.
        try:
            return function(*arguments)
        except Exception as error:
            name = type(error).__name__
            raise AgentError(
                f"{name}: {error}",
                disconnected=name == "nixlRemoteDisconnectError",
                deleted=name in ("nixlNotFoundError", "nixlRepostActiveError"),
            ) from error


def _head(name: str) -> bytes:
    """How the metadata of an agent begins."""
    return b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|"
