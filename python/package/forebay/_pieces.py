"""Tensors that cannot be read into where they are, a device's and strided ones: through one buffer, a piece at a time.

The engine fills one half of the buffer and checks what it read; that is copied into its place, by torch or numpy, while
the other half is filled. So a restore takes the buffer, however large the tensors are.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, Optional

from . import _native
from ._leaf import SIZES, copy_elements, numpy_module, torch_dtype, torch_module

BUFFER_BYTES = 32 << 20
"""In two halves, of which one is read into while the other is copied. With as much again on its way from the store it is
what a restore in place takes."""

ALIGNMENT = 64
"""Of pieces in the buffer."""

ReadThrough = Callable[
    [list[tuple[int, Optional[tuple[list[int], list[int]]]]], tuple[int, int], "_native.Give", int], None
]
"""As `Step.read_through`."""


@dataclass
class Aside:
    """A tensor or array of a step, or a box of it, and where it goes."""

    kind: str
    index: int
    part: Optional[tuple[list[int], list[int]]]
    """Offsets and lengths; none for all of it."""
    place: Any
    dtype: str
    """As it was saved; a place of another one has it converted."""

    @property
    def is_tensor(self) -> bool:
        return self.kind == "tensor"

    @property
    def size(self) -> int:
        """Bytes of the buffer that all of it takes."""
        count = self.place.numel() if self.is_tensor else self.place.size
        return -(-int(count) * SIZES[self.dtype] // ALIGNMENT) * ALIGNMENT


class Pieces:
    """Tensors that cannot be read into, and the buffer that is read into in their stead."""

    def __init__(self, asides: list[Aside]) -> None:
        self._asides = asides
        size = min(sum(aside.size for aside in asides), BUFFER_BYTES)
        if size > 0 and any(aside.part is not None for aside in asides):
            # Slices of which parts are wanted are read whole.
            size = BUFFER_BYTES
        # There before the first byte is read into anything.
        self._memory = _memory(size, any(_is_devices(aside) for aside in asides)) if size > 0 else None

    @property
    def wanted(self) -> list[tuple[int, Optional[tuple[list[int], list[int]]]]]:
        return [(aside.index, aside.part) for aside in self._asides]

    def read(self, read_through: ReadThrough, threads: int) -> None:
        """Reads each into its place, by the engine. Raises as `Step.read`; what was copied by then stays."""
        if self._memory is not None:
            memory = self._memory[0]
            read_through(self.wanted, (ctypes.addressof(memory), len(memory)), self.take, threads)

    def take(self, number: int, at: int, part: Optional[tuple[list[int], list[int]]], address: int, length: int) -> None:
        """Copies bytes into a place, from its byte `at` on or into a box of it, given as offsets and lengths."""
        aside = self._asides[number]
        memory = (ctypes.c_char * length).from_address(address)
        if aside.is_tensor:
            torch = torch_module()
            piece = torch.frombuffer(memory, dtype=torch.uint8).view(torch_dtype(aside.dtype))
            with torch.no_grad():
                _put(aside.place.detach(), at // SIZES[aside.dtype], part, piece, copy_elements)
        else:
            numpy = numpy_module()
            # A matrix has rows of two dimensions.
            place = numpy.asarray(aside.place)
            piece = numpy.frombuffer(memory, dtype=aside.dtype)
            _put(place, at // SIZES[aside.dtype], part, piece, numpy.copyto)


def _memory(size: int, is_locked: bool) -> tuple[Any, Any]:
    """A buffer, and what keeps it there."""
    if is_locked:
        torch = torch_module()
        try:
            # Locked, so that the device reads it without a copy between.
            tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return (ctypes.c_char * size).from_address(tensor.data_ptr()), tensor
        except RuntimeError:
            # There is no more to be locked; the device takes it from any other, which costs a copy.
            pass
    memory = (ctypes.c_char * size)()
    return memory, memory


def _is_devices(aside: Aside) -> bool:
    return aside.is_tensor and bool(aside.place.is_cuda)


def _put(place: Any, start: int, part: Optional[tuple[list[int], list[int]]], piece: Any, copy: Any) -> None:
    """Copies elements into a tensor or array, from its element `start` on or into a box of it."""
    if part is None or not part[0]:
        # What has no dimension has no box: indexed, it is no place any more.
        _spread(place, start, piece, copy)
        return
    offsets, lengths = part
    box = tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
    copy(place[box], piece.reshape(lengths))


def _spread(place: Any, start: int, piece: Any, copy: Any) -> None:
    """Copies elements into a tensor or array of any strides, from its element `start` on, in the order of its shape."""
    shape, count = list(place.shape), len(piece)
    if len(shape) == 0:
        copy(place, piece.reshape(()))
        return
    if len(shape) == 1:
        copy(place[start : start + count], piece)
        return
    row = 1
    for length in shape[1:]:
        row *= length
    first, within = divmod(start, row)
    if within > 0:
        head = min(row - within, count)
        _spread(place[first], within, piece[:head], copy)
        first, piece, count = first + 1, piece[head:], count - head
    rows = count // row
    if rows > 0:
        copy(place[first : first + rows], piece[: rows * row].reshape([rows, *shape[1:]]))
    if count > rows * row:
        _spread(place[first + rows], 0, piece[rows * row :], copy)
