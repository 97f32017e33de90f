"""A checkpointer that is closed gives its slots back at once, whoever still refers to it and whether or not Python collects
cycles: on a host with little to spare, what waits for the collector ends the training."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import forebay
from forebay import _errors

from .conftest import PATIENCE_S, arenas_of, leave_to_the_next_call
from .test_failures import begun, fail, mend, spoilt, state
from .test_ranks import run_ranks


PF_EXITING = 0x4
"""Of a thread's flags in proc(5): it has begun to end."""


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


class Batch:
    """What lies in the frames of a training, such as memory of a device."""


def left_by(act: Callable[[], Any], expected: type[forebay.CheckpointError]) -> list[Batch]:
    """What stays of three calls that fail."""
    batches = []

    def train() -> None:
        batch = Batch()
        batches.append(weakref.ref(batch))
        act()

    for _ in range(3):
        try:
            train()
        except expected:
            continue
        raise AssertionError("it did not fail")
    return [batch for batch in (reference() for reference in batches) if batch is not None]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_saves_that_fail_keep_nothing_of_who_is_told(tmp_path: Path, on_error: Any) -> None:
    """While the store was away the frames of every call that told it stayed, as long as the last hundred saves."""
    checkpointer = begun(tmp_path, on_error=on_error, max_failures=1)
    save = fail(checkpointer, 2)
    assert left_by(save.wait_durable, forebay.CheckpointError) == []

    def save_and_step() -> None:
        # The one that is told while another is about to be saved.
        fail(checkpointer, 3)
        checkpointer.save_now(3, state(3))

    assert left_by(save_and_step, forebay.CheckpointError) == []
    mend(tmp_path)

    def spoil() -> None:
        spoilt(checkpointer, 4)
        checkpointer.before_optimizer_step()

    assert left_by(spoil, forebay.CheckpointMutated) == []
    checkpointer.close()


def test_memory_that_is_being_copied_stays_where_its_tensor_is_given_other(tmp_path: Path) -> None:
    memory = (ctypes.c_float * 300_000)(*range(300_000))
    seen = weakref.ref(memory)
    module = torch.nn.Module()
    module.p = torch.nn.Parameter(torch.zeros(300_000))
    optim = torch.optim.SGD([module.p], lr=1.0, momentum=0.9)
    momentum = optim.state[module.p]["momentum_buffer"] = torch.frombuffer(memory, dtype=torch.float32)
    del memory
    state = {"module": module, "optim": optim}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.before_optimizer_step()
        leave_to_the_next_call(checkpointer)
        save = checkpointer.save_now(1, state)
        momentum.data = torch.zeros(300_000)
        assert seen() is not None, "it is read in the background"
        checkpointer.before_optimizer_step()
        assert save.wait_durable(60)
        del save
        assert seen() is None
    forebay.load(tmp_path, state)
    momentum = optim.state[module.p]["momentum_buffer"]
    assert torch.equal(momentum, torch.arange(300_000, dtype=torch.float32))


def threads() -> set[Path]:
    """Those of this process."""
    return set(Path("/proc/self/task").iterdir())


def name_of(thread: Path) -> str:
    """What a thread is called; nothing where it is gone."""
    with contextlib.suppress(OSError):
        return (thread / "comm").read_text().strip()
    return ""


def has_ended(thread: Path) -> bool:
    """Whether a thread is gone, or about to be: one that was waited for may be seen for a while."""
    with contextlib.suppress(OSError):
        flags = int((thread / "stat").read_text().rsplit(")", 1)[1].split()[6])
        return bool(flags & PF_EXITING)
    return True


def copiers() -> set[Path]:
    """Threads that copy behind the training; each has its name once it runs."""
    return {thread for thread in threads() if name_of(thread) == "forebay-stage" and not has_ended(thread)}


def test_memory_outlives_its_copy_where_nobody_closes_the_checkpointer(tmp_path: Path) -> None:
    """It was freed under the thread that read it: the process ended, or other bytes were copied."""
    # What was there before is not looked at: the copy would be over by then.
    gc.freeze()
    memory = (ctypes.c_float * 50_000_000)()
    were_copying: list[set[Path]] = []
    weakref.finalize(memory, lambda: were_copying.append(copiers()))
    parameter = torch.nn.Parameter(torch.zeros(10))
    optim = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    optim.state[parameter]["momentum_buffer"] = torch.frombuffer(memory, dtype=torch.float32)
    checkpointer = forebay.Checkpointer(tmp_path, copy_threads=1)
    checkpointer.save_now(1, state(1)).wait_durable(60)
    checkpointer.before_optimizer_step()
    leave_to_the_next_call(checkpointer)
    checkpointer.save_now(2, {"optim": optim})
    while not copiers() and not checkpointer._staging.is_copied:
        pass
    agent = checkpointer._agent
    del memory, parameter, optim
    assert were_copying == []
    del checkpointer
    gc.collect()
    gc.unfreeze()
    assert were_copying == [set()]
    agent.wait(60)


