"""What this job has in memory: of its own saves, or what the agents of its killed processes still hold."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union

from . import _asked, _native
from ._errors import CheckpointCorrupt, CheckpointError, warn
from ._ranks import Ranks, use_together
from ._sources import (
    MOST_RANKS,
    Source,
    candidate_of,
    choices,
    flat,
    held_places,
    kept_parts,
    lost_ranks,
    words_of,
)
from ._url import digest, exists, memory_name

T = TypeVar("T")

LOOK = "look for what is in memory"
"""What ranks are at when they first meet for a restore."""

OF_HOSTS = "arena: it is in the memory of several hosts"
"""Why a step in memory is not used where one rank would read all of it."""

PATIENCE_S = 5.0
"""How long the store may take to say whether the job was started elsewhere; it may be what is out of reach."""


class Memory:
    """What is in memory, one part for each rank that saved: of this job's own saves, or until this start has an agent, what the
    agents of killed processes hold, on whichever host and of however many ranks they are, and keep for others."""

    def __init__(self, url: str, ranks: Ranks) -> None:
        self._url = url
        self._ranks = ranks
        self._inherited: Optional[_native.Predecessor] = None
        self._has_looked = False
        self.passed_over: list[str] = []
        """Why the last `use` used nothing."""
        self.is_used = False
        """Whether the last `use` used what this number of ranks holds."""
        self.has_touched = False
        """Whether the last `use` may have left something in the state."""
        self.seen: Optional[int] = None
        """The highest number of a start in the store, as the last `use` found; None where it did not look, or was not told."""
        self.start: Optional[str] = None
        """The nonce of the start whose memory this rank has, as the last `use` found it, if there is any."""
        self.own_step: Optional[_native.Named] = None
        """What the last `use` used of this job's own memory."""
        self.left: Optional[_native.Named] = None
        """What the agents of killed processes have for all ranks, of which some need what only other hosts' memory has."""
        self.is_of_peers = False
        """Whether the last `use` used copies that hosts keep for each other."""
        self.is_read_alone = False
        """Whether a rank reads what all saved, which it finds in the memory of its own host alone."""
        self.lost: list[int] = []
        """The ranks of which the last `use` found no agent on any host, where it found any."""
        self.lost_before: list[int] = []
        """The same of the ranks whose step it used."""
        self.kept: list[tuple[int, str, int]] = []
        """What of both agents keep for other hosts, of steps that may have all their parts: rank, nonce of the start, and step."""
        self._visited: dict[str, _native.Predecessor] = {}
        """Whom this rank sees at places of this host, while a `use` lasts."""

    def place(self, rank: int) -> str:
        """Where the agent of a rank is found once its trainer was killed."""
        return f"{self._places()}{rank}-{self._ranks.world_size}"

    def _places(self) -> str:
        """What the names of such places begin with, of all ranks, however many there are."""
        return f"{_native.PLACES}{digest(os.getuid(), memory_name(self._url))}-"

    def use(self, step: Optional[int], use: Callable[[_native.Step], T], session: _native.Session, nonce: str) -> Optional[T]:
        """Calls `use` with the newest step that all ranks hold, or with `step`; all ranks do, or none. This rank's own is what
        the `session` of the start of that `nonce` has. Raises `CheckpointInvalid` where ranks do not ask for the same step.

        None where they hold none, the job was started elsewhere since, the step was committed and deleted since, or what
        they hold is damaged, which is a warning.
        """
        self.passed_over, self.has_touched, self.is_used, self.seen = [], False, False, None
        self.start, self.own_step, self.left, self.is_of_peers = None, None, None, False
        opened: list[_native.OpenMemory] = []

        def look() -> dict[str, Any]:
            place, held = self.place(self._ranks.rank), self._inherit()
            # What was committed meanwhile may have been deleted.
            session.take_replies(0.0)
            if held is None and session.held():
                # Not twice the same: a child that was forked meanwhile may have it open.
                place = "forebay-open-" + digest(os.getuid(), nonce, self._ranks.rank, secrets.token_hex(8))
                held = self._visit(place, self._ranks.rank, lambda: opened.append(session.open_memory(place)))
            if held is not None:
                self._visited[place] = held
            self.start = None if held is None else held.start
            found = {"place": place, **words_of(held, is_own=bool(opened)), "strays": self._strays()}
            return {**_asked.told(step), **found}

        try:
            words = self._ranks.gather(LOOK, look)
            _asked.refuse_different(words)
            used = self._use(step, use, words)
        finally:
            for one in opened:
                one.close()
            for agent in self._visited.values():
                # As below; what this rank's killed process left is to be adopted.
                if agent is not self._inherited:
                    agent.release()
            self._visited.clear()
        if not opened:
            self.own_step = None
        return used

    def agents(self) -> list[tuple[int, int, str]]:
        """The agents of this job that wait on this host, of however many ranks it had: rank, number of ranks, and place."""
        prefix, found = self._places(), []
        for name in held_places():
            rank, _, size = name.removeprefix(prefix).partition("-")
            if name.startswith(prefix) and rank.isdecimal() and size.isdecimal() and int(rank) < int(size) <= MOST_RANKS:
                found.append((int(rank), int(size), name))
        return found

    def _strays(self) -> list[dict[str, Any]]:
        """What the lowest rank of a host tells of agents there whose ranks are elsewhere now, or not there any more."""
        here = self._ranks.here()
        if self._ranks.rank != here[0]:
            return []
        words = []
        for rank, size, place in self.agents():
            is_own = size == self._ranks.world_size and rank in here
            found = None if is_own else self._visit(place, rank)
            if found is not None:
                self._visited[place] = found
                words.append({"rank": rank, "size": size, "place": place, **words_of(found, is_own=False)})
        return words

    def _use(
        self,
        step: Optional[int],
        use: Callable[[_native.Step], T],
        words: list[dict[str, Any]],
    ) -> Optional[T]:
        self.lost, self.lost_before, self.kept = lost_ranks(words), [], kept_parts(words)
        candidate = candidate_of(words, step)
        if candidate is None:
            if any(word["held"] for word in flat(words)):
                self.passed_over.append("arena: not all ranks hold the step")
            return None
        common, is_same = candidate.step, len(candidate.sources) == len(words)
        store = survey(self._url, self._ranks, f"step {common[1]} is restored from memory")
        self.seen = None if store is None else store.number
        reason = None if store is None else _reason_against(flat(words), common, store, step)
        if reason is not None:
            self.passed_over.append(f"arena: {reason}")
            return None
        is_out_of_reach = self.is_read_alone and self._ranks.are_spread
        if is_out_of_reach:
            self.passed_over.append(OF_HOSTS)
        for chosen in () if is_out_of_reach else choices(candidate, self._ranks.hosts()):
            try:
                used = self._read(use, common, chosen)
            except CheckpointCorrupt as error:
                self.has_touched = True
                self.passed_over.append(f"arena: {error}")
                warn(f"{self._url}: step {common[1]} in memory is not used: {error}")
            else:
                self.is_used, self.own_step = is_same, common
                self.is_of_peers = any(source.is_copy for source in chosen)
                self.lost_before = [rank for rank, found in enumerate(candidate.sources) if all(one.is_copy for one in found)]
                return used
        # All ranks alike, as they wait for it together; of its own saves a job knows what becomes of them.
        if is_same and self._ranks.are_spread and all(word["began"] is not None for word in words):
            self.left = common
        return None

    def take(self) -> Optional[_native.Predecessor]:
        """What this rank's killed process left, for its session to adopt; once."""
        taken, self._inherited = self._inherit(), None
        return taken

    def leave(self) -> None:
        """Leaves that to whoever comes next."""
        self._inherited, self._has_looked = None, True

    def _inherit(self) -> Optional[_native.Predecessor]:
        if not self._has_looked:
            self._has_looked = True
            self._inherited = self._visit(self.place(self._ranks.rank), self._ranks.rank)
        return self._inherited

    def _visit(
        self, place: str, rank: int, before: Callable[[], None] = lambda: None
    ) -> Optional[_native.Predecessor]:
        try:
            before()
            return _native.Predecessor.visit(place)
        except CheckpointError as error:
            # It is of no use then, and no reason not to train.
            warn(f"what rank {rank} has in memory is not used: {error}")
            return None

    def _read(
        self,
        use: Callable[[_native.Step], T],
        step: _native.Named,
        chosen: Sequence[Source],
    ) -> T:
        opened: list[_native.Step] = []
        here = self._ranks.here()

        def tell() -> dict[str, Any]:
            own = [rank for rank, source in enumerate(chosen) if source.beside == self._ranks.rank]
            return {"told": {rank: self._find(chosen[rank], rank).told(step, rank) for rank in own}}

        # Ranks of one host see for themselves.
        is_spread = len(here) < self._ranks.world_size
        words = self._ranks.gather_whole("tell what is in memory", tell) if is_spread else []

        def open_parts() -> None:
            holders: list[Union[_native.Predecessor, str]] = []
            for rank, source in enumerate(chosen):
                is_here = source.beside in here
                # Keys are texts in JSON.
                holders.append(self._find(source, rank) if is_here else words[source.beside]["told"][str(rank)])
            opened.append(_native.open_held(holders, [source.beside for source in chosen], step))

        try:
            # Apart: ranks meet while they use it, and one that cannot open it would not be there.
            use_together(self._ranks, "open what is in memory", open_parts)
            return use_together(self._ranks, "read a step", lambda: use(opened[0]))
        finally:
            for one in opened:
                # What reads it may refer to itself, and be collected late.
                one.release()

    def _find(self, source: Source, rank: int) -> _native.Predecessor:
        """Who has a rank's part, on this host."""
        if source.place not in self._visited:
            found = self._visit(source.place, rank)
            if found is None:
                raise CheckpointCorrupt(f"what rank {rank} had in memory is gone")
            self._visited[source.place] = found
        return self._visited[source.place]


