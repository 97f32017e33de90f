"""From a tree and tensors back to a state: built anew, or put in place into a live one.

A live state is changed only after every byte was read, checked, and found to fit: a restore that fails leaves it as
it was.
"""

from __future__ import annotations

import base64
import collections
import pickle
import struct
from functools import partial
from typing import Any, Callable, Iterator, Optional

from . import _native
from ._errors import CheckpointCorrupt, CheckpointInvalid, CheckpointMismatch
from ._leaf import array_dtype, numpy_module, tensor_dtype, torch_module
from ._objects import Pairs, give_state, is_stateful, state_of

Node = Any


class Tensors:
    """The tensors of a step, read into fresh memory on `read`."""

    def __init__(self, step: _native.Step) -> None:
        self._step = step
        self._entries = {name: (index, dtype, shape) for index, (name, dtype, shape, _) in enumerate(step.tensors())}
        self._loaded: dict[tuple[str, str], Any] = {}

    def want(self, node: Node) -> None:
        """Notes every tensor that a tree names."""
        if isinstance(node, list):
            for part in node:
                self.want(part)
        elif isinstance(node, dict):
            tag = node.get("t")
            if "n" in node:
                self._allocate("tensor" if tag == "tensor" else "array", node["n"])
            self.want(node.get("v") if tag != "bytes" else None)

    def read(self) -> None:
        """Reads what was noted. Raises `CheckpointCorrupt` when any of it is not what was saved."""
        targets = []
        for (kind, name), value in self._loaded.items():
            address = value.data_ptr() if kind == "tensor" else value.ctypes.data
            size = value.numel() * value.element_size() if kind == "tensor" else value.nbytes
            targets.append((self._entries[name][0], address, size))
        self._step.read(targets)

    def get(self, kind: str, name: str) -> Any:
        """A tensor or array that was read."""
        return self._loaded[kind, name]

    def _allocate(self, kind: str, name: str) -> None:
        if name not in self._entries:
            raise CheckpointCorrupt(f"step {self._step.step}: its state names tensor `{name}`, which it does not hold")
        if (kind, name) in self._loaded:
            return
        _, dtype, shape = self._entries[name]
        if kind == "tensor":
            import torch

            self._loaded[kind, name] = torch.empty(shape, dtype=getattr(torch, dtype))
        else:
            import numpy

            self._loaded[kind, name] = numpy.empty(shape, dtype=dtype)


class Builder:
    """Builds values from a tree and the tensors that were read."""

    def __init__(self, tensors: Tensors, allow_pickle: bool) -> None:
        self._tensors = tensors
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

    def _tensor(self, node: Node) -> Any:
        tensor = self._tensors.get("tensor", node["n"])
        if "view" not in node:
            return tensor
        shape, stride, offset = node["view"]
        return tensor.as_strided(shape, stride, offset)

    def _scalar(self, node: Node) -> Any:
        import numpy

        return numpy.frombuffer(bytes.fromhex(node["v"]), dtype=node["d"])[0]

    def _bytes(self, node: Node) -> bytes:
        if "n" in node:
            return bytes(self._tensors.get("array", node["n"]).tobytes())
        return base64.b64decode(node["v"])

    def _unpickle(self, node: Node) -> Any:
        if not self._allow_pickle:
            raise CheckpointInvalid(
                "the state holds a pickled object, and loading it can run any code; "
                "pass allow_pickle=True if you trust whoever saved it"
            )
        return pickle.loads(self._bytes(node))

    def _size(self, node: Node) -> Any:
        import torch

        return torch.Size(node["v"])

    def _dtype(self, node: Node) -> Any:
        import torch

        return getattr(torch, node["v"])

    def _device(self, node: Node) -> Any:
        import torch

        return torch.device(node["v"])

    def _items(self, node: Node) -> Any:
        return ((self.build(key), self.build(value)) for key, value in node["v"])


