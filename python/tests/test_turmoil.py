"""All at once: trainers and agents are killed at any moment, the store is in trouble, and each start has its number of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch

import forebay
from forebay import _native

from .conftest import Child, chances
from .test_kills import kill_in_order
from .test_ranks import start_ranks
from .test_troubled_store import Troubles

Report = Callable[[str], None]
History = list[list[int]]
"""Steps, and the start that made each."""

LAST = 12
"""Steps of a training."""

COUNT = 90_001
"""Elements of its tensor."""


def blank() -> dict[str, Any]:
    """The state of a training that has not begun; all ranks have it alike."""
    return {"w": torch.zeros(COUNT), "frozen": torch.arange(COUNT), "history": []}


def tensor_of(history: History) -> torch.Tensor:
    seed = hashlib.sha256(json.dumps(history).encode()).digest()[:6]
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(int.from_bytes(seed, "little")))


def is_right(state: dict[str, Any]) -> bool:
    """Whether the tensor is that of the history."""
    fresh = blank()
    wanted = tensor_of(state["history"]) if state["history"] else fresh["w"]
    return torch.equal(state["w"], wanted) and torch.equal(state["frozen"], fresh["frozen"])


class Found(NamedTuple):
    """What a rank restored."""

    step: int
    history: History
    is_right: bool
    whence: Optional[str]
    """The tier, and why none that is nearer."""


class Told(NamedTuple):
    """What a rank told, by the first word of each line."""

    lines: list[str]

    def newest(self, word: str) -> int:
        return max((int(line.split()[1]) for line in self.lines if line.startswith(f"{word} ")), default=0)

    def found(self) -> list[Found]:
        texts = [line.removeprefix("restored ") for line in self.lines if line.startswith("restored ")]
        return [Found(*json.loads(text)) for text in texts]


def start(place: str, number: int, size: int, options: dict[str, Any], pause_s: float, is_last: bool) -> list[Child]:
    """Starts a job, which reports what it does. All but the last one never end."""

    def train(report: Report) -> None:
        state = blank()
        with forebay.Checkpointer(place, every=1, rng=False, replicated=["*"], linger=120, **options) as checkpointer:
            step = checkpointer.restore(state) or 0
            restored = checkpointer.restored
            whence = None if restored is None else f"{restored.tier} {restored.passed_over}"
            report(f"restored {json.dumps(Found(step, state['history'], is_right(state), whence))}")
            saves: list[forebay.Save] = []
            while step < LAST:
                step += 1
                checkpointer.before_optimizer_step()
                state["history"] = [*state["history"], [step, number]]
                state["w"].copy_(tensor_of(state["history"]))
                report(f"saving {step}")
                save = checkpointer.step(step, state)
                assert save is not None
                saves.append(save)
                report(f"agent {checkpointer._agent.pid}")
                for word, steps in {
                    "sealed": [save.step for save in saves if save.sealed],
                    "durable": [save.step for save in saves if save.durable],
                }.items():
                    report(f"{word} {max(steps)}") if steps else None
                time.sleep(pause_s)
            checkpointer.wait()
        report(f"durable {LAST}") if saves else None
        report("ended")

    def work(rank: int, report: Report) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        report("begun")
        try:
            train(report)
        except forebay.CheckpointUnavailable as error:
            # Another rank is gone; this one has a moment more.
            if is_last:
                raise
            report(f"left: {error}")
        if not is_last:
            signal.pause()

    return start_ranks(size, work, with_gloo=False)


def killed(children: list[Child], chance: random.Random) -> tuple[list[Told], bool]:
    """Kills the ranks one after another, the first while it starts, restores or is at some step, and agents now and then; gives
    what the ranks told, and whether an agent was killed."""
    told = [Told([]) for _ in children]
    first = chance.randrange(len(children))
    until, step = chance.choice(["begun", "restored", *["saving"] * 6]), chance.randint(1, LAST)
    has_killed = False
    while True:
        line = children[first].line()
        assert line, f"rank {first} ended by itself: {told}"
        told[first].lines.append(line)
        word, *rest = line.split()
        if word == "agent" and chance.random() < 0.1:
            has_killed = True
            with suppress(ProcessLookupError):
                os.kill(int(rest[0]), signal.SIGKILL)
        # It may have restored a later step than that.
        if word in ("left:", "ended") or word == until and (word != "saving" or int(rest[0]) >= step):
            break
    order = chance.sample(range(len(children)), len(children))
    kill_in_order(order, children, [lines for lines, in told], chance)
    return told, has_killed


@contextmanager
def store(
    chance: random.Random, endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A place to save to, and options of all starts."""
    options: dict[str, Any] = {
        "keep": chance.choice([None, 1, 2, 3]),
        "keep_every": chance.choice([None, 4]),
        "snapshots": chance.choice([1, 2]),
    }
    if chance.random() < 0.4:
        options |= {"local": folder / "local", "local_bytes": chance.choice(["64MiB", "3MiB"])}
    kind = chance.choice(["folder", "s3", "in trouble", "in trouble"])
    print(kind, options)
    if kind == "folder":
        yield f"file://{folder}/run", options
        return
    place = f"s3://checkpoints/{folder.name}-{time.time_ns()}"
    if kind == "s3":
        yield place, options
        return
    troubles = Troubles(endpoint, chance)
    monkeypatch.setenv("AWS_ENDPOINT_URL", troubles.endpoint)
    try:
        yield place, options
    finally:
        # What came of it is seen without trouble.
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        troubles.close()


