"""Dicts whose keys are data: what is counted, and what is made as it is asked for."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay

from .test_roundtrip import Loader, same


def counted(seen: Any = (), sums: Any = (), lists: Any = (), held: float = 0) -> dict[str, Any]:
    """Dicts whose keys are data, and one whose keys are names of tensors."""
    return {
        "seen": collections.Counter(dict(seen)),
        "sums": collections.defaultdict(float, sums),
        "lists": collections.defaultdict(list, lists),
        "held": collections.defaultdict(dict, w={"t": torch.full((2,), held)}),
    }


def test_keys_that_are_data_come_and_go_in_place(tmp_path: Path) -> None:
    saved = counted({"b": 2, 7: 1}, {"loss": 0.5, "acc": math.inf}, {"x": [1, [2]], "y": []}, 3)
    forebay.save(saved, tmp_path)
    for live in (
        counted(),
        counted({7: 5, "old": 9, "b": 1}, {"acc": 1.0}, {"y": [4, 5], "z": [[1]]}, 1),
        counted(saved["seen"], saved["sums"], {"x": [0, [0]], "y": []}, 3),
    ):
        held = [*live.values(), live["held"]["w"]["t"], *(live["lists"][key] for key in ("x", "y") if key in live["lists"])]
        forebay.load(tmp_path, live)
        assert same(live, saved)
        now = [*live.values(), live["held"]["w"]["t"], *(live["lists"][key] for key in ("x", "y"))]
        assert all(any(value is other for other in now) for value in held)
        assert live["seen"]["new"] == 0 and live["sums"]["new"] == 0.0 and live["lists"]["new"] == []


def test_parts_of_keys_that_are_data_are_restored_by_name(tmp_path: Path) -> None:
    saved, before = counted({"b": 2, "c": 3}, {}, {"x": [1]}, 3), counted({"b": 1, "d": 5}, {"gone": 1.0}, {"x": [0]})
    forebay.save(saved, tmp_path)
    for only, changed in (
        (["seen.*"], {"seen": saved["seen"]}),
        (["sums.*", "held.w.*"], {"sums": saved["sums"], "held": saved["held"]}),
        (["seen.[bd]"], {"seen": collections.Counter(b=2)}),
        (["seen.c"], {"seen": collections.Counter(b=1, d=5, c=3)}),
    ):
        live = counted(before["seen"], before["sums"], {"x": [0]})
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(live, only=only)
        assert same(live, {**before, **changed}), only


@pytest.mark.parametrize(
    "change, fact",
    [
        (lambda s: s.update(sums=collections.defaultdict(int)), r"state\['sums'\]: a defaultdict of float .* one of int"),
        (lambda s: s.update(sums=collections.defaultdict(lambda: 0.0)), "one of .*<lambda>"),
        (lambda s: s.update(seen={"a": 1}), r"state\['seen'\]: the checkpoint lacks 'a'"),
        (lambda s: s.update(seen=["a"]), r"state\['seen'\]: a dict was saved, the state has a list"),
        (lambda s: s["seen"].update({"w": torch.ones(1)}), r"state\['seen'\]: the checkpoint lacks 'w'"),
        (lambda s: s["lists"].update(y=[Loader()]), r"state\['lists'\]: the checkpoint lacks 'y'"),
        (
            lambda s: s.update(held=collections.defaultdict(dict, z={"t": torch.zeros(2)})),
            r"state\['held'\]: the checkpoint lacks 'z'",
        ),
        (lambda s: s["held"].update(v={"t": torch.ones(2)}), r"state\['held'\]: the checkpoint lacks 'v'"),
    ],
)
def test_keys_of_dicts_that_hold_tensors_neither_come_nor_go(tmp_path: Path, change: Any, fact: str) -> None:
    forebay.save(counted({"b": 2}, {"loss": 1.0}, {"x": [1]}, 3), tmp_path)
    live = counted({"a": 2})
    change(live)
    with pytest.raises(forebay.CheckpointMismatch, match=fact):
        forebay.load(tmp_path, live)
    assert "a" in live["seen"] or not live["seen"]
    assert not live["lists"]["x"] and not live["held"]["w"].get("t", torch.zeros(1)).any()


def test_what_is_empty_takes_what_was_counted(tmp_path: Path) -> None:
    saved = counted({"b": 2, "c": 3}, {"loss": 1.0}, {"x": [1]}, 3)
    forebay.save(saved, tmp_path)
    live: Any = {key: type(value)() if type(value) is not collections.defaultdict else {} for key, value in saved.items()}
    live["seen"], live["sums"] = kept = collections.Counter(), collections.defaultdict(float)
    forebay.load(tmp_path, live)
    assert same(live, saved) and live["seen"] is kept[0] and live["sums"] is kept[1]


def test_a_plain_dict_takes_what_was_counted(tmp_path: Path) -> None:
    """And a Counter what an earlier program had converted."""
    kinds: list[Any] = [dict, collections.Counter, lambda items: collections.defaultdict(int, items)]
    for step, (save, load) in enumerate((one, other) for one in kinds for other in kinds):
        forebay.save({"n": save({"a": 3})}, tmp_path, step=step)
        live = {"n": load({"a": 0})}
        forebay.load(tmp_path, live, step=step)
        assert same(live["n"], load({"a": 3}))
