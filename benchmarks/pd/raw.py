# SPDX-License-Identifier: Apache-2.0
"""Reads of a prompt's pages from another process: our transport, NIXL alone, and memcpy.

Three arms in turns: the transport; NIXL's own Python layer, which prepares its lists of
descriptors, makes one request a piece of the same size and waits for each; and the limit below
both, one large memcpy for each of the transport's threads. Ratios are of runs that followed each
other. Pages are scattered over both processes' memory, others in every run, and are compared byte
for byte once for each shape.

The shapes: pages of 128 KiB in 8 layers and blocks of 128 tokens (the tests' small model on the CPU
platform), and pages of 64 KiB in 32 layers and blocks of 16 tokens (an 8B model). The time of the
transport is that of a caller who waits to be told, from `start_read` to the result in hand.

Idle: processor time of a process that serves, and of one that reads, while nothing is asked.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import os
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks._report import Report
from benchmarks._threads import in_threads
from benchmarks.pd._peer import Bytes, Peer, noise, region
from vllm_tiered_kv.remote.transport import Options, Outcome, Read, open_transport

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BUFFER_BYTES = 2 * GIB
IDLE_SECONDS = 10.0
RAW_GOAL = 0.9
IDLE_GOAL = 3.0

Int64s = npt.NDArray[np.int64]


class Shape(NamedTuple):
    page: int
    layers: int
    block_tokens: int

    def __str__(self) -> str:
        return f"{self.page // KIB} KiB pages, {self.layers} layers"


class Pages(NamedTuple):
    """Offsets into both memories."""

    local: Int64s
    remote: Int64s
    nbytes: Int64s


SHAPES = (Shape(128 * KIB, 8, 128), Shape(64 * KIB, 32, 16))
LENGTHS = (4_000, 8_000, 16_000)


def choose(
    shape: Shape, tokens: int, rng: np.random.Generator, buffer_bytes: int = BUFFER_BYTES
) -> Pages:
    """Pages of a prompt, layer by layer, in blocks anywhere on both sides."""
    count = -(-tokens // shape.block_tokens)
    blocks = buffer_bytes // (shape.page * shape.layers)
    layers = np.arange(shape.layers, dtype=np.int64)[:, None] * (blocks * shape.page)
    here, there = (rng.permutation(blocks)[:count] * shape.page for _ in range(2))
    local, remote = (layers + here).ravel(), (layers + there).ravel()
    return Pages(local, remote, np.full(len(local), shape.page, dtype=np.int64))


class Ours:
    """The transport, and a caller who waits until it is told."""

    def __init__(self, memory: Bytes, peer: Peer, threads: int) -> None:
        self._told = threading.Event()
        self.options = Options(serves=False, threads=threads)
        self._transport = open_transport([region(memory)], self.options, notify=self._told.set)
        self._transport.connect(peer.endpoint)
        self._peer = peer.endpoint
        self._base = memory.ctypes.data
        self._jobs = 0

    def read(self, pages: Pages) -> float:
        """Seconds.

        Raises:
            RuntimeError: it failed.
        """
        self._told.clear()
        self._jobs += 1
        start = time.perf_counter()
        read = Read(
            self._jobs,
            self._peer.incarnation,
            pages.local + self._base,
            pages.remote + self._peer.regions[0].base,
            pages.nbytes,
            time.monotonic() + 60,
        )
        self._transport.start_read(read)
        self._told.wait(60)
        results = self._transport.poll()
        seconds = time.perf_counter() - start
        if not results or results[0].outcome is not Outcome.DONE:
            raise RuntimeError(f"a read failed: {results}")
        return seconds

    def close(self) -> None:
        self._transport.close(10)


class Raw:
    """NIXL as its documentation uses it, but for the thread of its own, which would spin."""

    def __init__(self, memory: Bytes, peer: Peer, piece_bytes: int) -> None:
        api: Any = importlib.import_module("nixl._api")
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent("raw", config)
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(peer.endpoint.metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._local, self._remote = memory.ctypes.data, peer.endpoint.regions[0].base
        self._piece_bytes = piece_bytes

    def read(self, pages: Pages) -> float:
        """Seconds."""
        start = time.perf_counter()
        local = self._prepare("NIXL_INIT_AGENT", pages.local + self._local, pages.nbytes)
        remote = self._prepare(self._peer, pages.remote + self._remote, pages.nbytes)
        step = max(1, self._piece_bytes // int(pages.nbytes[0]))
        count = len(pages.nbytes)
        for at in range(0, count, step):
            index = np.arange(at, min(at + step, count), dtype=np.int32)
            handle = self._agent.make_prepped_xfer("READ", local, index, remote, index)
            state = self._agent.transfer(handle)
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
        self._agent.release_dlist_handle(local)
        self._agent.release_dlist_handle(remote)
        return time.perf_counter() - start

    def _prepare(self, who: str, addresses: Int64s, nbytes: Int64s) -> Any:
        devices = np.zeros(len(nbytes), dtype=np.int64)
        descriptors = np.ascontiguousarray(np.stack((addresses, nbytes, devices), axis=1))
        return self._agent.prep_xfer_dlist(who, descriptors, "DRAM")


class Memcpy:
    """One copy for each thread, every run somewhere else."""

    def __init__(self, memory: Bytes, source: Bytes, threads: int) -> None:
        self._source = source
        self._target = memory
        self._threads = threads
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def copy(self, nbytes: int, rng: np.random.Generator) -> float:
        """Seconds."""
        each = nbytes // self._threads
        room = self._target.nbytes - nbytes
        source = self._source.ctypes.data + int(rng.integers(0, room)) // 4096 * 4096
        target = self._target.ctypes.data + int(rng.integers(0, room)) // 4096 * 4096
        works = (
            functools.partial(self._memcpy, target + i * each, source + i * each, each)
            for i in range(self._threads)
        )
        return in_threads(list(works))


def verify(memory: Bytes, truth: Bytes, pages: Pages) -> None:
    """Compare what has been read.

    Raises:
        RuntimeError: a byte is wrong.
    """
    for local, remote, nbytes in zip(*pages, strict=True):
        if not np.array_equal(memory[local : local + nbytes], truth[remote : remote + nbytes]):
            raise RuntimeError("a page differs from the peer's")


def measure(
    report: Report, memory: Bytes, peer: Peer, shapes: list[tuple[Shape, int]], rounds: int
) -> None:
    rng = np.random.default_rng(0)
    ours = {threads: Ours(memory, peer, threads) for threads in (1, 2)}
    raw = Raw(memory, peer, ours[1].options.piece_bytes)
    truth = noise(BUFFER_BYTES)
    memcpy = {threads: Memcpy(memory, truth, threads) for threads in ours}
    for shape, tokens in shapes:
        rates: dict[str, list[float]] = {}
        of_raw: dict[str, list[float]] = {}
        of_memcpy: dict[str, list[float]] = {}
        for threads in ours:
            pages = choose(shape, tokens, rng)
            ours[threads].read(pages)
            verify(memory, truth, pages)
        for _ in range(rounds):
            for threads, arm in ours.items():
                name = f"{threads} thread" + "s" * (threads > 1)
                nbytes = int(choose(shape, tokens, rng).nbytes.sum())
                seconds = arm.read(choose(shape, tokens, rng))
                alone = raw.read(choose(shape, tokens, rng))
                limit = memcpy[threads].copy(nbytes, rng)
                of_raw.setdefault(name, []).append(alone / seconds)
                of_memcpy.setdefault(name, []).append(limit / seconds)
                rates.setdefault(name, []).append(nbytes / seconds / GIB)
                rates.setdefault("NIXL alone", []).append(nbytes / alone / GIB)
                rates.setdefault(f"memcpy, {name}", []).append(nbytes / limit / GIB)
        what = f"{tokens} tokens, {shape}"
        for name in of_raw:
            report.add(what, name, of_raw[name], "of NIXL alone", goal=RAW_GOAL)
            report.add(what, name, of_memcpy[name], "of memcpy")
        for name, values in rates.items():
            report.add(what, name, values, "GiB/s")
    for arm in ours.values():
        arm.close()


def measure_idle(report: Report, memory: Bytes, peer: Peer) -> None:
    arm = Ours(memory, peer, 2)
    arm.read(choose(SHAPES[0], 4_000, np.random.default_rng(0)))
    served, read = peer.cpu_seconds(), sum(os.times()[:2])
    time.sleep(IDLE_SECONDS)
    served, read = peer.cpu_seconds() - served, sum(os.times()[:2]) - read
    for name, seconds in (("serves", served), ("reads", read)):
        percent = 100 * seconds / IDLE_SECONDS
        report.add("idle", name, [percent], "% of a core", goal=IDLE_GOAL, at_most=True)
    arm.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pd.raw",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="the small model's lengths alone")
    quick: bool = parser.parse_args().quick
    shapes = [(SHAPES[0], tokens) for tokens in LENGTHS]
    if not quick:
        shapes += [(SHAPES[1], tokens) for tokens in LENGTHS[:2]]
    rounds = 7 if quick else 15

    memory = np.zeros(BUFFER_BYTES, dtype=np.uint8)
    memory[:] = 1
    report = Report(
        "pd_raw",
        notes=(
            f"{rounds} rounds; two processes over loopback, {BUFFER_BYTES // MIB} MiB each",
            f"UCX_TLS={os.environ.get('UCX_TLS', '')}",
            "ratios are of runs that followed each other; spread is smallest and largest",
        ),
    )
    with Peer(BUFFER_BYTES) as peer:
        measure_idle(report, memory, peer)
        measure(report, memory, peer, shapes, rounds)
    report.finish()


if __name__ == "__main__":
    main()
