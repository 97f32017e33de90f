"""Tensors of several ranks that lie in one memory: tied weights, views of one matrix, on ranks that have none of it too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  (slow: before any fork)
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forebay
import forebay.dcp
from forebay import _native
from forebay._ties import aliases

from .test_ranks import body_of, run_ranks

State = dict[str, Any]


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def spread(whole: torch.Tensor, *places: Any) -> DTensor:
    return distribute_tensor(whole.clone(), mesh(), places)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def tensors_of(place: Path, step: int) -> list[str]:
    """What is stored; and on all ranks the trees are one."""
    body = body_of(place, step)
    assert [extra["name"] for extra in body["extras"]] == ["state"]
    return sorted(tensor["name"] for tensor in body["tensors"])


def saved(place: Path, size: int, make: Callable[[], Any]) -> list[str]:
    """Saves what `make` gives on so many ranks; the tensors that are stored then."""

    def save(rank: int) -> None:
        with forebay.Checkpointer(place, rng=False) as checkpointer:
            checkpointer.save_now(1, make())

    run_ranks(size, save)
    assert _native.verify(f"file://{place}", None) == []
    return tensors_of(place, 1)


def restored(place: Path, size: int, make: Callable[[], Any], expected: dict[str, torch.Tensor]) -> None:
    """Restores into what `make` gives, natively and through torch's own; `expected` are the whole tensors by name."""

    def compare(state: Any, way: str) -> None:
        for name, value in expected.items():
            holder, *rest = name.split(".", 1)
            held = state[holder]
            found = whole(held.state_dict()[rest[0]] if rest else held)
            assert torch.equal(found.resolve_conj(), value), (way, size, name, found, value)

    def restore(rank: int) -> None:
        state = make()
        with forebay.Checkpointer(place, rng=False) as checkpointer:
            assert checkpointer.restore(state) == 1
        compare(state, "own")
        state = make()
        dcp.load(state, storage_reader=forebay.dcp.Reader(place))
        compare(state, "dcp")

    run_ranks(size, restore)


