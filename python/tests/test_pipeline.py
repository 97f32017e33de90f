"""Stages of pipelines, saved by some ranks and restored by others that have other parts of the model: by names."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import forebay
from forebay import _loading, _native
from forebay._merge import asked, left_by_all, merged, refuse_mark, shown
from forebay.convert import to_dcp, to_hugging_face

from .conftest import SCALE
from .test_ranks import run_ranks

LAYERS, WIDTH, STEPS = 4, 64, 3
WAYS = (
    lambda: ColwiseParallel(output_layouts=Replicate()),
    lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
)


class Net(torch.nn.Module):
    """The layers of a stage, under the names that they have in the whole model. Each learns by itself, so that what it
    learns does not depend on where the others are."""

    def __init__(self, first: int = 0, end: int = LAYERS) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict()
        for index in range(first, end):
            torch.manual_seed(index)
            self.layers[str(index)] = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return sum(layer(batch).square().mean() for layer in self.layers.values())


def part(mesh: str, rate: float = 0.5) -> dict[str, Any]:
    """What this rank has of a model with its optimizer: on so many stages, by parts of each (FSDP2), by parts of those
    (tensor parallel: columns of one layer, rows of the next)."""
    shape = tuple(map(int, mesh.split("x")))
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    count, stage = shape[0], rank // (size // shape[0])
    net = Net(stage * LAYERS // count, (stage + 1) * LAYERS // count)
    if len(shape) > 1:
        parts = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "shard", "tensor")[: len(shape)])
        if len(shape) > 2:
            for name, layer in net.layers.items():
                parallelize_module(layer, parts["tensor"], WAYS[int(name) % 2]())
        for layer in net.layers.values():
            fully_shard(layer, mesh=parts["shard"])
        fully_shard(net, mesh=parts["shard"])
    return {"model": net, "optim": optimizer_of(net, rate), "epoch": 0}


def optimizer_of(net: Net, rate: float = 0.5) -> torch.optim.AdamW:
    groups = [
        {"params": [value for name, value in net.named_parameters() if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [value for name, value in net.named_parameters() if name.endswith("bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate)


def trained(mesh: str) -> dict[str, Any]:
    state = part(mesh, rate=0.01)
    torch.manual_seed(99)
    batch = torch.randn(4, WIDTH)
    for _ in range(STEPS):
        state["model"](batch).backward()
        state["optim"].step()
        state["optim"].zero_grad()
    return {**state, "epoch": 7}


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights, and all that the optimizer knows of each."""
    found = dict(state["model"].state_dict())
    for group in state["optim"].param_groups:
        names = {id(value): name for name, value in state["model"].named_parameters()}
        for parameter in group["params"]:
            name = names[id(parameter)]
            found[f"{name}.rate"] = torch.tensor([group["lr"], group["weight_decay"]])
            of_it = state["optim"].state.get(parameter, {})
            found.update({f"{name}.{key}": torch.as_tensor(value) for key, value in of_it.items()})
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def save_at(mesh: str, place: Path, **more: Any) -> None:
    def save(rank: int) -> Any:
        state = trained(mesh)
        own = {name: value(rank) for name, value in more.items()}
        with forebay.Checkpointer(place, rng=False) as checkpointer:
            checkpointer.save_now(5, {**state, **own})
        return None

    run_ranks(ranks_of(mesh), save)


def ranks_of(mesh: str) -> int:
    return math.prod(map(int, mesh.split("x")))


