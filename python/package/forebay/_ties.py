"""Names of one tensor: which of those that several ranks hold together lie in the same memory.

Where a rank has nothing of a tensor its memory tells nothing, so that the ranks say together what is one: names that each
of them finds alike. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Ties = dict[str, int]
"""By name of a tensor a number, equal where this rank cannot tell two of them apart."""


def aliases(ranks: Sequence[Ties]) -> dict[str, str]:
    """Which names mean the tensor of another name, and of which, from what all ranks say.

    One name that some rank finds to be another tensor, or lacks, is one of its own.
    """
    lead: dict[tuple[Any, ...], str] = {}
    found = {}
    # In the order of the lowest rank that has them: their ranks are the same.
    for name in dict.fromkeys(name for ties in ranks for name in ties):
        first = lead.setdefault(tuple(ties.get(name) for ties in ranks), name)
        if first != name:
            found[name] = first
    return found
