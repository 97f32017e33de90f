"""What was saved in one element type and is restored into another: modules' tensors are converted, whole and sharded ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forebay

from .test_ranks import run_ranks
from .test_restore_memory import IN_FLIGHT, MIB, SLACK, memory

State = dict[str, Any]
WIDTH = 256


class Network(torch.nn.ModuleDict):
    """What sharding asks of a module."""

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError


def network(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """Rows that no two or three ranks share evenly, and tied weights."""
    torch.manual_seed(seed)
    linear = torch.nn.Linear
    model = Network({"a": linear(WIDTH, 401), "b": linear(401, 3), "c": linear(401, 3)})
    model["c"].weight = model["b"].weight
    return model.to(dtype)


def sharded(seed: int, dtype: torch.dtype) -> Any:
    model = network(seed, dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def stepped(model: Any) -> State:
    """With an optimizer that took a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        torch.manual_seed(number)
        gradient = torch.randn(parameter.shape).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    optimizer.step()
    return {"model": model, "optim": optimizer}


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach()


def like(model: Any, expected: Any) -> bool:
    """Whether a model has what another one has, in its own type."""
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    return all(torch.equal(whole(one), two.to(one.dtype)) for one, two in pairs)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sharded_module_of_another_type(tmp_path: Path, ranks: int) -> None:
    saved = network(1)
    forebay.save({"model": saved}, tmp_path / "whole", step=1)
    own = sum(parameter.nbytes for parameter in saved.parameters())

    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path / "spread", rng=False) as checkpointer:
            checkpointer.save_now(1, {"model": sharded(1, torch.float32)})
        right = []
        for name, dtype in ("whole", torch.bfloat16), ("whole", torch.float64), ("spread", torch.bfloat16):
            model, part = sharded(2, dtype), sharded(2, dtype)
            places = [parameter._local_tensor.data_ptr() for parameter in model.parameters()]
            with forebay.Checkpointer(tmp_path / name, rng=False) as checkpointer:
                assert checkpointer.load_model(model) == 1
                assert checkpointer.restored is not None
                # Of the largest, each reads its rows.
                most = 1.1 * math.ceil(401 / ranks) * WIDTH * 4 + 3 * 401 * 8 + 65536
                assert checkpointer.restored.bytes <= min(most, own), (checkpointer.restored.bytes, most)
                checkpointer.load_model(part, only=["a.weight"])
            right.append(like(model, saved) and torch.equal(whole(part["a"].weight), saved["a"].weight.to(dtype)))
            right.append(places == [parameter._local_tensor.data_ptr() for parameter in model.parameters()])
            right.append(torch.equal(whole(part["b"].weight), network(2, dtype)["b"].weight))
        return right

    assert run_ranks(ranks, work) == [[True] * 9] * ranks


def test_an_optimizer_of_sharded_parameters_of_another_type(tmp_path: Path) -> None:
    saved = stepped(network(1))
    forebay.save(saved, tmp_path, step=1)

    def work(rank: int) -> Any:
        model = sharded(2, torch.bfloat16)
        states = [stepped(model), {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.5)}]
        right = []
        for state in states:
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                assert checkpointer.restore(state) == 1
            right.append(like(state["model"], saved["model"]) and state["optim"].param_groups[0]["lr"] == 0.1)
            for mine, theirs in zip(model.parameters(), saved["model"].parameters()):
                one, two = state["optim"].state[mine]["exp_avg"], saved["optim"].state[theirs]["exp_avg"]
                right.append(isinstance(one, DTensor) and torch.equal(whole(one), two.to(torch.bfloat16)))
            stepped(model)
            state["optim"].step()
        return all(right)

    assert run_ranks(2, work) == [True, True]


def test_what_is_converted_in_one_place_is_exact_in_another(tmp_path: Path) -> None:
    saved = network(1)
    forebay.save({"copy": saved["a"].weight, "model": saved, "last": saved["b"].weight.detach()}, tmp_path, step=1)
    state = {"copy": torch.zeros(401, WIDTH), "model": network(2, torch.bfloat16), "last": torch.zeros(3, 401)}
    forebay.load(tmp_path, state)
    assert torch.equal(state["copy"], saved["a"].weight) and torch.equal(state["last"], saved["b"].weight)
    assert like(state["model"], saved) and state["model"]["b"].weight is state["model"]["c"].weight


