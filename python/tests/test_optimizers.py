"""Optimizers beside their modules that are not like torch's Adam: those that cannot step bare, have state of their own, or
groups with other options."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import forebay

from .test_ranks import run_ranks

State = dict[str, Any]


class Closing(torch.optim.SGD):
    """Steps with a closure only, as those do that look at two places."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["looks"] = group.get("looks", 0) + 1
        assert closure is not None, "it takes a closure"
        return super().step(closure)


class Moded(torch.optim.SGD):
    """Steps while its groups say that it trains, as those without schedules do."""

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0].get("train"):
            raise Exception("Optimizer was not in train mode when step is called")
        return super().step(closure)


class Rowed(torch.optim.SGD):
    """Has state of a shape of its own, and takes no step without a closure."""

    rows: Any = None

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it takes a closure"
        closure()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = self.rows


class Counting(torch.optim.Adam):
    """Its own state has a key that torch's have not."""

    counter = 0

    def state_dict(self) -> State:
        return {**super().state_dict(), "counter": self.counter}

    def load_state_dict(self, state_dict: State) -> None:
        state = dict(state_dict)
        self.counter = state.pop("counter", -1)
        super().load_state_dict(state)


class Mastered(torch.optim.Optimizer):
    """Keeps more of each parameter, and of how it moves, than its own type holds; and what is no number of floating point."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                    own = self.state[parameter]
                    if not own:
                        own.update(master=parameter.float(), moves=torch.zeros_like(parameter.float()), way="down")
                        own.update(inner={"seen": [torch.tensor((1 << 53) + 1)], "rate": torch.tensor(0.1)})
                    own["moves"].mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
                    own["master"].sub_(own["moves"], alpha=own["inner"]["rate"].item())
                    own["inner"]["seen"][0].add_(2)
                    own["inner"]["rate"].mul_(0.99)
                    parameter.copy_(own["master"])
        return loss


class ClosingMastered(Mastered):
    """Takes no step from which its state could be known."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it takes a closure"
        return super().step(closure)


def linear() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def embedding() -> torch.nn.Module:
    return torch.nn.Embedding(6, 3, sparse=True)


def moded(parameters: Any) -> torch.optim.Optimizer:
    """Restored before the loop says that it trains."""
    return Moded(parameters, lr=0.1, momentum=0.9)


Make = Callable[[Any], torch.optim.Optimizer]

KINDS: dict[str, tuple[Callable[[], torch.nn.Module], Make]] = {
    "lbfgs": (linear, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)),
    "sparse": (embedding, lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1)),
    "closing": (linear, lambda parameters: Closing(parameters, lr=0.1, momentum=0.9)),
    "moded": (linear, moded),
    "counting": (linear, lambda parameters: Counting(parameters, lr=0.1)),
    "mastered": (lambda: linear().bfloat16(), Mastered),
    "closing mastered": (lambda: linear().bfloat16(), ClosingMastered),
}


def made(kind: str, seed: int) -> State:
    make, optimizer = KINDS[kind]
    torch.manual_seed(seed)
    model = make()
    return {"model": model, "optim": optimizer(model.parameters())}


def train(state: State, first: int, last: int) -> None:
    model, optim = state["model"], state["optim"]
    for step in range(first, last + 1):
        if isinstance(optim, Moded):
            optim.param_groups[0]["train"] = True
        torch.manual_seed(step)
        dtype = next(model.parameters()).dtype
        inputs = torch.randint(6, (4,)) if isinstance(model, torch.nn.Embedding) else torch.randn(4, 4).to(dtype)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optim.zero_grad()
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()
            return loss

        optim.step(closure)
        optim.zero_grad()
        if isinstance(optim, Counting):
            optim.counter += 1


