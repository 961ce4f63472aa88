# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pkgutil
import subprocess
import sys

from vllm_tiered_kv.tiers import objects

MODULES = [f"vllm_tiered_kv.tiers.objects.{m.name}" for m in pkgutil.iter_modules(objects.__path__)]


def test_neither_vllm_nor_torch_nor_the_host_is_imported() -> None:
    modules = [*MODULES, "vllm_tiered_kv.integrations.lmcache_objects"]
    code = "".join(f"import {name}\n" for name in modules)
    code += "import sys; sys.exit(bool({'vllm', 'torch', 'lmcache'} & sys.modules.keys()))"
    assert len(MODULES) > 8
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
