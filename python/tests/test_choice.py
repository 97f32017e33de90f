"""Models that changed since they were saved: another head, a metric more, adapters, other names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay

from .test_ranks import run_ranks

Mismatch = forebay.CheckpointMismatch


class Model(torch.nn.Module):
    """A body and a head of any size, and more if so asked."""

    def __init__(self, seed: int, outputs: int = 3, **more: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, outputs)
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(batch))  # type: ignore[no-any-return]


def state_of(seed: int, outputs: int = 3, steps: int = 1, **more: torch.nn.Module) -> dict[str, Any]:
    model = Model(seed, outputs, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=10**-seed)
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optim": optimizer, "step": seed}


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left.parameters(), right.parameters(), strict=True))


def moment(state: dict[str, Any], name: str) -> Any:
    return state["optim"].state.get(state["model"].get_parameter(name), {}).get("exp_avg")


def saved(place: Path, *args: Any, **more: Any) -> dict[str, Any]:
    made = state_of(*args, **more)
    forebay.save(made, place, step=5)
    return made


def restored(place: Path, state: Any, **options: Any) -> forebay.Restored:
    with forebay.Checkpointer(place, rng=False) as checkpointer:
        assert checkpointer.restore(state, **options) == 5 and checkpointer.restored is not None
        return checkpointer.restored


@pytest.mark.parametrize("has_stepped", [0, 1])
def test_a_head_of_another_size_is_left_out(tmp_path: Path, has_stepped: int) -> None:
    """The body goes on with its moments; the new head begins with none, or with what it has."""
    was = saved(tmp_path, 1)
    state = state_of(2, outputs=5, steps=has_stepped)
    head = [parameter.clone() for parameter in state["model"].head.parameters()]
    own = moment(state, "head.weight")
    own = None if own is None else own.clone()
    with pytest.raises(Mismatch, match=r"state\['model'\].head.weight: \[3, 8\] was saved.*\(hint: without="):
        restored(tmp_path, state)
    with pytest.raises(Mismatch, match=r"\['optim'\]\['head.weight'\]\['exp_avg'\]: \[3, 8\] was saved.*hint: without="):
        restored(tmp_path, state, without=["model.head.*"])
    assert not same(state["model"].body, was["model"].body) and state["step"] == 2, "nothing was changed"
    told = restored(tmp_path, state, without=["model.head.*", "optim.state.head.*"])
    assert same(state["model"].body, was["model"].body) and state["step"] == 1
    assert all(map(torch.equal, head, state["model"].head.parameters())) and (told.missing, told.unexpected) == ((), ())
    assert torch.equal(moment(state, "body.weight"), moment(was, "body.weight"))
    now = moment(state, "head.weight")
    assert now is None if own is None else torch.equal(now, own)
    assert state["optim"].param_groups[0]["lr"] == 0.1
    # It trains on.
    state["model"](torch.randn(4, 8)).square().mean().backward()
    state["optim"].step()
    assert moment(state, "head.weight").shape == (5, 8)


def test_a_head_that_came_and_one_that_went(tmp_path: Path, caplog: Any) -> None:
    was = saved(tmp_path, 1, old=torch.nn.Linear(2, 2))
    state = {**state_of(2, new=torch.nn.Linear(4, 4)), "metric": [7.0], "ema": {"a": torch.ones(2)}}
    new = state["model"].new.weight.clone()
    hint = "hint: strict=False leaves that as it is; without= and only= .* rename="
    with pytest.raises(Mismatch, match=f"the checkpoint lacks 'ema', 'metric' .{hint}"):
        restored(tmp_path, state)
    with pytest.raises(Mismatch, match=f"the checkpoint lacks 'new.bias', 'new.weight' .{hint}"):
        forebay.load_model(tmp_path, state["model"])
    with caplog.at_level(logging.WARNING, logger="forebay"):
        told = restored(tmp_path, state, strict=False)
    assert same(state["model"].body, was["model"].body) and same(state["model"].head, was["model"].head)
    assert torch.equal(state["model"].new.weight, new) and state["metric"] == [7.0] and state["step"] == 1
    assert torch.equal(moment(state, "head.weight"), moment(was, "head.weight"))
    missing = {"model.new.weight", "model.new.bias", "optim.state.new.weight", "optim.state.new.bias", "metric", "ema"}
    assert set(told.missing) == missing and {"model.old.weight", "model.old.bias"} <= set(told.unexpected)
    assert "missing, and left as they were: 'metric'" in caplog.text.replace("'ema', ", "") and "model.old" in caplog.text
    assert dict(told.as_dict())["missing"] == told.missing


def test_what_has_nothing_in_common_is_refused(tmp_path: Path) -> None:
    """An adapter's model, into which a base model's weights go: all its names are others."""
    was = saved(tmp_path, 1)
    wrapped = torch.nn.ModuleDict({"base": Model(2)})
    wrapped["base"].register_module("lora", torch.nn.Linear(3, 3))
    for load in (forebay.load_model, lambda place, model, **more: restored(place, {"model": model, "step": 0}, **more)):
        with pytest.raises(Mismatch, match="nothing of it was saved under its names.*base.body.*hint: rename="):
            load(tmp_path, wrapped, strict=False)
    lora = wrapped["base"].lora.weight.clone()
    with pytest.raises(Mismatch, match="the checkpoint lacks 'base.lora.bias', 'base.lora.weight'"):
        forebay.load_model(tmp_path, wrapped, rename=lambda name: name.removeprefix("base."))
    forebay.load_model(tmp_path, wrapped, rename=lambda name: name.removeprefix("base."), strict=False)
    assert same(wrapped["base"].body, was["model"].body) and torch.equal(wrapped["base"].lora.weight, lora)
    with pytest.raises(Mismatch, match="nothing of it was saved"):
        restored(tmp_path, {"other": torch.zeros(2)}, strict=False)


def test_other_names(tmp_path: Path) -> None:
    """Of dicts, modules and optimizers, by a function or a dict; what a name meant before is nobody's then."""
    was = saved(tmp_path, 1)

    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.trunk, self.top = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    model = Renamed()
    state = {"net": model, "optim": torch.optim.AdamW(model.parameters()), "step": 0}

    def former(name: str) -> str:
        name = f"model{name.removeprefix('net')}" if name.startswith("net") else name
        return name.replace("trunk.", "body.").replace("top.", "head.")

    restored(tmp_path, state, rename=former)
    assert same(model.trunk, was["model"].body) and same(model.top, was["model"].head) and state["step"] == 1
    for name, before in (("trunk.weight", "body.weight"), ("top.bias", "head.bias")):
        now = state["optim"].state[model.get_parameter(name)]["exp_avg"]
        assert torch.equal(now, moment(was, before))
    # Exchanged, by a dict of names; patterns go by the names that the state has.
    tensors = {"a": torch.ones(2), "b": torch.zeros(2)}
    forebay.save(tensors, tmp_path / "flat", step=5)
    target = {"a": torch.full((2,), 7.0), "b": torch.full((2,), 7.0)}
    restored(tmp_path / "flat", target, rename={"a": "b", "b": "a"}, only=["a"])
    assert target["a"].tolist() == [0, 0] and target["b"].tolist() == [7, 7]
    restored(tmp_path / "flat", target, rename={"a": "b", "b": "a"})
    assert target["b"].tolist() == [1, 1]
    with pytest.raises(Mismatch, match="the checkpoint lacks 'a'"):
        restored(tmp_path / "flat", target, rename={"a": "c"})
    with pytest.raises(forebay.CheckpointInvalid, match="'elsewhere.x' for 'net.trunk.*', which does not lie in 'model'"):
        restored(tmp_path, state, rename=lambda name: "elsewhere.x" if "." in name else former(name))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"without": "model"}, "without is 'model'; it is a list of patterns"),
        ({"without": ["nobody"]}, "nothing is named like nobody .hint: .*'model.head"),
        ({"without": ["model.body"]}, "nothing is named like model.body"),
        ({"strict": 0}, "strict is 0; it is True or False"),
        ({"rename": 7}, "rename is 7; it is a dict of names"),
        ({"rename": {"a": 1}}, "rename is .*; it is a dict of names"),
        ({"rename": lambda name: None}, "rename gives None for"),
        ({"rename": lambda name: name[100]}, r"rename\('model'\) raised IndexError"),
    ],
)
def test_choices_that_are_none(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    saved(tmp_path, 1)
    with pytest.raises(ValueError, match=match):
        restored(tmp_path, state_of(2), **options)


def test_what_is_left_out_is_left_with_all_that_is_in_it(tmp_path: Path) -> None:
    was = {**state_of(1), "ema": {"a": torch.ones(2), "b": torch.ones(2)}, "log": [1, 2]}
    forebay.save(was, tmp_path, step=5)
    for left in ("ema", "ema.*", "em*"):
        state = {**state_of(2), "log": []}
        restored(tmp_path, state, without=[left])
        assert same(state["model"], was["model"]) and state["log"] == [1, 2] and "ema" not in state
    state = {**state_of(2), "ema": {"a": torch.zeros(2), "b": torch.zeros(2)}, "log": []}
    restored(tmp_path, state, without=["ema.a", "optim", "*.bias"])
    assert state["ema"]["a"].tolist() == [0, 0] and state["ema"]["b"].tolist() == [1, 1]
    assert state["optim"].param_groups[0]["lr"] == 0.01
    assert torch.equal(state["model"].body.weight, was["model"].body.weight)
    assert torch.equal(state["model"].body.bias, state_of(2)["model"].body.bias)
    # Of what alone is wanted.
    state = {**state_of(3), "ema": {"a": torch.zeros(2)}}
    restored(tmp_path, state, only=["model", "ema.*"], without=["model.head.*", "ema.b"])
    assert state["ema"]["a"].tolist() == [1, 1] and same(state["model"].body, was["model"].body)
    assert not same(state["model"].head, was["model"].head)


class WithExtra(torch.nn.Linear):
    """As TransformerEngine's modules: extra state that may say nothing."""

    def __init__(self, seed: int, extra: Any) -> None:
        torch.manual_seed(seed)
        super().__init__(4, 4)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("empty", [None, torch.empty(0), b"", {}])
def test_extra_state_that_says_nothing_is_none(tmp_path: Path, empty: Any) -> None:
    torch.manual_seed(1)
    plain, extra = torch.nn.Linear(4, 4), WithExtra(2, empty)
    forebay.save({"model": plain}, tmp_path / "plain")
    forebay.save({"model": extra}, tmp_path / "extra")
    target = WithExtra(3, empty)
    forebay.load_model(tmp_path / "plain", target)
    assert torch.equal(target.weight, plain.weight)
    target_plain = torch.nn.Linear(4, 4)
    forebay.load(tmp_path / "extra", {"model": target_plain})
    assert torch.equal(target_plain.weight, extra.weight)
    # What says something counts.
    with pytest.raises(Mismatch, match="the checkpoint lacks '_extra_state'"):
        forebay.load_model(tmp_path / "plain", WithExtra(3, {"scale": 2.0}))
    told = WithExtra(3, {"scale": 2.0})
    forebay.load_model(tmp_path / "plain", told, strict=False)
    assert told.extra == {"scale": 2.0} and torch.equal(told.weight, plain.weight)


def test_ranks_that_choose_differently_are_told_on_all(tmp_path: Path) -> None:
    forebay.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path)

    def work(rank: int) -> Any:
        state = {"a": torch.zeros(2), "b": torch.zeros(2)}
        with forebay.Checkpointer(tmp_path) as job:
            with pytest.raises(forebay.CheckpointInvalid, match="of rank 1 differ from those of rank 0") as told:
                job.restore(state, without=["a"] if rank else ["b"])
            assert not state["a"].any() and not state["b"].any()
            job.restore(state, without=["a"])
        return str(told.value), state["b"].tolist(), state["a"].tolist()

    first, second = run_ranks(2, work, with_gloo=False)
    assert first == second and first[1:] == [[1, 1], [0, 0]]


