# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.disk._examples import unhurried
from vllm_tiered_kv.tiers.disk.format import (
    HEADER_BYTES,
    MAX_COUNT,
    MAX_PAYLOAD_BYTES,
    ChunkFacts,
    ChunkId,
    Header,
    Reason,
    check_header,
    check_payload,
    checksum,
    encode_header,
    file_bytes,
    padded,
)

DIGEST = bytes(range(16))
CHUNK = ChunkId("0-1", 3, b"key" * 10, 2)
FACTS = ChunkFacts((b"a" * 32, b"b" * 32), 2, 5, 32)
NBYTES = 5000

keys = st.binary(min_size=1, max_size=96)
chunks = st.builds(
    ChunkId,
    st.text("0123456789abcdef-", min_size=1, max_size=128),
    st.integers(0, 65535),
    keys,
    st.integers(0, 65535),
)
counts = st.integers(0, MAX_COUNT)
facts = st.builds(ChunkFacts, st.lists(keys, max_size=5).map(tuple), counts, counts, counts)
lengths = st.integers(1, MAX_PAYLOAD_BYTES)


def encoded(
    chunk: ChunkId = CHUNK, nbytes: int = NBYTES, digest: bytes = DIGEST, facts: ChunkFacts = FACTS
) -> bytearray:
    header = encode_header(chunk, nbytes, digest, facts)
    assert header is not None
    return bytearray(header)


def resealed(header: bytearray) -> memoryview:
    """With a right checksum, whatever it says."""
    header[12:28] = xxhash.xxh3_128(bytes(header[:12] + header[28:])).digest()
    return memoryview(header)


def check(header: bytes | bytearray | memoryview) -> Header | Reason:
    return check_header(memoryview(header), CHUNK, NBYTES)


@unhurried
@given(chunk=chunks, nbytes=lengths, digest=st.binary(min_size=16, max_size=16), facts=facts)
def test_a_header_says_what_was_put_in(
    chunk: ChunkId, nbytes: int, digest: bytes, facts: ChunkFacts
) -> None:
    header = encode_header(chunk, nbytes, digest, facts)
    assert header is not None
    assert len(header) == HEADER_BYTES
    assert check_header(memoryview(header), chunk, nbytes) == Header(facts, digest)


@unhurried
@given(nbytes=st.integers(0, 1 << 40))
def test_padding_reaches_the_next_multiple(nbytes: int) -> None:
    assert padded(nbytes) % 4096 == 0
    assert 0 <= padded(nbytes) - nbytes < 4096
    assert file_bytes(nbytes) == 4096 + padded(nbytes)


@pytest.mark.parametrize("length", [1, 32, 64, 96])
def test_block_hashes_that_do_not_fit_are_left_out_from_the_end(length: int) -> None:
    hashes = tuple(i.to_bytes(2, "big").ljust(length, b"x")[:length] for i in range(5000))
    longest = ChunkId("n" * 128, 65535, b"k" * 96, 65535)
    header = encoded(longest, facts=ChunkFacts(hashes, 5000, MAX_COUNT, MAX_COUNT))
    found = check_header(memoryview(header), longest, NBYTES)
    assert isinstance(found, Header)
    kept = found.facts.block_hashes
    assert kept == hashes[: len(kept)]
    assert len(kept) >= (HEADER_BYTES - 400) // (length + 2)
    assert (found.facts.num_blocks, found.facts.index) == (5000, MAX_COUNT)


@pytest.mark.parametrize(
    "facts",
    [
        ChunkFacts((b"",), 1, 0, 1),
        ChunkFacts((b"x" * 97,), 1, 0, 1),
        ChunkFacts((), -1, 0, 1),
        ChunkFacts((), 1, -1, 1),
        ChunkFacts((), 1, 0, 1 << 63),
        ChunkFacts((), 1, 0, 1 << 70),
        ChunkFacts(("text",), 1, 0, 1),  # type: ignore[arg-type]
    ],
)
def test_facts_that_could_not_be_read_again_are_refused(facts: ChunkFacts) -> None:
    assert encode_header(CHUNK, NBYTES, DIGEST, facts) is None


@pytest.mark.parametrize("nbytes", [0, -1, MAX_PAYLOAD_BYTES + 1])
def test_a_length_out_of_bounds_is_refused(nbytes: int) -> None:
    assert encode_header(CHUNK, nbytes, DIGEST, FACTS) is None


@unhurried
@given(position=st.integers(0, HEADER_BYTES - 1), change=st.integers(1, 255))
def test_every_byte_of_a_header_counts(position: int, change: int) -> None:
    header = encoded()
    header[position] ^= change
    assert isinstance(check(header), Reason)


