"""Staging for `dcp.async_save`: straight into the memory that is uploaded."""

from __future__ import annotations

import copy
import ctypes
import weakref
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from . import _native
from ._checkpointer import Checkpointer
from ._flatten import KEPT
from ._leaf import Leaf, dtensor_class, local_parts, tensor_dtype, tensor_leaf
from ._shares import Share

if TYPE_CHECKING:
    from .dcp import Writer


class Stager(AsyncStager):  # type: ignore[misc]
    """Stages what `dcp.async_save` saves through a `Writer` in that writer's own shared memory.

        stager = forebay.dcp.Stager(writer)
        dcp.async_save(state, checkpoint_id=500, storage_writer=writer, async_stager=stager)

    Tensors are copied once, by Forebay's own threads, and checksummed on the way; `async_save` returns when they are. Where
    a rank writes all that it holds (FSDP, tensor parallelism, one process) the writer uploads them as they lie; where torch
    has it write less (what other ranks hold as well), that is copied once more. Where both places for a snapshot are taken
    by earlier saves, what was staged before is not written yet, or a tensor is of a kind that Forebay does not stage, torch's
    own stager is used.

    Args:
        writer: The writer that `async_save` is given.
    """

    _synchronize_after_execute = False

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of `state_dict` that training does not change."""
        if self._is_used():
            # The slot that is left is for what the writer copies by itself.
            return _plain(state_dict)
        flat, paths = flatten_state_dict(state_dict)
        leaves = {name: _leaf(name, value) for name, value in flat.items() if isinstance(value, torch.Tensor)}
        staged = _fill(self._writer._checkpointer_to_stage(), leaves)
        if staged is None:
            return _plain(state_dict)
        copies = {
            name: staged.copy_of(name, value) if name in leaves else copy.deepcopy(value)
            for name, value in flat.items()
        }
        nested: dict[str, Any] = unflatten_state_dict(copies, paths)
        self._writer._staged = staged
        return nested

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns when all is copied."""

    def close(self) -> None:
        """Gives up what was staged and not written, but for what a save is about to write."""
        self._is_used()

    def _is_used(self) -> bool:
        """Whether somebody may still write what was staged last; gives it up where nobody does."""
        with self._writer._lock:
            staged = self._writer._staged
            if staged is None:
                return False
            if staged.is_lent():
                return True
            self._writer._staged = None
        staged.give_up()
        return False


def _plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy in plain memory, made here and now."""
    plain: dict[str, Any] = DefaultStager(StagingOptions(False, False, False, False)).stage(state_dict)
    return plain


class Staged:
    """A filled snapshot, and which tensors lie where in it."""

    def __init__(self, checkpointer: Checkpointer, snapshot: _native.Snapshot, places: dict[str, tuple[Leaf, int]]):
        self.checkpointer = checkpointer
        self.snapshot = snapshot
        self._places = places
        self._lent: list[weakref.ref[Any]] = []
        """The memory of each copy that was given out, which lives as long as tensors in it."""

    def is_lent(self) -> bool:
        """Whether anybody still refers to the copies."""
        return any(memory() is not None for memory in self._lent)

    def lends(self, leaves: list[Leaf]) -> bool:
        """Whether any of these lies in it."""
        ranges = [(place, place + leaf.size) for leaf, place in self._places.values()]
        starts = [leaf.address for leaf in leaves if leaf.address is not None and leaf.size]
        return any(first <= start < last for start in starts for first, last in ranges)

    def holds(self, leaves: list[Leaf]) -> bool:
        """Whether these are all that is in it, and lie there."""
        there = {_fact(leaf, place) for leaf, place in self._places.values()}
        return len(leaves) == len(there) and {_fact(leaf, leaf.address) for leaf in leaves} == there

    def copy_of(self, name: str, value: Any) -> Any:
        """A tensor as `value`, whose bytes are those in the snapshot."""
        dtensor = dtensor_class()
        is_spread = dtensor is not None and isinstance(value, dtensor)
        local = value._local_tensor if is_spread else value
        if name in self._places:
            leaf, place = self._places[name]
            memory = (ctypes.c_char * max(leaf.size, 1)).from_address(place)
            self._lent.append(weakref.ref(memory))
            flat = torch.frombuffer(memory, dtype=torch.uint8)[: leaf.size]
            copied = flat.view(local.dtype).view(local.shape)
        else:
            copied = torch.empty(local.shape, dtype=local.dtype)
        if not is_spread:
            return copied
        names, spec = value.detach().__tensor_flatten__()
        inner = {inner: getattr(value, inner) for inner in names}
        return dtensor.__tensor_unflatten__({**inner, "_local_tensor": copied}, spec, value.size(), value.stride())

    def give_up(self) -> None:
        """Lets the memory go."""
        self.checkpointer._session.abandon(self.snapshot)


def _fact(leaf: Leaf, place: Optional[int]) -> tuple[Any, ...]:
    """What a part of a tensor is and where it lies."""
    return leaf.name, leaf.dtype, tuple(leaf.shape), repr(leaf.part), place if leaf.size else None


def _leaf(name: str, tensor: Any) -> Optional[Leaf]:
    """What this rank holds of a tensor; None for one that only torch's stagers know."""
    dtensor = dtensor_class()
    local, shape = tensor, list(tensor.shape)
    offsets, lengths = [0] * len(shape), shape
    if dtensor is not None and isinstance(tensor, dtensor):
        if any(placement.is_partial() for placement in tensor.placements):
            return None
        # A rank outside of its mesh has a part that is no box of it, which is not stored.
        ((local, offsets, lengths),) = local_parts(tensor) or [(tensor._local_tensor, [], [0])]
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or list(local.shape) != lengths:
        return None
    dtype = tensor_dtype(local)
    if dtype is None:
        return None
    leaf = tensor_leaf(name.translate(KEPT), name, local.detach(), dtype)
    leaf.shape, leaf.part = shape, (offsets, lengths)
    return leaf


def _fill(checkpointer: Checkpointer, leaves: dict[str, Optional[Leaf]]) -> Optional[Staged]:
    """Copies tensors into a snapshot; None where one cannot be, or no slot is free."""
    named: list[tuple[str, Leaf]] = []
    for name, leaf in leaves.items():
        if leaf is None:
            return None
        if is_stored(leaf):
            named.append((name, leaf))
    kept = [leaf for _, leaf in named]
    checkpointer._devices.open(kept)
    shares = [Share(index, leaf.name, box_of(leaf)) for index, leaf in enumerate(kept)]
    tensors = [(share.name, kept[share.leaf].dtype, kept[share.leaf].shape, share.part) for share in shares]
    snapshot = checkpointer._session.begin(tensors, checkpointer._threads, 0.0)
    if snapshot is None:
        return None
    try:
        # Asked for before the copy: whoever asks may be about to fill it.
        places = {name: (leaf, snapshot.place(index)[0]) for index, (name, leaf) in enumerate(named)}
        checkpointer._copy(0, snapshot, kept, shares)
    except BaseException:
        checkpointer._session.abandon(snapshot)
        raise
    return Staged(checkpointer, snapshot, places)


def is_stored(leaf: Leaf) -> bool:
    """Whether a rank writes its part of a tensor: one with nothing in it only where the tensor itself is empty."""
    return leaf.size > 0 or 0 in leaf.shape


def box_of(leaf: Leaf) -> Optional[_native.Part]:
    """The part of a tensor that a leaf is, as the engine takes it."""
    return None if leaf.part is None else (False, *leaf.part)