def whole(value: Any) -> Any:
    """A value in which tensors are their types and lists of their elements."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, (list, tuple)) else value


def values(state: State) -> Any:
    return [whole(state["model"].state_dict()), whole(state["optim"].state_dict())]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_any_optimizer_goes_on_as_it_was(tmp_path: Path, kind: str, steps_before: int) -> None:
    """Also into one that has state of its own already. Of some, torch can make no state by a step without a closure, or
    with gradients of zero."""
    state = made(kind, 1)
    train(state, 1, 2)
    forebay.save(state, tmp_path)
    found = made(kind, 2)
    train(found, 11, 10 + steps_before)
    forebay.load(tmp_path, found)
    assert values(found) == values(state)
    for one in (state, found):
        train(one, 3, 4)
    assert values(found) == values(state)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", ["mastered", "closing mastered"])
def test_state_by_numbers_keeps_its_types(tmp_path: Path, kind: str, steps_before: int) -> None:
    """Without its module beside it, an optimizer that never stepped says nothing of its types; what was saved does."""
    state = made(kind, 1)
    train(state, 1, 2)
    forebay.save({"optim": state["optim"]}, tmp_path)
    found = made(kind, 1)
    train(found, 11, 10 + steps_before)
    found["model"].load_state_dict(state["model"].state_dict())
    forebay.load(tmp_path, {"optim": found["optim"]})
    for one in (state, found):
        train(one, 3, 4)
    assert values(found) == values(state)


def test_state_of_another_type_is_converted_to_the_live_one(tmp_path: Path) -> None:
    """As a module's tensors are, in both directions; torch's own optimizers have their parameters' type."""
    coarse, fine = made("counting", 1), made("mastered", 1)
    train(coarse, 1, 2)
    train(fine, 1, 2)
    forebay.save({"coarse": coarse, "fine": fine}, tmp_path)
    for steps_before in (0, 2):
        found = {"coarse": made("counting", 2), "fine": made("mastered", 2)}
        found["coarse"]["model"].bfloat16()
        found["fine"]["model"].double()
        for state in found.values():
            train(state, 1, steps_before)
        forebay.load(tmp_path, found)
        for name, dtype, key in ("coarse", torch.bfloat16, "exp_avg"), ("fine", torch.float32, "master"):
            pairs = zip(found[name]["optim"].state.values(), {"coarse": coarse, "fine": fine}[name]["optim"].state.values())
            for mine, theirs in pairs:
                assert mine[key].dtype == dtype and torch.equal(mine[key], theirs[key].to(dtype))
        for state in found.values():
            train(state, 3, 3)


def test_optimizers_that_take_their_state_by_themselves_have_the_last_word(tmp_path: Path) -> None:
    """What its own `load_state_dict` makes of a type that the live one has not, Forebay leaves."""

    class Packing(Mastered):
        def load_state_dict(self, state_dict: State) -> None:
            super().load_state_dict(state_dict)
            for own in self.state.values():
                own["master"] = own["master"].half()

    state = made("mastered", 1)
    train(state, 1, 1)
    forebay.save(state, tmp_path)
    found = made("mastered", 2)
    found["optim"] = Packing(found["model"].parameters())
    found["optim"].load_state_dict(state["optim"].state_dict())
    forebay.load(tmp_path, found)
    assert all(own["master"].dtype == torch.float16 for own in found["optim"].state.values())


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@pytest.mark.filterwarnings("ignore")
def test_sharded_parameters_get_sharded_state(tmp_path: Path) -> None:
    """Whether or not their optimizer can step bare, and where there are gradients already."""

    def sharded(kind: str, seed: int) -> State:
        state = made(kind, seed)
        fully_shard(state["model"], mesh=mesh())
        optim = KINDS[kind][1](state["model"].parameters())
        return {"model": state["model"], "optim": optim}

    def work(rank: int) -> Any:
        for kind in ("closing", "counting", "mastered", "closing mastered"):
            state, found = sharded(kind, 1), sharded(kind, 2)
            train(state, 1, 2)
            if kind == "closing":
                # Of what has gradients torch takes a step.
                found["model"](torch.ones(2, 4)).sum().backward()
            with forebay.Checkpointer(tmp_path / kind, rng=False) as checkpointer:
                checkpointer.save_now(2, state)
            with forebay.Checkpointer(tmp_path / kind, rng=False) as checkpointer:
                assert checkpointer.restore(found) == 2
            parameter = next(iter(found["model"].parameters()))
            own = [value for value in found["optim"].state[parameter].values() if isinstance(value, torch.Tensor)]
            sharded_state = [value for value in own if value.dim() > 0]
            assert all(isinstance(value, DTensor) for value in sharded_state) and sharded_state
            assert values(found) == values(state)
            for one in (state, found):
                train(one, 3, 3)
            assert values(found) == values(state)
        return True

    assert run_ranks(2, work) == [True, True]