@unhurried
@given(length=st.integers(0, HEADER_BYTES - 1))
def test_a_header_that_was_cut_off_is_short(length: int) -> None:
    assert check(encoded()[:length]) is Reason.SHORT


@pytest.mark.parametrize(
    ("chunk", "nbytes", "reason"),
    [
        (msgspec.structs.replace(CHUNK, namespace="0-2"), NBYTES, Reason.NAMESPACE),
        (msgspec.structs.replace(CHUNK, rank=0), NBYTES, Reason.RANK),
        (msgspec.structs.replace(CHUNK, key=b"key"), NBYTES, Reason.KEY),
        (msgspec.structs.replace(CHUNK, group=0), NBYTES, Reason.GROUP),
        (CHUNK, NBYTES + 1, Reason.LENGTH),
    ],
)
def test_a_whole_header_of_another_file_is_told_by_what_differs(
    chunk: ChunkId, nbytes: int, reason: Reason
) -> None:
    assert check(encoded(chunk, nbytes)) is reason


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, b"OTHER", Reason.MAGIC),
        (8, b"\x02\x00", Reason.VERSION),
        (10, b"\xff\xff", Reason.MALFORMED),
        (10, b"\x00\x00", Reason.MALFORMED),
        (28, b"\xc1", Reason.MALFORMED),
        (HEADER_BYTES - 1, b"\x01", Reason.MALFORMED),
    ],
)
def test_a_header_with_a_right_checksum_may_still_be_refused(
    position: int, value: bytes, reason: Reason
) -> None:
    header = encoded()
    header[position : position + len(value)] = value
    assert check(resealed(header)) is reason


def with_body(value: object) -> memoryview:
    body = msgspec.msgpack.encode(value)
    header = encoded()[:12] + bytearray(16) + body + bytes(HEADER_BYTES - 28 - len(body))
    header[10:12] = len(body).to_bytes(2, "little")
    return resealed(header)


def test_a_body_with_more_or_fewer_fields_is_refused() -> None:
    body = [CHUNK.namespace, CHUNK.rank, CHUNK.group, CHUNK.key, NBYTES, DIGEST, FACTS]
    assert check(with_body(body)) == Header(FACTS, DIGEST)
    assert check(with_body(body[:-1])) is Reason.MALFORMED
    assert check(with_body([*body, 0])) is Reason.MALFORMED
    assert check(with_body([[[[]]]] * 7)) is Reason.MALFORMED


@settings(unhurried, max_examples=300)
@given(data=st.data(), chunk=chunks, digest=st.binary(min_size=16, max_size=16), facts=facts)
def test_any_mutation_of_a_real_header_is_refused_or_means_the_expected_file(
    data: st.DataObject, chunk: ChunkId, digest: bytes, facts: ChunkFacts
) -> None:
    """With the checksum made right again, so that the decoder meets the mutations."""
    header = encoded(data.draw(st.sampled_from([CHUNK, chunk])), NBYTES, digest, facts)
    used = 28 + int.from_bytes(header[10:12], "little")
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(8, used))
        piece = data.draw(st.binary(min_size=1, max_size=8))
        header[position : position + len(piece)] = piece
    del header[HEADER_BYTES:]
    found = check_header(resealed(header), CHUNK, NBYTES)
    if isinstance(found, Reason):
        return
    again = encode_header(CHUNK, NBYTES, found.payload_checksum, found.facts)
    assert again is not None
    assert check(again) == found


@unhurried
@given(noise=st.binary(min_size=0, max_size=4200))
def test_noise_is_no_header(noise: bytes) -> None:
    assert isinstance(check(noise), Reason)
    body = bytearray(encoded()[:10] + noise.ljust(HEADER_BYTES - 10, b"\0")[: HEADER_BYTES - 10])
    assert isinstance(check(resealed(body)), Reason)


@unhurried
@given(data=st.data(), nbytes=st.integers(1, 9000))
def test_every_byte_of_a_payload_counts(data: st.DataObject, nbytes: int) -> None:
    payload = bytearray(padded(nbytes))
    payload[:nbytes] = b"\xa5" * nbytes
    header = Header(FACTS, checksum(memoryview(payload)))
    assert check_payload(memoryview(payload), nbytes, header) is None
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] ^= data.draw(st.integers(1, 255))
    found = check_payload(memoryview(payload), nbytes, header)
    assert found is (Reason.PAYLOAD if position < nbytes else Reason.PADDING)


def test_padding_that_was_written_as_such_is_still_refused() -> None:
    payload = memoryview(bytearray(b"\x01" * 4096))
    assert check_payload(payload, 4095, Header(FACTS, checksum(payload))) is Reason.PADDING
