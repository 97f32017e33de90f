"""A checkpointer that is closed gives its slots back at once, whoever still refers to it and whether or not Python collects
cycles: on a host with little to spare, what waits for the collector ends the training."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forebay

from .conftest import arenas_of


def slots() -> tuple[int, int]:
    """Mappings of checkpoint memory in this process, and descriptors of it."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:forebay-checkpoint" in line]
    return len(maps), len(arenas_of(os.getpid()))


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_saves_of_one_state_after_another_leave_nothing(tmp_path: Path) -> None:
    before = slots()
    for step in range(3):
        forebay.save({"w": torch.randn(100_000)}, tmp_path, step=step)
        assert slots() == before, f"after save {step}"


def test_a_closed_checkpointer_that_is_referred_to_holds_none(tmp_path: Path) -> None:
    before, state = slots(), {"t": torch.zeros(100_000)}
    checkpointer = forebay.Checkpointer(tmp_path, every=1)
    first = checkpointer.step(1, state)
    # A larger state takes another arena.
    second = checkpointer.step(2, {"t": torch.zeros(2_000_000)})
    assert first is not None and second is not None and slots() > before
    checkpointer.close()
    assert slots() == before
    assert first.durable and second.wait_durable() and not checkpointer.skipped
    assert [entry["durable_s"] is not None for entry in checkpointer.timeline()] == [True, True]
    assert checkpointer.metrics() and checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("is_copied_at_once", [True, False])
def test_a_loop_that_fails_leaves_none_to_its_process(tmp_path: Path, is_copied_at_once: bool) -> None:
    """The agent has the memory by itself, and commits what is sealed."""
    before, state = slots(), {"t": torch.zeros(3_000_000)}
    with pytest.raises(ZeroDivisionError):
        with forebay.Checkpointer(tmp_path, every=1, flush_rate="8MiB") as checkpointer:
            if not is_copied_at_once:
                checkpointer.before_optimizer_step()
            save = checkpointer.step(1, state)
            assert save is not None and slots() > before
            raise ZeroDivisionError
    assert slots() == before
    with pytest.raises(forebay.CheckpointInvalid, match="closed before step 1 was known to be"):
        save.wait_durable()
    assert save.wait_staged() and save.timeline()["durable_s"] is None
    checkpointer._agent.wait(60)
    assert checkpointer.steps() == [1]
