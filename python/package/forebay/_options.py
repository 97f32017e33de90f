"""What options may be: each that is not is refused at once, by its name, its value and what is allowed."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, Optional, Union

from . import _native
from ._errors import CheckpointInvalid

_MOST = 2**63 - 1
"""The engine counts in 64 bits."""

_MOST_S = 1e9
"""Thirty years, in seconds: whoever wants longer than that wants no limit, which there is not."""

_MAX_THREADS = 1024
"""More threads than any host has processors would only be in each other's way."""


def refused(name: str, value: Any, allowed: str) -> CheckpointInvalid:
    """What is wrong with an option."""
    return CheckpointInvalid(f"{name} is {value!r}; it is {allowed}")


def check_order(step: int, newest: Optional[int]) -> None:
    """Raises `CheckpointInvalid` for a step below the newest that this run has saved: `keep` would take it for an old one, and
    the next start restore the other."""
    if newest is not None and step < newest:
        text = f"step {step} comes before step {newest}, which this run has saved"
        raise CheckpointInvalid(f"{text} (hint: a `restore` without `only` goes back, and begins the run anew there)")


def whole(name: str, value: Any, least: int = 1, most: int = _MOST, may_lack: bool = True) -> Any:
    """A whole number, of Python or numpy; None where that is allowed."""
    if value is None and may_lack:
        return None
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is not None and least <= number <= most:
        return number
    limits = f"at least {least}" if most == _MOST else f"from {least} to {most}"
    raise refused(name, value, f"a whole number, {limits}{', or None' if may_lack else ''}")


StepName = Union[int, str]
"""A step's number, or `"500.2"`: step 500 as start 2 of the run saved it, where another start saved it again."""


def step_name(step: Any) -> tuple[Optional[int], Optional[int]]:
    """The step and the start that `step` names; None for what it leaves open."""
    if not isinstance(step, str):
        return whole("step", step, least=0), None
    found = re.fullmatch(r"(\d{1,19})(?:\.(\d{1,19}))?", step, re.ASCII)
    if found is None:
        raise refused("step", step, "a whole number, at least 0, one such as '500.2' (as start 2 saved it), or None")
    return int(found[1]), None if found[2] is None else int(found[2])


def real(name: str, value: Any, unit: str, may_lack: bool = True, may_be_zero: bool = False) -> Any:
    """A number that is more than 0, or at least 0, and finite; None where that is allowed."""
    if value is None and may_lack:
        return None
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if 0 < number <= _MOST_S or (may_be_zero and number == 0):
        return number
    limits = f"{'from' if may_be_zero else 'more than'} 0, to {_MOST_S:.0e}"
    raise refused(name, value, f"a number of {unit}, {limits}{', or None' if may_lack else ''}")


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that is merely taken for it: `"no"` would be True."""
    if isinstance(value, bool):
        return value
    raise refused(name, value, "True or False")


def size(name: str, value: Any) -> Optional[str]:
    """Bytes, as a number or with a unit; gives the text that the engine reads."""
    if value is None:
        return None
    try:
        # Numbers of other libraries are numbers, too; text and truth are none.
        is_other = isinstance(value, (bool, bytes, bytearray))
        text = value if isinstance(value, str) else "" if is_other else str(int(value))
        if _native.parse_size(text) > 0:
            return text
    except (CheckpointInvalid, TypeError, ValueError, OverflowError):
        pass
    raise refused(name, value, "a number of bytes, at least 1, with or without a unit, such as '200MiB', or None")


def path(name: str, value: Any) -> Optional[str]:
    """A path as text, with the home directory for `~`."""
    if value is None:
        return None
    found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(found, str) and found.strip() and "\0" not in found:
        return os.path.expanduser(found)
    raise refused(name, value, "a path, or None")


def log(name: str, value: Any) -> Optional[str]:
    """A file that can be written to, which is there then."""
    found = path(name, value)
    if found is None:
        return None
    try:
        open(found, "ab").close()
    except OSError as error:
        raise refused(name, value, f"a file that can be written to, or None: {error.strerror}") from error
    return os.path.abspath(found)


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise refused(name, value, " or ".join(map(repr, allowed)))
    return value


def patterns(name: str, value: Any) -> tuple[str, ...]:
    """Patterns; a single text is none, since it would be taken for its characters."""
    try:
        given = None if isinstance(value, (str, bytes)) else tuple(value)
    except TypeError:
        given = None
    if given is not None and all(isinstance(part, str) for part in given):
        return given
    raise refused(name, value, "a list of patterns, such as ['ema.*']")


def only(value: Any) -> Optional[tuple[str, ...]]:
    """Patterns of what alone is meant, or None for all. No pattern would mean nothing, and seem to be done."""
    given = None if value is None else patterns("only", value)
    if given == ():
        raise refused("only", value, "one pattern or more, such as ['model.*'], or None for all")
    return given


def ranks(name: str, value: Any) -> Optional[tuple[int, int]]:
    """A rank, and how many there are."""
    if value is None:
        return None
    try:
        rank, world_size = (operator.index(part) for part in value)
    except (TypeError, ValueError):
        rank = world_size = 0
    if 0 <= rank < world_size < 2**31:
        return rank, world_size
    raise refused(name, value, "this rank, from 0, and how many there are, such as (0, 8), or None")


_RULES: dict[str, Callable[[str, Any], Any]] = {
    "every": whole,
    "every_minutes": partial(real, unit="minutes"),
    "keep": whole,
    "keep_every": whole,
    "rng": flag,
    "on_busy": partial(one_of, allowed=("wait", "skip")),
    "on_error": partial(one_of, allowed=("raise", "warn")),
    "max_failures": partial(whole, may_lack=False),
    "allow_pickle": flag,
    "copy_threads": partial(whole, most=_MAX_THREADS),
    "snapshots": partial(whole, most=2, may_lack=False),
    # Whether it can be written to is seen by whoever opens it.
    "agent_log": path,
    "replicated": patterns,
    "ranks": ranks,
    "flush_rate": size,
    "local": path,
    "local_keep": partial(whole, may_lack=False),
    "local_bytes": size,
    "replicas": partial(whole, least=0, most=1, may_lack=False),
    "linger": partial(real, unit="seconds", may_be_zero=True),
    "patience": partial(real, unit="seconds", may_lack=False),
}
"""What each option of a `Checkpointer` may be; of `on_signal` that is said in `_signals.py`."""


def checked(**given: Any) -> dict[str, Any]:
    """Options of a `Checkpointer` as the engine takes them. Raises `CheckpointInvalid` for the first one that is none."""
    found = {name: _RULES[name](name, value) for name, value in given.items()}
    if found.get("local_bytes") is not None and found.get("local") is None:
        raise refused("local_bytes", given["local_bytes"], "of use with local=, a directory for copies, only")
    if found.get("replicas") and found.get("linger") == 0:
        raise refused("replicas", given["replicas"], "of no use with linger=0: no host keeps what a killed job had in memory")
    return found
