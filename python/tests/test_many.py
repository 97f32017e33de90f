"""States of thousands of tensors, whose manifests are packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _native

from .test_ranks import run_ranks

COUNT = 2000


def state_of(rank: int, value: float) -> dict[str, Any]:
    return {f"tensor{index}": torch.full((3,), value + index + rank / 2) for index in range(COUNT)}


def manifests(place: Path) -> list[Path]:
    return sorted(place.glob("steps/*/*.json"))


def test_steps_of_thousands_of_tensors_are_packed_and_are_steps_like_others(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, keep=2) as checkpointer:
            for step in (1, 2, 3):
                save = checkpointer.save_now(step, state_of(rank, step))
                assert save is not None and save.wait_durable()
        return None

    run_ranks(2, save)
    found = manifests(tmp_path)
    assert [int(path.parent.name) for path in found] == [2, 3], "retention reads them"
    for path in found:
        line, packed = path.read_bytes().split(b"\n", 1)
        head = json.loads(line)
        assert (head["format"], head["version"]) == ("forebay-checkpoint", 2)
        # Of two times as many slices.
        assert len(line) + len(packed) < 2 * COUNT * 90
    assert not list((tmp_path / "ranks").rglob("*.json")), "indexes go with the commit"
    assert _native.verify(f"file://{tmp_path}", None) == []

    def restore(rank: int) -> Any:
        live = state_of(rank, 0.0)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(live) == 3
        return all(torch.equal(live[name], tensor) for name, tensor in state_of(rank, 3.0).items())

    assert run_ranks(2, restore) == [True, True]
    # One byte of it, and the step before is used.
    damaged = bytearray(found[1].read_bytes())
    damaged[-5] ^= 1
    found[1].write_bytes(damaged)
    assert [step for step, _, _ in _native.verify(f"file://{tmp_path}", None)] == [3]

    def restore_older(rank: int) -> Any:
        with (
            forebay.Checkpointer(tmp_path) as checkpointer,
            pytest.warns(forebay.CheckpointWarning, match="step 2 is used instead"),
        ):
            return checkpointer.restore(state_of(rank, 0.0))

    assert run_ranks(2, restore_older) == [2, 2]
