"""Training that goes on after `kill -9` of the trainers at any moment, as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  (slow: before any fork)
import torch._inductor.config  # noqa: F401  (the same)

import forebay
from forebay import _native

from .conftest import Child, chances
from .test_ranks import start_ranks

Report = Callable[[str], None]

LINGER_S = 120.0
"""Longer than any test takes."""

LAST = 12
"""Steps of a training."""


def parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-2), "losses": []}


def train(state: dict[str, Any], checkpointer: forebay.Checkpointer, first: int, report: Report) -> None:
    """Trains to the end, and reports each step before it is saved, and once it is known to be sealed."""
    saves = []
    for step in range(first, LAST + 1):
        loss = state["model"](torch.randn(8, 32)).square().mean()
        loss.backward()
        checkpointer.before_optimizer_step()
        state["optim"].step()
        state["optim"].zero_grad()
        state["losses"].append(loss.item())
        report(f"saving {step}")
        saves.append(checkpointer.step(step, state))
        sealed = [save.step for save in saves if save is not None and save.sealed]
        report(f"sealed {max(sealed)}") if sealed else None


def start(place: Path, world_size: int, is_last: bool, snapshots: int = 2) -> list[Child]:
    """Starts a job, which reports what it does. All but the last one never end."""

    def work(rank: int, report: Report) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        state = parts(1 + rank)
        report("begun")
        # Killed before all ranks had sealed their first step, before a sealed one was known to be durable, or before its agent was
        # up, which came to the store after its successor then. Of a step that was not sealed by all, nothing is left by some.
        for words in (
            "nothing is restored: arena: not all ranks hold the step",
            "which a killed trainer had sealed, may not be",
            "which a killed trainer had sealed, was not saved by its agent: a later start of this run",
            "which a killed trainer had sealed, was not saved by its agent: .* left nobody who would store its part",
        ):
            warnings.filterwarnings("ignore", f".*{words}", forebay.CheckpointWarning)
        try:
            checkpointer = forebay.Checkpointer(place, every=1, keep=2, linger=LINGER_S, snapshots=snapshots)
            restored = checkpointer.restore(state) or 0
            report(f"restored {restored} as {json.dumps(checkpointer.restored and checkpointer.restored.as_dict())}")
            train(state, checkpointer, restored + 1, report)
        except forebay.CheckpointUnavailable as error:
            # Another rank is gone; this one has a moment more.
            if is_last:
                raise
            report(f"left: {error}")
        if not is_last:
            signal.pause()
        checkpointer.close()
        report(json.dumps(state["losses"]))

    return start_ranks(world_size, work, with_gloo=False)


def outcome(children: list[Child]) -> tuple[list[list[str]], list[Any]]:
    """What each rank of a job that ends by itself reported, and its losses."""
    lines = [child._lines.read().splitlines() for child in children]
    assert [child.join() for child in children] == [0] * len(children)
    return lines, [json.loads(told[-1]) for told in lines]


def killed(children: list[Child], chance: random.Random) -> list[list[str]]:
    """Kills the ranks one after another, the first while it starts, restores or is at some step; gives what they told."""
    first, *others = chance.sample(range(len(children)), len(children))
    told: list[list[str]] = [[] for _ in children]

    def await_line(start: str) -> str:
        while True:
            line = children[first].line()
            assert line and not line.startswith("left"), f"rank {first} ended by itself: {told[first]}"
            told[first].append(line)
            if line.startswith(start):
                return line

    await_line("begun")
    if chance.random() < 0.65:
        restored = int(await_line("restored").split()[1])
        if restored < LAST:
            await_line(f"saving {chance.randint(restored + 1, LAST)}")
    kill_in_order([first, *others], children, told, chance)
    return told


def kill_in_order(order: list[int], children: list[Child], told: list[list[str]], chance: random.Random) -> None:
    """Kills ranks one after another, and adds what they reported to what they `told` before."""
    for rank in order:
        time.sleep(chance.uniform(0, 0.03))
        os.killpg(children[rank].pid, signal.SIGKILL)
    for child, lines in zip(children, told):
        lines += child._lines.read().splitlines()
        assert child.join() == -signal.SIGKILL, lines


def newest(told: list[list[str]], word: str) -> int:
    """The newest step that all ranks said that of."""
    steps = ([int(line.split()[1]) for line in lines if line.startswith(word)] for lines in told)
    return min(max(said, default=0) for said in steps)


@pytest.mark.parametrize("world_size, count", [(1, 15), (2, 5)])
def test_losses_are_bit_equal_after_kills_at_any_moment(tmp_path: Path, world_size: int, count: int) -> None:
    _, expected = outcome(start(tmp_path / "whole", world_size, is_last=True))
    assert [len(losses) for losses in expected] == [LAST] * world_size
    for number, chance in enumerate(chances(count, most=10 * count)):
        place = tmp_path / str(number)
        kills, snapshots = chance.randint(1, 4), chance.randint(1, 2)
        sealed = saving = 0
        history: list[list[str]] = []
        for attempt in itertools.count():
            children = start(place, world_size, attempt == kills, snapshots)
            told, losses = outcome(children) if attempt == kills else (killed(children, chance), None)
            restored = {int(line.split()[1]) for lines in told for line in lines if line.startswith("restored")}
            assert len(restored) <= 1, f"start {attempt}: ranks restored {restored}"
            history += told
            assert all(sealed <= step <= saving for step in restored), f"{restored} of {sealed} to {saving}: {history}"
            sealed, saving = max(sealed, newest(told, "sealed")), max(saving, newest(told, "saving"))
            if attempt == kills:
                break
        assert losses == expected
        assert _native.verify(f"file://{place}", None) == []
