"""How much a step says of what `torch.distributed.checkpoint` planned, told before anything of it is copied or sent.

What counts is known to whoever has the plans of all ranks: names, shapes and how tensors are cut. Values that are no tensors
come to light as they are written, and are counted then.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Optional

from . import _native
from ._errors import CheckpointInvalid
from ._flatten import KEPT
from ._leaf import SIZES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

MOST = 256 << 20
"""Bytes of the longest manifest, as in ckpt/src/manifest/text.rs."""


class Lengths:
    """Looks at the plans of one writer after another; what is planned as the last time was looked at."""

    def __init__(self) -> None:
        self._known: Optional[bytes] = None

    def check(self, plans: list[SavePlan]) -> None:
        """Raises `CheckpointInvalid` for plans of more tensors than a manifest can name, of all ranks together."""
        tensors = [[described for item in plan.items if (described := _describe(item)) is not None] for plan in plans]
        texts = [json.dumps(each) for each in tensors]
        key = hashlib.sha256("\0".join(texts).encode()).digest()
        if key == self._known:
            return
        # Beside a rank that has nothing there is all that there is.
        _, (slices, size) = _native.plan_shares([*texts, "[]"], len(texts))
        names = {described["name"]: None for each in tensors for described in each}
        tree = json.dumps([{"t": "tensor", "n": name} for name in names], separators=(",", ":"))
        size += _native.text_length("state", tree)
        if size > MOST:
            text = f"no manifest can say what the step holds: {slices} slices of tensors take up to {size} bytes of text"
            raise CheckpointInvalid(f"{text}, more than {MOST} (hint: save fewer and larger tensors, or from fewer ranks)")
        self._known = key


def _describe(item: WriteItem) -> Optional[dict[str, Any]]:
    """The part of a tensor that an item is; None where nothing is stored for it, or it is refused by whoever writes it."""
    data = item.tensor_data
    if data is None:
        return None
    dtype, shape = str(data.properties.dtype).removeprefix("torch."), list(data.size)
    offsets, lengths = list(data.chunk.offsets), list(data.chunk.sizes)
    if dtype not in SIZES or (0 in lengths and 0 not in shape):
        return None
    part = {"part": {"kind": "box", "offsets": offsets, "lengths": lengths}}
    return {"name": item.index.fqn.translate(KEPT), "dtype": dtype, "shape": shape, "placement": part, "hash": None}
