"""Every scheduler of learning rates that the installed torch has: saved, restored into a fresh one, and going on alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import forebay

Make = Callable[[torch.optim.Optimizer], Any]


class Falling:
    """A schedule that is an object, whose attributes torch saves."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        return self.factor**step


class Waving(Falling):
    """One of whom torch saves no attributes, but its name."""

    def __call__(self, step: float) -> float:
        return self.factor**step


def sequential(optim: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optim, 0.3, 1.0, 3), lr_scheduler.MultiStepLR(optim, [2, 3])]
    return lr_scheduler.SequentialLR(optim, parts, milestones=[3])


def chained(optim: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optim, 0.9), lr_scheduler.MultiStepLR(optim, [3, 5, 5])], optimizer=optim
    )


KINDS: dict[str, list[Make]] = {
    "LambdaLR": [
        lambda optim: lr_scheduler.LambdaLR(optim, lambda step: 0.9**step),
        lambda optim: lr_scheduler.LambdaLR(optim, Falling(0.9)),
    ],
    "MultiplicativeLR": [lambda optim: lr_scheduler.MultiplicativeLR(optim, Falling(0.99))],
    "StepLR": [lambda optim: lr_scheduler.StepLR(optim, 2)],
    "MultiStepLR": [lambda optim: lr_scheduler.MultiStepLR(optim, [2, 3, 3, 6])],
    "ConstantLR": [lambda optim: lr_scheduler.ConstantLR(optim, 0.3, 6)],
    "LinearLR": [lambda optim: lr_scheduler.LinearLR(optim, 0.1, 1.0, 7)],
    "ExponentialLR": [lambda optim: lr_scheduler.ExponentialLR(optim, 0.7)],
    "SequentialLR": [sequential],
    "PolynomialLR": [lambda optim: lr_scheduler.PolynomialLR(optim, 8, 2.0)],
    "CosineAnnealingLR": [lambda optim: lr_scheduler.CosineAnnealingLR(optim, 7, 0.001)],
    "ChainedScheduler": [chained],
    "ReduceLROnPlateau": [lambda optim: lr_scheduler.ReduceLROnPlateau(optim, patience=1)],
    "CyclicLR": [
        lambda optim: lr_scheduler.CyclicLR(optim, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
        lambda optim: lr_scheduler.CyclicLR(optim, 0.01, 0.1, 3, scale_fn=Waving(0.9)),
    ],
    "CosineAnnealingWarmRestarts": [lambda optim: lr_scheduler.CosineAnnealingWarmRestarts(optim, 3, 2)],
    "OneCycleLR": [lambda optim: lr_scheduler.OneCycleLR(optim, 0.3, 12)],
    "SWALR": [lambda optim: swa_utils.SWALR(optim, 0.05, 5)],
}
"""How to make one of each class, by the class's name."""


def classes(kind: type) -> set[str]:
    """The public ones of torch that go back to a class."""
    found = {below.__name__ for below in kind.__subclasses__() if below.__module__.startswith("torch.optim.")}
    return {name for name in found if name[0] != "_"}.union(*map(classes, kind.__subclasses__()))


def test_every_class_of_schedulers_is_tried() -> None:
    assert KINDS.keys() == classes(lr_scheduler.LRScheduler)


def made(make: Make, rate: float = 0.1) -> dict[str, Any]:
    """A scheduler of an optimizer with two groups, beside it."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optim = torch.optim.SGD([{"params": weights[:1], "lr": rate}, {"params": weights[1:]}], lr=rate / 3, momentum=0.9)
    return {"optim": optim, "scheduler": make(optim)}


def rates(state: dict[str, Any], first: int, last: int) -> list[list[float]]:
    """The learning rates, and momenta, after each of some steps."""
    found = []
    for step in range(first, last + 1):
        state["optim"].step()
        is_asking = isinstance(state["scheduler"], lr_scheduler.ReduceLROnPlateau)
        state["scheduler"].step(*[1.0 if step % 4 else 0.5 / step] * is_asking)
        found.append([group[name] for group in state["optim"].param_groups for name in ("lr", "momentum")])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, number", [(name, number) for name, makes in KINDS.items() for number in range(len(makes))])
def test_every_scheduler_goes_on_where_it_stopped(tmp_path: Path, name: str, number: int) -> None:
    make = KINDS[name][number]
    for stop in (0, 4):
        saved = made(make)
        rates(saved, 1, stop)
        forebay.save(saved, tmp_path, step=stop)
        told = saved["scheduler"].state_dict()
        expected = rates(saved, stop + 1, 10)
        # One that was made with other numbers takes them with its state.
        resumed, steps = made(make, 0.7), stop
        forebay.load(tmp_path, resumed, step=steps)
        assert rates(resumed, stop + 1, 10) == expected
        plain = forebay.load(tmp_path, step=steps)["scheduler"]
        assert repr(plain) == repr(told) and plain.keys() == told.keys()
