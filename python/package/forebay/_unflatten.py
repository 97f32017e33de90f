"""From a tree and tensors back to a state: built anew, or put in place into a live one.

A live state is compared with the tree before anything of it is changed. Then its tensors are read straight into place
where their memory is dense and the processor's, and everything else follows once all of them passed their checks: a
restore that fails on damaged bytes leaves tensors that hold anything, and all else as it was.
"""

from __future__ import annotations

import base64
import bisect
import collections
import ctypes
import fnmatch
import pickle
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, Iterator, Optional

from . import _native
from ._errors import CheckpointCorrupt, CheckpointInvalid, CheckpointMismatch
from ._leaf import array_dtype, local_parts, numpy_module, tensor_dtype, torch_module
from ._objects import Pairs, give_state, is_stateful, state_of, tells_copies

Node = Any


class Tensors:
    """The tensors of a step, on `read` read into live ones that were bound, and into fresh memory.

    `rank` is the one of the saving job whose own tensors are meant.
    """

    def __init__(self, step: _native.Step, threads: int, rank: int = 0) -> None:
        self._step = step
        self._threads = threads
        self._rank = rank
        self._entries = {name: (index, dtype, shape) for index, (name, dtype, shape, _) in enumerate(step.tensors())}
        self._loaded: dict[tuple[str, str], Any] = {}
        self._targets: list[_native.Wanted] = []
        self._bound: list[Any] = []
        self._staged: list[tuple[Any, Any]] = []
        self._spans: list[tuple[int, int]] = []

    def entry(self, name: str) -> tuple[int, str, list[int]]:
        """Index, element type and shape. Raises `CheckpointCorrupt` when the step holds no such tensor."""
        found = self._entries.get(f"{name}@{self._rank}") or self._entries.get(name)
        if found is None:
            raise CheckpointCorrupt(f"step {self._step.step}: its state names tensor `{name}`, which it does not hold")
        return found

    def bind(self, node: Node, live: Any) -> bool:
        """Has the tensor that a tree names read into a live one; of one that several ranks hold, what is here.

        False where another place was bound already, where the tree names a view, and where types or shapes differ.
        """
        kind, name = node["t"], node["n"]
        index, dtype, shape = self.entry(name)
        if (kind, name) in self._loaded or "view" in node or not _is_like(kind, live, dtype, shape):
            return False
        parts = local_parts(live) if kind == "tensor" else None
        if parts is None:
            self._aim(kind, index, None, live, dtype)
        for local, offsets, lengths in parts or []:
            self._aim(kind, index, (offsets, lengths), local, dtype)
        self._loaded[kind, name] = live
        return True

    def bind_part(self, name: str, part: tuple[list[int], list[int]], place: Any) -> None:
        """Has a box of a tensor, given as offsets and lengths, read into a plain tensor of its shape and any type."""
        index, dtype, _ = self.entry(name)
        self._aim("tensor", index, part, place, dtype)

    def want(self, node: Node) -> None:
        """Notes every tensor that a tree names; what is not bound gets memory of its own."""
        if isinstance(node, list):
            for part in node:
                self.want(part)
        elif isinstance(node, dict):
            tag = node.get("t")
            if "n" in node:
                self._allocate(tag if tag in ("tensor", "array") else "bytes", node["n"])
            self.want(node.get("v") if tag != "bytes" else None)

    def wishes(self) -> str:
        """What was noted, for the other ranks."""
        return _native.wishes(self._step, [(index, part) for index, part, _, _ in self._targets])

    def read(self, read: Optional[Callable[[list[_native.Wanted], int], None]] = None) -> None:
        """Reads what was noted, by `read` or alone. Raises `CheckpointCorrupt` when any of it is not what was saved."""
        torch = torch_module()
        try:
            (read or self._step.read)(self._targets, self._threads)
        finally:
            for value in self._bound:
                if torch is not None and isinstance(value, torch.Tensor) and not value.is_inference():
                    torch.autograd.graph.increment_version(value)

    def place(self) -> None:
        """Copies what was read aside into its live tensors."""
        torch = torch_module()
        for place, staged in self._staged:
            if torch is not None and isinstance(place, torch.Tensor):
                with torch.no_grad():
                    place.detach().copy_(staged)
            else:
                place[...] = staged

    def get(self, kind: str, name: str) -> Any:
        """A tensor, array or byte string that was read."""
        return self._loaded[kind, name]

    def _allocate(self, kind: str, name: str) -> None:
        index, dtype, shape = self.entry(name)
        if (kind, name) in self._loaded:
            return
        if kind == "tensor":
            import torch

            self._loaded[kind, name] = torch.empty(shape, dtype=getattr(torch, dtype))
        elif kind == "bytes":
            if dtype != "uint8" or len(shape) != 1:
                raise CheckpointCorrupt(f"step {self._step.step}: tensor `{name}` does not hold a byte string")
            self._loaded[kind, name] = bytearray(shape[0])
        else:
            import numpy

            self._loaded[kind, name] = numpy.empty(shape, dtype=dtype)
        self._targets.append((index, None, *_span(kind, self._loaded[kind, name])))

    def _aim(
        self, kind: str, index: int, part: Optional[tuple[list[int], list[int]]], place: Any, dtype: str
    ) -> None:
        self._bound.append(place)
        has = tensor_dtype(place) if kind == "tensor" else array_dtype(place)
        if has != dtype or not self._take_span(kind, place):
            # Read aside, and copied once all is found right: a device's memory, a strided, a shared or another one.
            staged = _new_like(kind, place, dtype)
            self._staged.append((place, staged))
            place = staged
        self._targets.append((index, part, *_span(kind, place)))

    def _take_span(self, kind: str, place: Any) -> bool:
        """Whether a tensor's or array's memory can be read into: dense, the processor's, and nobody else's."""
        if kind == "tensor":
            is_dense = place.device.type == "cpu" and place.is_contiguous() and place.data_ptr() != 0
            is_dense = is_dense and not (place.is_conj() or place.is_neg())
        else:
            is_dense = place.flags.c_contiguous
        if not is_dense:
            return False
        start, size = _span(kind, place)
        at = bisect.bisect(self._spans, (start, size))
        for other, length in self._spans[max(at - 1, 0) : at + 1]:
            if start < other + length and other < start + size:
                return False
        self._spans.insert(at, (start, size))
        return True


