# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

from vllm_tiered_kv.tiers import disk

MODULES = sorted(module.name for module in pkgutil.iter_modules(disk.__path__))


def test_neither_vllm_nor_torch_is_imported() -> None:
    code = "".join(f"import vllm_tiered_kv.tiers.disk.{name}\n" for name in MODULES)
    code += "import sys; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert len(MODULES) > 8
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_no_other_module_calls_a_file_system() -> None:
    """But for constants and names, `os` is used in `files.py` alone; a `Path` is only carried."""
    allowed = {"PathLike", "stat_result", "statvfs_result", "strerror"}
    process = {"getuid", "setpriority", "PRIO_PROCESS"}
    events = {"eventfd", "eventfd_read", "eventfd_write", "EFD_NONBLOCK", "EFD_CLOEXEC", "close"}
    more = {
        "channel": process | events,
        "executor": process | {"sched_setaffinity"},
        "keeper": {"geteuid"},
    }
    for name in MODULES:
        if name == "files":
            continue
        module = importlib.import_module(f"vllm_tiered_kv.tiers.disk.{name}")
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            match node:
                case ast.Attribute(value=ast.Name("os"), attr=used):
                    assert used in allowed | more.get(name, set()) or used.startswith("O_")
                case ast.Call(func=ast.Name(called)):
                    assert called != "open", name
