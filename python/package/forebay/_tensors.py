"""The tensors of a step on their way into memory: into live ones that were bound, where these are dense and the
processor's, and into fresh memory; through a buffer, a piece at a time, into a device's and into strided ones.
"""

from __future__ import annotations

import bisect
import ctypes
from typing import Any, Callable, Optional

from . import _native
from ._errors import CheckpointCorrupt, CheckpointError
from ._leaf import (
    SIZES,
    array_dtype,
    converts,
    copy_elements,
    is_same,
    local_parts,
    numpy_module,
    plain_kinds,
    shape_of,
    tensor_dtype,
    torch_dtype,
    torch_module,
)
from ._merge import refuse_mark
from ._pieces import Aside, Pieces

Node = Any
Part = Optional[tuple[list[int], list[int]]]
"""Offsets and lengths of a box of a tensor; none for all of it."""


IN_PART = "the state was changed in part: restore all of it, or begin anew, before it is trained or saved"
"""What a restore leaves that fails once it has begun to change things."""

NOBODY = -1
"""No rank."""


Entry = tuple[int, str, list[int]]
"""Of a tensor of a step its index, element type and shape."""


def entries_of(step: _native.Step) -> dict[str, Entry]:
    """The tensors of a step by their names there."""
    return {name: (index, dtype, shape) for index, (name, dtype, shape, _) in enumerate(step.tensors())}