class Remembering(torch.optim.SGD):
    """Goes by the last gradients, which it keeps in a list."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                last = [*own.get("last", []), parameter.grad.clone()][-3:]
                own.update(last=last, both=(last[0].clone(), {"rates": [torch.tensor(0.5)]}))
                with torch.no_grad():
                    for gradient in last:
                        parameter.sub_(gradient, alpha=group["lr"])


class ClosingRemembering(Remembering):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it takes a closure"
        closure()
        return super().step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Remembering, ClosingRemembering])
@pytest.mark.parametrize("is_beside", [True, False], ids=["by name", "by number"])
def test_sharded_state_in_lists_comes_back_in_parts(tmp_path: Path, kind: Any, is_beside: bool) -> None:
    """However many entries the live lists have: all of each tensor came to every rank."""

    def sharded(seed: int) -> State:
        torch.manual_seed(seed)
        model = torch.nn.Linear(64, 64)
        fully_shard(model, mesh=mesh())
        return {"model": model, "optim": kind(model.parameters(), lr=0.1)}

    def part(state: State) -> State:
        return state if is_beside else {"optim": state["optim"]}

    def train(state: State, steps: int) -> list[Any]:
        def closure() -> Any:
            state["optim"].zero_grad()
            loss = state["model"](torch.ones(2, 64)).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            closure()
            state["optim"].step(closure)
        return [parameter.to_local() for parameter in state["model"].parameters()]

    def tensors(state: State) -> list[Any]:
        entries = [entry for own in state["optim"].state.values() for entry in (*own["last"], own["both"][0])]
        assert all(isinstance(entry, DTensor) for entry in entries)
        return [entry.to_local() for entry in entries]

    def work(rank: int) -> Any:
        state = sharded(1)
        train(state, 3)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(2, part(state))
        sizes, size = [], sum(one.nbytes for one in tensors(state))
        for steps in (0, 1, 3):
            found = sharded(2)
            train(found, steps)
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                checkpointer.restore(part(found))
                assert checkpointer.restored is not None
                model = sum(parameter.to_local().nbytes for parameter in found["model"].parameters())
                sizes.append(checkpointer.restored.bytes - size - (model if is_beside else 0))
            pairs = zip(tensors(state), tensors(found), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
            assert [list(own["both"][1]["rates"]) for own in found["optim"].state.values()] == [[0.5]] * 2
        again = sharded(1)
        if is_beside:
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                checkpointer.restore(again)
            assert all(torch.equal(one, other) for one, other in zip(train(state, 3), train(again, 3), strict=True))
        return sizes

    # Beside them there are the rates.
    assert run_ranks(2, work) == [[8, 8, 8]] * 2


@pytest.mark.filterwarnings("ignore")
def test_state_that_cannot_be_sharded_anew_is_refused(tmp_path: Path) -> None:
    """Which part of it a rank had only the optimizer knows, by a step that it does not take. What each had as its own comes
    back."""

    def work(rank: int) -> Any:
        model = torch.nn.Linear(4, 6)
        fully_shard(model, mesh=mesh())
        own = torch.tensor([7.0, 8.0, rank])
        for name, rows in (("own", own), ("spread", distribute_tensor(torch.ones(3), mesh(), [Shard(0)]))):
            state = {"model": model, "optim": Rowed(model.parameters(), lr=0.1)}
            state["optim"].rows = rows
            train(state, 1, 1)
            with forebay.Checkpointer(tmp_path / name, rng=False) as checkpointer:
                checkpointer.save_now(1, state)
            torch.nn.init.zeros_(model.bias)
            found = {"model": model, "optim": Rowed(model.parameters(), lr=0.1)}
            with forebay.Checkpointer(tmp_path / name, rng=False) as checkpointer:
                if name == "own":
                    assert checkpointer.restore(found) == 1
                    assert all(torch.equal(entry["rows"], own) for entry in found["optim"].state.values())
                    assert len(found["optim"].state) == 2 and model.bias.full_tensor().any()
                    continue
                with pytest.raises(forebay.CheckpointMismatch, match=r"state\['optim'\]: .*'weight'.*'rows'"):
                    checkpointer.restore(found)
            assert not found["optim"].state and not model.bias.full_tensor().any()
        return True

    assert run_ranks(2, work) == [True, True]


def test_a_step_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A restore that is refused afterwards changed nothing."""
    state = made("closing", 1)
    train(state, 1, 1)
    forebay.save({**state, "n": 1}, tmp_path)
    found = made("closing", 2)
    before = values(found)
    with pytest.raises(forebay.CheckpointMismatch, match=r"state: the checkpoint lacks 'm'"):
        forebay.load(tmp_path, {**found, "m": 1})
    assert values(found) == before and not found["optim"].state
    assert all(parameter.grad is None for parameter in found["model"].parameters())