class Place:
    """An object with a state of its own, such as a loader's place in the data."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


PAIRS = [("2", "1"), ("2", "4"), ("2", "2x2"), ("4", "2x2"), ("1", "2"), ("2x2", "1")]
ALL = ["1", "2", "4", "1x2", "2x2"]


@pytest.mark.parametrize("saved, live", [(one, two) for one in ALL for two in ALL] if SCALE > 1 else PAIRS)
def test_stages_with_their_optimizers_are_restored_on_any_mesh(tmp_path: Path, saved: str, live: str) -> None:
    def restore(rank: int) -> Any:
        expected, state, fresh = values(trained("1")), part(live), part(live)["model"]
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            assert checkpointer.restore(state) == 5 and state["epoch"] == 7
            read = checkpointer.restored.bytes if checkpointer.restored is not None else 0
            assert checkpointer.load_model(fresh, name="model") == 5
        found = values(state)
        mine = {name for name in expected if name == "scale" or name.split(".")[1] in state["model"].layers}
        assert found.keys() == mine
        assert [name for name in mine if not torch.equal(found[name], expected[name])] == []
        weights = values({"model": fresh, "optim": torch.optim.AdamW(fresh.parameters())})
        assert [name for name in fresh.state_dict() if not torch.equal(weights[name], expected[name])] == []
        return read

    save_at(saved, tmp_path)
    read = sum(run_ranks(ranks_of(live), restore))
    expected = trained("1")
    # Weights and both moments; a buffer on each rank and counters of steps beside.
    needed = 3 * sum(value.nbytes for value in expected["model"].parameters())
    assert needed <= read <= 1.02 * needed
    loaded = forebay.load(tmp_path)
    assert loaded["model"].keys() == expected["model"].state_dict().keys()
    for name, value in expected["model"].named_parameters():
        assert torch.equal(loaded["model"][name], value)
        assert torch.equal(loaded["optim"]["state"][name]["exp_avg"], expected["optim"].state[value]["exp_avg"])


THREE = [("2x2x2", "1"), ("2x2x2", "1x2x2"), ("2x2", "2x2x2"), ("1", "2x2x2")]
ALL_OF_THREE = ["1", "4", "2x2", "1x2x2", "2x2x2"]
CUBE = "2x2x2"


@pytest.mark.parametrize(
    "saved, live",
    [(one, two) for one in ALL_OF_THREE for two in ALL_OF_THREE if CUBE in (one, two)] if SCALE > 1 else THREE,
)
def test_stages_of_parts_of_parts_are_restored_on_any_mesh(tmp_path: Path, saved: str, live: str) -> None:
    """Pipeline stages beneath FSDP2 beneath tensor parallelism: three dimensions, and none."""
    place, sizes = tmp_path / "run", ranks_of(saved)

    def save(rank: int) -> Any:
        state = trained(saved)
        with forebay.Checkpointer(place, rng=False) as checkpointer:
            checkpointer.save_now(5, state)
        torch.save(values(state), tmp_path / f"expected-{rank}")

    def restore(rank: int) -> Any:
        expected: dict[str, torch.Tensor] = {}
        for other in range(sizes):
            expected |= torch.load(tmp_path / f"expected-{other}")
        state = part(live)
        with forebay.Checkpointer(place, rng=False) as checkpointer:
            assert checkpointer.restore(state) == 5 and state["epoch"] == 7
            read = checkpointer.restored.bytes if checkpointer.restored is not None else 0
        found = values(state)
        assert found.keys() == {
            name for name in expected if name == "scale" or name.split(".")[1] in state["model"].layers
        }
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        # And it goes on.
        state["model"](torch.randn(4, WIDTH)).backward()
        state["optim"].step()
        return read

    run_ranks(sizes, save)
    assert _native.verify(f"file://{place}", None) == []
    stored = sum(path.stat().st_size for path in place.glob("shards/*/*/*"))
    needed = 3 * sum(value.nbytes for value in part("1")["model"].parameters())
    assert needed <= stored <= needed + 16384 * sizes, "each element is stored once"
    read = sum(run_ranks(ranks_of(live), restore))
    assert needed <= read <= 1.02 * needed


@pytest.mark.parametrize("saved, live", [("2", "1"), ("2", "4"), ("2", "2")])
def test_stages_that_a_checkpointer_saved_are_read_by_dcp(tmp_path: Path, saved: str, live: str) -> None:
    save_at(saved, tmp_path, own=lambda rank: torch.full((2,), float(rank)))

    def restore(rank: int) -> Any:
        expected, state = values(trained("1")), part(live)
        tensors = {
            "model": get_model_state_dict(state["model"]),
            "optim": get_optimizer_state_dict(state["model"], state["optim"]),
            "epoch": 0,
        }
        if live == saved:
            tensors["own"] = torch.full((2,), -1.0)
            dcp.load(tensors, storage_reader=forebay.dcp.Reader(tmp_path))
            assert tensors["own"].tolist() == [float(rank)] * 2
        else:
            with pytest.warns(forebay.CheckpointWarning, match=r"ranks differ in state\['own'\]"):
                dcp.load(tensors, storage_reader=forebay.dcp.Reader(tmp_path))
        set_model_state_dict(state["model"], tensors["model"])
        set_optimizer_state_dict(state["model"], state["optim"], tensors["optim"])
        found = values(state)
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        return tensors["epoch"]

    assert run_ranks(ranks_of(live), restore) == [7] * ranks_of(live)


def test_what_has_no_one_value_is_refused_by_name_and_the_rest_can_be_taken(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path / "place", rng=False) as checkpointer:
            checkpointer.save_now(5, {**trained("2"), "loader": Place(10 + rank)})
        state = trained("2")
        with forebay.Checkpointer(tmp_path / "numbers", rng=False) as checkpointer:
            # Without its module, and as a dict: by numbers that are 0 to 3 on both ranks.
            checkpointer.save_now(5, {"model": state["model"].state_dict(), "optim": state["optim"].state_dict()})
        return None

    def restore(rank: int) -> Any:
        state = {**part("4"), "loader": Place(0)}
        before = {name: value.clone() for name, value in values(state).items()}
        with forebay.Checkpointer(tmp_path / "place", rng=False) as checkpointer:
            words = r"state\['loader'\]: what ranks 0 and 1 saved differs.*only="
            with pytest.raises(forebay.CheckpointMismatch, match=words):
                checkpointer.restore(state)
            after = values(state)
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert state["epoch"] == 0 and state["loader"].at == 0
            assert checkpointer.restore(state, only=["model.*", "optim", "epoch"]) == 5
        expected = values(trained("1"))
        assert all(torch.equal(value, expected[name]) for name, value in values(state).items())
        live = part("4")
        tensors = {"model": live["model"].state_dict(), "optim": trained("4")["optim"].state_dict()}
        with forebay.Checkpointer(tmp_path / "numbers", rng=False) as checkpointer:
            words = r"state\['optim'\]\['state'\]: what ranks 0 and 1 saved differs.*beside its module"
            with pytest.raises(forebay.CheckpointMismatch, match=words):
                checkpointer.restore(tensors)
            # Where it fits one rank's by chance, too.
            net = Net(0, 2)
            optimizer = optimizer_of(net)
            net(torch.zeros(4, WIDTH)).backward()
            optimizer.step()
            with pytest.raises(forebay.CheckpointMismatch, match=words):
                checkpointer.restore({"optim": optimizer.state_dict()}, only=["optim*"])
            # One layer, which one of the stages has; the others have nothing of that name.
            assert checkpointer.restore(tensors, only=["model.layers.3.*"]) == 5
        name = f"layers.{rank}.weight"
        taken = torch.equal(live["model"].state_dict()[name], expected[name])
        return [state["loader"].at, taken]

    run_ranks(2, save)
    assert run_ranks(4, restore) == [[0, False], [0, False], [0, False], [0, True]]
    # Who saved has a place of its own.
    def again(rank: int) -> Any:
        state = {**part("2"), "loader": Place(0)}
        with forebay.Checkpointer(tmp_path / "place", rng=False) as checkpointer:
            assert checkpointer.restore(state) == 5
        return state["loader"].at

    assert run_ranks(2, again) == [10, 11]
    with pytest.warns(forebay.CheckpointWarning, match=r"ranks differ in state\['loader'\], of which rank 0's is"):
        assert forebay.load(tmp_path / "place")["loader"] == {"at": 10}


def test_numbered_parameters_that_all_ranks_have_alike_come_back_to_any_ranks(tmp_path: Path) -> None:
    """As in data parallel jobs, whose loaders have places of their own."""

    def state(rank: int, is_trained: bool) -> dict[str, Any]:
        net = Net()
        optimizer = optimizer_of(net, 0.01)
        if is_trained:
            net(torch.ones(4, WIDTH)).backward()
            optimizer.step()
        # Without its module beside it, an optimizer goes by numbers.
        return {"model": net.state_dict(), "optim": optimizer, "loader": Place(10 + rank), "seen": {0: 20 + rank}}

    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(5, state(rank, is_trained=True))
        return None

    def restore(rank: int) -> Any:
        live, expected = state(-10, is_trained=False), state(0, is_trained=True)
        # What each had for itself is told once for the job.
        fact = r"differ in state\['loader'\], state\['seen'\]"
        told = pytest.warns(forebay.CheckpointWarning, match=fact) if rank == 0 else contextlib.nullcontext()
        with told, forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            assert checkpointer.restore(live) == 5
        known, wanted = (one["optim"].state_dict()["state"] for one in (live, expected))
        assert all(torch.equal(known[number]["exp_avg"], wanted[number]["exp_avg"]) for number in wanted)
        return [live["loader"].at, live["seen"]]

    run_ranks(2, save)
    # json has no other keys than text.
    assert run_ranks(4, restore) == [[10 + rank % 2, {"0": 20 + rank % 2}] for rank in range(4)]
    assert run_ranks(1, restore) == [[10, {"0": 20}]]


def test_dcp_takes_no_numbered_parameters_that_ranks_mean_otherwise(tmp_path: Path) -> None:
    def numbers(net: Net) -> Any:
        optimizer = optimizer_of(net, 0.01)
        net(torch.ones(4, WIDTH)).backward()
        optimizer.step()
        return {"optim": optimizer.state_dict(), "n": 1}

    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(5, numbers(Net(2 * rank, 2 * rank + 2)))
        return None

    run_ranks(2, save)
    live = numbers(Net(0, 2))
    with pytest.raises(CheckpointException, match=r"state\['optim'\]\['state'\] goes by numbers"):
        dcp.load(live, storage_reader=forebay.dcp.Reader(tmp_path), no_dist=True)
    rest = {"n": 0}
    dcp.load(rest, storage_reader=forebay.dcp.Reader(tmp_path), no_dist=True)
    assert rest == {"n": 1}


def test_what_no_rank_asks_for_and_what_none_saved_are_refused(tmp_path: Path) -> None:
    save_at("4", tmp_path)

    def restore(rank: int) -> Any:
        words = []
        for first, end in ((rank, rank + 1), (rank + 2, rank + 4)):
            state = {"model": Net(first, end), "epoch": 0}
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                with pytest.raises(forebay.CheckpointMismatch) as caught:
                    checkpointer.restore(state)
            assert state["epoch"] == 0
            words.append(str(caught.value))
        return words

    for lacks, unknown in run_ranks(2, restore):
        assert lacks.partition(" (hint: strict=False")[0] == (
            "the state lacks what was saved, on every rank: "
            "state['model']['layers.2.bias'], state['model']['layers.2.weight'], "
            "state['model']['layers.3.bias'], state['model']['layers.3.weight'], state['optim']"
        )
        assert "the checkpoint lacks 'layers.4.bias', 'layers.4.weight'" in unknown


def test_what_ranks_leave_at_different_depths_is_seen() -> None:
    first, second = [("state", "model"), ("state", "loader", "at")], [("state", "model", "a"), ("state", "model", "b")]
    assert list(map(shown, left_by_all([first, second]))) == ["state['model']['a']", "state['model']['b']"]
    assert left_by_all([second, first]) == left_by_all([first, second])
    assert left_by_all([first, second, []]) == []
    assert list(map(shown, left_by_all([first]))) == ["state['loader']['at']", "state['model']"]


@pytest.mark.parametrize("has_model", [True, False])
def test_a_part_that_one_rank_has_none_of_and_another_too_little_is_refused(tmp_path: Path, has_model: bool) -> None:
    save_at("2", tmp_path)

    def restore(rank: int) -> Any:
        ends = LAYERS if has_model else 3
        state: dict[str, Any] = {"epoch": 0} if rank == 0 else {"model": Net(0, ends), "epoch": 0}
        try:
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                checkpointer.restore(state)
        except forebay.CheckpointMismatch as error:
            return str(error).partition(" (hint: strict=False")[0]
        return None

    found = run_ranks(2, restore)
    model = "" if has_model else "state['model']['layers.3.bias'], state['model']['layers.3.weight'], "
    assert found == [f"the state lacks what was saved, on every rank: {model}state['optim']"] * 2


def test_what_is_not_asked_for_is_not_even_made(tmp_path: Path) -> None:
    """A fresh optimizer has no state; torch's way to ask for it makes one."""
    save_at("2", tmp_path)

    def restore(rank: int) -> Any:
        state = part("4")
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            assert checkpointer.restore(state, only=["model.*", "epoch"]) == 5
        expected = values(trained("1"))
        weights = state["model"].state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())
        return [state["epoch"], len(state["optim"].state)]

    assert run_ranks(4, restore) == [[7, 0]] * 4


