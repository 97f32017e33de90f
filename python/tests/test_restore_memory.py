"""A restore in place takes little memory beside the state, however large that is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Optional

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import forebay
import forebay.dcp
from forebay import _native
from forebay._loading import newest_steps
from forebay._pieces import BUFFER_BYTES

from .test_ranks import run_ranks

MIB = 1 << 20
IN_FLIGHT = 64 * MIB
"""What a restore may have of what it asked of a store: a quarter of 32 requests of 8 MiB, which arrive in place."""
PIECE = MIB
"""What each thread reads of a folder's files at once."""
PIECES = 16 * PIECE
"""What all of them do: up to 16."""
HALF = 32 * MIB
"""What ranks that read together lend each other, each of them two of it."""
TOGETHER = 6 * HALF
"""What they lend is counted in both of two: a rank has its own twice, to fill it and to copy out of it, and that of the other."""
ASIDE = 64 * MIB
"""What of slices that are only partly wanted is there at once."""
SLACK = 16 * MIB
"""Stacks, what allocators keep, and pages of code that nothing had run before."""


def state_of(size: int, value: int, turned: bool = False) -> dict[str, Any]:
    """Tensors of so many bytes in all, every page of them there; `turned`, their columns lie one behind the other."""
    state = {f"w{index}": torch.full((size // 4,), value + index, dtype=torch.uint8) for index in range(4)}
    return {name: tensor.view(-1, 1 << 12).t() for name, tensor in state.items()} if turned else state


def memory(what: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) << 10


def taken(ranks: int, place: Any, size: int, turned: bool = False, threads: Optional[int] = None) -> list[int]:
    """What each of the ranks had at most while it restored all of a state, beyond what it had with the state before."""
    forebay.save(state_of(4, 0), f"{place}-small", step=1)
    forebay.save(state_of(size, 1, turned), place, step=1)

    def work(rank: int) -> int:
        state = state_of(size, 100, turned)
        # What the first call of anything takes is not the restore's.
        with forebay.Checkpointer(f"{place}-small") as checkpointer:
            assert checkpointer.restore(state_of(4, 0)) == 1
        # The kernel forgets the most that there was.
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmHWM")
        with forebay.Checkpointer(place, copy_threads=threads) as checkpointer:
            assert checkpointer.restore(state) == 1
            assert checkpointer.restored is not None and checkpointer.restored.tier == "store"
        peak = memory("VmHWM")
        assert all(bool((state[f"w{index}"] == 1 + index).all()) for index in range(4))
        return peak - before

    return run_ranks(ranks, work, with_gloo=False)


def expect(most: int, bound: int, own: int) -> None:
    """That a rank took no more than so much beside its own state, which is more: a second copy of it would be seen."""
    assert bound < own, (bound, own)
    assert most <= bound, most


def peak_of(work: Any) -> int:
    """What this process had at most while it did that, beyond what it had before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmHWM")
    work()
    return memory("VmHWM") - before


@pytest.mark.parametrize("threads", [None, 16])
def test_a_restore_from_a_folder(tmp_path: Path, threads: Optional[int]) -> None:
    (most,) = taken(1, tmp_path / "run", 128 * MIB, threads=threads)
    expect(most, PIECES + SLACK, 128 * MIB)


@pytest.mark.parametrize("threads", [None, 16])
def test_a_restore_from_s3(s3_endpoint: str, threads: Optional[int]) -> None:
    (most,) = taken(1, f"s3://checkpoints/memory-{time.time_ns()}", 128 * MIB, threads=threads)
    expect(most, IN_FLIGHT + SLACK, 128 * MIB)


def test_a_restore_of_ranks_that_read_together(tmp_path: Path) -> None:
    """Both want all of the state, and each reads half of it."""
    for most in taken(2, tmp_path / "run", 288 * MIB):
        expect(most, TOGETHER + PIECES + SLACK, 288 * MIB)


def test_a_restore_into_memory_that_cannot_be_read_into(tmp_path: Path) -> None:
    """Strided memory, as a device's, is filled out of one buffer."""
    (most,) = taken(1, tmp_path / "run", 128 * MIB, turned=True)
    expect(most, BUFFER_BYTES + PIECES + SLACK, 128 * MIB)


def test_a_load_by_dcp(tmp_path: Path) -> None:
    """By one process, and by two that read together what both want."""
    size, small = 288 * MIB, tmp_path / "small"
    forebay.save(state_of(4, 0), small, step=1)
    forebay.save(state_of(size, 1), tmp_path, step=1)

    def load(state: dict[str, Any], place: Path) -> None:
        dcp.load(state, storage_reader=forebay.dcp.Reader(place))

    def work(rank: int) -> int:
        state = state_of(size, 100)
        load(state_of(4, 0), small)
        most = peak_of(lambda: load(state, tmp_path))
        assert all(bool((state[f"w{index}"] == 1 + index).all()) for index in range(4))
        return most

    (alone,) = run_ranks(1, work)
    expect(alone, PIECES + SLACK, size)
    for most in run_ranks(2, work):
        expect(most, TOGETHER + PIECES + SLACK, size)


def test_a_state_of_another_number_of_ranks(tmp_path: Path) -> None:
    """Saved by four as rows, and restored by two as columns: each wants a part of each slice that there is."""
    rows, width = 4096, 128 << 10

    def spread(size: int, value: int, place: Shard, width: int = width) -> DTensor:
        mesh = init_device_mesh("cpu", (size,))
        mine = rows // size if place.dim == 0 else rows, width // size if place.dim == 1 else width
        local = torch.full(mine, value, dtype=torch.uint8)
        return DTensor.from_local(local, mesh, [place], run_check=False)

    def save(rank: int) -> None:
        for place, wide in (("run", width), ("small", 8)):
            with forebay.Checkpointer(tmp_path / place, rng=False) as checkpointer:
                checkpointer.save_now(1, {"w": spread(4, rank + 1, Shard(0), wide)})

    def restore(rank: int) -> int:
        state, first = {"w": spread(2, 0, Shard(1))}, {"w": spread(2, 0, Shard(1), 8)}
        with forebay.Checkpointer(tmp_path / "small", rng=False) as checkpointer:
            assert checkpointer.restore(first) == 1
        with forebay.Checkpointer(tmp_path / "run", rng=False) as checkpointer:
            most = peak_of(lambda: checkpointer.restore(state))
            assert checkpointer.restored is not None and checkpointer.restored.tier == "store"
        by_rank = state["w"].to_local().view(4, rows // 4, -1)
        assert all(bool((by_rank[rank] == rank + 1).all()) for rank in range(4))
        return most

    run_ranks(4, save)
    for most in run_ranks(2, restore):
        expect(most, TOGETHER + PIECES + SLACK, rows * width // 2)


def test_columns_of_one_tensor(tmp_path: Path) -> None:
    """A part of each of its slices: these are read whole, a few at a time, whatever the tensor's size."""
    size, place = 384 * MIB, f"file://{tmp_path}"
    forebay.save({"w": torch.arange(size // 4, dtype=torch.int32).view(-1, 1 << 10)}, place, step=1)
    ((number, incarnation, attempt),) = newest_steps(place)
    step = _native.open_step(place, number, incarnation, attempt)
    (index,) = [index for index, (name, *_) in enumerate(step.tensors()) if name == "w"]
    columns = torch.zeros(size >> 12, 256, dtype=torch.int32)
    wanted = (index, ([0, 256], [size >> 12, 256]), columns.data_ptr(), columns.nbytes)
    columns.fill_(-1)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmHWM")
    threads = 2
    step.read([wanted], threads)
    taken = memory("VmHWM") - before
    assert torch.equal(columns[:, 0], torch.arange(size >> 12, dtype=torch.int32) * 1024 + 256)
    assert bool((columns[:, 1:] - columns[:, :-1] == 1).all())
    expect(taken, ASIDE + threads * PIECE + SLACK, columns.nbytes)


def test_ranks_that_read_together_fill_strided_memory(tmp_path: Path) -> None:
    """Out of what they lend each other, through one buffer more than dense memory takes."""
    for most in taken(2, tmp_path / "run", 288 * MIB, turned=True):
        expect(most, TOGETHER + BUFFER_BYTES + PIECES + SLACK, 288 * MIB)


def test_an_array_without_dimensions_that_has_two_names_is_filled_by_ranks_together(tmp_path: Path) -> None:
    forebay.save({"a": numpy.array(3.0), "b": numpy.array(3.0)}, tmp_path, step=1)

    def work(rank: int) -> float:
        array = numpy.array(0.0)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore({"a": array, "b": array}) == 1
        return float(array)

    assert run_ranks(2, work, with_gloo=False) == [3.0, 3.0]
