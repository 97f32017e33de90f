"""Jobs of several ranks: real processes, real torch.distributed, saved at one size and restored at others."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp  # noqa: F401  (slow: before any fork)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import forebay
import forebay.dcp
from forebay import _alike, _native
from forebay._leaf import SIZES, tensor_dtype, tensor_leaf
from forebay._loading import state_tree, with_step

from .conftest import Child, rounds, wait_until

Report = Callable[[str], None]

_meetings = tempfile.TemporaryDirectory()
"""Where the ranks of torch.distributed find each other; removed at the end."""


def start_ranks(world_size: int, work: Callable[[int, Report], None], with_gloo: bool = True) -> list[Child]:
    """Forks a job; in each rank `work` gets its number and a way to report a line."""
    start_ranks.jobs += 1  # type: ignore[attr-defined]
    number = start_ranks.jobs  # type: ignore[attr-defined]
    meeting = os.path.join(_meetings.name, str(number))

    def rank_of(rank: int) -> Callable[[Report], None]:
        def run(report: Report) -> None:
            port = str(20000 + number)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.environ["TORCHELASTIC_RUN_ID"] = f"{os.getppid()}-{number}"
            if with_gloo:
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
            work(rank, report)

        return run

    return [Child(rank_of(rank)) for rank in range(world_size)]


start_ranks.jobs = 0  # type: ignore[attr-defined]


def run_ranks(world_size: int, work: Callable[[int], Any], with_gloo: bool = True) -> list[Any]:
    """What `work` gives on each rank, through JSON."""

    def run(rank: int, report: Report) -> None:
        report(json.dumps(work(rank)))

    children = start_ranks(world_size, run, with_gloo)
    lines = [child.line() for child in children]
    assert [child.join() for child in children] == [0] * world_size
    return [json.loads(line) for line in lines]


def test_the_first_start_of_a_job_finds_nothing_on_all_ranks(tmp_path: Path) -> None:
    """Rank 0 was told so, the others that rank 0 failed."""

    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path / "new" / "run") as checkpointer:
            start = checkpointer.restore({"w": torch.zeros(9)})
            save = checkpointer.save_now(1, {"w": torch.zeros(9)})
            assert save is not None and save.wait_durable()
            return start, checkpointer.steps()

    assert run_ranks(2, work, with_gloo=False) == [[None, [1]]] * 2


def weights(kind: str) -> dict[str, torch.Tensor]:
    """The same values in every process."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {"w": random(64, 48), "odd": random(7, 5), "one": random(1), "b": random(48).to(torch.bfloat16)}


