"""Children that a trainer forked, such as the workers of a data loader, and that outlive what they were forked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from .conftest import Child, arenas_of
from .test_restart import held_until, kill, restored

Report = Callable[[str], None]


def test_a_forked_child_holds_nothing_of_what_a_killed_trainer_left(tmp_path: Path) -> None:
    """Until it ended, the memory of the trainer before stayed, and a child that read it was taken for a start to come."""
    agent = held_until(tmp_path, 3)
    kill(agent)
    state, found, checkpointer = restored(tmp_path)
    assert found.tier == "arena" and arenas_of(os.getpid())

    def work(report: Report) -> None:
        report(str(len(arenas_of(os.getpid()))))
        signal.pause()

    worker = Child(work)
    try:
        assert worker.line() == "0"
        # The parent's is untouched.
        save = checkpointer.save_now(4, state)
        assert save is not None and save.wait_durable(60)
        checkpointer.close()
    finally:
        worker.kill()
