"""Steps that store only what changed: few bytes, and a step like any other for whatever reads it."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import forebay
import forebay.dcp
from forebay import _native
from forebay.convert import main

from .test_damage import body_of, flip
from .test_ranks import run_ranks

MIB = 1 << 20


def fine_tuned(step: int) -> dict[str, torch.Tensor]:
    """32 MiB that stay as they are, and 320 KiB that change with each step."""
    frozen = torch.arange(8 * MIB, dtype=torch.float32)
    return {"frozen": frozen, "adapter": torch.arange(80 << 10, dtype=torch.float32) * step}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def stored_by(run: Path, step: int) -> int:
    """Bytes of the shards that a step wrote."""
    return sum(file.stat().st_size for file in (run / f"shards/{step:020}").rglob("*.safetensors"))


def test_a_state_of_which_one_hundredth_changes_uploads_that(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, keep=1, rng=False) as checkpointer:
        for step in range(1, 5):
            checkpointer.save_now(step, {"model": fine_tuned(step), "n": step}).wait_durable()
            stored = stored_by(tmp_path, step)
            whole = sum(tensor.nbytes for tensor in fine_tuned(step).values())
            assert stored == whole + 4096 if step == 1 else 0.009 * whole < stored < 0.011 * whole
    # Old steps go after the commit, and all of them before close() returns.
    assert [step for step, *_ in _native.list_steps(f"file://{tmp_path}")] == [4]
    # What the last step needs of the first is there, and nothing of those between.
    assert [stored_by(tmp_path, step) > 0 for step in range(1, 5)] == [True, False, False, True]
    assert body_of(tmp_path, 4)["parents"] == [1]
    assert same(forebay.load(tmp_path)["model"], fine_tuned(4))
    assert _native.verify(f"file://{tmp_path}", None) == []
    # A start that goes on from nothing begins with a whole step.
    with forebay.Checkpointer(tmp_path, keep=1, rng=False) as checkpointer:
        checkpointer.save_now(5, {"model": fine_tuned(5), "n": 5})
    assert body_of(tmp_path, 5)["parents"] == [] and stored_by(tmp_path, 1) == 0


def test_a_restarted_run_does_not_store_again_what_is_frozen(tmp_path: Path) -> None:
    whole = sum(tensor.nbytes for tensor in fine_tuned(1).values())

    for step in (1, 2, 3):
        with forebay.Checkpointer(tmp_path, keep=1, rng=False) as checkpointer:
            state = {"model": {name: torch.zeros_like(tensor) for name, tensor in fine_tuned(0).items()}, "n": 0}
            assert checkpointer.restore(state) == (step - 1 or None)
            assert step == 1 or same(state["model"], fine_tuned(step - 1))
            checkpointer.save_now(step, {"model": fine_tuned(step), "n": step}).wait_durable()
            assert stored_by(tmp_path, step) > whole if step == 1 else stored_by(tmp_path, step) < 0.011 * whole
            if step == 3:
                # Nor does the next agent, where this one dies.
                os.kill(checkpointer._agent.pid, signal.SIGKILL)
                checkpointer._agent.wait()
                with pytest.warns(forebay.CheckpointWarning, match="ended unexpectedly"):
                    checkpointer.save_now(4, {"model": fine_tuned(4), "n": 4}).wait_durable()
                assert stored_by(tmp_path, 4) < 0.011 * whole
    assert body_of(tmp_path, 4)["parents"] == [1]
    assert same(forebay.load(tmp_path)["model"], fine_tuned(4))
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_what_is_damaged_is_not_referred_to_by_a_start_that_left_it(tmp_path: Path) -> None:
    """A restore that falls back to an older step goes on from that one: the damage does not spread to later steps."""
    for step in (1, 2):
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(step, {"model": fine_tuned(step)})
    flip(tmp_path / body_of(tmp_path, 2)["shards"][0]["key"], -1)
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        state = {"model": fine_tuned(0)}
        with pytest.warns(forebay.CheckpointWarning, match="instead of a newer one that is damaged"):
            assert checkpointer.restore(state) == 1
        checkpointer.save_now(3, {"model": fine_tuned(3)})
    assert body_of(tmp_path, 3)["parents"] == [1]
    assert same(forebay.load(tmp_path, step=3)["model"], fine_tuned(3))


def test_a_shard_that_somebody_deleted_is_missed_by_the_next_save(tmp_path: Path) -> None:
    """As a rule of a bucket by age does: every step from then on needed it, and nobody knew before a restore."""
    whole = sum(tensor.nbytes for tensor in fine_tuned(1).values())
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save_now(step, {"model": fine_tuned(step)}).wait_durable()
        lost = body_of(tmp_path, 1)["shards"][0]["key"]
        (tmp_path / lost).unlink()
        with pytest.warns(forebay.CheckpointWarning, match=f"{lost}.* step 3 is stored whole.* lifecycle rule"):
            checkpointer.save_now(3, {"model": fine_tuned(3)}).wait_durable()
        checkpointer.save_now(4, {"model": fine_tuned(4)}).wait_durable()
    assert stored_by(tmp_path, 3) == whole + 4096 and stored_by(tmp_path, 4) < 0.011 * whole
    assert body_of(tmp_path, 4)["parents"] == [3]
    for step in (3, 4):
        assert same(forebay.load(tmp_path, step=step)["model"], fine_tuned(step))
        assert _native.verify(f"file://{tmp_path}", step) == []


def test_other_numbers_of_ranks_do_not_store_again_what_is_frozen(tmp_path: Path) -> None:
    frozen = torch.arange(8 * MIB, dtype=torch.float32)

    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, keep=1, rng=False, replicated=["frozen"]) as checkpointer:
            state = {"frozen": torch.zeros_like(frozen), "n": torch.zeros(())}
            step = (checkpointer.restore(state) or 0) + 1
            assert step == 1 or torch.equal(state["frozen"], frozen)
            save = checkpointer.save_now(step, {"frozen": frozen, "n": torch.ones(()) * step})
            assert save is not None and save.wait_durable()
        return step

    for step, ranks in enumerate([2, 4, 1, 3], 1):
        assert run_ranks(ranks, save, with_gloo=False) == [step] * ranks
        stored = stored_by(tmp_path, step)
        # At most the pieces that a cut between two ranks goes through, of 64.
        assert stored > frozen.nbytes if step == 1 else stored < frozen.nbytes // 64 * 4 + ranks * 8192, (ranks, stored)
    assert torch.equal(forebay.load(tmp_path)["frozen"], frozen)
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_a_change_inside_of_a_tensor_uploads_its_slice(tmp_path: Path) -> None:
    weight = torch.zeros(1024, 8192)
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        checkpointer.save_now(1, {"w": weight}).wait_durable()
        weight[511, 3] = 7
        checkpointer.save_now(2, {"w": weight}).wait_durable()
    # One of the 64 that the tensor is cut into.
    assert stored_by(tmp_path, 2) == 4096 + weight.nbytes // 64
    assert torch.equal(forebay.load(tmp_path)["w"], weight)


def test_deltas_of_two_ranks_are_restored_by_any_number(tmp_path: Path) -> None:
    frozen = torch.arange(MIB, dtype=torch.float32)

    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, every=1, keep=1, rng=False, replicated=["frozen"]) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.step(step, {"frozen": frozen, "own": torch.full((1000,), step + 10 * rank)})
        return None

    run_ranks(2, save, with_gloo=False)
    body = body_of(tmp_path, 3)
    assert body["parents"] == [1] and len(body["shards"]) == 4
    assert stored_by(tmp_path, 3) < frozen.nbytes // 100

    def restore(rank: int, said: Any) -> Any:
        state = {"frozen": torch.zeros(MIB), "own": torch.zeros(1000, dtype=torch.int64)}
        with said, forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state) == 3
        return [torch.equal(state["frozen"], frozen), state["own"].unique().tolist()]

    assert run_ranks(2, lambda rank: restore(rank, nullcontext()), with_gloo=False) == [[True, [3]], [True, [13]]]
    differ = pytest.warns(forebay.CheckpointWarning, match=r"the 2 ranks that saved differ in state\['own'\]")
    assert run_ranks(1, lambda rank: restore(rank, differ), with_gloo=False) == [[True, [3]]]

    def frozen_alone(rank: int) -> Any:
        state = {"frozen": torch.zeros(MIB)}
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(state, only=["frozen"])
        return torch.equal(state["frozen"], frozen)

    assert run_ranks(3, frozen_alone, with_gloo=False) == [True] * 3
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_damage_in_an_earlier_shard_is_told_of_each_step_that_needs_it(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_now(step, {"model": fine_tuned(step)}).wait_durable()
    shard = tmp_path / body_of(tmp_path, 1)["shards"][0]["key"]
    (frozen,) = [tensor for tensor in body_of(tmp_path, 3)["tensors"] if tensor["name"] == "model.frozen"]
    flip(shard, frozen["slices"][5]["start"])
    told = _native.verify(f"file://{tmp_path}", None)
    key = str(shard.relative_to(tmp_path))
    assert [(step, key) for step in (1, 2, 3)] == [(step, where) for step, where, _ in told]
    assert all("tensor `model.frozen`" in fact for _, _, fact in told)
    with pytest.raises(forebay.CheckpointCorrupt, match="tensor `model.frozen`: bytes .* are damaged"):
        forebay.load(tmp_path, step=3)
    shard.unlink()
    with pytest.raises(forebay.CheckpointCorrupt, match="shards/.*is missing"):
        forebay.load(tmp_path, step=3)


def test_deltas_are_exported_and_read_as_any_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with forebay.Checkpointer(run, keep=1, rng=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save_now(step, {"model": fine_tuned(step)}).wait_durable()
    assert len(body_of(run, 2)["shards"]) == 2
    assert main([str(run), f"hf:{tmp_path / 'out'}"]) == 0
    assert same(load_file(tmp_path / "out/model.safetensors"), fine_tuned(2))
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in fine_tuned(2).items()}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, storage_reader=forebay.dcp.Reader(run))
    assert same(state["model"], fine_tuned(2))


def test_what_dcp_saves_is_a_delta_too(tmp_path: Path) -> None:
    with forebay.dcp.Writer(tmp_path) as writer:
        for step in (1, 2):
            with pytest.warns(UserWarning, match="torch.distributed is disabled"):
                dcp.save(fine_tuned(step), checkpoint_id=step, storage_writer=writer)
    assert body_of(tmp_path, 2)["parents"] == [1]
    assert stored_by(tmp_path, 2) < stored_by(tmp_path, 1) // 50
    manifest = json.dumps(body_of(tmp_path, 2)["tensors"])
    assert '"blake3": "' + "0" * 64 not in manifest
    # And what another job saves that loaded a step.
    state = fine_tuned(0)
    with forebay.dcp.Writer(tmp_path) as writer, pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, storage_reader=forebay.dcp.Reader(tmp_path))
        dcp.save(fine_tuned(3), checkpoint_id=3, storage_writer=writer)
    assert body_of(tmp_path, 3)["parents"] == [1]
    assert stored_by(tmp_path, 3) < stored_by(tmp_path, 1) // 50
