"""A `Checkpointer` that is made anew where one of its URL was never closed: a notebook's cell that is run again, a Trainer
that is made again after an exception. It was a start like any other, beside the first, and restored what happened to be in the
store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _native

from .conftest import Gate, leave_to_the_next_call, wait_until
from .test_crash import is_running
from .test_ranks import run_ranks
from .test_restart import LINGER_S, end

SLOW = "100KiB"
"""Bytes a second: what is saved is on its way to the store for seconds."""

USED_AFTER = "closed: another Checkpointer of this URL was made in this process"


def told(fate: str) -> Any:
    """Somebody is warned of what became of the first one's newest step."""
    return pytest.warns(forebay.CheckpointWarning, match=f"another Checkpointer of it was open.*and is closed; {fate}")


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {"t": torch.randn(50_000, generator=generator), "n": step}


def save(job: forebay.Checkpointer, *steps: int, rank: int = 0) -> forebay.Save:
    for step in steps:
        done = job.step(step, state_of(step, rank))
    assert done is not None
    return done


def bring_back(job: forebay.Checkpointer, rank: int = 0) -> tuple[int | None, str | None]:
    """Which step came back, bit for bit, and from where."""
    state = state_of(0, rank)
    step = job.restore(state)
    if step is None:
        return None, None
    assert torch.equal(state["t"], state_of(step, rank)["t"]) and state["n"] == step
    assert job.restored is not None
    return step, job.restored.tier


def settings(**given: Any) -> dict[str, Any]:
    return {"every": 1, "linger": LINGER_S, "flush_rate": SLOW, **given}


def test_it_restores_what_the_first_one_sealed_and_goes_on_from_it(tmp_path: Path) -> None:
    first = forebay.Checkpointer(tmp_path, **settings())
    under_way = save(first, 1, 2)
    with told("step 2, its newest, is in memory"):
        second = forebay.Checkpointer(tmp_path, **settings(flush_rate=None))
    assert bring_back(second) == (2, "arena")
    for use in (lambda: save(first, 3), lambda: first.restore({}), first.wait, first.before_optimizer_step):
        with pytest.raises(forebay.CheckpointInvalid, match=USED_AFTER):
            use()
    with pytest.raises(forebay.CheckpointInvalid, match="closed before step 2 was known to be there"):
        under_way.wait_durable(60)
    first.close()
    assert first.timeline()[-1]["step"] == 2, "what it did is still told"
    save(second, 3)
    second.close()
    assert second.latest() == 3
    with forebay.Checkpointer(tmp_path) as after:
        assert bring_back(after) == (3, "store")
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_a_name_that_is_bound_again_time_after_time(tmp_path: Path) -> None:
    job, agents, steps = forebay.Checkpointer(tmp_path, **settings(flush_rate=None)), [], []
    for step in range(1, 6):
        save(job, step)
        agents.append(job._agent.pid)
        with told(f"step {step}, its newest, is in memory"):
            job = forebay.Checkpointer(tmp_path, **settings(flush_rate=None))
        steps.append(bring_back(job))
    assert steps == [(step, "arena") for step in range(1, 6)]
    save(job, 6)
    job.close()
    # A start that is superseded while it uploads commits nothing.
    assert job.steps()[-1] == 6 and set(job.steps()) <= set(range(1, 7))
    # No memory of theirs stays taken.
    wait_until(lambda: not any(map(is_running, agents)))


