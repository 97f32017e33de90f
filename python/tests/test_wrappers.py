"""Modules that DDP or torch.compile wraps: what is saved of one is restored with and without the wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  (slow: before any fork)
from torch.nn.parallel import DistributedDataParallel

import forebay

from .test_ranks import run_ranks


def model(seed: int) -> torch.nn.Sequential:
    """One whose own names are like those of wrappers, too."""
    torch.manual_seed(seed)
    inner = torch.nn.ModuleDict({"module": torch.nn.Linear(6, 6), "other": torch.nn.BatchNorm1d(6)})
    return torch.nn.Sequential(torch.nn.Linear(5, 6), inner, torch.nn.Linear(6, 2))


def with_part_compiled(whole: torch.nn.Sequential) -> torch.nn.Sequential:
    whole[0] = torch.compile(whole[0])
    return whole


WRAPPERS: dict[str, Any] = {
    "ddp": DistributedDataParallel,
    "compiled": torch.compile,
    "compiled in ddp": lambda whole: DistributedDataParallel(torch.compile(whole)),
    "ddp compiled": lambda whole: torch.compile(DistributedDataParallel(whole)),
    "part compiled": with_part_compiled,
    "bare": lambda whole: whole,
}


def tensors(module: Any) -> list[torch.Tensor]:
    """In the order of the modules, which no wrapper changes."""
    return [*module.parameters(), *module.buffers()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    assert len(one) == len(other) == 11
    return all(torch.equal(left, right) for left, right in zip(one, other))


def trained(wrapper: str, seed: int) -> dict[str, Any]:
    """A module in its wrapper, and its optimizer with two steps behind it; what is not called is not compiled."""
    module = WRAPPERS[wrapper](model(seed))
    optim = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optim.step()
    return {"model": module, "optim": optim}


def moments(state: dict[str, Any]) -> list[torch.Tensor]:
    own = [state["optim"].state[parameter] for parameter in state["model"].parameters()]
    return [entry[key] for entry in own for key in ("exp_avg", "exp_avg_sq", "step")]


def test_modules_are_restored_with_and_without_their_wrappers(tmp_path: Path) -> None:
    """Each of them into a bare one, and a bare one into each."""

    def work(rank: int) -> Any:
        wrong = []
        for saver, loader in [(name, "bare") for name in WRAPPERS] + [("bare", name) for name in WRAPPERS]:
            place, saved, target = tmp_path / f"{saver} to {loader}", trained(saver, 1), trained(loader, 2)
            forebay.save(saved, place)
            forebay.load(place, target)
            is_same = same(tensors(saved["model"]), tensors(target["model"]))
            pairs = zip(moments(saved), moments(target), strict=True)
            if not is_same or not all(torch.equal(one, other) for one, other in pairs):
                wrong.append([saver, loader])
            alone = WRAPPERS[loader](model(3))
            forebay.load_model(place, alone)
            if not same(tensors(saved["model"]), tensors(alone)):
                wrong.append([saver, loader, "alone"])
        return wrong

    assert run_ranks(1, work) == [[]]


def test_dicts_that_wrappers_gave_fit_those_of_the_bare_module(tmp_path: Path) -> None:
    """Where the program saves `ddp.state_dict()`, which has `module.` in its keys."""

    def work(rank: int) -> Any:
        wrong = []
        for saver, loader in [(name, "bare") for name in WRAPPERS] + [("bare", name) for name in WRAPPERS]:
            place, saved = tmp_path / f"{saver} to {loader}", WRAPPERS[saver](model(1))
            forebay.save({"all": [{"weights": saved.state_dict(), "n": 4}]}, place)
            expected = tensors(saved)

            into_dict, into_module, in_part = (WRAPPERS[loader](model(seed)) for seed in (2, 3, 4))
            held = into_dict.state_dict()
            target = {"all": [{"weights": held, "n": 0}]}
            forebay.load(place, target)
            is_in_place = target["all"][0]["weights"] is held and same(tensors(into_dict), expected)
            if not is_in_place or target["all"][0]["n"] != 4 or held.keys() != into_dict.state_dict().keys():
                wrong.append([saver, loader, "dict"])
            forebay.load(place, {"all": [{"weights": into_module, "n": 0}]})
            if not same(tensors(into_module), expected):
                wrong.append([saver, loader, "module"])
            before = [tensor.clone() for tensor in tensors(in_part)]
            forebay.load_model(place, in_part, name="all.0.weights", only=["2.*"])
            after = tensors(in_part)
            # The last layer's are the last two of eight parameters, which three buffers follow.
            if [torch.equal(*pair) for pair in zip(before, after)] != [True] * 6 + [False] * 2 + [True] * 3:
                wrong.append([saver, loader, "part"])
            if not all(torch.equal(*pair) for pair in zip(after[6:8], expected[6:8])):
                wrong.append([saver, loader, "values of the part"])
        return wrong

    assert run_ranks(1, work) == [[]]


def test_names_of_the_live_dict_are_what_patterns_mean(tmp_path: Path) -> None:
    saved, target = model(1), model(2)
    forebay.save({"w": torch.compile(saved).state_dict(), "n": 1}, tmp_path)
    before = [tensor.clone() for tensor in tensors(target)]
    state = {"w": target.state_dict(), "n": 0}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state, only=["w.0.*"])
        assert torch.equal(target[0].weight, saved[0].weight) and state["n"] == 0
        assert all(torch.equal(one, other) for one, other in zip(before[2:], tensors(target)[2:]))
        with pytest.raises(forebay.CheckpointMismatch, match="nothing is named like w._orig_mod"):
            checkpointer.restore(state, only=["w._orig_mod.*"])


@pytest.mark.parametrize(
    ("saved", "live", "expected"),
    [
        ({"module.a": 1, "module.b": 2}, {"a": 0}, "the state lacks 'module.a', 'module.b'|the checkpoint lacks 'a'"),
        ({"module.a": 1, "a": 2}, {"a": 0, "_orig_mod.a": 0}, "the checkpoint lacks '_orig_mod.a'"),
        ({"module.a": 1, "a": 2}, {"a": 0}, "the state lacks 'module.a'"),
        ({"modules.a": 1}, {"a": 0}, "the checkpoint lacks 'a'"),
        ({"module.a": 1, 7: 2}, {"a": 0, 7: 0}, "the checkpoint lacks 'a'"),
    ],
)
def test_what_differs_by_more_is_refused(tmp_path: Path, saved: Any, live: Any, expected: str) -> None:
    tensor_of = {key: torch.full((3,), float(value)) for key, value in saved.items()}
    forebay.save({"d": tensor_of}, tmp_path)
    target = {"d": {key: torch.zeros(3) for key in live}}
    with pytest.raises(forebay.CheckpointMismatch, match=expected):
        forebay.load(tmp_path, target)
    assert all(not value.any() for value in target["d"].values())


def test_names_that_both_have_are_nobodys_wrappers(tmp_path: Path) -> None:
    saved = {"module.a": torch.ones(2), "a": torch.full((2,), 2.0), "module": {"module.b": torch.full((2,), 3.0)}}
    forebay.save(saved, tmp_path)
    target = {"a": torch.zeros(2), "module.a": torch.zeros(2), "module": {"b": torch.zeros(2)}}
    forebay.load(tmp_path, target)
    assert torch.equal(target["a"], saved["a"]) and torch.equal(target["module.a"], saved["module.a"])
    assert torch.equal(target["module"]["b"], saved["module"]["module.b"])
