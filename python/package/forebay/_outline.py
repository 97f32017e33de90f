"""A step's state with tensors that have shapes and no memory, for writers that take a tensor at a time."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from . import _native
from ._loading import default_threads, whole_tree
from ._leaf import torch_dtype
from ._tensors import Node, Tensors
from ._unflatten import Builder

Read = Callable[[torch.Tensor], torch.Tensor]


_WHOLE = ("tuple", "set", "frozenset")
"""Of these torch makes one entry, with the tensors in them."""


class _Rest(Tensors):
    """Of what is wanted, all but the tensors that are entries of their own."""

    _is_inside = False

    def want(self, node: Node) -> None:
        was, self._is_inside = self._is_inside, self._is_inside or _is_whole(node)
        super().want(node)
        self._is_inside = was

    def _allocate(self, kind: str, name: str) -> None:
        if kind != "tensor" or self._is_inside:
            super()._allocate(kind, name)


def _is_whole(node: Node) -> bool:
    return isinstance(node, dict) and node.get("t") in _WHOLE


class _Outliner(Builder):
    """Builds values whose tensors are outlines, but for those in tuples and sets."""

    def __init__(self, tensors: Tensors, allow_pickle: bool) -> None:
        super().__init__(tensors, allow_pickle)
        self.outlined: dict[int, tuple[torch.Tensor, Node]] = {}

    def build(self, node: Node) -> Any:
        if _is_whole(node):
            return Builder(self.tensors, self._allow_pickle).build(node)
        if not isinstance(node, dict) or node.get("t") != "tensor":
            return super().build(node)
        _, dtype, shape = self.tensors.entry(node["n"])
        size = node["view"][0] if "view" in node else shape
        outline = torch.empty(size, dtype=torch_dtype(dtype), device="meta")
        self.outlined[id(outline)] = (outline, node)
        return outline


def outline(step: _native.Step, allow_pickle: bool) -> tuple[Any, Read]:
    """The state, and what reads the tensor of an outline in it."""
    (tree, rank), threads = whole_tree(step, 0, tells_all=True), default_threads()
    rest = _Rest(step, threads, rank)
    rest.want(tree)
    rest.read()
    builder = _Outliner(rest, allow_pickle)

    def read(outline: torch.Tensor) -> torch.Tensor:
        _, node = builder.outlined[id(outline)]
        tensors = Tensors(step, threads, rank)
        tensors.want(node)
        tensors.read()
        tensor: torch.Tensor = Builder(tensors, allow_pickle).build(node)
        # One with memory of its own, and no more of it than it needs.
        return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor

    return builder.build(tree), read


class Planner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans by outlines, and has each tensor read when it is written, by a writer that takes them one after another."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._read = read
        self._last: Optional[torch.Tensor] = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        if not isinstance(value, torch.Tensor):
            return value
        if self._last is not None:
            # torch's writer holds all tensors of a file until that is whole, and has written this one.
            self._last.untyped_storage().resize_(0)
        self._last = self._read(value)
        return self._last
