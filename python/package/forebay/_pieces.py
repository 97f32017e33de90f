"""Tensors that cannot be read into where they are, a device's and strided ones: through one buffer, a piece at a time.

The engine fills the buffer and checks what it read; the piece is copied into its place, by torch or numpy, before the
next one is read. So a restore takes the buffer, however large the tensors are.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Optional

from . import _native
from ._leaf import SIZES, copy_elements, numpy_module, torch_dtype, torch_module

BUFFER_BYTES = 32 << 20
"""With as much again on its way from the store it is what a restore in place takes."""

ALIGNMENT = 64
"""Of pieces in the buffer."""


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


def read_in_pieces(step: _native.Step, asides: list[Aside], threads: int) -> None:
    """Reads each into its place. Raises as `Step.read`; what was copied by then stays."""
    size = min(sum(aside.size for aside in asides), BUFFER_BYTES)
    if size == 0:
        return
    memory = _memory(size, any(_is_devices(aside) for aside in asides))

    def give(number: int, at: int, address: int, length: int) -> None:
        aside = asides[number]
        if aside.is_tensor:
            _give_tensor(aside.place.detach(), aside.dtype, at, (address, length))
        else:
            _give_array(aside.place, aside.dtype, at, (address, length))

    wanted = [(aside.index, aside.part) for aside in asides]
    step.read_through(wanted, (ctypes.addressof(memory[0]), len(memory[0])), give, threads)


def _memory(size: int, is_locked: bool) -> tuple[Any, Any]:
    """A buffer, and what keeps it there."""
    if not is_locked:
        memory = (ctypes.c_char * size)()
        return memory, memory
    torch = torch_module()
    # Locked, so that the device reads it without a copy between.
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return (ctypes.c_char * size).from_address(tensor.data_ptr()), tensor


def _is_devices(aside: Aside) -> bool:
    return aside.is_tensor and bool(aside.place.is_cuda)


def _give_tensor(place: Any, dtype: str, at: int, span: tuple[int, int]) -> None:
    torch = torch_module()
    memory = (ctypes.c_char * span[1]).from_address(span[0])
    piece = torch.frombuffer(memory, dtype=torch.uint8).view(torch_dtype(dtype))
    with torch.no_grad():
        _spread(place, at // piece.element_size(), piece, copy_elements)


def _give_array(place: Any, dtype: str, at: int, span: tuple[int, int]) -> None:
    numpy = numpy_module()
    memory = (ctypes.c_char * span[1]).from_address(span[0])
    piece = numpy.frombuffer(memory, dtype=dtype)

    def copy(place: Any, source: Any) -> None:
        place[...] = source

    _spread(place, at // piece.itemsize, piece, copy)


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
