"""Steps that the training itself keeps: the best one so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forebay

from .test_failures import mend, shut
from .test_ranks import run_ranks


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step))}


def test_the_best_step_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    """A step that is pinned right after its save was begun is waited for; the one before it goes once a better one came."""
    losses = [5, 3, 4, 6, 2, 7, 8, 9]
    with forebay.Checkpointer(tmp_path, every=1, keep=1, rng=False) as checkpointer:
        assert checkpointer.pins() == []
        best = None
        for step, loss in enumerate(losses, 1):
            checkpointer.step(step, state_of(step))
            if best is None or loss < losses[best - 1]:
                checkpointer.pin(step)
                assert step in checkpointer.steps(), "durable by then"
                if best is not None:
                    checkpointer.unpin(best)
                best = step
        assert best == 5 and checkpointer.pins() == [5]
    # The agent deletes what goes before it ends.
    with forebay.Checkpointer(tmp_path, keep=1, rng=False) as checkpointer:
        assert checkpointer.steps() == [5, 8]
        state = state_of(0)
        assert checkpointer.restore(state, step=5) == 5 and state["w"][0] == 5
        checkpointer.unpin(5)
        checkpointer.unpin(5)
        checkpointer.save_now(9, state_of(9))
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [9] and checkpointer.pins() == []


def test_what_is_not_there_is_not_pinned(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path / "run", rng=False) as checkpointer:
        for act in (checkpointer.pin, checkpointer.unpin):
            with pytest.raises(forebay.CheckpointNotFound):
                act(7)
            for step in (None, -1, "new", 2.5):
                with pytest.raises(forebay.CheckpointInvalid, match="step is .*; it is"):
                    act(step)  # type: ignore[arg-type]
        assert checkpointer.pins() == []
        checkpointer.save_now(1, state_of(1))
        with pytest.raises(forebay.CheckpointNotFound, match="7"):
            checkpointer.pin(7)
        checkpointer.pin("1.1")
        assert checkpointer.pins() == [1]


def test_a_step_that_was_not_saved_is_not_pinned(tmp_path: Path) -> None:
    """What went wrong with its save is what is raised, and told no more."""
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        first = checkpointer.save_now(1, state_of(1))
        assert first is not None and first.wait_durable()
        shut(tmp_path)
        checkpointer.save_now(2, state_of(2))
        with pytest.raises(forebay.CheckpointError, match="shards"):
            checkpointer.pin(2)
        mend(tmp_path)
        assert checkpointer.pins() == []


@pytest.mark.parametrize("whose", [[0], [1], [0, 1]])
def test_any_rank_pins_for_all(tmp_path: Path, whose: list[int]) -> None:
    def work(rank: int) -> None:
        with forebay.Checkpointer(tmp_path, every=1, keep=1, rng=False) as job:
            for step in (1, 2, 3):
                job.step(step, {"w": torch.full((100,), float(step + rank))})
                if step == 1 and rank in whose:
                    job.pin(1)
                    assert job.pins() == [1]

    run_ranks(2, work, with_gloo=False)
    with forebay.Checkpointer(tmp_path) as job:
        assert job.steps() == [1, 3] and job.pins() == [1]
