"""A training that was stopped and restored goes on as if it had not been."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import forebay

from .conftest import Instead


def parts(make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
    )
    optimizer = make(model.parameters())
    return {"model": model, "optim": optimizer, "sched": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)}


def train(state: dict[str, Any], checkpointer: forebay.Checkpointer, first: int, last: int, hook: bool) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        loss = state["model"](torch.randn(8, 16)).square().mean()
        state["optim"].zero_grad()
        loss.backward()
        if hook:
            checkpointer.before_optimizer_step()
        state["optim"].step()
        state["sched"].step()
        losses.append(loss.item())
        checkpointer.step(step, state)
    return losses


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    ],
)
def test_losses_are_bit_equal_after_a_restore(tmp_path: Path, make: Any, hook: bool) -> None:
    with forebay.Checkpointer(tmp_path / "whole", every=5) as checkpointer:
        expected = train(parts(make), checkpointer, 1, 12, hook)
    with forebay.Checkpointer(tmp_path / "cut", every=5) as checkpointer:
        first = train(parts(make), checkpointer, 1, 7, hook)
    state = parts(make)
    with forebay.Checkpointer(tmp_path / "cut", every=5) as checkpointer:
        start = checkpointer.restore(state)
        assert start == 5
        second = train(state, checkpointer, start + 1, 12, hook)
        assert checkpointer.wait(60) and checkpointer.steps() == [5, 10]
    assert first == expected[:7]
    assert second == expected[5:]


def test_saving_does_not_change_the_training(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    with forebay.Checkpointer(tmp_path / "never") as checkpointer:
        expected = train(parts(make), checkpointer, 1, 6, False)
    state = parts(make)
    with forebay.Checkpointer(tmp_path / "always", every=1) as checkpointer:
        checkpointer.prepare(state)
        checkpointer.save_now(0, state)
        assert train(state, checkpointer, 1, 6, False) == expected


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_waits_for_the_copy(tmp_path: Path, fused: bool, is_compiled: bool) -> None:
    """No version counter tells of what a fused one changes: a step would have held half of the next one."""
    model = torch.nn.Linear(300, 300)
    state: dict[str, Any] = {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)}
    apply = torch.compile(state["optim"].step, backend="eager") if is_compiled else state["optim"].step

    def train_once() -> None:
        model(torch.randn(8, 300)).square().mean().backward()
        apply()

    train_once()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.before_optimizer_step()
        for step in (1, 2):
            expected = copy.deepcopy(model.state_dict()), copy.deepcopy(state["optim"].state_dict()["state"])
            session, begun = checkpointer._session, late_copies(checkpointer)
            save = checkpointer.save_now(step, state)
            assert save is not None and not save.staged and begun == [1]
            train_once()
            checkpointer._session = session
            assert save.staged and save.wait_durable(60)
            loaded = forebay.load(tmp_path)
            assert loaded["model"].keys() == expected[0].keys()
            assert all(torch.equal(loaded["model"][name], value) for name, value in expected[0].items())
            found = loaded["optim"]["state"]
            for number, (name, _) in enumerate(model.named_parameters()):
                assert all(torch.equal(found[name][key], value) for key, value in expected[1][number].items())


def late_copies(checkpointer: forebay.Checkpointer) -> list[int]:
    """Has the next save copy in the background only once it is waited for; gets a 1 when that is begun."""
    session, begun = checkpointer._session, list[int]()

    def begin(*given: Any) -> Any:
        snapshot, copies, joined = session.begin(*given), list[Any](), threading.Event()

        def join() -> None:
            snapshot.copy_in_background(*copies)
            snapshot.join()
            joined.set()

        def copy_in_background(*what: Any) -> None:
            copies.extend(what)
            begun.append(1)

        def given_up(held: Any) -> None:
            session.abandon(snapshot)

        checkpointer._session = Instead(session, seal=lambda held, *rest: session.seal(snapshot, *rest), abandon=given_up)
        # Who would seal it once it is copied waits, too.
        return Instead(snapshot, join=join, copy_in_background=copy_in_background, await_end=joined.wait)

    checkpointer._session = Instead(session, begin=begin)
    return begun


def test_an_optimizer_that_never_stepped(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    state = parts(make)
    forebay.save(state, tmp_path)
    target = parts(make)
    forebay.load(tmp_path, target)
    assert not target["optim"].state_dict()["state"]
