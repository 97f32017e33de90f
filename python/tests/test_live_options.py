"""Options of optimizers that a program gives anew when it resumes: `restore(options=)`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

import forebay

from .test_ranks import run_ranks

Make = Callable[[torch.nn.Module, float], torch.optim.Optimizer]


def of_adamw(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """Two groups with options of their own."""
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": rate, "weight_decay": rate / 2}, {"params": others}]
    return torch.optim.AdamW(groups, lr=rate / 4, betas=(1 - rate, 0.99), weight_decay=0.1)


def of_sgd(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": rate / 3}], lr=rate, momentum=1 - rate)


class Counting(torch.optim.SGD):
    """One that counts in its groups, as schedule-free ones do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def of_counting(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    optim = Counting(model.parameters(), lr=rate, momentum=1 - rate)
    optim.param_groups[0]["k"] = 0
    return optim


MAKES: dict[str, Make] = {"AdamW": of_adamw, "SGD": of_sgd, "Counting": of_counting}


def made(make: Make, rate: float, steps: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    state = {"model": model, "optim": make(model, rate)}
    train(state, steps)
    return state


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["model"](torch.arange(12.0).view(2, 6) / 12).square().mean().backward()
        state["optim"].step()
        state["optim"].zero_grad()


def options(optim: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optim.param_groups]


def moments(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = [state["optim"].state[parameter] for parameter in state["model"].parameters()]
    return [(name, value.clone()) for own in found for name, value in own.items() if isinstance(value, torch.Tensor)]


def same(one: Sequence[tuple[str, torch.Tensor]], other: Sequence[tuple[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) > 0 and all(a == b and torch.equal(v, w) for (a, v), (b, w) in zip(one, other))


def restored(place: Path, state: dict[str, Any], **choice: Any) -> Optional[int]:
    with forebay.Checkpointer(place, rng=False) as checkpointer:
        return checkpointer.restore(state, **choice)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", MAKES)
def test_options_of_the_program_stay_and_the_state_comes(tmp_path: Path, kind: str, steps_before: int, beside: bool) -> None:
    make = MAKES[kind]
    was = made(make, 0.3, 3)
    forebay.save({name: was[name] for name in was if beside or name == "optim"}, tmp_path, step=3)
    # As torch has it, whose own way has the saved options win: they are given again.
    reference = made(make, 0.3, 3)
    now = made(make, 0.2, steps_before, seed=1)
    given = options(now["optim"])
    for group, own in zip(reference["optim"].param_groups, given):
        group.update(own)
    if not beside:
        now["model"].load_state_dict(was["model"].state_dict())
    assert restored(tmp_path, {name: now[name] for name in now if beside or name == "optim"}, options="live") == 3
    assert options(now["optim"]) == given
    assert same(moments(now), moments(was))
    for state in (now, reference):
        train(state, 2)
    assert same(moments(now), moments(reference))
    weights = [list(state["model"].state_dict().items()) for state in (now, reference)]
    assert same(*weights)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_options_of_some_names_stay(tmp_path: Path, steps_before: int, beside: bool) -> None:
    names = ("model", "optim") if beside else ("optim",)
    was, now = made(of_adamw, 0.3, 3), made(of_adamw, 0.2, steps_before)
    forebay.save({name: was[name] for name in names}, tmp_path, step=3)
    assert restored(tmp_path, {name: now[name] for name in names}, options=["weight_decay", "amsgrad"]) == 3
    fresh = options(made(of_adamw, 0.2, 0)["optim"])
    expected = [{**own, "weight_decay": new["weight_decay"]} for own, new in zip(options(was["optim"]), fresh)]
    assert options(now["optim"]) == expected and same(moments(now), moments(was))
    # What counts there is no option that a program means.
    was, now = made(of_counting, 0.3, 3), made(of_counting, 0.2, 1)
    forebay.save({name: was[name] for name in names}, tmp_path, step=4)
    restored(tmp_path, {name: now[name] for name in names}, options=["lr"])
    assert [now["optim"].param_groups[0][name] for name in ("k", "lr", "momentum")] == [3, 0.2, 0.7]


def test_parameters_that_had_other_options_go_into_one_group_that_keeps_its_own(tmp_path: Path) -> None:
    was = made(of_adamw, 0.3, 3)
    forebay.save(was, tmp_path, step=3)

    def one_group() -> dict[str, Any]:
        return made(lambda model, rate: torch.optim.AdamW(model.parameters(), lr=rate), 0.2, 0)

    with pytest.raises(forebay.CheckpointMismatch, match="were saved in groups that differ in '(lr|weight_decay)'"):
        restored(tmp_path, one_group(), options=["betas"])
    for chosen in ("live", ["lr", "weight_decay"]):
        now = one_group()
        restored(tmp_path, now, options=chosen)
        assert now["optim"].param_groups[0]["lr"] == 0.2 and same(moments(now), moments(was))


def stages(names: Sequence[str], rate: float) -> dict[str, Any]:
    torch.manual_seed(len(names))
    model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in names})
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=rate)}


def test_stages_that_had_other_options_go_into_one_group_that_keeps_its_own(tmp_path: Path) -> None:
    """By names, from what two ranks saved."""

    def save(rank: int) -> Any:
        state = stages([str(rank)], 0.1 + rank)
        state["model"][str(rank)](torch.ones(6)).sum().backward()
        state["optim"].step()
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, state)
        return [value.tolist() for _, value in moments(state)]

    one, two = run_ranks(2, save, with_gloo=False)
    now = stages(["0", "1"], 0.5)
    for chosen in ("saved", ["weight_decay"]):
        with pytest.raises(forebay.CheckpointMismatch, match="no one group of options .* differ in 'lr'"):
            restored(tmp_path, now, options=chosen)
    restored(tmp_path, now, options="live")
    assert now["optim"].param_groups[0]["lr"] == 0.5
    assert [value.tolist() for _, value in moments(now)] == one + two


