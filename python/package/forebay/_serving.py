"""What a fork server imports before it serves: it lives on where all processes of a job are asked to end, as workers that come from
it do (`_workers.py`). It ends once its trainer has."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys

ASKING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""The signals that ask jobs to end, and those that batch systems send ahead of these."""


def _is_server() -> bool:
    """Whether this is imported by a fork server that is about to serve, not by who looks at modules."""
    frame, main = sys._getframe(), multiprocessing.forkserver.main.__code__
    while frame.f_back is not None and frame.f_code is not main:
        frame = frame.f_back
    return frame.f_code is main


def _live_on() -> None:
    """Passes the signals over in this process, and not in what it starts."""
    passed_over = [number for number in ASKING if signal.getsignal(number) is signal.SIG_DFL]
    for number in passed_over:
        signal.signal(number, signal.SIG_IGN)

    def heed() -> None:
        for number in passed_over:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=heed)


if _is_server():
    _live_on()
