"""Tensors that several ranks have alike: whether they still are, by samples of their bytes.

Each is stored once, in shares of which every rank writes its own. Where ranks have drifted apart that would be a mixture of
states that none of them ever had, and whole by all checksums. All of their bytes are compared when they are new; hashing
all at every save would keep the training waiting, so that from then on each rank tells what a little of each hashes to, at
other places each time. Ranks that train apart differ nearly everywhere; a few elements that differ are found sooner or later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from . import _native
from ._leaf import Leaf, torch_module

SAMPLE_BYTES = 2048
"""Of each tensor: reading that takes about as long as finding it."""
_MOST_BYTES = 4 << 20
"""Of all tensors together: a millisecond. Of more than two thousand less is read of each."""
LEAST_BYTES = 64
"""Of each tensor, however many there are: one line of a processor's cache. What is no larger is sampled whole."""
_STRIDE = 0x9E3779B97F4A7C15
"""The golden ratio, as a fraction of 2^64: its multiples are spread evenly, however many there are."""
_WHOLE = 1 << 64

Digests = Optional[dict[str, str]]
"""What samples hash to, by the number of who holds them alike; None of a rank that has nothing to compare them with yet."""


@dataclass
class Group:
    """Tensors that the same ranks have alike."""

    holders: tuple[int, ...]
    """These ranks."""
    leaves: list[int]
    """Which of this rank's they are, in an order that is the same on all of them; of others nothing."""


def digests(groups: Sequence[Group], leaves: Sequence[Leaf], step: int) -> dict[str, str]:
    """What samples of this rank's tensors hash to; the step says at which places."""
    own = [(number, [leaves[index] for index in group.leaves]) for number, group in enumerate(groups) if group.leaves]
    count = sum(len(alike) for _, alike in own)
    most = min(SAMPLE_BYTES, max(LEAST_BYTES, _MOST_BYTES // max(count, 1)))
    # Whole elements of any type: the same ones wherever a tensor is.
    most -= most % 16
    return {str(number): _hash(_samples(alike, most, step)) for number, alike in own}


def digest_each(leaves: Sequence[Leaf]) -> dict[str, str]:
    """What a sample of each of these tensors hashes to, by its name; equal where the tensors and their order are."""
    return {leaf.name: _hash([sample]) for leaf, sample in zip(leaves, _samples(leaves, SAMPLE_BYTES, step=0))}


def have_drifted(groups: Sequence[Group], told: Sequence[dict[str, str]]) -> bool:
    """Whether ranks that had something alike have it no more, by what each of them told."""
    return any(
        len({told[rank].get(str(number)) for rank in group.holders}) > 1 for number, group in enumerate(groups)
    )


def _hash(samples: Iterable[bytes]) -> str:
    data = b"".join(samples)
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    return _native.hash_bytes(address or 0, len(data))


def _samples(leaves: Sequence[Leaf], most: int, step: int) -> list[bytes]:
    """Of each tensor up to so many bytes; all that a device holds comes in one copy."""
    found = [b""] * len(leaves)
    apart: dict[Any, list[tuple[int, Any]]] = {}
    for index, leaf in enumerate(leaves):
        where = _STRIDE * (step + index) & _WHOLE - 1
        if leaf.address is None:
            apart.setdefault(leaf.source.device, []).append((index, _sample(leaf.source, most, where)))
        elif leaf.size > 0:
            taken = min(most, leaf.size)
            first, _ = _block(leaf.size, taken, where)
            found[index] = ctypes.string_at(leaf.address + first, taken)
    for pieces in apart.values():
        data = torch_module().cat([piece for _, piece in pieces]).cpu()
        at = data.data_ptr()
        for index, piece in pieces:
            found[index] = ctypes.string_at(at, piece.numel())
            at += piece.numel()
    return found


def _sample(tensor: Any, most: int, where: int) -> Any:
    """Up to so many bytes of a torch tensor, as bytes where it is."""
    torch = torch_module()
    count = max(1, most // tensor.element_size())
    with torch.no_grad():
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            taken = min(count, tensor.numel())
            first, _ = _block(tensor.numel(), taken, where)
            return tensor.view(-1).narrow(0, first, taken).view(torch.uint8)
        # By the elements' order, whatever their strides: a few rows, or a part of one.
        while tensor.numel() > count:
            each = tensor.numel() // tensor.shape[0]
            taken = max(1, count // each)
            first, where = _block(tensor.shape[0], taken, where)
            tensor = tensor[first] if each > count else tensor.narrow(0, first, taken)
        if tensor.element_size() == 1:
            # Of some types torch copies nothing but bytes.
            tensor = tensor.view(torch.uint8)
        return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _block(count: int, taken: int, where: int) -> tuple[int, int]:
    """Where one of the blocks of so many out of `count` begins, the last of which ends where they do, and what of `where`, a
    fraction of 2^64, is left to choose within it."""
    if taken == 0:
        return 0, where
    number, rest = divmod(where * -(-count // taken), _WHOLE)
    return min(number * taken, count - taken), rest
