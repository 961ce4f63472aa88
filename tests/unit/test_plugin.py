# SPDX-License-Identifier: Apache-2.0
"""The package without vLLM, and its registration with it; each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout + done.stderr


def test_entry_point_names_register() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="tiered_kv")
    assert found.value == "vllm_tiered_kv.plugin:register"


def test_import_is_light() -> None:
    code = """
import sys
import vllm_tiered_kv, vllm_tiered_kv.plugin
print(sorted({"vllm", "torch", "msgspec", "zmq"} & set(sys.modules)))
"""
    assert run(code).strip() == "[]"


def test_without_vllm_one_line_is_logged_and_nothing_raised() -> None:
    code = """
import logging, sys
sys.modules["vllm"] = None  # importing it raises ImportError
logging.basicConfig(format="%(levelname)s %(message)s")
from vllm_tiered_kv.plugin import register
register()
"""
    (line,) = run(code).splitlines()
    assert line.startswith("WARNING TieredKVConnector is not available with this vLLM:")


def test_with_an_unknown_vllm_one_line_is_logged_and_nothing_raised() -> None:
    code = """
import logging, sys, types
for name in ("vllm", "vllm.distributed"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
logging.basicConfig(format="%(levelname)s %(message)s")
from vllm_tiered_kv.plugin import register
register()
"""
    (line,) = run(code).splitlines()
    assert line.startswith("WARNING TieredKVConnector is not available with this vLLM:")


def test_registers_by_name_and_twice_is_harmless() -> None:
    code = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm_tiered_kv.plugin import register
register()
register()
import sys
print("imported" if "vllm_tiered_kv.connector" in sys.modules else "lazy")
print(KVConnectorFactory.get_connector_class_by_name("TieredKVConnector").__module__)
"""
    # vLLM's own log lines may come in between
    lines = [line for line in run(code).splitlines() if " " not in line]
    assert lines[-2:] == ["lazy", "vllm_tiered_kv.connector"]


def test_a_name_that_dynamo_knows() -> None:
    code = """
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(
    kv_connector="NixlConnector",
    kv_connector_module_path="vllm_tiered_kv.integrations.dynamo",
    kv_role="kv_producer",
)
print(KVConnectorFactory.get_connector_class(config).__name__)
"""
    assert "TieredKVConnector" in run(code).splitlines()  # beside vLLM's own log lines
