# SPDX-License-Identifier: Apache-2.0
"""Start real ``vllm serve`` processes, send them requests, read their metrics."""

from tools.serving.client import Client, Completion, RequestFailed
from tools.serving.metrics import Metrics
from tools.serving.process import Server, ServerFailed, ServeSpec, compute_cpus

__all__ = [
    "Client",
    "Completion",
    "Metrics",
    "RequestFailed",
    "ServeSpec",
    "Server",
    "ServerFailed",
    "compute_cpus",
]