class Survey(NamedTuple):
    """What the store has."""

    newest: Optional[str]
    """The newest start's nonce, empty where its record is damaged; None where nobody started."""
    number: int
    """Its number, else 0."""
    steps: list[tuple[str, int]]
    """The steps, newest first, by the first eight characters of their starts' nonces."""
    began: Optional[tuple[str, int]]
    """Where the newest start began, and when, in milliseconds since 1970, as it says."""


def survey(url: str, ranks: Ranks, act: str) -> Optional[Survey]:
    """What the store has, as rank 0 finds.

    None where it does not tell, with a warning of what is done without: it may be what is out of reach.
    """

    def ask() -> Any:
        try:
            return _native.survey(url, PATIENCE_S)
        except CheckpointError as error:
            if _is_gone(url):
                text = f"the directory is missing, and {act} (hint: where it was deleted to begin anew, make an empty one first)"
            else:
                text = f"{act}, and it is not known whether the job went on elsewhere: {error}"
            # Here, so that the others hear of it where warnings are errors.
            warn(f"{url}: {text}")
            return None

    found = ranks.first("look for later starts", ask)
    return None if found is None else Survey(*found)


def _is_gone(url: str) -> bool:
    """Whether the store is a directory that is not there: away with its disk, or deleted."""
    gone = threading.Event()

    def look() -> None:
        if not exists(url):
            gone.set()

    # A file system that hangs is away, and is not waited for.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(PATIENCE_S)
    return gone.is_set()