class Tensors:
    """The tensors of a step, on `read` read into live ones that were bound, and into fresh memory.

    `rank` is the one of the saving job whose own tensors are meant; with `NOBODY` names are those in the step.
    """

    def __init__(
        self, step: _native.Step, threads: int, rank: int = 0, entries: Optional[dict[str, Entry]] = None
    ) -> None:
        self._step = step
        self._threads = threads
        self._rank = rank
        self._entries = entries_of(step) if entries is None else entries
        self._loaded: dict[tuple[str, str], Any] = {}
        self._targets: list[_native.Wanted] = []
        self._bound: list[Any] = []
        self._asides: list[Aside] = []
        self._repeats: list[tuple[Any, Any]] = []
        self._spans: list[tuple[int, int]] = []
        self._apart: dict[int, tuple[Node, Any]] = {}
        self._apart_at: set[Any] = set()

    def of(self, rank: int) -> Tensors:
        """The same, as trees of another rank name them. The list of all tensors, which grows with the ranks, is not made again."""
        return Tensors(self._step, self._threads, rank, self._entries)

    def own(self) -> dict[str, list[str]]:
        """What the step calls what each rank has for itself alone; of ranks that have such, by their numbers."""
        found: dict[str, list[str]] = {}
        for name in self._entries:
            if "@" in name:
                found.setdefault(name.rpartition("@")[2], []).append(name)
        return found

    def entry(self, name: str) -> Entry:
        """Index, element type and shape. Raises `CheckpointCorrupt` when the step holds no such tensor."""
        found = self._entries.get(self.full_name(name))
        if found is None:
            raise CheckpointCorrupt(f"step {self._step.step}: its state names tensor `{name}`, which it does not hold")
        return found

    def shape(self, node: Node) -> list[int]:
        """The shape of what a tree names: a tensor of the step, or a view of one."""
        shape: list[int] = node["view"][0] if "view" in node else self.entry(node["n"])[2]
        return shape

    def full_name(self, name: str) -> str:
        """What the step calls a tensor that a tree names."""
        own = f"{name}@{self._rank}"
        return own if self._rank != NOBODY and own in self._entries else name

    def is_shared(self, node: Node) -> bool:
        """Whether several ranks hold the tensor that a tree names together: it is not one rank's own, and not one that is so small
        that one of those saved it who had it alike."""
        is_alone = self._step.world_size == 1 or "@" in self.full_name(node["n"])
        return not is_alone and not self._step.is_in_one(self.entry(node["n"])[0])

    def are_same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same, as far as the step tells."""
        return self._step.are_same(self.entry(one)[0], self.entry(other)[0])

    def hold_same(self, one: Node, other: Node) -> bool:
        """Whether what two places of a tree name is the same, bit by bit: as the step tells, or by reading both where it may be
        cut in different ways."""
        if one.get("view") != other.get("view"):
            return False
        if one["n"] == other["n"] or self.are_same(one["n"], other["n"]):
            return True
        if self.entry(one["n"])[1:] != self.entry(other["n"])[1:]:
            return False
        torch = torch_module()
        apart = self.of(self._rank)
        apart.want([{"t": "tensor", "n": node["n"]} for node in (one, other)])
        apart.read()
        bits = [apart.get("tensor", node["n"]).reshape(-1).view(torch.uint8) for node in (one, other)]
        return bool(torch.equal(*bits))

    def bind(self, node: Node, live: Any) -> bool:
        """Has the tensor that a tree names read into a live one; of one that several ranks hold, what is here.

        False where the tree names a view, where types or shapes differ, and for an array where another place was bound
        already. A tensor goes to any number of places.
        """
        kind, name = node["t"], node["n"]
        index, dtype, shape = self.entry(name)
        places = None if "view" in node else _places(kind, live, dtype, shape)
        if places is None:
            return False
        former = self._loaded.get((kind, name))
        if former is not None:
            if kind != "tensor":
                return False
            parts = _places(kind, former, dtype, shape) or []
            if [part for part, _ in parts] == [part for part, _ in places]:
                pairs = [(place, source) for (_, place), (_, source) in zip(places, parts)]
                self._repeats += [pair for pair in pairs if not is_same(*pair)]
                return True
        # What is here of it may be another part than in the place before, and is read for itself.
        for part, place in places:
            self._bound.append(place)
            self._aim(kind, index, part, place, dtype)
        self._loaded.setdefault((kind, name), live)
        return True

    def bind_made(self, node: Node, made: Any) -> bool:
        """As `bind`, into a tensor that was made for this one place of a tree and is that of no other."""
        name, is_first = node["n"], ("tensor", node["n"]) not in self._loaded
        if not self.bind(node, made):
            return False
        if is_first:
            del self._loaded["tensor", name]
        self._apart[id(node)] = (node, made)
        return True

    def bind_apart(self, node: Node, live: Any) -> bool:
        """Has the tensor that this one place of a tree names read into a live one of another element type, converted.

        A tensor that several ranks hold gets its parts so whatever its type, and whatever else was bound; any other where
        both types are of floating point, as modules may make something else of those that are not. False for the rest.
        """
        index, dtype, shape = self.entry(node["n"])
        places = None if "view" in node else _places("tensor", live, None, shape)
        if places is None:
            return False
        is_spread = local_parts(live) is not None
        if not is_spread and (type(live) not in plain_kinds() or tensor_dtype(live) == dtype):
            return False
        if not all(converts(dtype, place.dtype, any_kind=is_spread) for _, place in places):
            return False
        self._apart[id(node)] = (node, live)
        for part, place in places:
            # Tied weights are read once.
            where = (index, str(part), place.data_ptr(), place.dtype, place.shape, place.stride())
            if where not in self._apart_at:
                self._apart_at.add(where)
                self._bound.append(place)
                self._read_aside("tensor", index, part, place, dtype)
        return True

    def apart(self, node: Node) -> Any:
        """The live tensor that this place of a tree was read into alone; None for any other place."""
        return self._apart.get(id(node), (None, None))[1]

    def bind_part(self, name: str, part: tuple[list[int], list[int]], place: Any) -> None:
        """Has a box of a tensor, given as offsets and lengths, read into a plain tensor of its shape and any type."""
        index, dtype, _ = self.entry(name)
        self._bound.append(place)
        if tensor_dtype(place) == dtype:
            self._aim("tensor", index, part, place, dtype)
        else:
            self._read_aside("tensor", index, part, place, dtype)

    def want(self, node: Node) -> None:
        """Notes every tensor that a tree names; what is not bound gets memory of its own."""
        if isinstance(node, list):
            for part in node:
                self.want(part)
        elif isinstance(node, dict):
            tag = node.get("t")
            refuse_mark(node)
            if "n" in node and id(node) not in self._apart:
                kind = tag if tag in ("tensor", "array") else "bytes"
                live = self._loaded.get((kind, node["n"]))
                # A view is into memory as it was saved.
                is_apart = "view" in node and live is not None and not _is_dense(live)
                self._allocate("view" if is_apart else kind, node["n"])
            self.want(node.get("v") if tag != "bytes" else None)

    def read_now(self, node: Node) -> None:
        """Reads every tensor that a tree names, into memory of its own, before and beside all else."""
        apart = self.of(self._rank)
        apart.want(node)
        if apart._targets:
            apart.read()
        self._loaded = {**apart._loaded, **self._loaded}

    def wishes(self) -> bytes:
        """What was noted, for the other ranks."""
        targets = [(index, part) for index, part, _, _ in self._targets]
        return _native.wishes(self._step, targets + [(aside.index, aside.part) for aside in self._asides])

    def read(
        self, read: Optional[Callable[[list[_native.Wanted], Pieces, int], None]] = None
    ) -> None:
        """Reads what was noted, by `read` or alone. Raises `CheckpointCorrupt` when any of it is not what was saved: there may be
        a copy elsewhere. What else goes wrong says that live tensors were read into."""
        torch = torch_module()
        pieces = Pieces(self._asides)
        try:
            if read is not None:
                read(self._targets, pieces, self._threads)
            else:
                self._step.read(self._targets, self._threads)
                pieces.read(self._step.read_through, self._threads)
            for place, source in self._repeats:
                with torch.no_grad():
                    copy_elements(place.detach(), source.detach())
        except CheckpointCorrupt:
            raise
        except CheckpointError as error:
            if not self._bound or self._step.tier == "local":
                # The next tier is tried after the local disk.
                raise
            raise type(error)(f"{error}; {IN_PART}") from error
        finally:
            for value in self._bound:
                if torch is not None and isinstance(value, torch.Tensor) and not value.is_inference():
                    torch.autograd.graph.increment_version(value)

    def get(self, kind: str, name: str) -> Any:
        """A tensor, array or byte string that was read."""
        return self._loaded[kind, name]

    def view(self, name: str, shape: list[int], stride: list[int], offset: int) -> Any:
        """Elements of a tensor that was read, from the one at `offset` on, as a tensor of its memory."""
        base = self._loaded.get(("view", name))
        base = self._loaded["tensor", name] if base is None else base
        # A live one may itself lie within another one's memory.
        return base.as_strided(shape, stride, base.storage_offset() + offset)

    def _allocate(self, kind: str, name: str) -> None:
        index, dtype, shape = self.entry(name)
        if (kind, name) in self._loaded:
            return
        if kind in ("tensor", "view"):
            import torch

            self._loaded[kind, name] = torch.empty(shape, dtype=torch_dtype(dtype))
        elif kind == "bytes":
            if dtype != "uint8" or len(shape) != 1:
                raise CheckpointCorrupt(f"step {self._step.step}: tensor `{name}` does not hold a byte string")
            self._loaded[kind, name] = bytearray(shape[0])
        else:
            import numpy

            self._loaded[kind, name] = numpy.empty(shape, dtype=dtype)
        span = _span("tensor" if kind == "view" else kind, self._loaded[kind, name])
        self._targets.append((index, None, *span))

    def _aim(self, kind: str, index: int, part: Part, place: Any, dtype: str) -> None:
        """Has a tensor read into one of its element type."""
        span = self._take_span(kind, place)
        if span is None:
            self._read_aside(kind, index, part, place, dtype)
        else:
            self._targets.append((index, part, *span))

    def _read_aside(self, kind: str, index: int, part: Part, place: Any, dtype: str) -> None:
        """Has a tensor copied to its place: a device's memory, a strided, a shared or another one."""
        self._asides.append(Aside(kind, index, part, place, dtype))

    def _take_span(self, kind: str, place: Any) -> Optional[tuple[int, int]]:
        """Where a tensor's or array's memory is; None where it cannot be read into: it is dense, the processor's, and
        nobody else's."""
        if kind == "tensor":
            is_dense = place.is_cpu and _is_dense(place)
        else:
            is_dense = place.flags.c_contiguous
        if not is_dense:
            return None
        start, size = _span(kind, place)
        if kind == "tensor" and start == 0:
            return None
        at = bisect.bisect(self._spans, (start, size))
        for other, length in self._spans[max(at - 1, 0) : at + 1]:
            if start < other + length and other < start + size:
                return None
        self._spans.insert(at, (start, size))
        return start, size


