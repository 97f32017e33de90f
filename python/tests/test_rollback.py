"""A job that goes back to an earlier step, as after a loss that ran away, and on from there in the same process."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _native
from forebay._ranks import new_start

from .conftest import PATIENCE_S, Child, Gate, wait_until
from .test_crash import is_running
from .test_ranks import run_ranks, start_ranks
from .test_restart import LINGER_S, end, held_until, kill, memory_of, restored


def state_of(rank: int, step: int, attempt: int) -> dict[str, Any]:
    value = 100.0 * attempt + step
    return {f"own{rank}": torch.full((50_000,), value + rank), "frozen": torch.arange(9), "n": step, "attempt": attempt}


def save_all(checkpointer: forebay.Checkpointer, rank: int, steps: range, attempt: int) -> None:
    for step in steps:
        checkpointer.before_optimizer_step()
        checkpointer.step(step, state_of(rank, step, attempt))


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_saved_again_after_a_job_went_back(tmp_path: Path, ranks: int) -> None:
    place = tmp_path / "run"
    # Copies that are on their way out would be looked at, and be gone when they are wanted.
    settings: dict[str, Any] = {"local": tmp_path / "local", "local_keep": 20, "replicated": ["frozen"]}

    def work(rank: int) -> Any:
        with forebay.Checkpointer(place, every=1, ranks=(rank, ranks), **settings) as job:
            save_all(job, rank, range(1, 6), attempt=1)
            assert job.wait()
            agent = job._agent.pid
            state = state_of(rank, 0, 0)
            assert job.restore(state, step=2) == 2 and state["attempt"] == 1
            assert bool((state[f"own{rank}"] == 102.0 + rank).all())
            save_all(job, rank, range(3, 5), attempt=2)
            assert job.wait() and job.steps() == [1, 2, 3, 4, 5] and job._agent.pid == agent
            assert len(memory_of(agent)) == 1
            tiers = []
            # To a step of that attempt, and once more to one of the first.
            for back, found, attempt in ((3, 2, 3), (2, 1, 4)):
                assert job.wait()
                assert job.restore(state, step=back) == back and state["attempt"] == found
                assert job.restored is not None
                tiers.append(job.restored.tier)
                save_all(job, rank, range(back + 1, 5), attempt)
            return tiers

    # The newer one of both is in memory still.
    assert run_ranks(ranks, work, with_gloo=False) == [["arena", "local"]] * ranks
    wanted = {1: 1, 2: 1, 3: 4, 4: 4, 5: 1}
    for step, attempt in wanted.items():
        loaded = forebay.load(place, step=step)
        assert loaded["attempt"] == attempt and bool((loaded["own0"] == 100.0 * attempt + step).all()), step
    assert _native.verify(f"file://{place}", None) == []
    with forebay.Checkpointer(place, ranks=(0, 1)) as later:
        # Not 5: that is of the first attempt.
        assert later.latest() == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pinned_step_that_was_saved_again_comes_back_as_it_was(tmp_path: Path, ranks: int) -> None:
    place = tmp_path / "run"
    settings: dict[str, Any] = {"local": tmp_path / "local", "replicated": ["frozen"], "keep": 1}

    def start(rank: int, attempt: int) -> Any:
        with forebay.Checkpointer(place, every=1, ranks=(rank, ranks), **settings) as job:
            save_all(job, rank, range(2, 5), attempt)
            assert job.wait()
            state, found = state_of(rank, 0, 0), []
            for step in ("2.1", "4", 4) if attempt == 3 else ():
                assert job.restore(state, step=step) == state["n"] and job.restored is not None
                assert bool((state[f"own{rank}"] == 100.0 * state["attempt"] + state["n"] + rank).all())
                found.append((state["n"], state["attempt"], job.restored.tier))
            if attempt == 3:
                with pytest.raises(forebay.CheckpointNotFound, match="no step 2.2"):
                    job.restore(state, step="2.2")
            return found

    def save_and_pin(rank: int) -> None:
        with forebay.Checkpointer(place, every=1, ranks=(rank, ranks), **settings) as job:
            save_all(job, rank, range(2, 3), attempt=1)
            assert job.wait()

    run_ranks(ranks, save_and_pin, with_gloo=False)
    # As `forebay ckpt pin` does.
    (manifest,) = (place / "steps" / f"{2:020}").iterdir()
    pin = place / "pins" / f"{2:020}" / manifest.stem
    pin.parent.mkdir(parents=True)
    pin.touch()
    run_ranks(ranks, lambda rank: start(rank, 2), with_gloo=False)
    found = run_ranks(ranks, lambda rank: start(rank, 3), with_gloo=False)
    assert [entry[:2] for entry in found[0]] == [[2, 1], [4, 3], [4, 3]] and found[0][0][2] == "store"
    loaded = forebay.load(place, step="2.1")
    assert loaded["attempt"] == 1 and bool((loaded["own0"] == 102.0).all())
    assert _native.verify(f"file://{place}", None) == []
    kept = {path.parent.name[-1] + path.stem[9] for path in (place / "steps").rglob("*.json")}
    assert kept == {"21", "43"}


def test_a_step_that_failed_is_saved_again(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with forebay.Checkpointer(place, every=1) as checkpointer:
        save_all(checkpointer, 0, range(1, 2), attempt=1)
        assert checkpointer.wait()
        (place / "shards").rename(place / "away")
        (place / "shards").write_text("in the way")
        save = checkpointer.save_now(2, state_of(0, 2, 1))
        with pytest.raises(forebay.CheckpointError):
            assert save is not None
            save.wait_durable()
        (place / "shards").unlink()
        (place / "away").rename(place / "shards")
        state = state_of(0, 0, 0)
        assert checkpointer.restore(state) == 2, "memory has it, whole"
        assert checkpointer.restore(state, step=1) == 1
        save_all(checkpointer, 0, range(2, 3), attempt=2)
    assert checkpointer.steps() == [1, 2] and forebay.load(place)["attempt"] == 2


def test_what_does_not_go_back_goes_on_as_it_was(tmp_path: Path) -> None:
    with warnings.catch_warnings(), forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        warnings.simplefilter("error")
        save_all(checkpointer, 0, range(1, 4), attempt=1)
        assert checkpointer.wait()
        agent = checkpointer._agent.pid
        # The newest, and a part of an older one.
        assert checkpointer.restore(state_of(0, 0, 0)) == 3
        assert checkpointer.restore(state_of(0, 0, 0), step=1, only=["own*"]) == 1
        save_all(checkpointer, 0, range(4, 5), attempt=1)
        assert checkpointer._agent.pid == agent
    wait_until(lambda: not is_running(agent))
    assert {key[1:] for key in map(tuple, _native.list_steps(f"file://{tmp_path}"))} and checkpointer.steps() == [1, 2, 3, 4]


def test_memory_of_a_job_that_went_back_is_newer_than_what_it_left(tmp_path: Path) -> None:
    """Its former start was taken for another host's as long as the new one had no number in the store."""
    run = tmp_path / "run"
    first = held_until(run, 2)
    end(kill(first))

    def work(report: Callable[[str], None]) -> None:
        state, told, job = restored(run)
        assert (told.step, told.tier) == (2, "store")
        state["n"], state["t"] = 3, state["t"] + 1
        save = job.step(3, state)
        assert save is not None and save.wait_durable(60)
        # To a step of the first start, not of this one's.
        assert job.restore(state, step=1) == 1
        # What it does behind a commit may still be under way.
        warnings.filterwarnings("ignore", "old steps were not deleted")
        (run / "runs").rename(run / "away")
        (run / "runs").write_text("in the way")
        state["n"], state["t"] = 2, state["t"] + 1
        save = job.step(2, state)
        assert save is not None
        while save._progress() != "failed":
            job._listen(0.1)
        report(str(job._agent.pid))
        signal.pause()

    agent = kill(Child(work))
    (run / "runs").unlink()
    (run / "away").rename(run / "runs")
    _, told, job = restored(run)
    assert (told.step, told.tier, told.passed_over) == (2, "arena", ())
    job.close()
    end(agent)
