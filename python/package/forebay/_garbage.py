"""Python's collector of garbage, while a state is saved or brought back."""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collects nothing meanwhile. What a save or restore makes is freed as nobody refers to it any more, but there is enough of
    it that the collector would look for cycles, some times through everything that torch has: a tenth of a second.

    For any thread, with others in it. A process that collects nothing stays as it is.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
