"""Saving and loading one state, without a training loop around it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Optional, Union

from . import _native
from . import _options as options
from ._checkpointer import Checkpointer
from ._choice import Names, chosen
from ._loading import load_step, load_weights, restore_threads, with_step
from ._url import source_url

Place = Union[str, "os.PathLike[str]"]


def save(state: Any, url: Place, *, step: int = 0, allow_pickle: bool = False) -> None:
    """Saves `state` at `url` (`s3://`, `gs://`, `az://`, `file://`, or a directory) and returns once it is durable.

    `state` is anything that `Checkpointer` saves: nested dicts and lists of tensors, arrays and plain values, and
    objects with a `state_dict`. A state saved there under the same step before is replaced.

    Raises `TypeError`, naming the place in the state, for what cannot be saved; nothing is written then.
    """
    with Checkpointer(url, rng=False, allow_pickle=allow_pickle, ranks=(0, 1)) as checkpointer:
        checkpointer.save_now(step, state)


def load(url: Place, into: Any = None, *, step: Optional[options.StepName] = None, allow_pickle: bool = False) -> Any:
    """Loads a state: the newest one that is whole, or that of `step`; `"500.2"` is step 500 as start 2 of the run saved it
    (the incarnation in `forebay ckpt ls`), where that is pinned and another start saved it again.

    With `into`, its tensors are filled in place and its objects are given their state, and it is returned; else a
    new state is, with objects as their state dicts. Every byte is checked; when that fails, the tensors of `into` may
    hold anything.

    Of a step of several ranks: with `into` as `Checkpointer.restore` does; else what rank 0 had, or, where others had more,
    such as further stages of a pipeline, all of that, and a warning tells what they had otherwise than rank 0.

    Raises `CheckpointNotFound`, `CheckpointCorrupt`, or `CheckpointMismatch` when `into` is shaped otherwise.
    """
    threads = restore_threads()
    return with_step(source_url(url), step, None, lambda found: load_step(found, into, allow_pickle, threads)[0])


def load_model(
    url: Place,
    model: Any,
    *,
    step: Optional[options.StepName] = None,
    name: Optional[str] = None,
    only: Optional[Sequence[str]] = None,
    without: Sequence[str] = (),
    strict: bool = True,
    rename: Optional[Names] = None,
    allow_pickle: bool = False,
) -> int:
    """Loads the weights of `model` alone, in place, and reads nothing else; gives the step.

    As `Checkpointer.load_model`, in this process alone, whatever saved. `allow_pickle` says whether to load what a module pickled
    beside its tensors, which can run any code.
    """

    choice = chosen(only, without, strict, rename)

    def use(found: _native.Step) -> int:
        load_weights(found, model, name, choice, allow_pickle, restore_threads())
        return found.step

    return with_step(source_url(url), step, None, use)
