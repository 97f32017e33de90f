"""Saves that fail in the background: they are raised, or warned about until it is enough, and alike on all ranks."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay

from .conftest import Instead, leave_to_the_next_call, put_elsewhere, trained, wait_until
from .test_ranks import run_ranks


def shut(run: Path) -> None:
    """From now on nothing can be stored there."""
    (run / "shards").rename(run / "elsewhere")
    (run / "shards").write_text("in the way")


def mend(run: Path) -> None:
    (run / "shards").unlink()
    (run / "elsewhere").rename(run / "shards")


def state(step: int) -> dict[str, Any]:
    return {"t": torch.full((100,), float(step))}


def begun(run: Path, **arguments: Any) -> forebay.Checkpointer:
    """A checkpointer that saved step 1, and can save no more."""
    checkpointer = forebay.Checkpointer(run, every=1, **arguments)
    save = checkpointer.step(1, state(1))
    assert save is not None and save.wait_durable(60)
    shut(run)
    return checkpointer


def hear(checkpointer: forebay.Checkpointer, save: Optional[forebay.Save], outcome: str) -> None:
    """Waits until this process heard how a save ended, and tells nobody."""
    assert save is not None

    def heard() -> bool:
        checkpointer._session.take_replies(0.1)
        return save._progress() == outcome

    wait_until(heard)


def fail(checkpointer: forebay.Checkpointer, step: int) -> forebay.Save:
    """Begins a save that fails, of which nobody was told yet."""
    save = checkpointer.step(step, state(step))
    assert save is not None
    hear(checkpointer, save, "failed")
    return save


def told(act: Any) -> tuple[list[str], Optional[str]]:
    """The warnings that a call gives, and what it raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
            raised = None
        except forebay.CheckpointError as error:
            raised = str(error)
    # What the interpreter collects meanwhile of others' sockets and files is no matter here.
    caught = [warning for warning in caught if issubclass(warning.category, forebay.CheckpointWarning)]
    # What an agent warns of beside is not meant here.
    failures = [warning for warning in caught if str(warning.message).startswith("step ")]
    assert [warning.filename for warning in failures] == [__file__] * len(failures), "each points to the caller"
    return [str(warning.message) for warning in failures], raised


