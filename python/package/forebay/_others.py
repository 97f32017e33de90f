"""What agents hold of the same job that is not all there, and therefore not read: parts of other ranks are gone, or damaged.

They bring it to the store, where those parts may be, and a start that came before them would go on from an older step, and save
what they sealed once more.
"""

from __future__ import annotations

import time
from typing import Callable, Optional

from . import _native
from ._errors import CheckpointError, warn
from ._ranks import Ranks

_WAIT_S = 30.0
"""How long what is on its way to the store is waited for."""

_PAUSE_S = 0.2

_OLDER = "an older one is restored (hint: start again once it is there, `forebay ckpt ls` tells)"


def await_left(url: str, ranks: Ranks, place: str, step: _native.Named) -> None:
    """Waits, on all ranks, until a step that their killed processes sealed is in the store, as the agent of rank 0's found at
    `place` tells, or that is gone; warns where that takes too long."""

    def wait() -> bool:
        deadline = time.monotonic() + _WAIT_S
        while _on_its_way(place, step) is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    is_there = ranks.first("wait for what is in memory", wait)
    if not is_there and ranks.rank == 0:
        warn(f"{url}: step {step[1]}, which all ranks sealed, is not in the store after {_WAIT_S:g} s: {_OLDER}")


def await_others(url: str, ranks: Ranks, agents: Callable[[], list[tuple[int, int, str]]]) -> None:
    """Waits, on all ranks, until what rank 0 of a job of another number of ranks holds is in the store; warns where that takes
    too long. `agents` tells rank, number of ranks and place of those of this host."""

    def wait() -> Optional[str]:
        deadline = time.monotonic() + _WAIT_S
        for rank, size, place in agents():
            while rank == 0 and size != ranks.world_size and (step := _on_its_way(place)) is not None:
                if time.monotonic() > deadline:
                    return f"step {step}, which {size} ranks sealed on this host, is not in the store after {_WAIT_S:g} s"
                time.sleep(_PAUSE_S)
        return None

    late = ranks.first("wait for what other numbers of ranks sealed", wait)
    if late is not None and ranks.rank == 0:
        warn(f"{url}: {late}: {_OLDER}")


def _on_its_way(place: str, step: Optional[_native.Named] = None) -> Optional[int]:
    """That step, else the newest one, which the agent at `place` holds, if it is not in the store."""
    try:
        agent = _native.Predecessor.visit(place)
    except CheckpointError:
        # Of another version.
        return None
    if agent is None:
        return None
    try:
        held, durable = agent.held(), set(agent.durable())
    finally:
        agent.release()
    looked_at = [entry for entry in held if step in (None, entry)][:1]
    return looked_at[0][1] if looked_at and looked_at[0] not in durable else None
