"""Ranks whose structures differ, and tensors of kinds that only some frameworks have: saved, restored, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._shard.sharded_tensor as sharded_tensor
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

import forebay
import forebay.dcp
from forebay import _native

from .test_ranks import run_ranks


def spread(seed: int) -> Any:
    """A ShardedTensor of 10 rows of 4, which hold `seed` and on."""
    size = dist.get_world_size()
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(size)])
    tensor = sharded_tensor.zeros(spec, 10, 4)
    for shard in tensor.local_shards():
        first = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(seed + torch.arange(40.0).view(10, 4)[first : first + shard.tensor.shape[0]])
    return tensor


def fsdp1(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state: dict[str, Any], first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        torch.manual_seed(step)
        loss = state["model"](torch.randn(4, 5)).square().mean()
        loss.backward()
        state["optim"].step()
        state["optim"].zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors_and_fsdp1_are_restored_at_other_sizes(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        state = fsdp1(1)
        train(state, 1, 2)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(2, {**state, "sharded": spread(5)})
        return train(state, 3, 4)

    def restore(rank: int) -> Any:
        state = {**fsdp1(9), "sharded": spread(0)}
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            assert checkpointer.restore(state) == 2
        expected = spread(5).local_shards()
        assert all(torch.equal(one.tensor, two.tensor) for one, two in zip(state["sharded"].local_shards(), expected))
        with pytest.raises(forebay.CheckpointError, match="a module of FSDP1 is restored as a whole only"):
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                checkpointer.restore(state, only=["model.0.*"])
        return train(state, 3, 4)

    losses = run_ranks(2, save)
    assert _native.verify(f"file://{tmp_path}", None) == []
    assert run_ranks(2, restore) == losses, "training goes on as if it had not stopped"
    # The order of sums is another at another number of ranks.
    for found in run_ranks(3, restore):
        assert found == pytest.approx(losses[0], rel=1e-5)
    loaded = forebay.load(tmp_path)
    assert torch.equal(loaded["sharded"], 5 + torch.arange(40.0).view(10, 4))
    assert loaded["model"]["0.weight"].shape == (7, 5)


def stage(rank: int, size: int, seed: int) -> dict[str, torch.Tensor]:
    """The layers, of four, that one of `size` pipeline stages has."""
    torch.manual_seed(seed)
    layers = {f"layers.{index}.w": torch.randn(4, 4) for index in range(4)}
    return {name: value for index, (name, value) in enumerate(layers.items()) if index * size // 4 == rank}


def test_pipeline_stages_come_back_to_any_ranks_natively_and_by_dcp(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path / "own") as checkpointer:
            checkpointer.save_now(1, {"model": stage(rank, 2, 1)})
        with forebay.dcp.Writer(tmp_path / "dcp") as writer:
            dcp.save({"model": stage(rank, 2, 1)}, checkpoint_id=1, storage_writer=writer)
        return None

    def restore(rank: int) -> Any:
        size = dist.get_world_size()
        expected = stage(rank, size, 1)
        for place in ("own", "dcp"):
            state = {"model": stage(rank, size, 2)}
            dcp.load(state, storage_reader=forebay.dcp.Reader(tmp_path / place))
            assert all(torch.equal(state["model"][name], expected[name]) for name in expected)
            state = {"model": stage(rank, size, 2)}
            with forebay.Checkpointer(tmp_path / place) as checkpointer:
                assert checkpointer.restore(state) == 1
            assert all(torch.equal(state["model"][name], expected[name]) for name in expected)
        return True

    run_ranks(2, save)
    for size in (1, 2, 4):
        assert run_ranks(size, restore) == [True] * size


def experts(seed: int) -> tuple[DTensor, torch.Tensor]:
    """Eight experts over two or more ranks of a mesh, beside which there may be others that hold the same."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "expert"))["expert"]
    torch.manual_seed(seed)
    whole = torch.randn(8, 3, 3)
    first = 4 * mesh.get_local_rank()
    local = whole[first : first + 4].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False), whole[first : first + 4]


def test_experts_on_a_part_of_the_mesh(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        # A dense part that each rank has, and a router that only two have.
        state = {"experts": experts(1)[0], "dense": torch.arange(6.0), **({"router": torch.ones(3)} if rank < 2 else {})}
        with forebay.Checkpointer(tmp_path / "run", replicated=["dense", "router"]) as checkpointer:
            checkpointer.save_now(1, state)
        checkpointer = forebay.Checkpointer(tmp_path / "other")
        with pytest.raises(forebay.CheckpointError, match="`experts` should be the same on ranks 0 and 2"):
            checkpointer.save_now(1, {"experts": experts(1 if rank < 2 else 5)[0]})
        return None

    def restore(rank: int) -> Any:
        found, expected = experts(2)[0], experts(1)[1]
        state = {"experts": found, "dense": torch.zeros(6), **({"router": torch.zeros(3)} if rank < 2 else {})}
        with forebay.Checkpointer(tmp_path / "run") as checkpointer:
            assert checkpointer.restore(state) == 1
        assert torch.equal(state["dense"], torch.arange(6.0)) and bool(state.get("router", torch.ones(3)).all())
        return torch.equal(found.to_local(), expected)

    run_ranks(4, save)
    assert not list((tmp_path / "other").glob("steps/*/*"))
    for size in (2, 4):
        assert run_ranks(size, restore) == [True] * size
    whole = forebay.load(tmp_path / "run")["experts"]
    torch.manual_seed(1)
    assert torch.equal(whole, torch.randn(8, 3, 3))


def branches(seed: int) -> dict[str, Any]:
    """A model of which a step changes one branch only, so that its optimizer has no state of the other."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def use(state: dict[str, Any], branch: str) -> None:
    state["model"][branch](torch.ones(2, 3)).square().sum().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def values(state: dict[str, Any]) -> list[Any]:
    """Weights and optimizer state; None where that is not there."""
    found: list[Any] = []
    for parameter in state["model"].parameters():
        of_it = state["optim"].state.get(parameter)
        found.append([parameter.tolist(), of_it and [torch.as_tensor(value).tolist() for value in of_it.values()]])
    return found


def test_optimizer_state_that_is_made_late(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        state = branches(rank)
        steps = [None, "ab"[rank], "ba"[rank], "a"]
        seen = []
        with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
            for step, branch in enumerate(steps):
                if branch is not None:
                    use(state, branch)
                checkpointer.step(step, state)
                seen.append(values(state))
        for step in range(len(steps)):
            # One that never stepped, and one that knows all branches.
            for branch in (None, "ab"):
                fresh = branches(7)
                for name in branch or "":
                    use(fresh, name)
                with forebay.Checkpointer(tmp_path) as checkpointer:
                    assert checkpointer.restore(fresh, step=step) == step
                assert values(fresh) == seen[step], (step, branch)
                for later in range(step + 1, len(steps)):
                    use(fresh, steps[later])
                assert values(fresh) == seen[-1], (step, branch)
        return True

    assert run_ranks(2, work, with_gloo=False) == [True, True]


class Sparse(torch.nn.Linear):
    """A module with a matrix that is sparse, as graph networks have."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(2, 2)
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=persistent)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_buffer_keeps_no_module_from_being_saved(tmp_path: Path) -> None:
    """One that is part of the state is refused by name."""
    module, other = Sparse(False), Sparse(False)
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_now(1, {"m": module})
        assert checkpointer.restore({"m": other}) == 1
        assert torch.equal(module.weight, other.weight)
        with pytest.raises(TypeError, match=r"state\['m'\].*graph.*sparse_coo tensor"):
            checkpointer.save_now(2, {"m": Sparse(True)})
