"""Tensor parallelism as torch does it, alone and beneath FSDP2: saved on one mesh and loaded on others, and alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (slow: before any fork)
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import forebay
import forebay.dcp
from forebay import _native

from .conftest import SCALE
from .test_ranks import body_of, run_ranks
from .test_reading import read_bytes

BESIDES = 40 << 10
"""Bytes that a rank reads beside tensors: the list of steps, the manifest, torch's plan on its way between ranks."""

SLICE = 128 << 10
"""Bytes of the largest part of a tensor that several ranks want and one of them reads for all."""

WAYS = ("own", "dcp")

WIDTH, INNER, WORDS, CLASSES = 256, 1024, 301, 11
"""Of the model; neither words nor classes are divided evenly."""


class Block(torch.nn.Module):
    """What a transformer's block has of layers that are spread in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, INNER)
        self.down = torch.nn.Linear(INNER, WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        given = self.words(words)
        return self.head(given + self.down(torch.nn.functional.gelu(self.up(self.norm(given)))))


def spread(model: Block, mesh: Any) -> None:
    """Tensor parallel: columns, rows, and a norm over parts of the sequence."""
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"up": ColwiseParallel()})


def parts(layout: str, seed: int) -> dict[str, Any]:
    """A model, on the mesh that is meant, and an optimizer that made no step yet."""
    torch.manual_seed(seed)
    model, size = Block(), dist.get_world_size() if dist.is_initialized() else 1
    if layout == "tp":
        spread(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif layout == "both":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tp"))
        spread(model, mesh["tp"])
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh["data"])
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights and moments, by name, as this rank has them."""
    found = {}
    for name, parameter in state["model"].named_parameters():
        found[name] = parameter.detach()
        moments = state["optim"].state.get(parameter, {})
        found |= {f"{name}.{key}": value for key, value in moments.items()}
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def states(state: dict[str, Any]) -> dict[str, Any]:
    named, moments = get_state_dict(state["model"], state["optim"])
    return {"model": named, "optim": moments}


def save(layout: str, place: Path) -> None:
    """Saves a model that was trained, in both ways, and beside it the whole tensors."""
    state = parts(layout, 1)
    for _ in range(2):
        state["model"](torch.randint(WORDS, (2, 8))).square().mean().backward()
        state["optim"].step()
        state["optim"].zero_grad()
    with forebay.Checkpointer(place / "own", rng=False) as checkpointer:
        checkpointer.save_now(2, state)
    with forebay.dcp.Writer(place / "dcp") as writer:
        dcp.save(states(state), checkpoint_id=2, storage_writer=writer)
    expected = {name: whole(tensor).clone() for name, tensor in tensors(state).items()}
    if dist.get_rank() == 0:
        torch.save(expected, place / "expected.pt")


def restore(place: Path, way: str, state: dict[str, Any]) -> int:
    """Restores natively, and gives the bytes that were read."""
    before = read_bytes()
    with forebay.Checkpointer(place / way, rng=False) as checkpointer:
        assert checkpointer.restore(state) == 2
        return read_bytes() - before


def load(place: Path, way: str, state: dict[str, Any]) -> int:
    """The same through torch's own."""
    found = states(state)
    before = read_bytes()
    dcp.load(found, storage_reader=forebay.dcp.Reader(place / way))
    fetched = read_bytes() - before
    model, optim = found["model"], found["optim"]
    set_state_dict(state["model"], state["optim"], model_state_dict=model, optim_state_dict=optim)
    return fetched


Case = tuple[Path, Callable[..., int], str]
Reading = tuple[str, int, int]
"""What was done, bytes that were read, and bytes that were wanted."""


def brought(layout: str, *cases: Case) -> list[Reading]:
    """What a rank read, on this mesh, of what was saved on others; what it has then is all there."""
    state, readings = parts(layout, 7), []
    # The optimizer gets its state, and Python reads the sources of what torch warns of by that.
    states(state)
    for place, act, way in cases:
        where = f"{layout} of {place.name}/{way} by {act.__name__}"
        for tensor in tensors(state).values():
            local(tensor).fill_(math.nan)
        fetched = act(place, way, state)
        found, expected = tensors(state), torch.load(place / "expected.pt")
        assert found.keys() == expected.keys(), where
        wrong = [name for name in expected if not torch.equal(whole(found[name]), expected[name])]
        assert wrong == [], where
        readings.append((where, fetched, sum(local(tensor).nbytes for tensor in found.values())))
    return readings


def check(ranks: list[list[Reading]]) -> None:
    """Each rank read little more than its part, and all together no more than that."""
    for of_ranks in zip(*ranks):
        fetched, wanted = (sum(reading[part] for reading in of_ranks) for part in (1, 2))
        assert fetched <= 1.02 * wanted + len(ranks) * BESIDES, of_ranks
        for where, own, need in of_ranks:
            assert own <= 1.02 * need + BESIDES + (SLICE if len(ranks) > 1 else 0), where


def test_any_mesh_is_restored_on_any_other(tmp_path: Path) -> None:
    """FSDP2 x TP 2 x 2 becomes TP 2, FSDP2 4, alone, TP 2 becomes 2 x 2 and alone; in long runs FSDP2 2 and TP 4 too.

    Natively and through torch's own; in long runs what the one saved is loaded by the other as well.
    """
    both, tp = tmp_path / "both", tmp_path / "tp"

    def ways(place: Path) -> list[Case]:
        alike: list[Case] = [(place, restore, "own"), (place, load, "dcp")]
        return alike if SCALE == 1 else [*alike, (place, restore, "dcp"), (place, load, "own")]

    def save_of_four(rank: int) -> None:
        save("both", both)

    def of_two(rank: int) -> list[Reading]:
        readings = brought("tp", *ways(both))
        if SCALE > 1:
            readings += brought("fsdp", *ways(both))
        save("tp", tp)
        return readings

    def of_four(rank: int) -> list[Reading]:
        readings = brought("both", *ways(tp)) + brought("fsdp", *ways(both))
        if SCALE > 1:
            readings += brought("tp", *ways(both), *ways(tp))
            readings += brought("fsdp", *ways(tp)) + brought("both", *ways(both))
        return readings

    for place in (both, tp):
        place.mkdir()
    run_ranks(4, save_of_four)
    check(run_ranks(2, of_two))
    check(run_ranks(4, of_four))
    check([brought("alone", *ways(both), *ways(tp))])
    for place, size in ((both, 4), (tp, 2)):
        for way in WAYS:
            body = body_of(place / way, 2)
            assert body["world_size"] == size == len(body["shards"])
            stored = sum(part["end"] - part["start"] for tensor in body["tensors"] for part in tensor["slices"])
            needed = sum(tensor.nbytes for tensor in torch.load(place / "expected.pt").values())
            assert stored <= needed + 65536, "each element is stored once"
            assert _native.verify(f"file://{place / way}", None) == []
