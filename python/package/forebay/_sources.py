"""Where the parts of steps in memory are: with agents of a job's killed ranks, of however many there were, on whichever hosts, and
with those that keep copies for others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

from . import _native

MOST_RANKS = 1 << 16
"""Ranks of a job at most, as the names of its agents' places are believed."""


class Source(NamedTuple):
    """Where a rank's part of a step is."""

    beside: int
    """A rank of that host, which tells the others of it."""
    place: str
    """Whom ranks of that host find it at."""
    is_copy: bool
    """Whether it is what that one keeps for another host."""


class Candidate(NamedTuple):
    """A step in memory that has all its parts."""

    step: tuple[str, int]
    """Its start's nonce, and its number."""
    sources: list[list[Source]]
    """Of each rank that saved it, where its part is."""


def held_places() -> list[str]:
    """The names at which agents of this host are found, as proc_net_unix(5) tells them."""
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="ascii", errors="replace") as table:
        words = (line.rsplit(maxsplit=1)[-1] for line in table)
        return sorted({word[1:] for word in words if word.startswith("@" + _native.PLACES)})
    return []


def words_of(found: Optional[_native.Predecessor], is_own: bool) -> dict[str, Any]:
    """What a rank tells the others of what is in memory, its process's own or with an agent."""
    if found is None:
        return {"start": None, "began": None, "after": [], "held": [], "durable": [], "kept": []}
    held, durable = ([list(entry) for entry in entries] for entries in (found.held(), found.durable()))
    kept = [[rank, list(entry)] for rank, entry in found.kept()]
    # No start that is in the store is late beside one that lives.
    began = None if is_own else [socket.gethostname(), found.started_ms]
    return {"start": found.start, "began": began, "after": found.after(), "held": held, "durable": durable, "kept": kept}


def flat(words: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks tell of agents: of their own, and of others on their hosts (`strays`)."""
    return [*words, *(stray for word in words for stray in word["strays"])]


def newest_common(held: Sequence[Sequence[Any]]) -> Optional[tuple[str, int]]:
    """The newest step that all ranks hold, from what each of them does, newest first."""
    for entry in held[0]:
        if all(entry in other for other in held[1:]):
            start, step = entry
            return start, step
    return None


def candidate_of(words: Sequence[dict[str, Any]], step: Optional[int]) -> Optional[Candidate]:
    """The newest step, or `step`, that has all its parts, of as many ranks as there are now or of another number; of several the
    one of the start that came after the others'."""
    best: Optional[Candidate] = None
    for sources in _sources_of(words).values():
        common = newest_common([[entry for entry in found if step in (None, entry[1])] for found in sources])
        if common is None:
            continue
        own = {word["start"]: word["after"] for word in flat(words)}
        if best is None or best.step[0][:8] in own.get(common[0], []):
            best = Candidate(common, [found[common] for found in sources])
    return best


def lost_ranks(words: Sequence[dict[str, Any]]) -> list[int]:
    """The ranks of this job of which no host has an agent with anything of their own."""
    own = _sources_of(words)[len(words)]
    return [rank for rank, found in enumerate(own) if all(one.is_copy for several in found.values() for one in several)]


def kept_parts(words: Sequence[dict[str, Any]]) -> list[tuple[int, str, int]]:
    """What agents keep for ranks of other hosts: the rank, the nonce of the start, and the step, each once."""
    return sorted({(rank, start, step) for word in flat(words) for rank, (start, step) in word["kept"]})


def choices(candidate: Candidate, hosts: Sequence[int]) -> list[list[Source]]:
    """Which of the parts of a step are read: what was sealed itself, on the host where it is wanted if it is there; and then, if
    any, what hosts keep for each other. `hosts` says which each rank is on."""
    are_same = len(candidate.sources) == len(hosts)

    def choose(prefers_copies: bool) -> list[Source]:
        def is_worse(source: Source, rank: int) -> tuple[bool, bool]:
            return source.is_copy is not prefers_copies, are_same and hosts[source.beside] != hosts[rank]

        return [min(several, key=partial(is_worse, rank=rank)) for rank, several in enumerate(candidate.sources)]

    first, second = choose(False), choose(True)
    return [first] if first == second else [first, second]


def _sources_of(words: Sequence[dict[str, Any]]) -> dict[int, list[dict[tuple[str, int], list[Source]]]]:
    """By number of ranks, of each of them, where its parts of steps are: with its own agent first, newest first. As many ranks as
    there are now come first."""
    agents = [(rank, len(words), rank, word) for rank, word in enumerate(words)]
    agents += [(beside, stray["size"], stray["rank"], stray) for beside, word in enumerate(words) for stray in word["strays"]]
    found: dict[int, list[dict[tuple[str, int], list[Source]]]] = {}
    for _, size, _, _ in agents:
        if size not in found:
            found[size] = [{} for _ in range(size)]

    def add(size: int, rank: int, step: Sequence[Any], source: Source) -> None:
        # Who keeps another rank's copy may say anything.
        if rank < size:
            found[size][rank].setdefault((step[0], step[1]), []).append(source)

    for beside, size, rank, word in agents:
        for step in word["held"]:
            add(size, rank, step, Source(beside, word["place"], False))
    for beside, size, _, word in agents:
        for rank, step in word["kept"]:
            add(size, rank, step, Source(beside, word["place"], True))
    return found