def test_a_rate_that_is_a_tensor_stays_that_tensor_and_what_it_is(tmp_path: Path) -> None:
    """A captured graph reads it."""
    for beside in (True, False):
        was, now = made(of_adamw, 0.3, 3), made(of_adamw, 0.2, 0)
        for state in (was, now):
            for group in state["optim"].param_groups:
                group["lr"] = torch.tensor(group["lr"])
        rates = [group["lr"] for group in now["optim"].param_groups]
        names = ("model", "optim") if beside else ("optim",)
        forebay.save({name: was[name] for name in names}, tmp_path, step=3)
        restored(tmp_path, {name: now[name] for name in names}, options="live")
        assert all(group["lr"] is rate for group, rate in zip(now["optim"].param_groups, rates))
        assert [float(rate) for rate in rates] == pytest.approx([0.2, 0.05])
        assert same(moments(now), moments(was))


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("kind, option", [("Adam", "amsgrad"), ("RMSprop", "centered"), ("RMSprop", "momentum")])
def test_an_option_that_asks_for_state_which_was_not_saved_is_refused(
    tmp_path: Path, kind: str, option: str, beside: bool
) -> None:
    """torch's next step raised a KeyError."""

    def of(**given: Any) -> dict[str, Any]:
        return made(lambda model, rate: getattr(torch.optim, kind)(model.parameters(), lr=rate, **given), 0.1, 2)

    names = ("model", "optim") if beside else ("optim",)
    was, now = of(), of(**{option: 0.5 if option == "momentum" else True})
    forebay.save({name: was[name] for name in names}, tmp_path, step=2)
    before = moments(now)
    state = {name: now[name] for name in names}
    for chosen in ("live", [option]):
        with pytest.raises(forebay.CheckpointMismatch, match=f"{option} stays .*was saved of"):
            restored(tmp_path, state, options=chosen)
        assert same(moments(now), before)
    restored(tmp_path, state, options=["lr"])
    train(now, 1)
    # The other way around there is more than is needed.
    forebay.save({name: of(**{option: 0.5 if option == "momentum" else True})[name] for name in names}, tmp_path, step=3)
    restored(tmp_path, {name: was[name] for name in names}, options="live")
    train(was, 1)