class Closed(torch.optim.SGD):
    """Tells nothing of itself until it was used."""

    def state_dict(self) -> State:
        if not self.state:
            raise RuntimeError("nothing to tell yet")
        return super().state_dict()

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("nothing to step yet")


def test_what_an_optimizer_raises_names_its_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    model(torch.ones(2, 3)).sum().backward()
    state["optim"].step()
    forebay.save({"model": model, "optim": {"all": [state["optim"]]}}, tmp_path / "named")
    forebay.save({"optim": {"all": [state["optim"]]}}, tmp_path / "numbered")
    for name in ("named", "numbered"):
        other = torch.nn.Linear(3, 3)
        before = other.weight.tolist()
        found = {"model": other, "optim": {"all": [Closed(other.parameters(), lr=0.1, momentum=0.9)]}}
        if name == "numbered":
            del found["model"]
            fact = r"state\['optim'\]\['all'\]\[0\]: .*nothing to tell yet"
            with pytest.raises(forebay.CheckpointMismatch, match=fact):
                forebay.load(tmp_path / name, found)
        else:
            # Its own state is not asked for: it is given by the parameters' names.
            forebay.load(tmp_path / name, found)
            before = model.weight.tolist()
        assert other.weight.tolist() == before


def test_state_by_the_order_of_all_parameters_is_refused_in_another(tmp_path: Path) -> None:
    """torch's LBFGS has one state for all, at the first one."""
    state = made("lbfgs", 1)
    train(state, 1, 2)
    forebay.save(state, tmp_path)
    found = made("lbfgs", 2)
    found["optim"] = torch.optim.LBFGS(list(found["model"].parameters())[::-1], lr=0.1)
    before = values(found)
    with pytest.raises(forebay.CheckpointMismatch, match=r"state\['optim'\]: .*order"):
        forebay.load(tmp_path, found)
    assert values(found) == before


def test_an_optimizer_without_its_module_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    state = made("closing", 1)
    train(state, 1, 1)
    forebay.save({**state, "t": torch.ones(3)}, tmp_path)
    found = {"model": linear(), "optim": made("closing", 2)["optim"], "t": torch.zeros(3)}
    with pytest.raises(forebay.CheckpointMismatch, match=r"state\['optim'\]: it was saved with the module"):
        forebay.load(tmp_path, found)
    assert not found["t"].any()


