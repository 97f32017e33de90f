"""Saves of one `forebay.dcp.Writer` that meet: begun before the one before is over, after one that failed, waited for long."""

from __future__ import annotations

import datetime
import gc
import pickle
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import forebay
import forebay._turns
import forebay._watchdog
import forebay.dcp
from forebay import _native

from .conftest import PATIENCE_S, SCALE
from .test_dcp import Unsavable, clear, run_at, silence  # noqa: F401  (a fixture)
from .test_stager import count_copies

STEPS = (10, 20, 30)


def state_of(step: int, size: int) -> dict[str, Any]:
    """Tensors of that value, sharded and replicated where there are several ranks."""
    value = torch.full((50, 2), float(step))
    state: dict[str, Any] = {"plain": value.clone(), "n": step}
    if size > 1:
        mesh = init_device_mesh("cpu", (size,))
        state |= {"rows": distribute_tensor(value, mesh, [Shard(0)]), "both": distribute_tensor(value, mesh, [Replicate()])}
    return state


def check(place: Path, steps: Any = STEPS) -> None:
    """Whether each step holds what was when it was begun."""
    assert sorted(step for step, *_ in _native.list_steps(f"file://{place}")) == list(steps)
    assert _native.verify(f"file://{place}", None) == []
    for step in steps:
        loaded = forebay.load(place, step=step)
        values = {name: value.unique().tolist() for name, value in loaded.items() if name != "n"}
        assert loaded["n"] == step and all(found == [step] for found in values.values()), (step, values)


class Waiting(DefaultSavePlanner):
    """Plans no sooner than it may."""

    def __init__(self, may_plan: threading.Event) -> None:
        super().__init__()
        self._may_plan = may_plan

    def create_local_plan(self) -> Any:
        assert self._may_plan.wait(PATIENCE_S)
        return super().create_local_plan()


class Refusing(DefaultSavePlanner):
    """Fails where the writer is not told."""

    def create_local_plan(self) -> Any:
        raise RuntimeError("no plan")


@pytest.mark.parametrize("kind", ["plain", "stager"])
@pytest.mark.parametrize("size", [1, 2])
def test_saves_that_are_begun_before_the_one_before_is_over_follow_it(tmp_path: Path, size: int, kind: str) -> None:
    """The second ended what the first waited with, and was taken for it where both had the same memory."""

    def save(rank: int) -> Any:
        with forebay.dcp.Writer(tmp_path) as writer:
            stager = forebay.dcp.Stager(writer) if kind == "stager" else None
            may_plan = threading.Event()
            saved = []
            for step in STEPS:
                state, planner = state_of(step, size), Waiting(may_plan)
                options: dict[str, Any] = {"storage_writer": writer, "planner": planner, "async_stager": stager}
                saved.append(dcp.async_save(state, checkpoint_id=step, **options))
                clear(state)
            may_plan.set()
            for future in saved:
                future.result(PATIENCE_S)
            # By its number: torch's threads may have saved another one than 30 last, which would be counted on from.
            last = dcp.async_save(state_of(31, size), checkpoint_id=31, storage_writer=writer, async_stager=stager)
            last.result(PATIENCE_S)

    run_at(size, save)
    check(tmp_path, (*STEPS, 31))


def test_what_is_staged_while_a_save_is_written_has_the_other_place(tmp_path: Path) -> None:
    """Each is uploaded as it was staged, once the one before has planned."""
    with pytest.MonkeyPatch.context() as patch, forebay.dcp.Writer(tmp_path) as writer:
        copied, stager = count_copies(patch), forebay.dcp.Stager(writer)
        write, written, may_end = forebay.dcp.Writer.finish, threading.Event(), threading.Event()

        def finish(itself: Any, **results: Any) -> None:
            written.set()
            assert may_end.wait(PATIENCE_S)
            write(itself, **results)

        patch.setattr(forebay.dcp.Writer, "finish", finish)
        first = dcp.async_save(state_of(10, 1), checkpoint_id=10, storage_writer=writer, async_stager=stager)
        assert written.wait(PATIENCE_S)
        second = dcp.async_save(state_of(20, 1), checkpoint_id=20, storage_writer=writer, async_stager=stager)
        assert writer._staged is not None
        may_end.set()
        first.result(PATIENCE_S)
        second.result(PATIENCE_S)
        assert copied == []
    check(tmp_path, (10, 20))