def _was_late(words: Sequence[Any], store: Survey) -> bool:
    """Whether the newest start in the store began before the one whose memory is held, on the same host: its trainer was killed
    before its agent was up, which came to the store after that of the next start.
    """
    began = [word["began"] for word in words if word["began"] is not None]
    if store.began is None or not began:
        return False
    host, started_ms = store.began
    return all(host == own_host and started_ms < own_ms for own_host, own_ms in began)


def _reason_against(
    words: Sequence[Any], step: _native.Named, store: Survey, asked: Optional[int] = None
) -> Optional[str]:
    """Why a step that is held is not used where the store has that; None where it may be. A step that was `asked` for may be older
    than others."""
    start, number = step
    newest = store.newest
    # A start that died before its agent took over is none of these. Where the newest step is still one of theirs, it and
    # others like it saved nothing.
    steps = [held for word in words for held in [*word["held"], *(kept for _, kept in word["kept"])]]
    own = {word["start"] for word in words} | {held[0] for held in steps}
    # Nor one that they came after, whose number stays the newest until their agents take theirs.
    known = {nonce[:8] for nonce in own if nonce} | {attempt for word in words for attempt in word["after"]}
    is_unknown = newest is not None and newest[:8] not in known and store.steps and store.steps[0][0] not in known
    if is_unknown and not _was_late(words, store):
        return "the job was started elsewhere since"
    # What the ranks said was said before the store was asked: what was committed by then is there unless it was deleted.
    is_durable = any([start, number] in word["durable"] for word in words)
    if is_durable and [start[:8], number] not in [list(entry) for entry in store.steps]:
        return f"step {number} was deleted from the store"
    # Copies may be missing of a step that is durable, and what killed ranks of another number hold be older than it.
    later = {word["start"][:8] for word in words if word["start"] not in (None, start) and start[:8] in word["after"]}
    for attempt, there in store.steps:
        if asked in (None, there) and (attempt in later or (attempt == start[:8] and there > number)):
            return f"the store has a newer step {there}"
    return None
