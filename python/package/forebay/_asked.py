"""Which step, and what of it, the ranks of a job ask for: the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from ._errors import CheckpointInvalid

_MOST_NAMED = 5
"""Steps that are named where ranks differ."""


def told(step: Optional[int], start: Optional[int] = None) -> dict[str, Any]:
    """What a rank tells the others of the step that it asks for, as a start saved it where that is named; None is the newest."""
    return {"asked": None if step is None else f"{step}" if start is None else f"{step}.{start}"}


def refuse_different(words: Sequence[dict[str, Any]]) -> None:
    """Raises `CheckpointInvalid`, on all ranks alike, where these do not ask for the same step."""
    first: dict[Optional[str], int] = {}
    for rank, word in enumerate(words):
        first.setdefault(word["asked"], rank)
    if len(first) > 1:
        named = [f"{step or 'the newest'} (rank {rank})" for step, rank in first.items()]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        text = f"the ranks ask for different steps: {', '.join(named[:_MOST_NAMED])}{more}"
        raise CheckpointInvalid(f"{text} (hint: ask on one rank and tell the others, or leave step= away)")


def refuse_unlike(choices: Sequence[str]) -> None:
    """Raises `CheckpointInvalid`, on all ranks alike, where these did not choose the same to be restored."""
    rank = next((rank for rank, choice in enumerate(choices) if choice != choices[0]), None)
    if rank is not None:
        text = f"only=, without=, strict=, rename= or options= of rank {rank} differ from those of rank 0"
        raise CheckpointInvalid(f"{text} (hint: give them alike on all ranks)")
