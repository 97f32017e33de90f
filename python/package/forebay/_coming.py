"""Ranks that may all be about to do the same, or not: who calls a plug-in need not call it on all of them.

Rank 0 hears in torch.distributed's own store who came, and for what, and tells each of those whether all did. A rank waits for
the others for a bounded time, and who leaves before it is told is not counted, whatever the moment.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any, Optional

from ._hosts import torch_store
from ._leaf import torch_module

WAIT_S = 30.0
"""How long a rank waits for the others, in seconds: what calls all of them does so at about the same time."""

_PREFIX = "forebay-coming"
_TAKEN, _GONE = b"taken", b"gone"
"""What is said in the stead of a rank's word, once: that rank 0 counts it, or that it did not wait for that."""

_PAUSES_S = (0.002, 0.1)
"""The first and the longest pause between two looks into the store."""


def meet_all(purpose: str, wait_s: float) -> Optional[str]:
    """A name that is the same on all ranks of torch.distributed, and nobody else's, if all of them come for that purpose.

    None where one does not come within `wait_s`, `WAIT_S` at most, or comes for another purpose, and where there are no others,
    or no torch.distributed is in use.
    """
    store = torch_store()
    if store is None or torch_module().distributed.get_world_size() == 1:
        return None
    distributed = torch_module().distributed
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    try:
        return _hear(store, world_size, purpose, wait_s) if rank == 0 else _come(store, rank, purpose, wait_s)
    except RuntimeError:
        # What torch raises where the store is gone, or cannot do this.
        return None


def _hear(store: Any, world_size: int, purpose: str, wait_s: float) -> Optional[str]:
    """Rank 0's part: waits for the others, and tells those who came."""
    came: dict[int, tuple[str, str]] = {}
    for _ in _looks(wait_s):
        for rank in range(1, world_size):
            if rank not in came and (word := _take(store, rank)) is not None:
                came[rank] = word
        if len(came) == world_size - 1:
            break
    is_whole = len(came) == world_size - 1 and all(theirs == purpose for _, theirs in came.values())
    name = secrets.token_hex(16) if is_whole else ""
    for token, _ in came.values():
        store.set(_answer(token), name)
    return name or None


def _take(store: Any, rank: int) -> Optional[tuple[str, str]]:
    """The word of a rank that came and waits, which from here on waits for the answer."""
    key = _word(rank)
    if not store.check([key]):
        return None
    text = store.get(key)
    if text in (_TAKEN, _GONE) or store.compare_set(key, text.decode(), _TAKEN.decode()) != _TAKEN:
        return None
    token, purpose = json.loads(text)
    return token, purpose


def _come(store: Any, rank: int, purpose: str, wait_s: float) -> Optional[str]:
    """The part of any other rank: says that it came, and hears from rank 0."""
    token = secrets.token_hex(16)
    word = json.dumps([token, purpose])
    store.set(_word(rank), word)
    name = _heard(store, token, wait_s)
    if name is None and store.compare_set(_word(rank), word, _GONE.decode()) == _TAKEN:
        # Rank 0 waits for others now, and answers then.
        name = _heard(store, token, WAIT_S)
    return name or None


def _heard(store: Any, token: str, wait_s: float) -> Optional[str]:
    """What rank 0 said; None where it said nothing in time."""
    for _ in _looks(wait_s):
        if store.check([_answer(token)]):
            said: str = store.get(_answer(token)).decode()
            # It is nobody else's.
            with contextlib.suppress(RuntimeError):
                store.delete_key(_answer(token))
            return said
    return None


def _looks(wait_s: float) -> Iterator[None]:
    """Looks, at least one, with pauses between them."""
    deadline, pause = time.monotonic() + wait_s, _PAUSES_S[0]
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])


def _word(rank: int) -> str:
    return f"{_PREFIX}-{rank}"


def _answer(token: str) -> str:
    return f"{_PREFIX}-{token}"
