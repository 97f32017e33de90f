"""Optimizers beside the module that has their parameters: their state by the parameters' names, and back.

torch names it (`torch.distributed.checkpoint.state_dict`), and makes that of an optimizer that never stepped, so that there
is something to read into: by a step of gradients that are zero. Some take no such step; those get their state as they do
from a dict of their own, by `load_state_dict` and their parameters' numbers, which needs neither a step nor state of every
parameter. FSDP1 alone names and takes what it has flattened, and goes through torch both ways.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Iterator

from ._leaf import torch_module

Keeps = Callable[[str], bool]
"""Whether an option of that name stays as it is."""

_MOST_TOLD, _MOST_SHOWN = 8, 40
"""Options that are told, and characters of the value of each."""

_ABOUT_PARAMETERS = frozenset(("params", "param_names"))
"""What of a group is no option."""

TOLD = frozenset(("state", "param_groups"))
"""What torch's functions give of an optimizer."""

_stepped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The optimizers that were seen to make a step, by their ids."""


def note_step(optimizer: Any) -> None:
    """An optimizer of torch makes a step: a state need not have it for others to know what it trains."""
    _stepped[id(optimizer)] = optimizer


def stepped() -> list[Any]:
    """The optimizers that were seen to make a step, and are there."""
    found = [reference() for reference in _stepped.valuerefs()]
    return [optimizer for optimizer in found if optimizer is not None]


def tells_copies(module: Any) -> bool:
    """Whether the tensors of a module's state are not its own: FSDP1 makes them."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return fsdp is not None and any(isinstance(part, fsdp) for part in module.modules())


def underneath(optimizer: Any) -> Any:
    """The optimizer that accelerate has wrapped, whose wrapper is one by its class alone; any other as it is."""
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    while wrapper is not None and isinstance(optimizer, wrapper):
        optimizer = optimizer.optimizer
    return optimizer


def has_own(module: Any, optimizer: Any) -> bool:
    """Whether an optimizer has state that torch's functions lose or refuse: what belongs to no parameter, and keys of its
    own beside the state and the groups."""
    torch = torch_module()
    if tells_copies(module):
        return False
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        return True
    # torch's functions ask one that tells more by a method or hooks of its own as well.
    optimizer = underneath(optimizer)
    is_torchs = type(optimizer).state_dict is torch.optim.Optimizer.state_dict and "state_dict" not in vars(optimizer)
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    return bool((hooks or not is_torchs) and optimizer.state_dict().keys() - TOLD)


def names(module: Any) -> dict[Any, list[str]]:
    """What torch calls each parameter of a module, without wrappers' names; several names for what FSDP1 flattened."""
    return {parameter: sorted(_api()._get_fqns(module, name)) for name, parameter in module.named_parameters()}


def state_by_names(module: Any, optimizer: Any) -> dict[str, Any]:
    """An optimizer's state by names, for something to be read into: of one that never stepped, what a step makes.

    Of one that takes no step without gradients it is the groups alone; whatever the step did to them is undone.
    """
    if optimizer.state:
        found: dict[str, Any] = _api().get_optimizer_state_dict(module, optimizer)
        return found
    was = [(group, dict(group)) for group in optimizer.param_groups]
    lacking = [parameter for group, _ in was for parameter in group["params"] if parameter.grad is None]
    try:
        found = _api().get_optimizer_state_dict(module, optimizer)
        _undo(was)
        return found
    except Exception:
        optimizer.state.clear()
        _undo(was)
        for parameter in lacking:
            parameter.grad = None
        if tells_copies(module):
            raise
    called = names(module)
    groups = [
        {**group, "params": [name for parameter in group["params"] for name in called[parameter]]}
        for group in optimizer.param_groups
    ]
    return {"state": {}, "param_groups": groups}