def sharded(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The tensors spread over the present ranks."""
    size = dist.get_world_size()
    if kind == "hybrid" and size > 2:
        mesh, places = init_device_mesh("cpu", (2, size // 2)), [Replicate(), Shard(0)]
    else:
        mesh, places = init_device_mesh("cpu", (size,)), [Shard(1) if kind == "columns" else Shard(0)]
    spread = {}
    for name, tensor in tensors.items():
        fits = [Shard(0) if isinstance(place, Shard) and place.dim >= tensor.ndim else place for place in places]
        spread[name] = distribute_tensor(tensor.clone(), mesh, fits)
    return spread


def body_of(place: Path, step: int) -> dict[str, Any]:
    (manifest,) = place.glob(f"steps/{step:020}/*.json")
    body: dict[str, Any] = json.loads(manifest.read_text())["body"]
    return body


def restored_at(world_size: int, place: Path, kind: str) -> None:
    """Restores the tensors, spread in that way over so many ranks, and compares."""
    expected = weights(kind)

    def restore(rank: int) -> Any:
        state = sharded(kind, {name: torch.zeros_like(tensor) for name, tensor in expected.items()})
        with forebay.Checkpointer(place) as checkpointer:
            assert checkpointer.restore(state) == 3
        return [name for name in expected if not torch.equal(state[name].full_tensor(), expected[name])]

    assert run_ranks(world_size, restore) == [[]] * world_size


@pytest.mark.parametrize("kind", ["rows", "columns", "hybrid"])
def test_sharded_tensors_at_other_sizes_and_alone(tmp_path: Path, kind: str) -> None:
    def save(rank: int) -> Any:
        state = sharded(kind, weights(kind))
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(3, state)
        return None

    run_ranks(4, save)
    assert _native.verify(f"file://{tmp_path}", None) == []
    body = body_of(tmp_path, 3)
    assert body["world_size"] == 4 and [shard["rank"] for shard in body["shards"]] == [0, 1, 2, 3]
    stored = sum(part["end"] - part["start"] for tensor in body["tensors"] for part in tensor["slices"])
    rng = sum(
        part["end"] - part["start"]
        for tensor in body["tensors"]
        if tensor["name"].startswith("rng")
        for part in tensor["slices"]
    )
    expected = weights(kind)
    assert stored - rng == sum(tensor.nbytes for tensor in expected.values()), "each element is stored once"
    assert not (tmp_path / "ranks").exists() or not list((tmp_path / "ranks").rglob("*.json"))
    for other in ("rows", "columns"):
        restored_at(2, tmp_path, other)
    alone = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    forebay.load(tmp_path, alone)
    assert all(torch.equal(alone[name], expected[name]) for name in expected)


def ddp_parts(seed: int) -> dict[str, Any]:
    """A model under DDP, with a buffer, and an optimizer with some steps behind it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    return {"model": ddp, "optim": torch.optim.AdamW(ddp.parameters(), lr=1e-2), "losses": []}


def train(state: dict[str, Any], first: int, last: int, checkpointer: forebay.Checkpointer, rank: int) -> None:
    for step in range(first, last + 1):
        torch.manual_seed(1000 * step + rank)
        loss = state["model"](torch.randn(16, 32)).square().mean()
        loss.backward()
        checkpointer.before_optimizer_step()
        state["optim"].step()
        state["optim"].zero_grad()
        state["losses"].append(loss.item())
        checkpointer.step(step, state)


def test_ddp_is_stored_once_and_goes_on_bit_equal(tmp_path: Path) -> None:
    def uninterrupted(rank: int) -> Any:
        state = ddp_parts(1)
        with forebay.Checkpointer(tmp_path / "whole", every=4) as checkpointer:
            train(state, 1, 8, checkpointer, rank)
        return state["losses"]

    def resumed(rank: int) -> Any:
        state = ddp_parts(2)
        with forebay.Checkpointer(tmp_path / "whole") as checkpointer:
            assert checkpointer.restore(state, step=4) == 4
            train(state, 5, 8, checkpointer, rank)
        return state["losses"]

    expected = run_ranks(2, uninterrupted)
    body = body_of(tmp_path / "whole", 4)
    (weight,) = [tensor for tensor in body["tensors"] if tensor["name"] == "model.0.weight"]
    assert sum(part["end"] - part["start"] for part in weight["slices"]) == 32 * 64 * 4
    written = [shard["size"] - shard["header"] for shard in body["shards"]]
    own = [sum_of(body, f"@{rank}") for rank in range(2)]
    shared = [total - local for total, local in zip(written, own)]
    buffers = (64 + 64) * 4 + 8
    assert max(shared) <= 1.01 * sum(shared) / 2 + buffers, "the ranks share the writing, but for rank 0's buffers"
    assert run_ranks(2, resumed) == expected


def test_what_ddp_ignores_comes_back_to_each_rank(tmp_path: Path) -> None:
    """It was taken for a replica, and stored as a mixture of the ranks' own."""

    def parts() -> dict[str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
        ignored = ["2.weight", "1.running_mean"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        ddp = DistributedDataParallel(model)
        return {"model": ddp, "optim": torch.optim.AdamW(ddp.parameters(), lr=1e-2)}

    def own(state: dict[str, Any]) -> list[Any]:
        weight = state["model"].module[2].weight
        tensors = [weight, state["model"].module[1].running_mean, state["optim"].state[weight]["exp_avg"]]
        return [tensor.tolist() for tensor in tensors]

    def save(rank: int) -> Any:
        state = parts()
        torch.manual_seed(rank)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            for step in (1, 2):
                state["model"](torch.randn(16, 8)).square().mean().backward()
                state["optim"].step()
                checkpointer.save_now(step, state)
        return own(state)

    def restore(rank: int) -> Any:
        state = parts()
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state) == 2
        return own(state)

    saved = run_ranks(2, save)
    assert saved[0] != saved[1] and run_ranks(2, restore) == saved
    names = [tensor["name"] for tensor in body_of(tmp_path, 2)["tensors"]]
    assert "model.0.weight" in names and "model.2.weight@1" in names


def sum_of(body: dict[str, Any], suffix: str) -> int:
    named = [tensor for tensor in body["tensors"] if tensor["name"].endswith(suffix)]
    return sum(part["end"] - part["start"] for tensor in named for part in tensor["slices"])


def fsdp_parts(seed: int) -> dict[str, Any]:
    """A model under FSDP2 and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 64), torch.nn.GELU(), torch.nn.Linear(64, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-2), "n": 0}


def fsdp_values(state: dict[str, Any]) -> list[list[float]]:
    """Everything that an FSDP job's state holds, whole."""
    values = [parameter.full_tensor() for parameter in state["model"].parameters()]
    for entry in state["optim"].state.values():
        values += [value.full_tensor() if isinstance(value, DTensor) else value for value in entry.values()]
    return [value.double().flatten().tolist() for value in values]


def test_fsdp_is_restored_at_other_sizes(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        state = fsdp_parts(1)
        for _ in range(2):
            state["model"](torch.randn(4, 30)).square().mean().backward()
            state["optim"].step()
            state["optim"].zero_grad()
        state["n"] = 7
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(2, state)
        return fsdp_values(state)

    def restore(rank: int) -> Any:
        state = fsdp_parts(5)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state) == 2
        assert state["n"] == 7
        return fsdp_values(state)

    expected = run_ranks(4, save)[0]
    for world_size in (2, 4):
        assert run_ranks(world_size, restore) == [expected] * world_size


@pytest.mark.parametrize("ranks, after", [(1, True), (2, False), (4, 2)])
def test_fsdp_is_saved_and_restored_after_an_evaluation(tmp_path: Path, ranks: int, after: Any) -> None:
    """A forward without a backward leaves parameters whole, the root's by default; their sharded ones are the optimizer's."""

    def parts(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(30, 64), torch.nn.GELU(), torch.nn.Linear(64, 6))
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model[2], mesh=mesh, reshard_after_forward=after)
        fully_shard(model, mesh=mesh)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-2)}

    def evaluate(state: dict[str, Any]) -> None:
        with torch.no_grad():
            state["model"](torch.ones(4, 30))
        optimized = {id(parameter) for group in state["optim"].param_groups for parameter in group["params"]}
        assert not optimized >= set(map(id, state["model"].parameters())), "it left none whole"

    def work(rank: int) -> Any:
        state = parts(1)
        state["model"](torch.randn(4, 30)).square().mean().backward()
        state["optim"].step()
        state["optim"].zero_grad()
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, state)
            evaluate(state)
            checkpointer.save_now(2, state)
        founds = [parts(5), parts(6)]
        for number, found in enumerate(founds, 1):
            evaluate(found)
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                assert checkpointer.restore(found, step=number) == number
            assert fsdp_values(found) == fsdp_values(state)
        for one in (state, *founds):
            torch.manual_seed(rank)
            one["model"](torch.randn(4, 30)).square().mean().backward()
            one["optim"].step()
        assert fsdp_values(founds[0]) == fsdp_values(founds[1]) == fsdp_values(state)
        tree = with_step(f"file://{tmp_path}", 2, None, lambda step: state_tree(step, rank))
        return {key: node["k"] for key, node in tree["v"]}

    assert run_ranks(ranks, work) == [{"model": "module", "optim": "optimizer"}] * ranks