def _is_dense(tensor: Any) -> bool:
    """Whether a plain tensor's elements lie one behind the other, as they were saved."""
    return local_parts(tensor) is None and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _span(kind: str, value: Any) -> tuple[int, int]:
    """Where the bytes of a dense tensor, array or byte string are: address and length."""
    if kind == "tensor":
        return value.data_ptr(), value.numel() * value.element_size()
    if kind == "bytes":
        return ctypes.addressof((ctypes.c_char * len(value)).from_buffer(value)), len(value)
    return value.ctypes.data, value.nbytes


def _places(kind: str, live: Any, dtype: Optional[str], shape: list[int]) -> Optional[list[tuple[Part, Any]]]:
    """The tensors or arrays of that element type (`None`: of any) that a live value of that shape is made of, each with its
    part of it; None for another value, and one that cannot be written."""
    torch, numpy = torch_module(), numpy_module()
    if kind == "tensor":
        if torch is None or not isinstance(live, torch.Tensor) or shape_of(live) != shape:
            return None
        parts = local_parts(live)
        places: list[tuple[Part, Any]] = [(None, live)]
        if parts is not None:
            places = [((offsets, lengths), local) for local, offsets, lengths in parts]
        are_like = all(tensor_dtype(place) in ((dtype,) if dtype else SIZES) for _, place in places)
        return places if are_like else None
    is_like = numpy is not None and isinstance(live, numpy.ndarray) and array_dtype(live) == dtype
    return [(None, live)] if is_like and live.flags.writeable and list(live.shape) == shape else None
