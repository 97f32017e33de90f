"""From a tree and tensors back to values, built anew."""

from __future__ import annotations

import base64
import collections
import pickle
import struct
from typing import Any, Callable

from ._errors import CheckpointInvalid
from ._keyed import FACTORIES
from ._leaf import SIZES, torch_dtype
from ._tensors import Node, Tensors


class Builder:
    """Builds values from a tree and the tensors that were read."""

    def __init__(self, tensors: Tensors, allow_pickle: bool) -> None:
        self.tensors = tensors
        self._allow_pickle = allow_pickle

    def build(self, node: Node) -> Any:
        """The value of a tree; objects come as their state dicts."""
        if isinstance(node, list):
            return [self.build(part) for part in node]
        if not isinstance(node, dict):
            return node
        build = _BUILDERS.get(node.get("t", ""))
        if build is None:
            raise CheckpointInvalid(f"the state holds a `{node.get('t')}`, which this version does not know")
        return build(self, node)

    def keys(self, pairs: list[list[Node]]) -> list[Any]:
        """The keys of a dict, which have to be known before anything else is read: what the step has of them is read here."""
        built = [key for key, _ in pairs if isinstance(key, dict)]
        if built:
            self.refuse_pickles(built)
            self.tensors.read_now(built)
        return [self.build(key) for key, _ in pairs]

    def items(self, pairs: list[list[Node]]) -> dict[Any, Node]:
        """The values of a dict by its keys, as `keys` gives these."""
        return {key: value for key, (_, value) in zip(self.keys(pairs), pairs)}

    def refuse_pickles(self, node: Node) -> None:
        """Raises `CheckpointInvalid` where a tree holds a pickle that is not to be loaded: `build` would, once tensors were
        read into their places."""
        todo = [] if self._allow_pickle else [node]
        while todo:
            node = todo.pop()
            if isinstance(node, list):
                todo += node
            elif isinstance(node, dict):
                if node.get("t") == "pickle":
                    raise CheckpointInvalid(_PICKLED.format(node["n"]))
                todo.append(node.get("v"))

    def _tensor(self, node: Node) -> Any:
        live = self.tensors.apart(node)
        if live is not None:
            return live
        if "view" not in node:
            return self.tensors.get("tensor", node["n"])
        return self.tensors.view(node["n"], *node["view"])

    def _scalar(self, node: Node) -> Any:
        import numpy

        data = bytes.fromhex(node["v"])
        if SIZES[node["d"]] != len(data):
            raise ValueError(f"{len(data)} bytes")
        return numpy.frombuffer(data, dtype=node["d"])[0]

    def _bytes(self, node: Node) -> bytes:
        if "n" in node:
            return bytes(self.tensors.get("bytes", node["n"]))
        return base64.b64decode(node["v"])

    def _unpickle(self, node: Node) -> Any:
        if not self._allow_pickle:
            raise CheckpointInvalid(_PICKLED.format(node["n"]))
        return pickle.loads(self._bytes(node))

    def _size(self, node: Node) -> Any:
        import torch

        return torch.Size(node["v"])

    def _dtype(self, node: Node) -> Any:
        return torch_dtype(node["v"])

    def _device(self, node: Node) -> Any:
        import torch

        return torch.device(str(node["v"]))

    def _items(self, node: Node) -> Any:
        return ((self.build(key), self.build(value)) for key, value in node["v"])


_PICKLED = (
    "the state holds a pickled object ({!r}), and loading it can run any code; "
    "pass allow_pickle=True if you trust whoever saved it"
)

_BUILDERS: dict[str, Callable[[Builder, Node], Any]] = {
    "float": lambda builder, node: struct.unpack(">d", bytes.fromhex(node["v"]))[0],
    "str": lambda builder, node: bytes.fromhex(node["v"]).decode("utf-8", "surrogatepass"),
    "bytes": Builder._bytes,
    "bytearray": lambda builder, node: bytearray(builder._bytes(node)),
    "complex": lambda builder, node: complex(*builder.build(node["v"])),
    "dict": lambda builder, node: dict(builder._items(node)),
    "odict": lambda builder, node: collections.OrderedDict(builder._items(node)),
    # One that is given pairs counts these.
    "counter": lambda builder, node: collections.Counter(dict(builder._items(node))),
    "defaultdict": lambda builder, node: collections.defaultdict(FACTORIES[node["f"]], builder._items(node)),
    "tuple": lambda builder, node: tuple(builder.build(node["v"])),
    "set": lambda builder, node: set(builder.build(node["v"])),
    "frozenset": lambda builder, node: frozenset(builder.build(node["v"])),
    "tensor": Builder._tensor,
    "array": lambda builder, node: builder.tensors.get("array", node["n"]),
    "scalar": Builder._scalar,
    "size": Builder._size,
    "dtype": Builder._dtype,
    "device": Builder._device,
    "object": lambda builder, node: builder.build(node["v"]),
    "pickle": Builder._unpickle,
}