class Tied(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(5, 3)
        self.body = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        for parameter in self.parameters():
            parameter.data = value + torch.arange(float(parameter.numel())).view(parameter.shape)


def fsdp(value: float = 7) -> State:
    model = Tied(value)
    fully_shard(model, mesh=mesh())
    return {"m": model}


def test_tied_weights_of_which_a_rank_has_nothing(tmp_path: Path) -> None:
    """The step was committed, and no rank could restore it: the one without bytes named a tensor that nobody stored."""
    stored = saved(tmp_path, 4, lambda: fsdp(1))
    assert stored == ["m.body.bias", "m.body.weight", "m.emb.weight"], "what is tied is stored once"
    weight = 1 + torch.arange(15.0).view(5, 3)
    expected = {"m.emb.weight": weight, "m.head.weight": weight, "m.body.weight": 1 + torch.arange(12.0).view(4, 3)}
    for size in (4, 1, 2, 6):
        restored(tmp_path, size, fsdp, expected)
    loaded = forebay.load(tmp_path)["m"]
    assert torch.equal(loaded["emb.weight"], weight) and loaded["head.weight"] is loaded["emb.weight"]


def test_one_tensor_under_several_names(tmp_path: Path) -> None:
    """Also where rank 0 is the one that has nothing of it, and where it is tied in some steps only."""
    value = torch.arange(8.0).view(4, 2)

    def save(rank: int) -> None:
        places = DeviceMesh("cpu", [1, 2, 0]), [Shard(1)]
        columns = slice(*[(2, 2), (0, 1), (1, 2)][rank])
        like = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        one, other = (DTensor.from_local(all[:, columns].clone(), *places, **like) for all in (value, value + 50))
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            for step, second in enumerate([one, other, one.detach()]):
                checkpointer.save_now(step, {"b": one, "b2": second})

    run_ranks(3, save)
    assert _native.verify(f"file://{tmp_path}", None) == []
    assert [tensors_of(tmp_path, step) for step in range(3)] == [["b"], ["b", "b2"], ["b"]]
    for step, second in enumerate([value, value + 50, value]):
        loaded = forebay.load(tmp_path, step=step)
        assert torch.equal(loaded["b"], value) and torch.equal(loaded["b2"], second)
        assert (loaded["b"] is loaded["b2"]) == (step != 1)


def test_several_names_are_restored_into_any_memory(tmp_path: Path) -> None:
    """Into the very structure that was saved, too: that was refused as a part of another tensor."""
    value = torch.arange(8.0).view(4, 2)
    columns, rows = Shard(1), Shard(0)

    def tied(value: torch.Tensor) -> State:
        one = spread(value, columns)
        return {"a": one, "b": one, "c": one.detach()}

    def live(*places: Any) -> State:
        """Each in memory of its own, as it is placed; none for a plain tensor."""
        zeros = torch.zeros(4, 2)
        return {name: zeros.clone() if at is None else spread(zeros, at) for name, at in zip("abc", places)}

    makes = [
        lambda: tied(torch.zeros(4, 2)),
        lambda: live(columns, columns, columns),
        lambda: live(rows, columns, Replicate()),
        lambda: live(None, rows, None),
        lambda: live(rows, None, rows),
    ]
    assert saved(tmp_path, 3, lambda: tied(value)) == ["a"]
    for make in makes:
        restored(tmp_path, 3, make, dict.fromkeys("abc", value))
    for size in (1, 2, 5):
        restored(tmp_path, size, makes[0], dict.fromkeys("abc", value))

    def count(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            for make in makes[:2]:
                checkpointer.restore(make())
                assert checkpointer.restored is not None
                yield checkpointer.restored.bytes

    assert run_ranks(3, lambda rank: [*count(rank)]) == [[16, 16], [16, 16], [0, 0]], "what is here of it is read once"


def test_tied_weights_of_a_module_and_of_its_state_dict(tmp_path: Path) -> None:
    """They are restored in part as well, and into weights that are not tied."""
    weight = 1 + torch.arange(15.0).view(5, 3)

    def apart() -> State:
        model = Tied(7)
        model.head.weight = torch.nn.Parameter(torch.zeros(5, 3))
        fully_shard(model, mesh=mesh())
        return {"m": model}

    def restore(rank: int) -> None:
        for way, make, only in itertools.product(("module", "dict"), (fsdp, apart), (None, ["m.head.*"], ["m.*.weight"])):
            for as_dict in (False, True) if way == "dict" else (False,):
                state = make()
                if as_dict:
                    state = {"m": state["m"].state_dict()}
                with forebay.Checkpointer(tmp_path / way, rng=False) as checkpointer:
                    assert checkpointer.restore(state, only=only) == 1
                held = state["m"] if as_dict else state["m"].state_dict()
                names = ["head.weight"] if make is apart and only == ["m.head.*"] else ["head.weight", "emb.weight"]
                wrong = [name for name in names if not torch.equal(whole(held[name]), weight)]
                assert wrong == [], (way, make, as_dict, only)

    saved(tmp_path / "module", 2, lambda: fsdp(1))
    saved(tmp_path / "dict", 2, lambda: {"m": fsdp(1)["m"].state_dict()})
    for size in (1, 4):
        run_ranks(size, restore)


def test_views_of_one_memory_are_not_tied(tmp_path: Path) -> None:
    """Transposed, conjugated or negated: what came back in the stead of the second was the first."""
    square, row = torch.arange(9.0).view(3, 3), torch.complex(torch.arange(6.0), 10 + torch.arange(6.0)).view(3, 2)
    expected = {"w": square, "turned": square.t(), "c": row, "conj": row.conj().resolve_conj()}
    expected |= {"negative": -square, "both": -row.conj().resolve_conj()}

    def views(square: torch.Tensor, row: torch.Tensor) -> State:
        w, s, c = (spread(value, at) for value, at in ((square, Replicate()), (square, Shard(0)), (row, Shard(0))))
        # torch negates parts of imaginary ones so; of a DTensor it knows no such view.
        negative, both = (torch._neg_view(part) for part in (s.to_local(), c.to_local().conj()))
        like = {"run_check": False, "shape": row.shape, "stride": row.stride()}
        state = {"w": w, "turned": w.t(), "c": c, "conj": c.conj(), "both": DTensor.from_local(both, mesh(), [Shard(0)], **like)}
        like |= {"shape": square.shape, "stride": square.stride()}
        return {**state, "s": s, "negative": DTensor.from_local(negative, mesh(), [Shard(0)], **like)}

    def save(rank: int) -> None:
        with forebay.dcp.Writer(tmp_path / "dcp") as writer:
            dcp.save(views(square, row), checkpoint_id=1, storage_writer=writer)

    assert saved(tmp_path / "own", 2, lambda: views(square, row)) == sorted([*expected, "s"])
    run_ranks(2, save)
    for place in (tmp_path / "own", tmp_path / "dcp"):
        for size in (2, 4):
            restored(place, size, lambda: views(torch.zeros(3, 3), torch.zeros(3, 2) + 0j), expected)
        loaded = forebay.load(place)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_parts_of_one_buffer_are_not_tied_where_a_rank_has_nothing_of_them(tmp_path: Path) -> None:
    """On the last rank both begin where the buffer ends."""

    def save(rank: int) -> None:
        rows = [2, 2, 0][rank]
        buffer = torch.cat([torch.full((rows * 3,), 1.0), torch.full((rows * 3,), 2.0)])
        parts = [buffer[at * rows * 3 :][: rows * 3].view(rows, 3) for at in (0, 1)]
        shape = {"shape": torch.Size([4, 3]), "stride": (3, 1)}
        one, two = (DTensor.from_local(part, mesh(), [Shard(0)], run_check=False, **shape) for part in parts)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, {"one": one, "two": two, "two again": two.detach()})

    run_ranks(3, save)
    assert tensors_of(tmp_path, 1) == ["one", "two"]
    loaded = forebay.load(tmp_path)
    assert bool((loaded["one"] == 1).all() and (loaded["two"] == 2).all()) and loaded["two again"] is loaded["two"]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_that_is_nothing_on_all_ranks(tmp_path: Path, dim: int) -> None:
    """The step was committed, and refused as damaged where the other dimension was spread: nobody stored such a tensor."""

    def make() -> State:
        return {name: spread(torch.zeros(shape), Shard(dim)) for name, shape in {"a": (5, 0), "b": (0, 5), "c": (5, 0)}.items()}

    assert saved(tmp_path, 3, make) == ["a", "b", "c"]
    for size in (3, 2):
        restored(tmp_path, size, make, {"a": torch.zeros(5, 0), "b": torch.zeros(0, 5)})
    assert [list(value.shape) for value in forebay.load(tmp_path).values()] == [[5, 0], [0, 5], [5, 0]]


def test_a_rank_outside_of_a_tensors_mesh(tmp_path: Path) -> None:
    """What torch says of its part there is no box of the tensor: what was saved could not be restored."""
    rows, number = torch.arange(6.0).view(3, 2), torch.tensor(3.0)

    def make(rows: torch.Tensor = 0 * rows, number: torch.Tensor = 0 * number) -> State:
        few = DeviceMesh("cpu", list(range(min(2, dist.get_world_size()))))
        one, same = distribute_tensor(rows.clone(), few, [Shard(0)]), distribute_tensor(number.clone(), few, [Replicate()])
        return {"rows": one, "again": one.detach(), "number": same, "all": spread(rows, Shard(1))}

    def check(rank: int) -> None:
        state = make()
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.prepare(state)
            assert checkpointer.restore(state) == 1
        expected = make(rows, number)
        assert all(torch.equal(state[name].to_local(), expected[name].to_local()) for name in expected)

    assert saved(tmp_path, 3, lambda: make(rows, number)) == ["all", "number", "rows"]
    for size in (3, 4):
        run_ranks(size, check)
    loaded = forebay.load(tmp_path)
    assert torch.equal(loaded["again"], rows) and torch.equal(loaded["number"], number)


def test_a_tensor_that_no_rank_would_store_is_told(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        # A collective of torch's makes them: each rank has both, and one saves both.
        value, own = spread(torch.ones(2, 2), Shard(0)), spread(torch.ones(2), Shard(0))
        state = {"all": value, **({"own": own} if rank == 2 else {})}
        checkpointer = forebay.Checkpointer(tmp_path, rng=False)
        with pytest.raises(forebay.CheckpointInvalid, match="rank 2 has nothing of `own`, and the state of no other rank"):
            checkpointer.save_now(1, state)

    run_ranks(3, save)
    assert not list(tmp_path.glob("steps/*/*"))


def test_names_are_of_one_tensor_where_all_ranks_find_them_so() -> None:
    def check(ranks: list[dict[str, int]], expected: dict[str, str]) -> None:
        assert aliases(ranks) == expected

    check([], {})
    check([{"a": 0, "b": 1}], {})
    check([{"a": 0, "b": 0, "c": 1, "d": 0}], {"b": "a", "d": "a"})
    # A rank that has nothing of them cannot tell them apart, the others can.
    check([{"a": 0, "b": 1, "c": 1}, {"a": 0, "b": 0, "c": 0}], {"c": "b"})
    check([{"a": 0, "b": 0}, {"a": 0, "b": 1}], {})
    # In another order, and on some ranks only.
    check([{"b": 0, "a": 0}, {"a": 0, "b": 0}], {"a": "b"})
    check([{"c": 0}, {"a": 0, "b": 0}], {"b": "a"})
    check([{"a": 0}, {"a": 0, "b": 0}], {})
