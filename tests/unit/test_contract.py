# SPDX-License-Identifier: Apache-2.0
"""What we need of vLLM: said once, and held against our classes, the installed vLLM and records."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
import vllm.v1.core.sched.scheduler  # noqa: F401 - what the scheduler half needs is loaded
from vllm import __version__

from tools.contract import record, table, wheel
from tools.contract.__main__ import main
from tools.contract.source import Source
from vllm_tiered_kv import connector, exposition, metrics
from vllm_tiered_kv.contract import check, live, needs
from vllm_tiered_kv.contract.compare import compare
from vllm_tiered_kv.contract.needs import NEEDS
from vllm_tiered_kv.contract.structs import Form, Kind, Member, Need, Parameter, Passing, Use
from vllm_tiered_kv.contract.versions import SUPPORTED, Evidence, Standing, standing

OURS = {
    needs.CONNECTOR: connector.TieredKVConnector,
    needs.HMA: connector.TieredKVConnector,
    needs.METADATA: connector.StepMetadata,
    needs.WORKER_METADATA: connector.ReportMetadata,
    needs.STATS: metrics.TieredStats,
    needs.PROM_METRICS: exposition.PromMetrics,
}
RECORDS = record.recorded()


def ours_take(function: object) -> tuple[str, ...]:
    arguments = []
    for p in live._parameters(function):
        assert p.passing in (Passing.ANY, Passing.VAR_KEYWORD)
        stars = "**" if p.passing is Passing.VAR_KEYWORD else ""
        arguments.append(f"{stars}{p.name}{'=' if p.has_default else ''}")
    return tuple(arguments[1:])


@pytest.mark.parametrize("base", OURS)
def test_the_list_has_each_hook_that_we_override_as_we_override_it(base: str) -> None:
    listed = {
        need.name.rpartition(".")[2]: need.arguments
        for need in NEEDS
        if need.kind is Kind.OVERRIDDEN and need.owner == base
    }
    cls = OURS[base]
    known = {name for r in RECORDS.values() for name in r.members[base].methods} | {"__init__"}
    defined = {}
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if name in known and inspect.isfunction(function):
            defined[name] = ours_take(function)
    if cls.__init__ is not vars(cls).get("__init__") or "__init__" not in listed:
        defined.pop("__init__", None)  # a class with a constructor of its own kind
    assert listed == defined


def test_both_readers_and_the_record_say_the_same_of_the_installed_version() -> None:
    version, source = wheel.open_installed()
    found = record.make(version, source)
    assert live.members(NEEDS) == found.members
    assert RECORDS[version] == found


def test_one_supported_version_is_installed_and_was_run() -> None:
    (here,) = [s for s in SUPPORTED if __version__.startswith(s.series + ".")]
    assert here.evidence is Evidence.RUN


@pytest.mark.parametrize("supported", SUPPORTED, ids=lambda s: s.series)
def test_each_supported_version_has_what_we_need(supported: object) -> None:
    found = RECORDS[supported.recorded]  # type: ignore[attr-defined]
    assert found.version == supported.recorded  # type: ignore[attr-defined]
    assert compare(NEEDS, found.members).problems == ()


def test_the_newest_version_has_the_hooks_of_sleep_mode_and_the_oldest_has_not() -> None:
    old, new = RECORDS[SUPPORTED[0].recorded], RECORDS[SUPPORTED[-1].recorded]
    newer = {need.name for need in NEEDS if need.use is Use.NEWER}
    assert newer
    assert newer <= new.members.keys()
    assert not newer & old.members.keys()
    assert {name.partition(":")[2] for name in newer} <= set(table.unknown_hooks(old, new))


def test_the_page_is_what_the_code_says() -> None:
    assert table.PAGE.read_text() == table.page(), "run: python -m tools.contract table"


def from_source(name: str, code: str, kind: Kind) -> dict[str, Member]:
    files = {"vllm/__init__.py": b"", "vllm/thing.py": code.encode()}
    return Source(files.get).members([Need(name, kind)])


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ("a b", "def f(a, b): ...", None),
        ("a b", "def f(a, b, c=1, *, d=2): ...", None),
        ("a b", "def f(a, b, c): ...", "takes (a, b, c), expected (a, b)"),
        ("a b", "def f(a, b, *, c): ...", "takes (a, b, c), expected (a, b)"),
        ("a b", "def f(b, a): ...", "takes (b, a), expected (a, b)"),
        ("a b", "def f(a, renamed): ...", "takes (a, renamed), expected (a, b)"),
        ("a b", "def f(a): ...", "takes (a), expected (a, b)"),
        ("a b", "def f(a, *rest): ...", None),
        ("a b=", "def f(a, *, b): ...", None),
        ("a b=", "def f(a, c=0, b=0): ...", None),
        ("a b=", "def f(a, b, /): ...", "takes (a, b), expected (a, b=)"),
        ("a b=", "def f(a, **more): ...", None),
        ("a", "f = 3", "is no longer a function"),
        ("a", "g = 3", "is missing"),
        ("a", "if True:\n    def f(a): ...", None),
    ],
)
def test_what_we_call(arguments: str, code: str, problem: str | None) -> None:
    need = Need("vllm.thing:f", Kind.CALLED, tuple(arguments.split()))
    found = compare([need], from_source(need.name, code, Kind.CALLED)).problems
    assert found == (() if problem is None else (f"f {problem}",))


@pytest.mark.parametrize(
    ("arguments", "theirs", "problem", "note"),
    [
        ("a b", "a, b", False, False),
        ("a b", "a, b, c=1", False, True),
        ("a b", "a, b, *, c=1", False, True),
        ("a b", "a, b, c", True, False),
        ("a b", "a, b, *, c", True, False),
        ("a b", "a", True, False),
        ("a b", "b, a", True, False),
        ("a b", "a, c", True, False),
        ("a b", "a, b=1", True, False),
        ("a b=", "a, b=1", False, False),
        ("a b=", "a", False, False),
        ("a **kwargs", "a, *, c, **kwargs", False, False),
        ("a", "a, **kwargs", True, False),
        ("", "", False, False),
        ("", "scope", True, False),
    ],
)
def test_what_vllm_calls(arguments: str, theirs: str, problem: bool, note: bool) -> None:
    need = Need("vllm.thing:C.f", Kind.OVERRIDDEN, tuple(arguments.split()))
    members = from_source(need.name, f"class C:\n    def f(self, {theirs}): ...", Kind.OVERRIDDEN)
    found = compare([need], members)
    assert (bool(found.problems), bool(found.notes)) == (problem, note)
    if problem:
        shown = ", ".join(map(str, members[need.name].parameters))
        assert found.problems == (f"C.f takes ({shown}), expected ({', '.join(need.arguments)})",)


def test_a_method_that_became_abstract_is_a_problem_unless_we_have_it() -> None:
    module, _, name = needs.WORKER_METADATA.partition(":")
    code = f"""
