# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from vllm_tiered_kv.config import ConfigError
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.tiers.objects.settings import parse_object_options, tier_settings

LEAST = {"path": "/mnt/kv", "capacity": "1GiB"}


def parsed(**changes: Any) -> Any:
    return parse_object_options({**LEAST, **changes}, "adapter_params")


def test_the_least_that_can_be_given() -> None:
    options = parsed()
    settings = tier_settings(options)
    assert (settings.root, settings.capacity, settings.min_free) == ("/mnt/kv", 1 << 30, 1 << 30)
    assert options.eviction is Eviction.LRU
    assert options.max_queued is None


def test_sizes_and_names_are_read_as_elsewhere() -> None:
    options = parsed(min_free="2GB", eviction="s3fifo", max_queued=1000, revision="r2")
    assert (options.min_free, options.max_queued) == (2_000_000_000, 1000)
    assert options.eviction is Eviction.S3FIFO


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"capacity": "1GiB"}, "path: required, but not given"),
        ({"path": "/kv"}, "capacity: required, but not given"),
        (
            {**LEAST, "capcity": 1},
            "capcity: unknown key (value 1); the nearest valid key is 'capacity'",
        ),
        ({**LEAST, "base_path": "/x"}, "the nearest valid key is 'path'"),
        ({**LEAST, "min_tokens": 3}, "min_tokens: unknown key"),
        ({**LEAST, "path": "kv"}, "path: 'kv' must be an absolute path"),
        ({**LEAST, "path": "/kv\ud800"}, "must be an absolute path"),
        ({**LEAST, "capacity": "1GX"}, "capacity: '1GX' is not valid: unknown unit"),
        ({**LEAST, "capacity": 4096}, "capacity: 4096 must be at least"),
        ({**LEAST, "eviction": "mru"}, "expected one of lru, s3fifo, arc, cost"),
        ({**LEAST, "low_water": 0.99}, "low_water: 0.99 must be above 0 and at most high_water"),
        ({**LEAST, "io_deadline": 0}, "io_deadline: 0.0 must be from 0.1"),
        ({**LEAST, "io_deadline": 121}, "io_deadline: 121.0 must be at most 120 seconds"),
        ({**LEAST, "readers": 0}, "readers: 0 must be from 1 to 64"),
        ({**LEAST, "writers": 65}, "writers: 65 must be from 1 to 64"),
        ({**LEAST, "writers": "2"}, "writers: '2' is not valid"),
        ({**LEAST, "shared": "yes"}, "shared: 'yes' is not valid"),
        ({**LEAST, "revision": "x" * 257}, "revision: must have at most 256"),
        ([], "adapter_params: expected an object, got []"),
    ],
)
def test_a_mistake_names_the_key(raw: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_object_options(raw, "adapter_params")
    assert said in str(error.value)
