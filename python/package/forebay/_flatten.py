"""A state as a JSON tree and a list of tensors.

The tree says what the state is made of; its leaves name tensors. Plain JSON stands for itself (null, booleans,
numbers, strings, arrays for lists); everything else is an object with the tag `t`, listed in
docs/formats-checkpoint.md. Nothing is written before the whole state was understood.
"""

from __future__ import annotations

import base64
import collections
import fnmatch
import json
import math
import pickle
import struct
from collections.abc import Sequence
from typing import Any, Optional

from ._hints import hint_for, hint_for_key, hint_for_tensor
from ._keyed import TAGS, factory_name
from ._leaf import (
    PARTITIONED,
    Leaf,
    array_dtype,
    array_leaf,
    bytes_leaf,
    is_partitioned,
    is_same,
    layout_of,
    local_parts,
    numpy_module,
    part_leaves,
    partitioned,
    plain_kinds,
    tensor_dtype,
    tensor_leaf,
    torch_module,
)
from ._objects import Pairs, buffer_addresses, is_stateful, state_of
from ._ties import Ties

INLINE_BYTES = 256
"""Byte strings up to this length lie in the tree; longer ones are tensors of bytes."""

LATE_BYTES = 4096
"""Smaller tensors are copied at once: it costs nothing, and a scheduler may change a learning rate at any time."""

MAX_DEPTH = 200
"""Containers and objects within each other; Python goes about as deep when it takes them apart and builds them."""

Node = Any
"""A part of the tree: what `json` reads and writes."""


