"""What no optimizer trains: nothing that torch tells of it says that it is as it was, so that it is copied at each save."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import forebay

WIDTH = 300


def by_data(weight: torch.Tensor) -> None:
    """As target networks and averages are changed, by many a program."""
    weight.data.mul_(0.5).add_(1.0)


def by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] += 1.0


def by_dlpack(weight: torch.Tensor) -> None:
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).add_(1.0)


def by_address(weight: torch.Tensor) -> None:
    """As kernels of other libraries do."""
    ctypes.memset(weight.data_ptr(), 1, weight.nbytes)


UNCOUNTED: dict[str, Callable[[torch.Tensor], None]] = {
    "data": by_data,
    "numpy": by_numpy,
    "dlpack": by_dlpack,
    "address": by_address,
}


@pytest.mark.parametrize("way", UNCOUNTED)
def test_what_is_frozen_is_saved_as_it_is_however_it_was_changed(tmp_path: Path, way: str) -> None:
    """The counter that torch has of changes, the address and `requires_grad` say that nothing happened."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3))
    base = model[0].requires_grad_(False).weight
    optim = torch.optim.AdamW(model[1].parameters())
    state: dict[str, Any] = {"model": model, "optim": optim}
    expected: list[torch.Tensor] = []
    known = base._version, base.data_ptr()
    with forebay.Checkpointer(tmp_path, every=1, rng=False) as checkpointer:
        # Both slots are written more than once.
        for step in range(1, 6):
            model(torch.ones(WIDTH)).sum().backward()
            checkpointer.before_optimizer_step()
            optim.step()
            if step != 3:
                UNCOUNTED[way](base)
            assert (base._version, base.data_ptr(), base.requires_grad) == (*known, False)
            expected.append(base.clone())
            save = checkpointer.step(step, state)
            assert save is not None and save.wait_durable(60)
        base.data.zero_()
        assert checkpointer.restore(state) == 5 and checkpointer.restored is not None
        assert checkpointer.restored.tier == "arena" and torch.equal(base, expected[-1])
    for step, was in enumerate(expected, 1):
        assert torch.equal(forebay.load(tmp_path, step=step)["model"]["0.weight"], was), step
