"""Which bytes of which tensors this rank saves."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from . import _copies, _native
from ._alike import LEAST_BYTES, Digests, Group, digests, have_drifted
from ._errors import CheckpointInvalid, warn
from ._leaf import SIZES, Leaf, densify
from ._ranks import Ranks
from ._ties import Ties, aliases


SMALL = LEAST_BYTES
"""Bytes of a tensor that ranks tell each other: what each of them has for itself and all have alike, as an optimizer's count of
steps for each parameter, is saved once. Samples cover all of it, so that it is noticed when it is alike no more."""

_DIGITS = 64
"""Of a hash: what a structure begins with is that of its outline."""


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
        """What is equal as long as a plan may be kept; begins with what ranks say alike that have the same tensors, whichever parts of
        them."""
        return "".join(hashlib.sha256(text.encode()).hexdigest() for text in (_outline(leaves, ties), _parts(leaves)))

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
                roster = _native.Roster([_outline(leaves, ties)], [(0, _parts(leaves), "[]")])
                _check_held(roster, [(0, ties)], self.aliases)
            kept = [(index, leaf) for index, leaf in enumerate(leaves) if not _is_again(leaf, self.aliases)]
            return [Share(index, leaf.name, leaf.part and (False, *leaf.part)) for index, leaf in kept]
        told = [one for one in samples if one is not None]
        if structures != self._structures or len(told) < len(samples) or have_drifted(self._groups, told):
            # Where that fails, the next save compares anew.
            self._structures = []
            self.aliases, self._shares = self._agree(leaves, ties, structures)
            self._structures = structures
        return self._shares

    def _agree(self, leaves: list[Leaf], ties: Ties, structures: list[str]) -> tuple[dict[str, str], list[Share]]:
        copies = None if self._has_looked else self._look_for_copies(leaves)
        own = [structure[:_DIGITS] for structure in structures]
        leads: dict[str, int] = {}
        for rank, outline in enumerate(own):
            leads.setdefault(outline, rank)

        def describe() -> dict[str, Any]:
            if copies is not None and self._ranks.rank == 0:
                # Here, where others hear of it if it is an error.
                warn(copies)
            # The first rank that has an outline tells it for all.
            is_lead = leads[own[self._ranks.rank]] == self._ranks.rank
            outline = _outline(leaves, ties) if is_lead else None
            return {"outline": outline, "parts": _parts(leaves), "bytes": _bytes_of_small(leaves)}

        words = self._ranks.gather("plan", describe)
        outlines = [words[rank]["outline"] for rank in leads.values()]
        numbers = {outline: number for number, outline in enumerate(leads)}
        said = [(numbers[outline], word["parts"], word["bytes"]) for outline, word in zip(own, words)]
        roster = _native.Roster(outlines, said)
        named = [json.loads(outline)["ties"] for outline in outlines]
        again = aliases(named)
        _check_held(roster, list(zip(leads.values(), named)), again)
        self._groups = [Group(tuple(ranks), held) for ranks, held in roster.alike(set(again), self._ranks.rank)]
        # Whenever there is something new: after that equal steps keep equal what was equal, which samples watch.
        hashes = self._compare(leaves) if self._groups else []
        planned, self._beside = roster.plan(set(again), hashes, self._ranks.rank)
        return again, [Share(index, name, part) for index, name, part in planned]

    def _look_for_copies(self, leaves: list[Leaf]) -> Optional[str]:
        """What is to be said where ranks seem to have alike what each of them saves for itself."""
        self._has_looked = True
        words = self._ranks.gather("look for copies", lambda: {"samples": _copies.samples_of(leaves)})
        return _copies.told_of(leaves, [word["samples"] for word in words])

    def _compare(self, leaves: list[Leaf]) -> list[str]:
        """What each rank's tensors hash to that others have alike, in pairs with their numbers."""

        def describe() -> dict[str, Any]:
            hashes = []
            for index in sorted(index for group in self._groups for index in group.leaves):
                address, _keep = densify(leaves[index])
                hashes.append((index, _native.hash_bytes(address, leaves[index].size)))
            return {"hashes": json.dumps(hashes)}

        return [word["hashes"] for word in self._ranks.gather("compare", describe)]


def _check_held(roster: _native.Roster, ties: Sequence[tuple[int, Ties]], again: dict[str, str]) -> None:
    """Raises `CheckpointInvalid` where a rank names a tensor of several ranks of which none has anything to save."""
    held = roster.held_together()
    for rank, named in ties:
        lacking = [name for name in named if again.get(name, name) not in held]
        if lacking:
            names = ", ".join(f"`{name}`" for name in lacking[:5])
            text = f"rank {rank} has nothing of {names}, and the state of no other rank has a part of it"
            raise CheckpointInvalid(f"{text} (hint: save a tensor on all ranks that hold it)")


def _is_again(leaf: Leaf, again: dict[str, str]) -> bool:
    """Whether a tensor of several ranks is saved under another name."""
    return leaf.part is not None and leaf.name in again


def _outline(leaves: list[Leaf], ties: Ties) -> str:
    """What is the same on ranks that have the same tensors, whichever parts of them: see ckpt/src/roster.rs."""
    tensors = [(leaf.name, leaf.dtype, leaf.shape, leaf.placement if leaf.part is None else "part") for leaf in leaves]
    return json.dumps({"tensors": tensors, "ties": ties})


def _parts(leaves: list[Leaf]) -> str:
    """Where the parts lie that this rank has, of each in turn the offsets and the lengths."""
    return json.dumps([number for leaf in leaves if leaf.part is not None for each in leaf.part for number in each])


def _bytes_of_small(leaves: list[Leaf]) -> str:
    """What this rank has for itself and is small, in pairs of its number and its bytes."""
    small = []
    for index, leaf in enumerate(leaves):
        is_own = leaf.part is None and leaf.placement == "local" and not leaf.path.startswith("rng")
        # What a device has would keep the training waiting, at each save.
        if is_own and leaf.address is not None and 0 < leaf.size <= SMALL:
            small.append((index, ctypes.string_at(leaf.address, leaf.size).hex()))
    return json.dumps(small)


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