def test_state_of_no_parameter_comes_back(tmp_path: Path) -> None:
    """Numbers that an optimizer keeps beside its parameters' state, and keys that hooks add to what it tells."""
    state, found = ({"model": linear()} for _ in range(2))
    for one in (state, found):
        one["optim"] = torch.optim.Adam(one["model"].parameters(), lr=0.1)
    state["optim"].state["global_step"] = 5
    train(state, 1, 2)
    forebay.save(state, tmp_path / "state")
    forebay.load(tmp_path / "state", found)
    assert found["optim"].state["global_step"] == 5 and values(found) == values(state)

    del state["optim"].state["global_step"]
    state["optim"].register_state_dict_post_hook(lambda optimizer, own: own.update(epoch=3))
    forebay.save(state, tmp_path / "hook")
    assert forebay.load(tmp_path / "hook")["optim"]["epoch"] == 3


def groups(model: Any, *options: tuple[str, State]) -> torch.optim.Optimizer:
    """Groups of the layers that begin with a name, each with its options."""
    named = list(model.named_parameters())
    found = []
    for begin, more in options:
        found.append({"params": [parameter for name, parameter in named if name.startswith(begin)], **more})
    return torch.optim.AdamW(found, lr=0.1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_of_other_options_are_not_put_together(tmp_path: Path, ranks: int) -> None:
    """By one rank's state, and by names from what all saved."""

    def work(rank: int) -> Any:
        state = {"model": linear()}
        state["optim"] = groups(state["model"], ("0", {"weight_decay": 0.1}), ("2", {"weight_decay": 0.0}))
        train(state, 1, 2)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, state)
        found = {"model": linear()}
        found["optim"] = groups(found["model"], ("", {"weight_decay": 0.1}))
        before = values(found)
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            fact = r"state\['optim'\]: .*'0.weight'.*'2.(weight|bias)'.*'weight_decay'"
            with pytest.raises(forebay.CheckpointMismatch, match=fact):
                checkpointer.restore(found)
        return values(found)[0] == before[0] and found["optim"].param_groups[0]["weight_decay"] == 0.1

    assert run_ranks(ranks, work, with_gloo=False) == [True] * ranks


@pytest.mark.parametrize("begins", [("2", "0"), ("0.w", "0.b", "2"), ("2.bias", "0", "2.weight")])
def test_groups_in_another_order_and_split_further(tmp_path: Path, begins: tuple[str, ...]) -> None:
    decay = {"0": 0.1, "2": 0}
    state = {"model": linear()}
    state["optim"] = groups(state["model"], *((name, {"weight_decay": decay[name]}) for name in decay))
    train(state, 1, 2)
    forebay.save(state, tmp_path)
    found = {"model": linear()}
    found["optim"] = groups(found["model"], *((name, {"weight_decay": 0.5}) for name in begins))
    forebay.load(tmp_path, found)
    assert [group["weight_decay"] for group in found["optim"].param_groups] == [decay[name[0]] for name in begins]
    for one in (state, found):
        train(one, 3, 3)
    assert values(found)[0] == values(state)[0]


def test_options_that_are_tensors_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    def of(first: float, second: float) -> State:
        model = linear()
        options = [("0", {"lr": torch.tensor(first)}), ("2", {"lr": torch.tensor(second)})]
        return {"model": model, "optim": groups(model, *options)}

    for second in (0.1, 0.2):
        state = of(0.1, second)
        state["optim"].param_groups[0]["weight_decay"], state["optim"].param_groups[1]["weight_decay"] = 0, 0.0
        train(state, 1, 2)
        forebay.save(state, tmp_path / str(second))
    found = {"model": linear()}
    found["optim"] = groups(found["model"], ("", {}))
    forebay.load(tmp_path / "0.1", found)
    with pytest.raises(forebay.CheckpointMismatch, match="'lr'"):
        forebay.load(tmp_path / "0.2", found)


