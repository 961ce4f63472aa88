# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_tiered_kv.cli``."""

from vllm_tiered_kv.cli.app import main

if __name__ == "__main__":
    main()
