"""A state tree as torch.distributed.checkpoint sees it: flat entries, each with the path of keys that leads there.

What is descended into and what is one entry is torch's rule (`traverse_state_dict`): dicts always, lists that hold
tensors or dicts somewhere below, nothing else. Pure; the tree itself is described in docs/formats-checkpoint.md.
"""

from __future__ import annotations

from typing import Any, Callable, Union

from ._errors import CheckpointInvalid
from ._keyed import pairs_of

Node = Any
Path = tuple[Union[str, int], ...]
"""Keys of dicts, as text, and indexes of lists."""


def flatten(tree: Node, build: Callable[[Node], Any]) -> dict[str, tuple[Path, Node]]:
    """The entries of a tree by their dotted names; `build` gives the value of a key."""
    entries: dict[str, tuple[Path, Node]] = {}
    if _items(tree) is None:
        raise CheckpointInvalid("the step's state is no dict, which is all that torch.distributed.checkpoint loads")

    def visit(path: Path, node: Node) -> None:
        items = _items(node)
        if items is not None:
            for key, value in items:
                visit((*path, str(build(key))), value)
        elif isinstance(node, list) and not _is_entry(node):
            for index, value in enumerate(node):
                visit((*path, index), value)
        else:
            name = ".".join(map(str, path))
            if name in entries:
                raise CheckpointInvalid(f"two entries of the step's state are called `{name}`")
            entries[name] = (path, node)

    visit((), tree)
    return entries


def nest(entries: list[tuple[Path, Node]]) -> Node:
    """The tree of some entries. Empty dicts, which are no entries, are lost, but for their places in lists."""
    if len(entries) == 1 and not entries[0][0]:
        return entries[0][1]
    groups: dict[Union[str, int], list[tuple[Path, Node]]] = {}
    for path, node in entries:
        if not path:
            raise CheckpointInvalid("an entry of the state is also a dict")
        groups.setdefault(path[0], []).append((path[1:], node))
    indexes = [key for key in groups if isinstance(key, int)]
    if groups and len(indexes) == len(groups):
        return [nest(groups.get(index, [])) for index in range(max(indexes) + 1)]
    return {"t": "dict", "v": [[key, nest(group)] for key, group in groups.items()]}


def _items(node: Node) -> Any:
    """The pairs of a dict, or of the dict that is an object's state; None for anything else."""
    if not isinstance(node, dict):
        return None
    if node.get("t") == "object":
        return _items(node["v"])
    return pairs_of(node)


def _is_entry(node: Node) -> bool:
    """Whether a value is one entry where it lies in a list."""
    if isinstance(node, list):
        return all(_is_entry(part) and not _is_tensor(part) for part in node)
    return _items(node) is None


def _is_tensor(node: Node) -> bool:
    return isinstance(node, dict) and node.get("t") == "tensor"