def _new_like(kind: str, place: Any, dtype: str) -> Any:
    """Dense memory of a tensor's or array's shape."""
    if kind == "tensor":
        import torch

        return torch.empty(place.shape, dtype=getattr(torch, dtype))
    import numpy

    return numpy.empty(place.shape, dtype=dtype)


def _span(kind: str, value: Any) -> tuple[int, int]:
    """Where the bytes of a dense tensor, array or byte string are: address and length."""
    if kind == "tensor":
        return value.data_ptr(), value.numel() * value.element_size()
    if kind == "bytes":
        return ctypes.addressof((ctypes.c_char * len(value)).from_buffer(value)), len(value)
    return value.ctypes.data, value.nbytes


def _is_like(kind: str, live: Any, dtype: str, shape: list[int]) -> bool:
    """Whether a live value is a tensor or array of that element type and shape that can be written."""
    torch, numpy = torch_module(), numpy_module()
    if kind == "tensor":
        if torch is None or not isinstance(live, torch.Tensor) or list(live.shape) != shape:
            return False
        parts = local_parts(live)
        return all(tensor_dtype(local) == dtype for local in ([live] if parts is None else [part[0] for part in parts]))
    is_like = numpy is not None and isinstance(live, numpy.ndarray) and array_dtype(live) == dtype
    return is_like and live.flags.writeable and list(live.shape) == shape


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

    def _tensor(self, node: Node) -> Any:
        tensor = self.tensors.get("tensor", node["n"])
        if "view" not in node:
            return tensor
        shape, stride, offset = node["view"]
        return tensor.as_strided(shape, stride, offset)

    def _scalar(self, node: Node) -> Any:
        import numpy

        return numpy.frombuffer(bytes.fromhex(node["v"]), dtype=node["d"])[0]

    def _bytes(self, node: Node) -> bytes:
        if "n" in node:
            return bytes(self.tensors.get("bytes", node["n"]))
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
    "array": lambda builder, node: builder.tensors.get("array", node["n"]),
    "scalar": Builder._scalar,
    "size": Builder._size,
    "dtype": Builder._dtype,
    "device": Builder._device,
    "object": lambda builder, node: builder.build(node["v"]),
    "pickle": Builder._unpickle,
}


