"""What of a state is brought back, as whoever restores says it, and what of it the checkpoint could not give."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Literal, Optional, Union

from . import _options as options
from ._errors import CheckpointInvalid

Names = Union[Mapping[str, str], Callable[[str], str]]
"""What the checkpoint calls what the state has under a name: by names, or a function of one."""

Options = Union[Literal["saved", "live"], Sequence[str]]
"""Whose options the groups of optimizers have: those that were saved, or their own; or the names of those that are their own."""

SAVED, LIVE = "saved", "live"

_WITH_OPTION = {"initial_lr": "lr"}
"""Options that stay with another one: a scheduler notes the rate that it begins with beside the rate."""

HINT = "hint: strict=False leaves that as it is; without= and only= say what is restored, rename= what the checkpoint calls it"
"""What to do where the state and the checkpoint have not the same parts."""

APART_HINT = "hint: rename= says what the checkpoint calls it, without= leaves it out"
"""What to do where they have nothing in common."""

SHAPE_HINT = "hint: without= leaves it out"
"""What to do where a part has another shape."""

_MOST_TOLD = 5
"""Names that are told."""


@dataclass
class Choice:
    """What is restored, by the names that the state has."""

    only: Optional[tuple[str, ...]] = None
    """Patterns of all that is; None for everything."""
    without: tuple[str, ...] = ()
    """Patterns of what is not."""
    strict: bool = True
    """Whether state and checkpoint must have the same parts."""
    rename: Optional[Names] = None
    """What the checkpoint calls them; None for the same."""
    options: Union[str, tuple[str, ...]] = SAVED
    """Which options of optimizers' groups stay as they are: none (`SAVED`), all (`LIVE`), or those of some names."""
    missing: tuple[str, ...] = ()
    """What the state has and the checkpoint lacked, which was left as it was."""
    unexpected: tuple[str, ...] = ()
    """What the checkpoint has and the state lacked, which was not read."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns, of which each has to mean something."""
        return (*(self.only or ()), *self.without)

    def leaves(self, name: str) -> tuple[str, ...]:
        """The patterns by which something of that name is left out with all that is in it: `ema` and `ema.*` both mean that."""
        return tuple(one for one in self.without if _is_like(name, one) or _is_like(f"{name}.", one))

    def keeps_option(self, name: str) -> bool:
        """Whether an option of an optimizer's groups stays as it is."""
        if isinstance(self.options, str):
            return self.options == LIVE
        return name in self.options or _WITH_OPTION.get(name) in self.options

    def means(self, name: str) -> bool:
        """Whether what has that name is restored, or something that it lies in is."""
        parts = name.split(".")
        around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        is_wanted = self.only is None or any(_is_like(one, pattern) for one in around for pattern in self.only)
        return is_wanted and not any(self.leaves(one) for one in around)

    def saved_name(self, name: str) -> str:
        """What the checkpoint calls what the state has under a name."""
        if self.rename is None:
            return name
        try:
            found = self.rename.get(name, name) if isinstance(self.rename, Mapping) else self.rename(name)
        except Exception as error:
            raise CheckpointInvalid(f"rename({name!r}) raised {type(error).__name__}: {error}") from error
        if not isinstance(found, str):
            raise CheckpointInvalid(f"rename gives {found!r} for {name!r}; it gives a name")
        return found

    def told(self) -> str:
        """The same on all ranks that chose alike, as far as can be told: of functions only that there is one."""
        names = dict(self.rename) if isinstance(self.rename, Mapping) else self.rename is not None
        said = json.dumps([self.only, self.without, self.strict, names, self.options], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    def note(self, missing: Sequence[str], unexpected: Sequence[str], tells: bool) -> None:
        """Takes note of what was not brought back, and tells it to the logger `forebay` if so said."""
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        kinds = ("missing, and left as they were", self.missing), ("unexpected, and not read", self.unexpected)
        texts = [f"{what}: {_named(names)}" for what, names in kinds if names]
        if texts and tells:
            logging.getLogger("forebay").warning("restored with strict=False. %s", "; ".join(texts))


def chosen(only: Any, without: Any, strict: Any, rename: Any, whose_options: Any = SAVED) -> Choice:
    """The choice that options make. Raises `CheckpointInvalid` for one that is none."""
    patterns = options.patterns("without", without)
    is_names = isinstance(rename, Mapping) and all(isinstance(name, str) for pair in rename.items() for name in pair)
    if not (rename is None or is_names or callable(rename)):
        allowed = "a dict of names in the state and in the checkpoint, a function of one, or None"
        raise options.refused("rename", rename, allowed)
    names = dict(rename) if is_names else rename
    return Choice(options.only(only), patterns, options.flag("strict", strict), names, _checked_options(whose_options))


def _checked_options(given: Any) -> Union[str, tuple[str, ...]]:
    """As a tuple where they are names."""
    if isinstance(given, str) and given in (SAVED, LIVE):
        return given
    try:
        names = () if isinstance(given, (str, bytes)) else tuple(given)
    except TypeError:
        names = ()
    if names and all(isinstance(name, str) for name in names):
        return names
    raise options.refused("options", given, "'saved', 'live', or a list of those that stay, such as ['lr', 'weight_decay']")


def _is_like(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(map(repr, names[:_MOST_TOLD])) + more