@pytest.fixture
def prepared() -> Iterator[Callable[..., Any]]:
    """A model and its optimizer as accelerate gives them, which leaves nothing to the next test."""
    accelerate = pytest.importorskip("accelerate", reason="ACCELERATE is not installed")
    from accelerate.state import AcceleratorState, GradientState

    yield lambda model, optim: accelerate.Accelerator(cpu=True).prepare(model, optim)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("beside", [True, False], ids=["named", "numbered"])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", ["adamw", "mastered"])
def test_optimizers_that_accelerate_prepared_go_on(
    tmp_path: Path, prepared: Any, kind: str, steps_before: int, beside: bool
) -> None:
    """They are optimizers by their class alone: what torch's have, the one has that they wrap, and its types count."""

    def made_ready(seed: int) -> State:
        torch.manual_seed(seed)
        model = linear() if kind == "adamw" else linear().bfloat16()
        optim = torch.optim.AdamW(model.parameters(), lr=0.1) if kind == "adamw" else Mastered(model.parameters())
        model, optim = prepared(model, optim)
        assert type(optim) is not type(optim.optimizer)
        return {"model": model, "optim": optim}

    def asked(state: State) -> State:
        return state if beside else {"optim": state["optim"]}

    state, found = made_ready(1), made_ready(2)
    train(state, 1, 2)
    forebay.save(asked(state), tmp_path)
    train(found, 11, 10 + steps_before)
    if not beside:
        found["model"].load_state_dict(state["model"].state_dict())
    forebay.load(tmp_path, asked(found))
    assert values(found) == values(state)
    for one in (state, found):
        train(one, 3, 4)
    assert values(found) == values(state)


@pytest.mark.parametrize("beside", [True, False], ids=["named", "numbered"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_options_that_are_tensors_stay_where_they_are(tmp_path: Path, steps_before: int, beside: bool) -> None:
    """Captured graphs and schedulers know the tensor that is a learning rate; one of all groups becomes as many as it must."""

    def of(*rates: float) -> State:
        model = linear()
        kinds = [torch.tensor(rate, dtype=torch.float64) for rate in rates]
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        options = [(name, {"lr": kinds[at % len(kinds)], "betas": betas}) for at, name in enumerate(("0", "2.w", "2.b"))]
        return {"model": model, "optim": groups(model, *options)}

    def asked(state: State) -> State:
        return state if beside else {"optim": state["optim"]}

    state = of(0.1, 0.2)
    state["optim"].param_groups[0]["betas"][0].fill_(0.8)
    train(state, 1, 2)
    forebay.save(asked(state), tmp_path)
    for rates in ((0.5, 0.6), (0.7,)):
        found = of(*rates)
        train(found, 11, 10 + steps_before)
        was = [(group["lr"], group["betas"][0]) for group in found["optim"].param_groups]
        found["model"].load_state_dict(state["model"].state_dict())
        forebay.load(tmp_path, asked(found))
        has = [(group["lr"], group["betas"][0]) for group in found["optim"].param_groups]
        kept = [[one is other for one, other in zip(*pair)] for pair in zip(was, has)]
        assert kept == [[True, True], [len(rates) == 2, True], [True, True]]
        assert [rate.item() for rate, _ in has] == [0.1, 0.2, 0.1]
        assert all(beta == state["optim"].param_groups[0]["betas"][0] for _, beta in has)
        assert all(rate.dtype == torch.float64 for rate, _ in has)
        resumed = of(0.1, 0.2)
        resumed["model"].load_state_dict(state["model"].state_dict())
        resumed["optim"].load_state_dict(copy.deepcopy(state["optim"].state_dict()))
        for one in (resumed, found):
            train(one, 3, 4)
        assert values(found)[0] == values(resumed)[0]
