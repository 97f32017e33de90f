"""Where a restore looks, nearest first: memory, the job's own or what killed processes left, this host's disk, the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Literal, Optional, TypeVar

from . import _asked, _native
from . import _options as options
from ._errors import CheckpointCorrupt, CheckpointNotFound, warn
from ._held import LOOK, Memory
from ._loading import NoStep, telling_what_was_read, with_step
from ._local import LocalCopies
from ._others import await_left, await_others
from ._ranks import Ranks
from ._url import source_url

T = TypeVar("T")

OF_STORE = "store: "
"""What `Restored.passed_over` begins with where it is not a nearer copy."""

Settle = Callable[[Optional[int], bool], None]
"""Waits for this process's own saves of a step, or for all; if so told, not for those that are on the local disk."""


@dataclass(frozen=True)
class Restored:
    """What a restore did."""

    step: int
    """The step."""
    tier: Literal["arena", "peer", "local", "store"]
    """Where it was read: `arena`, memory, this process's own or what a killed one left with its agent, `peer`, the same but for
    ranks of which another host's copies were taken (`replicas`), `local`, a copy on this host's disk, or `store`."""
    rank: int
    """Whose restore it was."""
    bytes: int
    """Bytes read into this rank's state."""
    seconds: float
    """How long it took."""
    passed_over: tuple[str, ...]
    """Why a nearer tier was not used, where it had something, or a newer step."""
    rdma_bytes: int = 0
    """Bytes that this rank's network card read out of other hosts' memory (RDMA), its own and those that it passed on; what
    else came of other hosts came over TCP."""
    missing: tuple[str, ...] = ()
    """With `strict=False`, the names of what the state has and the checkpoint lacked, which was left as it was."""
    unexpected: tuple[str, ...] = ()
    """The names of what the checkpoint has and the state lacked, which was not read."""

    def as_dict(self) -> dict[str, Any]:
        """The same, as plain data."""
        return {"act": "restore", **dataclasses.asdict(self)}


class Ladder:
    """The tiers that a job restores from."""

    def __init__(self, url: str, ranks: Ranks, local: Optional[LocalCopies]) -> None:
        self._url = url
        self._ranks = ranks
        self._local = local
        self.arena = Memory(url, ranks)
        self.passed_over: tuple[str, ...] = ()
        """Why nearer tiers were not used by the last `use`, where they had something."""
        self._has_waited = False
        self.seen: Optional[int] = None
        """The highest number that a start had in the store when the last `use` looked there; None where it did not."""

    def use(
        self,
        step: Optional[options.StepName],
        use: Callable[[_native.Step], T],
        settle: Settle,
        own: tuple[_native.Session, str],
    ) -> Optional[T]:
        """Calls `use` with the newest step that all ranks can get from any tier, or with `step`, out of the nearest one
        whose copy is whole on all ranks; None when there is no step at all. Nearest is the memory of their `own` sessions, given
        with the nonce of their start. Before the store is asked, what is on its way there has to `settle`; before the local
        disk is, that which is not there.

        Raises as `with_step` does, and `CheckpointInvalid` where ranks do not ask for the same step.
        """
        self.passed_over, self.seen = (), None
        number, start = options.step_name(step)
        if start is not None:
            # Others may look for a step in memory, where they tell which.
            _asked.refuse_different(self._ranks.gather(LOOK, lambda: _asked.told(number, start)))
            # Nearer tiers hold what this job saves, of which no other start saved anything again.
            settle(number, False)
            return with_step(self._url, step, self._ranks, use, self._note, self._pass_over)
        step = number
        local = self._local
        used = self.arena.use(step, use, *own)
        passed_over, has_touched = self.arena.passed_over, self.arena.has_touched
        self.seen = self.arena.seen
        if local is not None and used is not None:
            local.follow(self.arena.start, self.seen, self.arena.own_step)
        elif local is not None:
            settle(step, True)
            used = local.use(step, use)
            passed_over, has_touched = passed_over + local.passed_over, has_touched or local.has_touched
            self.seen = local.seen if self.seen is None else self.seen
        self.passed_over = tuple(passed_over)
        if used is not None:
            return used
        try:
            with telling_what_was_read(passed_over if has_touched else ()):
                settle(step, False)
                if self.arena.left is not None:
                    await_left(self._url, self._ranks, self.arena.place(0), self.arena.left)
                if not self._has_waited:
                    self._has_waited = True
                    await_others(self._url, self._ranks, self.arena.agents)
                return with_step(self._url, step, self._ranks, use, self._note, self._pass_over)
        except CheckpointNotFound as error:
            if has_touched:
                text = f"{self._url} holds no step, and nearer copies of one are damaged: the state may hold anything"
                raise CheckpointCorrupt(text) from None
            # A bucket that is not there holds no first start, and steps that were deleted while they were read were there.
            if step is not None:
                source_url(self._url)
                raise
            if not isinstance(error, NoStep):
                raise
            if self.passed_over and self._ranks.rank == 0:
                # There is no `Restored` to tell it.
                text = f"{self._url} holds no step, and nothing is restored: {'; '.join(self.passed_over)}"
                warn(text)
            return None

    def _pass_over(self, damaged: Sequence[str]) -> None:
        self.passed_over += tuple(f"{OF_STORE}{text}" for text in damaged)

    def _note(self, number: int) -> None:
        self.seen = number
        if self._local is not None:
            self._local.begin_after(number)
