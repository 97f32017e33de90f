"""What one rank's failure in a restore leaves on the others: nothing half new, nobody waiting, and the cause told."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay._pieces import Pieces
from forebay._ranks import Ranks

from .test_ranks import body_of, run_ranks

State = dict[str, Any]


def damage(place: Path, step: int, name: str) -> None:
    """One byte of a tensor."""
    body = body_of(place, step)
    (found,) = [tensor for tensor in body["tensors"] if tensor["name"] == name]
    shard = place / body["shards"][found["slices"][0]["shard"]]["key"]
    data = bytearray(shard.read_bytes())
    data[found["slices"][0]["start"]] ^= 1
    shard.write_bytes(data)


def saved(place: Path, states: dict[int, State]) -> None:
    """By two ranks, each with a tensor of its own."""

    def save(rank: int) -> None:
        with forebay.Checkpointer(place, every=1, rng=False) as checkpointer:
            for step, state in states.items():
                own = torch.full((1000,), step * (rank + 1))
                save = checkpointer.step(step, {"own": own, **state})
                assert save is not None and save.wait_durable(60)

    run_ranks(2, save, with_gloo=False)


def blank() -> State:
    return {"own": torch.zeros(1000, dtype=torch.int64), "best": None, "log": [], "n": 0}


def test_no_rank_is_filled_before_all_have_read(tmp_path: Path) -> None:
    """Rank 0 had the newer step's values already, into which the older one did not fit."""
    first = {"best": None, "log": [], "n": 1}
    saved(tmp_path, {1: first, 2: {"best": torch.ones(3), "log": [4], "n": 2}})
    damage(tmp_path, 2, "own@1")

    def restore(rank: int) -> Any:
        state = blank()
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            with pytest.warns(forebay.CheckpointWarning, match="step 1 is used instead"):
                assert checkpointer.restore(state) == 1
        assert state.pop("own").tolist() == [rank + 1] * 1000
        return state

    assert run_ranks(2, restore, with_gloo=False) == [first] * 2


def test_what_is_damaged_for_one_rank_changes_no_other_ones_values(tmp_path: Path) -> None:
    saved(tmp_path, {1: {"best": None, "log": [3], "n": 1}})
    damage(tmp_path, 1, "own@1")

    def restore(rank: int) -> Any:
        state = blank()
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            with pytest.raises(forebay.CheckpointCorrupt):
                checkpointer.restore(state)
        del state["own"]
        return state

    assert run_ranks(2, restore, with_gloo=False) == [{"best": None, "log": [], "n": 0}] * 2


@pytest.mark.parametrize("where", ["lend", "read", "pieces"])
def test_what_fails_on_one_rank_is_told_to_the_others_at_once(tmp_path: Path, where: str) -> None:
    """They waited for as long as ranks are waited for, and were told that it was somewhere else."""
    patience = 300

    def state() -> State:
        # Both want all of it.
        return {"w": torch.arange(3 << 20), "turned": torch.zeros(300, 200).t()}

    forebay.save(state(), tmp_path, step=1)

    def fail(*args: Any) -> None:
        raise forebay.CheckpointNoSpace("no room for it")

    def restore(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, patience=patience) as checkpointer, pytest.MonkeyPatch.context() as patch:
            if rank == 1 and where == "lend":
                patch.setattr(Ranks, "lend", fail)
            elif rank == 1 and where == "read":
                patch.setattr(Pieces, "take", fail)
            elif rank == 1:
                patch.setattr("forebay._tensors.Pieces", fail)
            begun = time.monotonic()
            with pytest.raises(forebay.CheckpointNoSpace, match="no room for it"):
                checkpointer.restore(state())
            assert time.monotonic() - begun < patience / 2, "nobody was waited for"
            patch.undo()
            # All are where they were, and go on.
            again = state()
            again["w"].zero_()
            assert checkpointer.restore(again) == 1
            return bool((again["w"] == state()["w"]).all())

    assert run_ranks(2, restore, with_gloo=False) == [True, True]


def test_generators_that_one_rank_cannot_set_are_told_to_all_and_stay(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        with forebay.Checkpointer(tmp_path) as checkpointer:
            save = checkpointer.save_now(1, {"n": 1})
            assert save is not None and save.wait_durable(60)

    run_ranks(2, save, with_gloo=False)

    def restore(rank: int) -> Any:
        random.seed(rank)
        before = random.getstate()
        with forebay.Checkpointer(tmp_path) as checkpointer, pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                real = torch.set_rng_state
                fails = iter([True, False])

                def refuse(state: Any) -> None:
                    if next(fails):
                        raise RuntimeError("it takes none")
                    real(state)

                patch.setattr(torch, "set_rng_state", refuse)
            with pytest.raises(forebay.CheckpointCorrupt, match="it takes none"):
                checkpointer.restore({"n": 0})
            assert checkpointer.steps() == [1]
        return rank == 0 or random.getstate() == before

    assert run_ranks(2, restore, with_gloo=False) == [True, True]


def test_a_state_that_was_read_into_before_another_error_is_told(tmp_path: Path) -> None:
    """A program that takes a mismatch for a fresh start trained on what a damaged step had left."""
    forebay.save({"w": torch.zeros(3)}, tmp_path, step=1)
    forebay.save({"w": torch.ones(3), "v": torch.arange(5.0)}, tmp_path, step=2)
    damage(tmp_path, 2, "v")
    state = {"w": torch.full((3,), 7.0), "v": torch.zeros(5)}
    with pytest.raises(forebay.CheckpointMismatch, match="lacks 'v'.*changed in part.*Before: .*damaged"):
        forebay.load(tmp_path, state)


def test_a_state_that_nothing_was_read_into_is_not_called_changed(tmp_path: Path) -> None:
    forebay.save({"w": torch.zeros(3)}, tmp_path, step=1)
    forebay.save({"w": torch.ones(3), "v": torch.arange(5.0)}, tmp_path, step=2)
    (manifest,) = tmp_path.glob(f"steps/{2:020}/*.json")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(forebay.CheckpointMismatch) as raised:
        forebay.load(tmp_path, {"w": torch.zeros(3), "v": torch.zeros(5)})
    assert "changed" not in str(raised.value)


def test_a_rank_within_all_others_leaves_with_the_outermost() -> None:
    """Where ranks fail at different depths in one round, each of the others leaves as far as the farthest did."""
    rounds: list[str] = []

    class Group:
        """What three ranks say, of which this is the first."""

        def gather(self, text: str, patience_s: float) -> list[str]:
            rounds.append(json.loads(text)["act"])
            failed = {"failed": "no", "kind": "CheckpointNoSpace"}
            return [text, *(json.dumps({"act": act, "facts": failed}) for act in ("middle", "outer"))]

    ranks = Ranks("file:///none", (0, 3), 1)
    ranks._group = Group()  # type: ignore[assignment]

    def within(acts: list[str]) -> dict[str, Any]:
        if acts:
            ranks.gather(acts[0], lambda: within(acts[1:]))
        return {}

    with pytest.raises(forebay.CheckpointNoSpace, match="rank 1 failed to middle: no"):
        within(["before", "outer", "middle", "inner"])
    assert rounds == ["inner", "before"]
