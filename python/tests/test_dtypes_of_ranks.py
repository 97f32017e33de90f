"""Every element type that torch has, spread over ranks, comes back at other sizes bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import forebay
from forebay import _native

from .test_ranks import body_of, run_ranks
from .test_roundtrip import DTYPES, REFUSED, SAVED, filled, raw, same

SHAPE = (5, 6, 3)
"""Neither two nor four ranks cut it evenly."""
PLACES: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def part(whole: torch.Tensor, place: Placement, mesh: DeviceMesh) -> torch.Tensor:
    """What of a tensor this rank has, in memory of its own. By bytes alone: torch copies and cuts not every type."""
    if not isinstance(place, Shard):
        data, shape = raw(whole), whole.shape
    else:
        rank, size = mesh.get_local_rank(), mesh.size()
        each = -(-whole.shape[place.dim] // size)
        start, end = (min(edge * each, whole.shape[place.dim]) for edge in (rank, rank + 1))
        bits = torch.frombuffer(bytearray(raw(whole)), dtype=torch.uint8).view(*whole.shape, whole.element_size())
        cut = bits.narrow(place.dim, start, end - start).contiguous()
        data, shape = bytes(cut.flatten().tolist()), cut.shape[:-1]
    if not data:
        return torch.empty(shape, dtype=whole.dtype)
    return torch.frombuffer(bytearray(data), dtype=whole.dtype).view(shape)


def spread(wholes: dict[str, torch.Tensor], other_values: bool = False) -> dict[str, Any]:
    """Each tensor as a DTensor of this job in each of the places, or with its bytes inverted."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for dtype, whole in wholes.items():
        for name, place in PLACES.items():
            local = part(filled(dtype, SHAPE, 1) if other_values else whole, place, mesh)
            stride = (SHAPE[1] * SHAPE[2], SHAPE[2], 1)
            state[f"{dtype}.{name}"] = DTensor.from_local(
                local, mesh, [place], run_check=False, shape=torch.Size(SHAPE), stride=stride
            )
    return state


def differing(state: dict[str, Any], wholes: dict[str, torch.Tensor]) -> list[str]:
    """The DTensors whose part here is not what it was."""
    found = []
    for key, value in state.items():
        dtype, name = key.split(".")
        if not same(value.to_local(), part(wholes[dtype], PLACES[name], value.device_mesh)):
            found.append(key)
    return found


@pytest.mark.filterwarnings("ignore")  # torch speaks of types that are to go, and of some that are new
def test_every_dtype_is_restored_at_other_sizes(tmp_path: Path) -> None:
    wholes = {dtype: filled(dtype, SHAPE) for dtype in SAVED}

    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, spread(wholes))
        return None

    def restore(rank: int) -> Any:
        state = spread(wholes, other_values=True)
        changed = len(differing(state, wholes))
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            assert checkpointer.restore(state) == 1
        return [changed > 0, differing(state, wholes)]

    run_ranks(2, save)
    assert _native.verify(f"file://{tmp_path}", None) == []
    tensors = {tensor["name"]: tensor for tensor in body_of(tmp_path, 1)["tensors"]}
    assert tensors.keys() == {f"{dtype}.{name}" for dtype in SAVED for name in PLACES}
    for key, tensor in tensors.items():
        stored = sum(cut["end"] - cut["start"] for cut in tensor["slices"])
        assert stored == wholes[key.split(".")[0]].nbytes, f"{key}: each element is stored once"
        shards = {cut["shard"] for cut in tensor["slices"]}
        assert len(shards) == 2 or key.endswith("whole"), key
    # What both have is cut between them, as one run of all of these.
    cuts = [{cut["shard"] for cut in tensors[f"{dtype}.whole"]["slices"]} for dtype in SAVED]
    assert {0} in cuts and {1} in cuts and {0, 1} in cuts
    for world_size in (4, 2):
        assert run_ranks(world_size, restore) == [[True, []]] * world_size
    alone = {key: filled(key.split(".")[0], SHAPE, 1) for key in tensors}
    forebay.load(tmp_path, alone)
    assert [key for key in alone if not same(alone[key], wholes[key.split(".")[0]])] == []


@pytest.mark.filterwarnings("ignore")
def test_what_no_rank_can_save_is_what_none_saves_alone() -> None:
    """Quantized tensors are refused by name (`test_roundtrip`), and DTensors of them there are none."""

    def work(rank: int) -> Any:
        mesh, told = init_device_mesh("cpu", (2,)), []
        for dtype in sorted(REFUSED):
            local = torch.empty(4, dtype=getattr(torch, dtype))
            with forebay.Checkpointer("/nowhere", rng=False) as checkpointer:
                try:
                    checkpointer.save_now(1, {"x": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)})
                except TypeError as error:
                    told.append(f"torch.{dtype}" in str(error))
        return told

    assert sorted([*SAVED, *REFUSED]) == DTYPES
    assert run_ranks(2, work) == [[True] * len(REFUSED)] * 2
