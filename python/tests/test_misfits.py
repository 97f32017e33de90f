"""States that are like what was saved in shape, and yet not it: optimizers of other parameters or another class, ranks that had
each their own, weights that are one now, objects that take none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import forebay
from forebay import _rng

from .test_optimizers import groups, linear, train, values, whole
from .test_ranks import body_of, run_ranks

State = dict[str, Any]


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int = 2, is_beside: bool = True) -> State:
    """A model and its optimizer; what is saved is both, or the optimizer alone, which goes by numbers then."""
    model = linear()
    state = {"model": model, "optim": make(model)}
    train(state, 1, steps)
    return state if is_beside else {"optim": state["optim"]}


def refused(place: Path, found: State, match: str) -> None:
    """A restore says so, and changes nothing; state that was made to be read into is none."""
    before = values({"model": torch.nn.Module(), **found})
    with pytest.raises(forebay.CheckpointMismatch, match=match) as told:
        forebay.load(place, found)
    assert "without=" in str(told.value)
    assert values({"model": torch.nn.Module(), **found}) == before


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_of_fewer_parameters_is_refused(tmp_path: Path, steps_before: int) -> None:
    """A run that goes on would have lost the state of those that were left out, and not train them."""
    forebay.save(trained(lambda model: groups(model, ("0", {}), ("2", {"weight_decay": 0.5}))), tmp_path)
    parts: list[list[tuple[str, State]]] = [[("0", {})], [("0", {}), ("2.w", {})]]
    for kept in parts:
        found = trained(lambda model: groups(model, *kept), steps_before)
        lost = "'2.bias'" if len(kept) == 2 else "'2.weight', '2.bias'"
        refused(tmp_path, found, rf"state\['optim'\]: state of parameters was saved .* not have: {lost} \(hint")
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        checkpointer.restore(found, only=["model.*"])


def test_state_of_parameters_that_are_frozen_now_is_not_dropped(tmp_path: Path) -> None:
    forebay.save(trained(lambda model: torch.optim.AdamW(model.parameters())), tmp_path)

    def of_thawed(model: Any) -> Any:
        model[2].requires_grad_(False)
        return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])

    for steps in (0, 2):
        refused(tmp_path, trained(of_thawed, steps), "'2.weight', '2.bias'")


def test_frozen_parameters_that_only_groups_named_may_be_left_out(tmp_path: Path) -> None:
    def frozen(model: Any, is_whole: bool) -> Any:
        model[0].requires_grad_(False)
        of = [parameter for parameter in model.parameters() if is_whole or parameter.requires_grad]
        return torch.optim.AdamW(of, lr=0.1)

    for saved, live in ((True, False), (False, True)):
        state = trained(lambda model: frozen(model, saved))
        forebay.save(state, tmp_path / str(saved))
        found = trained(lambda model: frozen(model, live), 0)
        forebay.load(tmp_path / str(saved), found)
        known = [entry["exp_avg"].tolist() for entry in found["optim"].state.values()]
        assert known == [entry["exp_avg"].tolist() for entry in state["optim"].state.values()] and len(known) == 2


def test_ranks_may_share_out_what_was_saved_but_not_lose_it(tmp_path: Path) -> None:
    """An optimizer of a stage has fewer parameters than one process that had all of them; what none has is lost."""

    def work(rank: int) -> Any:
        model = linear()
        told: list[Any] = []
        stages: list[tuple[str, State]] = [("0", {}), ("2", {})]
        for mine in ([stages[rank]], [stages[0]]):
            part = torch.nn.ModuleDict({name[0]: model[int(name[0])] for name, _ in mine})
            state = {"model": part, "optim": groups(part, *mine)}
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                try:
                    told.append(checkpointer.restore(state))
                except forebay.CheckpointMismatch as error:
                    told.append(str(error))
            known = [state["optim"].state.get(parameter, {}).get("exp_avg") for parameter in part.parameters()]
            assert all((value is None) == (told[-1] != 1) for value in known), "also where another rank's is refused"
        return told

    forebay.save(trained(lambda model: groups(model, ("", {}))), tmp_path, step=1)
    for told in run_ranks(2, work, with_gloo=False):
        assert told[0] == 1
        assert "the state lacks what was saved, on every rank" in told[1] and "['optim']['2.bias']" in told[1]


CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD of momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters()),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters()),
}


@pytest.mark.parametrize("is_beside", [True, False], ids=["by name", "by number"])
@pytest.mark.parametrize("live", CLASSES)
@pytest.mark.parametrize("saved", ["AdamW", "SGD", "SGD of momentum"])
def test_the_state_of_another_class_is_refused(tmp_path: Path, saved: str, live: str, is_beside: bool) -> None:
    """Its state would be of no use, and its groups have not the options that the next step wants."""
    state = trained(CLASSES[saved], is_beside=is_beside)
    forebay.save(state, tmp_path)
    for steps in (0, 2):
        found = trained(CLASSES[live], steps, is_beside)
        if saved.split()[0] == live.split()[0]:
            forebay.load(tmp_path, found)
            assert whole(found["optim"].state_dict()) == whole(state["optim"].state_dict())
            continue
        if (saved, live, is_beside, steps) == ("AdamW", "Adamax", False, 0):
            # Its groups want nothing else, and what its state will be nobody knows yet.
            continue
        refused(tmp_path, found, rf"state\['optim'\]: an optimizer of another class than {live.split()[0]} was saved: its")


def test_the_class_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    forebay.save(trained(CLASSES["AdamW"]), tmp_path)
    refused(tmp_path, trained(CLASSES["SGD"]), r"SGD was saved: its groups have no 'momentum', 'dampening' \(hint")
    refused(tmp_path, trained(CLASSES["Adamax"]), r"Adamax was saved: its parameters have no 'exp_inf' \(hint")


def test_options_that_a_class_has_now_or_had_are_no_other_class(tmp_path: Path) -> None:
    """Flags come with versions of torch, keys with schedulers, and state with options, which a restore brings back."""

    def old(model: Any) -> Any:
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.OneCycleLR(optim, 0.1, total_steps=9)
        return optim

    state = trained(old)
    for flag in ("foreach", "fused", "maximize", "differentiable", "capturable", "amsgrad", "decoupled_weight_decay"):
        del state["optim"].param_groups[0][flag]
    forebay.save(state, tmp_path / "old")
    found = trained(lambda model: torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=True))
    forebay.load(tmp_path / "old", found)
    assert found["optim"].param_groups[0]["betas"] == state["optim"].param_groups[0]["betas"]

    def spread(**options: Any) -> State:
        return trained(lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1, **options))

    forebay.save(state := spread(momentum=0.5), tmp_path / "options")
    forebay.load(tmp_path / "options", found := spread(centered=True))
    assert values(found) == values(state)


def test_an_optimizer_of_ones_own_is_known_by_its_state(tmp_path: Path) -> None:
    class Other(torch.optim.Optimizer):
        """Has no option that another one lacks."""

        key = "pace"

        def __init__(self, model: Any) -> None:
            super().__init__(model.parameters(), {"lr": 0.1})

        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    self.state[parameter].update({"step": torch.tensor(1.0), self.key: parameter.grad.clone()})
            return loss

    class Another(Other):
        key = "course"

    forebay.save(trained(Other), tmp_path)
    refused(tmp_path, trained(Another), r"state\['optim'\]: .* than .*Another was saved: its parameters have no 'course'")
    forebay.load(tmp_path, trained(Other, 0))


class Fussy:
    """Takes no state that it has not seen."""

    def __init__(self, at: int, takes: bool = True) -> None:
        self.at, self.takes = at, takes

    def state_dict(self) -> State:
        return {"at": self.at}

    def load_state_dict(self, state: State) -> None:
        if not self.takes:
            raise KeyError("at")
        self.at = state["at"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_object_that_takes_no_state_leaves_one_that_is_told_to_be_changed(tmp_path: Path, ranks: int) -> None:
    """Only the object knows, when all tensors are there: what was restored in part looks as if it could be trained on."""

    def work(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, {"w": torch.ones(3), "loader": Fussy(7), "n": 1})
        found = {"w": torch.zeros(3), "loader": Fussy(0, takes=rank < ranks - 1), "n": 0}
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            fact = r"state\['loader'\]: it does not take the state that was saved"
            with pytest.raises(forebay.CheckpointMismatch, match=fact) as told:
                checkpointer.restore(found)
        assert found["w"].all(), "as the error says"
        return str(told.value).partition("'at'; ")[2]

    text = "the state was changed in part: restore all of it, or begin anew, before it is trained or saved"
    assert run_ranks(ranks, work, with_gloo=False) == [text] * ranks


def test_a_dict_that_takes_no_values_is_told_alike(tmp_path: Path) -> None:
    class Closed(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise TypeError("it is closed")

    forebay.save({"w": torch.ones(3), "n": 1}, tmp_path)
    found = Closed(w=torch.zeros(3), n=0)
    with pytest.raises(forebay.CheckpointMismatch, match="state: .*it is closed; the state was changed in part"):
        forebay.load(tmp_path, found)


def test_a_store_that_fails_while_it_is_read_leaves_a_state_that_is_told_to_be_changed(tmp_path: Path) -> None:
    """What is refused before that, and what nothing is read into, has nothing of the kind."""
    forebay.save({"w": torch.ones(3)}, tmp_path)
    (shard,) = tmp_path.rglob("*.safetensors")
    shard.unlink()
    shard.symlink_to(shard.name)
    for into, is_told in (({"w": torch.zeros(3)}, True), (None, False)):
        with pytest.raises(forebay.CheckpointError) as told:
            forebay.load(tmp_path, into)
        assert ("the state was changed in part" in str(told.value)) == is_told, type(told.value)


def two(is_tied: bool, *values: float) -> Any:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64, bias=False) for name in "ab"})
    if is_tied:
        model["b"].weight = model["a"].weight
    with torch.no_grad():
        for name, value in zip("ab", values):
            model[name].weight.fill_(value)
    return model


FORMS: dict[str, Callable[[Any], State]] = {
    "module": lambda model: {"model": model},
    "dict": lambda model: {"model": model.state_dict()},
    "two modules": lambda model: {"model": {"a": model["a"], "b": model["b"]}},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_one_now_and_were_two_are_refused(tmp_path: Path, form: str) -> None:
    """Whichever came last would have stayed. Where both were alike, that is what the one is."""
    forebay.save(FORMS[form](two(False, 1.0, 2.0)), tmp_path / "two")
    forebay.save(FORMS[form](two(False, 3.0, 3.0)), tmp_path / "alike")
    forebay.save(FORMS[form](two(True, 4.0)), tmp_path / "one")
    model = two(True, 0.0)
    fact = r"model.*b.*weight.*: one tensor in the state, .* than state\['model'\].*a.*weight.* that differs"
    with pytest.raises(forebay.CheckpointMismatch, match=fact):
        forebay.load(tmp_path / "two", FORMS[form](model))
    assert not model["a"].weight.any()
    if form == "module":
        with pytest.raises(forebay.CheckpointMismatch, match="model.b.weight: one tensor .* than model.a.weight"):
            forebay.load_model(tmp_path / "two", model)
        forebay.load_model(tmp_path / "two", model, only=["b.*"])
        assert (model["a"].weight == 2).all()
    for name, value in (("alike", 3), ("one", 4)):
        forebay.load(tmp_path / name, FORMS[form](model))
        assert (model["a"].weight == value).all() and model["a"].weight is model["b"].weight
    model = two(False, 0.0, 0.0)
    forebay.load(tmp_path / "two", FORMS[form](model))
    assert (model["a"].weight == 1).all() and (model["b"].weight == 2).all()


def test_weights_that_are_alike_and_were_cut_in_other_ways_are_one(tmp_path: Path) -> None:
    """Ranks that share out what all have, and steps that hold what changed, cut tensors wherever they may."""
    rows = torch.arange(1 << 21, dtype=torch.float32)

    def work(rank: int) -> Any:
        for name, other in (("alike", rows), ("other", rows + 1)):
            pair = {"first": torch.ones(300_001), "a": rows.clone(), "b": other.clone()}
            with forebay.Checkpointer(tmp_path / name, rng=False, replicated=["*"]) as checkpointer:
                checkpointer.save_now(1, pair)
        return True

    assert run_ranks(2, work, with_gloo=False) == [True, True]
    cuts = [tensor["slices"] for tensor in body_of(tmp_path / "alike", 1)["tensors"] if tensor["name"] in "ab"]
    assert len({str([slice["offsets"] for slice in one]) for one in cuts}) == 2, "or nothing is shown here"
    live = torch.zeros(1 << 21)
    state = {"first": torch.zeros(300_001), "a": live, "b": live}
    with pytest.raises(forebay.CheckpointMismatch, match=r"state\['b'\]: one tensor .* than state\['a'\]"):
        forebay.load(tmp_path / "other", state)
    assert not live.any()
    forebay.load(tmp_path / "alike", state)
    assert torch.equal(live, rows)


def saves(place: Path, state: State) -> None:
    with forebay.Checkpointer(place, rng=False) as checkpointer:
        checkpointer.save_now(1, state)


def own(rank: int) -> State:
    """What each rank has for itself, and what all have alike."""
    loader = {"at": 10 + rank, "seen": torch.full((3,), rank), "of": "all"}
    return {"loader": loader, "rows": list(range(rank)), "same": torch.arange(4.0), "n": 5, "fussy": Fussy(rank)}


@pytest.mark.parametrize("saved, now", [(4, 2), (2, 4), (4, 1), (2, 2)])
def test_what_ranks_had_each_for_themselves_is_told_where_others_take_it(tmp_path: Path, saved: int, now: int) -> None:
    """A loader's place is that of a share of the data that nobody has now: each rank takes that of its number modulo how many
    saved, and what others had is nobody's."""

    def save(rank: int) -> None:
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(3, own(rank))

    def restore(rank: int) -> Any:
        found, part = own(90), own(90)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with forebay.Checkpointer(tmp_path) as checkpointer:
                assert checkpointer.restore(found) == 3
                first = [str(one.message) for one in told]
                checkpointer.restore(part, only=["same", "n"])
                checkpointer.restore(part, only=["loader.of"])
        assert [str(one.message) for one in told] == first, "what is not asked for is not told"
        taken = rank % saved
        assert [found["loader"]["at"], found["loader"]["seen"].tolist(), found["fussy"].at] == [10 + taken, [taken] * 3, taken]
        assert part["loader"]["at"] == 100 and part["n"] == 5
        return first

    run_ranks(saved, save, with_gloo=False)
    first, *others = run_ranks(now, restore, with_gloo=False)
    assert others == [[]] * (now - 1), "once for the job"
    if saved == now:
        assert first == []
        return
    (text,) = first
    names = "state['loader']['at'], state['loader']['seen'], state['rows'], state['fussy']"
    took = "each takes what the rank of its number had" + ("" if now < saved else " modulo 2")
    assert text.startswith(f"step 3: the {saved} ranks that saved differ in {names}; {now} restore, and {took} (hint:")