_BUILDERS: dict[str, Callable[[Builder, Node], Any]] = {
    "float": lambda builder, node: struct.unpack(">d", bytes.fromhex(node["v"]))[0],
    "str": lambda builder, node: bytes.fromhex(node["v"]).decode("utf-8", "surrogatepass"),
    "bytes": Builder._bytes,
    "bytearray": lambda builder, node: bytearray(builder._bytes(node)),
    "complex": lambda builder, node: complex(*builder.build(node["v"])),
    "dict": lambda builder, node: dict(builder._items(node)),
    "odict": lambda builder, node: collections.OrderedDict(builder._items(node)),
    "tuple": lambda builder, node: tuple(builder.build(node["v"])),
    "set": lambda builder, node: set(builder.build(node["v"])),
    "frozenset": lambda builder, node: frozenset(builder.build(node["v"])),
    "tensor": Builder._tensor,
    "array": lambda builder, node: builder._tensors.get("array", node["n"]),
    "scalar": Builder._scalar,
    "size": Builder._size,
    "dtype": Builder._dtype,
    "device": Builder._device,
    "object": lambda builder, node: builder.build(node["v"]),
    "pickle": Builder._unpickle,
}


class Placer:
    """Plans how a tree goes into a live state, and then does it.

    `plan` changes nothing; it raises `CheckpointMismatch` at the first place where the two differ in shape.
    """

    def __init__(self, builder: Builder, state: Any) -> None:
        self._builder = builder
        self._state = state
        self._pairs = Pairs(state)
        self._objects: list[tuple[str, Any, str, Node]] = []
        self._copies: list[Callable[[], Any]] = []
        self._in_place: dict[str, Callable[[Node, Any, str], None]] = {
            "tensor": self._place_tensor,
            "array": self._place_array,
            "dict": self._place_items,
            "odict": self._place_items,
        }

    def plan(self, node: Node) -> None:
        """Compares the tree with the live state."""
        # A tensor or object at the root is its own place; anything immutable there could not be replaced.
        if self._place(node, self._state, "state") is not None:
            raise CheckpointMismatch("state: a value that cannot be changed in place")

    def apply(self) -> None:
        """Puts everything into place; optimizers first, so that nothing they do on loading stays in a parameter."""
        states = [(path, value, kind, self._builder.build(node)) for path, value, kind, node in self._objects]
        states.sort(key=lambda entry: not entry[2].startswith("optimizer"))
        for copy in self._copies:
            copy()
        for path, value, kind, state in states:
            try:
                give_state(value, kind, state, self._pairs)
            except Exception as error:
                raise CheckpointMismatch(f"{path}: it does not take the state that was saved: {error}") from error

    def _place(self, node: Node, live: Any, path: str) -> Optional[Callable[[], Any]]:
        """None where the live value is changed in place; else what gives the value to put in its stead."""
        tag = node.get("t") if isinstance(node, dict) else None
        if tag == "object":
            if not is_stateful(live):
                raise _mismatch(path, "an object with a state", live)
            if node["k"] == "module":
                self._check_module(node["v"], live, path)
            self._objects.append((path, live, node["k"], node["v"]))
            return None
        in_place = self._in_place.get(tag or "")
        if in_place is not None:
            in_place(node, live, path)
            return None
        if isinstance(node, list) or tag == "tuple":
            return self._place_sequence(node, live, path)
        if torch_like(live) or is_stateful(live):
            raise _mismatch(path, f"a value ({tag or type(node).__name__})", live)
        return lambda: self._builder.build(node)

    def _check_module(self, node: Node, live: Any, path: str) -> None:
        """torch finds a module's mismatches only while it loads; they are found before anything is changed."""
        torch = torch_module()
        if torch is None or not isinstance(live, torch.nn.Module):
            raise _mismatch(path, "a torch module", live)
        saved, has = self._builder.build(node), state_of(live, self._pairs)[1]
        for what, keys in _differences(saved, has):
            raise CheckpointMismatch(f"{path}: {what} {keys}")
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and value.shape != has[key].shape:
                shapes = f"{list(value.shape)} was saved, the state has {list(has[key].shape)}"
                raise CheckpointMismatch(f"{path}.{key}: {shapes}")

    def _place_items(self, node: Node, live: Any, path: str) -> None:
        if not isinstance(live, dict):
            raise _mismatch(path, "a dict", live)
        saved = {self._builder.build(key): value for key, value in node["v"]}
        for what, keys in _differences(saved, live):
            raise CheckpointMismatch(f"{path}: {what} {keys}")
        for key, value in saved.items():
            make = self._place(value, live[key], f"{path}[{key!r}]")
            if make is not None:
                self._copies.append(partial(_set, live, key, make))

    def _place_sequence(self, node: Node, live: Any, path: str) -> Optional[Callable[[], Any]]:
        parts = node if isinstance(node, list) else node["v"]
        wanted = list if isinstance(node, list) else tuple
        if type(live) is not wanted:
            raise _mismatch(path, f"a {wanted.__name__}", live)
        holds_state = any(torch_like(part) or is_stateful(part) or isinstance(part, (dict, list)) for part in live)
        if not holds_state:
            # Plain values are replaced as a whole, whatever their number.
            if wanted is tuple:
                return lambda: self._builder.build(node)
            self._copies.append(partial(_set, live, slice(None), partial(self._builder.build, node)))
            return None
        if len(parts) != len(live):
            raise CheckpointMismatch(f"{path}: {len(parts)} entries were saved, the state has {len(live)}")
        makes = [self._place(part, live[index], f"{path}[{index}]") for index, part in enumerate(parts)]
        if wanted is tuple:
            if all(make is None for make in makes):
                return None
            return lambda: tuple(old if make is None else make() for old, make in zip(live, makes, strict=True))
        for index, make in enumerate(makes):
            if make is not None:
                self._copies.append(partial(_set, live, index, make))
        return None

    def _place_tensor(self, node: Node, live: Any, path: str) -> None:
        torch = torch_module()
        if torch is None or not isinstance(live, torch.Tensor):
            raise _mismatch(path, "a torch tensor", live)
        loaded = self._builder.build(node)
        if loaded.shape != live.shape or loaded.dtype != live.dtype or tensor_dtype(live) is None:
            saved = f"{loaded.dtype} {list(loaded.shape)}"
            raise CheckpointMismatch(f"{path}: {saved} was saved, the state has {live.dtype} {list(live.shape)}")

        def copy() -> None:
            with torch.no_grad():
                live.detach().copy_(loaded)

        self._copies.append(copy)

    def _place_array(self, node: Node, live: Any, path: str) -> None:
        numpy = numpy_module()
        if numpy is None or not isinstance(live, numpy.ndarray):
            raise _mismatch(path, "a numpy array", live)
        loaded = self._builder.build(node)
        if loaded.shape != live.shape or loaded.dtype != live.dtype or array_dtype(live) is None:
            saved = f"{loaded.dtype} {list(loaded.shape)}"
            raise CheckpointMismatch(f"{path}: {saved} was saved, the state has {live.dtype} {list(live.shape)}")
        if not live.flags.writeable:
            raise CheckpointMismatch(f"{path}: the array is read-only")
        self._copies.append(lambda: numpy.copyto(live, loaded))


def _differences(saved: dict[Any, Any], live: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Which keys only one side has, the first few."""
    for what, keys in (
        ("the checkpoint lacks", live.keys() - saved.keys()),
        ("the state lacks", saved.keys() - live.keys()),
    ):
        if keys:
            yield what, ", ".join(sorted(map(repr, keys))[:5])


def torch_like(value: Any) -> bool:
    """Whether a value is a tensor or an array, which is filled in place."""
    torch, numpy = torch_module(), numpy_module()
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def _set(container: Any, key: Any, make: Callable[[], Any]) -> None:
    container[key] = make()


def _mismatch(path: str, saved: str, live: Any) -> CheckpointMismatch:
    return CheckpointMismatch(f"{path}: {saved} was saved, the state has a {type(live).__name__}")
