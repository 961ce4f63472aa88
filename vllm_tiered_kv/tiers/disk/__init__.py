# SPDX-License-Identifier: Apache-2.0
"""Chunks in files.

One file holds one KV cache group's part of one chunk, of one rank::

    root/<namespace>/identity.json
    root/<namespace>/r<rank>/<ab>/<key in hex>.<group>.kv
    root/<namespace>/r<rank>/tmp/<token>.tmp

`ab` are the key's first two digits. Nothing here imports vLLM or torch, and nothing here may run on
vLLM's scheduler thread: every call may wait for a disk.
"""
