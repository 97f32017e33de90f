"""Which parts in memory a restore reads, from what ranks tell of the agents on their hosts."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from forebay._sources import Source, candidate_of, choices, kept_parts, lost_ranks

OLD, NEW = "a" * 32, "b" * 32


def word(start: Optional[str], *steps: int, after: str = "", kept: Any = (), **stray: Any) -> dict[str, Any]:
    """What is told of an agent of a start."""
    held = [[start, step] for step in steps]
    place = stray.get("place") or f"{start}-{steps}"
    told = {"start": start, "after": [after[:8]] if after else [], "held": held, "kept": [list(copy) for copy in kept]}
    return {**told, "strays": [], **stray, "place": place}


def test_copies_take_the_place_of_what_is_lost_or_damaged() -> None:
    words = [word(OLD, 4, 3, place="p0", kept=[(1, [OLD, 4]), (1, [OLD, 3])]), word(None, place="p1")]
    candidate = candidate_of(words, None)
    assert candidate is not None and candidate.step == (OLD, 4) and lost_ranks(words) == [1]
    assert kept_parts(words) == [(1, OLD, 3), (1, OLD, 4)]
    assert choices(candidate, [0, 1]) == [[Source(0, "p0", False), Source(0, "p0", True)]]
    # All of it twice: first as it was sealed.
    words[1] = word(OLD, 4, 3, place="p1", kept=[(0, [OLD, 4])])
    candidate = candidate_of(words, None)
    assert candidate is not None and lost_ranks(words) == []
    assert choices(candidate, [0, 1]) == [
        [Source(0, "p0", False), Source(1, "p1", False)],
        [Source(1, "p1", True), Source(0, "p0", True)],
    ]
    assert candidate_of(words, 3) is not None, "of that one a copy is missing, and not wanted"
    assert candidate_of([words[0], word(None)], 2) is None


def test_ranks_read_where_they_are_what_is_there() -> None:
    """Ranks 0 and 1 changed places, and are back."""
    strays = [word(OLD, 4, rank=rank, size=2, place=f"s{rank}") for rank in (1, 0)]
    words = [{**word(OLD, 4, place=f"p{rank}"), "strays": [strays[rank]]} for rank in (0, 1)]
    candidate = candidate_of(words, None)
    assert candidate is not None
    assert candidate.sources == [[Source(0, "p0", False), Source(1, "s0", False)], [Source(1, "p1", False), Source(0, "s1", False)]]
    assert choices(candidate, [0, 1]) == [[Source(0, "p0", False), Source(1, "p1", False)]]


@pytest.mark.parametrize("later", [1, 2])
def test_the_step_of_the_latest_start_is_read_wherever_its_parts_are(later: int) -> None:
    """A job of two ranks, and one of a single rank, one after the other; now there are two."""
    of_two, of_one = (NEW, OLD) if later == 2 else (OLD, NEW)
    after = {NEW: OLD, OLD: ""}
    stray = word(of_one, 7, after=after[of_one], rank=0, size=1, place="one")
    words = [word(of_two, 5, after=after[of_two], place=f"p{rank}") for rank in (0, 1)]
    words[1]["strays"] = [stray]
    candidate = candidate_of(words, None)
    assert candidate is not None and candidate.step == ((of_two, 5) if later == 2 else (of_one, 7))
    if later == 1:
        assert choices(candidate, [0, 1]) == [[Source(1, "one", False)]]
        # One that lacks a part is none.
        words[1]["strays"][0]["size"] = 2
        words[1]["strays"][0]["rank"] = 1
        candidate = candidate_of(words, None)
        assert candidate is not None and candidate.step == (of_two, 5)


def test_who_tells_of_ranks_that_there_never_were_is_not_heard() -> None:
    words = [word(OLD, 4, kept=[(7, [OLD, 4])])]
    candidate = candidate_of(words, None)
    assert candidate is not None and len(candidate.sources) == 1
