"""Which rank a save waits for, as `forebay ckpt ranks` tells from any host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import forebay

from .conftest import wait_until
from .test_convert import binary
from .test_ranks import start_ranks

Report = Callable[[str], None]


def told(place: Path, home: Path, *words: str) -> str:
    command = [binary(), "ckpt", "ranks", str(place), *words]
    done = subprocess.run(command, env={**os.environ, "HOME": str(home)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rank_that_a_save_waits_for_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def saves() -> Any:
        return json.loads(told(run, tmp_path, "--json"))["saves"]

    def work(rank: int, report: Report) -> None:
        with forebay.Checkpointer(run) as checkpointer:
            state = {"w": torch.full((1000,), float(rank))}
            save = checkpointer.save_now(1, state)
            assert save is not None and save.wait_durable(60)
            agent = checkpointer._agent.pid
            report(str(agent))
            # The other rank's agent answers nothing, so that its part stays where it is.
            if rank == 1:
                os.kill(agent, signal.SIGSTOP)
            state["w"] += 1
            save = checkpointer.save_now(2, state)
            assert save is not None and save.wait_durable(60)
        report("done")

    children = start_ranks(2, work, with_gloo=False)
    agents = [int(child.line()) for child in children]
    try:
        wait_until(lambda: any(save["step"] == 2 and save["stored"] == 1 for save in saves()))
        (save,) = [save for save in saves() if save["step"] == 2]
        assert (save["ranks"], save["unheard"], save["left"]) == (2, [1], False)
        assert [(news["rank"], news["state"]) for news in save["heard"]] == [(0, "stored")]
        rows = [line.split() for line in told(run, tmp_path).splitlines()]
        assert rows[0][:3] == ["STEP", "INCARNATION", "RANK"]
        assert ["2", "1", "all", "1", "of", "2", "stored"] in [row[:7] for row in rows]
        assert ["2", "1", "1", "not", "heard", "of"] in rows
    finally:
        os.kill(agents[1], signal.SIGCONT)
    assert [child.line() for child in children] == ["done"] * 2
    assert [child.join() for child in children] == [0, 0]
    assert saves() == [] and len(told(run, tmp_path).splitlines()) == 1