from abc import abstractmethod
class Root:
    @abstractmethod
    def inherited(self): ...
    @abstractmethod
    def settled(self): ...
class {name}(Root):
    def settled(self): ...
    @abstractmethod
    def aggregate(self, other): ...
"""
    path = module.replace(".", "/") + ".py"
    members = Source({path: code.encode()}.get).members([Need(needs.WORKER_METADATA, Kind.BASE)])
    found = compare([Need(needs.WORKER_METADATA, Kind.BASE)], members)
    assert found.problems == (f"{name} asks for inherited, which we do not implement",)


def test_attributes_are_found_wherever_they_are_set() -> None:
    code = """
from __future__ import annotations
from vllm.other import Base
class C(Base):
    field: int
    plain = 1
    def __init__(self):
        self.made, self.also = 1, 2
        local = self.only_read
    @property
    def seen(self): ...
"""
    files = {
        "vllm/thing.py": code.encode(),
        "vllm/other/__init__.py": b"from .deep import Base",
        "vllm/other/deep.py": b"class Base:\n    def __post_init__(self):\n        self.base = 1",
    }
    names = "field plain made also seen base only_read local".split()
    asked = [Need(f"vllm.thing:C.{name}", Kind.READ) for name in names]
    found = Source(files.get).members(asked)
    assert [need.member[2:] for need in asked if need.name in found] == names[:6]
    assert compare(asked, found).problems == ("C.only_read is missing", "C.local is missing")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", Standing.KNOWN),
        ("0.32.0+cpu", Standing.KNOWN),
        ("0.33.4.post1", Standing.KNOWN),
        ("0.31.9", Standing.TOO_OLD),
        ("0.31.0rc1", Standing.TOO_OLD),
        ("0.3", Standing.TOO_OLD),
        ("0.320.0", Standing.UNKNOWN),
        ("0.34.0rc1", Standing.UNKNOWN),
        ("1.0", Standing.UNKNOWN),
        ("0.1.dev1+gabcdef", Standing.UNKNOWN),
        ("dev", Standing.UNKNOWN),
        ("", Standing.UNKNOWN),
    ],
)
def test_where_a_version_stands(version: str, expected: Standing) -> None:
    assert standing(version) is expected


def test_an_unknown_version_that_fits_works_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("test_contract")
    with caplog.at_level(logging.WARNING, logger.name):
        check.warn(check.accept("0.34.0"), logger)
        check.warn(check.accept("0.32.0"), logger)
    (line,) = caplog.messages
    assert line.startswith("tiered-kv: vLLM 0.34.0 was not tested (tested are 0.32, 0.33)")


def test_an_old_version_is_refused_whatever_it_has() -> None:
    with pytest.raises(check.UnsupportedVllm) as error:
        check.accept("0.31.0")
    assert str(error.value) == (
        "tiered-kv: vLLM 0.31.0 is not supported: too old; supported are 0.32, 0.33"
    )


def test_many_problems_are_one_line() -> None:
    asked = [Need(f"vllm.envs:NOT_THERE_{i}", Kind.READ) for i in range(5)]
    with pytest.raises(check.UnsupportedVllm) as error:
        check.accept("0.34.0", asked)
    assert str(error.value) == (
        "tiered-kv: vLLM 0.34.0 is not supported: NOT_THERE_0 is missing; NOT_THERE_1 is missing; "
        "NOT_THERE_2 is missing; and 2 more"
    )


CHANGED = """
import json, sys
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as Factory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface
from vllm_tiered_kv.plugin import register

