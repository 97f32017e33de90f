"""States of objects that give and take them by methods of their own, on their way into live objects.

An object is given its state as it gave it, in memory that is not its own. What it holds of tensors that several ranks hold
together comes as such: in one made like what the live object tells in the same place.
"""

from __future__ import annotations

from typing import Any

from ._errors import CheckpointMismatch
from ._keyed import pairs_of
from ._leaf import dtensor_class, local_parts, refuse_meta, shape_of, torch_dtype, torch_module
from ._merge import tag_of, tensor_names
from ._objects import Pairs, is_stateful, state_of
from ._tensors import Node
from ._unflatten import Builder

Made = dict[Any, Any]
"""What was made for one object, by the tensor's name and the parts that are here."""


class OwnPlacer:
    """Plans what objects are given of tensors that ranks hold together."""

    def __init__(self, builder: Builder, pairs: Pairs) -> None:
        self._builder = builder
        self._tensors = builder.tensors
        self._pairs = pairs
        self._has_parts = False
        self._lacking: list[str] = []

    def note(self, live: Any) -> None:
        """Takes note of a tensor of the live state: whether ranks hold it together."""
        self._has_parts = self._has_parts or local_parts(live) is not None

    def place(self, tree: Node, live: Any, path: str) -> None:
        """Binds what ranks hold together of an object's state. Raises `CheckpointMismatch` where its parts here are not those
        of what was saved."""
        # Without a process group there are no such tensors, and the object need not be asked.
        if not _is_distributed() or not tensor_names(tree):
            return
        try:
            has = live.state_dict()
        except Exception:
            # One that tells nothing yet may take what was saved all the same.
            has = None
        self._bind(tree, has, path, {})

    def check(self) -> None:
        """Raises `CheckpointMismatch` where an object of a job whose ranks hold parts has no place for one: each rank would
        be given all of the tensor. Elsewhere that is what it is: the same on all ranks."""
        if self._lacking and (self._has_parts or self._pairs.has_parts()):
            text = "a tensor was saved that ranks hold together, the object has none there that tells its parts"
            raise CheckpointMismatch(f"{self._lacking[0]}: {text} (hint: have it make its tensors before the restore)")

    def _bind(self, node: Node, live: Any, path: str, made: Made) -> None:
        tag = tag_of(node)
        if tag == "tensor":
            self._bind_tensor(node, live, path, made)
        elif tag == "object":
            kind, state = state_of(live, self._pairs) if is_stateful(live) else (None, None)
            self._bind(node["v"], state if kind == node["k"] else None, path, made)
        elif (pairs := pairs_of(node)) is not None:
            for name, value in self._builder.items(pairs).items():
                if isinstance(value, (dict, list)):
                    below = live.get(name) if isinstance(live, dict) else None
                    self._bind(value, below, f"{path}[{name!r}]", made)
        elif isinstance(node, list) or tag == "tuple":
            parts = node if isinstance(node, list) else node["v"]
            is_like = isinstance(live, (list, tuple)) and len(live) == len(parts)
            for index, part in enumerate(parts):
                if isinstance(part, (dict, list)):
                    self._bind(part, live[index] if is_like else None, f"{path}[{index}]", made)

    def _bind_tensor(self, node: Node, live: Any, path: str, made: Made) -> None:
        torch = torch_module()
        is_shared, shape = self._tensors.is_shared(node), self._tensors.shape(node)
        live_shape = shape_of(live) if isinstance(live, torch.Tensor) else None
        parts = None if live_shape is None else local_parts(live)
        if parts is None:
            if is_shared and live_shape != shape:
                self._lacking.append(path)
            return
        self._has_parts = True
        refuse_meta(live, path)
        key = (node["n"], str([(offsets, lengths) for _, offsets, lengths in parts]))
        target = made.get(key)
        if target is None:
            target = made[key] = self._like(node, live)
        if not self._tensors.bind_made(node, target) and is_shared:
            saved = f"{shape} was saved, the state has {live_shape}"
            text = saved if shape != live_shape else f"a {type(live).__name__} that was saved as part of another tensor"
            raise CheckpointMismatch(f"{path}: {text}")

    def _like(self, node: Node, live: Any) -> Any:
        """A tensor of which this rank has the same parts, of the type that was saved; torch makes DTensors alone."""
        dtensor = dtensor_class()
        if dtensor is None or not isinstance(live, dtensor):
            return live
        return torch_module().empty_like(live.detach(), dtype=torch_dtype(self._tensors.entry(node["n"])[1]))


def _is_distributed() -> bool:
    """Whether this process belongs to a group of torch's."""
    distributed = getattr(torch_module(), "distributed", None)
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())