def test_all_ranks_hear_where_that_warning_is_an_error(tmp_path: Path) -> None:
    """And nothing is changed."""
    run_ranks(2, lambda rank: saves(tmp_path, own(rank)), with_gloo=False)

    def restore(rank: int) -> Any:
        found = own(90)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            # conftest makes it one.
            with pytest.raises((forebay.CheckpointError, forebay.CheckpointWarning), match="differ in state"):
                checkpointer.restore(found)
        return [found["loader"]["at"], found["same"].tolist()]

    assert run_ranks(3, restore, with_gloo=False) == [[100, [0.0, 1.0, 2.0, 3.0]]] * 3


def test_weights_that_ranks_had_otherwise_are_told_where_one_takes_them(tmp_path: Path) -> None:
    """Of a model alone, by its own names; what ranks have alike is nothing to tell."""
    run_ranks(2, lambda rank: saves(tmp_path, {"models": {"a": two(False, 1, 2 + rank)}, **own(rank)}), with_gloo=False)
    model = two(False, 0, 0)
    with pytest.warns(forebay.CheckpointWarning, match=r"differ in state\['models'\]\['a'\]\['b.weight'\]; 1 restore"):
        forebay.load_model(tmp_path, model)
    assert (model["b"].weight == 2).all()
    forebay.load_model(tmp_path, model, only=["a.*"])


