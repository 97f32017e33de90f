"""Saves that fail in the background: they are raised, or warned about until it is enough, and alike on all ranks."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay

from .conftest import Instead, wait_until
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