def test_ranks_of_which_one_fails_keep_nothing_of_their_callers(tmp_path: Path) -> None:
    def refuse() -> dict[str, Any]:
        raise forebay.CheckpointInvalid("no")

    def work(rank: int) -> int:
        with forebay.Checkpointer(tmp_path) as checkpointer:
            meet = checkpointer._ranks.gather
            return len(left_by(lambda: meet("try", refuse if rank == 1 else dict), forebay.CheckpointInvalid))

    assert run_ranks(2, work, with_gloo=False) == [0, 0]


def test_a_save_that_nobody_refers_to_is_told_of_and_let_go(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path) as checkpointer:
        first = weakref.ref(checkpointer.save_now(1, state(1)))
        assert checkpointer.wait()
        checkpointer.save_now(2, state(2))
        assert checkpointer.wait() and first() is None
        assert [entry["durable_s"] is not None for entry in checkpointer.timeline()] == [True, True]


def test_an_error_is_told_again_as_it_was() -> None:
    first = forebay.CheckpointDenied("no", 7)
    first.__cause__ = OSError(2, "gone", "there")
    first.hint = "ask"  # type: ignore[attr-defined]
    first.add_note("twice")
    try:
        raise first
    except forebay.CheckpointDenied as caught:
        told = _errors.anew(caught)
    assert type(told) is forebay.CheckpointDenied and told is not first and (told.args, str(told)) == (first.args, str(first))
    assert vars(told) == {"hint": "ask", "__notes__": ["twice"]} and told.__traceback__ is None and told.__suppress_context__
    cause = told.__cause__
    assert isinstance(cause, FileNotFoundError) and (cause.filename, str(cause)) == ("there", str(first.__cause__))
    told.add_note("once")
    assert vars(first)["__notes__"] == ["twice"]


def test_nothing_is_collected_while_a_state_is_saved_or_restored(tmp_path: Path) -> None:
    """There are enough objects of a thousand tensors that it was, which took longer than the bytes did."""
    state = {f"t{number}": torch.zeros(4) for number in range(1000)}
    rounds: list[int] = []

    def count(phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            rounds.append(told["generation"])

    gc.enable()
    gc.callbacks.append(count)
    try:
        with forebay.Checkpointer(tmp_path) as checkpointer:
            for work in (lambda: checkpointer.save_now(1, state), lambda: checkpointer.restore(state)):
                rounds.clear()
                work()
                # What is done beside it makes some objects, too.
                assert len(rounds) <= 2 and gc.isenabled(), rounds
        with pytest.raises(forebay.CheckpointMismatch):
            forebay.load(tmp_path, {"other": torch.zeros(1)})
        assert gc.isenabled()
        gc.disable()
        forebay.load(tmp_path, state)
        assert not gc.isenabled()
    finally:
        gc.callbacks.remove(count)


def test_closed_checkpointers_of_several_ranks_leave_no_sockets_and_no_threads(tmp_path: Path) -> None:
    """They had their group, and rank 0 the thread that hands its words out, until Python's collector came."""

    def left() -> tuple[int, int]:
        groups = [thread for thread in threads() if name_of(thread) == "forebay-group"]
        return len(os.listdir("/proc/self/fd")), len(groups)

    def work(rank: int) -> Any:
        gc.disable()
        counts, seen = [], []
        for number in range(11):
            with forebay.Checkpointer(tmp_path / str(number)) as checkpointer:
                save = checkpointer.save_now(1, state(number))
            seen.append(weakref.ref(checkpointer))
            del checkpointer, save
            # A thread ends once it has told the others that this one is gone.
            deadline = time.monotonic() + PATIENCE_S
            while left()[1] > 0 and time.monotonic() < deadline:
                time.sleep(0.02)
            counts.append(left())
        return [counts[-1][0] - counts[0][0], counts[-1][1], sum(one() is not None for one in seen)]

    assert run_ranks(2, work, with_gloo=False) == [[0, 0, 0]] * 2
