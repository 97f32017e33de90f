"""Python's collector of garbage, while a state is saved or brought back."""

from __future__ import annotations

import functools
import gc
from typing import Callable, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def uncollected(work: Callable[P, T]) -> Callable[P, T]:
    """Collects nothing during `work`. What a save or restore makes is freed as nobody refers to it any more, but there is enough
    of it that the collector would look for cycles, some times through everything that torch has: a tenth of a second.

    For any thread, with others in it. A process that collects nothing stays as it is.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return work(*args, **kwargs)
        finally:
            if is_collecting:
                gc.enable()

    return run