def test_without_torch_distributed_each_rank_has_its_own(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        state = {"own": torch.full((5,), rank), "ema.w": torch.arange(1000.0), "rank": rank}
        with forebay.Checkpointer(tmp_path, every=1, replicated=["ema.*"]) as checkpointer:
            for step in (1, 2):
                state["own"] += 10
                if rank == 1 and step == 2:
                    state["late"] = torch.ones(3)
                checkpointer.step(step, state)
        return None

    def restore(rank: int) -> Any:
        state = {"own": torch.zeros(5, dtype=torch.int64), "ema.w": torch.zeros(1000), "rank": -1}
        if rank == 1:
            state["late"] = torch.zeros(3)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state) == 2
        assert torch.equal(state["ema.w"], torch.arange(1000.0))
        assert rank != 1 or bool(state["late"].all())
        return [state["own"].tolist(), state["rank"]]

    run_ranks(3, save, with_gloo=False)
    assert run_ranks(3, restore, with_gloo=False) == [[[20 + rank] * 5, rank] for rank in range(3)]


def test_replicas_that_differ_are_refused_and_named(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        checkpointer = forebay.Checkpointer(tmp_path, replicated=["w"])
        with pytest.raises(forebay.CheckpointError, match="`w` should be the same on ranks 0 and 1"):
            checkpointer.save_now(1, {"w": torch.full((4,), rank)})
        return None

    run_ranks(2, save, with_gloo=False)
    assert not list(tmp_path.glob("steps/*/*"))


def test_replicas_that_come_later_and_differ_are_refused(tmp_path: Path) -> None:
    """What an optimizer has after its first step was stored as a mixture of what the ranks had."""

    def save(rank: int) -> Any:
        checkpointer = forebay.Checkpointer(tmp_path, replicated=["w", "late"])
        state = {"w": torch.ones(4)}
        checkpointer.save_now(1, state)
        state["late"] = torch.full((4,), rank)
        with pytest.raises(forebay.CheckpointError, match="`late` should be the same on ranks 0 and 1"):
            checkpointer.save_now(2, state)
        state["late"].zero_()
        checkpointer.save_now(3, state)
        checkpointer.close()
        return checkpointer.steps()

    assert run_ranks(2, save, with_gloo=False) == [[1, 3]] * 2


def test_replicas_that_drift_later_are_refused_and_named(tmp_path: Path) -> None:
    """They were compared when they were new alone, and stored later as a mixture of what the ranks had."""

    def save(rank: int) -> Any:
        checkpointer = forebay.Checkpointer(tmp_path, replicated=["w", "still"])
        state = {"w": torch.ones(4), "still": torch.arange(100_000.0).reshape(100, 1000).t(), "own": torch.zeros(3)}
        checkpointer.save_now(1, state)
        for step, differing in ((2, [rank] * 4), (3, [1, 1, 1, rank])):
            state["w"].copy_(torch.tensor(differing))
            state["own"].fill_(rank)
            with pytest.raises(forebay.CheckpointError, match="`w` should be the same on ranks 0 and 1"):
                checkpointer.save_now(step, state)
        state["w"].fill_(5)
        for step in (4, 5):
            checkpointer.save_now(step, state)
        checkpointer.close()
        return checkpointer.steps()

    assert run_ranks(2, save, with_gloo=False) == [[1, 4, 5]] * 2
    assert torch.equal(forebay.load(tmp_path)["w"], torch.full((4,), 5.0))


def test_parts_that_drift_are_told_to_ranks_that_do_not_hold_them(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Replicate(), Shard(0)])
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(1, {"w": tensor})
            if rank == 3:
                tensor.to_local()[1, 1] = -1
            with pytest.raises(forebay.CheckpointError, match="`w` should be the same on ranks 1 and 3"):
                checkpointer.save_now(2, {"w": tensor})
            if rank == 3:
                tensor.to_local()[1, 1] = 41
            checkpointer.save_now(3, {"w": tensor})
        return checkpointer.steps()

    assert run_ranks(4, save) == [[1, 3]] * 4


