"""Who of a job's ranks is where all of them meet, for a person who wonders what this one waits for."""

from __future__ import annotations

import socket
import sys
import threading
from types import TracebackType
from typing import Optional

TELL_AFTER_S = 10.0
"""How long a rank waits for the others before it says so, in seconds: they import the same modules, at about the same time."""

_SHOWN = 8
"""Ranks that are named at most."""


class Presence:
    """Shows the other ranks that this one has come to the meeting of that name. After a while the lowest one that has tells
    on standard error, in one line, which have not. Where they are on several hosts rank 0 tells, and names none."""

    def __init__(self, name: str, place: tuple[int, int], text: str, hint: str, are_spread: bool = False) -> None:
        self._name = name
        self._are_spread = are_spread
        self._rank, self._world_size = place
        self._text = text
        self._hint = hint
        self._shown: Optional[socket.socket] = None
        self._timer = threading.Timer(TELL_AFTER_S, self._tell)
        self._timer.daemon = True

    def __enter__(self) -> None:
        shown = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            shown.bind(self._address(self._rank))
            self._shown = shown
        except OSError:
            # Another one has this number, which is for the meeting to refuse.
            shown.close()
        self._timer.start()

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._timer.cancel()
        if self._shown is not None:
            self._shown.close()

    def _address(self, rank: int) -> str:
        return f"\0{self._name}-{rank}"

    def _is_there(self, rank: int) -> bool:
        if rank == self._rank:
            return True
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._address(rank))
            except OSError:
                return False
        return True

    def _tell(self) -> None:
        if self._are_spread:
            if self._rank == 0:
                self._say("the others")
            return
        there = [self._is_there(rank) for rank in range(self._world_size)]
        missing = [rank for rank, is_there in enumerate(there) if not is_there]
        # All others say the same.
        if not missing or there.index(True) != self._rank:
            return
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        self._say(f"rank {shown}" if len(missing) == 1 else f"ranks {shown}")

    def _say(self, others: str) -> None:
        text = f"rank {self._rank} waits for {others} of {self._world_size} {self._text} (hint: {self._hint})"
        print(f"forebay: {text}", file=sys.stderr, flush=True)
