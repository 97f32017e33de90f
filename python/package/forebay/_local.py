"""The copies that agents keep on this host's disk."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Callable, Optional, TypeVar

from . import _native
from ._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointInvalid,
    CheckpointUnavailable,
    CopiesHang,
    warn,
)
from ._held import survey
from ._ranks import Ranks, use_together
from ._url import digest, store_name

T = TypeVar("T")


class LocalCopies:
    """A directory of this host that has the newest steps of a job, all its ranks' parts of them."""

    def __init__(self, url: str, ranks: Ranks, directory: str, keep: int, ceiling: Optional[str]) -> None:
        self._given = directory
        if ranks.are_told_apart:
            self._refuse()
        self._url = url
        self._ranks = ranks
        self._keep = keep
        self._ceiling = ceiling
        self._directory = os.path.join(os.path.abspath(directory), digest(store_name(url)))
        try:
            os.makedirs(self._directory, exist_ok=True)
        except OSError as error:
            raise CheckpointInvalid(f"local={directory!r} is no place for copies: {error}") from error
        self._starts: list[str] = []
        self._seen = 0
        self._resumes: Optional[_native.Named] = None
        self._has_begun = False
        self.passed_over: list[str] = []
        """Why the last `use` used nothing, or not the newest."""
        self.has_touched = False
        """Whether the last `use` may have left something in the state that it did not use."""
        self.hung = 0
        """How often they were left because the disk did not answer."""
        self._hangs = False
        self.seen: Optional[int] = None
        """The highest number of a start in the store, as the last `use` found; None where it did not look, or was not told."""

    def use(self, step: Optional[int], use: Callable[[_native.Step], T]) -> Optional[T]:
        """Calls `use` with the newest step that all ranks find whole there, or with `step`; all ranks do, or none.

        None where there is none, the store has a newer one, the job was started elsewhere since, or all are damaged, which
        is a warning.
        """
        if self._ranks.are_spread:
            self._refuse()
        self.passed_over, self.has_touched, self.seen = [], False, None
        self._starts, self._resumes = [], None
        words = self._ranks.gather("look for local copies", self._look)
        starts: list[str] = words[0]["starts"]
        common = [entry for entry in words[0]["steps"] if all(_has(word, entry) for word in words[1:])]
        if step is not None:
            common = [entry for entry in common if entry[0][1] == step]
        if not common:
            return None
        store = survey(self._url, self._ranks, f"step {common[0][0][1]} is restored from the local disk")
        self.seen = None if store is None else store.number
        seen: int = words[0]["seen"]
        if store is not None and store.newest is not None and store.newest not in starts and store.number > seen:
            self.passed_over.append("local: the job was started elsewhere since")
            return None
        if store is not None and store.number == 0 and any(is_durable for _, is_durable in words[0]["steps"]):
            # Another directory at the same path, or one that somebody emptied to begin anew.
            self.passed_over.append("local: no job ever started in the store, and steps of the copies were there")
            return None
        for (start, number), is_durable in common:
            reason = None if store is None else _reason_against(starts, start, number, is_durable, store.steps, step)
            if reason is not None:
                self.passed_over.append(f"local: {reason}")
                return None
            named = (start, number)
            try:
                opened = use_together(self._ranks, "open a copy", partial(self._open, named))
                used = use_together(self._ranks, "read a step", partial(self._read, use, opened))
            except CheckpointCorrupt as error:
                self.has_touched = True
                self.passed_over.append(f"local: {error}")
                text = f"{self._url}: step {number} on the local disk is not used: {error}"
                warn(text)
                if isinstance(error, CopiesHang):
                    # It is waited for once: nor is another copy looked at.
                    self.hung += 1
                    return None
                continue
            self._starts, self._resumes = starts, None if is_durable else named
            self._seen = seen if store is None else store.number
            return used
        return None

    def _refuse(self) -> None:
        text = f"local={self._given!r}: copies are kept of jobs whose ranks are on one host, and this one's are on several"
        raise CheckpointInvalid(f"{text} (hint: leave it out; memory and the store have the steps)")

    def _open(self, named: _native.Named) -> _native.Step:
        return self._patiently(lambda: _native.open_local(self._directory, named))

    def _read(self, use: Callable[[_native.Step], T], opened: _native.Step) -> T:
        return self._patiently(lambda: use(opened))

    def _patiently(self, work: Callable[[], T]) -> T:
        """Does what reads the disk and nothing else."""
        try:
            return work()
        except CheckpointUnavailable as error:
            self._hangs = True
            raise CopiesHang(str(error)) from error

    def begin_after(self, number: int) -> None:
        """Goes on from no copy, but from what the store had when its newest start had that number."""
        self._starts, self._resumes, self._seen = [], None, number

    def follow(self, start: Optional[str], seen: Optional[int], own_step: Optional[_native.Named]) -> None:
        """Goes on from the copies of a start whose memory was used, where the store had starts up to the number `seen`, if it
        told: all ranks alike, as rank 0 found them, or where it could not look, the next one. What one rank takes for stale its
        agent deletes, the other ranks' parts as well. Of this job's own memory it is told the step: whoever takes over from
        this start brings the copy of it to the store, if that has not got it."""
        words = self._ranks.gather("follow local copies", lambda: {"start": start, **self._look()})
        word = next((word for word in words if word["is_known"]), words[0])
        self._starts, self._resumes = word["starts"] if word["start"] in word["starts"] else [], None
        if self._starts and own_step is not None and all(_has(word, [list(own_step)]) for word in words):
            self._resumes = own_step
        self._seen = word["seen"] if seen is None and self._starts else seen or 0

    def begin(self, nonce: str) -> None:
        """Makes the copies those of the start of that nonce, before it takes its number: by then others are stale."""
        if self._hangs:
            # The agents try as soon as it answers.
            return
        try:
            _native.begin_local(self._directory, [*self._starts, nonce], self._seen)
        except CheckpointError as error:
            # The agents try again, and tell.
            warn(f"copies on the local disk: {error}")

    def begin_anew(self, session: _native.Session, nonce: str) -> None:
        """Has the agent of a session go on with another start, which went back to an earlier step."""
        self._has_begun = False
        self.announce(session, nonce)

    def announce(self, session: _native.Session, nonce: str) -> None:
        """Has the agent of a session keep copies there."""
        if self._ranks.are_spread:
            self._refuse()
        if not self._has_begun:
            self._has_begun = True
            lineage = [*self._starts, nonce], self._seen
            session.set_local(self._directory, self._keep, self._ceiling, lineage, self._resumes)

    def _look(self) -> dict[str, Any]:
        try:
            starts, seen, steps = _native.look_local(self._directory)
        except CheckpointError as error:
            # Of no use then, and no reason not to train.
            self._hangs = isinstance(error, CheckpointUnavailable)
            self.hung += self._hangs
            warn(f"copies on the local disk are not used: {error}")
            return {"starts": [], "seen": 0, "steps": [], "is_known": False}
        self._hangs = False
        found = [[list(name), is_durable] for name, is_durable in steps]
        return {"starts": starts, "seen": seen, "steps": found, "is_known": True}


def _has(word: dict[str, Any], entry: list[Any]) -> bool:
    return any(other[0] == entry[0] for other in word["steps"])


def _reason_against(
    starts: list[str], start: str, number: int, is_durable: bool, store: list[tuple[str, int]], step: Optional[int]
) -> Optional[str]:
    """Why a copy is not used where the store has these steps; None where it may be."""
    places = {nonce[:8]: place for place, nonce in enumerate(starts)}
    if is_durable and [start[:8], number] not in [list(entry) for entry in store]:
        return f"step {number} was deleted from the store"
    theirs = [(places[attempt], there) for attempt, there in store if attempt in places and step in (None, there)]
    if theirs and (places[start[:8]], number) < max(theirs):
        return f"the store has a newer step {max(theirs)[1]}"
    return None
