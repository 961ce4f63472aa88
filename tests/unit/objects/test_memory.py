# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm_tiered_kv.tiers.objects.memory import Claim, copy


def test_nobody_copies_after_it_was_given_up() -> None:
    claim = Claim()
    assert claim.begin()
    assert not claim.begin()
    assert not claim.give_up()  # somebody is at it
    claim.end()
    assert claim.give_up()
    assert not claim.begin()
    assert claim.give_up()


@pytest.mark.parametrize("content", [b"some bytes", bytearray(b"some bytes"), b"", bytearray()])
def test_copied_are_as_many_bytes_as_there_are(content: bytes | bytearray) -> None:
    into = bytearray(b"." * 16)
    copy(memoryview(into), memoryview(content))
    assert into == bytes(content).ljust(16, b".")
