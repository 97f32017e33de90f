"""Objects that know their own state: anything with `state_dict` and `load_state_dict`, torch's in particular.

A module and the optimizer of its parameters go through `torch.distributed.checkpoint.state_dict`, which names
optimizer state by parameter, not by number. An optimizer that never stepped has no state yet, and asking torch for
it there would make a step; it goes through its own `state_dict`, as does one whose parameters are in no module of
the state, and one that has more to tell than torch's functions take.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Iterator, Optional

from ._choice import Choice
from ._errors import CheckpointMismatch
from ._leaf import local_parts, torch_module
from ._modules import is_same_memory
from ._optimizers import (
    give_by_names,
    has_own,
    keep_options,
    load_exactly,
    state_by_names,
    stepped,
    tell_of_scheduler,
    tells_copies,
)

MAX_DEPTH = 8
"""How deep modules and optimizers are looked for in nested containers."""


def is_stateful(value: Any) -> bool:
    """Whether an object can give its state and take it back."""
    return not isinstance(value, type) and all(
        callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
    )


def _check_options(choice: Choice, optimizers: Sequence[Any]) -> None:
    """Raises `CheckpointMismatch` for an option that is to stay as it is, and that no optimizer has."""
    known = {option for optimizer in optimizers for group in optimizer.param_groups for option in group}
    lacking = [] if isinstance(choice.options, str) else [name for name in choice.options if name not in known]
    if lacking:
        has = ", ".join(map(repr, sorted(known - {"params"}))) or "no optimizer is in the state"
        raise CheckpointMismatch(f"options: no optimizer of the state has {', '.join(map(repr, lacking))} (hint: {has})")


def _search(value: Any, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """The objects in nested containers."""
    if isinstance(value, (list, tuple, dict)):
        if depth > 0:
            for part in value.values() if isinstance(value, dict) else value:
                yield from _search(part, depth - 1)
    else:
        yield value


class Pairs:
    """Which module of a state an optimizer of that state belongs to; and, of one that is restored, what is chosen of it."""

    def __init__(self, state: Any, choice: Optional[Choice] = None) -> None:
        torch = torch_module()
        found = list(_search(state)) if torch is not None else []
        self._modules = [value for value in found if isinstance(value, torch.nn.Module)]
        for module in self._modules:
            _reshard(module)
        self._parameters = [frozenset(map(id, module.parameters())) for module in self._modules]
        self._optimizers = [value for value in found if isinstance(value, torch.optim.Optimizer)]
        self.choice = choice or Choice()
        _check_options(self.choice, self._optimizers)
        self._made: list[Any] = []
        self._kept: dict[int, list[str]] = {}

    def module_of(self, optimizer: Any) -> Optional[Any]:
        """The first module that has all of the optimizer's parameters."""
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module, parameters in zip(self._modules, self._parameters):
            if wanted <= parameters:
                return module
        return None

    def fill(self, module: Any, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state by the names of its module, made where there is none yet."""
        if not optimizer.state:
            self._made.append(optimizer)
        return state_by_names(module, optimizer)

    def keep(self, optimizer: Any, names: list[str]) -> None:
        """Has an optimizer keep what it has of parameters of those names, which it is not given. What was made to be filled is
        none of it."""
        is_made = any(optimizer is one for one in self._made)
        self._kept[id(optimizer)] = [] if is_made else names

    def kept(self, optimizer: Any) -> list[str]:
        """The names of parameters whose state an optimizer keeps."""
        return self._kept.get(id(optimizer), [])

    def unmake(self) -> None:
        """Takes state away that was made to be filled, and is not."""
        for optimizer in self._made:
            optimizer.state.clear()
        self._made.clear()

    def is_replicated(self, value: Any) -> bool:
        """Whether other ranks have the same state: DDP's modules, and the optimizers of their parameters."""
        torch = torch_module()
        if torch is None:
            return False
        if isinstance(value, torch.optim.Optimizer):
            value = self.module_of(value)
        return isinstance(uncompiled(value), torch.nn.parallel.DistributedDataParallel)

    def ignored_addresses(self, value: Any) -> frozenset[int]:
        """Where the bytes are of what DDP was told to leave alone (`_set_params_and_buffers_to_ignore_for_model`), with the state
        that an optimizer has of it: each rank's own, for nothing keeps them equal."""
        is_optimizer = isinstance(value, torch_module().optim.Optimizer)
        wrapped = uncompiled(self.module_of(value) if is_optimizer else value)
        names = getattr(wrapped, "parameters_to_ignore", ())
        if not names:
            return frozenset()
        named = [*wrapped.module.named_parameters(), *wrapped.module.named_buffers()]
        found = [tensor for name, tensor in named if name in names]
        if is_optimizer:
            found = [part for tensor in found for part in value.state.get(tensor, {}).values()]
        tensors = (part for part in found if isinstance(part, torch_module().Tensor) and _is_strided(part))
        return frozenset(tensor.data_ptr() for tensor in tensors if tensor.numel() > 0)

    def has_parts(self) -> bool:
        """Whether a module's parameters are tensors that several ranks hold together."""
        return any(
            tells_copies(module) or any(local_parts(parameter) is not None for parameter in module.parameters())
            for module in self._modules
        )

    def parameter_addresses(self) -> frozenset[int]:
        """Where the bytes of the modules' parameters are that only an optimizer's step changes: of those that one trains, in the
        state or seen by `note_step`. All others are somebody else's to change (averages, a target network), wherever they are."""
        groups = [group for optimizer in (*self._optimizers, *stepped()) for group in optimizer.param_groups]
        trained = frozenset(id(parameter) for group in groups for parameter in group["params"])
        trained -= {id(parameter) for module in self._modules for parameter in _changed_by_forward(module)}
        return frozenset(
            getattr(parameter, "_local_tensor", parameter).data_ptr()
            for module in self._modules
            for parameter in module.parameters()
            if id(parameter) in trained and parameter.device.type in ("cpu", "cuda") and _is_strided(parameter)
        )


def _changed_by_forward(module: Any) -> Iterator[Any]:
    """The parameters that torch's embeddings change as they are looked up."""
    for part in module.modules():
        if getattr(part, "max_norm", None) is not None:
            yield from part.parameters(recurse=False)


def _reshard(module: Any) -> None:
    """Has FSDP2's modules hold their shards, which are what optimizers know and what `state_dict` brings back: a forward
    without a backward leaves the root's parameters whole, and others as they are asked to be."""
    names = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
    kinds = tuple(kind for kind in (getattr(sys.modules.get(name), "FSDPModule", None) for name in names) if kind)
    for part in module.modules() if kinds else ():
        if isinstance(part, kinds):
            part.reshard()


def uncompiled(value: Any) -> Any:
    """What `torch.compile` has wrapped, however often; anything else as it is."""
    # It is imported by whoever compiles, and slow.
    compiled = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    while compiled is not None and isinstance(value, compiled):
        value = value._orig_mod
    return value


def buffer_addresses(value: Any) -> frozenset[int]:
    """Where the bytes of a module's buffers are; none for anything else."""
    buffers = value.buffers() if hasattr(value, "buffers") else ()
    return frozenset(buffer.data_ptr() for buffer in buffers if _is_strided(buffer) and buffer.numel() > 0)


def _is_strided(tensor: Any) -> bool:
    """Whether a tensor's elements lie at one address, which sparse ones do not."""
    return bool(tensor.layout == torch_module().strided)


def state_of(value: Any, pairs: Pairs) -> tuple[str, Any]:
    """How the state was taken, and the state."""
    torch = torch_module()
    if torch is not None and isinstance(value, torch.nn.Module):
        return "module", _module_state(value)
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        module = pairs.module_of(value)
        if module is not None and value.state and not has_own(module, value):
            return "optimizer", _api().get_optimizer_state_dict(module, value)
        return "optimizer-own", value.state_dict()
    return "own", value.state_dict()


def _module_state(module: Any) -> dict[str, Any]:
    """A module's state by its own names, without those of wrappers; as it tells it itself where torch cannot name what a module,
    or a hook, adds to it that is no attribute (bitsandbytes' `weight.absmax`)."""
    try:
        state: dict[str, Any] = _api().get_model_state_dict(module)
    except AttributeError:
        if tells_copies(module):
            raise
        state = _unwrapped(module).state_dict()
    return state


def _unwrapped(module: Any) -> Any:
    """What `torch.compile` and DDP have wrapped; anything else as it is."""
    wrapped = uncompiled(module)
    is_ddp = isinstance(wrapped, torch_module().nn.parallel.DistributedDataParallel)
    return _unwrapped(wrapped.module) if is_ddp else wrapped


def state_to_fill(value: Any, pairs: Pairs) -> tuple[str, Any]:
    """As `state_of`, for what is restored: an optimizer beside its module goes by names, and state that it has not yet is
    made where that can be."""
    torch = torch_module()
    module = pairs.module_of(value) if torch is not None and isinstance(value, torch.optim.Optimizer) else None
    return state_of(value, pairs) if module is None else ("optimizer", pairs.fill(module, value))


def give_state(value: Any, kind: str, state: Any, pairs: Pairs) -> None:
    """Loads what `state_of` took. Raises whatever the object raises when the state is not its own."""
    if kind == "module":
        _give_module(value, state)
    elif kind == "optimizer":
        module = pairs.module_of(value)
        if module is None:
            raise ValueError(APART)
        give_by_names(module, value, state, pairs.kept(value), pairs.choice.keeps_option)
    elif kind == "optimizer-own":
        load_exactly(value, keep_options(value, state, pairs.choice.keeps_option))
    else:
        value.load_state_dict(state)
        if pairs.choice.keeps_option("lr"):
            tell_of_scheduler(value)


def _give_module(module: Any, state: dict[str, Any]) -> None:
    """Gives a module its state, and raises where it takes no notice of what is not in its own memory.

    That the names are those that it tells was seen; it need not tell all that it has.
    """
    if tells_copies(module):
        _api().set_model_state_dict(module, state)
        return
    told = module.state_dict()
    try:
        # torch gives wrapped modules their parameters, buffers and extra state by the wrapper's names, and nothing else.
        names = {next(iter(_api()._get_fqns(module, name))): name for name in told}
    except AttributeError:
        # Of what is no attribute torch knows no names.
        inner = _unwrapped(module)
        told, given = inner.state_dict(), dict(state)
        unknown = inner.load_state_dict(dict(given), strict=False).unexpected_keys
    else:
        given = {names.get(name, name): value for name, value in state.items()}
        options = _api().StateDictOptions(strict=False)
        unknown = _api().set_model_state_dict(module, dict(given), options=options).unexpected_keys
    lost = [name for name in unknown if not _is_told(given[name], told.get(name))]
    if lost:
        raise ValueError(f"it takes no {', '.join(map(repr, lost[:5]))}")


def _is_told(given: Any, told: Any) -> bool:
    """Whether a module that takes no notice of what it is given has it all the same: in the memory that it tells, or as what it
    makes anew whenever it is asked."""
    torch = torch_module()
    if is_same_memory(given, told):
        return True
    if not (isinstance(given, torch.Tensor) and isinstance(told, torch.Tensor)):
        return False
    is_like = given.dtype == told.dtype and given.shape == told.shape and local_parts(told) is None
    return is_like and bool(torch.equal(given.to(told.device), told))


APART = "it was saved with the module that has its parameters; restore both together"
"""Why an optimizer's state by names is not taken."""


def _api() -> Any:
    import torch.distributed.checkpoint.state_dict as api

    return api
