"""`snapshots=1`: where the host has memory for one copy of the state, saves take turns with it, and nothing torn is restored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _native

from .conftest import Child, Gate, Instead, memory_taken
from .test_restart import LINGER_S, end, held_until, kill

Report = Callable[[str], None]

COUNT = 4_000_000
"""Elements of a state, of 4 bytes."""


def state_at(step: int, count: int = COUNT) -> dict[str, Any]:
    return {"t": torch.full((count,), float(step)), "n": step}


def taken(process: int) -> int:
    """Bytes that the kernel has given to the memory for snapshots of a process."""
    return sum(memory_taken(process).values())


def test_it_takes_the_memory_of_one_copy_and_tells_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with forebay.Checkpointer(tmp_path, every=1, snapshots=1) as checkpointer:
        told = checkpointer.prepare(state_at(0))
        assert 4 * COUNT <= told < 4 * COUNT * 1.1
        assert "saves take 15.3 MiB of this host's memory\n" in capfd.readouterr().err
        # Larger in the end: that needs other memory.
        for step, count in enumerate((COUNT, COUNT, COUNT, 2 * COUNT, 2 * COUNT), start=1):
            save = checkpointer.step(step, state_at(step, count))
            assert save is not None and 4 * count <= taken(os.getpid()) < 4 * count + (4 << 20)
            if step == 3:
                assert save.wait_durable(60)
        assert checkpointer.skipped == 0
    assert checkpointer.steps() == [1, 2, 3, 4, 5]
    assert _native.verify(f"file://{tmp_path}", None) == []


def test_a_save_has_room_once_the_one_before_it_is_committed(gate: Gate, tmp_path: Path) -> None:
    place = f"s3://checkpoints/{tmp_path.name}-one"
    checkpointer = forebay.Checkpointer(place, every=1, on_busy="skip", snapshots=1)
    save = checkpointer.step(1, state_at(1, 1000))
    assert save is not None and save.wait_sealed(60) and not save.durable
    assert checkpointer.step(2, state_at(2, 1000)) is None and checkpointer.skipped == 1
    # What is on its way is what a restore finds first.
    gate.open()
    assert save.wait_durable(60)
    save = checkpointer.step(3, state_at(3, 1000))
    assert save is not None and save.wait_durable(60)
    found = state_at(0, 1000)
    assert checkpointer.restore(found) == 3 and torch.equal(found["t"], state_at(3, 1000)["t"])
    assert checkpointer.restored is not None and checkpointer.restored.tier == "arena"
    checkpointer.close()
    assert checkpointer.steps() == [1, 3]


def killed_while_it_copies(place: Path) -> None:
    """A job that saves step 1, and is killed when step 2 has taken its place in memory."""

    def work(report: Report) -> None:
        checkpointer = forebay.Checkpointer(place, every=1, linger=LINGER_S, snapshots=1)
        save = checkpointer.step(1, state_at(1))
        assert save is not None and save.wait_durable(60)
        begin = checkpointer._begin

        def begun(*args: Any) -> Any:
            def copy(*_: Any) -> None:
                report(str(checkpointer._agent.pid))
                os.kill(os.getpid(), signal.SIGKILL)

            return Instead(begin(*args), copy=copy)

        checkpointer._begin = begun  # type: ignore[method-assign]
        checkpointer.step(2, state_at(2))

    child = Child(work)
    agent = int(child.line())
    assert child.join() == -signal.SIGKILL
    end(agent)


def test_who_is_killed_while_it_copies_goes_on_from_the_store(tmp_path: Path) -> None:
    killed_while_it_copies(tmp_path)
    found = state_at(0)
    with forebay.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        assert checkpointer.restore(found) == 1
        assert checkpointer.restored is not None and checkpointer.restored.tier == "store"
        assert torch.equal(found["t"], state_at(1)["t"])


def test_the_memory_of_two_copies_becomes_that_of_one(tmp_path: Path) -> None:
    """A killed trainer had two; its successor, which restores from them, keeps one."""
    child = held_until(tmp_path, 2)
    former = kill(child)
    found = {"t": torch.zeros(300_000), "n": 0}
    with forebay.Checkpointer(tmp_path, every=1, linger=LINGER_S, snapshots=1) as checkpointer:
        assert checkpointer.restore(found) == 2
        assert checkpointer.restored is not None and checkpointer.restored.tier == "arena"
        for step in (3, 4, 5):
            found["t"] += 1
            found["n"] = step
            save = checkpointer.step(step, found)
            assert save is not None and save.wait_durable(60)
            assert taken(os.getpid()) < 2 * found["t"].nbytes, f"step {step}"
    end(former)
    loaded = forebay.load(str(tmp_path))
    assert loaded["n"] == 5 and bool((loaded["t"] == 5).all())