vllm.__version__ = "0.34.0"
register()
said = {}

def attempt(name):
    for module in [m for m in sys.modules if m.startswith("vllm_tiered_kv")]:
        del sys.modules[module]
    try:
        Factory.get_connector_class_by_name("TieredKVConnector")
        said[name] = None
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"

attempt("as it is")
original = base.KVConnectorBase_V1.reset_cache
base.KVConnectorBase_V1.reset_cache = lambda self, scope: None
attempt("changed")
base.KVConnectorBase_V1.reset_cache = original
spec = kv_cache_interface.RSWASpec
del kv_cache_interface.RSWASpec
attempt("gone")
kv_cache_interface.RSWASpec = spec
said["another"] = Factory.get_connector_class_by_name("ExampleConnector").__name__
print("SAID", json.dumps(said))
"""


def test_who_uses_the_connector_with_a_changed_vllm_is_told_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHANGED], capture_output=True, text=True, timeout=240, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    start = "UnsupportedVllm: tiered-kv: vLLM 0.34.0 is not supported: "
    assert json.loads(line.removeprefix("SAID")) == {
        "as it is": None,
        "changed": start + "KVConnectorBase_V1.reset_cache takes (scope), expected ()",
        "gone": start + "RSWASpec is missing",
        "another": "ExampleConnector",
    }
    assert "is not available with this vLLM" not in done.stdout + done.stderr


def small_wheel(folder: Path, code: str) -> Path:
    path = folder / "vllm-0.34.0-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "raise RuntimeError('executed')")
        archive.writestr("vllm/v1/request.py", code)
    return path


def test_a_wheel_is_read_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "raise RuntimeError('executed')\nclass Request:\n    num_tokens = 0\n"
    path = small_wheel(tmp_path, code)
    version, source = wheel.open_wheel(path)
    found = record.make(version, source)
    assert found.members == {"vllm.v1.request:Request.num_tokens": Member(Form.VALUE)}
    assert main(["compare", "--wheel", str(path)]) == 1
    said = capsys.readouterr().out
    assert "problem: Request.request_id is missing" in said
    assert "Request.num_tokens" not in said
    saved = record.save(found, tmp_path)
    assert record.load(saved) == found


def test_what_is_no_wheel_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vllm-0.34.0-cp38-abi3-linux_x86_64.whl"
    path.write_bytes(b"no archive")
    assert main(["compare", "--wheel", str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(wheel.WheelError, match="not a wheel of vLLM"):
        wheel.open_wheel(path)


def test_a_record_is_typed(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"version": "1", "members": {"x": {"form": "poem"}}}')
    with pytest.raises(msgspec.ValidationError):
        record.load(path)


def test_parameters_are_shown_as_written() -> None:
    shown = [Parameter("a"), Parameter("b", has_default=True), Parameter("c", Passing.VAR_KEYWORD)]
    assert [str(p) for p in shown] == ["a", "b=", "**c"]