class Flattener:
    """Takes one state apart."""

    def __init__(self, allow_pickle: bool, replicated: Sequence[str] = ()) -> None:
        self.leaves: list[Leaf] = []
        self.ties: Ties = {}
        """Of each tensor that several ranks hold, which one of this rank it is: all of them have leaves."""
        self._allow_pickle = allow_pickle
        self._replicated = replicated
        self._is_replicated = False
        self._ignored: frozenset[int] = frozenset()
        self._buffers: frozenset[int] = frozenset()
        self._plain = plain_kinds()
        self._names: set[str] = set()
        self._tensors: dict[Any, str] = {}
        self._classes: dict[Any, int] = {}
        self._starts: dict[int, list[Leaf]] = {}
        self._nodes: dict[str, list[Node]] = {}
        self._spread_nodes: list[Node] = []
        self._trees: list[Node] = []
        self._open: set[int] = set()
        self._pairs = Pairs(())
        self._late: frozenset[int] = frozenset()
        self._is_late = False
        self._is_hashed = False

    def tree(self, root: str, value: Any, name: str = "") -> str:
        """The tree of `value` as JSON text; its tensors are added to `leaves`, with names that begin with `name`."""
        self._pairs = Pairs(value)
        self._late = self._pairs.parameter_addresses()
        before = len(self.leaves)
        node = self._node(value, root, name)
        self._share_storage(self.leaves[before:])
        self._trees.append(node)
        return _as_json(node)

    def renamed(self, aliases: dict[str, str]) -> list[str]:
        """The trees, with other names in the stead of some that several ranks hold."""
        for node in self._spread_nodes:
            node["n"] = aliases.get(node["n"], node["n"])
        return [_as_json(node) for node in self._trees]

    def _node(self, value: Any, path: str, name: str) -> Node:
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind in self._plain:
            return self._tensor(value, path.replace(_OBJECT, ""), name)
        if kind is int:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"t": "float", "v": struct.pack(">d", value).hex()}
        if kind is str:
            return self._text(value)
        if kind is bytes or kind is bytearray:
            return self._bytes(kind.__name__, bytes(value), path, name)
        if kind is complex:
            parts = [self._node(part, path, name) for part in (value.real, value.imag)]
            return {"t": "complex", "v": parts}
        if kind in _CONTAINERS and (kind is not collections.defaultdict or factory_name(value) is not None):
            return self._container(value, path, name)
        return self._foreign(value, path, name)

    @staticmethod
    def _text(value: str) -> Node:
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"t": "str", "v": value.encode("utf-8", "surrogatepass").hex()}
        return value

    def _bytes(self, tag: str, data: bytes, path: str, name: str) -> Node:
        if len(data) <= INLINE_BYTES:
            return {"t": tag, "v": base64.b64encode(data).decode()}
        leaf = bytes_leaf(self.unique(name), path, data)
        self.leaves.append(leaf)
        return {"t": tag, "n": leaf.name}

    def _container(self, value: Any, path: str, name: str) -> Node:
        self._enter(value, path)
        was = self._is_hashed
        self._is_hashed = was or isinstance(value, (set, frozenset))
        try:
            if isinstance(value, dict):
                items = [self._item(key, item, path, name) for key, item in value.items()]
                made = {"f": factory_name(value)} if type(value) is collections.defaultdict else {}
                return {"t": TAGS[type(value)], **made, "v": items}
            parts = [self._node(part, f"{path}[{index}]", _join(name, str(index))) for index, part in enumerate(value)]
            return parts if type(value) is list else {"t": _CONTAINERS[type(value)], "v": parts}
        finally:
            self._is_hashed = was
            self._open.discard(id(value))

    def _enter(self, value: Any, path: str) -> None:
        if id(value) in self._open:
            raise TypeError(f"{path}: it contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise TypeError(f"{path[:80]}...: nested deeper than {MAX_DEPTH} levels")
        self._open.add(id(value))

    def _item(self, key: Any, value: Any, path: str, name: str) -> Node:
        here = f"{path}.{key}" if path.endswith(_OBJECT) else f"{path}[{key!r}]"
        here = here.replace(_OBJECT, "")
        if not isinstance(key, _KEYS):
            raise TypeError(f"{here}: a key of type {_type_name(key)} cannot be saved; {hint_for_key(key)}")
        if type(key) is str and key.isascii():
            return [key, self._node(value, here, _join(name, key))]
        return [self._key(key, here), self._node(value, here, _join(name, str(key)))]

    def _key(self, key: Any, path: str) -> Node:
        was, self._is_hashed = self._is_hashed, True
        try:
            return self._node(key, path, "")
        finally:
            self._is_hashed = was

    def _foreign(self, value: Any, path: str, name: str) -> Node:
        node = self._torch(value, path, name)
        if node is None:
            node = self._numpy(value, path, name)
        if node is not None:
            return node
        if is_stateful(value):
            return self._object(value, path, name)
        if self._allow_pickle:
            return self._pickle(value, path, name)
        text = f"object of type {_type_name(value)} cannot be saved; {hint_for(value)}"
        raise TypeError(f"{path.replace(_OBJECT, '')}: {text}")

    def _torch(self, value: Any, path: str, name: str) -> Optional[Node]:
        torch = torch_module()
        if torch is None:
            return None
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path.replace(_OBJECT, ""), name)
        if isinstance(value, torch.Size):
            return {"t": "size", "v": list(value)}
        if isinstance(value, torch.dtype):
            return {"t": "dtype", "v": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"t": "device", "v": str(value)}
        return None

    def _tensor(self, value: Any, path: str, name: str) -> Node:
        # An object that was asked for its state may have brought torch in.
        self._plain = self._plain or plain_kinds()
        is_plain = type(value) in self._plain
        if is_partitioned(value):
            raise TypeError(f"{path}: {PARTITIONED}")
        if not is_plain and local_parts(value) is not None:
            return self._spread(value, path, name)
        dtype = tensor_dtype(value) if is_plain else None
        if dtype is None:
            what = f"{layout_of(value)} tensor of {value.dtype} on {value.device}"
            hint = hint_for_tensor(value, is_plain)
            raise TypeError(f"{path}: object of type {_type_name(value)} ({what}) cannot be saved (hint: {hint})")
        # What has no elements is nowhere, and one address is said of all of it.
        known = [] if value.numel() == 0 else self._starts.setdefault(value.data_ptr(), [])
        for leaf in known:
            if is_same(leaf.source, value):
                return self._reference(leaf.name)
        leaf = tensor_leaf(self.unique(name), path, value, dtype)
        self._place(leaf)
        leaf.is_late = self._may_wait(leaf)
        self.leaves.append(leaf)
        known.append(leaf)
        return self._reference(leaf.name)

    def _spread(self, value: Any, path: str, name: str) -> Node:
        """A tensor that several ranks hold together. Whether it is one that has a name already, they say together."""
        leaves = part_leaves(name, path, value)
        unique = self.unique(name)
        for leaf in leaves:
            leaf.name = unique
            leaf.is_late = self._may_wait(leaf)
        self.leaves += leaves
        # What has no elements on any rank is told apart by none.
        like: Any = unique if 0 in value.shape else tuple(map(_place_of, leaves))
        identity = (type(value), str(value.dtype), value.shape, like)
        self.ties[unique] = self._classes.setdefault(identity, len(self._classes))
        node = {"t": "tensor", "n": unique}
        self._spread_nodes.append(node)
        return node

    def _may_wait(self, leaf: Leaf) -> bool:
        """Whether only an optimizer's step changes it, and it can be copied behind the training's back."""
        is_dense = leaf.address is not None or leaf.device_address is not None
        is_worth_it = leaf.size >= LATE_BYTES and leaf.version is not None and is_dense
        return is_worth_it and (self._is_late or leaf.source.data_ptr() in self._late)

    def _place(self, leaf: Leaf) -> None:
        """Whether other ranks have a plain tensor as well: those of DDP, and those that the user named."""
        named = self._replicated and any(fnmatch.fnmatchcase(leaf.name, pattern) for pattern in self._replicated)
        if named or (self._is_replicated and leaf.source.data_ptr() not in self._ignored):
            # DDP keeps parameters equal; of buffers it takes rank 0's.
            leaf.placement = "lead" if leaf.source.data_ptr() in self._buffers else "replicated"

    def _reference(self, name: str) -> Node:
        node = {"t": "tensor", "n": name}
        self._nodes.setdefault(name, []).append(node)
        return node

    def _share_storage(self, leaves: list[Leaf]) -> None:
        """Tensors that are views into another one of `leaves` refer to it: their bytes are stored once."""
        if not _overlap([leaf for leaf in leaves if leaf.part is None]):
            return
        storages: dict[int, list[Leaf]] = {}
        for leaf in leaves:
            if leaf.name in self._nodes and leaf.size > 0:
                storages.setdefault(leaf.source.untyped_storage().data_ptr(), []).append(leaf)
        groups: dict[Any, list[Leaf]] = {}
        for leaf in (leaf for shared in storages.values() if len(shared) > 1 for leaf in shared):
            source = leaf.source
            if not (source.is_conj() or source.is_neg()):
                where = (source.device, source.untyped_storage().data_ptr(), leaf.dtype, leaf.placement)
                groups.setdefault(where, []).append(leaf)
        dropped: set[int] = set()
        for group in groups.values():
            whole = [leaf for leaf in group if leaf.source.is_contiguous()]
            if not whole:
                continue
            base = max(whole, key=lambda leaf: leaf.size)
            for leaf in group:
                offset = leaf.source.storage_offset() - base.source.storage_offset()
                reach = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.source.stride()))
                if leaf is base or offset < 0 or offset + reach >= base.source.numel():
                    continue
                for node in self._nodes.pop(leaf.name):
                    node.update(n=base.name, view=[leaf.shape, list(leaf.source.stride()), offset])
                dropped.add(id(leaf))
        self.leaves[:] = [leaf for leaf in self.leaves if id(leaf) not in dropped]

    def _numpy(self, value: Any, path: str, name: str) -> Optional[Node]:
        numpy = numpy_module()
        if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
            return None
        dtype = array_dtype(value)
        is_scalar = isinstance(value, numpy.generic)
        if dtype is None or not (is_scalar or type(value) in (numpy.ndarray, numpy.memmap)):
            if self._allow_pickle:
                return None
            text = f"object of type {_type_name(value)} of {value.dtype} cannot be saved; {hint_for(value)}"
            raise TypeError(f"{path.replace(_OBJECT, '')}: {text}")
        if is_scalar:
            return {"t": "scalar", "d": dtype, "v": value.tobytes().hex()}
        identity = (value.ctypes.data, "array", dtype, value.shape, value.strides)
        if value.size > 0 and identity in self._tensors:
            return {"t": "array", "n": self._tensors[identity]}
        leaf = array_leaf(self.unique(name), path.replace(_OBJECT, ""), value, dtype)
        self.leaves.append(leaf)
        self._tensors[identity] = leaf.name
        return {"t": "array", "n": leaf.name}

    def _object(self, value: Any, path: str, name: str) -> Node:
        if self._is_hashed:
            # Its state would come back in its stead, which no set and no key can hold.
            hint = "an object with a state is saved as a value of a dict, or in a list or tuple"
            text = f"object of type {_type_name(value)} in a set or a key cannot be saved; {hint}"
            raise TypeError(f"{path.replace(_OBJECT, '')}: {text}")
        self._refuse_partitioned(value, path)
        self._enter(value, path.replace(_OBJECT, ""))
        kind, state = state_of(value, self._pairs)
        was = self._is_late, self._is_replicated, self._ignored, self._buffers
        self._is_late = self._is_late or kind in ("optimizer", "optimizer-own")
        if self._pairs.is_replicated(value):
            self._is_replicated, self._ignored = True, self._pairs.ignored_addresses(value)
        self._buffers = self._buffers | buffer_addresses(value)
        try:
            return {"t": "object", "k": kind, "v": self._node(state, path + _OBJECT, name)}
        finally:
            self._is_late, self._is_replicated, self._ignored, self._buffers = was
            self._open.discard(id(value))

    @staticmethod
    def _refuse_partitioned(value: Any, path: str) -> None:
        torch = torch_module()
        name = partitioned(value) if torch is not None and isinstance(value, torch.nn.Module) else None
        if name is not None:
            raise TypeError(f"{path.replace(_OBJECT, '')}.{name}: {PARTITIONED}")

    def _pickle(self, value: Any, path: str, name: str) -> Node:
        path = path.replace(_OBJECT, "")
        try:
            data = pickle.dumps(value, protocol=4)
        except Exception as error:
            raise TypeError(f"{path}: object of type {_type_name(value)} cannot be pickled: {error}") from error
        leaf = bytes_leaf(self.unique(name), path, data)
        self.leaves.append(leaf)
        return {"t": "pickle", "n": leaf.name}

    def unique(self, name: str) -> str:
        """`name`, or with a number where another tensor has it."""
        base = name or "state"
        if not base.isascii() or "#" in base or "@" in base:
            base = base.translate(KEPT).encode("utf-8", "replace").decode()
        unique, number = base, 2
        while unique in self._names or unique == "__metadata__":
            unique, number = f"{base}~{number}", number + 1
        self._names.add(unique)
        return unique


