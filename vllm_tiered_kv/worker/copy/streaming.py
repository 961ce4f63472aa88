# SPDX-License-Identifier: Apache-2.0
"""Many copies in one call, with stores that bypass the CPU's caches.

Pages are far smaller than the size at which libc's memcpy turns to such non-temporal stores (over
100 MiB on large servers), and without them every written cache line is first read from memory: on
pages it reaches about half the rate of one large memcpy, whoever calls it. No function of libc,
Python, numpy or torch does better, so this module compiles one, of some forty instructions, when it
is first needed: LLVM IR, through the llvmlite that vLLM brings along with numba. The call holds no
GIL and uses no other thread. Where llvmlite, the processor or the system's policy don't allow it,
`streaming_copy()` is None and the caller copies in another way.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import platform
from array import array
from typing import Any

import numpy as np

from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.worker.copy.base import Direction
from vllm_tiered_kv.worker.copy.plan import Request

logger = get_logger(__name__)

_VECTOR = 64  # bytes: a cache line
_UNROLL = 2  # vectors a stream and turn
_STREAMS = 4  # parts of a page that are copied side by side: more memory accesses under way
_PREFETCH = 4  # cache lines of each part of the next page
_TURN = _VECTOR * _UNROLL * _STREAMS

_PROTOTYPE = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,  # blocks: i64[count]
    ctypes.c_void_p,  # offsets: i64[count]
    ctypes.c_uint64,  # count
    ctypes.c_void_p,  # table: i64[rows][4]
    ctypes.c_uint64,  # rows
    ctypes.c_void_p,  # pool
    ctypes.c_bool,  # store
)


class StreamingCopy:
    """The compiled function; `engine` owns its machine code."""

    def __init__(self, engine: Any, address: int) -> None:
        self._engine = engine
        self._function = _PROTOTYPE(address)

    def __call__(
        self, direction: Direction, request: Request, table: array[int], pool_base: int
    ) -> None:
        """Moves whole images, for a `table` of `GroupPlan.table()`.

        Nothing is checked here: every address has to be valid. Complete, and visible to other
        threads, on return.
        """
        self._function(
            request.blocks.buffer_info()[0],
            request.offsets.buffer_info()[0],
            len(request.blocks),
            table.buffer_info()[0],
            len(table) // 4,
            pool_base,
            direction is Direction.STORE,
        )


@functools.lru_cache(maxsize=1)
def streaming_copy() -> StreamingCopy | None:
    """The function, compiled by the first call (about 50 ms); None where it can't be had."""
    reason = _obstacle()
    if reason is None:
        try:
            copy = _compile(_ir())
            reason = None if _works(copy) else "the compiled function failed its test"
        except (RuntimeError, OSError, AttributeError, ValueError) as error:
            reason = str(error)
    if reason is not None:
        logger.warning(
            "tiered-kv: copies in CPU memory run at about half speed: no streaming copy: %s", reason
        )
        return None
    return copy


def _obstacle() -> str | None:
    """Why the function can't be compiled or run here; None if nothing speaks against it."""
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        return f"not tried on {machine}"
    try:
        version = importlib.import_module("llvmlite").__version__
    except ImportError:
        return "llvmlite is not installed"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (0, 45):
        return f"llvmlite {version} is too old"
    if not _may_run_new_code():
        return "this system doesn't let a process make code"
    return None


