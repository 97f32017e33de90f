"""`dcp.async_save` staged into the memory that is uploaded: real torch, one process and two."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import forebay
import forebay.dcp
from forebay import _native

from .test_dcp import Unsavable, clear, everything, numbers, plain, run_at, whole


@pytest.fixture(autouse=True)
def silence() -> Any:
    """torch warns of what it is told here: that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class Odd(torch.Tensor):
    """A tensor of a kind that only torch's stagers know."""


def count_copies(monkeypatch: Any) -> list[int]:
    """The step of each snapshot that a writer filled by a copy of its own."""
    copied: list[int] = []
    inner = forebay.dcp._copy

    def count(checkpointer: Any, step: int, leaves: Any) -> Any:
        copied.append(step)
        return inner(checkpointer, step, leaves)

    monkeypatch.setattr(forebay.dcp, "_copy", count)
    return copied


def save(writer: forebay.dcp.Writer, stager: forebay.dcp.Stager, state: Any, step: int) -> Any:
    return dcp.async_save(state, checkpoint_id=step, storage_writer=writer, async_stager=stager)


@pytest.mark.parametrize("size", [1, 2])
def test_a_save_is_copied_once_and_holds_what_was_when_it_was_begun(tmp_path: Path, size: int) -> None:
    def work(rank: int) -> list[int]:
        with pytest.MonkeyPatch.context() as patch, forebay.dcp.Writer(tmp_path, keep=2) as writer:
            copied, stager = count_copies(patch), forebay.dcp.Stager(writer)
            assert isinstance(stager, AsyncStager) and not stager.should_synchronize_after_execute
            state: dict[str, Any] = {"n": 0, "none": None, "deep": [{"lr": 0.5}]}
            if size == 1:
                state.update(plain=plain(), tied=numbers(4, 4))
                state["again"] = state["tied"]
            else:
                mesh = init_device_mesh("cpu", (size,))
                state["rows"] = distribute_tensor(numbers(9, 4), mesh, [Shard(0)])
                state["few"] = distribute_tensor(numbers(1, 4), mesh, [Shard(0)])
                state["columns"] = distribute_tensor(numbers(6, 10), mesh, [Shard(1)])
                state["own"] = {str(rank): numbers(7, seed=rank)}
            for step in (10, 20, 30):
                state["n"] = step
                before = whole(copy.deepcopy(state))
                saved = save(writer, stager, state, step)
                clear(state)
                saved.result()
                loaded = copy.deepcopy(state)
                state = loaded
                dcp.load(loaded, storage_reader=forebay.dcp.Reader(tmp_path))
                assert whole(loaded) == before, step
            stager.close()
            return copied

    assert run_at(size, work) == [[]] * size, "the writer copies nothing"
    assert sorted(step for step, *_ in _native.list_steps(f"file://{tmp_path}"))[-2:] == [20, 30]
    assert _native.verify(f"file://{tmp_path}", None) == []
    assert forebay.load(tmp_path)["n"] == 30


@pytest.mark.parametrize("size", [1, 2])
def test_all_kinds_of_state_are_staged(tmp_path: Path, size: int) -> None:
    def work(rank: int) -> None:
        state, expected = everything(1, size > 1), whole(everything(1, size > 1))
        with forebay.dcp.Writer(tmp_path) as writer:
            stager = forebay.dcp.Stager(writer)
            for step in (1, 2):
                saved = save(writer, stager, state, step)
                saved.result()
        loaded = everything(2, size > 1)
        dcp.load(loaded, storage_reader=forebay.dcp.Reader(tmp_path))
        assert whole(loaded) == expected

    run_at(size, work)
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_what_two_ranks_hold_is_written_once(tmp_path: Path) -> None:
    def work(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.MonkeyPatch.context() as patch, forebay.dcp.Writer(tmp_path) as writer:
            copied, stager = count_copies(patch), forebay.dcp.Stager(writer)
            for step in (1, 2):
                both = distribute_tensor(torch.full((50, 2), float(step)), mesh, [Replicate()])
                rows = distribute_tensor(torch.full((50, 2), float(step)), mesh, [Shard(0)])
                state = {"both": both, "rows": rows, "plain": torch.full((9,), step)}
                saved = save(writer, stager, state, step)
                clear(state)
                saved.result()
            return copied

    copied = run_at(2, work)
    assert any(copied), "what torch has another rank write is left out by a copy"
    loaded = forebay.load(tmp_path)
    assert all(bool((loaded[name] == 2).all()) for name in ("both", "rows", "plain"))
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_without_a_free_slot_or_with_other_tensors_torchs_stager_is_used(tmp_path: Path) -> None:
    with forebay.dcp.Writer(tmp_path) as writer:
        stager = forebay.dcp.Stager(writer)
        session = writer._checkpointer_to_stage()._session
        taken = [session.begin([("x", "uint8", [4000], None)], 1, 0.0) for _ in range(2)]
        state = {"t": torch.ones(1000)}
        staged = stager.stage(state)
        assert writer._staged is None and staged["t"].data_ptr() != state["t"].data_ptr()
        for snapshot in taken:
            assert snapshot is not None
            session.abandon(snapshot)
        staged = stager.stage({"s": torch.eye(3).as_subclass(Odd), "t": torch.ones(3)})
        assert writer._staged is None and torch.equal(staged["t"], torch.ones(3))
        save(writer, stager, state, 1).result()
    assert torch.equal(forebay.load(tmp_path)["t"], torch.ones(1000))


def test_a_save_that_came_to_nothing_leaves_the_next_alone(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with forebay.dcp.Writer(tmp_path) as writer:
            stager = forebay.dcp.Stager(writer)
            for step, bad in [(1, 1), (2, None), (3, 0), (3, None)]:
                value = torch.full((100, 2), float(10 * step + (bad is None)))
                state = {f"own{rank}": Unsavable() if rank == bad else rank}
                state["w"] = distribute_tensor(value, mesh, [Shard(0)])
                saved = save(writer, stager, state, step)
                if bad is None:
                    saved.result()
                    continue
                with pytest.raises(BaseException, match="Unsavable cannot be saved"):
                    saved.result()

    run_at(2, work)
    assert sorted(step for step, *_ in _native.list_steps(f"file://{tmp_path}")) == [2, 3]
    for step in (2, 3):
        assert bool((forebay.load(tmp_path, step=step)["w"] == 10 * step + 1).all())
    assert _native.verify(f"file://{tmp_path}", None) == []
