"""What several ranks want of a step: read once between them, the ranks of a host at the same pace."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection
from typing import Any, Optional

from . import _native
from ._errors import CheckpointCorrupt, CheckpointError, warn
from ._hosts import new_door, wanted_cards
from ._pieces import Pieces
from ._ranks import Ranks, use_together
from ._tensors import Tensors


class _Found:
    """What came to this rank of others."""

    def __init__(self, step: _native.Step) -> None:
        self._step = step
        self._told: set[int] = set()
        self.lost: set[int] = set()
        """The ranks of which something did not come, or came damaged."""
        self.is_whole = True

    def tell_lost(self, lost: Collection[int], fact: str) -> None:
        """Warns of ranks of other hosts that did not send what they have; what is in their memory alone is another matter."""
        news = sorted(set(lost) - self._told)
        self._told.update(news)
        if news and self._step.tier == "store":
            named, hint = ", ".join(map(str, news)), "hosts of a job must reach each other by TCP, at any port"
            text = f"ranks of other hosts {fact} ({named}): this one reads of the store itself"
            warn(f"step {self._step.step}: {text} (hint: {hint})")


def read_shared(step: _native.Step, ranks: Ranks, tensors: Tensors) -> None:
    """Reads what this rank wants, together with the others, which all know when all have it."""
    near = ranks.near()
    doors: list[_native.Door] = []

    def tell() -> dict[str, Any]:
        address = None
        if ranks.are_spread:
            door, address = new_door()
            doors.append(door)
        return {"wishes": base64.b64encode(tensors.wishes()).decode(), "address": address}

    words = ranks.gather_whole("share a restore", tell)
    wishes = [base64.b64decode(word["wishes"]) for word in words]
    together = use_together(
        ranks, "share a restore", lambda: _native.Together(step, wishes, ranks.rank, ranks.hosts())
    )
    found = _Found(step)

    def connect() -> dict[str, Any]:
        together.take_lent()
        if doors:
            addresses = [json.dumps(word["address"]) for word in words]
            found.tell_lost(together.connect(doors[0], addresses, wanted_cards()), "cannot be reached")
        return {}

    def meet(is_whole: bool, lost: set[int], error: Optional[BaseException]) -> bool:
        """Whether each rank of this host has all that it was to have by now."""

        def tell() -> dict[str, Any]:
            if error is not None:
                raise error
            found.lost.update(lost)
            found.tell_lost(lost, "did not send what they have")
            return {"whole": is_whole}

        try:
            return all(word["whole"] for word in near.gather("read a round", tell))
        except CheckpointError:
            if error is not None or near is ranks:
                raise
            # Who failed tells all ranks why, where they meet next.
            return False

    def read(targets: list[_native.Wanted], pieces: Pieces, threads: int) -> None:
        """Into targets, and through a buffer what cannot be read into: what several want, then what no other waits for."""
        if near is not ranks:
            # One that failed before is not heard where the ranks of its host meet.
            ranks.gather("begin a restore", dict)
        if together.rounds > 0:
            near.lend(together)
            near.gather("connect", connect)
            found.is_whole = together.read(targets, pieces.wanted, (pieces.take, meet), threads)
            if (trouble := together.card_trouble()) is not None:
                warn(f"step {step.step}: bytes of other hosts came over TCP, not RDMA: {trouble}")
        if found.is_whole:
            together.read_rest(targets, threads)
            pieces.read(together.read_rest_through, threads)

    def read_all() -> dict[str, Any]:
        tensors.read(read)
        return {"whole": found.is_whole, "lost": sorted(found.lost)}

    words = ranks.gather_whole("read tensors", read_all)
    if not all(word["whole"] for word in words):
        lost = sorted({rank for word in words for rank in word["lost"]})
        named = ", ".join(str(rank) for rank in lost)
        raise CheckpointCorrupt(f"step {step.step}: what other hosts' memory has did not come from there (ranks {named})")
