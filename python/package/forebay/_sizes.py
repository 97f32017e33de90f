"""How much memory saves of a state will take.

An optimizer that never stepped has no state yet; by the first save it has more than its module. What it will have is asked
of torch: another optimizer of its class steps parameters that have shapes and no memory, so that nothing of the state, no
generator and no hook takes part. Where torch does not know the class, the state is counted as it is.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any, Optional

from ._flatten import Flattener, Node
from ._leaf import holders, local_parts, torch_module
from ._ranks import Ranks
from ._ties import aliases

_HEADER, _ENTRY = 4096, 512
"""Bytes of a shard's header at most: beside its entries, and for each tensor."""

SNAPSHOTS = 2
"""One is written while the other one is on its way to the store; unless there is memory for one only."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Sizer(Flattener):
    """Takes a state apart, and counts what its optimizers will have once they have stepped."""

    def __init__(self, allow_pickle: bool, replicated: Sequence[str], ranks: Ranks) -> None:
        super().__init__(allow_pickle, replicated)
        self._world_size = ranks.world_size
        self._coming = [0, 0]

    def size(self) -> int:
        """Bytes of memory for what this rank saves: of what several ranks have, its share, but for cuts between rows."""
        count, size = self._coming
        again = aliases([self.ties])
        for leaf in self.leaves:
            if leaf.part is not None and leaf.name in again:
                continue
            size += -(-leaf.size // (self._world_size if leaf.placement == "replicated" else leaf.holders))
        return size + _HEADER + _ENTRY * (len(self.leaves) + count)

    def _object(self, value: Any, path: str, name: str) -> Node:
        node = super()._object(value, path, name)
        torch = torch_module()
        if torch is not None and isinstance(value, torch.optim.Optimizer):
            named = any(fnmatch.fnmatchcase(f"{name}.state.0", pattern) for pattern in self._replicated)
            is_shared = named or self._is_replicated or self._pairs.is_replicated(value)
            count, size = coming_state(value)
            self._coming[0] += count
            self._coming[1] += -(-size // self._world_size) if is_shared else size
        return node


def tell_memory(ranks: Ranks, size: int, snapshots: int, replicas: Optional[int]) -> None:
    """Tells what of the host's memory so many snapshots of `size` bytes take, and as many copies of another host's (none where all
    ranks are on one, None where none are wanted): the logger `forebay` on each rank, and who reads standard
    error once for the job, as nobody sees that logger who did not ask for it."""
    whose, others = "", ""
    if not ranks.alone:
        whose, others = f"rank {ranks.rank} of {ranks.world_size}: ", "; each other rank takes as much for what it saves"
    each = f", {snapshots} snapshots of {_in_units(size)}" if snapshots > 1 else ""
    if replicas is not None:
        each += ", and as much for copies of another host's" if replicas else "; all ranks are on one host, and no other has copies"
    memory = f"{_in_units((1 + (replicas or 0)) * snapshots * size)} of this host's memory{each}"
    text = f"{whose}saves take {memory}"
    logging.getLogger("forebay").info("%s", text)
    # No warning: nothing is wrong, and where warnings are errors it would end the training. Nor does a stream that is closed.
    if ranks.rank == 0 and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"forebay: {text}{others}\n")
            sys.stderr.flush()


def _in_units(size: int) -> str:
    """Bytes as people read them: `5.2 GiB`."""
    amount, unit = float(size), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{size} B"


def coming_state(optimizer: Any) -> tuple[int, int]:
    """Tensors, and their bytes on this rank, of the state that an optimizer's first step will make.

    Of a subclass it is the state of torch's class. Parameters that need no gradient get none, and one that has state gets
    no more.
    """
    torch = torch_module()
    kind: Any = next(kind for kind in type(optimizer).__mro__ if f"{kind.__module__}.".startswith("torch.optim."))
    if kind is torch.optim.Optimizer:
        return 0, 0
    groups: list[dict[str, Any]] = []
    # Layers are alike: one stand-in for all parameters of a shape.
    weights: dict[Any, float] = {}
    counts: dict[Any, int] = {}
    for group in optimizer.param_groups:
        alike: dict[Any, Any] = {}
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter in optimizer.state:
                continue
            parts = local_parts(parameter)
            for local in [parameter] if parts is None else [local for local, _, _ in parts]:
                like = alike.get((local.shape, local.dtype))
                if like is None:
                    like = torch.empty(local.shape, dtype=local.dtype, device="meta", requires_grad=True)
                    like.grad = torch.empty(local.shape, dtype=local.dtype, device="meta")
                    alike[local.shape, local.dtype] = like
                counts[like] = counts.get(like, 0) + 1
                weights[like] = weights.get(like, 0.0) + 1 / holders(parameter)
        # These choose among ways to compute the same.
        ways = {way: False for way in ("foreach", "fused", "capturable", "differentiable") if way in group}
        groups.append({**group, **ways, "params": list(alike.values())})
    state: dict[Any, dict[str, Any]] = collections.defaultdict(dict)
    # A step that wants numbers (ASGD), a closure or sparse gradients fails, some of them when they have made their state.
    with contextlib.suppress(Exception), torch.no_grad():
        # Of a class of its own: torch wraps the steps of classes once it has seen one.
        own: Any = type(kind.__name__, (kind,), {})
        stand_in = own.__new__(own)
        stand_in.__setstate__({"defaults": dict(optimizer.defaults), "state": state, "param_groups": groups})
        # What is wrapped calls hooks, those of all optimizers as well.
        kind.step.__wrapped__(stand_in)
    made = [(like, value) for like, own in state.items() for value in own.values() if isinstance(value, torch.Tensor)]
    size = sum(value.numel() * value.element_size() * weights[like] for like, value in made)
    return sum(counts[like] for like, _ in made), math.ceil(size)