def test_samples_come_to_every_byte_of_what_ranks_have_alike() -> None:
    """Dense tensors and others, also larger than a sample: an element that differs is found within some saves."""
    for make in (lambda: torch.zeros(5000), lambda: torch.zeros(40, 125).t(), lambda: torch.zeros(5000, dtype=torch.bool)):
        one, other = make(), make()
        leaves = [[tensor_leaf("w", "w", tensor, tensor_dtype(tensor) or "")] for tensor in (one, other)]
        groups = [_alike.Group((0, 1), [0])]
        for row, column in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
            view = other if other.dim() == 2 else other.view(50, 100)
            view[row, column] = 1
            told = [[_alike.digests(groups, each, step) for each in leaves] for step in range(400)]
            assert 0 < sum(_alike.have_drifted(groups, each) for each in told)
            view[row, column] = 0
            told = [[_alike.digests(groups, each, step) for each in leaves] for step in range(10)]
            assert not any(_alike.have_drifted(groups, each) for each in told)


def test_samples_are_the_same_wherever_a_tensor_is_and_of_any_type() -> None:
    """What a device has is gathered there, by torch; a stand-in has no address here."""
    groups = [_alike.Group((0, 1), [0, 1])]
    for name, size in SIZES.items():
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        memory = torch.randint(0, 2, (6000 * size,), dtype=torch.uint8)
        tensor = memory.view(dtype)
        near = [tensor_leaf(str(index), "", part, name) for index, part in enumerate((tensor, tensor[:7]))]
        away = [dataclasses.replace(leaf, address=None) for leaf in near]
        for step in range(3):
            assert _alike.digests(groups, near, step) == _alike.digests(groups, away, step), name
        strided = tensor_leaf("", "", tensor.view(60, 100).t(), name)
        assert strided.address is None
        told = {_alike.digests([_alike.Group((0, 1), [0])], [strided], step)["0"] for step in (1, 1, 2)}
        assert len(told) == (2 if strided.size > _alike.SAMPLE_BYTES else 1), name