def test_sgd_begins_momentum_that_was_not_saved(tmp_path: Path) -> None:
    was = made(lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate), 0.1, 2)
    now = made(lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), 0.1, 0)
    forebay.save(was, tmp_path, step=2)
    restored(tmp_path, now, options="live")
    train(now, 1)
    assert now["optim"].param_groups[0]["momentum"] == 0.9 and len(moments(now)) == 4


def test_options_that_are_none_or_nobodys_are_refused(tmp_path: Path) -> None:
    was = made(of_adamw, 0.3, 1)
    forebay.save(was, tmp_path, step=1)
    before = list(was["model"].state_dict().items())
    bad: list[Any] = ["new", None, True, [], [5], b"lr", 5]
    for value in bad:
        with pytest.raises(forebay.CheckpointInvalid, match="options is .*; it is 'saved', 'live', or a list"):
            restored(tmp_path, was, options=value)
    with pytest.raises(forebay.CheckpointMismatch, match="no optimizer of the state has 'wight_decay'.*'weight_decay'"):
        restored(tmp_path, was, options=["lr", "wight_decay"])
    assert same(list(was["model"].state_dict().items()), before)
    assert restored(tmp_path, was, options="saved") == 1


def test_options_that_stay_are_told(tmp_path: Path, caplog: Any) -> None:
    forebay.save(made(of_adamw, 0.3, 1), tmp_path, step=1)
    with caplog.at_level(logging.INFO, logger="forebay"):
        restored(tmp_path, made(of_adamw, 0.2, 0), options=["weight_decay"])
    told = [text for text in caplog.messages if "options" in text]
    assert any("AdamW keeps options that were saved otherwise: weight_decay 0.1, not 0.15" in text for text in told), told
    assert any("AdamW has the options that were saved: " in text and "weight_decay" not in text for text in told), told


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optim: lr_scheduler.StepLR(optim, 2, 0.5),
    "LambdaLR": lambda optim: lr_scheduler.LambdaLR(optim, lambda step: min(1.0, (step + 1) / 4)),
    "Cosine": lambda optim: lr_scheduler.CosineAnnealingLR(optim, 12),
    "OneCycle": lambda optim: lr_scheduler.OneCycleLR(
        optim, [group["lr"] for group in optim.param_groups], 12, cycle_momentum=False
    ),
    "Sequential": lambda optim: lr_scheduler.SequentialLR(
        optim, [lr_scheduler.LinearLR(optim, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(optim, 0.9)], milestones=[3]
    ),
}


def scheduled(kind: str, rate: float, steps: int, decay: float = 0.0) -> dict[str, Any]:
    state = made(of_sgd, rate, 0)
    for group in state["optim"].param_groups:
        group["weight_decay"] = decay
    state["scheduler"] = SCHEDULES[kind](state["optim"])
    rates(state, steps)
    return state


