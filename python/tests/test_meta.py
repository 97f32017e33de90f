"""Tensors that have a shape and no memory yet: nothing can be restored into them, and they are named before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import forebay

from .test_ranks import run_ranks
from .test_reading import read_bytes

State = dict[str, Any]


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def outline() -> Any:
    """As it is built where it is too large to be made twice."""
    with torch.device("meta"):
        return network(1)


def parts(seed: int, with_model: bool = True) -> State:
    """A state whose optimizer goes by its parameters' names, or by their numbers."""
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    return {"first": torch.full((5,), float(seed)), **({"model": model} if with_model else {}), "optim": optimizer}


def restore(place: Path, state: State, **options: Any) -> None:
    with forebay.Checkpointer(place, rng=False) as checkpointer:
        checkpointer.restore(state, **options)


def refused(named: str, act: Callable[[], Any]) -> None:
    before = read_bytes()
    with pytest.raises(forebay.CheckpointMismatch, match=named + r".* on the meta device .*to_empty\(\)"):
        act()
    # The manifest, and not a tensor.
    assert read_bytes() - before < 65536


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    saved = {**parts(1), "big": torch.zeros(1 << 20)}
    forebay.save(saved, tmp_path, step=3)
    state = {**parts(2), "model": outline(), "big": torch.ones(1 << 20)}
    del state["optim"]
    refused(r"model\.0\.weight", lambda: forebay.load_model(tmp_path, state["model"]))
    refused(r"model\.2\.bias", lambda: forebay.load_model(tmp_path, state["model"], only=["2.bias"]))
    refused(r"state\['model'\]\.0\.weight", lambda: restore(tmp_path, state, only=["first", "big", "model.*"]))
    refused(r"state\['model'\]\.0\.weight", lambda: forebay.load(tmp_path, state | {"optim": saved["optim"]}))
    assert state["first"][0] == 2 and bool((state["big"] == 1).all())
    # A part that has memory may come alone; what is asked for is what counts.
    state["model"][2].to_empty(device="cpu")
    forebay.load_model(tmp_path, state["model"], only=["2.*"])
    assert torch.equal(state["model"][2].weight, saved["model"][2].weight) and state["model"][0].weight.is_meta
    forebay.load_model(tmp_path, state["model"].to_empty(device="cpu"))
    pairs = zip(state["model"].state_dict().values(), saved["model"].state_dict().values())
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_module_that_takes_a_dict_of_other_names_is_refused(tmp_path: Path) -> None:
    def renaming(device: str) -> Any:
        """Takes dicts of names that it had before."""
        with torch.device(device):
            model = torch.nn.Linear(3, 2)

        def rename(_: Any, state: State, *others: Any) -> None:
            for name in [name for name in state if name.startswith("old_")]:
                state[name.removeprefix("old_")] = state.pop(name)

        model.register_load_state_dict_pre_hook(rename)
        return model

    forebay.save({"model": {"old_weight": torch.ones(2, 3), "old_bias": torch.ones(2)}}, tmp_path)
    state = {"model": renaming("cpu")}
    restore(tmp_path, state)
    assert bool((state["model"].weight == 1).all())
    refused(r"state\['model'\]\.weight", lambda: restore(tmp_path, {"model": renaming("meta")}))


def test_tensors_without_memory_anywhere_are_refused(tmp_path: Path) -> None:
    def of(seed: int, device: str) -> State:
        first = torch.full((5,), float(seed))
        return {"first": first, "deep": [{"w": torch.full((2, 3), float(seed), device=device)}], "n": seed}

    forebay.save(of(1, "cpu"), tmp_path)
    state = of(2, "meta")
    where = r"state\['deep'\]\[0\]\['w'\]"
    for act in (lambda: restore(tmp_path, state), lambda: restore(tmp_path, state, only=["deep.*"])):
        refused(where, act)
    refused(where, lambda: forebay.load(tmp_path, state))
    assert state["first"][0] == 2 and state["n"] == 2
    restore(tmp_path, state, only=["first", "n"])
    assert state["first"][0] == 1 and state["n"] == 1


@pytest.mark.parametrize("with_model", [True, False], ids=["by names", "by numbers"])
def test_optimizers_of_parameters_without_memory_are_refused(tmp_path: Path, with_model: bool) -> None:
    forebay.save(parts(1, with_model), tmp_path)
    model = outline()
    for steps in (0, 1):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        if steps:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        state = {"first": torch.full((5,), 2.0), "optim": optimizer, **({"model": model} if with_model else {})}
        refused(r"state\['optim'\].*(0\.weight|0)", lambda: restore(tmp_path, state, only=["first", "optim.*"]))
        assert state["first"][0] == 2 and optimizer.param_groups[0]["lr"] == 0.5


def test_sharded_tensors_without_memory_are_refused_by_all_ranks(tmp_path: Path) -> None:
    def spread(device: str) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if device == "cpu":
            return distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        return DTensor.from_local(torch.empty(4, device="meta"), mesh, [Shard(0)])

    def work(rank: int) -> Any:
        model = network(1)
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh)
        saved = {"model": model, "spread": spread("cpu"), "first": torch.ones(5)}
        told = []
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, saved)
            checkpointer.wait()
            empty = outline()
            fully_shard(empty, mesh=mesh)
            first = torch.zeros(5)
            for act in (
                lambda: checkpointer.restore({"model": empty, "spread": spread("cpu"), "first": first}),
                lambda: checkpointer.restore({"model": model, "spread": spread("meta"), "first": first}),
                lambda: checkpointer.load_model(empty),
                lambda: checkpointer.load_model(empty, only=["0.weight"]),
            ):
                with pytest.raises(forebay.CheckpointError, match="on the meta device") as raised:
                    act()
                told.append(str(raised.value))
            assert not first.any()
            empty.to_empty(device="cpu")
            checkpointer.load_model(empty)
        same = all(torch.equal(one.full_tensor(), two.full_tensor()) for one, two in zip(empty.parameters(), model.parameters()))
        return same and len(told) == 4

    assert run_ranks(2, work) == [True, True]


def test_buffers_that_no_state_has_are_named(tmp_path: Path) -> None:
    """`to_empty()` leaves anything in them, and a restore cannot know."""

    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4))
            self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
            self.register_buffer("nothing", None, persistent=False)

    def made() -> Any:
        return torch.nn.ModuleDict({"a": Rotary(), "b": Rotary()})

    forebay.save({"model": made()}, tmp_path)
    with torch.device("meta"):
        model = made()
    words = r"hint: to_empty\(\) first, and set a.inv_freq, b.inv_freq anew, which no state_dict has\)$"
    with pytest.raises(forebay.CheckpointMismatch, match=words):
        forebay.load_model(tmp_path, model)
