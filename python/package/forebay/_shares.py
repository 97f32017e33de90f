"""Which bytes of which tensors this rank saves."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Optional

from . import _native
from ._leaf import SIZES, Leaf, densify
from ._ranks import Ranks


@dataclass
class Share:
    """A part of a leaf, under its name in the step."""

    leaf: int
    name: str
    part: Optional[_native.Part]
    """None for all of the tensor."""


class Planner:
    """Agrees with the other ranks who saves what; again only when some rank's state changed its structure."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._structures: list[str] = []
        self._shares: list[Share] = []

    def structure(self, leaves: list[Leaf]) -> str:
        """What is equal as long as a plan may be kept."""
        return hashlib.sha256(json.dumps([_describe(leaf) for leaf in leaves]).encode()).hexdigest()

    def plan(self, leaves: list[Leaf], structures: list[str]) -> list[Share]:
        """This rank's shares; `structures` are those of all ranks."""
        if self._ranks.alone:
            return [Share(index, leaf.name, None) for index, leaf in enumerate(leaves)]
        if structures != self._structures:
            # Only the first time: later on equal steps keep equal what was equal.
            is_first = not self._structures
            words = self._ranks.gather("plan", lambda: {"tensors": _describe_all(leaves, is_first)})
            planned = _native.plan_shares([word["tensors"] for word in words], self._ranks.rank)
            self._shares = [Share(index, name, part) for index, name, part in planned]
            self._structures = structures
        return self._shares


def _describe(leaf: Leaf) -> dict[str, Any]:
    placement: Any = leaf.placement
    if leaf.part is not None:
        placement = {"part": {"kind": "box", "offsets": leaf.part[0], "lengths": leaf.part[1]}}
    return {"name": leaf.name, "dtype": leaf.dtype, "shape": leaf.shape, "placement": placement, "hash": None}


def _describe_all(leaves: list[Leaf], with_hashes: bool) -> str:
    described = [_describe(leaf) for leaf in leaves]
    for leaf, text in zip(leaves, described):
        if with_hashes and leaf.is_shared:
            address, _keep = densify(leaf)
            text["hash"] = _native.hash_bytes(address, leaf.size)
    return json.dumps(described)


def source_offset(leaf: Leaf, part: Optional[_native.Part]) -> int:
    """Where in a leaf's own bytes a share begins."""
    if part is None:
        return 0
    is_flat, offsets, _ = part
    if is_flat:
        return offsets[0] * SIZES[leaf.dtype]
    if not offsets:
        return 0
    first, rows = (leaf.part[0][0], leaf.part[1][0]) if leaf.part is not None else (0, leaf.shape[0])
    return (offsets[0] - first) * (leaf.size // rows) if rows else 0


def share_size(leaf: Leaf, part: Optional[_native.Part]) -> int:
    """Bytes of a share."""
    if part is None:
        return leaf.size
    size = SIZES[leaf.dtype]
    for length in part[2]:
        size *= length
    return size