def test_ranks_with_other_parts_and_a_new_one(tmp_path: Path) -> None:
    """What one rank lacks in its own part, another saved; only what nobody saved is missing."""

    def layers(*numbers: int) -> dict[str, Any]:
        return {f"layer{number}": torch.full((3,), float(number)) for number in numbers}

    def save(rank: int) -> None:
        with forebay.Checkpointer(tmp_path, rng=False) as job:
            job.save_now(5, {"model": layers(0, 1) if rank == 0 else layers(2, 3)})

    def restore(rank: int) -> Any:
        wanted = ["layer0", "new"] if rank == 0 else ["layer1", "layer2"]
        state = {"model": {name: torch.full((3,), 9.0) for name in wanted}}
        with forebay.Checkpointer(tmp_path, rng=False) as job:
            job.restore(state, strict=False)
            assert job.restored is not None
            found = job.restored.missing, job.restored.unexpected
        return [{name: tensor[0].item() for name, tensor in state["model"].items()}, *found]

    run_ranks(2, save, with_gloo=False)
    first, second = run_ranks(2, restore, with_gloo=False)
    assert first == [{"layer0": 0, "new": 9}, ["model.new"], ["model.layer3"]]
    assert second == [{"layer1": 1, "layer2": 2}, [], ["model.layer3"]]


