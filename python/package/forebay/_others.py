"""What agents on this host hold of the same job, killed when it had another number of ranks.

Such memory is not read: its parts are of other ranks. But its agents bring it to the store, and a start that came before them
would go on from an older step, and save what they sealed once more.
"""

from __future__ import annotations

import contextlib
import time
from typing import Callable, Optional

from . import _native
from ._errors import CheckpointError, warn
from ._ranks import Ranks

_MOST_RANKS = 1024
"""Jobs of one host are looked for up to so many ranks."""

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


def await_others(url: str, ranks: Ranks, place: Callable[[int], str]) -> None:
    """Waits, on all ranks, until what rank 0 of a job of another number of ranks holds is in the store; warns where that takes
    too long. `place` tells where that one's agent is found."""

    def wait() -> Optional[str]:
        names = held_places()
        # Most often there is none.
        sizes = [size for size in range(1, _MOST_RANKS + 1) if place(size) in names] if names else []
        deadline = time.monotonic() + _WAIT_S
        for size in sizes:
            while size != ranks.world_size and (step := _on_its_way(place(size))) is not None:
                if time.monotonic() > deadline:
                    return f"step {step}, which {size} ranks sealed on this host, is not in the store after {_WAIT_S:g} s"
                time.sleep(_PAUSE_S)
        return None

    late = ranks.first("wait for what other numbers of ranks sealed", wait)
    if late is not None and ranks.rank == 0:
        warn(f"{url}: {late}: {_OLDER}")


def held_places() -> set[str]:
    """The names at which agents of this host are found, as proc_net_unix(5) tells them."""
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="ascii", errors="replace") as table:
        words = (line.rsplit(maxsplit=1)[-1] for line in table)
        return {word[1:] for word in words if word.startswith("@" + _native.PLACES)}
    return set()


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
