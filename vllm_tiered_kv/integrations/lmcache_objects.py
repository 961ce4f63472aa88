# SPDX-License-Identifier: Apache-2.0
"""What LMCache's keys and memory are to the object store. Does not import LMCache.

An object's file is found by all of LMCache's key (``ObjectKey`` in lmcache/v1/distributed/api.py)
and by its memory's shapes and types, which the key does not tell: KV of another type is not found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec

from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.objects.memory import copy
from vllm_tiered_kv.tiers.objects.names import (
    Family,
    ObjectId,
    family_of,
    namespace_of,
    object_key,
    salt_digest,
    split_key,
    valid_group,
)

HOME = "lmcache"
RAW = "raw"
"""The layout of bytes without a form, such as those that LMCache's serializers make."""
MAX_REMEMBERED = 1 << 16
"""Models, layouts and salts each."""


class LMCacheKey(Protocol):
    """What is read of an ``ObjectKey``."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


class Listed(msgspec.Struct, frozen=True):
    """A key as far as a file's name tells it."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a namespace's ``identity.json`` says."""

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    layout: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    model: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    revision: Annotated[str, msgspec.Meta(max_length=1 << 16)] = ""


_identity = msgspec.json.Decoder(Identity)


class Names:
    """Names of files for keys, and back. Thread-safe: every step is one operation on a dict.

    Args:
        revision: what else than LMCache's key the bytes depend on.
    """

    def __init__(self, revision: str) -> None:
        self._revision = revision
        self._prefixes: OrderedDict[str, str] = OrderedDict()  # by model
        self._models: OrderedDict[str, str] = OrderedDict()  # by prefix
        self._namespaces: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._salts: OrderedDict[bytes, str] = OrderedDict()
        _remember(self._salts, salt_digest(""), "")

    def object_id(self, key: LMCacheKey) -> ObjectId | None:
        """None for a key that cannot be kept."""
        packed = object_key(key.chunk_hash, key.kv_rank, key.cache_salt)
        if packed is None or not valid_group(key.object_group_id):
            return None
        if key.cache_salt:
            _remember(self._salts, salt_digest(key.cache_salt), key.cache_salt)
        return ObjectId(self._prefix(key.model_name), key.object_group_id, packed)

    def namespace(self, family: str, layout: str) -> str:
        """The namespace of a family's objects of one layout."""
        known = self._namespaces.get((family, layout))
        if known is None:
            known = namespace_of(family, layout)
            _remember(self._namespaces, (family, layout), known)
        return known

    def places(self, name: ObjectId, layout: str | None) -> tuple[str, ...]:
        """The namespaces an object may be in; empty for any of its family."""
        if layout is None:
            return ()
        return self.namespace(name.family, layout), self.namespace(name.family, RAW)

    def identity(self, model: str, layout: str) -> Mapping[str, object]:
        """A namespace in plain words."""
        identity = Identity(HOME, layout, model, self._revision)
        return dict(msgspec.structs.asdict(identity))

    def model_of(self, namespace: str, identity: bytes | None) -> str | None:
        """The model of a namespace's objects, as far as is known.

        Args:
            namespace: of this store, with this revision or another.
            identity: the content of its ``identity.json``, believed if it fits the namespace.
        """
        model = self._models.get(family_of(namespace))
        if model is not None or identity is None:
            return model
        try:
            said = _identity.decode(identity)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        family = Family(said.kind, said.model, said.revision).prefix
        if namespace_of(family, said.layout) != namespace:
            return None
        _remember(self._models, family, said.model)
        return said.model

    def listed(self, file: FileName, model: str) -> Listed | None:
        """The key of a file; None if its salt has not been seen, or it is none of ours."""
        parts = split_key(file.key)
        salt = None if parts is None else self._salts.get(parts.salt)
        if parts is None or salt is None:
            return None
        return Listed(parts.chunk_hash, model, parts.rank, file.group, salt)

    def is_ours(self, namespace: str) -> bool:
        """Whether objects of LMCache are in a namespace."""
        return namespace.startswith(f"{HOME}-")

    def _prefix(self, model: str) -> str:
        known = self._prefixes.get(model)
        if known is None:
            known = Family(HOME, model, self._revision).prefix
            _remember(self._prefixes, model, known)
            _remember(self._models, known, model)
        return known


def layout_text(shapes: Sequence[Sequence[int]], dtypes: Sequence[object]) -> str | None:
    """Shapes and types in plain words, such as ``bfloat16[2,8,256,64]``; None where none is said.

    Args:
        shapes: of the parts of an object.
        dtypes: as many, torch's.
    """
    if not shapes or len(shapes) != len(dtypes):
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if names == ["uint8"] and len(shapes[0]) == 1:
        return RAW
    pairs = zip(names, shapes, strict=True)
    return ";".join(f"{name}[{','.join(str(int(n)) for n in shape)}]" for name, shape in pairs)


def layout_of(memory: Any) -> str:
    """The layout of a ``MemoryObj`` (lmcache/v1/memory_management.py)."""
    meta = memory.meta
    if meta.shapes is not None and meta.dtypes is not None:
        return layout_text(meta.shapes, meta.dtypes) or RAW
    return layout_text([meta.shape], [meta.dtype]) or RAW


class ObjectMemory:
    """A ``MemoryObj`` as the object store sees it.

    Raises:
        Exception: it has no bytes in host memory.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._view = memoryview(memory.byte_array).cast("B")
        self.nbytes = self._view.nbytes

    def read(self, into: memoryview) -> bool:
        copy(into, self._view)
        # Freed meanwhile, and maybe another's: LMCache lets go of what it waits for when it stops.
        return bool(self._memory.is_valid())

    def write(self, content: memoryview) -> bool:
        if not self._memory.is_valid():
            return False
        copy(self._view, content)
        return True


def _remember(known: OrderedDict[Any, str], key: object, value: str) -> None:
    known[key] = value
    while len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