def without_memory(job: forebay.Checkpointer) -> forebay.Checkpointer:
    """It restores as if not all ranks had the step in memory."""
    job._ladder.arena.use = lambda *_: None  # type: ignore[method-assign]
    return job


@contextlib.contextmanager
def held_up(job: forebay.Checkpointer) -> Iterator[None]:
    """The agent goes on once it is waited for, and not before."""
    listen, agent = job._listen, job._agent.pid

    def wait(patience_s: float) -> None:
        if patience_s > 0:
            os.kill(agent, signal.SIGCONT)
        listen(patience_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_listen", wait)
        os.kill(agent, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(agent, signal.SIGCONT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_under_way_is_restored_as_the_newest(tmp_path: Path, ranks: int) -> None:
    """It was passed over: a job that went on from there was a fresh start, or an older one, beside its own later step."""

    def work(rank: int) -> Any:
        found = []
        with without_memory(forebay.Checkpointer(tmp_path, every=1, ranks=(rank, ranks))) as job:
            job.prepare(state_of(rank, 0, 0))
            for step in (1, 2):
                with held_up(job):
                    state, save = state_of(rank, 0, 0), job.step(step, state_of(rank, step, 1))
                    before = job.latest()
                    found.append((before, job.restore(state), state["n"], save is not None and save.durable))
            saved, live = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            with held_up(job):
                save = job.step(3, {"model": saved})
                # What is in the store already does not wait for it.
                found.append((job.restore(state, step=2, only=["n"]), save is not None and save.durable, job.latest()))
                found.append((job.load_model(live), torch.equal(live.weight, saved.weight), job.latest()))
        return found

    expected = [[None, 1, 1, True], [1, 2, 2, True], [2, False, 2], [3, True, 3]]
    assert run_ranks(ranks, work, with_gloo=False) == [expected] * ranks


def test_a_save_under_way_that_fails_is_passed_over_and_told(tmp_path: Path) -> None:
    place, log = tmp_path / "run", tmp_path / "log"
    with without_memory(forebay.Checkpointer(place, every=1, agent_log=log)) as job:
        save_all(job, 0, range(1, 2), attempt=1)
        assert job.wait()
        (place / "shards").rename(place / "away")
        (place / "shards").write_text("in the way")
        save = job.step(2, state_of(0, 2, 1))
        # Sealed; and this process has not heard what came of it.
        job.before_optimizer_step()
        wait_until(lambda: "exists already" in log.read_text())
        (place / "shards").unlink()
        (place / "away").rename(place / "shards")
        assert save is not None and not save.durable
        assert job.restore(state_of(0, 0, 0)) == 1
        with pytest.raises(forebay.CheckpointError, match="exists already"):
            job.step(2, state_of(0, 2, 2))
        save_all(job, 0, range(2, 3), attempt=3)
    assert job.steps() == [1, 2] and forebay.load(place)["attempt"] == 3


def test_a_copy_of_what_is_under_way_is_restored_while_the_store_is_away(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay._held.PATIENCE_S", 0.1)
    gate.open()
    with without_memory(forebay.Checkpointer(f"s3://checkpoints/{tmp_path.name}", every=1, local=tmp_path)) as job:
        save_all(job, 0, range(1, 2), attempt=1)
        assert job.wait()
        gate.shut()
        save = job.step(2, state_of(0, 2, 1))
        assert save is not None and save.wait_local(60)
        state = state_of(0, 0, 0)
        for step in (None, 2):
            with pytest.warns(forebay.CheckpointWarning, match="step 2 is restored from the local disk, and it is not known"):
                assert job.restore(state, step=step) == 2
            assert state["n"] == 2 and job.restored is not None and job.restored.tier == "local" and not save.durable
        gate.open()
        assert save.wait_durable(60)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_went_back_takes_no_number_after_another_start(tmp_path: Path, ranks: int) -> None:
    """It takes its number once it saves, and would supersede whoever goes on elsewhere since it looked."""

    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, ranks=(rank, ranks), replicated=["frozen"]) as job:
            for step in (1, 2):
                job.save_now(step, state_of(rank, step, 1))
            assert job.wait() and job.restore(state_of(rank, 0, 0), step=1) == 1
            if rank == 0:
                _native.begin_job(f"file://{tmp_path}", *new_start())
            with pytest.raises(forebay.CheckpointSuperseded):
                save = job.save_now(2, state_of(rank, 2, 2))
                assert save is not None and save.wait_durable(60)
            return job.steps()

    assert run_ranks(ranks, work, with_gloo=False) == [[1, 2]] * ranks
    assert len(list((tmp_path / "runs").iterdir())) == 2


UNKNOWN = "step 2 is restored from memory, and it is not known whether the job went on elsewhere"


@contextlib.contextmanager
def without_waiting(job: forebay.Checkpointer) -> Iterator[None]:
    """Nothing is waited for that an agent does."""
    listen = job._listen

    def look(patience_s: float) -> None:
        assert patience_s == 0, "it waits"
        listen(patience_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_listen", look)
        yield


def seal_two(job: forebay.Checkpointer, rank: int, gate_is: Callable[[str], None]) -> list[forebay.Save]:
    """Of three steps the last two are under way to a store that is away."""
    job.save_now(1, state_of(rank, 1, 1))
    assert job.wait()
    gate_is("shut")
    saves = [job.save_now(step, state_of(rank, step, 1)) for step in (2, 3)]
    assert all(save.wait_sealed(60) for save in saves if save is not None)
    return [save for save in saves if save is not None]


def go_back(job: forebay.Checkpointer, rank: int) -> None:
    """To step 2, at once, out of memory."""
    state = state_of(rank, 0, 0)
    away = pytest.warns(forebay.CheckpointWarning, match=UNKNOWN) if rank == 0 else contextlib.nullcontext()
    with away, without_waiting(job):
        assert job.restore(state, step=2) == 2
    assert (state["n"], state["attempt"]) == (2, 1) and bool((state[f"own{rank}"] == 102.0 + rank).all())
    assert job.restored is not None and job.restored.tier == "arena"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_goes_back_and_saves_on_while_the_store_is_away(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """It waited until what it had left was stored, or given up ten minutes later; of several ranks no save began."""
    monkeypatch.setattr("forebay._held.PATIENCE_S", 0.1)
    gate.open()
    url = f"s3://checkpoints/{tmp_path.name}"

    def work(rank: int, report: Callable[[str], None]) -> None:
        def gate_is(what: str) -> None:
            report(what)
            wait_until((tmp_path / what).exists)

        with forebay.Checkpointer(url, ranks=(rank, ranks), replicated=["frozen"], on_busy="skip") as job:
            saves = seal_two(job, rank, gate_is)
            for attempt in (2, 3):
                go_back(job, rank)
                # It trains on, and has the step still.
                with without_waiting(job):
                    assert job.step(3, state_of(rank, 3, attempt)) is None
                go_back(job, rank)
                # In the place of what it left, of which nobody hears but who asks.
                saves.append(job.save_now(3, state_of(rank, 3, attempt)))
                assert saves[-1] is not None and saves[-1].wait_sealed(60) and job.skipped == 0
                with pytest.raises(forebay.CheckpointUnavailable, match="step 3 was not saved: the job went back"):
                    saves[-2].wait_durable(60)
            # Now both snapshots are on their way, as they are of a job that did not go back.
            assert job.save_now(4, state_of(rank, 4, 3)) is None and job.skipped == 1
            assert not any(save.durable for save in saves)
            gate_is("open")
            monkeypatch.setattr("forebay._held.PATIENCE_S", PATIENCE_S)
            assert saves[0].wait_durable(60) and saves[-1].wait_durable(60) and job.wait()
            assert job.restore(state_of(rank, 0, 0), step=2) == 2
            assert job.restored is not None and job.restored.tier == "arena"

    children = start_ranks(ranks, work, with_gloo=False)
    for what, act in (("shut", gate.shut), ("open", gate.open)):
        assert [child.line() for child in children] == [what] * ranks
        act()
        (tmp_path / what).touch()
    assert [child.join() for child in children] == [0] * ranks
    loaded = forebay.load(url)
    assert (loaded["n"], loaded["attempt"]) == (3, 3) and forebay.Checkpointer(url).steps() == [1, 2, 3]
    assert _native.verify(url, None) == []


def test_a_job_goes_back_to_the_local_disk_while_the_store_is_away(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay._held.PATIENCE_S", 0.1)
    gate.open()
    url = f"s3://checkpoints/{tmp_path.name}"
    with forebay.Checkpointer(url, local=tmp_path, local_keep=5) as job:
        saves = seal_two(job, 0, lambda _: gate.shut())
        state = state_of(0, 0, 0)
        with pytest.warns(forebay.CheckpointWarning, match="step 1 is restored from the local disk"), without_waiting(job):
            assert job.restore(state, step=1) == 1
        assert state["n"] == 1 and job.restored is not None and job.restored.tier == "local"
        again = job.save_now(2, state_of(0, 2, 2))
        assert again is not None and again.wait_local(60)
        gate.open()
        assert again.wait_durable(60) and job.wait() and not any(save.durable for save in saves)
    assert forebay.load(url)["attempt"] == 2


def test_a_job_that_went_back_and_forth_is_where_it_was(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, every=1) as job:
        save_all(job, 0, range(1, 4), attempt=1)
        assert job.wait()
        agent = job._agent.pid
        for step in (2, 1, 3):
            assert job.restore(state_of(0, 0, 0), step=step) == step
        save_all(job, 0, range(4, 5), attempt=1)
        assert job._agent.pid == agent and job.wait()
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_the_step_that_a_job_went_back_to_is_in_memory_once_it_was_killed(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay._held.PATIENCE_S", 0.1)
    gate.open()
    url = f"s3://checkpoints/{tmp_path.name}"

    def work(report: Callable[[str], None]) -> None:
        def gate_is(what: str) -> None:
            report(what)
            wait_until((tmp_path / what).exists)

        job = forebay.Checkpointer(url, linger=LINGER_S)
        seal_two(job, 0, gate_is)
        go_back(job, 0)
        report(str(job._agent.pid))
        signal.pause()

    child = Child(work)
    assert child.line() == "shut"
    gate.shut()
    (tmp_path / "shut").touch()
    agent = kill(child)
    with forebay.Checkpointer(url, linger=LINGER_S) as job:
        go_back(job, 0)
        gate.open()
        again = job.save_now(3, state_of(0, 3, 2))
        assert again is not None and again.wait_durable(60)
    assert forebay.load(url)["attempt"] == 2
    end(agent)


def test_what_is_not_under_way_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.Checkpointer(tmp_path, every=1) as job:
        waits: list[float] = []
        listen = job._listen
        monkeypatch.setattr(job, "_listen", lambda patience_s: (waits.append(patience_s), listen(patience_s))[1])
        assert job.restore(state_of(0, 0, 0)) is None and waits == []
        save_all(job, 0, range(1, 2), attempt=1)
        assert job.wait()
        waits.clear()
        assert job.restore(state_of(0, 0, 0)) == 1 and not any(waits)


def test_a_step_before_the_newest_of_the_run_is_refused(tmp_path: Path) -> None:
    """It was committed, deleted at once as an old one, and the next start restored what the job had gone back from."""

    def work(rank: int) -> None:
        with forebay.Checkpointer(tmp_path / "run", keep=1) as job:
            for step in (8, 9):
                job.save_now(step, state_of(rank, step, 1))
            state = state_of(rank, 0, 0)
            assert job.restore(state, step=8, only=["own*"]) == 8
            with pytest.raises(forebay.CheckpointInvalid, match="step 5 comes before step 9.*without `only` goes back"):
                job.save_now(5, state)
            assert job.wait() and job.steps()[-1] == 9
            job.save_now(10, state)
            assert job.wait() and job.steps()[-1] == 10

    for ranks in (1, 2):
        run_ranks(ranks, work, with_gloo=False)
