"""Ranks that ask for other steps than each other: none is restored, and all are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forebay

from .test_ranks import run_ranks


@pytest.mark.parametrize("tier", ["arena", "local", "store"])
def test_ranks_that_ask_for_different_steps_are_told_on_all(tmp_path: Path, tier: str) -> None:
    """Each rank restored its own from memory and from the disk; `latest()` may differ while a step is being committed."""
    settings: dict[str, Any] = {"local": tmp_path / "disk", "local_keep": 9} if tier == "local" else {}

    def refused(job: forebay.Checkpointer, *asked: Any) -> str:
        state = {"t": torch.zeros(1000), "n": 0}
        with pytest.raises(forebay.CheckpointInvalid) as told:
            job.restore(state, step=asked[job._ranks.rank])
        assert state["n"] == 0 and not state["t"].any(), "nothing was brought back"
        return str(told.value).partition(" (hint")[0].removeprefix("the ranks ask for different steps: ")

    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path / "run", every=1, **settings) as job:
            for step in (1, 2, 3):
                job.step(step, {"t": torch.full((1000,), float(step)), "n": step})
            assert job.wait()
            if tier == "arena":
                return ask(job)
        with forebay.Checkpointer(tmp_path / "run", **settings) as job:
            return ask(job)

    def ask(job: forebay.Checkpointer) -> list[Any]:
        given = (2, 3), (None, 3), ("3.1", 3), ("3.1", "2.1")
        texts = [refused(job, *asked) for asked in given]
        # An exception of all ranks alike: they go on together.
        state = {"t": torch.zeros(1000), "n": 0}
        found = [job.restore(state), job.restore(state, step=(3, "3")[job._ranks.rank])]
        assert job.restored is not None and job.restored.tier == tier
        return [*texts, *found, state["n"]]

    pairs = "2 (rank 0), 3 (rank 1)", "the newest (rank 0), 3 (rank 1)", "3.1 (rank 0), 3 (rank 1)", "3.1 (rank 0), 2.1 (rank 1)"
    assert run_ranks(2, work, with_gloo=False) == [[*pairs, 3, 3, 3]] * 2
