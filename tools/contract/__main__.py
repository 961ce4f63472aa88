# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.contract compare|record (--version V | --wheel FILE | --installed)``.

``compare`` says what a release lacks of what the connector needs; the exit status is 1 if it would
not work. ``record`` keeps what the release has in the repository. ``table`` writes
``docs/compatibility.md``; it takes no options. A wheel is read, never installed, and none of its
code is run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.contract import record, table, wheel
from tools.contract.source import Source
from vllm_tiered_kv.contract.compare import compare
from vllm_tiered_kv.contract.needs import NEEDS
from vllm_tiered_kv.contract.structs import Record
from vllm_tiered_kv.contract.versions import SUPPORTED

WHEELS = Path("build/contract")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.contract", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("compare", "record"):
        command = commands.add_parser(name)
        which = command.add_mutually_exclusive_group(required=True)
        which.add_argument("--version", help="a release, fetched with pip into build/contract")
        which.add_argument("--wheel", type=Path, help="a wheel that is here already")
        which.add_argument("--installed", action="store_true", help="the one in this environment")
    commands.add_parser("table")
    args = parser.parse_args(argv)
    if args.command == "table":
        table.PAGE.write_text(table.page())
        return 0
    try:
        found = record.make(*_open(args))
    except wheel.WheelError as error:
        print(error, file=sys.stderr)
        return 2
    if args.command == "record":
        print(record.save(found))
        return 0
    return _compare(found)


def _open(args: argparse.Namespace) -> tuple[str, Source]:
    if args.installed:
        return wheel.open_installed()
    return wheel.open_wheel(args.wheel or wheel.fetch(args.version, WHEELS))


def _compare(found: Record) -> int:
    findings = compare(NEEDS, found.members)
    for problem in findings.problems:
        print(f"problem: {problem}")
    for note in findings.notes:
        print(f"note: {note}")
    oldest = record.recorded()[SUPPORTED[0].recorded]
    for hook in table.unknown_hooks(oldest, found):
        print(f"new since {oldest.version}: {hook}")
    print(f"vLLM {found.version}: {len(NEEDS)} needs, {len(findings.problems)} problems")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
