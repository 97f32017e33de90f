"""Which bytes of which tensors this rank saves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Optional

from . import _copies, _native
from ._alike import Digests, Group, digests, grouped, have_drifted
from ._errors import CheckpointInvalid, warn
from ._leaf import SIZES, Leaf, densify
from ._ranks import Ranks
from ._ties import Ties, aliases


@dataclass
class Share:
    """A part of a leaf, under its name in the step."""

    leaf: int
    name: str
    part: Optional[_native.Part]
    """None for all of the tensor."""


class Planner:
    """Agrees with the other ranks who saves what; again only when some rank's state changed its structure, or what ranks have
    alike seems to differ by now."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._structures: list[str] = []
        self._shares: list[Share] = []
        self._groups: list[Group] = []
        self._beside: _native.Text = (0, 0)
        self._has_looked = False
        """Whether it was looked for what ranks save each for itself and have alike."""
        self.aliases: dict[str, str] = {}
        """Names of the last plan that mean a tensor of another name, and of which."""

    def beside(self, words: list[dict[str, Any]]) -> _native.Text:
        """What the step says beside this rank's tensors: of those of others, by the last plan, and of other values, by what
        all ranks said of theirs (`texts`, in bytes, that of the tree first)."""
        slices, size = self._beside
        for rank, word in enumerate(words):
            # A tree that is as rank 0's is not saved again.
            is_told = rank > 0 and word["tree"] == words[0]["tree"]
            size += sum(word["texts"][1:] if is_told else word["texts"])
        return slices, size

    def structure(self, leaves: list[Leaf], ties: Ties) -> str:
        """What is equal as long as a plan may be kept."""
        return hashlib.sha256(json.dumps([ties, [_describe(leaf) for leaf in leaves]]).encode()).hexdigest()

    def sample(self, leaves: list[Leaf], structure: str, step: int) -> Digests:
        """What samples of what others have alike hash to, to be told to them; None where a plan has yet to be made, for which all
        of it is compared."""
        is_planned = bool(self._structures) and self._structures[self._ranks.rank] == structure
        return digests(self._groups, leaves, step) if is_planned else None

    def plan(self, leaves: list[Leaf], ties: Ties, structures: list[str], samples: list[Digests]) -> list[Share]:
        """This rank's shares; `structures` are those of all ranks, and `samples` what each told. Raises `CheckpointInvalid` where
        a rank has a name for what none of them has, and where ranks that have something alike have not."""
        if self._ranks.alone:
            self.aliases = aliases([ties])
            if ties:
                _check_held([[_describe(leaf) for leaf in leaves]], [ties], self.aliases)
            kept = [(index, leaf) for index, leaf in enumerate(leaves) if not _is_again(leaf, self.aliases)]
            return [Share(index, leaf.name, leaf.part and (False, *leaf.part)) for index, leaf in kept]
        told = [one for one in samples if one is not None]
        if structures != self._structures or len(told) < len(samples) or have_drifted(self._groups, told):
            # Where that fails, the next save compares anew.
            self._structures = []
            self.aliases, self._shares = self._agree(leaves, ties)
            self._structures = structures
        return self._shares

    def _agree(self, leaves: list[Leaf], ties: Ties) -> tuple[dict[str, str], list[Share]]:
        copies = None if self._has_looked else self._look_for_copies(leaves)

        def describe() -> dict[str, Any]:
            if copies is not None and self._ranks.rank == 0:
                # Here, where others hear of it if it is an error.
                warn(copies)
            return {"tensors": [_describe(leaf) for leaf in leaves], "ties": ties}

        words = self._ranks.gather("plan", describe)
        again = aliases([word["ties"] for word in words])
        _check_held([word["tensors"] for word in words], [word["ties"] for word in words], again)
        kept = [index for index, leaf in enumerate(leaves) if not _is_again(leaf, again)]
        described = [
            [text for text in word["tensors"] if text["name"] not in again or not _is_part(text)] for word in words
        ]
        holders = _holders(described)
        places = [_place_of(text) for text in described[self._ranks.rank]]
        self._groups = grouped(holders, dict(zip(places, kept)))
        # Whenever there is something new: after that equal steps keep equal what was equal, which samples watch.
        if holders:
            described = self._compare([leaves[index] for index in kept], holders)
        planned, self._beside = _native.plan_shares([json.dumps(each) for each in described], self._ranks.rank)
        return again, [Share(kept[index], name, part) for index, name, part in planned]

    def _look_for_copies(self, leaves: list[Leaf]) -> Optional[str]:
        """What is to be said where ranks seem to have alike what each of them saves for itself."""
        self._has_looked = True
        words = self._ranks.gather("look for copies", lambda: {"samples": _copies.samples_of(leaves)})
        return _copies.told_of(leaves, [word["samples"] for word in words])

    def _compare(self, leaves: list[Leaf], hashed: Container[str]) -> list[list[dict[str, Any]]]:
        """What all ranks have, and of what is `hashed` the hashes."""

        def describe() -> dict[str, Any]:
            described = [_describe(leaf) for leaf in leaves]
            for leaf, text in zip(leaves, described):
                if _place_of(text) in hashed:
                    address, _keep = densify(leaf)
                    text["hash"] = _native.hash_bytes(address, leaf.size)
            return {"tensors": described}

        return [word["tensors"] for word in self._ranks.gather("compare", describe)]


def _check_held(ranks: list[list[dict[str, Any]]], ties: list[Ties], again: dict[str, str]) -> None:
    """Raises `CheckpointInvalid` where a rank names a tensor of several ranks of which none has anything to save."""
    held = {text["name"] for described in ranks for text in described if _is_there(text)}
    for rank, named in enumerate(ties):
        lacking = [name for name in named if again.get(name, name) not in held]
        if lacking:
            names = ", ".join(f"`{name}`" for name in lacking[:5])
            text = f"rank {rank} has nothing of {names}, and the state of no other rank has a part of it"
            raise CheckpointInvalid(f"{text} (hint: save a tensor on all ranks that hold it)")


def _is_there(described: dict[str, Any]) -> bool:
    """Whether something is saved of a tensor: a part of nothing is, where all of it is nothing."""
    return _is_part(described) and (
        0 not in described["placement"]["part"]["lengths"] or 0 in described["shape"]
    )


def _is_part(described: dict[str, Any]) -> bool:
    """Whether several ranks hold the tensor together."""
    return isinstance(described["placement"], dict)


def _is_again(leaf: Leaf, again: dict[str, str]) -> bool:
    """Whether a tensor of several ranks is saved under another name."""
    return leaf.part is not None and leaf.name in again


def _place_of(described: dict[str, Any]) -> str:
    """What ranks that have the same bytes say alike."""
    return json.dumps([described["name"], described["placement"]])


def _holders(ranks: list[list[dict[str, Any]]]) -> dict[str, list[int]]:
    """What several ranks say that they have, and that must be the same there; and which ranks these are."""
    holders: dict[str, list[int]] = {}
    for rank, described in enumerate(ranks):
        for text in described:
            if text["placement"] not in ("local", "lead"):
                holders.setdefault(_place_of(text), []).append(rank)
    return {place: held for place, held in holders.items() if len(held) > 1}


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
