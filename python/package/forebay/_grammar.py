"""What a tree may be. All of one is looked at before anything is built of it or read for it: a manifest whose hashes are
right was still written by somebody, and what it says reaches memory by way of torch.
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Iterator

from ._errors import CheckpointInvalid
from ._flatten import MAX_DEPTH
from ._keyed import FACTORIES, KEYED
from ._tensors import Node
from ._unflatten import Builder

Find = Callable[[str], tuple[str, list[int]]]
"""Element type and shape of a tensor of the step; raises what there is to say where there is none of that name."""

_FIELDS: dict[str, tuple[set[str], ...]] = {
    **dict.fromkeys(("dict", "odict", "counter", "tuple", "set", "frozenset"), ({"v"},)),
    "defaultdict": ({"f", "v"},),
    **dict.fromkeys(("float", "str", "complex", "size", "dtype", "device"), ({"v"},)),
    **dict.fromkeys(("bytes", "bytearray"), ({"v"}, {"n"})),
    "scalar": ({"d", "v"},),
    "tensor": ({"n"}, {"n", "view"}),
    "array": ({"n"},),
    "pickle": ({"n"},),
    "object": ({"k", "v"},),
}
"""Which fields an object of each tag has."""

_NO_KEYS = (*KEYED, "set", "bytearray", "array", "object")
"""What is neither a key nor in a set: Python finds it by no hash."""

_ARRAYS = ("bool", "complex64", "complex128", "float16", "float32", "float64")
"""Element types of arrays, beside integers."""

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))

_PLAIN = Builder(None, False)  # type: ignore[arg-type]
"""Builds what needs no tensor; anything else fails."""


Place = Any
"""Where a part of a tree is: where what it is a part of is, and its key there; None for the whole."""


def check_tree(tree: Node, find: Find) -> None:
    """Raises `ValueError` where a tree is none, and `CheckpointInvalid` where a later version's may be one, or one of a
    torch that has more types than this one."""
    todo: list[tuple[Node, int, bool, Place]] = [(tree, 0, False, None)]
    while todo:
        node, depth, is_key, place = todo.pop()
        if type(node) is dict:
            try:
                parts = _parts(node, find, is_key)
            except CheckpointInvalid as error:
                raise CheckpointInvalid(f"{_path(place)}: {error}") from error
            are_keys = is_key or node["t"] in ("set", "frozenset")
        elif type(node) is list:
            if is_key:
                raise ValueError("a list as a key")
            parts, are_keys = node, False
        else:
            continue
        if depth >= MAX_DEPTH and parts:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        below: Iterator[tuple[Place, Node]]
        # Of a list of plain values nothing is made, however long it is.
        if type(node) is dict and node["t"] in KEYED:
            todo += [(key, depth + 1, True, place) for key, _ in parts if type(key) in (dict, list)]
            below = (((place, key), value) for key, value in parts if type(value) in (dict, list))
        elif type(node) is dict and node["t"] == "object":
            below = ((place, part) for part in parts if type(part) in (dict, list))
        else:
            below = (((place, index), part) for index, part in enumerate(parts) if type(part) in (dict, list))
        todo += [(part, depth + 1, are_keys, at) for at, part in below]


def _path(place: Place) -> str:
    """As the errors of a save name it."""
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(f"[{_shown(key if isinstance(key, dict) else repr(key))}]")
    return "state" + "".join(reversed(keys))


def _parts(node: Node, find: Find, is_key: bool) -> list[Any]:
    """What an object of the tree is made of, once it is found to be one."""
    tag = node.get("t")
    if not isinstance(tag, str):
        raise ValueError(f"an object with the tag {_shown(tag)}")
    if tag not in _FIELDS:
        raise CheckpointInvalid(f"the state holds a `{_shown(tag)}`, which this version does not know")
    if node.keys() - {"t"} not in _FIELDS[tag]:
        raise ValueError(f"a `{tag}` with the fields {_shown(sorted(node.keys() - {'t'}))}")
    if is_key and tag in _NO_KEYS:
        raise ValueError(f"a `{tag}` as a key")
    if "n" in node:
        _check_tensor(tag, node, find)
        return []
    value = node["v"]
    if tag == "object":
        if node["k"] not in ("module", "optimizer", "optimizer-own", "own"):
            raise ValueError(f"an object of kind {_shown(node['k'])}")
        is_dict = type(value) is dict and value.get("t") in ("dict", "odict")
        if node["k"] == "module" and not is_dict:
            raise ValueError("a module that is no dict")
        return [value]
    if tag == "defaultdict":
        _check_factory(node["f"])
    if tag in (*KEYED, "tuple", "set", "frozenset"):
        if type(value) is not list:
            raise ValueError(f"a `{tag}` of {_shown(value)}")
        if tag in KEYED:
            if not all(type(pair) is list and len(pair) == 2 for pair in value):
                raise ValueError(f"a `{tag}` that is not made of pairs")
        return value
    _check_plain(tag, node)
    return []


def _check_factory(name: Any) -> None:
    """Whether a defaultdict makes what this version knows."""
    if not isinstance(name, str):
        raise ValueError(f"a `defaultdict` of {_shown(name)}")
    if name not in FACTORIES:
        raise CheckpointInvalid(f"the state holds a `defaultdict` of `{_shown(name)}`, which this version does not know")


def _check_plain(tag: str, node: Node) -> None:
    """Whether a value that needs no tensor can be built."""
    try:
        _PLAIN.build(node)
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        if _is_of_another_torch(tag, node["v"]):
            import torch

            what = {"dtype": "element type", "device": "kind of device"}[tag]
            text = f"torch {torch.__version__} has no {what} `{_shown(node['v'])}`, which the state holds"
            raise CheckpointInvalid(f"{text} (hint: load it with the torch that saved it, or a later one)") from error
        raise ValueError(f"a `{tag}` of {_shown(node['v'])} ({type(error).__name__}: {error})") from error


def _is_of_another_torch(tag: str, value: Any) -> bool:
    """Whether what cannot be built here may be whole nevertheless: another build or version of torch has more."""
    import torch

    if not isinstance(value, str):
        return False
    if tag == "dtype":
        return re.fullmatch("[a-z][a-z0-9_]{0,40}", value) is not None and not hasattr(torch, value)
    return tag == "device" and re.fullmatch("[a-z]{1,40}(:[0-9]{1,3})?", value) is not None


def _check_tensor(tag: str, node: Node, find: Find) -> None:
    name = node["n"]
    if not isinstance(name, str):
        raise ValueError(f"a `{tag}` of {_shown(name)}")
    dtype, shape = find(name)
    if tag == "array":
        if dtype not in _ARRAYS and dtype not in _INTEGERS:
            raise ValueError(f"an array `{_shown(name)}` of {dtype}")
    elif tag != "tensor":
        if dtype != "uint8" or len(shape) != 1:
            raise ValueError(f"tensor `{_shown(name)}` does not hold a byte string")
    elif "view" in node and not is_within(node["view"], shape):
        raise ValueError(f"a view {_shown(node['view'])} outside of tensor `{_shown(name)}` {shape}")


def is_within(view: Any, shape: list[int]) -> bool:
    """Whether a view, as shape, stride and offset, is one of elements of a dense tensor of that shape."""
    if type(view) is not list or len(view) != 3:
        return False
    sizes, strides, offset = view
    if type(sizes) is not list or type(strides) is not list or len(sizes) != len(strides):
        return False
    if not all(type(number) is int and 0 <= number < 1 << 56 for number in (*sizes, *strides, offset)):
        return False
    if 0 in sizes:
        return bool(offset <= math.prod(shape))
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides))
    # torch counts bytes in 63 bits; an element has no more than 16.
    return bool(offset + reach < math.prod(shape) and math.prod(sizes) < 1 << 59)


def _shown(value: Any) -> str:
    """The beginning of what somebody wrote."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except RecursionError:
        text = "a deeply nested value"
    return text if len(text) <= 80 else f"{text[:80]}..."
