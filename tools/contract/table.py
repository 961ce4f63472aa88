# SPDX-License-Identifier: Apache-2.0
"""``docs/compatibility.md``, written from the table, the needs and the records."""

from __future__ import annotations

from pathlib import Path

from tools.contract.record import recorded
from vllm_tiered_kv.contract.needs import NEEDS
from vllm_tiered_kv.contract.structs import Kind, Need, Record, Use
from vllm_tiered_kv.contract.versions import SUPPORTED, Evidence

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

_EVIDENCE = {
    Evidence.RUN: "run: all tests, real `vllm serve` engines on CPU included",
    Evidence.SIGNATURES: "not run: every member below compared with the release's source",
}
_HEAD = """# vLLM versions

<!-- Written by `python -m tools.contract table`; a test holds it against the code. -->

| vLLM | how it was checked | release looked at | of our members, it has |
|---|---|---|---|
"""
_RULES = """
When the connector is imported, the vLLM that is running is compared with what we need of it, in a
few milliseconds and in every process that uses the connector:

- A version of the table, or a newer one that has everything as we know it, works; a version that is
  not in the table is named in one warning.
- A version that is older than the table, or in which something is missing or takes other
  parameters, is refused: the start ends with one line,
  `tiered-kv: vLLM 0.34.0 is not supported: KVConnectorBase_V1.reset_cache takes (scope), expected
  ()`, say.
- An engine that does not use the connector is not affected; the check runs only with it.

Parameters are compared by meaning. What we call may have gained optional parameters. A parameter
that we pass by position must still be where it was, by the same name. A method of ours must take
whatever vLLM's own requires. A class that we derive from may ask for no method that we lack.
Behaviour behind an unchanged signature is not seen by this: only a version that was run is known
to work.

`make contract VERSION=0.33.0` compares any release, without installing it; see
[CONTRIBUTING](../CONTRIBUTING.md#vllm-versions).

## What we use

"where present": vLLM has it from some version on. "adapters": without it requests with LoRA
adapters are computed without the tier. "namespace": without it the engine serves, but nothing of it
can be told apart from other engines' data.
"""


def page() -> str:
    """The whole page."""
    records = recorded()
    rows = [
        f"| {version.series} | {_EVIDENCE[version.evidence]} | {version.recorded} | "
        f"{_share(records[version.recorded])} |"
        for version in SUPPORTED
    ]
    return _HEAD + "\n".join(rows) + "\n" + _RULES + _members()


def unknown_hooks(old: Record, new: Record) -> list[str]:
    """Public methods of the classes we derive from that only the second version has."""
    return [
        f"{name.partition(':')[2]}.{method}"
        for name, member in new.members.items()
        if name in old.members
        for method in sorted(set(member.methods) - set(old.members[name].methods))
    ]


def _share(record: Record) -> str:
    names = {need.name for need in NEEDS}
    absent = sorted(name.rpartition(".")[2] for name in names - record.members.keys())
    missing = f" (without {', '.join(f'`{name}`' for name in absent)})" if absent else ""
    return f"{len(names) - len(absent)} of {len(names)}{missing}"


def _members() -> str:
    blocks: dict[str, list[Need]] = {}
    for need in NEEDS:
        blocks.setdefault(need.module, []).append(need)
    lines: list[str] = []
    for module, needs in blocks.items():
        lines += ["", f"### {module}", "", "| member | what we do with it | parameters | needed |"]
        lines += ["|---|---|---|---|"]
        for need in needs:
            shown = need.kind in (Kind.CALLED, Kind.OVERRIDDEN)
            arguments = f"`({', '.join(need.arguments)})`" if shown else ""
            use = "" if need.use is Use.ALWAYS else need.use.value
            lines.append(f"| `{need.member}` | {need.kind.value} | {arguments} | {use} |")
    return "\n".join(lines) + "\n"
