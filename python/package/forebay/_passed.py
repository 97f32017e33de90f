"""Options of a `Checkpointer` that what stands on one passes on: Hugging Face's callback, Lightning's plug-ins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Optional, TypedDict, Union

from . import _options as options
from ._errors import CheckpointInvalid
from ._outcomes import OnError
from ._signals import Names, numbers_of


class CheckpointOptions(TypedDict, total=False):
    """Those of single checkpoints, each of which is waited for; as of `Checkpointer`."""

    copy_threads: Optional[int]
    agent_log: Optional[Union[str, "os.PathLike[str]"]]
    flush_rate: Optional[Union[int, str]]
    patience: float


class JobOptions(CheckpointOptions, total=False):
    """Those of a whole training's saves; as of `Checkpointer`."""

    keep: Optional[int]
    every_minutes: Optional[float]
    keep_every: Optional[int]
    snapshots: int
    on_busy: Literal["wait", "skip"]
    on_error: OnError
    max_failures: int
    on_signal: Names
    local: Optional[Union[str, "os.PathLike[str]"]]
    local_keep: int
    local_bytes: Optional[Union[int, str]]
    replicas: int
    linger: Optional[float]


def passed_on(who: str, given: Mapping[str, Any], known: frozenset[str], reasons: Mapping[str, str]) -> dict[str, Any]:
    """Options that were given to `who`, once they are known to be right: before there is a `Checkpointer`.

    Raises `CheckpointInvalid` for one that is none, or that has no meaning there for one of the `reasons`, and `TypeError`, as
    Python does, for one that nobody knows.
    """
    for name in given:
        if name in reasons:
            hint = "a forebay.Checkpointer in a callback of your own has it"
            raise CheckpointInvalid(f"{who} takes no {name}: {reasons[name]} (hint: {hint})")
        if name not in known:
            raise TypeError(f"{who} got an unexpected keyword argument {name!r}")
    found = dict(given)
    if "on_signal" in found:
        # As numbers: what it was may be read once only.
        found["on_signal"] = numbers_of(found["on_signal"])
    options.checked(**{name: value for name, value in found.items() if name != "on_signal"})
    return found