def test_a_rank_that_left_by_an_error_is_told_to_the_others(tmp_path: Path) -> None:
    """They waited for it as long as their patience is, while its process went on."""

    def work(rank: int) -> Any:
        with contextlib.suppress(ZeroDivisionError), forebay.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save_now(1, {"own": torch.zeros(9)})
            if rank == 1:
                raise ZeroDivisionError
            with pytest.raises(forebay.CheckpointUnavailable, match="rank 1 of the job is gone"):
                checkpointer.save_now(2, {"own": torch.zeros(9)})
            (tmp_path / "told").touch()
        wait_until((tmp_path / "told").exists)
        return None

    run_ranks(2, work, with_gloo=False)


def test_what_goes_wrong_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        checkpointer = forebay.Checkpointer(tmp_path)
        told = []
        for step, bad in ((1, object()), (2, None)):
            try:
                checkpointer.save_now(step, {"x": bad if rank == 1 else None})
            except (TypeError, forebay.CheckpointError) as error:
                told.append(str(error))
        checkpointer.close()
        return told

    first, second = run_ranks(2, save, with_gloo=False)
    assert "rank 1 failed to save: TypeError: state['x']: object of type object cannot be saved" in first[0]
    assert second[0].startswith("state['x']") and len(first) == len(second) == 1
    assert [path.name for path in (tmp_path / "steps").iterdir()] == [f"{2:020}"]


def test_a_rank_that_has_no_memory_for_a_snapshot_is_told_on_all(tmp_path: Path) -> None:
    """The others have sealed the step by then."""

    def save(rank: int) -> Any:
        checkpointer = forebay.Checkpointer(tmp_path)
        assert checkpointer.save_now(1, {"x": torch.zeros(4)}).wait_durable(60)
        large = {"x": torch.zeros(16 << 20)}
        limits = resource.getrlimit(resource.RLIMIT_AS)
        if rank == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), limits[1]))
        try:
            checkpointer.save_now(2, large).wait_durable(60)
            told = "nothing"
        except forebay.CheckpointError as error:
            told = f"{type(error).__name__}: {error}"
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert checkpointer.save_now(3, large).wait_durable(60)
        checkpointer.close()
        return told

    first, second = run_ranks(2, save, with_gloo=False)
    assert second.startswith("CheckpointNoSpace: no memory for a snapshot of ") and "hint: " in second
    assert "step 2 was not saved: rank 1: no memory for a snapshot" in first
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == [f"{1:020}", f"{3:020}"]


def test_a_rank_that_dies_is_named_and_the_step_is_not_there(tmp_path: Path) -> None:
    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, every=1)
        checkpointer.step(1, {"own": torch.zeros(1000)})
        checkpointer.wait()
        report("saved")
        if rank == 2:
            signal.pause()
        try:
            checkpointer.step(2, {"own": torch.ones(1000)})
        except forebay.CheckpointUnavailable as error:
            report(str(error))

    children = start_ranks(3, work, with_gloo=False)
    assert [child.line() for child in children] == ["saved"] * 3
    children[2].kill()
    for child in children[:2]:
        assert "rank 2 of the job is gone" in child.line()
        child.kill()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1]
    assert _native.verify(f"file://{tmp_path}", None) == []


def newest_stored(place: Path) -> int:
    """The newest step whose manifest is there, or 0."""
    # What is deleted meanwhile is not there, which is an error to `Path.glob`.
    return max((int(Path(path).parent.name) for path in glob.glob(f"{place}/steps/*/*.json")), default=0)


