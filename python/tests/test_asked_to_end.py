"""Who ends a job by asking each of its processes, as service managers do, asks its agents, too: what is sealed is saved first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Callable

import pytest
import torch

import forebay
from forebay import _process

from .conftest import Child, wait_until
from .test_crash import is_running

LINGER_S = 120.0
"""Longer than any test takes."""

BYTES = 3 << 20


def sealed(place: Path, is_stopped: bool = False, **settings: object) -> tuple[Child, int]:
    """A trainer that has sealed a step and waits, and its agent, which may be stopped then."""

    def train(report: Callable[[str], None]) -> None:
        # What started the tests may have had them ignored, as nohup does, and a shell of what it runs beside itself.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        checkpointer = forebay.Checkpointer(place, linger=LINGER_S, **settings)  # type: ignore[arg-type]
        save = checkpointer.save_now(1, {"t": torch.ones(BYTES, dtype=torch.uint8)})
        assert save.wait_sealed(60)
        if is_stopped:
            os.kill(checkpointer._agent.pid, signal.SIGSTOP)
        if not settings:
            assert save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        # Not `signal.pause`: what comes between the report and that is heard, and Python's handler for it not called before another.
        while True:
            time.sleep(0.01)

    child = Child(train)
    return child, int(child.line())


def steps(place: Path) -> list[int]:
    with forebay.Checkpointer(place) as checkpointer:
        return checkpointer.steps()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_sealed_steps_survive_a_signal_to_trainer_and_agent(tmp_path: Path, number: signal.Signals) -> None:
    child, agent = sealed(tmp_path, is_stopped=True, flush_rate="1MiB")
    try:
        for process in (agent, child.pid):
            os.kill(process, number)
        child.join()
        assert steps(tmp_path) == [], "else it had nothing left to do"
    finally:
        os.kill(agent, signal.SIGCONT)
    # Long before anybody who comes next is waited for in vain.
    wait_until(lambda: not is_running(agent))
    assert steps(tmp_path) == [1]
    assert bool((forebay.load(tmp_path)["t"] == 1).all())


def test_an_agent_that_was_asked_to_end_hands_over_what_is_not_saved_yet(tmp_path: Path) -> None:
    child, agent = sealed(tmp_path, flush_rate="16KiB")
    os.kill(agent, signal.SIGTERM)
    child.kill()
    state = {"t": torch.zeros(BYTES, dtype=torch.uint8)}
    try:
        with forebay.Checkpointer(tmp_path, linger=0) as checkpointer:
            assert checkpointer.restore(state) == 1 and checkpointer.restored is not None
            assert checkpointer.restored.tier == "arena" and bool((state["t"] == 1).all())
    finally:
        os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not is_running(agent))


def test_an_agent_with_nothing_to_save_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    child, agent = sealed(tmp_path)
    # While the trainer lives, it is there for it.
    os.kill(agent, signal.SIGUSR1)
    child.kill()
    assert is_running(agent), "it waits for who comes next"
    os.kill(agent, signal.SIGTERM)
    wait_until(lambda: not is_running(agent))
    assert steps(tmp_path) == [1]


def test_an_agent_of_a_training_that_goes_on_goes_on(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        for step in (1, 2, 3):
            save = checkpointer.step(step, {"t": torch.full((3,), step)})
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(checkpointer._agent.pid, number)
            assert save is not None and save.wait_durable(60)
        agent = checkpointer._agent
    assert agent.wait(60) == 0 and checkpointer.steps() == [1, 2, 3]


def test_an_agent_is_safe_from_its_first_moment(tmp_path: Path) -> None:
    """As one must be that takes over what another one held."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    end, process = _process.start_agent(None)
    os.kill(process.pid, signal.SIGTERM)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before, "the trainer hears what it heard"
    assert process.poll() is None
    os.close(end)
    assert process.wait(60) == 0