def test_a_save_that_failed_in_silence_keeps_no_other_waiting(tmp_path: Path) -> None:
    with forebay.dcp.Writer(tmp_path) as writer:
        stager = forebay.dcp.Stager(writer)
        for step, planner in ((10, Refusing()), (10, None), (20, Refusing()), (20, None)):
            state, kept = state_of(step, 1), {"storage_writer": writer, "planner": planner, "checkpoint_id": step}
            if planner is not None:
                # In a thread that goes on, and in one of its own whose failure is kept.
                with pytest.raises(CheckpointException, match="no plan"):
                    dcp.save(state, **kept)
                failed = dcp.async_save(state, async_stager=stager, **kept)
                assert failed.exception(PATIENCE_S) is not None
                continue
            dcp.async_save(state, async_stager=stager, **kept).result(PATIENCE_S)
        stager.close()
        del failed
        gc.collect()
        stager.close()
        assert writer._staged is None
    check(tmp_path, (10, 20))


def test_a_save_that_failed_on_another_rank_keeps_no_other_waiting(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        with forebay.dcp.Writer(tmp_path) as writer:
            for bad in (0, 1):
                own: Optional[Any] = Unsavable() if rank == bad else None
                with pytest.raises(CheckpointException, match="Unsavable"):
                    dcp.save({**state_of(1, 2), f"own{rank}": own}, checkpoint_id=10, storage_writer=writer)
                step = 10 * (bad + 1)
                dcp.async_save(state_of(step, 2), checkpoint_id=step, storage_writer=writer).result(PATIENCE_S)

    run_at(2, save)
    check(tmp_path, (10, 20))


def saving(work: Any) -> threading.Thread:
    """A thread that does `work` inside of a function of torch's module for saves."""
    torchs = types.ModuleType(forebay._turns._TORCHS)
    exec("def save(work):\n    work()\n", vars(torchs))
    return threading.Thread(target=torchs.save, args=(work,))


def test_no_garbage_is_collected_within_a_look_at_a_thread() -> None:
    """A finalizer let the thread run on, and memory of another frame's was taken for the next of its frames."""
    waits, may_end, collections = threading.Event(), threading.Event(), 0

    def wait(depth: int) -> None:
        if depth:
            return wait(depth - 1)
        waits.set()
        assert may_end.wait(PATIENCE_S)

    def count(phase: str, info: Any) -> None:
        nonlocal collections
        collections += 1

    thread, limits = saving(lambda: wait(300)), gc.get_threshold()
    thread.start()
    assert waits.wait(PATIENCE_S)
    gc.collect()
    gc.callbacks.append(count)
    gc.set_threshold(100)
    try:
        found = forebay._turns._saves(thread)
        seen, own = collections, forebay._turns._saves(threading.current_thread())
    finally:
        gc.set_threshold(*limits)
        gc.callbacks.remove(count)
        may_end.set()
    thread.join(PATIENCE_S)
    assert found and seen == 0 and not own
    assert gc.isenabled() and not forebay._turns._saves(thread), "it is over"
    gc.disable()
    try:
        assert not forebay._turns._saves(threading.current_thread()) and not gc.isenabled()
    finally:
        gc.enable()


def test_a_save_that_runs_while_it_is_looked_at_is_seen() -> None:
    """A generator was looked at, yielded, and nothing had called it by then."""
    rounds, may_end = 0, threading.Event()

    def work() -> None:
        nonlocal rounds
        while not may_end.is_set():
            rounds += sum(sum(step for step in range(depth)) for depth in range(4))

    thread, other, interval = saving(work), threading.Thread(target=work), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    other.start()
    try:
        for _ in range(500 * SCALE):
            time.sleep(0)
            assert forebay._turns._saves(thread) and not forebay._turns._saves(other)
    finally:
        may_end.set()
        sys.setswitchinterval(interval)
        thread.join(PATIENCE_S)
        other.join(PATIENCE_S)
    assert rounds > 0


@pytest.mark.parametrize("limit_s", [None, 0.0])
def test_who_waits_long_over_nccl_is_warned_before_its_watchdog_ends_the_job(tmp_path: Path, limit_s: Any) -> None:
    """The other ranks wait for the upload inside of a collective; an upload is longer than no time at all."""

    def save(rank: int) -> list[str]:
        assert forebay._watchdog.watchdog_limit_s() is None, "gloo"
        with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            patch.setattr(forebay.dcp, "watchdog_limit_s", lambda: limit_s)
            with forebay.dcp.Writer(tmp_path) as writer:
                dcp.save(state_of(10, 2), storage_writer=writer, checkpoint_id=10)
        return [str(one.message) for one in told if one.category is forebay.CheckpointWarning]

    first, second = run_at(2, save)
    assert second == [] and len(first) == (limit_s is not None)
    assert all("step 10 is on its way" in text and "hint: save with async_save" in text for text in first)
    check(tmp_path, (10,))


def test_the_time_that_nccl_gives_is_found_where_objects_go_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = types.SimpleNamespace(_timeout=datetime.timedelta(minutes=3))
    found = types.SimpleNamespace(_get_backend=lambda device: types.SimpleNamespace(options=options))
    for backends, group, expected in (
        ("cuda:nccl", found, 180.0),
        ("cuda:nccl", None, 600.0),
        ("cpu:gloo,cuda:nccl", found, None),
        ("cpu:gloo,cuda:gloo", found, None),
    ):
        stub = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
        stub.get_backend_config = lambda told=backends: told
        stub.group = types.SimpleNamespace(WORLD=group)
        monkeypatch.setattr(forebay._watchdog, "dist", stub)
        assert forebay._watchdog.watchdog_limit_s() == expected, backends


@pytest.mark.parametrize("kind", ["copies", "process"][:SCALE])
def test_saves_from_a_process_of_their_own_are_counted_on(tmp_path: Path, kind: str) -> None:
    """Each is done by a copy of the writer, and all were the first step."""
    type_of_save = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS

    def save(rank: int) -> Any:
        writers = {first: forebay.dcp.Writer(tmp_path / str(first), step=first) for first in (1, None, 7)}
        for first, last in ((1, 1), (1, 2), (1, 3), (None, 1), (None, 2), (7, 7), (7, 8), (7, 40), (7, 41)):
            name, state = 40 if last == 40 else None, {"plain": torch.full((9,), float(last)), "n": last}
            if kind == "process":
                kept: dict[str, Any] = {"checkpoint_id": name, "storage_writer": writers[first]}
                dcp.async_save(state, async_checkpointer_type=type_of_save, **kept).result(PATIENCE_S)
                continue
            with pickle.loads(pickle.dumps(writers[first])) as copied:
                dcp.save(state, checkpoint_id=name, storage_writer=copied)
        if kind == "process":
            return
        # What is saved where the copies come from counts, too.
        dcp.save({"plain": torch.full((9,), 60.0), "n": 60}, checkpoint_id=60, storage_writer=writers[7])
        with pickle.loads(pickle.dumps(writers[7])) as copied:
            dcp.save({"plain": torch.full((9,), 61.0), "n": 61}, storage_writer=copied)
        writers[7].close()

    run_at(2 if kind == "process" else 1, save)
    check(tmp_path / "1", (1, 2, 3))
    check(tmp_path / "None", (1, 2))
    check(tmp_path / "7", (7, 8, 40, 41, *((60, 61) if kind == "copies" else ())))
