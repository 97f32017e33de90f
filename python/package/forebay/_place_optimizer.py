"""An optimizer's state on its way into a live optimizer: compared before anything is changed, and read into place.

By the parameters' names where it lies beside its module, else by their numbers. A tensor that the live one has not yet is
made here where it is a part of one that several ranks hold, or a device's; any other is built like the rest of the state.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Iterator

from ._choice import HINT, SHAPE_HINT, Choice
from ._errors import CheckpointError, CheckpointMismatch
from ._keyed import pairs_of
from ._leaf import local_parts, refuse_meta, shape_of, torch_dtype, torch_module
from ._merge import Groups, differing_option, goes_by_number, groups_of, tag_of
from ._objects import APART, Pairs, state_to_fill
from ._optimizers import names, tells_copies, underneath
from ._tensors import Node
from ._unflatten import Builder


BY_OPTION = frozenset(("max_exp_avg_sq", "momentum_buffer", "grad_avg"))
"""What torch's optimizers have of a parameter where an option says so, which the groups that were saved bring along."""

_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""Options by which torch's optimizers look for state that they make at their first step alone; but SGD makes it at any."""

WITHOUT = "hint: Checkpointer.restore(without=) brings back the rest, and an optimizer that is left out begins anew"
"""What to do about an optimizer that is not the one that was saved."""