def run(place: str, options: dict[str, Any], chance: random.Random) -> None:
    """A training that is killed some times, each start of which restores what the one before had saved."""
    sizes = [chance.randint(1, 3)]
    for _ in range(chance.randint(1, 5)):
        sizes.append(sizes[-1] if chance.random() < 0.6 else chance.randint(1, 3))
    durable = sealed = saving = 0
    agents: set[int] = set()
    have_agents_died = False
    for number, size in enumerate(sizes):
        is_last = number + 1 == len(sizes)
        children = start(place, number, size, options, chance.choice([0, 0.01, 0.05]), is_last)
        if is_last:
            told = [Told(child._lines.read().splitlines()) for child in children]
            assert [child.join() for child in children] == [0] * size, told
            has_killed = False
        else:
            told, has_killed = killed(children, chance)
        agents |= {int(line.split()[1]) for lines, in told for line in lines if line.startswith("agent")}
        found = [found for rank in told for found in rank.found()]
        # What all ranks sealed is held for as many, by agents that live.
        is_held = not have_agents_died and number > 0 and size == sizes[number - 1]
        least = max(durable, sealed) if is_held else durable
        for restored in found:
            assert restored[:2] == found[0][:2], f"start {number}: ranks differ: {found}"
            assert restored.is_right, f"start {number}: wrong bytes"
            sought = f"{least} to {saving}, durable {durable}, sealed {sealed}"
            assert least <= restored.step <= saving, f"start {number} of {sizes}: {restored} of {sought}"
            assert not restored.step or restored.history[-1][0] == restored.step
        have_agents_died = have_agents_died or has_killed
        sealed = max(sealed, min(rank.newest("sealed") for rank in told))
        durable = max(durable, *(rank.newest("durable") for rank in told))
        saving = max(saving, *(rank.newest("saving") for rank in told))
    assert durable == LAST or {restored.step for restored in found} == {LAST}
    for agent in agents:
        with suppress(ProcessLookupError):
            os.kill(agent, signal.SIGKILL)


def test_what_is_restored_is_whole_and_no_older_than_what_was_promised(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, chance in enumerate(chances(1, most=100)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with store(chance, s3_endpoint, folder, monkeypatch) as (place, options):
            run(place, options, chance)
        assert _native.verify(place, None) == []
