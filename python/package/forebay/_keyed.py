"""What of a tree has keys: dicts of every kind, and where they are told from one another.

The keys of a `counter` and a `defaultdict` are data, as a list's length is: they come and go with what is counted. Only
where tensors or objects lie below are they names of parts of the state, as those of other dicts.
"""

from __future__ import annotations

import collections
from typing import Any, Optional

Node = Any

TAGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "odict",
    collections.Counter: "counter",
    collections.defaultdict: "defaultdict",
}
"""What the tree calls each kind."""

KEYED = tuple(TAGS.values())

FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)},
}
"""What a defaultdict may make of a key that it has not, by its name in the tree."""

_PARTS = ("tensor", "array", "object")
"""What is put in place by itself."""


def pairs_of(node: Node) -> Optional[list[Any]]:
    """The keys and values of a dict of any kind; None for anything else."""
    return node["v"] if isinstance(node, dict) and node.get("t") in KEYED else None


def factory_name(value: Any) -> Optional[str]:
    """What the tree calls the factory of a defaultdict; None for one that it knows not."""
    return next((name for name, factory in FACTORIES.items() if value.default_factory is factory), None)


def is_data(node: Node) -> bool:
    """Whether a part of the tree is a dict whose keys are data."""
    return isinstance(node, dict) and node.get("t") in ("counter", "defaultdict") and not has_parts(node)


def has_parts(node: Node) -> bool:
    """Whether tensors, arrays or objects lie below."""
    todo = [node]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            if node.get("t") in _PARTS:
                return True
            todo.append(node.get("v"))
    return False
