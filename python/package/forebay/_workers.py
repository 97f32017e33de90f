"""Workers of a `DataLoader`, which are to live until their trainer ends them.

Who ends a job may ask each of its processes: torchrun signals the process group of a trainer, Slurm all of a job step. Workers
die of that, and torch raises in the trainer before its next step, which is the one that `on_signal` saves. So they do not
heed such a signal: they end when the trainer ends them, or is gone, as they see within seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import _native

_MODULE = "torch.utils.data._utils.signal_handling"
_NAME = "_set_worker_signal_handlers"


def shield(signals: Sequence[int]) -> Callable[[], None]:
    """Has workers that are forked from here on pass over `signals`; gives what ends that.

    What they do first is to have torch take signals over, by a function that is theirs alone.
    """
    if "torch" not in sys.modules:
        return lambda: None
    __import__(_MODULE)
    module = sys.modules[_MODULE]
    before: Any = getattr(module, _NAME)

    def begin(*given: Any) -> None:
        before(*given)
        _native.heed_parent(list(signals))

    def end() -> None:
        # Where others have put theirs on top since, that stays.
        if getattr(module, _NAME) is begin:
            setattr(module, _NAME, before)

    setattr(module, _NAME, begin)
    return end
