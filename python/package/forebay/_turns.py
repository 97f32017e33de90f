"""Whose turn a `Writer` is: saves of one writer, from several threads, follow one another as they came."""

from __future__ import annotations

import threading
import time

from . import _native

_TORCHS = "torch.distributed.checkpoint.state_dict_saver"
"""Where torch saves."""

_TICK_S = 0.02
"""How often a thread looks whether the one before is done; what it waits for took an upload."""


class Turns:
    """The threads that save, in order.

    torch tells a writer of no end but that of a save that succeeded, and that on one rank only: who failed elsewhere, or in
    a planner, leaves in silence. But a thread that saves is inside of torch's function, and one that is not is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._begun: set[threading.Thread] = set()

    def take(self, is_new: bool = False) -> None:
        """Waits until all who came before are done. `is_new` begins a save; without it, one that did not begin so."""
        own = threading.current_thread()
        with self._lock:
            if is_new or own not in self._begun:
                # What it saved before is over.
                self._threads = [thread for thread in self._threads if thread is not own]
            if own not in self._threads:
                self._threads.append(own)
            self._begun = self._begun & set(self._threads) | {own} if is_new else self._begun - {own}
        while not self._has_come(own):
            time.sleep(_TICK_S)

    def _has_come(self, own: threading.Thread) -> bool:
        with self._lock:
            while self._threads[0] is not own and not _saves(self._threads[0]):
                del self._threads[0]
            return self._threads[0] is own


def _saves(thread: threading.Thread) -> bool:
    """Whether a thread is inside of torch's function for saves."""
    return thread.is_alive() and thread.ident is not None and _native.is_inside(thread.ident, _TORCHS)
