"""Which bytes of which tensors this rank saves."""

from __future__ import annotations

import collections
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
        self._beside: _native.Text = (0, 0)

    def beside(self, words: list[dict[str, Any]]) -> _native.Text:
        """What the step says beside this rank's tensors: of those of others, by the last plan, and of other values, by what
        all ranks said of theirs (`texts`, in bytes, that of the tree first)."""
        slices, size = self._beside
        for rank, word in enumerate(words):
            # A tree that is as rank 0's is not saved again.
            is_told = rank > 0 and word["tree"] == words[0]["tree"]
            size += sum(word["texts"][1:] if is_told else word["texts"])
        return slices, size

    def structure(self, leaves: list[Leaf]) -> str:
        """What is equal as long as a plan may be kept."""
        return hashlib.sha256(json.dumps([_describe(leaf) for leaf in leaves]).encode()).hexdigest()

    def plan(self, leaves: list[Leaf], structures: list[str]) -> list[Share]:
        """This rank's shares; `structures` are those of all ranks."""
        if self._ranks.alone:
            return [Share(index, leaf.name, leaf.part and (False, *leaf.part)) for index, leaf in enumerate(leaves)]
        if structures != self._structures:
            described = self._gather("plan", leaves, frozenset())
            alike = _alike(described)
            # Only the first time: later on equal steps keep equal what was equal.
            if alike and not self._structures:
                described = self._gather("compare", leaves, alike)
            texts = [json.dumps(each) for each in described]
            planned, self._beside = _native.plan_shares(texts, self._ranks.rank)
            self._shares = [Share(index, name, part) for index, name, part in planned]
            self._structures = structures
        return self._shares

    def _gather(self, act: str, leaves: list[Leaf], hashed: frozenset[str]) -> list[list[dict[str, Any]]]:
        """What all ranks have, and of what is `hashed` the hashes."""

        def describe() -> dict[str, Any]:
            described = [_describe(leaf) for leaf in leaves]
            for leaf, text in zip(leaves, described):
                if _place_of(text) in hashed:
                    address, _keep = densify(leaf)
                    text["hash"] = _native.hash_bytes(address, leaf.size)
            return {"tensors": described}

        return [word["tensors"] for word in self._ranks.gather(act, describe)]


def _place_of(described: dict[str, Any]) -> str:
    """What ranks that have the same bytes say alike."""
    return json.dumps([described["name"], described["placement"]])


def _alike(ranks: list[list[dict[str, Any]]]) -> frozenset[str]:
    """What several ranks say that they have, and that must be the same there."""
    counts: collections.Counter[str] = collections.Counter()
    for described in ranks:
        counts.update({_place_of(text) for text in described if text["placement"] not in ("local", "lead")})
    return frozenset(place for place, count in counts.items() if count > 1)


def _describe(leaf: Leaf) -> dict[str, Any]:
    placement: Any = leaf.placement
    if leaf.part is not None:
        placement = {"part": {"kind": "box", "offsets": leaf.part[0], "lengths": leaf.part[1]}}
    return {"name": leaf.name, "dtype": leaf.dtype, "shape": leaf.shape, "placement": placement, "hash": None}


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