def _undo(groups: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Has groups have the options that they had."""
    for group, options in groups:
        group.clear()
        group.update(options)


def give_by_names(
    module: Any, optimizer: Any, state: Any, kept: Sequence[str] = (), keeps: Keeps = lambda option: False
) -> None:
    """Gives an optimizer its state, and none to parameters that had none: those that no step had changed yet. Those that are
    `kept` have what they have, and so have groups the options that are."""
    torch = torch_module()
    called = names(module)
    regrouped = {"param_groups": _regrouped(optimizer, called, state["param_groups"])}
    groups = keep_options(optimizer, regrouped, keeps)["param_groups"]
    if tells_copies(module):
        _give_by_torch(module, optimizer, {**state, "param_groups": groups})
        return
    if any(type(name) is not str for name in state["state"]):
        raise ValueError("its state does not name its parameters")
    ordered = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(ordered)}
    own = {numbers[name]: value for name, value in state["state"].items() if name in numbers}
    by_name = {name: parameter for parameter, those in called.items() for name in those}
    has = {name: optimizer.state[by_name[name]] for name in kept if by_name.get(name) in optimizer.state}
    own.update({numbers[name]: value for name, value in has.items() if name in numbers})
    for group in groups:
        group["params"] = [numbers[name] for name in group["params"]]
    with torch.no_grad():
        load_exactly(optimizer, {"state": own, "param_groups": groups})


def keep_options(optimizer: Any, state: Any, keeps: Keeps) -> Any:
    """The state with the options that an optimizer's groups have, where these are to stay; what else was saved is told."""
    torch = torch_module()
    if torch is None or not isinstance(optimizer, torch.optim.Optimizer):
        return state
    groups = state.get("param_groups") if isinstance(state, dict) else None
    lives = optimizer.param_groups
    if not isinstance(groups, list) or len(groups) != len(lives):
        # It finds by itself that they are none of its own.
        return state
    found, told = [], []
    for live, saved in zip(lives, groups):
        stay = {name for name in live.keys() | saved.keys() if name not in _ABOUT_PARAMETERS and keeps(name)}
        told += [(name, live[name], saved[name]) for name in sorted(stay & live.keys() & saved.keys())]
        others = {name: value for name, value in saved.items() if name not in stay}
        found.append({**others, **{name: live[name] for name in stay & live.keys()}})
    texts = [f"{name} {_short(has)}, not {_short(other)}" for name, has, other in told if _differ(has, other)]
    _tell(optimizer, "keeps options that were saved otherwise", texts)
    return {**state, "param_groups": found}


def tell_of_scheduler(scheduler: Any) -> None:
    """Warns, by the logger `forebay`, where a scheduler of torch was restored whose optimizer keeps its rates."""
    torch = torch_module()
    if torch is not None and isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        text = "%s is restored beside learning rates that stay, which are not those that it had come to: what it sets next may be"
        hint = "hint: leave it out by without= and step it as often as it was, or have other options stay than lr"
        logging.getLogger("forebay").warning(f"{text} neither run's ({hint})", type(scheduler).__qualname__)


def load_exactly(optimizer: Any, state: Any) -> None:
    """Has an optimizer load a state of its own kind, and gives back what torch made of another type on the way.

    torch gives all state the type of its parameter, which cuts down what an optimizer keeps more of than that: copies of
    16-bit parameters in float32, counts. An entry has the type that the live one had; where there was none, the one that it
    was saved with, but for torch's own optimizers, whose state is of their parameters' type. What an optimizer's own
    `load_state_dict`, or a hook, makes of an entry stays, unless the entry had the type before that it was saved with.
    """
    torch = torch_module()
    if torch is None or not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict(state)
        return
    was = {parameter: _types(own) for parameter, own in optimizer.state.items() if isinstance(parameter, torch.Tensor)}
    with _kept_options(optimizer):
        optimizer.load_state_dict(state)
    if not isinstance(state, dict) or not state.keys() >= TOLD:
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    inner = underneath(optimizer)
    is_torchs = type(inner).load_state_dict is torch.optim.Optimizer.load_state_dict
    is_torchs = is_torchs and "load_state_dict" not in vars(inner) and not _has_load_hooks(inner)
    keeps_saved = is_torchs and not f"{type(inner).__module__}.".startswith("torch.optim.")
    for number, parameter in zip(numbers, parameters):
        if number in state["state"] and parameter in optimizer.state:
            given, has = state["state"][number], optimizer.state[parameter]
            optimizer.state[parameter] = _exactly(given, has, was.get(parameter), is_torchs, keeps_saved)


@contextlib.contextmanager
def _kept_options(optimizer: Any) -> Iterator[None]:
    """Has options of groups that are tensors stay the ones that they are, with what was loaded: captured graphs know them."""
    was = [dict(group) for group in optimizer.param_groups]
    before = [{option: _copied(value) for option, value in group.items()} for group in was]
    yield
    _tell_options(optimizer, before)
    taken: dict[int, Any] = {}
    for old, group in zip(was, optimizer.param_groups):
        for option in old.keys() & group.keys() - {"params"}:
            group[option] = _kept(old[option], group[option], taken)


def _tell_options(optimizer: Any, before: list[dict[str, Any]]) -> None:
    """Tells the logger `forebay` (info) which options of an optimizer's groups are others now than the program had given it: all
    come of the checkpoint."""
    found: list[str] = []
    for old, group in zip(before, optimizer.param_groups):
        for option in sorted(old.keys() & group.keys() - _ABOUT_PARAMETERS):
            if _differ(old[option], group[option]):
                found.append(f"{option} {_short(old[option])} -> {_short(group[option])}")
    _tell(optimizer, "has the options that were saved", found)


def _tell(optimizer: Any, what: str, texts: Sequence[str]) -> None:
    """Tells the logger `forebay` (info), each text once, if there are any."""
    found = list(dict.fromkeys(texts))
    if found:
        more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        told = ", ".join(found[:_MOST_TOLD]) + more
        logging.getLogger("forebay").info("%s %s: %s", type(optimizer).__qualname__, what, told)


def _copied(value: Any) -> Any:
    """An option as it is now, where it may be filled in place."""
    torch = torch_module()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _differ(one: Any, other: Any) -> bool:
    torch = torch_module()
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return str(one) != str(other)
    try:
        return bool(one != other)
    except Exception:
        # Whatever an optimizer has for an option.
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _kept(live: Any, loaded: Any, taken: dict[int, Any]) -> Any:
    """A live option with what was loaded; another one like it where it is a tensor that was `taken` for another value."""
    torch = torch_module()
    if isinstance(live, torch.Tensor) and isinstance(loaded, torch.Tensor) and live.shape == loaded.shape:
        former = taken.setdefault(id(live), loaded)
        is_like = former.device == loaded.device and former.dtype == loaded.dtype
        place = live if is_like and torch.equal(former, loaded) else torch.empty_like(live)
        with torch.no_grad():
            place.copy_(loaded)
        return place
    if type(live) is type(loaded) and type(live) in (list, tuple) and len(live) == len(loaded):
        return type(live)(_kept(one, other, taken) for one, other in zip(live, loaded))
    return loaded


def _has_load_hooks(optimizer: Any) -> bool:
    # Whoever is an optimizer by its class alone has none.
    kinds = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return any(getattr(optimizer, kind, None) for kind in kinds)


def _types(value: Any) -> Any:
    """The element types of what an optimizer has of a parameter, as it has them."""
    if isinstance(value, dict):
        return {key: _types(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_types(part) for part in value]
    return getattr(value, "dtype", None)


def _exactly(given: Any, has: Any, was: Any, is_torchs: bool, keeps_saved: bool) -> Any:
    """What an optimizer is to have for what it was given, of which it made what it has; `was` is what types it had."""
    torch = torch_module()
    if isinstance(given, torch.Tensor) and isinstance(has, torch.Tensor):
        wanted = was if isinstance(was, torch.dtype) else given.dtype if keeps_saved else has.dtype
        are_floating = given.is_floating_point() and wanted.is_floating_point
        if wanted == has.dtype or not (wanted == given.dtype or (is_torchs and are_floating)):
            return has
        return given.to(device=has.device, dtype=wanted)
    if isinstance(given, dict) and isinstance(has, dict):
        types = was if isinstance(was, dict) else {}
        for key in given.keys() & has.keys():
            has[key] = _exactly(given[key], has[key], types.get(key), is_torchs, keeps_saved)
        return has
    if type(given) in (list, tuple) and type(has) is type(given) and len(has) == len(given):
        kinds = was if isinstance(was, list) and len(was) == len(given) else [None] * len(given)
        parts = zip(given, has, kinds)
        return type(given)(_exactly(one, other, kind, is_torchs, keeps_saved) for one, other, kind in parts)
    # torch takes text for a container, and makes another text of it.
    return given if is_torchs and isinstance(given, (str, bytes)) else has


def _regrouped(optimizer: Any, called: dict[Any, list[str]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The live groups, each with the options that its parameters were saved with; with its own where none of them was."""
    holding = {name: group for group in saved for name in group["params"]}
    empty = [group for group in saved if not group["params"]]
    found: list[dict[str, Any]] = []
    taken: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        has = [name for parameter in group["params"] for name in called[parameter]]
        options = next((holding[name] for name in has if name in holding), None)
        if options is None and not has:
            # One without parameters has no names to be known by, but its place.
            at_place = [other for other in saved[number : number + 1] if not other["params"]]
            options = next(iter(at_place or empty), None)
        # What the program calls its parameters, one by one, is the live group's own, or of that very group.
        is_whole = options is not None and options["params"] == has and "param_names" not in group
        own = {key: group[key] for key in ("param_names",) if key in group}
        given = {key: value for key, value in (options or group).items() if key != "param_names" or is_whole}
        given = {key: value for key, value in given.items() if key != "params"}
        # Groups that were one have a learning rate each, where that is a tensor.
        found.append({**(copy.deepcopy(given) if id(options) in taken else given), **own, "params": has})
        taken.add(id(options))
    return found


def _give_by_torch(module: Any, optimizer: Any, state: Any) -> None:
    """torch asks for the state of every parameter; it gets what the optimizer has, which is then taken away."""
    named = {name for group in state["param_groups"] for name in group["params"]}
    lacking = named - state["state"].keys()
    if lacking:
        has = _api().get_optimizer_state_dict(module, optimizer)["state"]
        kept = {name: has[name] for name in lacking & has.keys()}
        state = {**state, "state": {**state["state"], **kept}}
    with _kept_options(optimizer):
        _api().set_optimizer_state_dict(module, optimizer, state)
    for name, parameter in module.named_parameters() if lacking else ():
        if _api()._get_fqns(module, name) <= lacking:
            optimizer.state.pop(parameter, None)


def _api() -> Any:
    import torch.distributed.checkpoint.state_dict as api

    return api
