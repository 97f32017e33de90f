"""What becomes of saves: those that failed are told, in the way that `on_error` says.

Ranks hear of a failure at different moments. Where they meet, at a save, they go by what any of them heard, so that
all raise or none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Optional

from ._errors import CheckpointError, CheckpointSuperseded

if TYPE_CHECKING:
    from ._save import Save

OnError = Literal["raise", "warn"]

MAX_FAILURES = 3
"""Failed saves in a row that are only warned about when nothing else is said: one is an accident, and of three the last
good step is three intervals away."""


class Trouble:
    """What is to be raised, and which step's save it is about."""

    def __init__(self, step: int, error: CheckpointError, text: str) -> None:
        self.step = step
        self.error = error
        """As it is kept: `anew` makes what is raised."""
        self._text = text

    def as_fact(self) -> dict[str, Any]:
        """What other ranks are told."""
        return {"step": self.step, "kind": type(self.error).__name__, "text": self._text}


class Outcomes:
    """How sealed saves ended, and what of that was told. For any thread."""

    def __init__(self, on_error: OnError = "raise", max_failures: int = MAX_FAILURES) -> None:
        self._warns = on_error == "warn"
        self._max_failures = max_failures
        self._lock = threading.RLock()
        self._pending: list[Save] = []
        self._untold: list[Save] = []
        self._in_a_row = 0
        self._last_failed: Optional[Save] = None
        # Pending saves that another rank told of before this one heard.
        self._told_ahead: list[Save] = []

    def may_pass(self, error: CheckpointError) -> bool:
        """Whether a failure is only warned about."""
        return self._warns and _may_pass(error)

    def follow(self, save: Save) -> None:
        """The agent was given one."""
        with self._lock:
            self._pending.append(save)

    def under_way(self, step: Optional[int]) -> list[Save]:
        """Saves of the step, or all if that is None, that are neither durable nor failed, as far as this rank heard."""
        with self._lock:
            self._hear()
            return [save for save in self._pending if step in (None, save.step)]

    def was_told(self, save: Save) -> None:
        """Its own handle raised what went wrong: it counts, and is not told again."""
        with self._lock:
            self._hear()
            self._untold = [other for other in self._untold if other is not save]

    def trouble(self, may_count: bool = True) -> Optional[Trouble]:
        """What is to be raised now; it is until `were_raised`. Failures in a row are only looked at if it `may_count`."""
        with self._lock:
            self._hear()
            for save in self._untold:
                if save._failure is not None and not self.may_pass(save._failure):
                    return Trouble(save.step, save._failure, _sentence(save))
            last = self._last_failed
            if last is None or not (self._warns and may_count and self._in_a_row >= self._max_failures):
                return None
            text = f"{self._in_a_row} saves in a row failed (max_failures={self._max_failures}), the last one: {_sentence(last)}"
            error = type(last._failure or CheckpointError())(text)
            error.__cause__ = last._failure
            return Trouble(last.step, error, text)

    def were_raised(self, steps: Iterable[int]) -> None:
        """The troubles of these steps' saves were raised, here or on all ranks: failures are counted anew."""
        told = set(steps)
        with self._lock:
            self._untold = [save for save in self._untold if save.step not in told]
            self._tell_no_more(told)
            self._in_a_row, self._last_failed = 0, None

    def is_known(self, step: int) -> None:
        """That saves of the step failed is known to the ranks, which save it again: who hears it later need not tell."""
        with self._lock:
            self._tell_no_more({step})

    def leave(self, step: int) -> None:
        """The job went back to the step: nobody wants to hear what becomes of later ones that are under way."""
        with self._lock:
            self._hear()
            self._pending = [save for save in self._pending if save.step <= step]

    def next_warning(self, all_pass: bool = False) -> Optional[str]:
        """A failure that is only warned about, as each is if `all_pass`; each is given once."""
        with self._lock:
            self._hear()
            for save in self._untold if self._warns or all_pass else ():
                if save._failure is not None and (all_pass or _may_pass(save._failure)):
                    self._untold.remove(save)
                    return _sentence(save)
        return None

    def _tell_no_more(self, steps: set[int]) -> None:
        # Of saves that are pending now: a step may be saved again once it failed.
        self._told_ahead = [save for save in self._pending if save.step in steps or save in self._told_ahead]

    def _hear(self) -> None:
        """Takes note of saves that ended, in their order."""
        for save in list(self._pending):
            if save.durable:
                self._in_a_row, self._last_failed = 0, None
            elif save._find_failure() is None:
                continue
            elif save not in self._told_ahead:
                self._in_a_row, self._last_failed = self._in_a_row + 1, save
                self._untold.append(save)
            self._pending.remove(save)
            self._told_ahead = [other for other in self._told_ahead if other is not save]


def _may_pass(error: CheckpointError) -> bool:
    """Whether the next save may do better; once another start took over, none will."""
    return not isinstance(error, CheckpointSuperseded)


def _sentence(save: Save) -> str:
    text, start = str(save._failure), f"step {save.step} was not saved"
    return text if text.startswith(start) else f"{start}: {text}"
