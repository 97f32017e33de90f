"""Finding a step that is whole and reading it."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any, Callable, Optional, TypeVar

from . import _native
from ._errors import CheckpointCorrupt, CheckpointNotFound, CheckpointWarning
from ._unflatten import Builder, Node, Placer, Tensors

T = TypeVar("T")


def default_threads() -> int:
    """Threads that copy: up to four, as the processors allow."""
    return min(4, len(os.sched_getaffinity(0)))


def newest_steps(url: str) -> list[tuple[int, int, str]]:
    """Every step that counts as (step, incarnation, attempt), newest first."""
    listed = _native.list_steps(url)
    return [(step, number, attempt) for step, number, attempt, _, superseded in reversed(listed) if not superseded]


def with_step(url: str, step: Optional[int], use: Callable[[_native.Step], T]) -> T:
    """Calls `use` with the step asked for, or with the newest one that is whole.

    Raises `CheckpointCorrupt` when the step asked for is damaged, or all of them are, and `CheckpointNotFound` when
    there is none. An older step than the newest is used with a warning only.
    """
    found = newest_steps(url)
    if step is not None:
        found = [entry for entry in found if entry[0] == step]
    if not found:
        raise CheckpointNotFound(f"{url} holds no step" if step is None else f"{url} holds no step {step}")
    damaged: list[str] = []
    for number, incarnation, attempt in found:
        try:
            used = use(_native.open_step(url, number, incarnation, attempt))
        except CheckpointCorrupt as error:
            if step is not None:
                raise
            damaged.append(str(error))
            continue
        if damaged:
            text = f"{url}: step {number} is used instead of a newer one that is damaged: {'; '.join(damaged)}"
            warnings.warn(text, CheckpointWarning, stacklevel=3)
        return used
    raise CheckpointCorrupt(f"{url} holds no step that is whole: {'; '.join(damaged)}")


def load_step(
    step: _native.Step, into: Any, allow_pickle: bool, threads: int, with_rng: bool = False
) -> tuple[Any, Optional[dict[str, Any]]]:
    """The state of a step, put in place into `into` if that is given, and its random number generators.

    Those are None where the step has none or they are not asked for.
    """
    tree, generators = _extra(step, "state"), _extra(step, "rng") if with_rng else None
    if step.extra("state") is None:
        raise CheckpointCorrupt(f"step {step.step} has no state")
    tensors = Tensors(step, threads)
    builder = Builder(tensors, allow_pickle)
    placer = None
    if into is not None:
        placer = Placer(builder, into)
        placer.plan(tree)
    tensors.want(tree)
    tensors.want(generators)
    tensors.read()
    if placer is not None:
        placer.apply()
    return builder.build(tree) if placer is None else into, builder.build(generators)


def _extra(step: _native.Step, name: str) -> Node:
    text = step.extra(name)
    return None if text is None else parse(step, text)


def parse(step: _native.Step, text: str) -> Node:
    """The tree of an extra."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"step {step.step}: its state does not parse: {error}") from error
