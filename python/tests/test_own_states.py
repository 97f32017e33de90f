"""Objects that give and take their state by methods of their own, beside tensors that ranks hold together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as api
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import forebay

from .test_ranks import run_ranks

WIDTH = 256


def spread(seed: int) -> Any:
    """A module of which every rank has a part."""
    torch.manual_seed(seed)
    module = torch.nn.Linear(WIDTH, WIDTH)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


class Average:
    """Averages of a module's parameters; `how` is what it keeps them in, and how it takes them back."""

    def __init__(self, module: Any, how: str = "dict") -> None:
        shadow = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        self.how = how
        self.shadow: Any = list(shadow.values()) if how == "list" else shadow
        self.decay = 0.5

    def tensors(self) -> list[Any]:
        return list(self.shadow.values() if isinstance(self.shadow, dict) else self.shadow)

    def add(self, value: float) -> None:
        for tensor in self.tensors():
            tensor.add_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decay = state["decay"]
        if self.how == "replaces":
            self.shadow = state["shadow"]
            return
        found = state["shadow"].values() if isinstance(state["shadow"], dict) else state["shadow"]
        for tensor, value in zip(self.tensors(), found, strict=True):
            # What it is given must be no memory of its own.
            tensor.zero_()
            tensor.add_(value)


class LateAverage(Average):
    """One that has nothing before its first update."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.shadow = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decay, self.shadow = state["decay"], state["shadow"]


def part(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(average: Average) -> list[Any]:
    """This rank's part of each tensor; all of what is no part of one."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else None for tensor in average.tensors()]


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(left is not None and right is not None and torch.equal(left, right) for left, right in pairs)


def saved_state(how: str = "dict") -> dict[str, Any]:
    module = spread(1)
    average = Average(module, how)
    average.add(2.0)
    return {"model": module, "average": average}


@pytest.mark.parametrize("how", ["dict", "list", "replaces"])
def test_parts_of_what_an_object_holds_come_back_as_parts(tmp_path: Path, how: str) -> None:
    """Every rank got all of every such tensor, as plain ones in its own memory."""

    def work(rank: int) -> Any:
        state = saved_state(how)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, state)
        target = {"model": (module := spread(2)), "average": Average(module, how)}
        target["average"].decay = 0.0
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            assert checkpointer.restore(target) == 1
            assert checkpointer.restored is not None
            size = checkpointer.restored.bytes
        return size, same(locals_of(state["average"]), locals_of(target["average"])), target["average"].decay

    # A half of model and averages.
    expected = 2 * (WIDTH + 1) * WIDTH * 4 // 2
    assert run_ranks(2, work) == [[expected, True, 0.5]] * 2


def test_what_an_object_holds_comes_back_at_other_sizes_and_alone(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(1, saved_state())

    run_ranks(2, save)

    def restore(rank: int) -> Any:
        expected = saved_state()
        target = {"model": (module := spread(2)), "average": Average(module)}
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(target)
        return same(locals_of(expected["average"]), locals_of(target["average"]))

    assert run_ranks(3, restore) == [True] * 3
    # One process that knows nothing of parts has all of it.
    module = torch.nn.Linear(WIDTH, WIDTH)
    state = {"model": module, "average": LateAverage(module)}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state)
    shadow = state["average"].shadow
    assert type(shadow["weight"]) is torch.Tensor and torch.equal(shadow["weight"], module.weight + 2)


def test_averages_that_were_saved_with_the_weights_stay_apart(tmp_path: Path) -> None:
    """One memory while they were saved, as those that only take part in evaluations: two when they are restored."""

    def work(rank: int) -> Any:
        state = {"model": (module := spread(1)), "average": (average := Average(module, "replaces"))}
        average.shadow = dict(module.named_parameters())
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(1, state)
        target = {"model": (other := spread(2)), "average": Average(other, "replaces")}
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(target)
        expected = [parameter.to_local() for parameter in module.parameters()]
        first = same(expected, locals_of(target["average"]))
        with torch.no_grad():
            target["average"].add(1.0)
        return first, same(expected, [parameter.to_local() for parameter in other.parameters()])

    assert run_ranks(2, work) == [[True, True]] * 2


def test_parts_that_an_object_has_no_place_for_are_refused(tmp_path: Path) -> None:
    """All of each tensor, on each rank, is what nobody has memory for."""

    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(1, saved_state())
        module = spread(2)
        before = [parameter.to_local().clone() for parameter in module.parameters()]
        average = LateAverage(module)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            try:
                checkpointer.restore({"model": module, "average": average})
            except forebay.CheckpointMismatch as error:
                told = str(error)
        left = same(before, [parameter.to_local() for parameter in module.parameters()])
        return told, left, average.shadow

    for told, is_left, shadow in run_ranks(2, work):
        assert "state['average']['shadow']['weight']" in told and "hold together" in told
        assert is_left and shadow == {}


def test_what_all_ranks_have_alike_is_given_whole(tmp_path: Path) -> None:
    """A tensor that is saved once for all ranks is no part of one, and needs no place that tells parts."""

    def work(rank: int) -> Any:
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        average = Average(module)
        average.add(3.0)
        with forebay.Checkpointer(tmp_path, replicated=["average.*"]) as checkpointer:
            checkpointer.save_now(1, {"model": module, "average": average})
        target = {"model": module, "average": LateAverage(module)}
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(target)
        return [torch.equal(one, other) for one, other in zip(average.tensors(), target["average"].tensors())]

    assert run_ranks(2, work) == [[True, True]] * 2


class Application:
    """A model and its optimizer as one object, as torch's tutorials have it."""

    def __init__(self, seed: int, is_flat: bool) -> None:
        torch.manual_seed(seed)
        whole = torch.nn.Linear(WIDTH, WIDTH)
        self.module: Any = FullyShardedDataParallel(whole, device_id=torch.device("cpu")) if is_flat else spread(seed)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)

    def train(self) -> None:
        self.module(torch.ones(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = api.get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        api.set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


@pytest.mark.parametrize("is_flat", [False, True], ids=["FSDP2", "FSDP1"])
def test_a_model_and_its_optimizer_as_one_object(tmp_path: Path, is_flat: bool) -> None:
    def work(rank: int) -> Any:
        saved = Application(1, is_flat)
        saved.train()
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, {"app": saved})
        size = (WIDTH + 1) * WIDTH * 4 // 2
        target = Application(2, is_flat)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.restore({"app": target})
            assert checkpointer.restored is not None
            few = checkpointer.restored.bytes - 3 * size
        for application in (saved, target):
            application.train()
        pairs = zip(saved.module.parameters(), target.module.parameters(), strict=True)
        return 0 <= few <= 64, all(torch.equal(part(one), part(other)) for one, other in pairs)

    assert run_ranks(2, work) == [[True, True]] * 2


def test_an_object_that_gives_copies_of_itself(tmp_path: Path) -> None:
    class Giver(Average):
        def state_dict(self) -> dict[str, Any]:
            return copy.deepcopy(super().state_dict())

    def work(rank: int) -> Any:
        module = spread(1)
        saved = Giver(module)
        saved.add(1.0)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(1, {"average": saved})
        target = Giver(spread(2))
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore({"average": target})
        return same(locals_of(saved), locals_of(target))

    assert run_ranks(2, work) == [True] * 2