KEPT = {ord("#"): "_", ord("@"): "_"}
"""Characters that the engine keeps for itself: for parts, and for tensors of one rank."""

_OBJECT = "\0"
"""Ends the path of an object whose state follows: its first keys are shown as attributes."""

_CONTAINERS: dict[type, str] = {
    **TAGS,
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
}
_KEYS = (str, int, float, bool, type(None), tuple)


def _overlap(leaves: list[Leaf]) -> bool:
    """Whether a tensor may begin inside of another one: without that no view is found, and storages need not be asked
    for."""
    end = 0
    tensors = (leaf for leaf in leaves if hasattr(leaf.source, "data_ptr"))
    for start, size in sorted((leaf.source.data_ptr(), leaf.size) for leaf in tensors):
        if size > 0:
            if start < end:
                return True
            end = start + size
    return False


def _place_of(leaf: Leaf) -> tuple[Any, ...]:
    """Which elements a part of a tensor is, and which in memory; all places are one for what has none."""
    box, source = tuple(map(tuple, leaf.part or ())), leaf.source
    if leaf.size == 0:
        return (box,)
    return box, source.device, source.data_ptr(), source.stride(), source.is_conj(), source.is_neg()


def _as_json(node: Node) -> str:
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _type_name(value: Any) -> str:
    kind = type(value)
    if kind is collections.defaultdict:
        made = value.default_factory
        return f"collections.defaultdict of {made.__qualname__ if hasattr(made, '__qualname__') else _type_name(made)}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
