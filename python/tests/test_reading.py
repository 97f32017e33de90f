"""What ranks read of a step: each little more than it wants, and what several want once between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import forebay
import forebay.dcp

from .test_ranks import body_of, run_ranks


def bytes_per_rank(world_size: int, cases: list[tuple[Path, Any]], names: list[str]) -> list[list[list[float]]]:
    """For each case and tensor, how many times the bytes of its part each rank reads; the values are compared.

    A case is a place and what gives a mesh and placements.
    """
    expected = reads(names)

    def restore(rank: int) -> Any:
        ratios = []
        for place, spread in cases:
            mesh, placements = spread()
            with forebay.Checkpointer(place, rng=False) as checkpointer:
                for name in names:
                    live = distribute_tensor(torch.zeros_like(expected[name]), mesh, placements)
                    wanted = distribute_tensor(expected[name].clone(), mesh, placements).to_local()
                    before = read_bytes()
                    checkpointer.restore({name: live}, only=[name])
                    ratios.append((read_bytes() - before) / wanted.nbytes)
                    assert torch.equal(live.to_local(), wanted), (place, name)
        return ratios

    of_ranks = run_ranks(world_size, restore)
    by_case = list(zip(*of_ranks))
    return [by_case[index * len(names) : (index + 1) * len(names)] for index in range(len(cases))]


def reads(names: list[str]) -> dict[str, torch.Tensor]:
    """Tensors of 16 MiB: a matrix with rows of 16 KiB, and few large ones in a stack."""
    shapes = {"matrix": (1024, 4096), "experts": (4, 1024, 1024), "rows": (256, 16384)}
    return {name: torch.arange(1 << 22, dtype=torch.int32).view(shapes[name]) for name in names}


def save_spread(world_size: int, place: Path, names: list[str], placements: list[Any]) -> None:
    def save(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (world_size,))
        spread = {name: distribute_tensor(value, mesh, placements) for name, value in reads(names).items()}
        with forebay.Checkpointer(place, rng=False) as checkpointer:
            checkpointer.save_now(3, spread)
        return None

    run_ranks(world_size, save)


def test_a_rank_reads_little_more_than_its_part(tmp_path: Path) -> None:
    names = ["matrix", "experts", "rows"]
    forebay.save(reads(names), tmp_path / "alone", step=3)
    save_spread(4, tmp_path / "columns", names, [Shard(1)])
    save_spread(2, tmp_path / "lines", names, [Shard(0)])

    def by(dim: int) -> Any:
        return lambda: (init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])

    def by_both() -> Any:
        return init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]

    def by_groups() -> Any:
        return init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(1)]

    # What a rank reads besides: the list of steps, the manifest, its own descriptors.
    besides = 0.03
    cases = [(place, spread) for place in ("alone", "columns", "lines") for spread in (by(0), by(1), by_both)]
    cases = [(tmp_path / place, spread) for place, spread in cases]
    for size, of_size in ((4, cases), (2, cases[3:4])):
        for case, of_case in zip(of_size, bytes_per_rank(size, of_size, names)):
            for name, ratios in zip(names, of_case):
                assert all(1 <= ratio <= 1.02 + besides for ratio in ratios), (size, case, name, ratios)
    # What two ranks want alike is read once for both.
    (of_case,) = bytes_per_rank(4, [(tmp_path / "lines", by_groups)], names)
    for ratios in of_case:
        assert all(0.5 <= ratio <= 0.51 + besides for ratio in ratios), ratios


def test_ranks_that_load_by_dcp_read_together_too(tmp_path: Path) -> None:
    names = ["matrix", "experts"]
    forebay.save(reads(names), tmp_path, step=3)

    def load(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (4,))
        expected = {name: distribute_tensor(value, mesh, [Shard(1)]) for name, value in reads(names).items()}
        state = {name: torch.zeros_like(value) for name, value in expected.items()}
        before = read_bytes()
        dcp.load(state, storage_reader=forebay.dcp.Reader(tmp_path))
        fetched = read_bytes() - before
        assert all(torch.equal(state[name].to_local(), expected[name].to_local()) for name in names)
        # What one rank finds damaged is told on all, and none waits for it.
        dist.barrier()
        if rank == 0:
            shard = tmp_path / body_of(tmp_path, 3)["shards"][0]["key"]
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
        dist.barrier()
        with pytest.raises(dcp.CheckpointException, match="are damaged"):
            dcp.load(state, storage_reader=forebay.dcp.Reader(tmp_path))
        return fetched

    for fetched in run_ranks(4, load):
        assert 8 << 20 <= fetched <= (8 << 20) * 1.05, fetched


def test_a_process_alone_reads_few_large_rows_by_parts(tmp_path: Path) -> None:
    """Without other ranks, what is cut by columns is read in runs of 256 KiB and more: so much may be read too much."""
    (stack,) = reads(["experts"]).values()
    forebay.save({"w": stack}, tmp_path, step=3)

    def load(rank: int) -> Any:
        state = {"w": distribute_tensor(torch.zeros_like(stack), init_device_mesh("cpu", (2,)), [Shard(1)])}
        before = read_bytes()
        forebay.load(tmp_path, state)
        assert torch.equal(state["w"].to_local(), stack[:, 512 * rank : 512 * rank + 512])
        return read_bytes() - before

    for read in run_ranks(2, load):
        assert stack.nbytes / 2 <= read <= stack.nbytes / 2 * 1.02 + 65536


@pytest.mark.parametrize("share", [2, 8])
@pytest.mark.parametrize("width", [64, 4096])
def test_a_process_alone_reads_no_more_than_the_rows_that_it_cuts(tmp_path: Path, share: int, width: int) -> None:
    """Of 1/N of the last dimension, N times what it needs, the rows; of rows, the pieces of 1/64 at both ends besides."""
    matrix = torch.arange(1 << 22, dtype=torch.int32).view(-1, width)
    forebay.save({"w": matrix}, tmp_path, step=3)
    piece = matrix.nbytes // 64

    def load(rank: int) -> Any:
        found = []
        for dim, bound in ((1, matrix.nbytes), (0, matrix.nbytes / share + 2 * piece)):
            state = {"w": distribute_tensor(torch.zeros_like(matrix), init_device_mesh("cpu", (share,)), [Shard(dim)])}
            before = read_bytes()
            forebay.load(tmp_path, state)
            found.append((read_bytes() - before, bound))
            assert torch.equal(state["w"].to_local(), matrix.chunk(share, dim)[rank])
        return found

    for of_rank in run_ranks(share, load):
        for read, bound in of_rank:
            assert read <= bound * 1.02 + 65536, (share, width, of_rank)


def test_ranks_read_large_states_in_many_rounds(tmp_path: Path) -> None:
    """200 MiB, half of them read by each rank: four rounds in the same two halves of its memory."""
    state = {name: torch.arange(25 << 20, dtype=torch.int32) + number for number, name in enumerate("ab")}
    forebay.save(state, tmp_path, step=3)

    def restore(rank: int) -> Any:
        live = {name: torch.zeros_like(value) for name, value in state.items()}
        before = read_bytes()
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.restore(live)
        assert all(torch.equal(live[name], state[name]) for name in state)
        return read_bytes() - before

    for read in run_ranks(2, restore, with_gloo=False):
        assert 100 << 20 <= read <= 102 << 20, read


def test_what_ranks_read_together_is_checked_and_left_together(tmp_path: Path) -> None:
    for step in (1, 2):
        forebay.save({"w": torch.full((64, 64), step), "n": step}, tmp_path, step=step)
    body = body_of(tmp_path, 2)
    shard = tmp_path / body["shards"][0]["key"]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    def restore(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        state = {"w": distribute_tensor(torch.zeros(64, 64, dtype=torch.int64), mesh, [Shard(1)]), "n": 0}
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            with pytest.warns(forebay.CheckpointWarning, match="step 1 is used instead"):
                assert checkpointer.restore(state) == 1
            assert bool((state["w"].to_local() == 1).all()) and state["n"] == 1
            # What does not fit on one rank is told on all, and the ranks go on together.
            other = torch.zeros(64, 64 + rank, dtype=torch.int64)
            with pytest.raises(forebay.CheckpointError, match="was saved, the state has"):
                checkpointer.restore({"w": other, "n": 0}, step=1)
            assert checkpointer.restore(state, step=1) == 1
        return True

    assert run_ranks(2, restore) == [True, True]


def read_bytes() -> int:
    """Bytes that this process has read so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
