"""How much a step says of what `torch.distributed.checkpoint` planned, told before anything of it is copied or sent.

What counts is known to whoever has the plans of all ranks: names, shapes and how tensors are cut. Values that are no tensors
come to light as they are written, and are counted then.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Optional

from . import _native
from ._errors import CheckpointInvalid
from ._flatten import KEPT
from ._leaf import SIZES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem


class Lengths:
    """Looks at the plans of one writer after another; what is planned as the last time was looked at."""

    def __init__(self) -> None:
        self._known: Optional[bytes] = None

    def check(self, plans: list[SavePlan]) -> None:
        """Raises `CheckpointInvalid` for plans of more tensors than a manifest can name, of all ranks together."""
        names: dict[str, None] = {}
        outlines: dict[str, int] = {}
        ranks = []
        # Beside a rank that has nothing there is all that there is.
        for items in [*(plan.items for plan in plans), []]:
            found = [described for item in items if (described := _describe(item)) is not None]
            names |= dict.fromkeys(name for (name, *_), _ in found)
            outline = json.dumps({"tensors": [tensor for tensor, _ in found]})
            parts = json.dumps([number for _, part in found for number in part])
            ranks.append((outlines.setdefault(outline, len(outlines)), parts, "[]"))
        key = hashlib.sha256(json.dumps([list(outlines), ranks]).encode()).digest()
        if key == self._known:
            return
        _, (slices, size) = _native.Roster(list(outlines), ranks).plan(set(), [], len(plans))
        tree = json.dumps([{"t": "tensor", "n": name} for name in names], separators=(",", ":"))
        size += _native.text_length("state", tree)
        if size > _native.MOST_TEXT:
            text = f"no manifest can say what the step holds: {slices} slices of tensors take up to {size} bytes of text"
            raise CheckpointInvalid(f"{text}, more than {_native.MOST_TEXT} (hint: save fewer and larger tensors, or from fewer ranks)")
        self._known = key


def _describe(item: WriteItem) -> Optional[tuple[tuple[str, str, list[int], str], list[int]]]:
    """The part of a tensor that an item is, as a roster has it (ckpt/src/roster.rs), and where it lies; None where nothing is
    stored for it, or it is refused by whoever writes it."""
    data = item.tensor_data
    if data is None:
        return None
    dtype, shape = str(data.properties.dtype).removeprefix("torch."), list(data.size)
    offsets, lengths = list(data.chunk.offsets), list(data.chunk.sizes)
    if dtype not in SIZES or (0 in lengths and 0 not in shape):
        return None
    return (item.index.fqn.translate(KEPT), dtype, shape, "part"), offsets + lengths
