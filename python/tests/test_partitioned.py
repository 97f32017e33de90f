"""Models that DeepSpeed has taken apart (ZeRO-3): what torch has of them are empty tensors, which nobody wants saved.

DeepSpeed itself is not needed: a parameter of its has `ds_id` and `ds_tensor`, and no elements.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
import forebay.lightning


def partitioned() -> Any:
    """As `deepspeed.zero.Init` leaves a module."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for number, parameter in enumerate(module.parameters()):
        whole = parameter.data
        parameter.ds_id, parameter.ds_tensor, parameter.ds_shape = number, whole.flatten()[:2].clone(), whole.shape  # type: ignore
        parameter.data = torch.empty(0)
    return module


@pytest.mark.parametrize("take", [lambda module: module, lambda module: dict(module.named_parameters())])
def test_parameters_that_are_elsewhere_are_not_saved(tmp_path: Path, take: Any) -> None:
    match = r"state\['m'\].*0.weight.*: a parameter that DeepSpeed has partitioned \(ZeRO-3\).*hint: DeepSpeed's own"
    with pytest.raises(TypeError, match=match):
        forebay.save({"m": take(partitioned())}, tmp_path)
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == []


def test_nor_restored(tmp_path: Path) -> None:
    saved = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    forebay.save({"m": saved}, tmp_path)
    for strict in (True, False):
        with pytest.raises(forebay.CheckpointMismatch, match="model.0.weight: a parameter that DeepSpeed has partitioned"):
            forebay.load_model(tmp_path, partitioned(), strict=strict)


def test_nor_saved_by_lightning(tmp_path: Path) -> None:
    """Which gathers the state of a strategy's module first: empty tensors that tell nothing of it."""

    class DeepSpeedStrategy:
        """As much of one as is asked."""

        model, optimizers = partitioned(), ()

        def broadcast(self, value: Any) -> Any:
            return value

    strategy = forebay.lightning.sharded(DeepSpeedStrategy)()
    with pytest.raises(forebay.CheckpointInvalid, match="0.weight: a parameter that DeepSpeed has partitioned"):
        strategy.save_checkpoint({"global_step": 1, "state_dict": strategy.model.state_dict()}, tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()