def test_failures_are_warned_about_until_it_is_enough(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpointer = begun(run, on_error="warn")
    fail(checkpointer, 2)
    for step in (3, 4):
        saves: list[Any] = []
        (text,), raised = told(lambda: saves.append(checkpointer.step(step, state(step))))
        assert text.startswith(f"step {step - 1} was not saved: ") and "exists already" in text and raised is None
        hear(checkpointer, saves[0], "failed")
    for number in (1, 2):
        texts, raised = told(lambda: checkpointer.step(5, state(5)))
        assert texts == []
        if number == 1:
            assert raised is not None and raised.startswith("3 saves in a row failed (max_failures=3), the last one: step 4 was")
            mend(run)
    assert raised is None, "it is raised once, and the next call saves"
    checkpointer.close()
    assert checkpointer.steps() == [1, 5]


def test_a_durable_save_starts_the_count_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpointer = begun(run, on_error="warn", max_failures=2)
    steps = itertools.count(2)
    for _ in range(3):
        step = next(steps)
        fail(checkpointer, step)
        mend(run)
        after = next(steps)
        with pytest.warns(forebay.CheckpointWarning, match=f"^step {step} was not saved"):
            save = checkpointer.step(after, state(after))
        assert save is not None and save.wait_durable(60)
        shut(run)
    step = next(steps)
    fail(checkpointer, step)
    with pytest.warns(forebay.CheckpointWarning, match=f"^step {step} was not saved"):
        save = checkpointer.save_now(step + 1, state(step))
    hear(checkpointer, save, "failed")
    with pytest.raises(forebay.CheckpointError, match=f"^2 saves in a row .*step {step + 1} was not saved"):
        checkpointer.save_now(step + 2, state(step))
    checkpointer.close()


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_handle_raises_and_what_it_raised_is_not_told_again(tmp_path: Path, on_error: Any) -> None:
    checkpointer = begun(tmp_path, on_error=on_error, max_failures=2)
    for step in (2, 3):
        save = checkpointer.step(step, state(step))
        assert save is not None
        for _ in range(2):
            with pytest.raises(forebay.CheckpointError, match="exists already"):
                save.wait_durable(60)
    if on_error == "warn":
        # It was counted all the same.
        with pytest.raises(forebay.CheckpointError, match="^2 saves in a row failed"):
            checkpointer.step(4, state(4))
    mend(tmp_path)
    checkpointer.step(4, state(4))
    checkpointer.close()
    assert checkpointer.steps() == [1, 4]


def test_waiting_and_closing_tell_of_failures_too(tmp_path: Path) -> None:
    checkpointer = begun(tmp_path / "a", on_error="warn", max_failures=2)
    fail(checkpointer, 2)
    texts, raised = told(checkpointer.wait)
    assert (len(texts), texts[0][:20], raised) == (1, "step 2 was not saved", None)
    assert told(checkpointer.wait) == ([], None), "each is told once"
    fail(checkpointer, 3)
    with pytest.raises(forebay.CheckpointError, match="^2 saves in a row failed"):
        checkpointer.close()
    assert checkpointer._is_closed

    other = begun(tmp_path / "b", on_error="warn", max_failures=2)
    fail(other, 2)
    with pytest.warns(forebay.CheckpointWarning, match="^step 2 was not saved"):
        other.close()
    assert other.steps() == [1] and other._agent.poll() == 0


def test_what_no_later_save_can_mend_is_raised_at_once(tmp_path: Path) -> None:
    old = forebay.Checkpointer(tmp_path, every=1, on_error="warn", max_failures=100)
    put_elsewhere(old)
    new = forebay.Checkpointer(tmp_path, every=1)
    with old, new:
        for owner, step in ((old, 1), (new, 2)):
            save = owner.step(step, state(step))
            assert save is not None and save.wait_durable(60)
        fail(old, 3)
        with pytest.raises(forebay.CheckpointSuperseded, match="incarnation 2"):
            old.step(4, state(4))
        with pytest.raises(TypeError):
            old.step(5, {"x": object()})


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("hears", [0, 1])
def test_ranks_that_hear_at_different_moments_raise_at_the_same_call(
    tmp_path: Path, hears: int, on_error: Any
) -> None:
    """The one that had heard raised, while the other waited for it in the next save."""
    failures = 1 if on_error == "raise" else 2

    def work(rank: int) -> Any:
        options: dict[str, Any] = {"on_error": on_error, "max_failures": failures, "patience": 30}
        checkpointer = forebay.Checkpointer(tmp_path, every=2, **options)
        session, log = checkpointer._session, []

        def step(number: int) -> Any:
            return told(lambda: log.append(checkpointer.step(number, state(number))))

        step(2)
        assert log[0].wait_durable(60)
        checkpointer._ranks.first("break the store", lambda: shut(tmp_path))
        calls = []
        for number in range(4, 4 + 2 * failures, 2):
            calls.append(step(number))
            hear(checkpointer, log[-1], "failed") if rank == hears or number < 2 + 2 * failures else None
        last = number
        if rank != hears:
            # What its agent says is not listened to.
            checkpointer._session = Instead(session, take_replies=lambda patience_s: None)
        checkpointer._ranks.first("wait for the other", lambda: None)
        # No meeting: none of them raises by itself what is counted.
        early = step(last + 1) if on_error == "warn" else ([], None)
        calls.append(step(last + 2))
        checkpointer._session = session
        if rank != hears:
            hear(checkpointer, log[failures], "failed")
        checkpointer._ranks.first("mend the store", lambda: mend(tmp_path))
        calls += [step(last + 3), step(last + 4)]
        checkpointer.close()
        return early, calls, checkpointer.steps()

    ranks = run_ranks(2, work, with_gloo=False)
    for rank, (early, calls, steps) in enumerate(ranks):
        is_warned = on_error == "warn" and rank == hears
        assert early[1] is None and [text[:20] for text in early[0]] == ["step 6 was not saved"] * is_warned
        *before, at, after, saved = calls
        assert before[0] == [[], None] and (on_error == "raise" or before[1][0][0].startswith("step 4 was not saved"))
        assert at[0] == [], "what is raised is not warned about"
        said = at[1] if rank == hears else at[1].removeprefix(f"rank {hears}: ")
        assert rank == hears or said != at[1]
        assert on_error == "raise" or said.startswith("2 saves in a row failed (max_failures=2), the last one: step 6 was")
        assert after == saved == [[], None], "nobody is told twice"
        assert steps == [2, 2 + 2 * failures + 4]


def check_again(checkpointer: forebay.Checkpointer, steps: list[int]) -> None:
    """That the step which failed, the first of these, is saved, once, and so are those after it."""
    for step in steps:
        save = checkpointer.save_now(step, state(step + 100))
        assert save is not None and save.wait_durable(60)
        held = checkpointer._session.held()
        assert len(held) == len(set(held)), "nobody could tell one try from the other"
        with pytest.raises(forebay.CheckpointConflict, match=f"step {step} was saved already"):
            checkpointer.save_now(step, state(step))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_that_failed_is_saved_by_the_next_try(tmp_path: Path, is_first: bool) -> None:
    if is_first:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "shards").write_text("in the way")
    with forebay.Checkpointer(tmp_path, every=1) if is_first else begun(tmp_path) as checkpointer:
        for _ in range(2):
            # Both tries of it.
            fail(checkpointer, 2)
            with pytest.raises(forebay.CheckpointError, match="^(?!step 2 was saved already)"):
                checkpointer.save_now(2, state(2))
        mend(tmp_path)
        check_again(checkpointer, [2, 3, 4, 5])
    assert checkpointer.steps() == ([] if is_first else [1]) + [2, 3, 4, 5]
    assert [forebay.load(tmp_path, step=step)["t"][0] for step in (2, 5)] == [102, 105]


