"""One agent of a job is killed while all its ranks live on: no save is lost by it, and none is seen by some ranks only."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _native

from .conftest import SCALE, chances, wait_until
from .test_ranks import start_ranks
from .test_restart import LINGER_S, end

Report = Callable[[str], None]

LAST = 7
"""Steps that a job saves."""

MOMENTS = ("between", "seal", "at once", "soon", "later")
"""When an agent is killed: before a save begins, before what was copied is sealed, or so many seconds into the save."""

WITHIN_S = {"at once": (0.0, 0.01), "soon": (0.01, 0.1), "later": (0.1, 0.5)}


def state_of(rank: int, step: int) -> dict[str, Any]:
    """What a rank has at a step: parameters, which are copied late, and what all ranks have."""
    model = torch.nn.Linear(200, 200)
    with torch.no_grad():
        model.weight.fill_(100 * rank + step)
        model.bias.fill_(100 * rank + step)
    optim = torch.optim.SGD(model.parameters(), lr=step)
    return {"model": model, "optim": optim, "all": torch.full((200_000,), float(step)), "n": step}


def is_right(state: dict[str, Any], rank: int, step: int) -> bool:
    expected = state_of(rank, step)
    alike = [torch.equal(one, other) for one, other in zip(state["model"].parameters(), expected["model"].parameters())]
    return all(alike) and torch.equal(state["all"], expected["all"]) and state["n"] == step


def saved(checkpointer: forebay.Checkpointer, rank: int, step: int, moment: str, delay_s: float) -> list[str]:
    """What became of a save in which this rank's agent is killed at that moment, if any; and what was warned of."""

    def kill() -> None:
        os.kill(checkpointer._agent.pid, signal.SIGKILL)

    killer = threading.Timer(delay_s, kill)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", forebay.CheckpointWarning)
        if moment == "between":
            end(checkpointer._agent.pid)
        if moment in WITHIN_S:
            killer.start()
        try:
            # Who would seal it once it is copied waits for that.
            with checkpointer._lock if moment == "seal" else contextlib.nullcontext():
                save = checkpointer.step(step, state_of(rank, step))
                if moment == "seal":
                    assert save is not None and not save.staged
                    end(checkpointer._agent.pid)
            checkpointer.before_optimizer_step()
            assert save is not None
            outcome = "durable" if save.wait_durable(60) else "slow"
        except forebay.CheckpointError as error:
            outcome = str(error)
        if killer.ident is not None:
            killer.join()
    return [outcome, *(str(warning.message) for warning in caught)]


# Four ranks in long runs.
@pytest.mark.parametrize("size", [2, 4] if SCALE > 1 else [2])
def test_an_agent_that_dies_beside_living_ranks_costs_no_save(tmp_path: Path, size: int) -> None:
    for number, chance in enumerate(chances(1, most=20)):
        place = tmp_path / str(number)
        moments = chance.sample(MOMENTS, len(MOMENTS)) if SCALE == 1 else chance.choices(MOMENTS, k=LAST - 2)
        deaths = [(moment, chance.randrange(size), within(chance, moment)) for moment in moments]
        plan = [("none", 0, 0.0), *deaths, ("none", 0, 0.0)]
        keep = chance.choice([None, 1, 2])

        def work(rank: int, report: Report) -> None:
            checkpointer = forebay.Checkpointer(
                place, every=1, keep=keep, rng=False, replicated=["all"], linger=LINGER_S, patience=60
            )
            checkpointer.before_optimizer_step()
            agents, told = set(), []
            for step, (moment, victim, delay_s) in enumerate(plan, start=1):
                told.append(saved(checkpointer, rank, step, moment if rank == victim else "none", delay_s))
                agents.add(checkpointer._agent.pid)
            report(json.dumps([checkpointer._agent.pid, len(agents), told]))
            signal.pause()

        def restore(rank: int, report: Report) -> None:
            warnings.simplefilter("ignore", forebay.CheckpointWarning)
            state = state_of(rank, 99)
            with forebay.Checkpointer(place, rng=False, replicated=["all"], linger=LINGER_S) as checkpointer:
                step = checkpointer.restore(state) or 0
                assert checkpointer.restored is not None
                report(json.dumps([step, checkpointer.restored.tier, is_right(state, rank, step)]))

        children = start_ranks(size, work, with_gloo=False)
        ranks = [json.loads(child.line()) for child in children]
        for index, (moment, victim, delay_s) in enumerate(plan):
            outcomes = [told[index][0] for _, _, told in ranks]
            assert outcomes == ["durable"] * size, f"step {index + 1}, {moment} ({delay_s:.3f} s) of {victim}: {ranks}"
        seen = sum(agents for _, agents, _ in ranks)
        assert size < seen <= size + len(deaths), "agents were killed"
        for child in children:
            child.kill()
        # Old steps are deleted after the new one is durable.
        kept = list(range(1, LAST + 1))[-(keep or LAST) :]
        wait_until(lambda: sorted(step for step, *_ in _native.list_steps(f"file://{place}")) == kept)
        assert _native.verify(f"file://{place}", None) == []
        children = start_ranks(size, restore, with_gloo=False)
        assert [json.loads(child.line()) for child in children] == [[LAST, "arena", True]] * size
        assert [child.join() for child in children] == [0] * size
        for agent, _, _ in ranks:
            end(agent)


def within(chance: random.Random, moment: str) -> float:
    return chance.uniform(*WITHIN_S.get(moment, (0.0, 0.0)))
