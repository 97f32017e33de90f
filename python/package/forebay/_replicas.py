"""Copies of what ranks seal in other hosts' memory: who holds whose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Optional

from . import _native
from ._hosts import addresses, wanted_cards
from ._ranks import Ranks

_PATIENCE_S = 10.0
"""How long an agent may take to say where it takes copies: it has just been started."""


def keeper_of(rank: int, hosts: Sequence[int]) -> Optional[int]:
    """The rank whose agent holds what this one seals: one of the next host, of which each has as many in turn; None where all
    are on one host. `hosts` says which each rank is on."""
    order = sorted(set(hosts))
    if len(order) == 1:
        return None
    near, after = hosts[rank], order[(order.index(hosts[rank]) + 1) % len(order)]
    here, there = ([one for one, host in enumerate(hosts) if host == which] for which in (near, after))
    return there[here.index(rank) % len(there)]


class Replicas:
    """Has agents of different hosts hold copies for each other."""

    def __init__(self, ranks: Ranks, steps: int) -> None:
        self._ranks = ranks
        self._steps = steps
        self._said: Optional[tuple[int, str]] = None

    def announce(self, session: _native.Session) -> None:
        """Has the agent that a session greets next hold copies for others, and have its own held."""
        session.set_replication(self._steps, wanted_cards())
        self._said = None

    def say(self, session: _native.Session) -> Optional[dict[str, Any]]:
        """Where this rank's agent takes copies, for the others; None where they know, or there are none."""
        address = session.keeps_at(_PATIENCE_S) if self._ranks.are_spread else None
        if address is None or address == self._said:
            return None
        port, secret = address
        return {"addresses": addresses(), "port": port, "secret": secret}

    def hear(self, session: _native.Session, words: Sequence[Optional[dict[str, Any]]]) -> None:
        """Takes what all ranks said."""
        own = words[self._ranks.rank]
        if own is not None:
            self._said = own["port"], own["secret"]
        keeper = keeper_of(self._ranks.rank, self._ranks.hosts())
        address = None if keeper is None else words[keeper]
        if address is not None:
            session.replicate_to(json.dumps(address))