def rates(state: dict[str, Any], steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        train(state, 1)
        state["scheduler"].step()
        found.append([group["lr"] for group in state["optim"].param_groups])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_another_rate_with_a_schedule_that_is_left_out_and_stepped(tmp_path: Path, kind: str, caplog: Any) -> None:
    """As the documentation says to do it: the rates are those of the new schedule at that step."""
    forebay.save(scheduled(kind, 0.3, 5), tmp_path, step=5)
    whole = scheduled(kind, 0.2, 0)
    expected = rates(whole, 10)
    now = scheduled(kind, 0.2, 0)
    step = restored(tmp_path, now, without=["scheduler"], options="live")
    assert step == 5
    for _ in range(step):
        now["scheduler"].step()
    assert [group["lr"] for group in now["optim"].param_groups] == pytest.approx(expected[4])
    assert rates(now, 5) == [pytest.approx(own) for own in expected[5:]]
    assert not [text for text in caplog.messages if "learning rates that stay" in text]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_another_decay_with_a_schedule_that_goes_on(tmp_path: Path, kind: str, caplog: Any) -> None:
    was = scheduled(kind, 0.3, 5)
    forebay.save(was, tmp_path, step=5)
    expected = rates(was, 5)
    now = scheduled(kind, 0.3, 0, decay=0.01)
    restored(tmp_path, now, options=["weight_decay"])
    assert rates(now, 5) == expected
    assert {group["weight_decay"] for group in now["optim"].param_groups} == {0.01}
    assert not [text for text in caplog.messages if "learning rates that stay" in text]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", ["live", ["lr"]])
def test_a_schedule_that_is_restored_beside_rates_that_stay_is_warned_of(tmp_path: Path, options: Any, caplog: Any) -> None:
    forebay.save(scheduled("LambdaLR", 0.3, 5), tmp_path, step=5)
    now = scheduled("LambdaLR", 0.2, 0)
    restored(tmp_path, now, options=options)
    (told,) = [text for text in caplog.messages if "learning rates that stay" in text]
    assert told.startswith("LambdaLR is restored beside") and "without=" in told
    # That of the program's schedule at its begin, and what it notes of it.
    assert [group["lr"] for group in now["optim"].param_groups] == pytest.approx([0.2 / 4, 0.2 / 12])
    assert [group["initial_lr"] for group in now["optim"].param_groups] == pytest.approx([0.2, 0.2 / 3])


def test_a_schedule_that_is_made_after_the_restore_begins_with_the_rate_that_stays(tmp_path: Path) -> None:
    """Of what the saved one noted beside its rate nothing is left."""
    saved = scheduled("LambdaLR", 0.3, 5)
    forebay.save({"model": saved["model"], "optim": saved["optim"]}, tmp_path, step=5)
    for chosen in ("live", ["lr"]):
        now = made(of_sgd, 0.2, 0)
        restored(tmp_path, now, options=chosen)
        assert all("initial_lr" not in group for group in now["optim"].param_groups)
        assert SCHEDULES["StepLR"](now["optim"]).base_lrs == pytest.approx([0.2, 0.2 / 3])


def sharded(rate: float, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    for part in (*model, model):
        fully_shard(part)
    state = {"model": model, "optim": of_adamw(model, rate)}
    for _ in range(steps):
        model(torch.ones(2, 8)).square().mean().backward()
        state["optim"].step()
        state["optim"].zero_grad()
    return state


def parts(state: dict[str, Any]) -> list[list[float]]:
    found = [state["optim"].state[parameter] for parameter in state["model"].parameters()]
    return [own[name].to_local().flatten().tolist() for own in found for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("ranks", [2, 3])
def test_options_of_sharded_optimizers_stay(tmp_path: Path, ranks: int) -> None:
    def save(rank: int) -> Any:
        state = sharded(0.3, 2)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(2, state)
        return parts(state)

    saved = run_ranks(2, save)

    def restore(rank: int) -> Any:
        state = sharded(0.2, 0)
        given = options(state["optim"])
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            with pytest.raises(forebay.CheckpointInvalid, match="or options= of rank 1 differ"):
                checkpointer.restore(state, options=["lr", "betas"][rank > 0 :])
            assert options(state["optim"]) == given
            assert checkpointer.restore(state, options="live") == 2
        assert options(state["optim"]) == given
        return parts(state)

    found = run_ranks(ranks, restore)
    if ranks == 2:
        assert found == saved
    whole = [[value for of_rank in found for value in of_rank[index]] for index in range(len(saved[0]))]
    assert whole == [[value for of_rank in saved for value in of_rank[index]] for index in range(len(saved[0]))]
