"""Threads that wait for saves beside the one that trains."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import forebay


@contextmanager
def stopped(agent: int) -> Iterator[None]:
    """An agent that does nothing for now."""
    os.kill(agent, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(agent, signal.SIGCONT)


def sealed_with(job: forebay.Checkpointer) -> int:
    """The agent of a job that has saved a step."""
    assert job.save_now(1, {"w": torch.ones(1000)}).wait_durable(60)
    agent = job._agent.pid
    assert isinstance(agent, int)
    return agent


def test_who_waits_for_a_save_holds_up_nobody(tmp_path: Path) -> None:
    """Each step took up to 0.6 s longer for a thread in `wait_durable`."""
    with forebay.Checkpointer(tmp_path) as job:
        with stopped(sealed_with(job)):
            save = job.save_now(2, {"w": torch.ones(1000)})
            waits = threading.Thread(target=job._session.take_replies, args=(60.0,))
            waits.start()
            for _ in range(200):
                # The training's calls do that, too.
                assert job._session.is_busy
                time.sleep(0.001)
            assert waits.is_alive(), "they did not wait for it"
        waits.join()
        assert save.wait_durable(60)


def test_threads_that_wait_start_one_agent_in_place_of_a_dead_one(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path) as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", forebay.CheckpointWarning)
        agent = sealed_with(job)
        os.kill(agent, signal.SIGSTOP)
        save = job.save_now(2, {"w": torch.ones(1000)})
        threads = [threading.Thread(target=save.wait_durable, args=(60,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        os.kill(agent, signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert save.durable and job._agent.pid != agent
    told = [str(warning.message) for warning in caught]
    assert [f"(process {agent}) ended unexpectedly; another one was started" in text for text in told] == [True], told
