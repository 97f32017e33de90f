"""Small tensors that each rank has for itself, and that all have alike, as an optimizer's counts of its steps: saved once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forebay
from forebay import _loading

from .test_ranks import body_of, run_ranks


def names_in(place: Path, step: int) -> list[str]:
    return sorted(tensor["name"] for tensor in body_of(place, step)["tensors"])


def test_what_all_have_alike_is_saved_once_for_as_long_as_it_is_alike(tmp_path: Path) -> None:
    counts = {1: [5.0, 5.0, 5.0], 2: [5.0, 6.0, 5.0], 3: [7.0, 7.0, 7.0]}

    def state(rank: int, count: float) -> dict[str, Any]:
        # Alike on all, never alike, alike and not small, and of one rank alone.
        large = torch.arange(100)
        own = {"alone": torch.tensor(3)} if rank == 1 else {}
        return {"count": torch.tensor(count), "place": torch.tensor(rank), "large": large, **own}

    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, keep=None) as checkpointer:
            for step, given in counts.items():
                assert checkpointer.save_now(step, state(rank, given[rank])) is not None
        return None

    run_ranks(3, save)
    own = ["alone@1", *(f"large@{rank}" for rank in range(3)), *(f"place@{rank}" for rank in range(3))]
    names = {step: [name for name in names_in(tmp_path, step) if not name.startswith("rng")] for step in counts}
    assert names[1] == sorted([*own, "count"])
    # Once they differ each has its own, until the state has other tensors.
    assert names[2] == names[3] == sorted([*own, *(f"count@{rank}" for rank in range(3))])

    def restore(rank: int) -> Any:
        found = {}
        for step in counts:
            live = state(rank, 0.0)
            live["place"].fill_(9)
            with forebay.Checkpointer(tmp_path) as checkpointer:
                assert checkpointer.restore(live, step=step) == step
            found[step] = [live["count"].item(), live["place"].item()]
        return found

    def fill(rank: int) -> Any:
        # What is yet to come takes what each had for itself, however it was saved.
        live = {**state(rank, 0.0), "count": None}
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(live, step=1) == 1
        return live["count"].item()

    assert run_ranks(3, fill) == [5.0] * 3
    found = run_ranks(3, restore)
    for rank, values in enumerate(found):
        assert values == {str(step): [given[rank], rank] for step, given in counts.items()}


def test_the_counts_of_a_sharded_optimizer_are_restored_by_any_number_of_ranks(tmp_path: Path) -> None:
    def made(size: int) -> dict[str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def train(state: dict[str, Any], steps: int) -> None:
        for _ in range(steps):
            state["model"](torch.ones(2, 8)).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    def save(rank: int) -> Any:
        state = made(2)
        train(state, 3)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            assert checkpointer.save_now(1, state) is not None
        train(state, 2)
        return [parameter.full_tensor().flatten().tolist() for parameter in state["model"].parameters()]

    trained = run_ranks(2, save)[0]
    names = names_in(tmp_path, 1)
    assert len(names) == 4 * 4 and not any("@" in name for name in names), names
    body = body_of(tmp_path, 1)
    assert sum(len(tensor["slices"]) for tensor in body["tensors"] if tensor["name"].endswith(".step")) == 4

    def go_on(size: int) -> Any:
        def work(rank: int) -> Any:
            state = made(size)
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                assert checkpointer.restore(state) == 1
            counts = [entry["step"].item() for entry in state["optimizer"].state.values()]
            train(state, 2)
            return counts, [parameter.full_tensor().flatten().tolist() for parameter in state["model"].parameters()]

        return work

    for size in (1, 2, 3):
        for counts, values in run_ranks(size, go_on(size)):
            assert counts == [3.0] * 4
            assert all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(values, trained))


def test_trees_that_are_alike_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators are each rank's own, and so the trees of all that saved were taken for their own, too."""

    def save(rank: int) -> Any:
        state = {"count": torch.tensor(5.0), "place": torch.tensor(int(rank == 3))}
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.save_now(1, state) is not None
        return None

    run_ranks(4, save)
    assert {f"place@{rank}" for rank in range(4)} < set(names_in(tmp_path, 1))
    looked: list[int] = []
    merged = _loading.merged

    def look(trees: list[tuple[int, Any]], *how: Any) -> Any:
        looked.append(len(trees))
        # What they say alike is in memory once.
        assert len({id(dict(tree["v"])["count"]) for _, tree in trees}) == 1
        return merged(trees, *how)

    monkeypatch.setattr(_loading, "merged", look)
    live = {"count": torch.tensor(0.0)}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(live, only=["count"]) == 1 and live["count"].item() == 5.0
    # Those of four ranks that have a place of their own.
    assert looked and set(looked) == {4}

    def save_alike(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.save_now(2, {"count": torch.tensor(6.0)}) is not None
        return None

    run_ranks(4, save_alike)
    assert any(name.startswith("rng") and name.endswith("@3") for name in names_in(tmp_path, 2))
    looked.clear()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(live) == 2 and live["count"].item() == 6.0
    assert looked and set(looked) == {1}
