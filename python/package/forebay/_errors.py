"""Every exception of this package. The engine's errors become these in one place, `python/src/errors.rs`."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

_PACKAGE = os.path.dirname(__file__)


class CheckpointError(Exception):
    """Something about saving or loading failed; the classes below say what can be done about it."""


class CheckpointNotFound(CheckpointError):
    """There is no such bucket, directory or step."""


class CheckpointCorrupt(CheckpointError):
    """A manifest or a shard is damaged or missing. Nothing of it was loaded."""


class CopiesHang(CheckpointCorrupt):
    """This host's disk does not answer: none of the copies there is of use. It never reaches a caller."""


class CheckpointUnavailable(CheckpointError):
    """The store, or the agent that writes to it, cannot be reached; later it may."""


class CheckpointSuperseded(CheckpointError):
    """A later start of the same run took over: this process may commit nothing more."""


class CheckpointConflict(CheckpointError):
    """The step was saved already in this run."""


class CheckpointDenied(CheckpointError):
    """The credentials or permissions do not allow it."""


class CheckpointNoSpace(CheckpointError):
    """Memory or disk is exhausted."""


class CheckpointInvalid(CheckpointError, ValueError):
    """The request itself is wrong, or this store cannot do it."""


class CheckpointMismatch(CheckpointError, ValueError):
    """The state to restore into is not shaped like the one that was saved."""


class CheckpointMutated(CheckpointError):
    """A tensor was changed while it was copied; the step was not saved."""


class CheckpointWarning(UserWarning):
    """Something went wrong that Forebay made up for; a person should know."""


def warn(text: str) -> None:
    """A `CheckpointWarning` that points to whoever called this package, from however deep within."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, CheckpointWarning, stacklevel=level)


def anew(error: E) -> E:
    """Another error that says the same (class, message, attributes, cause), and nothing of where that one was raised.

    For what is kept and told later, maybe several times: an error that was raised holds all frames that it passed, up to who
    caught it, with whatever lies in them.
    """
    made = copy.copy(error)
    if hasattr(error, "__notes__"):
        vars(made)["__notes__"] = list(error.__notes__)
    if error.__cause__ is not None:
        made.__cause__ = anew(error.__cause__)
    made.__suppress_context__ = error.__suppress_context__
    return made
