"""How often ranks meet for signals and the clock: not at every step where steps are short, and all at the same ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forebay
from forebay import _schedule
from forebay._ranks import Ranks
from forebay._schedule import Schedule
from forebay._signals import Notice

from .test_ranks import run_ranks


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks meet for from now on."""
    acts: list[str] = []
    gather = Ranks.gather

    def count(self: Ranks, act: str, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        acts.append(act)
        return gather(self, act, work)

    monkeypatch.setattr(Ranks, "gather", count)
    return acts


def test_ranks_with_short_steps_meet_seldom_and_act_on_a_signal_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They met twice a step, once for each option; every such meeting goes through rank 0."""
    steps = 480

    def work(rank: int) -> Any:
        acts = counted(monkeypatch)
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        with forebay.Checkpointer(tmp_path, every_minutes=60, on_signal="SIGUSR1") as job:
            state = {"t": torch.zeros(1000)}
            job.step(0, state)
            acts.clear()
            met = []
            for step in range(1, steps + 1):
                job.step(step, state)
                met += [step] * len(acts)
                acts.clear()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            saved = next(step for step in range(steps + 1, steps + 99) if job.step(step, state) is not None)
            signal.signal(signal.SIGUSR1, before)
            return [met, saved]

    (met, saved), other = run_ranks(2, work, with_gloo=False)
    assert other == [met, saved] and steps < saved <= steps + 16
    assert len(met) < steps / 4 and max(b - a for a, b in zip([0, *met], met)) <= 16


def test_long_steps_are_met_at_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay._schedule.APART_S", 0.001)

    def work(rank: int) -> Any:
        acts = counted(monkeypatch)
        with forebay.Checkpointer(tmp_path, every_minutes=60, on_signal="SIGUSR1") as job:
            state = {"t": torch.zeros(1000)}
            job.step(0, state)
            acts.clear()
            for step in range(1, 6):
                time.sleep(0.002)
                job.step(step, state)
            return list(acts)

    assert run_ranks(2, work, with_gloo=False) == [["look for signals and at the clock"] * 5] * 2


def test_meetings_come_as_steps_take_and_never_late_by_many() -> None:
    schedule = Schedule(None, 60.0, Notice(None))

    def next_after(calls: int, seconds: float, former: int, world_size: int = 2) -> int:
        schedule._calls, schedule._next = calls, former
        ranks: Any = SimpleNamespace(alone=world_size == 1)
        return schedule._next_after(seconds, ranks)

    assert [next_after(calls, 0.0, calls) for calls in (1, 2, 4, 8, 16)] == [2, 4, 8, 16, 16]
    assert next_after(4, 0.4, 4) == round(_schedule.APART_S / 0.1) == 5
    assert next_after(16, 16.0, 16) == next_after(1, 3600.0, 1) == next_after(9, 0.0, 9, world_size=1) == 1
