# SPDX-License-Identifier: Apache-2.0
"""A doubt that nobody can settle any more must not make every later request wait."""

from __future__ import annotations

from vllm_tiered_kv.protocol import AdapterReport, AdapterState
from vllm_tiered_kv.scheduler.adapters import AdapterTable, Content, LoraName, Verdict


def lora(number: int) -> LoraName:
    return LoraName(number, "one", "/adapters/one", False)


def known(number: int) -> AdapterReport:
    return AdapterReport(number, 1, AdapterState.KNOWN, bytes(32))


def digesting(number: int) -> AdapterReport:
    return AdapterReport(number, 1, AdapterState.DIGESTING)


def table_with_a_doubt() -> AdapterTable:
    """Adapter 1 computed something, and was unloaded before it was digested; 2 took its name."""
    table = AdapterTable(1)
    assert table.look(lora(1), 0) is Verdict.ASK_AGAIN
    table.report(0, digesting(1))
    table.went_without(lora(1))
    table.report(0, AdapterReport(1, 1, AdapterState.ABSENT))
    table.look(lora(2), 0)
    table.report(0, digesting(2))
    table.report(0, known(2))
    assert isinstance(table.look(lora(2), 0), Content)
    return table


def test_what_was_unloaded_undigested_is_not_waited_for() -> None:
    table = table_with_a_doubt()
    assert table.look(lora(2), 16) is Verdict.GO_WITHOUT


def test_who_goes_without_because_of_others_adds_no_doubt_of_its_own() -> None:
    table = AdapterTable(1)
    table.look(lora(1), 0)
    table.report(0, digesting(1))
    table.look(lora(2), 0)
    table.report(0, known(2))
    assert table.look(lora(2), 16) is Verdict.ASK_AGAIN
    table.went_without(lora(2))  # it waited long enough
    table.report(0, known(1))
    assert isinstance(table.look(lora(2), 16), Content)


def test_an_empty_device_has_no_doubts() -> None:
    table = table_with_a_doubt()
    table.device_emptied()
    assert isinstance(table.look(lora(2), 16), Content)
