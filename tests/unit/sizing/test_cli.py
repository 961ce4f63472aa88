# SPDX-License-Identifier: Apache-2.0
"""The commands, as they are typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.sizing import _configs as c
from vllm_tiered_kv import __version__
from vllm_tiered_kv.cli.app import app, main
from vllm_tiered_kv.replay import Request
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.gpus import GPUS, find_gpu
from vllm_tiered_kv.sizing.units import (
    parse_number,
    parse_seconds,
    parse_tokens,
    show_bytes,
    show_seconds,
    show_tokens,
)

ROOT = Path(__file__).parents[3]
BY_FLAGS = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--params", "70e9")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Llama-3-70B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(c.LLAMA_3_70B))
    index = {"metadata": {"total_size": 141_107_412_992}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    prompts = [(i % 7, 100 + i % 7, 1000 + i) for i in range(80)]
    requests = [Request(10e3 * i, 1400, 50, blocks) for i, blocks in enumerate(prompts)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(_plain(request)) for request in requests))
    return path


def _plain(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def ask(*arguments: str | Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return answer


def test_size_of_a_model_in_a_folder(model: Path) -> None:
    answer = ask("size", model, "--gpu", "h100", "--tp", "8", "--capacity", "cpu=40GiB")
    assert answer["bytes_per_token"] == 327_680
    assert answer["fixed_bytes"] == 0
    assert answer["per_gpu"]["bytes_per_token"] == 40_960
    assert answer["weights"] == {
        "nbytes": 141_107_412_992,
        "source": "total_size in model.safetensors.index.json",
    }
    assert [row["tokens"] for row in answer["contexts"]] == [4096 << n for n in range(9)]
    of_128k = answer["contexts"][5]
    assert of_128k == {"tokens": 131_072, "bytes": 42_949_672_960, "requests": 10}
    (tier,) = answer["tiers"]
    assert (tier["capacity"], tier["tokens"]) == (40 << 30, 131_072)
    assert tier["holds"][5] == {"tokens": 131_072, "conversations": 1}
    assert answer["parameters"]["source"] == "estimated from config.json"


@pytest.mark.parametrize(("kv_dtype", "expected"), [("auto", 327_680), ("fp8", 163_840)])
def test_size_by_flags(kv_dtype: str, expected: int) -> None:
    answer = ask("size", *BY_FLAGS, "--kv-dtype", kv_dtype)
    assert answer["bytes_per_token"] == expected
    assert answer["weights"]["nbytes"] == 140_000_000_000
    latent = ask("size", "--layers", "61", "--latent-dim", "512", "--rope-dim", "64", "--tp", "8")
    assert latent["bytes_per_token"] == latent["per_gpu"]["bytes_per_token"] == 70_272
    assert latent["all_gpus"]["bytes_per_token"] == latent["tier_bytes_per_token"] == 8 * 70_272
    (note,) = ask("size", *BY_FLAGS, "--gpu", "h100")["notes"]
    assert note == "the weights, 140 GB, do not fit one GPU of 80 GB x 0.92"
    windows = ask("size", *BY_FLAGS, "--window", "1024", "--window-pattern", "4")
    assert windows["bytes_per_token"] == 20 * 4096
    assert windows["window_bytes"] == 60 * 4096 * 1024


def test_flags_correct_a_file_and_a_name_is_found_in_the_hub_cache(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--meta--Llama" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(model, snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert ask("size", "meta/Llama")["bytes_per_token"] == 327_680
    answer = ask("size", "meta/Llama", "--layers", "40", "--weights", "9GB")
    assert answer["bytes_per_token"] == 163_840
    assert answer["weights"] == {"nbytes": 9_000_000_000, "source": "--weights"}


def test_tables_say_what_json_says(model: Path) -> None:
    text = run("size", model, "--gpu", "h200", "--tp", "4")
    for part in (
        "327,680",
        "42.9 GB",
        "42,949,672,960",
        "81,920",
        "256 GiB",
        "838,860",
        "4 x h200",
    ):
        assert part in text
    text = run("size", *BY_FLAGS, "--window", "1024", "--window-pattern", "4", "--context", "8K")
    for part in ("60 x window attention, last 1,024 tokens", "251,658,240", "8K"):
        assert part in text


def test_the_worked_example() -> None:
    answer = ask(
        *("plan", *BY_FLAGS, "--context", "128K", "--tp", "1", "--tp", "8"),
        *("--speed", "tier=252GB/s"),
    )
    one, eight = answer["lengths"]
    assert one["bytes"] == 42_949_672_960
    assert round(one["compute_seconds"]) == 23
    assert round(eight["compute_seconds"]) == 3
    assert round(one["fetch"][0]["seconds"], 2) == 0.17
    assert one["fetch"][0]["choice"] == "fetch"
    assert answer["compute"][0]["peak_flops"] == 1_979e12
    assert {row["gpus"]: row["tokens"] for row in answer["break_even"]} == {1: 12, 8: 97}
    text = run("plan", *BY_FLAGS, "--context", "128K", "--tp", "8", "--speed", "tier=252GB/s")
    for part in ("128K", "2.90 s", "0.17 s", "42.9 GB", "252 GB/s"):
        assert part in text


def test_plan_with_options() -> None:
    base = ("plan", *BY_FLAGS, "--heads", "64", "--context", "128K")
    plain, with_attention = ask(*base), ask(*base, "--attention")
    assert not plain["attention_counted"]
    assert with_attention["attention_counted"]
    ratio = with_attention["lengths"][0]["compute_seconds"] / plain["lengths"][0]["compute_seconds"]
    assert 2.2 < ratio < 2.3
    assert plain["lengths"][0]["resident"] == 0
    assert "the weights, 140 GB, do not fit one GPU of 80 GB x 0.92" in plain["notes"]
    half = ask(*base, "--precision", "bf16")
    assert half["compute"][0]["peak_flops"] == 989.5e12
    own = ask(*base, "--peak-flops", "500T", "--fraction", "0.5", "--speed", "s3=1GB/s,50ms")
    assert own["compute"][0]["flops"] == 250e12
    assert own["links"] == [{"name": "s3", "bandwidth": 1e9, "latency": 0.05, "source": "--speed"}]
    assert own["lengths"][0]["resident"] is None  # of such a GPU the memory is not known
    assert not any("FP8" in note for note in own["notes"])
    two = ask(
        *base, "--speed", "cpu=50GB/s,5ms,disk=5GB/s", "--peak-flops", "1e15", "--gpu", "h200"
    )
    assert [(link["bandwidth"], link["latency"]) for link in two["links"]] == [
        *((50e9, 0.005), (5e9, 0.002))
    ]
    assert two["lengths"][0]["resident"] == 0
    window = ask(*base, "--hit-window", "1h", "--request-rate", "2", "--new-tokens", "1K")
    assert window["hit_window"]["capacity"] == 7200 * 1024 * 327_680


def test_plan_measures_this_machine(tmp_path: Path) -> None:
    answer = ask(
        *("plan", *BY_FLAGS, "--context", "8K", "--measure", "--folder", tmp_path),
        *("--measure-bytes", "16MiB", "--measure-threads", "2", "--speed", "cpu=50GB/s"),
    )
    measured = answer["measured"]
    assert measured["disk_read"]["nbytes"] == measured["disk_write"]["nbytes"] == 16 << 20
    links = {link["name"]: link for link in answer["links"]}
    rate = measured["disk_read"]["nbytes"] / measured["disk_read"]["seconds"]
    assert links["disk"]["bandwidth"] == pytest.approx(rate)
    assert links["cpu"]["bandwidth"] == 50e9  # what is given outweighs what is measured
    assert list(tmp_path.iterdir()) == []


def test_plan_replays_a_trace(tmp_path: Path, trace: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plots" / "curve.png"
    small = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--params", "8e9")
    arguments = (
        *("plan", *small, "--context", "8K", "--trace", trace, "--jobs", "1"),
        *("--capacity", "cpu=512MiB", "--capacity", "disk=8GiB", "--policy", "lru"),
        *("--policy", "arc", "--hit-window", "75s", "--plot", plot),
        *("--speed", "cpu=50GB/s", "--speed", "disk=20GB/s"),
    )
    answer = ask(*arguments)
    replayed = answer["trace"]
    assert replayed["facts"]["requests"] == 80
    assert [row["policy"] for row in replayed["outcomes"]] == ["lru", "arc"]
    lru = replayed["outcomes"][0]
    # Each of seven prefixes of two blocks comes back, and 8 blocks of memory forget it before.
    assert lru["cpu_hit_rate"] == 0
    assert lru["disk_hit_rate"] == pytest.approx(2 * 73 / 240)
    assert lru["bytes_written"] == (14 + 80) * 512 * 131_072
    assert lru["ttft_saved_where_it_pays"] > 0
    assert {row["policy"] for row in replayed["curve"]} == {"lru", "arc", "knows the future"}
    assert answer["trace_window"]["hit_rate"] == pytest.approx(2 * 73 / 240)
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = run(*arguments)
    for part in ("Served by the tiers", "60.8%", "a day", "knows the future", "within 75 s"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("size",), "name a model, or describe one"),
        (("size", "no/such"), "no/such: no such file or folder"),
        (("size", "x" * 5000), "x cannot be looked at: File name too long"),
        (("size", "~nobody-here/x"), "~nobody-here/x cannot be looked at: Could not determine"),
        (("size", "--layers", "2", "--head-dim", "8"), "give --kv-heads"),
        (("size", *BY_FLAGS, "--tp", "3"), "cannot be spread over 3 GPUs"),
        (("size", *BY_FLAGS, "--gpu", "abacus"), "'abacus' is not a GPU known here"),
        (("size", *BY_FLAGS, "--kv-dtype", "int3"), "'int3' is not a format"),
        (("size", *BY_FLAGS, "--context", "2G"), "'2G' is not a number of tokens"),
        (("size", *BY_FLAGS, "--capacity", "64GiB"), "expected NAME=VALUE"),
        (("size", *BY_FLAGS, "--capacity", "cpu=many"), "'many': expected a size"),
        (("plan", *BY_FLAGS[:6]), "give --params"),
        (("plan", *BY_FLAGS, "--attention"), "num_attention_heads is missing; give --heads"),
        (("plan", *BY_FLAGS, "--speed", "cpu=fast"), "'fast': expected a size"),
        (("plan", *BY_FLAGS, "--speed", "cpu=50"), "'50' is not a rate"),
        (("plan", *BY_FLAGS, "--speed", "cpu=400Gb/s"), "'400Gb/s': bits?"),
        (("plan", *BY_FLAGS, "--speed", "cpu=400Gbps"), "'400Gbps': bits?"),
        (("plan", *BY_FLAGS, "--speed", "[/cpu]=5GB/s"), "expected NAME=VALUE"),
        (("plan", *BY_FLAGS, "--hit-window", "1h"), "needs --request-rate"),
        (
            ("plan", *BY_FLAGS, "--hit-window", "soon", "--request-rate", "1"),
            "'soon' is not a time",
        ),
        (("plan", *BY_FLAGS, "--plot", "x.png"), "give --trace"),
        (("plan", *BY_FLAGS, "--plot", "x.bmp", "--trace", "t"), "x.bmp: a plot is a"),
        (("plan", *BY_FLAGS, "--trace", "/no/trace", "--jobs", "1"), "/no/trace cannot be read"),
        (("plan", *BY_FLAGS, "--trace", "t", "--capacity", "disk=1GiB"), "not in disk"),
        (("plan", *BY_FLAGS, "--trace", "t", "--speed", "cpu=1GB/s"), "give --speed disk=RATE"),
        (("plan", *BY_FLAGS, "--params", "-3"), "'-3' is not a positive number"),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm-tiered-kv", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("vllm-tiered-kv: ")
    assert error.count("\n") == 1


def test_a_plot_without_matplotlib(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SizingError, match=r"pip install \"vllm-tiered-kv\[plot\]\""):
        run("plan", *BY_FLAGS, "--trace", trace, "--plot", "x.png")


@pytest.mark.parametrize("command", ["size", "plan"])
def test_neither_vllm_nor_torch_nor_matplotlib_is_imported(command: str, trace: Path) -> None:
    replays = ("--trace", str(trace), "--policy", "lru", "--jobs", "1") if command == "plan" else ()
    program = (
        "import sys\n"
        "from vllm_tiered_kv.cli.app import app\n"
        f"app({[command, *BY_FLAGS, *replays]!r}, standalone_mode=False)\n"
        "print(*{'vllm', 'torch', 'matplotlib', 'numpy', 'transformers'} & sys.modules.keys())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


def test_the_installed_console_script(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "vllm_tiered_kv", source / "vllm_tiered_kv")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path / "target"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--target", target, source),
        ],
        check=True,
        capture_output=True,
        timeout=240,
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}

    def script(*arguments: str | Path) -> str:
        done = subprocess.run(
            [target / "bin" / "vllm-tiered-kv", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert script("--version") == f"vllm-tiered-kv {__version__}\n"
    assert json.loads(script("size", model, "--json"))["bytes_per_token"] == 327_680
    assert "plan" in script("--help")


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("L40S", "l40s"),
    ],
)
def test_gpus_are_known_by_the_names_that_drivers_print(printed: str, name: str) -> None:
    assert find_gpu(printed) == GPUS[name]


def test_an_endless_rate_of_requests_is_refused() -> None:
    done = CliRunner().invoke(
        app, ["plan", *BY_FLAGS, "--hit-window", "1h", "--request-rate", "inf"]
    )
    assert done.exit_code == 2


def test_units() -> None:
    assert [parse_tokens(text) for text in ("1", "8192", "128K", "1m", "1.5k")] == [
        *(1, 8192, 131_072, 1 << 20, 1536)
    ]
    assert [parse_seconds(text) for text in ("2ms", "90", "1.5h", "1d")] == [
        *(0.002, 90.0, 5400.0, 86_400.0)
    ]
    assert [parse_number(text) for text in ("70B", "70e9", "1979T", "8")] == [
        *(70e9, 70e9, 1979e12, 8.0)
    ]
    assert [show_bytes(value) for value in (0, 999, 1000, 2_684_354_560, 42_949_672_960)] == [
        *("0 B", "999 B", "1 KB", "2.68 GB", "42.9 GB")
    ]
    assert [show_bytes(value) for value in (999_600, 303e12, 5e18)] == ["1 MB", "303 TB", "5000 PB"]
    assert [show_seconds(value) for value in (0.0021, 0.05, 0.1704, 9.99, 1234.5, -0.5)] == [
        *("2.1 ms", "50 ms", "0.17 s", "9.99 s", "1,234 s", "-0.50 s")
    ]
    assert [show_tokens(value) for value in (131_072, 1 << 20, 1000)] == ["128K", "1M", "1,000"]


def documented() -> list[tuple[list[str], list[str]]]:
    """The commands of docs/sizing.md that show what they print, and the lines that they show."""
    found = []
    for block in (ROOT / "docs" / "sizing.md").read_text().split("```console\n$ ")[1:]:
        command, _, shown = block.split("```")[0].replace("\\\n", "").partition("\n")
        found.append((command.split()[1:], [line.rstrip() for line in shown.splitlines()]))
    return found


def test_the_docs_show_what_is_printed() -> None:
    ran = 0
    for arguments, shown in documented():
        if "--trace" in arguments:  # takes minutes; its figures are known answers of test_traces
            continue
        printed = [line.rstrip() for line in run(*arguments).splitlines()]
        assert [line for line in shown if line and line not in printed] == []
        ran += 1
    assert ran == 2
