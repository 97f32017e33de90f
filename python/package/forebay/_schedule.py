"""When a checkpointer saves by itself: every so many steps, and every so many minutes."""

from __future__ import annotations

import time
from typing import Optional

from ._ranks import Ranks


class Schedule:
    """The schedule of a job. All ranks ask it at the same steps."""

    def __init__(self, every: Optional[int], every_minutes: Optional[float]) -> None:
        self._every = every
        self._every_s: Optional[float] = None if every_minutes is None else 60 * every_minutes
        self._saved_at = time.monotonic()

    @property
    def is_used(self) -> bool:
        """Whether there is any."""
        return self._every is not None or self._every_s is not None

    def is_due(self, step: int, ranks: Ranks) -> bool:
        """Whether this step is to be saved, on all ranks or none."""
        if self._every is not None and step % self._every == 0:
            return True
        if self._every_s is None:
            return False
        # Clocks differ.
        is_time = time.monotonic() - self._saved_at >= self._every_s
        return ranks.first("look at the clock", lambda: is_time)

    def begin_anew(self) -> None:
        """A step is saved now: the next minutes begin."""
        self._saved_at = time.monotonic()
