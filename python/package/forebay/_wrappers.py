"""Names that wrappers of a module add to those of its tensors.

A module knows its tensors without them, whatever wraps it. A dict that the program took by `state_dict()` of the
wrapper has them in its keys, and would fit no dict of the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

from ._keyed import is_data, pairs_of
from ._leaf import torch_module

Node = Any

_WRAPPERS = frozenset(("module", "_orig_mod"))
"""What DistributedDataParallel and `torch.compile` call what they wrap."""


def fitted(node: Node, live: Any, names_of: Callable[[Any], Iterable[Any]], strict: bool = True) -> Node:
    """A tree whose dicts are given the names of the live ones, where wrappers' names are all that they differ by; unless it is
    `strict`, one side may have more.

    `names_of` gives those of a module. What differs otherwise stays as it is.
    """
    if isinstance(node, list):
        return _fitted_parts(node, live, names_of, strict)
    tag = node.get("t") if isinstance(node, dict) else None
    if tag == "tuple":
        parts = _fitted_parts(node["v"], live, names_of, strict)
        return node if parts is node["v"] else {**node, "v": parts}
    if pairs_of(node) is None or is_data(node):
        return node
    if not isinstance(live, dict):
        torch = torch_module()
        is_module = torch is not None and isinstance(live, torch.nn.Module)
        return _renamed(node, names_of(live), strict) if is_module else node
    node = _renamed(node, live, strict)
    # A key that is no text, number or None is one of the tree's own dicts.
    items = [
        [key, value if isinstance(key, (dict, list)) else fitted(value, live.get(key), names_of, strict)]
        for key, value in node["v"]
    ]
    is_same = all(new is old for (_, new), (_, old) in zip(items, node["v"]))
    return node if is_same else {**node, "v": items}


def _fitted_parts(
    parts: list[Node], live: Any, names_of: Callable[[Any], Iterable[Any]], strict: bool
) -> list[Node]:
    is_like = isinstance(live, (list, tuple)) and len(live) == len(parts)
    if not is_like or not any(isinstance(part, (dict, list)) for part in parts):
        return parts
    found = [fitted(part, value, names_of, strict) for part, value in zip(parts, live)]
    return parts if all(new is old for new, old in zip(found, parts)) else found


def _renamed(node: Node, live: Iterable[Any], strict: bool) -> Node:
    """A dict of the tree with the live one's names, where those without wrappers' names are the same, one for one; unless it is
    `strict`, of those that both have."""
    saved, has = [key for key, _ in node["v"]], list(live)
    if not all(isinstance(key, str) for key in (*saved, *has)) or set(saved) == set(has):
        return node
    found, wanted = _bare(saved), _bare(has)
    if found is None or wanted is None or (strict and found.keys() != wanted.keys()):
        return node
    names = {found[name]: wanted[name] for name in found if name in wanted}
    return {**node, "v": [[names.get(key, key), value] for key, value in node["v"]]}


def _bare(names: Sequence[str]) -> Optional[dict[str, str]]:
    """Names by what they are without those of wrappers; None where two are the same then."""
    found = {bare(name): name for name in names}
    return found if len(found) == len(names) else None


def bare(name: str) -> str:
    """A name without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
