"""What somebody deleted from the store does not come back out of the memory of a killed trainer's agent."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _native

from .conftest import Child, wait_until
from .test_crash import is_running
from .test_ranks import start_ranks
from .test_restart import LINGER_S, Report, advance, end, kill, rank_restores, rank_state, restored


def state_of(step: int) -> dict[str, Any]:
    return {"t": torch.full((300_000,), float(step)), "n": step}


def durable_until(run: Path, last: int) -> int:
    """A trainer that was killed when all that it saved was durable; gives its agent."""

    def work(report: Report) -> None:
        checkpointer = forebay.Checkpointer(run, every=1, linger=LINGER_S)
        for step in range(1, last + 1):
            checkpointer.step(step, state_of(step))
        checkpointer.wait()
        report(str(checkpointer._agent.pid))
        signal.pause()

    return kill(Child(work))


def delete(run: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(run / "steps" / f"{step:020}")


def test_a_step_that_was_deleted_is_not_restored_from_memory(tmp_path: Path) -> None:
    agent = durable_until(tmp_path, 4)
    delete(tmp_path, 4, 3)
    _, report, checkpointer = restored(tmp_path)
    assert (report.step, report.tier) == (2, "store")
    assert report.passed_over == ("arena: step 4 was deleted from the store",)
    save = checkpointer.step(3, state_of(3))
    assert save is not None and save.wait_durable(60)
    checkpointer.close()
    wait_until(lambda: not is_running(agent))
    assert checkpointer.steps() == [1, 2, 3]


def test_nor_when_it_is_asked_for(tmp_path: Path) -> None:
    agent = durable_until(tmp_path, 2)
    delete(tmp_path, 1)
    with forebay.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(forebay.CheckpointNotFound):
            checkpointer.restore(state_of(0), step=1)
        state = state_of(0)
        assert checkpointer.restore(state) == 2 == state["n"] and checkpointer.restored is not None
        assert checkpointer.restored.tier == "arena", "what is still there is used"
    end(agent)


def test_a_directory_that_was_emptied_is_begun_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    agent = durable_until(run, 2)
    shutil.rmtree(run)
    run.mkdir()
    with forebay.Checkpointer(run) as checkpointer:
        with pytest.warns(forebay.CheckpointWarning, match="nothing is restored: arena: step 2 was deleted"):
            assert checkpointer.restore(state_of(0)) is None
    end(agent)


def test_a_successor_passes_on_what_is_durable(tmp_path: Path) -> None:
    first = durable_until(tmp_path, 2)

    def work(report: Report) -> None:
        state, told, checkpointer = restored(tmp_path)
        assert (told.step, told.tier) == (2, "arena")
        checkpointer.prepare(state)
        report(str(checkpointer._agent.pid))
        signal.pause()

    second = kill(Child(work))
    wait_until(lambda: not is_running(first))
    with forebay.Checkpointer(tmp_path) as onlooker:
        place = onlooker._ladder.arena.place(0)
    # Where the first agent had the place when the second last looked, that one takes it as its trainer's end is noticed.
    wait_until(lambda: _native.Predecessor.visit(place) is not None)
    delete(tmp_path, 2)
    _, report, checkpointer = restored(tmp_path)
    assert (report.step, report.tier) == (1, "store") and "step 2 was deleted" in report.passed_over[0]
    checkpointer.close()
    end(second)


def test_all_ranks_leave_what_was_deleted(tmp_path: Path) -> None:
    def work(rank: int, report: Report) -> None:
        state = rank_state()
        checkpointer = forebay.Checkpointer(tmp_path, every=1, replicated=["all"], linger=LINGER_S)
        for step in (1, 2):
            advance(state, rank)
            checkpointer.step(step, state)
        checkpointer.wait()
        report(str(checkpointer._agent.pid))
        signal.pause()

    agents = [kill(child) for child in start_ranks(2, work, with_gloo=False)]
    delete(tmp_path, 2)
    assert rank_restores(tmp_path) == [[1, "store", True]] * 2
    for agent in agents:
        wait_until(lambda: not is_running(agent))
