"""Tensors in the memory of CUDA devices: the engine copies them by itself, on a stream of its own, into locked memory.

Where it cannot (no driver at hand, a tensor that is not dense), torch copies them, one after another.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

from . import _native
from ._errors import CheckpointError, CheckpointWarning
from ._leaf import Leaf, torch_module

Fetch = tuple[int, _native.Device, int, int]
"""A tensor to be copied: its number in the snapshot, its device, address and bytes."""


@dataclass
class Sources:
    """Tensors to be copied, each with its number in the snapshot first."""

    near: list[tuple[int, int, int]] = field(default_factory=list)
    """In this process's memory: address and bytes."""
    fetches: list[Fetch] = field(default_factory=list)
    """In devices' memory."""

    def indexes(self) -> Iterator[int]:
        """The numbers of all."""
        yield from (source[0] for source in self.near)
        yield from (fetch[0] for fetch in self.fetches)


class Devices:
    """The devices that this process saves from."""

    def __init__(self, session: _native.Session) -> None:
        self._session = session
        self._opened: dict[int, Optional[_native.Device]] = {}

    def open(self, leaves: list[Leaf]) -> None:
        """Opens the devices that hold any of `leaves`; slots are locked in memory from now on."""
        for ordinal in sorted({ordinal_of(leaf) for leaf in leaves if leaf.device_address is not None}):
            if ordinal not in self._opened:
                self._opened[ordinal] = self._open(ordinal)

    def find(self, leaf: Leaf) -> Optional[_native.Device]:
        """What the engine copies a leaf from; None for one that is elsewhere, and where torch has to."""
        return None if leaf.device_address is None else self._opened.get(ordinal_of(leaf))

    def follow(self) -> None:
        """Has copies from now on see what this thread has submitted so far."""
        for ordinal, device in self._opened.items():
            if device is not None:
                device.follow(torch_module().cuda.current_stream(ordinal).cuda_stream)

    def _open(self, ordinal: int) -> Optional[_native.Device]:
        try:
            device = _native.Device(ordinal)
        except CheckpointError as error:
            text = f"snapshots of CUDA device {ordinal} are slow, since torch has to copy them: {error}"
            warnings.warn(text, CheckpointWarning, stacklevel=2)
            return None
        self._session.pin_for(device)
        return device


def ordinal_of(leaf: Leaf) -> int:
    """Which device holds a leaf."""
    index: int = leaf.source.device.index
    return index