def _may_run_new_code() -> bool:
    """Asked first, since LLVM ends the process when it is refused."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE)
        libc = ctypes.CDLL(None)
    except OSError:
        return False
    page[0] = 0xC3  # a page that has been written to is what such policies look at
    anchor = ctypes.c_char.from_buffer(page)
    result = libc.mprotect(
        ctypes.c_void_p(ctypes.addressof(anchor)),
        ctypes.c_size_t(mmap.PAGESIZE),
        ctypes.c_int(mmap.PROT_READ | mmap.PROT_EXEC),
    )
    del anchor
    page.close()
    return bool(result == 0)


def _compile(ir: str) -> StreamingCopy:
    llvm = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=2,
        jit=True,
    )
    module = llvm.parse_assembly(ir)
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address("copy_images")
    if not address:
        raise RuntimeError("the compiled function has no address")
    return StreamingCopy(engine, address)


def _works(copy: StreamingCopy) -> bool:
    """Compares with plain copies: pages of every kind, aligned or not, and the bytes around.

    The memory is aligned here, not left to the allocator: on it depends which pages are streamed.
    """
    lengths = (1, 63, 64, _TURN - 1, _TURN, 4096 + 17, 65536 + 512)
    spacing = sum(lengths) + _VECTOR
    # The pages of one block lie in the opposite order of their parts of the image.
    starts = np.cumsum([0, *lengths[:-1]])
    ends = sum(lengths) - starts - lengths
    # Each page that is long enough to be streamed is so in one of these turns, both ways.
    for shift in sorted({0, 1, _VECTOR, *(-np.concatenate([starts, ends]) % _VECTOR).tolist()}):
        device = _aligned(3 * spacing + 2 * _VECTOR)
        device[:] = np.arange(device.size).astype(np.uint8)
        pool = _aligned(2 * spacing + 2 * _VECTOR)
        pool[:] = 255
        places = ends + shift
        rows = zip(device.ctypes.data + places, lengths, starts, strict=True)
        table = array("q", [int(n) for base, *rest in rows for n in (base, spacing, *rest)])
        request = Request(0, array("q", (2, 0)), array("q", (shift, spacing)))

        stored = pool.copy()
        for block, offset in zip(request.blocks, request.offsets, strict=True):
            for place, length, start in zip(places, lengths, starts, strict=True):
                page = device[block * spacing + place :][:length]
                stored[offset + start :][:length] = page
        before = device.copy()
        copy(Direction.STORE, request, table, pool.ctypes.data)
        if not np.array_equal(pool, stored):
            return False
        for block in request.blocks:
            device[block * spacing + shift :][: sum(lengths)] = 0
        copy(Direction.LOAD, request, table, pool.ctypes.data)
        if not np.array_equal(device, before):
            return False
    return True


def _aligned(nbytes: int) -> np.ndarray:
    """Memory that begins with a cache line."""
    memory = np.empty(nbytes + _VECTOR, dtype=np.uint8)
    return memory[-memory.ctypes.data % _VECTOR :][:nbytes]


def _ir() -> str:
    """LLVM IR of the function; see `_PROTOTYPE` for its arguments.

    Page after page of block after block. A page whose destination is aligned to a cache line is cut
    into `_STREAMS` equal parts that are copied side by side with non-temporal stores; what is left
    over, and pages that aren't aligned, are left to memcpy. Meanwhile the heads of the next page's
    parts are prefetched.
    """
    vector = f"<{_VECTOR // 8} x i64>"
    lanes = [(s, u) for s in range(_STREAMS) for u in range(_UNROLL)]
    parts = "\n".join(f"  %part{s} = mul i64 %part, {s}" for s in range(_STREAMS))
    prefetch = "\n".join(
        f"""  %next{s}_{line}a = getelementptr i8, ptr %next, i64 %part{s}
  %next{s}_{line} = getelementptr i8, ptr %next{s}_{line}a, i64 {line * _VECTOR}
  call void @llvm.prefetch.p0(ptr %next{s}_{line}, i32 0, i32 2, i32 1)"""
        for s in range(_STREAMS)
        for line in range(_PREFETCH)
    )
    loads = "\n".join(
        f"""  %pos{s}_{u}a = add i64 %at, %part{s}
  %pos{s}_{u} = add i64 %pos{s}_{u}a, {u * _VECTOR}
  %from{s}_{u} = getelementptr i8, ptr %src, i64 %pos{s}_{u}
  %value{s}_{u} = load {vector}, ptr %from{s}_{u}, align 1"""
        for s, u in lanes
    )
    stores = "\n".join(
        f"""  %to{s}_{u} = getelementptr i8, ptr %dst, i64 %pos{s}_{u}
  store {vector} %value{s}_{u}, ptr %to{s}_{u}, align {_VECTOR}, !nontemporal !0"""
        for s, u in lanes
    )
    return f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define private ptr @device_page(ptr %blocks, i64 %b, ptr %table, i64 %r) {{
  %block.at = getelementptr i64, ptr %blocks, i64 %b
  %block = load i64, ptr %block.at
  %base.at = getelementptr [4 x i64], ptr %table, i64 %r, i64 0
  %base = load i64, ptr %base.at
  %stride.at = getelementptr [4 x i64], ptr %table, i64 %r, i64 1
  %stride = load i64, ptr %stride.at
  %distance = mul i64 %block, %stride
  %address = add i64 %base, %distance
  %page = inttoptr i64 %address to ptr
  ret ptr %page
}}

define private ptr @pool_page(ptr %offsets, i64 %b, ptr %table, i64 %r, ptr %pool) {{
  %offset.at = getelementptr i64, ptr %offsets, i64 %b
  %offset = load i64, ptr %offset.at
  %start.at = getelementptr [4 x i64], ptr %table, i64 %r, i64 3
  %start = load i64, ptr %start.at
  %place = add i64 %offset, %start
  %page = getelementptr i8, ptr %pool, i64 %place
  ret ptr %page
}}

define private void @copy_page(ptr %dst, ptr %src, i64 %size, ptr %next) {{
entry:
  %address = ptrtoint ptr %dst to i64
  %misalignment = and i64 %address, {_VECTOR - 1}
  %aligned = icmp eq i64 %misalignment, 0
  %turns = udiv i64 %size, {_TURN}
  %part.aligned = mul i64 %turns, {_VECTOR * _UNROLL}
  %part = select i1 %aligned, i64 %part.aligned, i64 0
{parts}
  %streamed = mul i64 %part, {_STREAMS}
  %short = icmp eq i64 %part, 0
  br i1 %short, label %rest, label %head

head:
{prefetch}
  br label %body

body:
  %at = phi i64 [0, %head], [%at.next, %body]
{loads}
{stores}
  %at.next = add i64 %at, {_VECTOR * _UNROLL}
  %more = icmp ult i64 %at.next, %part
  br i1 %more, label %body, label %rest

rest:
  %left = sub i64 %size, %streamed
  %dst.rest = getelementptr i8, ptr %dst, i64 %streamed
  %src.rest = getelementptr i8, ptr %src, i64 %streamed
  %whole = icmp eq i64 %left, 0
  br i1 %whole, label %end, label %tail

tail:
  call void @llvm.memcpy.p0.p0.i64(ptr %dst.rest, ptr %src.rest, i64 %left, i1 false)
  br label %end

end:
  ret void
}}

define void @copy_images(ptr %blocks, ptr %offsets, i64 %count, ptr %table, i64 %rows, ptr %pool,
                         i1 zeroext %store) {{
entry:
  %blockless = icmp eq i64 %count, 0
  %rowless = icmp eq i64 %rows, 0
  %nothing = or i1 %blockless, %rowless
  br i1 %nothing, label %end, label %page

page:
  %b = phi i64 [0, %entry], [%b.next, %page]
  %r = phi i64 [0, %entry], [%r.next, %page]
  %r.after = add i64 %r, 1
  %b.after = add i64 %b, 1
  %row.last = icmp eq i64 %r.after, %rows
  %r.next = select i1 %row.last, i64 0, i64 %r.after
  %b.next = select i1 %row.last, i64 %b.after, i64 %b
  %done = icmp eq i64 %b.next, %count
  %b.ahead = select i1 %done, i64 0, i64 %b.next

  %device = call ptr @device_page(ptr %blocks, i64 %b, ptr %table, i64 %r)
  %host = call ptr @pool_page(ptr %offsets, i64 %b, ptr %table, i64 %r, ptr %pool)
  %device.next = call ptr @device_page(ptr %blocks, i64 %b.ahead, ptr %table, i64 %r.next)
  %host.next = call ptr @pool_page(ptr %offsets, i64 %b.ahead, ptr %table, i64 %r.next, ptr %pool)
  %dst = select i1 %store, ptr %host, ptr %device
  %src = select i1 %store, ptr %device, ptr %host
  %next = select i1 %store, ptr %device.next, ptr %host.next
  %size.at = getelementptr [4 x i64], ptr %table, i64 %r, i64 2
  %size = load i64, ptr %size.at
  call void @copy_page(ptr %dst, ptr %src, i64 %size, ptr %next)
  br i1 %done, label %end, label %page

end:
  fence seq_cst
  ret void
}}

!0 = !{{i32 1}}
"""
