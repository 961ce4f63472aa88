# SPDX-License-Identifier: Apache-2.0
"""Time to first token of prompts that come back after every process was ended and started anew.

    python -m benchmarks.ab_ttft.restart [--quick]

First each arm stores all prompts of the run. Then, round by round and arm by arm: its processes
are started, one unrelated prompt is asked twice, and the round's prompts are asked once each. What
they need lies in files only, and nothing of those is in the page cache: it is dropped, and looked
at, before every start, and of every answer it is known how many bytes were read from the device.
"""
