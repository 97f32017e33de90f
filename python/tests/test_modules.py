"""Modules whose state is more than their own tensors: extra state, copies, and loading by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import forebay

from .test_ranks import run_ranks


class Extra(torch.nn.Linear):
    """Tells a number that is no buffer of its own, as a tensor; `wide` of its own length, as pickles in tensors are."""

    def __init__(self, number: int, wide: bool) -> None:
        super().__init__(3, 3)
        self.number, self.wide = number, wide

    def get_extra_state(self) -> Any:
        return torch.tensor([self.number] * (self.number if self.wide else 1))

    def set_extra_state(self, state: Any) -> None:
        self.number = int(state[0])


@pytest.mark.parametrize("wide", [False, True])
def test_extra_state_that_is_a_tensor_is_given_back(tmp_path: Path, wide: bool) -> None:
    saved = torch.nn.Sequential(Extra(3, wide), torch.nn.Linear(3, 2))
    forebay.save({"model": saved}, tmp_path)
    for load in (lambda model: forebay.load(tmp_path, {"model": model}), lambda model: forebay.load_model(tmp_path, model)):
        found: Any = torch.nn.Sequential(Extra(5, wide), torch.nn.Linear(3, 2))
        places = [parameter.data_ptr() for parameter in found.parameters()]
        load(found)
        assert found[0].number == 3 and torch.equal(found[1].weight, saved[1].weight)
        assert torch.equal(found[0].weight, saved[0].weight)
        assert places == [parameter.data_ptr() for parameter in found.parameters()]


@pytest.mark.parametrize("lists", [False, True])
def test_states_of_metrics_are_given_back(tmp_path: Path, lists: bool) -> None:
    """torchmetrics tells copies, and takes its states by itself."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="TORCHMETRICS is not installed")

    def model(*values: float) -> Any:
        mean = torchmetrics.MeanMetric()
        seen = torchmetrics.CatMetric() if lists else torchmetrics.SumMetric()
        for metric in (mean, seen):
            metric.persistent(True)
            for value in values:
                metric.update(value)
        return torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2), "mean": mean, "seen": seen})

    saved, found = model(1.0, 4.0), model(7.0, 9.0)
    forebay.save({"model": saved}, tmp_path)
    forebay.load(tmp_path, {"model": found})
    assert found["mean"].compute() == 2.5
    assert found["seen"].compute().tolist() == ([1.0, 4.0] if lists else 5.0)
    assert torch.equal(found["net"].weight, saved["net"].weight)
    for one in (saved, found):
        one["mean"].update(10.0)
    assert found["mean"].compute() == saved["mean"].compute() == 5.0
    with pytest.raises(forebay.CheckpointMismatch, match=r"mean.mean_value: .* whole module only"):
        forebay.load_model(tmp_path, model(7.0), only=["mean.*"])


class Loading(torch.nn.Linear):
    """Loads by itself: what was saved comes in another order."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.loads = 0

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        self.loads += 1
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *others)


def test_modules_that_load_by_themselves_do(tmp_path: Path) -> None:
    """What they make of what was saved, which is not in their memory meanwhile, is what they have."""

    def swap(module: Any, state: Any, prefix: str, *_: Any) -> None:
        one, other = f"{prefix}a", f"{prefix}b"
        state[one], state[other] = state[other], state[one]

    class Swapping(torch.nn.Module):
        def __init__(self, first: float) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.full((4,), first + number)) for number in range(2))
            self.register_load_state_dict_pre_hook(swap)

    saved, found = ({"x": Loading(), "y": Swapping(first), "z": torch.nn.Linear(2, 2)} for first in (1.0, 5.0))
    told = []
    found["z"].register_load_state_dict_post_hook(lambda module, keys: told.append(module.weight.tolist()))
    forebay.save({"model": torch.nn.ModuleDict(saved)}, tmp_path)
    forebay.load(tmp_path, {"model": torch.nn.ModuleDict(found)})
    assert found["x"].loads == 1 and torch.equal(found["x"].weight, saved["x"].weight.t())
    assert found["y"].a.tolist() == [2.0] * 4 and found["y"].b.tolist() == [1.0] * 4
    assert told == [saved["z"].weight.tolist()]


def test_what_a_module_tells_and_does_not_take_is_refused(tmp_path: Path) -> None:
    """But for what is in its own memory, and is read there."""

    class Telling(torch.nn.Module):
        def __init__(self, value: float, copies: bool) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.value, self.copies = torch.full((3,), value), copies

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}value"] = self.value.clone() if self.copies else self.value

    for copies in (False, True):
        forebay.save({"model": Telling(1.0, copies)}, tmp_path)
        found = Telling(2.0, copies)
        if copies:
            with pytest.raises(forebay.CheckpointMismatch, match=r"state\['model'\]: .* 'value'"):
                forebay.load(tmp_path, {"model": found})
        else:
            forebay.load(tmp_path, {"model": found})
            assert found.value.tolist() == [1.0] * 3


class Parts(torch.nn.ModuleDict):
    """What sharding asks of a module."""

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_give_modules_what_they_take_by_themselves(tmp_path: Path, kind: str) -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="TORCHMETRICS is not installed")

    def made(number: int) -> Any:
        torch.manual_seed(number)
        mean = torchmetrics.MeanMetric(sync_on_compute=False)
        mean.persistent(True)
        mean.update(float(number))
        model: Any = Parts({"extra": Extra(number, True), "loads": Loading(), "mean": mean})
        if kind == "ddp":
            return DistributedDataParallel(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model

    def values(model: Any) -> Any:
        inner = model.module if kind == "ddp" else model
        whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in inner.parameters()]
        return [value.tolist() for value in whole], inner["extra"].number, inner["mean"].compute().item()

    def work(rank: int) -> Any:
        saved, found = made(3), made(4)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, {"model": saved})
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            assert checkpointer.restore({"model": found}) == 1
        expected, has = values(saved), values(found)
        turned = torch.tensor(expected[0][2]).t().tolist()
        return expected[0][:2] == has[0][:2], has[0][2] == turned, has[0][3] == expected[0][3], has[1:]

    assert run_ranks(2, work) == [[True, True, True, [3, 3.0]]] * 2
