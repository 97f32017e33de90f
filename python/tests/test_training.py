"""A training that was stopped and restored goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import forebay


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


def test_an_optimizer_that_never_stepped(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    state = parts(make)
    forebay.save(state, tmp_path)
    target = parts(make)
    forebay.load(tmp_path, target)
    assert not target["optim"].state_dict()["state"]
