"""A job that goes back to what it has in memory itself, as after a loss that ran away or a collective that failed."""

from __future__ import annotations

import glob
import json
import mmap
import os
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _native

from .conftest import Gate, arenas_of, put_elsewhere, wait_until
from .test_ranks import run_ranks, start_ranks
from .test_restart import LINGER_S, Report, end, held_until, kill, restored

RESTORED = "step 2 is restored from memory, and it is not known whether the job went on elsewhere"

def told(text: str) -> Any:
    """Somebody is warned so."""
    return pytest.warns(forebay.CheckpointWarning, match=text)


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {f"own{rank}": torch.full((50_000,), 10.0 * step + rank), "all": torch.arange(99) * step, "n": step}


def is_right(state: dict[str, Any], rank: int, step: int) -> bool:
    own = bool((state[f"own{rank}"] == 10.0 * step + rank).all())
    return own and bool((state["all"] == torch.arange(99) * step).all()) and state["n"] == step


def save(job: forebay.Checkpointer, rank: int, *steps: int) -> forebay.Save:
    for step in steps:
        done = job.step(step, state_of(rank, step))
    assert done is not None
    return done


def bring_back(job: forebay.Checkpointer, rank: int, step: int | None = None) -> tuple[int, str, tuple[str, ...]]:
    """Which step came back, whole and in place, from where, and what was passed over."""
    state = state_of(rank, 0)
    address = state[f"own{rank}"].data_ptr()
    found = job.restore(state, step=step)
    assert found is not None and job.restored is not None
    assert is_right(state, rank, found) and state[f"own{rank}"].data_ptr() == address
    return found, job.restored.tier, job.restored.passed_over


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_on_its_way_is_restored_while_the_store_is_away(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """It was waited for until the store was there again, or the agents gave up, though each rank had it in memory."""
    monkeypatch.setattr("forebay._held.PATIENCE_S", 0.1)
    gate.open()
    shut = tmp_path / "shut"

    def work(rank: int, report: Report) -> None:
        url = f"s3://checkpoints/{tmp_path.name}"
        with forebay.Checkpointer(url, every=1, ranks=(rank, ranks), replicated=["all"]) as job:
            save(job, rank, 1)
            assert job.wait()
            report("stored")
            wait_until(shut.exists)
            under_way = save(job, rank, 2)
            with told(RESTORED) if rank == 0 else nullcontext():
                found: list[Any] = [bring_back(job, rank), bring_back(job, rank, 2)]
            with told(RESTORED) if rank == 0 else nullcontext():
                weights = {f"own{rank}": torch.zeros(50_000)}
                assert job.restore(weights, only=["own*"]) == 2 and bool((weights[f"own{rank}"] == 20.0 + rank).all())
            report(json.dumps([*found, under_way.durable]))
            # Nothing of that kept the save from its end, nor the next one.
            assert under_way.wait_durable(60)
            save(job, rank, 3)

    children = start_ranks(ranks, work, with_gloo=False)
    assert [child.line() for child in children] == ["stored"] * ranks
    gate.shut()
    shut.touch()
    expected = [[2, "arena", []], [2, "arena", []], False]
    assert [json.loads(child.line()) for child in children] == [expected] * ranks
    gate.open()
    assert [child.join() for child in children] == [0] * ranks
    assert forebay.load(f"s3://checkpoints/{tmp_path.name}")["n"] == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_goes_back_to_an_older_step_in_memory_and_on_from_it(tmp_path: Path, ranks: int) -> None:
    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, every=1, ranks=(rank, ranks), replicated=["all"]) as job:
            save(job, rank, 1, 2, 3)
            assert job.wait()
            found = [bring_back(job, rank), bring_back(job, rank, 2)]
            # What it went back behind counts no more once it is saved again; nor is it in memory.
            save(job, rank, 3)
            assert job.wait()
            found += [bring_back(job, rank), bring_back(job, rank, 1)]
            return [entry[:2] for entry in found]

    expected = [[3, "arena"], [2, "arena"], [3, "arena"], [1, "store"]]
    assert run_ranks(ranks, work, with_gloo=False) == [expected] * ranks
    steps = _native.list_steps(f"file://{tmp_path}")
    assert [step for step, *_ in steps].count(3) == 1
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_what_a_killed_process_left_is_in_memory_of_the_next_one_too(tmp_path: Path) -> None:
    agent = kill(held_until(tmp_path, 2))
    state, report, job = restored(tmp_path)
    assert (report.step, report.tier) == (2, "arena")
    state["t"], state["n"] = state["t"] + 1, 3
    done = job.step(3, state)
    assert done is not None and done.wait_durable(60)
    for step in (3, 2):
        assert job.restore(state, step=step) == step and job.restored is not None
        assert job.restored.tier == "arena" and bool((state["t"] == step).all())
    job.close()
    end(agent)


