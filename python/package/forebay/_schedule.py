"""When a checkpointer saves by itself: every so many steps, every so many minutes, and when a signal asks the job to end.

Of the minutes and of signals all ranks hear in one meeting. Where steps are short they do not meet at each of them.
"""

from __future__ import annotations

import time
from typing import Any, Optional

from ._ranks import Ranks
from ._signals import Notice

APART_S = 0.5
"""How far meetings are apart, about: a signal is acted upon within this, and a step more."""

_MOST_CALLS = 16
"""Calls from one meeting to the next at most: steps may become slow all of a sudden, and a signal is not to wait for many."""


class Schedule:
    """The schedule of a job. All ranks ask it at the same steps."""

    def __init__(self, every: Optional[int], every_minutes: Optional[float], notice: Notice) -> None:
        self._every = every
        self._every_s: Optional[float] = None if every_minutes is None else 60 * every_minutes
        self._notice = notice
        self._saved_at = self._met_at = time.monotonic()
        self._calls = 0
        """Since the last meeting."""
        self._next = 1
        """At which of these all meet, as rank 0 said in the last one: all count alike."""

    @property
    def is_used(self) -> bool:
        """Whether there is any."""
        return self._every is not None or self._every_s is not None

    def count(self) -> None:
        """A step begins. To be called before anything else that it does, which may fail on one rank."""
        self._calls += 1

    def hear(self, ranks: Ranks) -> tuple[bool, bool]:
        """Whether a signal asks this job to end, and whether the minutes are over, for all ranks alike; a signal that came to any
        rank is from then on every rank's. Both are False where they do not meet at this step."""
        has_any = self._notice.is_used or self._every_s is not None
        if not has_any or self._calls < self._next:
            return False, False

        def tell() -> dict[str, Any]:
            now = time.monotonic()
            # Clocks differ: rank 0's counts.
            is_time = self._every_s is not None and now - self._saved_at >= self._every_s
            return {"signal": self._notice.received, "is_time": is_time, "next": self._next_after(now - self._met_at, ranks)}

        words = ranks.gather("look for signals and at the clock", tell)
        self._calls, self._next, self._met_at = 0, words[0]["next"], time.monotonic()
        told = [word["signal"] for word in words if word["signal"] is not None]
        if told and self._notice.received is None:
            self._notice.received = told[0]
        return bool(told), words[0]["is_time"]

    def _next_after(self, seconds: float, ranks: Ranks) -> int:
        """In how many calls ranks meet again, where the last ones took so long; not many more than before, as those may have been
        short ones."""
        if ranks.alone:
            return 1
        return max(1, min(int(APART_S * self._calls / max(seconds, 1e-6)), 2 * self._next, _MOST_CALLS))

    def is_due(self, step: int) -> bool:
        """Whether this step is one of those that are saved by their numbers."""
        return self._every is not None and step % self._every == 0

    def begin_anew(self) -> None:
        """A step is saved now: the next minutes begin."""
        self._saved_at = time.monotonic()
