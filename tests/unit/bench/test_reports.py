# SPDX-License-Identifier: Apache-2.0
"""The files that are written."""

from __future__ import annotations

import json
import stat
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from tests.unit.bench._records import answer, block
from vllm_tiered_kv.bench import html, markdown
from vllm_tiered_kv.bench.agreement import agreement
from vllm_tiered_kv.bench.config import Arm, Experiment, Slo
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.files import PLOTS, make_folder, write_all
from vllm_tiered_kv.bench.machine import this_machine
from vllm_tiered_kv.bench.report import VERSION, Report
from vllm_tiered_kv.bench.summary import Measured, measured, summarise
from vllm_tiered_kv.bench.tables import NOT_REPORTED, figure, tables

EVIL = '<script src="http://evil/x.js">|`$a_b$'
ARMS = (Arm(name="plain", url="http://x"), Arm(name=EVIL, url="http://y"))


def made() -> tuple[Report, list[Measured]]:
    """Two arms; the second has an evil name, a failure, another output and a tier."""
    counted = {"prompt tokens": 1000.0, "device": 100.0, "tiered-kv: cpu": 500.0}
    one = [block("plain", n, [answer()] * 3) for n in range(12)]
    two = [
        block(EVIL, n, [answer(0.05), answer(0.05, tokens=(1, 7, 3)), None], counted=counted)
        for n in range(12)
    ]
    experiment = Experiment(
        name=f"named {EVIL}", arms=ARMS, resamples=100, slo=Slo(ttft_ms=80, tpot_ms=20)
    )
    found = measured(ARMS, list(zip(one, two, strict=True)))
    summary = summarise(experiment, found, {})
    report = Report(
        version=VERSION,
        tool="0",
        name=experiment.name,
        started="2026-01-01T00:00:00+00:00",
        seconds=3.0,
        command=("vllm-tiered-kv", "bench", "ab", EVIL),
        machine=this_machine(),
        experiment=experiment,
        blocks=12,
        arms=summary.arms,
        ratios=summary.ratios,
        agreements=(agreement(found[0].records, found[1].records),),
        notes=(f"a note of {EVIL}",),
        ended_early=None,
    )
    return report, found


class Page(HTMLParser):
    """Remembers tags, attributes that lead somewhere, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "srcset", "data", "action", "poster")
        self.links += [value or "" for name, value in attrs if name in names]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_nothing_else_and_escapes_everything() -> None:
    report, _ = made()
    text = html.render(report, {f"a picture {EVIL}": b"\x89PNG"})
    page = Page()
    page.feed(text)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert page.links == ["data:image/png;base64,iVBORw=="]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    shown = "".join(page.text)
    assert shown.count(EVIL) > 8
    for title in (table.title for table in tables(report)):
        assert title in shown


def test_markdown_keeps_its_tables_whole() -> None:
    report, _ = made()
    text = markdown.render(report, ("ttft.png",))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for table in tables(report):
        assert markdown.markdown_table(table) in text
    unescaped = {row.replace("\\|", "").count("|") for row in rows}
    assert unescaped <= {len(table.header) + 1 for table in tables(report)}
    assert "<script" not in text.replace("\\<script", "").split("```")[2]
    assert "![](ttft.png)" in text
    assert "$ vllm-tiered-kv bench ab '<script" in text


def test_tables_say_what_is_not_known() -> None:
    report, _ = made()
    found = {table.title.split(",")[0]: table for table in tables(report)}
    hits = found["Prompt tokens that were not computed"]
    assert hits.header == ("tier", "plain", EVIL)
    by_tier = {row[0]: row[1:] for row in hits.rows}
    assert by_tier["device"] == (NOT_REPORTED, "10.0 (10.0 to 10.0)")
    assert by_tier["connector"] == (NOT_REPORTED, NOT_REPORTED)
    assert by_tier["tiered-kv: cpu"] == (NOT_REPORTED, "50.0 (50.0 to 50.0)")
    assert by_tier["by the answers"] == ("50.0 (50.0 to 50.0)",) * 2
    first_token = found["Time to first token"]
    assert first_token.rows[0][1] == "100 (100 to 100)"
    assert first_token.rows[1][3].endswith(" *")
    assert found["Throughput"].title.endswith("with TTFT at most 80 ms, TPOT at most 20 ms")
    requests = found["Requests"]
    assert requests.rows[1][3] == "12 (broken: 12)"
    outputs = found["Outputs against those of plain"]
    assert outputs.rows[0][1:4] == ("24", "12", "50.0%")
    different = found["The first outputs that differ"].rows[0]
    assert different[2:] == ("1", "1", "2", "7", "-1.000, -1.000")


def test_figures_keep_three_digits() -> None:
    shown = [figure(value) for value in (0.0, 0.01234, 1.234, 12.34, 99.96, 123.4, 12345.6)]
    assert shown == ["0", "0.0123", "1.23", "12.3", "100.0", "123", "12,346"]
    assert figure(None) == "-"


def test_files_are_written_for_ones_own_eyes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, found = made()
    folder = tmp_path / "out"
    make_folder(folder)
    write_all(report, found, folder, plots=True)
    names = {"report.json", "report.md", "report.html", "requests.jsonl", *PLOTS}
    assert {path.name for path in folder.iterdir()} == names
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in PLOTS:
        assert (folder / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(PLOTS)
    assert msgspec.json.decode((folder / "report.json").read_bytes(), type=Report) == report
    lines = (folder / "requests.jsonl").read_text().splitlines()
    assert len(lines) == 72
    assert json.loads(lines[0])["answer"]["tokens"] == [1, 2, 3]
    write_all(report, found, folder, plots=False)  # an earlier run's pictures are not this one's
    assert {path.name for path in folder.iterdir()} == names - set(PLOTS)


def test_a_folder_that_cannot_be_made_or_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be made"):
        make_folder(tmp_path / "file" / "out")
    report, found = made()
    with pytest.raises(BenchError, match="No such file"):
        write_all(report, found, tmp_path / "gone", plots=False)