def test_memory_gives_way_to_a_job_that_went_on_elsewhere(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, every=1) as job:
        save(job, 0, 1, 2)
        assert job.wait()
        put_elsewhere(job)
        with forebay.Checkpointer(tmp_path, every=1) as later:
            save(later, 0, 3)
        assert bring_back(job, 0) == (3, "store", ("arena: the job was started elsewhere since",))
        with pytest.raises(forebay.CheckpointSuperseded):
            save(job, 0, 4)
            job.wait()


def test_memory_gives_way_to_a_job_that_began_before_and_saved_later(tmp_path: Path) -> None:
    """As one that was late: but this one lives, and is told that the other took over."""
    with forebay.Checkpointer(tmp_path, every=1) as early:
        put_elsewhere(early)
        with pytest.raises(forebay.CheckpointSuperseded), forebay.Checkpointer(tmp_path, every=1) as job:
            save(job, 0, 1, 2)
            assert job.wait()
            save(early, 0, 3)
            assert early.wait()
            assert bring_back(job, 0)[:2] == (3, "store")
            save(job, 0, 4)


def test_a_step_that_was_deleted_does_not_come_back_from_memory(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, every=1) as job:
        save(job, 0, 1, 2)
        assert job.wait()
        shutil.rmtree(tmp_path / "steps" / f"{2:020}")
        assert bring_back(job, 0) == (1, "store", ("arena: step 2 was deleted from the store",))


def test_nor_where_this_process_has_not_heard_that_it_was_stored(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    with forebay.Checkpointer(tmp_path, every=1, keep=2) as job:
        save(job, 0, 1, 2)
        assert job.wait()
        save(job, 0, 3)
        # Old steps are deleted once the newest is there, and that was told.
        wait_until(lambda: not glob.glob(f"{steps}/{1:020}/*.json"))
        shutil.rmtree(steps / f"{3:020}")
        assert bring_back(job, 0) == (2, "store", ("arena: step 3 was deleted from the store",))


def test_damaged_memory_is_left_for_the_store(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, every=1) as job:
        save(job, 0, 1)
        assert job.wait()
        pattern = state_of(0, 1)["own0"].numpy().tobytes()
        damaged = 0
        for arena in arenas_of(os.getpid()):
            with open(arena, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                place = memory.find(pattern)
                if place >= 0:
                    memory[place + len(pattern) - 1] ^= 1
                    damaged += 1
        assert damaged > 0
        with told("step 1 in memory is not used"):
            step, tier, passed_over = bring_back(job, 0)
        assert (step, tier) == (1, "store") and "arena: " in passed_over[0]


def test_a_step_is_in_memory_though_the_state_grew(tmp_path: Path) -> None:
    """The older one lies in memory that was too small for the newer one."""
    with forebay.Checkpointer(tmp_path, every=1) as job:
        save(job, 0, 1)
        larger = {**state_of(0, 2), "more": torch.ones(1 << 20)}
        job.step(2, larger)
        assert job.wait()
        assert job.restore(larger) == 2 and job.restored is not None and job.restored.tier == "arena"
        assert bring_back(job, 0, 1)[:2] == (1, "arena")


def test_other_ranks_are_told_where_one_has_nothing_in_memory(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, every=1, linger=LINGER_S) as job:
            save(job, rank, 1)
            assert job.wait()
            if rank == 1:
                # As where it cannot open what it has, for lack of descriptors.
                def refuse(place: str) -> None:
                    raise forebay.CheckpointError("no")

                job._session = _Refusing(job._session, refuse)
            with told("what rank 1 has in memory is not used: no") if rank == 1 else nullcontext():
                return bring_back(job, rank)

    assert run_ranks(2, work, with_gloo=False) == [[1, "store", ["arena: not all ranks hold the step"]]] * 2


def test_all_ranks_hear_of_a_warning_that_is_an_error(tmp_path: Path) -> None:
    """The others waited for rank 0, which had left with it, until their patience was over."""

    def away(*_: Any) -> None:
        raise forebay.CheckpointUnavailable("the store is away")

    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, every=1, ranks=(rank, 2)) as job:
            save(job, rank, 1)
            assert job.wait()
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
                patch.setattr(_native, "survey", away)
                warnings.simplefilter("error", forebay.CheckpointWarning)
                with pytest.raises((forebay.CheckpointWarning, forebay.CheckpointError), match="the store is away") as told:
                    job.restore(state_of(rank, 0))
            return type(told.value).__name__, bring_back(job, rank)[1]

    assert run_ranks(2, work, with_gloo=False) == [["CheckpointWarning", "arena"], ["CheckpointError", "arena"]]


class _Refusing:
    """A session of which one thing is not to be had."""

    def __init__(self, session: Any, refuse: Any) -> None:
        self._session = session
        self.open_memory = refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