def spoilt(checkpointer: forebay.Checkpointer, step: int) -> Any:
    """Begins a save whose tensors are changed while they are copied."""
    state = trained()
    checkpointer.before_optimizer_step()
    leave_to_the_next_call(checkpointer)
    save = checkpointer.save_now(step, state)
    with torch.no_grad():
        state["model"].weight.add_(1)
    return save


def test_a_step_whose_tensors_changed_is_saved_by_the_next_try(tmp_path: Path) -> None:
    with begun(tmp_path) as checkpointer:
        mend(tmp_path)
        spoilt(checkpointer, 2)
        with pytest.raises(forebay.CheckpointMutated):
            checkpointer.before_optimizer_step()
        check_again(checkpointer, [2, 3])
    assert checkpointer.steps() == [1, 2, 3]


@pytest.mark.parametrize("hears", [0, 1])
def test_ranks_that_hear_at_different_moments_save_a_step_again_together(tmp_path: Path, hears: int) -> None:
    def work(rank: int) -> Any:
        checkpointer = forebay.Checkpointer(tmp_path, every=1, patience=30)
        session = checkpointer._session
        save = checkpointer.step(1, state(1))
        assert save is not None and save.wait_durable(60)
        checkpointer._ranks.first("break the store", lambda: shut(tmp_path))
        save = checkpointer.step(2, state(2))
        if rank == hears:
            hear(checkpointer, save, "failed")
        else:
            # What its agent says is not listened to.
            silent: dict[str, Any] = {"take_replies": lambda patience_s: None, "has_room": lambda patience_s: True}
            checkpointer._session = Instead(session, **silent)
        checkpointer._ranks.first("wait for the other", lambda: None)
        raised = told(lambda: checkpointer.save_now(2, state(2)))[1]
        checkpointer._ranks.first("mend the store", lambda: mend(tmp_path))
        assert (save is not None and save._progress() == "failed") == (rank == hears)
        again = checkpointer.save_now(2, state(3))
        checkpointer._session = session
        assert again is not None and again.wait_durable(60)
        conflict = told(lambda: checkpointer.save_now(2, state(2)))[1]
        checkpointer.step(3, state(3))
        checkpointer.close()
        return raised, conflict, checkpointer.steps()

    for raised, conflict, steps in run_ranks(2, work, with_gloo=False):
        assert "exists already" in raised and conflict == "step 2 was saved already in this run"
        assert steps == [1, 2, 3]
    assert bool((forebay.load(tmp_path, step=2)["t"] == 3).all())