@pytest.mark.parametrize("have_stages", [True, False])
def test_an_export_tells_what_ranks_have_otherwise(tmp_path: Path, have_stages: bool) -> None:
    """Stages, or, under the same names, tensor parallelism by hand: there half of each tensor was written without a word."""

    def save(rank: int) -> Any:
        own = {"alike": torch.ones(3), "own": torch.full((3,), float(rank))}
        if have_stages:
            own[f"stage.{rank}"] = torch.full((2,), 5.0)
        with forebay.Checkpointer(tmp_path / "run", rng=False) as checkpointer:
            checkpointer.save_now(1, {"model": own})
        return None

    run_ranks(2, save)
    (tmp_path / "hf").mkdir()
    with pytest.warns(forebay.CheckpointWarning, match="step 1: ranks differ in own, of which the lowest rank's is"):
        to_hugging_face(str(tmp_path / "run"), tmp_path / "hf")
    found = {name: value.tolist() for name, value in load_file(tmp_path / "hf" / "model.safetensors").items()}
    stages = {"stage.0": [5.0] * 2, "stage.1": [5.0] * 2} if have_stages else {}
    assert found == {"alike": [1.0] * 3, "own": [0.0] * 3, **stages}
    with pytest.warns(forebay.CheckpointWarning, match=r"step 1: ranks differ in state\['model'\]\['own'\], of which rank 0's is given"):
        to_dcp(str(tmp_path / "run"), tmp_path / "dcp")