def test_generators_of_another_number_of_devices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one process of four devices goes on from what one of eight has saved; all others are set."""
    state = _rng.rng_state()
    before = torch.rand(4)
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    for name, answer in (("is_available", True), ("is_initialized", True), ("device_count", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    with pytest.warns(forebay.CheckpointWarning, match="states of 1 CUDA generators were saved.* sees 2 devices"):
        _rng.set_rng_state(state)
    assert torch.equal(torch.rand(4), before)


def test_generators_are_nobody_elses(tmp_path: Path) -> None:
    """At another number of ranks they stay as the program has them: no rank goes on by the numbers of a peer."""

    def save(rank: int) -> Any:
        torch.manual_seed(100 + rank)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(1, {"n": 1})
        return torch.rand(3).tolist()

    def restore(rank: int) -> Any:
        torch.manual_seed(200 + rank)
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore({"n": 0})
        return torch.rand(3).tolist()

    def fresh(rank: int) -> Any:
        return torch.rand(3, generator=torch.Generator().manual_seed(200 + rank)).tolist()

    saved = run_ranks(2, save, with_gloo=False)
    assert run_ranks(2, restore, with_gloo=False) == saved
    for now in (1, 3):
        assert run_ranks(now, restore, with_gloo=False) == [fresh(rank) for rank in range(now)]