def test_one_that_an_exception_left_is_found_at_once(tmp_path: Path) -> None:
    """Its agent was still being started."""
    found = []
    for step in range(1, 4):
        with pytest.raises(RuntimeError, match="a loss that is no number"):
            with forebay.Checkpointer(tmp_path, **settings(flush_rate=None)) as job:
                found.append(bring_back(job))
                save(job, step)
                raise RuntimeError("a loss that is no number")
    with forebay.Checkpointer(tmp_path, every=1) as job:
        found.append(bring_back(job))
        save(job, 4)
    assert found == [(None, None), (1, "arena"), (2, "arena"), (3, "arena")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_that_is_away_keeps_nobody(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """All ranks make theirs anew after what went wrong on one of them."""
    monkeypatch.setattr("forebay._held.PATIENCE_S", 0.1)
    gate.open()
    url = f"s3://checkpoints/{tmp_path.name}"
    shut, opened = tmp_path / "shut", tmp_path / "opened"

    def train(rank: int, last: int) -> list[Any]:
        found = []
        with told("step 2, its newest, is in memory") if last == 3 else nullcontext():
            job = forebay.Checkpointer(url, every=1, linger=LINGER_S, ranks=(rank, ranks))
        if last == 3:
            away = pytest.warns(forebay.CheckpointWarning, match="step 2 is restored from memory, and it is not known")
            with away if rank == 0 else nullcontext():
                found.append(bring_back(job, rank))
            # That a start began is for the store to say.
            (tmp_path / f"restored{rank}").touch()
            wait_until(opened.exists)
        save(job, last, rank=rank)
        if last == 1:
            assert job.wait()
            (tmp_path / f"stored{rank}").touch()
            wait_until(shut.exists)
            save(job, 2, rank=rank)
            raise RuntimeError("the data loader's worker died")
        job.close()
        return found

    def work(rank: int) -> Any:
        try:
            return train(rank, 1)
        except RuntimeError:
            return train(rank, 3)

    def open_and_shut() -> None:
        wait_until(lambda: all((tmp_path / f"stored{rank}").exists() for rank in range(ranks)))
        gate.shut()
        shut.touch()
        wait_until(lambda: all((tmp_path / f"restored{rank}").exists() for rank in range(ranks)))
        gate.open()
        opened.touch()

    keeper = threading.Thread(target=open_and_shut)
    keeper.start()
    assert run_ranks(ranks, work, with_gloo=False) == [[[2, "arena"]]] * ranks
    keeper.join()
    assert forebay.load(url)["n"] == 3
    assert _native.verify(url, None) == []


def test_one_that_leaves_no_memory_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = forebay.Checkpointer(tmp_path / "run", every=1, linger=0)
    save(first, 1, 2)
    with told("step 2, its newest, is settled"):
        second = forebay.Checkpointer(tmp_path / "run", every=1, linger=0, flush_rate="20KiB")
    assert bring_back(second) == (2, "store") and not is_running(first._agent.pid)
    # A store that has it not for long keeps nobody.
    save(second, 3)
    monkeypatch.setattr("forebay._saver._HANDOVER_S", 0.1)
    with told("step 3, its newest, was not in the store after 0.1 s"):
        third = forebay.Checkpointer(tmp_path / "run", every=1, linger=0)
    third.close()
    end(second._agent.pid)


def test_what_another_number_of_ranks_would_not_find_is_waited_for(tmp_path: Path) -> None:
    first = forebay.Checkpointer(tmp_path, every=1, linger=LINGER_S, ranks=(0, 1))
    save(first, 1)
    with told("step 1, its newest, is settled"):
        forebay.Checkpointer(tmp_path, every=1, ranks=(0, 2)).close()
    assert first.steps() == [1] and not is_running(first._agent.pid)


def test_what_a_dead_agent_held_is_restored(tmp_path: Path) -> None:
    first = forebay.Checkpointer(tmp_path, **settings())
    save(first, 1, 2)
    end(first._agent.pid)
    with pytest.warns(forebay.CheckpointWarning, match="ended unexpectedly; another one was started"):
        with told("step 2, its newest, is in memory"):
            second = forebay.Checkpointer(tmp_path, **settings(flush_rate=None))
    assert bring_back(second) == (2, "arena")
    save(second, 3)
    second.close()
    assert second.latest() == 3
    first._agent.kill()


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_copy_under_way_is_sealed_unless_it_was_changed(tmp_path: Path, has_changed: bool) -> None:
    model = torch.nn.Linear(300, 300)
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}
    first = forebay.Checkpointer(tmp_path, every=1, linger=LINGER_S)
    first.before_optimizer_step()
    first.step(1, state)
    # Its agent is up then: one that is late hears that a later start took over, see docs/promises.md.
    first.wait()
    first.before_optimizer_step()
    leave_to_the_next_call(first)
    first.step(2, state)
    if has_changed:
        with torch.no_grad():
            model.weight.add_(1)
    lost = pytest.warns(forebay.CheckpointWarning, match="given up: step 2 was not saved")
    with lost if has_changed else nullcontext(), told(f"step {2 - has_changed}, its newest, is in memory"):
        second = forebay.Checkpointer(tmp_path, every=1)
    assert second.restore(state) == 2 - has_changed
    second.step(3, state)
    second.close()


def test_what_failed_there_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = forebay.Checkpointer(run, every=1, linger=LINGER_S)
    assert save(first, 1).wait_durable(60)
    (run / "shards").rename(run / "elsewhere")
    (run / "shards").write_text("in the way")
    failed = save(first, 2)
    wait_until(lambda: first._session.take_replies(0.0) is None and "failed" in repr(failed))
    with pytest.warns(forebay.CheckpointWarning, match="step 2 was not saved"), told("step 2, its newest, is in memory"):
        second = forebay.Checkpointer(run, every=1)
    assert bring_back(second) == (2, "arena")
    (run / "shards").unlink()
    (run / "elsewhere").rename(run / "shards")
    with pytest.warns(forebay.CheckpointWarning, match="it is in memory alone until the next step"):
        save(second, 3)
    second.close()
    assert second.steps() == [1, 3]


def test_one_that_another_thread_is_in_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay._saver._HANDOVER_S", 0.1)
    first = forebay.Checkpointer(tmp_path, every=1)
    is_in, may_leave = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            is_in.set()
            may_leave.wait()
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    saving = threading.Thread(target=first.step, args=(1, {"slow": Slow()}))
    saving.start()
    is_in.wait()
    with pytest.raises(forebay.CheckpointInvalid, match="is in a call of another thread.*close\\(\\) that one first"):
        forebay.Checkpointer(tmp_path, every=1)
    may_leave.set()
    saving.join()
    save(first, 2)
    first.close()
    assert first.steps() == [1, 2]


def test_only_what_is_right_and_of_the_same_place_ends_another(tmp_path: Path) -> None:
    first = forebay.Checkpointer(tmp_path / "run", every=1, ranks=(0, 1), on_signal="SIGUSR1")
    save(first, 1)
    for wrong in ({"on_signal": "SIGNOT"}, {"keep": 0}, {"local": tmp_path / "file" / "local"}, {"agent_log": tmp_path}):
        (tmp_path / "file").write_text("")
        with pytest.raises(forebay.CheckpointInvalid):
            forebay.Checkpointer(tmp_path / "run", **wrong)
    forebay.Checkpointer(tmp_path / "other").close()
    forebay.Checkpointer(tmp_path / "run", ranks=(1, 2)).close()
    save(first, 2)
    first.close()
    assert first.steps() == [1, 2]


def test_who_only_looks_ends_nobody(tmp_path: Path) -> None:
    """An evaluation in the same process: it ended the training."""
    model = torch.nn.Linear(3, 3)
    first = forebay.Checkpointer(tmp_path, every=1, linger=LINGER_S)
    assert first.step(1, {"model": model}).wait_durable(60)  # type: ignore[union-attr]
    other = forebay.Checkpointer(tmp_path)
    assert other.latest() == 1 and other.steps() == [1]
    assert other.load_model(torch.nn.Linear(3, 3)) == 1
    first.step(2, {"model": model})
    first.wait()
    with told("step 2, its newest, is in memory"):
        assert other.restore({"model": model}) == 2
    with pytest.raises(forebay.CheckpointInvalid, match=USED_AFTER):
        first.step(3, {"model": model})
    other.save_now(3, {"model": model})
    other.close()
    assert other.steps() == [1, 2, 3]


def test_signals_go_to_the_new_one(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        first = forebay.Checkpointer(tmp_path, every=1, on_signal="SIGUSR1")
        save(first, 1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == []
        with told("step 1"):
            second = forebay.Checkpointer(tmp_path, every=100, on_signal="SIGUSR1")
        assert heard == [signal.SIGUSR1], "what came to the first one is passed on, and not lost"
        os.kill(os.getpid(), signal.SIGUSR1)
        save(second, 2)
        assert heard == [signal.SIGUSR1] * 2
        second.close()
        assert second.steps() == [1, 2]
    finally:
        signal.signal(signal.SIGUSR1, before)


LEAVING = """
import gc, sys, forebay
def leave(how, place):
    job = forebay.Checkpointer(place, every=1, linger=0)
    job.step(1, {"t": 1})
    if how == "close":
        job.close()
    elif how == "with":
        try:
            with job:
                raise RuntimeError
        except RuntimeError:
            pass
    elif how == "kept":
        globals()["kept"] = job
leave(*sys.argv[1:])
gc.collect()
"""


@pytest.mark.parametrize("how", ["close", "with", "collected", "kept"])
def test_no_way_to_leave_one_is_warned_of(tmp_path: Path, how: str) -> None:
    """Its agent outlives it, which is what it is for: Python warned of a process that was still running."""
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", LEAVING, how, str(tmp_path)]
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    assert [line for line in ended.stderr.splitlines() if "saves take" not in line] == []