class Placer:
    """Plans how a tree goes into a live state, and then does it.

    `plan` changes nothing; it raises `CheckpointMismatch` at the first place where the two differ in shape. With `only`,
    patterns of names, everything else is left as it is, on both sides.
    """

    def __init__(self, builder: Builder, state: Any, only: Optional[Sequence[str]] = None) -> None:
        self._builder = builder
        self._tensors = builder.tensors
        self._state = state
        self._only = only
        self._unmatched = set(only or ())
        self.needed: list[Node] = []
        """Parts of the tree that `apply` builds."""
        self._pairs = Pairs(state)
        self._objects: list[tuple[str, Any, str, Node]] = []
        self._copies: list[Callable[[], Any]] = []
        self._in_place: dict[str, Callable[[Node, Any, str, str], None]] = {
            "tensor": self._place_tensor,
            "array": self._place_array,
            "dict": self._place_items,
            "odict": self._place_items,
        }

    def plan(self, node: Node) -> None:
        """Compares the tree with the live state."""
        # A tensor or object at the root is its own place; anything immutable there could not be replaced.
        if self._place(node, self._state, "state", "") is not None:
            raise CheckpointMismatch("state: a value that cannot be changed in place")
        self._check_matched()

    def plan_model(self, node: Node) -> None:
        """As `plan`, of a module's weights alone: the tree is a module's, or a dict of tensors."""
        tree = node["v"] if node["t"] == "object" else node
        if not self._place_module(tree, self._state, "model", ""):
            self._objects.append(("model", self._state, "module", tree))
            self.needed.append(tree)
        self._check_matched()

    def _check_matched(self) -> None:
        if self._unmatched:
            raise CheckpointMismatch(f"nothing is named like {', '.join(sorted(self._unmatched))}")

    def _wants(self, name: str) -> bool:
        """Whether what has that name is to be restored."""
        if self._only is None:
            return True
        matching = {pattern for pattern in self._only if fnmatch.fnmatchcase(name, pattern)}
        self._unmatched -= matching
        return bool(matching)

    def _wants_any(self, node: Node, name: str) -> bool:
        """Whether anything in a tree is to be restored."""
        if self._only is None or self._wants(name):
            return True
        if isinstance(node, dict) and node.get("t") == "object":
            node = node["v"]
            if self._wants(f"{name}."):
                return True
        return any(self._wants_any(value, below) for below, value in named_parts(node, name))

    def apply(self) -> None:
        """Puts everything into place that was not read there; objects after what lies outside of them."""
        states = [(path, value, kind, self._builder.build(node)) for path, value, kind, node in self._objects]
        states.sort(key=lambda entry: not entry[2].startswith("optimizer"))
        self._tensors.place()
        for copy in self._copies:
            copy()
        for path, value, kind, state in states:
            try:
                give_state(value, kind, state, self._pairs)
            except Exception as error:
                raise CheckpointMismatch(f"{path}: it does not take the state that was saved: {error}") from error

    def _place(self, node: Node, live: Any, path: str, name: str) -> Optional[Callable[[], Any]]:
        """None where the live value is changed in place; else what gives the value to put in its stead."""
        tag = node.get("t") if isinstance(node, dict) else None
        if not self._wants_any(node, name):
            return None
        if tag == "object":
            if not is_stateful(live):
                raise _mismatch(path, "an object with a state", live)
            self._place_object(node, live, path, name)
            return None
        if tag in ("dict", "odict") and is_stateful(live) and not isinstance(live, dict):
            self._place_object(self._as_object(node, live), live, path, name)
            return None
        in_place = self._in_place.get(tag or "")
        if in_place is not None:
            in_place(node, live, path, name)
            return None
        if isinstance(node, list) or tag == "tuple":
            return self._place_sequence(node, live, path, name)
        if torch_like(live) or is_stateful(live):
            raise _mismatch(path, f"a value ({tag or type(node).__name__})", live)
        return self._later(node)

    def _later(self, node: Node) -> Callable[[], Any]:
        """What builds a part of the tree once its tensors were read."""
        self.needed.append(node)
        return lambda: self._builder.build(node)

    def _place_object(self, node: Node, live: Any, path: str, name: str) -> None:
        kind, tree = node["k"], node["v"]
        if kind == "module":
            if self._place_module(tree, live, path, name):
                return
        elif kind in ("optimizer", "optimizer-own"):
            has_kind, has = state_of(live, self._pairs, kind == "optimizer")
            if has_kind == kind:
                self._bind_all(tree, has)
        self._objects.append((path, live, kind, tree))
        self.needed.append(tree)

    def _as_object(self, node: Node, live: Any) -> Node:
        """A dict that was saved as such, for one through torch.distributed.checkpoint, as the state of an object."""
        items = {self._builder.build(key): value for key, value in node["v"]}
        kind, torch = "own", torch_module()
        if torch is not None and isinstance(live, torch.nn.Module):
            # Names that are not torch's canonical ones are the object's own: a wrapper's.
            kind = "module" if items.keys() == state_of(live, self._pairs)[1].keys() else "own"
        elif torch is not None and isinstance(live, torch.optim.Optimizer):
            groups = items.get("param_groups", [])
            by_name = any(isinstance(name, str) for group in self._builder.build(groups) for name in group["params"])
            kind = "optimizer" if by_name else "optimizer-own"
            # DCP loses that parameters' numbers are numbers, and a state that is empty.
            state = items.get("state", {"v": []})["v"]
            numbered = state if by_name else [[int(number), value] for number, value in state]
            node = {"t": "dict", "v": [["state", {"t": "dict", "v": numbered}], ["param_groups", groups]]}
        return {"t": "object", "k": kind, "v": node}

    def _place_module(self, node: Node, live: Any, path: str, name: str) -> bool:
        """Binds a module's tensors; whether that is all that is to be restored of it.

        torch finds a module's mismatches only while it loads; they are found before anything is changed.
        """
        torch = torch_module()
        if torch is None or not isinstance(live, torch.nn.Module):
            raise _mismatch(path, "a torch module", live)
        saved = {self._builder.build(key): value for key, value in node["v"]}
        has = state_of(live, self._pairs)[1]
        is_part = self._only is not None and not self._wants(f"{name}.")
        if is_part and tells_copies(live):
            raise CheckpointMismatch(f"{path}: a module of FSDP1 is restored as a whole only")
        if is_part:
            saved = {key: value for key, value in saved.items() if self._wants(_join(name, key))}
            has = {key: value for key, value in has.items() if self._wants(_join(name, key))}
        for what, keys in _differences(saved, has):
            raise CheckpointMismatch(f"{path}: {what} {keys}")
        # What FSDP1 tells of itself are copies, which it is given back.
        is_all = not tells_copies(live)
        for key, value in saved.items():
            is_tensor = isinstance(value, dict) and value.get("t") == "tensor"
            if is_tensor and isinstance(has[key], torch.Tensor):
                shape = self._shape(value)
                if shape != list(has[key].shape):
                    shapes = f"{shape} was saved, the state has {list(has[key].shape)}"
                    raise CheckpointMismatch(f"{path}.{key}: {shapes}")
            is_bound = is_tensor and self._tensors.bind(value, has[key])
            if is_part and not is_bound:
                self._copy_entry(value, has[key], f"{path}.{key}")
            is_all = is_all and is_bound
        return is_all or is_part

    def _copy_entry(self, node: Node, live: Any, path: str) -> None:
        """Has one tensor of a module copied, of whatever type; the module as a whole is not given its state."""
        torch = torch_module()
        is_tensor = isinstance(live, torch.Tensor) and isinstance(node, dict) and node.get("t") == "tensor"
        if not is_tensor or local_parts(live) is not None:
            raise CheckpointMismatch(f"{path}: it is restored with its whole module only")
        make = self._later(node)

        def copy() -> None:
            with torch.no_grad():
                live.detach().copy_(make())

        self._copies.append(copy)

    def _bind_all(self, node: Node, live: Any) -> None:
        """Binds the tensors of a tree that a live value has in the same places."""
        tag = node.get("t") if isinstance(node, dict) else None
        if tag == "tensor":
            self._tensors.bind(node, live)
        elif tag in ("dict", "odict") and isinstance(live, dict):
            for key, value in node["v"]:
                key = self._builder.build(key)
                if key in live:
                    self._bind_all(value, live[key])

    def _shape(self, node: Node) -> list[int]:
        return node["view"][0] if "view" in node else self._tensors.entry(node["n"])[2]

    def _place_items(self, node: Node, live: Any, path: str, name: str) -> None:
        if not isinstance(live, dict):
            raise _mismatch(path, "a dict", live)
        saved = {self._builder.build(key): value for key, value in node["v"]}
        has = live
        if self._only is not None:
            saved = {key: value for key, value in saved.items() if self._wants_any(value, _join(name, str(key)))}
            has = {key: value for key, value in live.items() if key in saved or self._wants(_join(name, str(key)))}
        for what, keys in _differences(saved, has):
            raise CheckpointMismatch(f"{path}: {what} {keys}")
        for key, value in saved.items():
            make = self._place(value, live[key], f"{path}[{key!r}]", _join(name, str(key)))
            if make is not None:
                self._copies.append(partial(_set, live, key, make))

    def _place_sequence(self, node: Node, live: Any, path: str, name: str) -> Optional[Callable[[], Any]]:
        parts = node if isinstance(node, list) else node["v"]
        wanted = list if isinstance(node, list) else tuple
        if type(live) is not wanted:
            raise _mismatch(path, f"a {wanted.__name__}", live)
        holds_state = any(torch_like(part) or is_stateful(part) or isinstance(part, (dict, list)) for part in live)
        if not holds_state:
            # Plain values are replaced as a whole, whatever their number.
            whole = self._later(node)
            if wanted is tuple:
                return whole
            self._copies.append(partial(_set, live, slice(None), whole))
            return None
        if len(parts) != len(live):
            raise CheckpointMismatch(f"{path}: {len(parts)} entries were saved, the state has {len(live)}")
        makes = [
            self._place(part, live[index], f"{path}[{index}]", _join(name, str(index)))
            for index, part in enumerate(parts)
        ]
        if wanted is tuple:
            if all(make is None for make in makes):
                return None
            return lambda: tuple(old if make is None else make() for old, make in zip(live, makes, strict=True))
        for index, make in enumerate(makes):
            if make is not None:
                self._copies.append(partial(_set, live, index, make))
        return None

    def _place_tensor(self, node: Node, live: Any, path: str, name: str) -> None:
        torch = torch_module()
        if torch is None or not isinstance(live, torch.Tensor):
            raise _mismatch(path, "a torch tensor", live)
        dtype, shape = self._tensors.entry(node["n"])[1], self._shape(node)
        if shape != list(live.shape) or f"torch.{dtype}" != str(live.dtype):
            saved = f"torch.{dtype} {shape}"
            raise CheckpointMismatch(f"{path}: {saved} was saved, the state has {live.dtype} {list(live.shape)}")
        if self._tensors.bind(node, live):
            return
        if local_parts(live) is not None:
            raise CheckpointMismatch(f"{path}: a {type(live).__name__} that was saved as part of another tensor")
        make = self._later(node)

        def copy() -> None:
            with torch.no_grad():
                live.detach().copy_(make())

        self._copies.append(copy)

    def _place_array(self, node: Node, live: Any, path: str, name: str) -> None:
        numpy = numpy_module()
        if numpy is None or not isinstance(live, numpy.ndarray):
            raise _mismatch(path, "a numpy array", live)
        _, dtype, shape = self._tensors.entry(node["n"])
        if shape != list(live.shape) or dtype != live.dtype.name or array_dtype(live) is None:
            saved = f"{dtype} {shape}"
            raise CheckpointMismatch(f"{path}: {saved} was saved, the state has {live.dtype} {list(live.shape)}")
        if not live.flags.writeable:
            raise CheckpointMismatch(f"{path}: the array is read-only")
        if not self._tensors.bind(node, live):
            make = self._later(node)
            self._copies.append(lambda: numpy.copyto(live, make()))


