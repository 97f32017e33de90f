"""Weights alone, and parts of a state by name: only what is asked for is read and changed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import forebay

from .test_ranks import run_ranks
from .test_reading import read_bytes

WIDTH = 512


def parts(seed: int, outputs: int = 16) -> dict[str, Any]:
    """A model, its optimizer with a step behind it, and more."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(WIDTH, WIDTH), "head": torch.nn.Linear(WIDTH, outputs)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=10**-seed)
    model["head"](model["body"](torch.randn(4, WIDTH))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optim": optimizer, "log": [seed], "ema": {"a": torch.full((9,), seed)}, "n": seed}


def equal(left: Any, right: Any) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def size_of(module: Any) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def test_weights_alone_are_read(tmp_path: Path) -> None:
    saved = parts(1)
    forebay.save(saved, tmp_path, step=5)
    model = parts(2)["model"]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    before = read_bytes()
    assert forebay.load_model(tmp_path, model) == 5
    read = read_bytes() - before
    assert size_of(model) <= read <= 1.02 * size_of(model) + 65536, "and nothing of the optimizer's two times that"
    assert equal(model, saved["model"]) and places == [parameter.data_ptr() for parameter in model.parameters()]
    model = parts(3)["model"]
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load_model(model, only=["head.*"]) == 5
        assert checkpointer.restored is not None and checkpointer.restored.bytes == size_of(model["head"])
    assert equal(model["head"], saved["model"]["head"]) and equal(model["body"], parts(3)["model"]["body"])


def test_a_model_of_another_type_and_another_head(tmp_path: Path) -> None:
    saved = parts(1)
    forebay.save(saved, tmp_path)
    model = parts(2)["model"].to(torch.bfloat16)
    forebay.load_model(tmp_path, model)
    assert torch.equal(model["body"].weight, saved["model"]["body"].weight.to(torch.bfloat16))
    model = parts(2, outputs=3)["model"]
    with pytest.raises(forebay.CheckpointMismatch, match="head"):
        forebay.load_model(tmp_path, model)
    forebay.load_model(tmp_path, model, only=["body.*"])
    assert equal(model["body"], saved["model"]["body"])


def test_one_of_several_models_is_named(tmp_path: Path) -> None:
    one, two = parts(1)["model"], parts(2)["model"]
    forebay.save({"models": {"one": one, "two": two}, "plain": one.state_dict()}, tmp_path)
    target = parts(3)["model"]
    with pytest.raises(forebay.CheckpointMismatch, match="'models.one', 'models.two'"):
        forebay.load_model(tmp_path, target)
    with pytest.raises(forebay.CheckpointMismatch, match="no module or dict 'three'"):
        forebay.load_model(tmp_path, target, name="three")
    forebay.load_model(tmp_path, target, name="models.two")
    assert equal(target, two)
    forebay.load_model(tmp_path, target, name="plain")
    assert equal(target, one)


def test_tied_weights_in_part(tmp_path: Path) -> None:
    def tied(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64), "b": torch.nn.Linear(64, 64)})
        model["b"].weight = model["a"].weight
        return model

    saved, target = tied(1), tied(2)
    forebay.save({"model": saved}, tmp_path)
    forebay.load_model(tmp_path, target, only=["*.weight"])
    assert torch.equal(target["b"].weight, saved["a"].weight) and target["a"].weight is target["b"].weight
    assert torch.equal(target["a"].bias, tied(2)["a"].bias)


def test_a_state_in_part(tmp_path: Path) -> None:
    saved = parts(1)
    saved["only here"] = numpy.arange(5)
    forebay.save(saved, tmp_path, step=5)

    def restored(*only: str) -> tuple[dict[str, Any], int]:
        target = parts(2)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(target, only=only) == 5
            assert checkpointer.restored is not None
            return target, checkpointer.restored.bytes

    target, size = restored("model.*.bias", "n")
    assert size == (WIDTH + 16) * 4 and target["n"] == 1 and target["log"] == [2]
    assert torch.equal(target["model"]["body"].bias, saved["model"]["body"].bias)
    assert torch.equal(target["model"]["body"].weight, parts(2)["model"]["body"].weight)
    target, size = restored("ema.*")
    assert size == 72 and bool((target["ema"]["a"] == 1).all()) and target["optim"].param_groups[0]["lr"] == 0.01
    target, size = restored("log")
    assert (size, target["log"]) == (0, [1])
    target, size = restored("model.*", "optim.*")
    assert equal(target["model"], saved["model"]) and target["optim"].param_groups[0]["lr"] == 0.1
    assert size_of(target["model"]) * 3 <= size <= size_of(target["model"]) * 3 + 1024


