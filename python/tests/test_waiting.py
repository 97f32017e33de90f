"""Ranks that wait for others, which may never come, and ranks that know of no others yet."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forebay
from forebay import _presence

from .test_ranks import run_ranks


def waiting(capfd: pytest.CaptureFixture[str], place: Path, **given: Any) -> str:
    """What a rank whose others never come tells, for as long as it waits."""
    with pytest.raises(forebay.CheckpointUnavailable, match="did not join"):
        with forebay.Checkpointer(place, patience=1.0, **given) as job:
            job.restore({"w": torch.zeros(9)})
    return capfd.readouterr().err


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_presence, "TELL_AFTER_S", 0.1)
    # Patience may end before its thread is done.
    monkeypatch.setattr(threading.Timer, "cancel", threading.Timer.join)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_whoever_waits_for_ranks_says_which_and_how_to_save_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    """It was silent for ten minutes: a notebook on a node of a cluster has RANK and WORLD_SIZE of its session."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = f"waits for rank 1 of 2 to restore or save at file://{tmp_path}, for 1 s at most"
    hint = "to save alone, pass ranks=(0, 1)"
    more = ", or unset RANK and WORLD_SIZE in the environment"
    several = "where ranks are on several hosts, set LOCAL_WORLD_SIZE, how many this one has, and call init_process_group first; "
    assert waiting(capfd, tmp_path) == f"forebay: rank 0 {told} (hint: {several}{hint}{more})\n"
    assert waiting(capfd, tmp_path, ranks=(0, 2)) == f"forebay: rank 0 {told} (hint: {hint})\n"
    told = told.replace("rank 1 of 2", "rank 0 of 2")
    assert waiting(capfd, tmp_path, ranks=(1, 2)) == f"forebay: rank 1 {told} (hint: {hint})\n"
    assert "rank 0 waits for ranks 1, 2, 3, 4, 5, 6, 7, 8, ... of 64 to" in waiting(capfd, tmp_path, ranks=(0, 64))
    with forebay.Checkpointer(tmp_path, ranks=(0, 1)) as job:
        assert job.restore({"w": torch.zeros(9)}) is None
    assert capfd.readouterr().err == ""


def test_one_of_those_who_came_tells_who_did_not(capfd: pytest.CaptureFixture[str]) -> None:
    name = f"forebay-test-{os.getpid()}"
    one, other, last = (_presence.Presence(name, (rank, 4), "to come", "wait") for rank in (1, 3, 0))
    with other:
        with one:
            one._tell()
            assert capfd.readouterr().err == "forebay: rank 1 waits for ranks 0, 2 of 4 to come (hint: wait)\n"
            other._tell()
            with last:
                one._tell()
            assert capfd.readouterr().err == "", "each time another one tells it"
        # Whoever is gone is missing.
        other._tell()
        assert "rank 3 waits for ranks 0, 1, 2 of 4" in capfd.readouterr().err


@pytest.mark.parametrize("is_by_torchrun", [True, False])
def test_checkpointers_that_were_made_before_torch_distributed(tmp_path: Path, is_by_torchrun: bool) -> None:
    """Without torchrun's environment each rank saved alone, as rank 0 of 1, all to one place: the others' were lost."""

    def work(rank: int) -> Any:
        if not is_by_torchrun:
            for name in ("RANK", "WORLD_SIZE"):
                del os.environ[name]
        job = forebay.Checkpointer(tmp_path / "run", every=1, patience=60)
        meeting = f"file://{tmp_path}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
        state = {"own": torch.full((9,), float(rank))}
        told = []
        for act in (lambda: job.restore(state), lambda: job.step(1, state)):
            try:
                told.append(str(type(act())))
            except forebay.CheckpointInvalid as error:
                told.append(str(error))
        job.close()
        with forebay.Checkpointer(tmp_path / "run", every=1, ranks=None if is_by_torchrun else (rank, 2)) as other:
            return [told, other.restore(state), other._ranks.world_size, float(state["own"].sum())]

    found = run_ranks(2, work, with_gloo=False)
    for rank, (told, step, world_size, own) in enumerate(found):
        assert world_size == 2 and own == 9.0 * rank
        if is_by_torchrun:
            assert told == [str(type(None)), str(forebay.Save)] and step == 1
            continue
        numbers = f"made as rank 0 of 1, and torch.distributed says that this is rank {rank} of 2"
        hint = f"(hint: make it after init_process_group, or with ranks=({rank}, 2))"
        assert [numbers in text and hint in text for text in told] == [True, True] and step is None
    assert (tmp_path / "run").exists() == is_by_torchrun, "nothing was saved by ranks on their own"