def _differences(saved: dict[Any, Any], live: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Which keys only one side has, the first few."""
    for what, keys in (
        # An empty dict is nothing that can be lacking.
        ("the checkpoint lacks", {key for key in live.keys() - saved.keys() if not is_empty(live[key])}),
        ("the state lacks", saved.keys() - live.keys()),
    ):
        if keys:
            yield what, ", ".join(sorted(map(repr, keys))[:5])


def is_empty(value: Any) -> bool:
    """Whether a value is an empty dict."""
    return isinstance(value, dict) and not value


def torch_like(value: Any) -> bool:
    """Whether a value is a tensor or an array, which is filled in place."""
    torch, numpy = torch_module(), numpy_module()
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def named_parts(node: Node, name: str) -> Iterator[tuple[str, Node]]:
    """The entries of a container of the tree, and their names."""
    tag = node.get("t") if isinstance(node, dict) else None
    if tag in ("dict", "odict"):
        for key, value in node["v"]:
            # As the saving side names them; keys of other kinds have no pattern's names.
            yield _join(name, str(key)), value
    elif isinstance(node, list) or tag == "tuple":
        for index, value in enumerate(node if isinstance(node, list) else node["v"]):
            yield _join(name, str(index)), value


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _set(container: Any, key: Any, make: Callable[[], Any]) -> None:
    container[key] = make()


def _mismatch(path: str, saved: str, live: Any) -> CheckpointMismatch:
    return CheckpointMismatch(f"{path}: {saved} was saved, the state has a {type(live).__name__}")