def test_ranks_save_a_step_again_that_one_of_them_gave_up(tmp_path: Path) -> None:
    """The one may not have heard yet what the other knows."""

    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, patience=30) as checkpointer:
            if rank == 1:
                spoilt(checkpointer, 1)
                with pytest.raises(forebay.CheckpointMutated):
                    checkpointer.before_optimizer_step()
            else:
                checkpointer.save_now(1, state(1))
            raised = told(lambda: checkpointer.save_now(1, state(2)))[1]
            if raised is not None:
                # Rank 0 had heard of it by then.
                assert "weight changed" in raised and told(lambda: checkpointer.save_now(1, state(2))) == ([], None)
            for step in (2, 3):
                assert told(lambda: checkpointer.save_now(step, state(step))) == ([], None), "nobody is told twice"
            held = checkpointer._session.held()
            assert len(held) == len(set(held))
        return checkpointer.steps()

    assert run_ranks(2, work, with_gloo=False) == [[1, 2, 3]] * 2
    assert bool((forebay.load(tmp_path, step=1)["t"] == 2).all())


@pytest.fixture
def asked() -> Iterator[list[int]]:
    """The signals that came through to this process."""
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("has_heard", [True, False])
def test_a_signal_saves_whatever_failed_before(
    tmp_path: Path, asked: list[int], on_error: Any, step: int, has_heard: bool
) -> None:
    """At a preemption the step that had failed, or what was to be told of it, was all that the job did."""
    log = tmp_path / "log"
    checkpointer = begun(tmp_path, on_error=on_error, max_failures=1, on_signal="SIGUSR1", agent_log=log)
    save = checkpointer.step(2, state(2))
    if has_heard:
        hear(checkpointer, save, "failed")
    wait_until(lambda: "exists already" in log.read_text())
    mend(tmp_path)
    os.kill(os.getpid(), signal.SIGUSR1)
    saves: list[Any] = []
    texts, raised = told(lambda: saves.append(checkpointer.step(step, state(100 + step))))
    assert raised is None and [text[:20] for text in texts] == ["step 2 was not saved"]
    assert saves[0].durable and saves[0] is not save and len(asked) == 1
    assert told(checkpointer.close) == ([], None), "it is told once"
    assert checkpointer.steps() == [1, step] and forebay.load(tmp_path)["t"][0] == 100 + step


def test_a_signal_saves_whatever_could_not_be_copied_before(tmp_path: Path, asked: list[int]) -> None:
    checkpointer = begun(tmp_path, on_signal="SIGUSR1")
    mend(tmp_path)
    spoilt(checkpointer, 2)
    os.kill(os.getpid(), signal.SIGUSR1)
    (text,), raised = told(lambda: checkpointer.step(3, state(3)))
    assert raised is None and text.startswith("step 2 was not saved: ") and "weight changed" in text and len(asked) == 1
    spoilt(checkpointer, 4)
    # Nobody asks for another one first.
    with pytest.raises(forebay.CheckpointMutated):
        checkpointer.step(5, state(5))
    assert told(checkpointer.close) == ([], None) and checkpointer.steps() == [1, 3]


def test_a_last_save_that_fails_is_told_as_any_other(tmp_path: Path, asked: list[int]) -> None:
    checkpointer = begun(tmp_path, on_signal="SIGUSR1")
    fail(checkpointer, 2)
    os.kill(os.getpid(), signal.SIGUSR1)
    for step in (2, 3):
        # What failed before, and then the last one.
        assert str(told(lambda: checkpointer.step(3, state(3)))[1]).count("exists already") == 1 and asked == []
    mend(tmp_path)
    save = checkpointer.step(4, state(4))
    assert save is not None and save.durable and len(asked) == 1
    checkpointer.close()


def test_a_signal_to_one_rank_saves_whatever_failed_on_another(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        came: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
        checkpointer = forebay.Checkpointer(tmp_path, every=1, on_signal="SIGUSR1", patience=30)
        save = checkpointer.step(1, state(1))
        assert save is not None and save.wait_durable(60)
        checkpointer._ranks.first("break the store", lambda: shut(tmp_path))
        save = checkpointer.step(2, state(2))
        if rank == 0:
            hear(checkpointer, save, "failed")
            os.kill(os.getpid(), signal.SIGUSR1)
        checkpointer._ranks.first("mend the store", lambda: mend(tmp_path))
        texts, raised = told(lambda: checkpointer.step(2, state(3)))
        checkpointer.close()
        return [text[:20] for text in texts], raised, len(came), checkpointer.steps()

    assert run_ranks(2, work, with_gloo=False) == [[["step 2 was not saved"], None, 1, [1, 2]]] * 2
    assert bool((forebay.load(tmp_path)["t"] == 3).all())