def test_modules_that_make_something_else_of_numbers_are_given_them(tmp_path: Path) -> None:
    class Coarse(torch.nn.Module):
        """Has integers, and makes them of what it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(4, dtype=torch.int8))

        def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
            self.weight.copy_((state[f"{prefix}weight"] * 100).round())

    forebay.save({"model": torch.nn.ParameterDict({"weight": torch.tensor([0.5, -0.25, 0.125, 1.0])})}, tmp_path)
    model = Coarse()
    forebay.load_model(tmp_path, model)
    assert model.weight.tolist() == [50, -25, 12, 100]


def test_what_cannot_be_converted_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    forebay.save(
        {
            "complex": torch.nn.ParameterDict({"a": torch.ones(4), "w": torch.ones(4, dtype=torch.complex64)}),
            "view": torch.nn.ParameterDict({"a": torch.ones(4), "base": base, "w": base[4:8]}),
        },
        tmp_path,
    )

    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        told = []
        for name, others in ("complex", ()), ("view", ("base",)):
            parts = {"a": torch.zeros(4), "w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
            model = torch.nn.ParameterDict({**parts, **{other: torch.zeros(12) for other in others}})
            for only in (None, ["w", "a"]):
                with pytest.raises(forebay.CheckpointMismatch, match=r"model\.w: a DTensor that was saved") as raised:
                    forebay.load_model(tmp_path, model, name=name, only=only)
                told.append(str(raised.value))
            assert not any(whole(value).any() for value in model.values())
        return len(told)

    assert run_ranks(2, work) == [4, 4]


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_of_another_type(tmp_path: Path) -> None:
    saved = torch.nn.Linear(5, 7)
    forebay.save({"model": saved}, tmp_path, step=1)

    def work(rank: int) -> Any:
        model = FullyShardedDataParallel(torch.nn.Linear(5, 7).to(torch.bfloat16), device_id=torch.device("cpu"))
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.load_model(model)
        with FullyShardedDataParallel.summon_full_params(model):
            return torch.equal(model.weight, saved.weight.bfloat16()) and torch.equal(model.bias, saved.bias.bfloat16())

    assert run_ranks(2, work) == [True, True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_conversion_takes_one_buffer(tmp_path: Path, ranks: int) -> None:
    """However large the module: what is read is never there as a whole."""
    size = 160 * MIB
    forebay.save({"model": torch.nn.ParameterDict({"w": torch.full((size // 4096, 1024), 3.0)})}, tmp_path / "run", step=1)
    forebay.save({"model": torch.nn.ParameterDict({"w": torch.ones(8, 1024)})}, tmp_path / "small", step=1)

    def work(rank: int) -> int:
        def model(rows: int) -> Any:
            value: Any = torch.full((rows, 1024), 7.0, dtype=torch.bfloat16)
            if ranks > 1:
                value = distribute_tensor(value, init_device_mesh("cpu", (ranks,)), [Shard(0)])
            return torch.nn.ParameterDict({"w": value})

        live = model(size // 4096)
        # What the first call of anything takes is not the restore's.
        forebay.load_model(tmp_path / "small", model(8))
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmHWM")
        forebay.load_model(tmp_path / "run", live)
        taken = memory("VmHWM") - before
        assert bool((getattr(live["w"], "_local_tensor", live["w"]) == 3).all())
        return taken

    for taken in run_ranks(ranks, work):
        assert taken <= IN_FLIGHT + 32 * MIB + SLACK, taken


def test_replicated_parts_of_another_type(tmp_path: Path) -> None:
    """Ranks that want the same convert it each."""
    saved = torch.nn.ParameterDict({"w": torch.randn(2048, 1024)})
    forebay.save({"model": saved}, tmp_path, step=1)

    def work(rank: int) -> Any:
        spread = distribute_tensor(torch.zeros(2048, 1024).half(), init_device_mesh("cpu", (2,)), [Replicate()])
        model = torch.nn.ParameterDict({"w": spread})
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.load_model(model)
        return torch.equal(whole(model["w"]), saved["w"].half())

    assert run_ranks(2, work) == [True, True]