def test_stages_of_torchs_pipelining(tmp_path: Path) -> None:
    """Made by `pipeline`, trained by a schedule, and restored into the model that they were made of."""

    def save(rank: int) -> Any:
        from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

        torch.manual_seed(1)
        net, batch = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))), torch.randn(4, 8)
        pipe = pipeline(net, (batch[:2],), split_spec={"2": SplitPoint.BEGINNING})
        stage = pipe.build_stage(rank, torch.device("cpu"))
        optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=0.1)
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda found, wanted: (found - wanted).square().mean())
        schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == 1 else {}))
        optimizer.step()
        with forebay.Checkpointer(tmp_path) as checkpointer:
            by_names = get_optimizer_state_dict(stage.submod, optimizer)
            checkpointer.save_now(1, {"model": stage.submod, "optim": optimizer, "named": by_names})
        return {
            name: [value.tolist(), optimizer.state[value]["exp_avg"].tolist()]
            for name, value in stage.submod.named_parameters()
        }

    first, second = run_ranks(2, save)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(net.parameters())
    taken = torch.optim.AdamW(net.parameters())
    state = {"model": net, "optim": optimizer, "named": get_optimizer_state_dict(net, taken)}
    forebay.load(tmp_path, state)
    set_optimizer_state_dict(net, taken, state["named"])
    assert [group["lr"] for group in taken.param_groups] == [0.1]
    for value in net.parameters():
        assert torch.equal(taken.state[value]["exp_avg"], optimizer.state[value]["exp_avg"])
    found = {
        name: [value.tolist(), optimizer.state[value]["exp_avg"].tolist()] for name, value in net.named_parameters()
    }
    assert found == {**first, **second} and first.keys().isdisjoint(second)
    # Other formats have all of it, too.
    (tmp_path / "hf").mkdir()
    to_hugging_face(str(tmp_path), tmp_path / "hf")
    to_dcp(str(tmp_path), tmp_path / "dcp")
    loaded = {"model": {name: torch.zeros_like(value) for name, value in net.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    weights = {name: value for name, (value, _) in found.items()}
    for model in (load_file(tmp_path / "hf" / "model.safetensors"), loaded["model"]):
        assert {name: value.tolist() for name, value in model.items()} == weights


def tree(value: Any) -> Any:
    """A state's tree; of a text with a capital a tensor of that name."""
    if isinstance(value, dict):
        return {"t": "dict", "v": [[key, tree(part)] for key, part in value.items()]}
    if isinstance(value, list):
        return [tree(part) for part in value]
    return {"t": "tensor", "n": value} if isinstance(value, str) and value[:1].isupper() else value


def an_optimizer(state: Any, *groups: Any) -> Any:
    return {"t": "object", "k": "optimizer", "v": tree({"state": state, "param_groups": list(groups)})}


def a_mark(value: Any) -> bool:
    return isinstance(value, dict) and value.get("t") == "differs"


def merge(*trees: Any, same: tuple[str, ...] = ()) -> Any:
    return merged(list(enumerate(trees)), lambda one, two: {one, two} <= set(same))[0]


def test_trees_are_merged_by_names_and_by_nothing_else() -> None:
    one, two = tree({"m": {"a": "A", "x": "X@0"}, "n": 1}), tree({"m": {"b": "B", "x": "X@1"}, "n": 1})
    assert merge(one, two, same=("X@0", "X@1")) == tree({"m": {"a": "A", "x": "X@0", "b": "B"}, "n": 1})
    (_, model), _ = merge(one, two)["v"]
    assert a_mark(dict(model["v"])["x"]) and dict(model["v"])["a"] == tree("A")
    assert dict(model["v"])["x"]["path"] == "state['m']['x']"
    with pytest.raises(forebay.CheckpointMismatch, match="ranks 0 and 1"):
        refuse_mark(dict(model["v"])["x"])
    for first, second in [
        (1, 2),
        (1, True),
        (1, 1.0),
        ({"a": 1}, [1]),
        ([1], [1, 2]),
        # Numbers are no names, though only one of the two has the second.
        ({0: 1, 1: 2}, {0: 1}),
    ]:
        assert a_mark(merge(tree(first), tree(second))), (first, second)
    assert merge(tree([{"a": 1}]), tree([{"b": 2}])) == tree([{"a": 1, "b": 2}])
    # What is counted is one value; a defaultdict has names where tensors lie in it.
    for kind, beside in (("counter", {}), ("defaultdict", {"f": "int"})):
        counts: Any = [{"t": kind, **beside, "v": [["a", 1], [key, number]]} for key, number in (("b", 1), ("b", 2), ("c", 1))]
        assert merge(counts[0], dict(counts[0])) == counts[0]
        assert a_mark(merge(*counts[:2])) and a_mark(merge(counts[0], counts[2])) and a_mark(merge(counts[0], tree({"a": 1})))
        assert "leave it out" in merge(*counts)["hint"] and asked(counts[0], {"a": 0}, lambda *_: None, []) is counts[0]
    held = [{"t": "defaultdict", "f": "dict", "v": [[key, tree({"w": name})]]} for key, name in (("a", "A"), ("b", "B"))]
    both = {**held[0], "v": [*held[0]["v"], *held[1]["v"]]}
    assert merge(*held) == both and a_mark(merge(held[0], {**held[1], "f": "list"})) and a_mark(merge(*held[:1], tree({})))
    assert asked(both, {"b": {"w": 0}}, lambda *_: None, left := []) == held[1] and left == [("state", "a")]
    own = {"t": "object", "k": "optimizer-own", "v": tree({"state": {}, "param_groups": []})}
    assert a_mark(merge(own, {**own, "v": tree({"state": {0: "A"}, "param_groups": []})}))
    assert merge(own, own, own) == own


def test_groups_of_optimizers_are_merged_by_their_options() -> None:
    one = an_optimizer({"a": {"m": "A"}}, {"params": ["a"], "lr": 1, "param_names": ["a"]}, {"params": ["b"], "lr": 1})
    two = an_optimizer({"c": {"m": "C"}}, {"params": ["c"], "lr": 1}, {"params": ["d"], "lr": 2})
    whole = merge(one, two)
    groups = [{"params": ["a", "c"], "lr": 1}, {"params": ["b"], "lr": 1}, {"params": ["d"], "lr": 2}]
    assert whole == an_optimizer({"a": {"m": "A"}, "c": {"m": "C"}}, *groups)

    def ask(*groups: list[str]) -> tuple[Any, list[Any]]:
        state = {name: {} for group in groups for name in group}
        left: list[Any] = []
        live = {"state": state, "param_groups": [{"params": group} for group in groups]}
        return asked(whole, torch.optim.SGD([torch.ones(1)]), lambda *_: ("optimizer", live), left)["v"], left

    # One may join what groups of the same options had.
    found, left = ask(["c", "b"], ["d"])
    groups = [{"params": ["c", "b"], "lr": 1}, {"params": ["d"], "lr": 2}]
    assert found == tree({"state": {"c": {"m": "C"}}, "param_groups": groups})
    assert left == [("state", "a")]
    for groups_asked, words in ((["a", "d"], "no one group of options"), (["a", "e"], "the checkpoint lacks 'e'")):
        with pytest.raises(forebay.CheckpointMismatch, match=words):
            ask(groups_asked)

class ManyRanks:
    """A step of 512 ranks that have one tree: its tensors are alike but for one of each rank's own, or of the last one's."""

    step, world_size = 1, 512

    def __init__(self, own: Sequence[int]) -> None:
        self._names = ["w", "v"] + [f"own@{rank}" for rank in own] + ([] if len(own) == self.world_size else ["own"])
        self.listed = self.asked = 0

    def tensors(self) -> list[tuple[str, str, list[int], int]]:
        self.listed += 1
        return [(name, "float32", [4], 16) for name in self._names]

    def extra(self, name: str) -> Optional[str]:
        nodes = [[name, {"t": "tensor", "n": name}] for name in ("w", "v", "own")]
        return json.dumps({"t": "dict", "v": nodes}) if name == "state" else None

    def are_same(self, one: int, other: int) -> bool:
        self.asked += 1
        return one == other


@pytest.mark.parametrize("own, parsed", [([], 1), ([511], 2), (range(512), 512)])
def test_trees_of_many_ranks_are_merged_without_listing_all_for_each(
    own: Sequence[int], parsed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 listed all tensors, of which there are as many as ranks, twice for each rank."""
    checked, plain = [], _loading.check_tree
    monkeypatch.setattr(_loading, "check_tree", lambda *given: checked.append(plain(*given)))
    step: Any = ManyRanks(own)
    tree, differing = _loading._merged(step, range(512))
    assert (step.listed, len(checked)) == (1, parsed)
    assert differing == (["state['own']"] if own else [])
    assert tree["v"][0] == ["w", {"t": "tensor", "n": "w"}] and (not own or tree["v"][2][1]["t"] == "differs")
    assert step.asked <= 3 * 512
