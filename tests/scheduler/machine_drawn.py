# SPDX-License-Identifier: Apache-2.0
"""What hypothesis draws for the model of the contract: engines, prompts, places."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.scheduler.manual import Pace
from tests.scheduler.rank import Runner
from tests.scheduler.sim import BLOCK, STATE

MAX_LEN = 12 * BLOCK
MAX_PROMPT = 10 * BLOCK
MAX_LIVE = 12
PATIENCE = 60
"""Steps in which something must be answered once nothing is held back: a prompt takes a few steps,
and preempted requests may start over some times."""

AT = st.integers(0, 255)
"""Which of the things that could be meant; modulo their number."""
OWN = st.one_of(st.just(0), st.integers(1, 20))
"""Tokens that follow what was said before."""
PARAMS = st.sampled_from(
    [
        *[None] * 24,
        {"tiered_kv": {"store": False}},
        {"tiered_kv": {"load": False}},
        {"tiered_kv": {"store": False, "load": False}},
        {"tiered_kv": {"load": "yes"}},
        {"tiered_kv": {"gate": "never"}},
        {"tiered_kv": {"gate": "measured"}},
        {"tiered_kv": {"gate": "sometimes"}},
        {"tiered_kv": {"unknown": 1}},
        {"tiered_kv": [1, 2]},
        {"tiered_kv": None},
        {"somebody": {"else": True}},
        {},
    ]
)
RESETS = [*["device"] * 5, "device and running", "all", "all and running"]
PROMPT = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "shared": st.one_of(st.just(9 * BLOCK), st.integers(0, 9 * BLOCK)),
        "own": st.integers(1, 20),
        "seed": st.integers(0, 3),
        "max_tokens": st.integers(1, 40),
        "salt": st.sampled_from([None, None, None, None, "s"]),
        "params": PARAMS,
        "priority": st.integers(0, 2),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([*[None] * 8, 1]),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "windows": st.sampled_from(
            [(0,), (0,), (0, 40), (64,), (0, 24), (0, 17, 40), (STATE, 0), (0, STATE, 40)]
        ),
        "depth": st.sampled_from([1, 2]),
        "chunk_blocks": st.sampled_from([1, 1, 2, 3]),
        "num_blocks": st.sampled_from([14, 20, 40, 80]),
        "capacity_chunks": st.sampled_from([4, 12, 40, 200]),
        "max_num_batched_tokens": st.sampled_from([48, 100, 256]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 40]),
        "max_num_seqs": st.sampled_from([2, 8]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "runner": st.sampled_from([Runner.SAVE_FIRST, *Runner]),
        "v2": st.booleans(),
        "drafts": st.sampled_from([0, 0, 3]),
        "ranks": st.sampled_from([1, 2]),
        "role": st.sampled_from(["kv_both", "kv_both", "kv_producer"]),
        "policy": st.sampled_from(["recompute", "recompute", "recompute", "fail"]),
        "store_generated": st.sampled_from([True, True, False]),
        "trust_after_reset": st.sampled_from([False, False, False, True]),
        "gate": st.sampled_from(["always", "always", "measured"]),
        "taught": st.sampled_from([None, (1e-9, 1e-9), (1e-9, 1e-3), (1e-3, 1e-3)]),
        "neighbour": st.sampled_from(["", "", "first", "second"]),
        "pace": st.sampled_from(list(Pace)),
        "every_step": st.booleans(),
        "disk_chunks": st.sampled_from([None, None, 6, 30, 400, 400]),
        "disk": st.fixed_dictionaries(
            {
                "shared": st.booleans(),
                "store_after": st.sampled_from([1, 1, 1, 2]),
                "min_tokens": st.sampled_from([0, 0, 0, 40]),
            }
        ),
        "hasty": st.sampled_from([False, False, True]),
        "peers": st.sampled_from(["", "", "", "", "trusted", "compared"]),
    }
)