def test_patterns_that_cannot_be_met_change_nothing(tmp_path: Path) -> None:
    saved = parts(1)
    saved["only here"] = numpy.arange(5)
    forebay.save(saved, tmp_path)
    target = parts(2)
    target["only there"] = 7
    with forebay.Checkpointer(tmp_path) as checkpointer:
        for only, told in [
            (["model.*", "nothing.*"], "nothing is named like nothing"),
            (["only here"], "the state lacks 'only here'"),
            (["only there"], "nothing is named like only there"),
            (["n", "only there"], "the checkpoint lacks 'only there'"),
        ]:
            with pytest.raises(forebay.CheckpointMismatch, match=told):
                checkpointer.restore(target, only=only)
    assert equal(target["model"], parts(2)["model"]) and target["only there"] == 7


def test_ranks_load_weights_together(tmp_path: Path) -> None:
    forebay.save(parts(1), tmp_path, step=5)

    def load(rank: int) -> Any:
        model = parts(2)["model"]
        with forebay.Checkpointer(tmp_path) as checkpointer:
            step = checkpointer.load_model(model)
        return [step, equal(model, parts(1)["model"])]

    assert run_ranks(2, load, with_gloo=False) == [[5, True]] * 2


def test_a_containers_name_means_what_is_in_it(tmp_path: Path) -> None:
    """A pattern that named a dict, a list or a module alone brought nothing back, in silence."""

    def state(seed: int) -> dict[str, Any]:
        found = parts(seed)
        nested = {"t": torch.full((3,), seed), "n": {"deep": seed}, "none": {} if seed == 2 else {"x": [seed]}}
        found.update(d=nested, l=[torch.full((2,), seed), {"k": seed}], pair=(torch.full((2,), seed), seed))
        found.update({"d.t": seed, "d2": {"t": seed}, "one": {"m": found["model"], "o": found["optim"]}})
        return found

    saved, before = state(1), state(2)
    forebay.save(saved, tmp_path, step=5)

    def restored(*only: str) -> dict[str, Any]:
        target = state(2)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(target, only=only) == 5
        return target

    target = restored("d")
    assert torch.equal(target["d"]["t"], saved["d"]["t"]) and target["d"]["n"] == {"deep": 1}
    assert target["d"]["none"] == {"x": [1]} and (target["d.t"], target["d2"], target["n"]) == (2, {"t": 2}, 2)
    target = restored("l", "d.n")
    assert torch.equal(target["l"][0], saved["l"][0]) and target["l"][1] == {"k": 1} and target["d"]["n"] == {"deep": 1}
    assert torch.equal(target["d"]["t"], before["d"]["t"])
    target = restored("pair")
    assert torch.equal(target["pair"][0], saved["pair"][0]) and target["pair"][1] == 1
    target = restored("model")
    assert equal(target["model"], saved["model"]) and target["optim"].param_groups[0]["lr"] == 0.01
    target = restored("one")
    assert equal(target["one"]["m"], saved["model"]) and target["optim"].param_groups[0]["lr"] == 0.1


def test_a_containers_name_means_what_is_in_it_by_names(tmp_path: Path) -> None:
    """On another number of ranks, where what one rank saved does not fit."""

    def save(rank: int) -> None:
        state = {"d": {f"of {rank}": torch.full((2,), float(rank)), "n": 7, **parts(1)}, "n": 7}
        with forebay.Checkpointer(tmp_path) as checkpointer, warnings.catch_warnings():
            # That both have the same model each for itself.
            warnings.simplefilter("ignore")
            checkpointer.save_now(1, state)

    run_ranks(2, save, with_gloo=False)
    inner: dict[str, Any] = {"of 0": torch.ones(2), "of 1": torch.zeros(2), "n": 0, **parts(2)}
    del inner["ema"]
    state: dict[str, Any] = {"d": inner, "n": 0}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state, only=["d"])
    assert (inner["of 0"].tolist(), inner["of 1"].tolist()) == ([0, 0], [1, 1])
    assert inner["n"] == 1 and state["n"] == 0 and inner["optim"].param_groups[0]["lr"] == 0.1
