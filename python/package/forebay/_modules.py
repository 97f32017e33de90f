"""Which tensors of a module's state are its own, to be read into, and which it has to be given.

Most are parameters and buffers, or parts of them. Others are made for whoever asks: extra state, copies that a class tells,
what hooks add. And a class, or a hook, may make something else of what it is given.
"""

from __future__ import annotations

from typing import Any, Iterator, Literal

from ._leaf import local_parts, torch_module
from ._optimizers import tells_copies

Way = Literal["in place", "given", "aside"]
"""How a tensor comes into a module: it is read into its own memory; or into what the module told, and given to it; or into
memory of its own, and given to it, for who may make something else of it."""


class Module:
    """A module that is restored, and what its state was taken from."""

    def __init__(self, module: Any) -> None:
        self.tells_copies = tells_copies(module)
        parts = list(module.modules())
        makers = [part for part in parts if _makes_its_own(part)]
        if not _is_torchs(module.load_state_dict):
            makers.append(module)
        self.makes = bool(makers)
        """Whether anything of it makes something else of what it is given."""
        after = [hook for part in parts for hook in getattr(part, "_load_state_dict_post_hooks", {}).values()]
        self.loads = self.makes or not all(map(_is_torchs, after))
        """Whether it must be given its state, wherever its tensors are."""
        named = [*module.named_parameters(), *module.named_buffers()]
        self._own = {at for _, tensor in named for at in _memory(tensor)}
        self._makers = {at for part in makers for tensor in _tensors(part) for at in _memory(tensor)}
        self._module = module
        self._nowhere = {name.rpartition(".")[2] for name, tensor in named if not _memory(tensor)}

    def unsaved(self) -> list[str]:
        """The names of buffers that are no part of its state (`persistent=False`)."""
        return unsaved_buffers(self._module)

    def way(self, key: str, told: Any) -> Way:
        """How what was saved under a name comes into the module, which tells `told` of it now."""
        if self.tells_copies:
            return "given"
        if self.is_own(key, told) and not _memory(told) & self._makers:
            return "in place"
        return "aside" if self.makes or is_extra(key) else "given"

    def is_own(self, key: str, told: Any) -> bool:
        """Whether what the module tells is a parameter or buffer, or lies in one's memory."""
        if self.tells_copies or is_extra(key) or not _is_tensor(told):
            return False
        at = _memory(told)
        # What has no elements here, or a class that answers for them by itself, is known by its name.
        return at <= self._own if at else key.rpartition(".")[2] in self._nowhere or local_parts(told) is not None

    def keeps_shape(self, key: str, told: Any) -> bool:
        """Whether it takes nothing of another shape than it tells now."""
        return not self.makes or self.tells_copies or self.is_own(key, told)


def takes_its_names_alone(module: Any) -> bool:
    """Whether a module tells its state, and is given it, by torch's own methods alone, which refuse any other names."""
    if tells_copies(module) or Module(module).loads:
        return False
    ways = [way for part in module.modules() for way in (part.state_dict, part._save_to_state_dict)]
    hooks = [hook for part in module.modules() for hook in part._state_dict_hooks.values()]
    return all(map(_is_torchs, (*ways, *hooks)))


def unsaved_buffers(module: Any) -> list[str]:
    """The names of a module's buffers that are no part of its state (`persistent=False`)."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._buffers
        if name in part._non_persistent_buffers_set and part._buffers[name] is not None
    ]


def is_extra(key: Any) -> bool:
    """Whether that is what torch calls state which is not in tensors of a module's. Keys of what was saved may be anything."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def is_same_memory(one: Any, other: Any) -> bool:
    """Whether two tensors are in one memory; no other values are."""
    return bool(_memory(one)) and _memory(one) == _memory(other)


def _tensors(module: Any) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()


def _is_tensor(value: Any) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)


def _memory(tensor: Any) -> frozenset[int]:
    """Where the memory is that a tensor's elements on this rank are in; nothing of one without."""
    if not _is_tensor(tensor):
        return frozenset()
    parts = local_parts(tensor)
    found = set()
    for local in [tensor] if parts is None else [local for local, _, _ in parts]:
        try:
            found.add(local.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):
            # Of a class that answers for its elements by itself.
            continue
    return frozenset(found - {0})


def _makes_its_own(module: Any) -> bool:
    """Whether a module, or a hook on it, comes between what it is given and its tensors."""
    before = getattr(module, "_load_state_dict_pre_hooks", {}).values()
    return not all(map(_is_torchs, [module._load_from_state_dict, *before]))


def _is_torchs(function: Any) -> bool:
    """Whether torch has a function or hook of its own accord."""
    function = getattr(function, "hook", function)
    function = getattr(function, "func", function)
    return f"{getattr(function, '__module__', '')}.".startswith("torch.")