def test_a_dict_of_weights_goes_into_a_module_that_changed(tmp_path: Path) -> None:
    """What `state_dict()` gave, of a wrapper as well: torch's method found what differs only once it had loaded the rest."""
    was = Model(1)
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in was.state_dict().items()}
    forebay.save({"model": was.state_dict()}, tmp_path / "plain", step=5)
    forebay.save({"model": compiled}, tmp_path / "compiled", step=5)
    for place in (tmp_path / "plain", tmp_path / "compiled"):
        model = Model(2, new=torch.nn.Linear(2, 2))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(Mismatch, match="the checkpoint lacks .*'new.bias'"):
            restored(place, {"model": model})
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        told = restored(place, {"model": model}, strict=False)
        assert same(model.body, was.body) and same(model.head, was.head)
        assert torch.equal(model.new.weight, before["new.weight"])
        assert set(told.missing) == {"model.new.weight", "model.new.bias"} and told.unexpected == ()


def test_options_that_a_restore_changes_are_told(tmp_path: Path, caplog: Any) -> None:
    """All come of the checkpoint: who gave another learning rate may look for why it has no effect."""
    for lr in (1e-2, torch.tensor(1e-2)):
        was, now = state_of(1), state_of(2)
        for state in (was, now):
            state["optim"].param_groups[0]["weight_decay"] = 0.5
        was["optim"].param_groups[0]["lr"], now["optim"].param_groups[0]["lr"] = lr, 3 * lr
        with_model, alone = was, {"optim": was["optim"]}
        for number, saves in enumerate((with_model, alone)):
            place = tmp_path / f"{type(lr).__name__}{number}"
            forebay.save(saves, place, step=5)
            now["optim"].param_groups[0]["lr"] = 3 * lr
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="forebay"):
                restored(place, {name: now[name] for name in saves})
            (told,) = [text for text in caplog.messages if "options" in text]
            assert told.startswith("AdamW has the options that were saved: lr ") and "weight_decay" not in told
            assert "0.03" in told.partition(" -> ")[0] and "0.01" in told.partition(" -> ")[2]
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="forebay"):
                restored(place, {name: now[name] for name in saves})
            assert not any("options" in text for text in caplog.messages), "nothing is another now"