def test_the_death_of_all_ranks_at_any_moment_leaves_only_common_steps(tmp_path: Path) -> None:
    for seed in rounds(3):
        place = tmp_path / str(seed)

        def work(rank: int, report: Report) -> None:
            state = {"own": torch.zeros(100_000), "all": torch.zeros(200_000), "n": 0}
            saves = []
            with forebay.Checkpointer(place, every=1, keep=2, replicated=["all"]) as checkpointer:
                checkpointer.prepare(state)
                report(str(checkpointer._agent.pid))
                try:
                    for step in range(1, 1000):
                        state["own"] += 1 + rank
                        state["all"] += 1
                        state["n"] = step
                        saves.append(checkpointer.step(step, state))
                        report(str(max((save.step for save in saves if save is not None and save.sealed), default=0)))
                except forebay.CheckpointUnavailable:
                    # The other rank is gone; this one has a moment more.
                    signal.pause()

        children = start_ranks(2, work, with_gloo=False)
        agents = [int(child.line()) for child in children]
        # All but the first have sealed something, whatever keeps them up.
        told = [0, 0]
        while seed > 0 and not all(told):
            told = [int(child.line()) for child in children]
        time.sleep(0.2 * seed)
        for child in children:
            os.killpg(child.pid, signal.SIGKILL)
        told = [max([before, *map(int, child._lines.read().split())]) for before, child in zip(told, children)]
        assert [child.join() for child in children] == [-signal.SIGKILL] * 2
        # What all have sealed is committed by the agents. One whose partner did not seal the step waits for it.
        sealed = min(told)
        wait_until(lambda: newest_stored(place) >= sealed)
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)

        def restore(rank: int) -> Any:
            state = {"own": torch.zeros(100_000), "all": torch.zeros(200_000), "n": 0}
            with forebay.Checkpointer(place) as checkpointer:
                step = checkpointer.restore(state) or 0
            own, shared = state["own"] / (1 + rank), state["all"]
            return [step, bool((own == step).all() and (shared == step).all() and state["n"] == step)]

        steps = run_ranks(2, restore, with_gloo=False)
        assert steps[0] == steps[1] and steps[0][1], f"seed {seed}: {steps}"
        assert steps[0][0] >= sealed, f"seed {seed}: {steps}, sealed {told}"
        assert _native.verify(f"file://{place}", None) == [] if place.exists() else sealed == 0, f"seed {seed}"


def test_a_damaged_step_is_left_by_all_ranks_together(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
            for step in (1, 2):
                checkpointer.step(step, {"own": torch.full((1000,), step * (rank + 1))})
        return None

    run_ranks(2, save, with_gloo=False)
    body = body_of(tmp_path, 2)
    (own,) = [tensor for tensor in body["tensors"] if tensor["name"] == "own@1"]
    shard = tmp_path / body["shards"][own["slices"][0]["shard"]]["key"]
    data = bytearray(shard.read_bytes())
    data[own["slices"][0]["start"]] ^= 1
    shard.write_bytes(data)

    def restore(rank: int) -> Any:
        state = {"own": torch.zeros(1000, dtype=torch.int64)}
        with forebay.Checkpointer(tmp_path) as checkpointer:
            with pytest.warns(forebay.CheckpointWarning, match="step 1 is used instead"):
                assert checkpointer.restore(state) == 1
        return state["own"].tolist() == [rank + 1] * 1000

    assert run_ranks(2, restore, with_gloo=False) == [True, True]


def test_a_step_is_saved_once_in_a_start(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        checkpointer = forebay.Checkpointer(tmp_path)
        for step, value in ((5, 1), (6, 2)):
            checkpointer.save_now(step, {"n": value, "own": torch.full((9,), value)})
            checkpointer.wait()
        for step, error in ((5, forebay.CheckpointInvalid), (6, forebay.CheckpointConflict)):
            with pytest.raises(error, match=f"step {step} "):
                checkpointer.save_now(step, {"n": 3, "own": torch.full((9,), 3)})
        checkpointer.close()
        return None

    run_ranks(2, save, with_gloo=False)
    assert forebay.load(tmp_path, step=5)["n"] == 1
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_the_clock_of_rank_0_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay._schedule.APART_S", 0.0)

    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, every_minutes=60) as checkpointer:
            first = checkpointer.step(1, {"n": 1})
            if rank == 0:
                checkpointer._schedule._saved_at -= 3601
            second, third = checkpointer.step(2, {"n": 2}), checkpointer.step(3, {"n": 3})
        return [save is not None for save in (first, second, third)]

    assert run_ranks(2, save, with_gloo=False) == [[False, True, False]] * 2


def test_every_so_many_steps_stay(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, every=1, keep=1, keep_every=3) as checkpointer:
            for step in range(1, 8):
                checkpointer.step(step, {"n": step, "own": torch.full((100,), 10 * rank + step)})
        return None

    run_ranks(2, save, with_gloo=False)
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [3, 6, 7]
    assert len(list((tmp_path / "shards").rglob("*.safetensors"))) == 6
    assert _native.verify(f"file://{tmp_path}", None) == []
