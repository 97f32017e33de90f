"""Parts of a live state and of a tree beside each other: what they are, what they are called, which of them one side lacks."""

from __future__ import annotations

from typing import Any, Iterator

from ._keyed import KEYED
from ._leaf import numpy_module, torch_module
from ._objects import is_stateful

Node = Any


def differences(saved: dict[Any, Any], live: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Which keys only one side has, the first few."""
    for what, keys in (
        # An empty dict is nothing that can be lacking.
        ("the checkpoint lacks", {key for key in live.keys() - saved.keys() if not is_empty(live[key])}),
        ("the state lacks", saved.keys() - live.keys()),
    ):
        if keys:
            yield what, ", ".join(sorted(map(repr, keys))[:5])


def has_parts(live: Any) -> bool:
    """Whether tensors, arrays or objects with a state lie in a live value."""
    if isinstance(live, (dict, list, tuple)):
        return any(map(has_parts, live.values() if isinstance(live, dict) else live))
    return torch_like(live) or is_stateful(live)


def is_empty(value: Any) -> bool:
    """Whether a value is an empty dict."""
    return isinstance(value, dict) and not value


def is_nothing(value: Any) -> bool:
    """Whether what torch calls extra state of a module says nothing: None, an empty text or dict, or, as TransformerEngine's
    modules tell where they have none, a tensor without elements."""
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.numel() == 0)
    return value is None or (isinstance(value, (bytes, bytearray, str, dict, list, tuple)) and not value)


def torch_like(value: Any) -> bool:
    """Whether a value is a tensor or an array, which is filled in place."""
    torch, numpy = torch_module(), numpy_module()
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def named_parts(node: Node, name: str) -> Iterator[tuple[str, Node]]:
    """The entries of a container of the tree, and their names."""
    tag = node.get("t") if isinstance(node, dict) else None
    if tag in KEYED:
        for key, value in node["v"]:
            # As the saving side names them; keys of other kinds have no pattern's names.
            yield join(name, str(key)), value
    elif isinstance(node, list) or tag == "tuple":
        for index, value in enumerate(node if isinstance(node, list) else node["v"]):
            yield join(name, str(index)), value


def join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