class OptimizerPlacer:
    """Plans how the states of optimizers go into live ones."""

    def __init__(
        self,
        builder: Builder,
        pairs: Pairs,
        choice: Choice,
        leaves: Callable[[str], bool],
        missing: list[str],
        unexpected: list[str],
    ) -> None:
        self._builder = builder
        self._tensors = builder.tensors
        self._pairs = pairs
        self._choice = choice
        self._leaves = leaves
        self._missing = missing
        self._unexpected = unexpected
        self._bound: set[int] = set()

    def place(self, kind: str, tree: Node, live: Any, path: str, name: str) -> Node:
        """Binds the tensors of an optimizer's state, and gives what of it is to be given. Raises `CheckpointMismatch` where the
        live one is not like it."""
        torch = torch_module()
        is_optimizer = torch is not None and isinstance(live, torch.optim.Optimizer)
        module = self._pairs.module_of(live) if is_optimizer else None
        if goes_by_number(kind):
            if is_optimizer:
                numbered = itertools.chain.from_iterable(group["params"] for group in live.param_groups)
                parameters = dict(enumerate(numbered))
                self._refuse_meta(tree, parameters, path)
                has = taken(live, self._pairs, path, by_names=False)[1]
                has = has if isinstance(has, dict) else {}
                self._check_sizes(tree, live, path)
                self._check_class(tree, live, has, path)
                self._check_needed(tree, live, {parameter: number for number, parameter in parameters.items()}, path)
                self._bind_there(tree, has)
                self._bind_made(tree, has, parameters, path)
            return tree
        if not is_optimizer:
            raise CheckpointMismatch(f"{path}: a torch optimizer was saved, the state has a {type(live).__name__}")
        if module is None:
            raise CheckpointMismatch(f"{path}: {APART}")
        named = {name: parameter for parameter, called in names(module).items() for name in called}
        self._refuse_meta(tree, named, path)
        self._check_needed(tree, live, {parameter: name for name, parameter in named.items()}, path)
        has = taken(live, self._pairs, path)[1]
        own = {} if tells_copies(module) else named
        groups = groups_of(tree)
        if groups is not None:
            tree, has, kept = self._chosen_of(tree, groups, has, name)
            kept += self._note_others(groups, tree, has, own, name, path)
            if kept and tells_copies(module):
                raise CheckpointMismatch(f"{path}: an optimizer of FSDP1 is restored as a whole only")
            self._pairs.keep(live, kept)
            self._check_class(tree, live, has, path)
            _check_order(groups, has, live, path)
            self._check_options(groups, has, path)
            self._check_shapes(tree, has, own, path)
        self._bind_there(tree, has)
        self._bind_made(tree, has, own, path)
        return tree

    def lessened(self, has: Any, node: Node, name: str) -> Any:
        """Of an optimizer's state by names what is asked for of a tree: nothing that is left out, nor, where the two may differ,
        parameters that the tree knows not."""
        groups = groups_of(node["v"] if tag_of(node) == "object" else node)
        if groups is None or (self._choice.strict and not self._choice.without):
            return has
        known = {called for names, _ in groups for called in names}

        def is_asked(called: str) -> bool:
            return not self._leaves(f"{name}.state.{called}") and (self._choice.strict or called in known)

        found = [{**group, "params": list(filter(is_asked, group["params"]))} for group in has["param_groups"]]
        kept = [group for group, was in zip(found, has["param_groups"]) if group["params"] or not was["params"]]
        state = {called: own for called, own in has["state"].items() if is_asked(called)}
        return {**has, "state": state, "param_groups": kept}

    def _chosen_of(self, tree: Node, groups: Groups, has: Any, name: str) -> tuple[Node, Any, list[str]]:
        """What is chosen of the state that was saved and of the live one, and the names of what is left out of both."""
        if not self._choice.without:
            return tree, has, []
        pairs = dict(tree["v"])
        called = {one for names, _ in groups for one in names} | {one for group in has["param_groups"] for one in group["params"]}
        kept = sorted(one for one in called if self._leaves(f"{name}.state.{one}"))
        state = {**pairs["state"], "v": [pair for pair in pairs["state"]["v"] if pair[0] not in kept]}
        lesser = {**has, "state": {one: own for one, own in has["state"].items() if one not in kept}}
        return {**tree, "v": [["state", state], *([key, value] for key, value in tree["v"] if key != "state")]}, lesser, kept

    def _note_others(
        self, groups: Groups, tree: Node, has: Any, own: dict[str, Any], name: str, path: str
    ) -> list[str]:
        """Notes parameters that one side alone has, and gives the names of those that the live one has. Raises
        `CheckpointMismatch` for them where both must have the same; of what is frozen there may be none."""
        lacking, lost = self._lacking(groups, has, own, name), self._lost(groups, tree, has, own, name)
        if self._choice.strict and lacking:
            raise CheckpointMismatch(f"{path}: the checkpoint lacks {lacking[0]!r} ({HINT})")
        if self._choice.strict and lost:
            names = ", ".join(map(repr, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            text = f"state of parameters was saved that the optimizer does not have: {names}"
            raise CheckpointMismatch(f"{path}: {text} ({WITHOUT}; strict=False leaves out what it does not have)")
        self._missing += [f"{name}.state.{one}" for one in lacking]
        self._unexpected += [f"{name}.state.{one}" for one in lost]
        return lacking

    def _check_shapes(self, tree: Node, has: Any, own: dict[str, Any], path: str) -> None:
        """Whether what parameters have of their own shape was saved of that shape: an optimizer takes any other, and fails at its
        next step."""
        torch = torch_module()
        for called, state in self._entries(self._entries(tree).get("state")).items():
            live = has["state"].get(called) if called in own else None
            has_of = live if isinstance(live, dict) else {}
            for key, node in self._entries(state).items():
                told = has_of.get(key)
                if tag_of(node) != "tensor" or not isinstance(told, torch.Tensor):
                    continue
                shape, live_shape = self._tensors.shape(node), shape_of(told)
                if live_shape == shape_of(own[called]) and shape != live_shape and math.prod(live_shape) > 1:
                    text = f"{shape} was saved, the state has {live_shape}"
                    raise CheckpointMismatch(f"{path}[{called!r}][{key!r}]: {text} ({SHAPE_HINT})")

    def _check_options(self, groups: Groups, has: Any, path: str) -> None:
        """Whether the parameters of each live group had the same options: it has one of each."""
        options_of = {name: options for called, options in groups for name in called}
        for group in has["param_groups"]:
            # One parameter of each group that was saved.
            among: dict[int, str] = {}
            for name in group["params"]:
                if name in options_of:
                    among.setdefault(id(options_of[name]), name)
            for first, other in itertools.pairwise(among.values()):
                pair = options_of[first], options_of[other]
                option = differing_option(*pair, self._tensors.are_same, self._choice.keeps_option)
                if option is not None:
                    which = f"{first!r} and {other!r} were saved in groups that differ in {option!r}"
                    raise CheckpointMismatch(f"{path}: {which}, and are in one group of the state")

    def _refuse_meta(self, tree: Node, parameters: dict[Any, Any], path: str) -> None:
        """Refuses state of parameters without memory: torch puts it where they are."""
        for key in self._entries(self._entries(tree).get("state")):
            if key in parameters:
                refuse_meta(parameters[key], f"{path}[{key!r}]")

    def _check_sizes(self, tree: Node, live: Any, path: str) -> None:
        """Whether as many parameters were saved, where torch's own method takes the state: it finds that only then."""
        torch = torch_module()
        groups = self._entries(tree).get("param_groups")
        is_torchs = type(underneath(live)).load_state_dict is torch.optim.Optimizer.load_state_dict
        if not is_torchs or not isinstance(groups, list):
            return
        params = [self._entries(group).get("params") for group in groups]
        saved = [len(part) if isinstance(part, list) else 0 for part in params]
        sizes = [len(group["params"]) for group in live.param_groups]
        if saved != sizes:
            text = f"groups of {saved} parameters were saved, the state has {sizes}"
            raise CheckpointMismatch(f"{path}: {text} ({WITHOUT})")

    def _check_class(self, tree: Node, live: Any, has: dict[Any, Any], path: str) -> None:
        """Whether the state can be one of the live one's class, which no step names: whether the groups have the numbers that
        torch's own classes go by, and parameters what the live ones have, of which an option may be the reason."""
        inner, entries = underneath(live), self._entries(tree)
        is_torchs = f"{type(inner).__module__}.".startswith("torch.optim.")
        groups = entries.get("param_groups")
        options = [self._entries(group) for group in groups if pairs_of(group)] if isinstance(groups, list) else []
        lacking = [
            name
            for name, value in (inner.defaults.items() if is_torchs else ())
            if _is_number(value) and any(name not in given for given in options)
        ]
        if lacking:
            raise _other_class(path, "its groups have", lacking, inner)
        states = self._entries(entries.get("state"))
        alike = [key for key in states if isinstance(has.get("state", {}).get(key), dict)]
        saved = {name for key in alike for name in self._entries(states[key])}
        wanted = {name for key in alike for name in has["state"][key]}
        lacking = sorted(map(str, wanted - saved - (BY_OPTION if is_torchs else set())))
        if lacking and saved - wanted and (is_torchs or saved & wanted <= {"step"}):
            raise _other_class(path, "its parameters have", lacking, inner)

    def _check_needed(self, tree: Node, live: Any, keys: dict[Any, Any], path: str) -> None:
        """Whether what options that stay ask for was saved: torch's own optimizers fail at their next step without it."""
        inner, torch = underneath(live), torch_module()
        if not f"{type(inner).__module__}.".startswith("torch.optim.") or isinstance(inner, torch.optim.SGD):
            return
        states = self._entries(self._entries(tree).get("state"))
        for group in live.param_groups:
            for option in (one for one in _NEEDED if group.get(one) and self._choice.keeps_option(one)):
                for parameter in group["params"]:
                    key = keys.get(parameter)
                    saved = self._entries(states.get(key))
                    if saved and _NEEDED[option] not in saved:
                        text = f"{option} stays {group[option]!r}, and no {_NEEDED[option]!r} was saved of {key!r}"
                        raise CheckpointMismatch(f"{path}: {text} (hint: options= says which options stay)")

    def _lacking(self, groups: Groups, has: Any, own: dict[str, Any], name: str) -> list[str]:
        """Which live parameters the checkpoint has no state of, though it is asked for by name."""
        known = {called for names, _ in groups for called in names}
        wanted = (called for group in has["param_groups"] for called in group["params"] if called not in known)
        return [
            called
            for called in wanted
            if (called in has["state"] or (called in own and own[called].requires_grad))
            and not self._leaves(f"{name}.state.{called}")
        ]

    def _lost(self, groups: Groups, tree: Node, has: Any, own: dict[str, Any], name: str) -> list[str]:
        """Which parameters with a state that was saved the live one has not."""
        states = self._entries(self._entries(tree).get("state"))
        wanted = {called for group in has["param_groups"] for called in group["params"]}
        saved = dict.fromkeys([*(called for names, _ in groups for called in names), *states])
        return [
            called
            for called in saved
            if called not in wanted
            and (self._entries(states.get(called)) or (called in own and own[called].requires_grad))
            and not self._leaves(f"{name}.state.{called}")
        ]

    def _bind_there(self, tree: Node, has: dict[Any, Any]) -> None:
        """Binds the tensors of a state that the live one has in the same places; groups have options of their own."""
        for key, value in self._entries(tree).items():
            if key in has and key != "param_groups":
                self._bind_all(value, has[key])

    def _bind_all(self, node: Node, live: Any) -> None:
        if tag_of(node) == "tensor":
            if self._tensors.bind(node, live) or self._tensors.bind_apart(node, live):
                self._bound.add(id(node))
        elif isinstance(live, dict):
            for key, value in self._entries(node).items():
                if key in live:
                    self._bind_all(value, live[key])
        elif isinstance(live, (list, tuple)):
            parts = _parts_of(node)
            for part, value in zip(parts, live) if len(parts) == len(live) else ():
                self._bind_all(part, value)

    def _bind_made(self, tree: Node, has: Any, parameters: dict[Any, Any], path: str) -> None:
        """Binds tensors made anew for state that the live optimizer lacks."""
        known = has.get("state", {})
        for key, state in self._entries(self._entries(tree).get("state")).items():
            parameter = parameters.get(key)
            if parameter is None:
                continue
            is_spread = local_parts(parameter) is not None
            # What is all here is built like anything else where some of it is there.
            if not is_spread and (parameter.is_cpu or key in known):
                continue
            for name, value in self._entries(state).items():
                for node in self._unbound(value):
                    self._bind_like(node, parameter, is_spread, f"{key!r}'s {name!r}", path)

    def _unbound(self, node: Node) -> Iterator[Node]:
        """The tensors in an entry that are not bound."""
        if tag_of(node) == "tensor":
            if id(node) not in self._bound:
                yield node
            return
        for part in (*self._entries(node).values(), *_parts_of(node)):
            yield from self._unbound(part)

    def _bind_like(self, node: Node, parameter: Any, is_spread: bool, what: str, path: str) -> None:
        """Binds a tensor to one like its parameter. Raises `CheckpointMismatch` for another part of one that ranks hold."""
        torch = torch_module()
        shape, is_bound = self._tensors.shape(node), False
        if shape == list(parameter.shape):
            dtype = torch_dtype(self._tensors.entry(node["n"])[1])
            is_bound = self._tensors.bind(node, torch.empty_like(parameter, dtype=dtype))
        is_ranks_own = "@" in self._tensors.full_name(node["n"])
        if is_spread and not is_bound and not is_ranks_own and math.prod(shape) > 1:
            text = f"what ranks had of {what} only a step of the optimizer tells"
            raise CheckpointMismatch(f"{path}: {text}, and it took none (hint: restore after a step)")

    def _entries(self, node: Node) -> dict[Any, Node]:
        """What a dict of the tree has; nothing where it is something else."""
        return self._builder.items(pairs_of(node) or [])


def _is_number(value: Any) -> bool:
    """Whether an option is a number or numbers, without which no step is taken; flags come and go between versions of torch."""
    return isinstance(value, (int, float, tuple, list)) and not isinstance(value, bool)


def _other_class(path: str, what: str, lacking: list[str], live: Any) -> CheckpointMismatch:
    names = ", ".join(map(repr, lacking))
    text = f"an optimizer of another class than {type(live).__qualname__} was saved: {what} no {names}"
    return CheckpointMismatch(f"{path}: {text} ({WITHOUT})")


def _parts_of(node: Node) -> list[Node]:
    """What a list or tuple of the tree has; nothing of anything else."""
    parts: list[Node] = node if isinstance(node, list) else node["v"] if tag_of(node) == "tuple" else []
    return parts


def taken(live: Any, pairs: Pairs, path: str, by_names: bool = True) -> tuple[str, Any]:
    """The state of a live object to be filled. Raises `CheckpointMismatch`, whatever the object raises."""
    try:
        return state_to_fill(live, pairs) if by_names else ("own", live.state_dict())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointMismatch(f"{path}: it does not tell its state, to be restored into: {error}") from error


def _check_order(groups: Groups, has: Any, live: Any, path: str) -> None:
    """Whether an optimizer that has one state for all parameters has them as they were."""
    torch = torch_module()
    saved = [name for called, _ in groups for name in called]
    asked = [name for group in has["param_groups"] for name in group["params"]]
    if isinstance(underneath(live), torch.optim.LBFGS) and asked != saved:
        raise CheckpointMismatch(f"{path}: LBFGS has one state of all parameters, which had another order")
