# SPDX-License-Identifier: Apache-2.0
"""Another cache's objects in the disk tier's files: stored, looked up and loaded asynchronously.

A host program hands over memory and names; what it gets are this project's files, checksums and
quota. Each object is one file::

    root/<kind>-<family>-<layout>/r0/<ab>/<key in hex>.<group>.kv

`family` stands for the model, `layout` for shapes and types: both are digests, which the folder's
`identity.json` gives in plain words. Nothing here imports vLLM, torch or the host.
"""
