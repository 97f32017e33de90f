"""The memory of saves is taken once, before the first of them, with room for what optimizers do not have yet."""

from __future__ import annotations

import copy
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  (slow: before any fork)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import forebay
from forebay._sizes import Sizer, coming_state

from .conftest import memory_taken
from .test_ranks import fsdp_parts, run_ranks

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def arenas() -> set[int]:
    """The memory for snapshots that this process holds, by inode."""
    return set(memory_taken(os.getpid()))


def taken(others: set[int]) -> int:
    """Bytes of it that are there, but for those of others."""
    return sum(size for arena, size in memory_taken(os.getpid()).items() if arena not in others)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def learn(state: dict[str, Any]) -> None:
    """One step of the state's optimizer."""
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optim"].step()
    state["optim"].zero_grad()


def parts(width: int = 2048) -> dict[str, Any]:
    """A model of which an optimizer, that never stepped, makes three times as much."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters()), "n": 0}


def size_of(state: dict[str, Any]) -> int:
    """Bytes of the tensors of a state whose optimizer has stepped."""
    held = [value for own in state["optim"].state.values() for value in own.values()]
    return sum(tensor.nbytes for tensor in [*state["model"].parameters(), *held])


def test_the_first_save_after_the_first_step_faults_no_page_in(tmp_path: Path) -> None:
    state = parts()
    others = arenas()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        prepared, there = arenas(), taken(others)
        assert size_of(state) == 4 * (2 * 2048 * 2048 + 2 * 2048), "of the optimizer there is nothing yet"
        learn(state)
        assert there >= 2 * size_of(state), "both slots are there before the first save"
        for step in (1, 2):
            before = faults()
            save = checkpointer.save_now(step, state)
            # Of 24,588 pages, for each of both slots; what is left is the interpreter's own.
            assert faults() - before < size_of(state) // PAGE // 50, f"step {step}"
            assert save is not None and save.wait_durable()
            assert taken(others) == there, f"step {step}"
        assert arenas() == prepared, "no second arena was made"
    assert len(prepared - others) == 1


OPTIMIZERS: list[tuple[str, Callable[[Any], Any]]] = [
    ("sgd", lambda them: torch.optim.SGD(them)),
    ("momentum", lambda them: torch.optim.SGD(them, momentum=0.9)),
    ("adam", lambda them: torch.optim.Adam(them, lr=torch.tensor(0.1))),
    ("amsgrad", lambda them: torch.optim.AdamW(them, amsgrad=True, foreach=True)),
    ("fused", lambda them: torch.optim.AdamW(them, fused=True)),
    ("adagrad", lambda them: torch.optim.Adagrad(them)),
    ("adadelta", lambda them: torch.optim.Adadelta(them)),
    ("adamax", lambda them: torch.optim.Adamax(them)),
    ("nadam", lambda them: torch.optim.NAdam(them)),
    ("radam", lambda them: torch.optim.RAdam(them)),
    ("rmsprop", lambda them: torch.optim.RMSprop(them, momentum=0.9, centered=True)),
    ("rprop", lambda them: torch.optim.Rprop(them)),
    ("asgd", lambda them: torch.optim.ASGD(them)),
    ("groups", lambda them: torch.optim.AdamW([{"params": them[:1], "amsgrad": True}, {"params": them[1:]}])),
]


def tensors_of(optimizer: Any) -> tuple[int, int]:
    held = [value for own in optimizer.state.values() for value in own.values() if torch.is_tensor(value)]
    return len(held), sum(value.nbytes for value in held)


@pytest.mark.parametrize("name, make", OPTIMIZERS, ids=[name for name, _ in OPTIMIZERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_optimizer_will_have_is_known(name: str, make: Callable[[Any], Any], dtype: torch.dtype) -> None:
    shapes = [(30, 20), (7,), (30, 20), (), (0, 3)]
    own = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    frozen = torch.nn.Parameter(torch.zeros(99, dtype=dtype), requires_grad=False)
    optimizer = make([*own, frozen])
    # Adagrad has its state from the beginning.
    (had, had_bytes), (count, size) = tensors_of(optimizer), coming_state(optimizer)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made, made_bytes = tensors_of(optimizer)
    assert (count, size) == (made - had, made_bytes - had_bytes)
    assert coming_state(optimizer) == (0, 0), "what is there is counted as it is"


class Own(torch.optim.Optimizer):  # type: ignore[misc]
    """One that torch does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("it was stepped")


class Derived(torch.optim.AdamW):  # type: ignore[misc]
    """One of a user's, that is stepped by the user alone."""

    def step(self, closure: Any = None) -> None:
        raise AssertionError("it was stepped")


def test_of_others_what_is_known_is_counted() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1000))]
    assert coming_state(Own(parameters)) == (0, 0)
    assert coming_state(Derived(parameters)) == (3, 2 * 4000 + 4)
    # Neither can be stepped without a closure, or with dense gradients.
    assert coming_state(torch.optim.LBFGS(parameters)) == (0, 0)
    assert coming_state(torch.optim.SparseAdam(parameters)) == (0, 0)


def test_prepare_changes_nothing_and_calls_nobody(tmp_path: Path) -> None:
    state, calls = parts(64), []
    model, optimizer = state["model"], state["optim"]
    note = lambda *_: calls.append("hook")  # noqa: E731
    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    everybody = [register_optimizer_step_pre_hook(note), register_optimizer_step_post_hook(note)]
    state["sched"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    next(model.parameters()).grad = torch.ones(64, 64)

    def observed() -> Any:
        tensors = [(id(own), own._version, own.grad, id(own.grad)) for own in model.parameters()]
        groups = [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups]
        counts = (optimizer._step_count if hasattr(optimizer, "_step_count") else None, state["sched"].state_dict())
        return tensors, groups, dict(optimizer.state), counts, torch.get_rng_state().tolist(), sorted(vars(optimizer))

    before, values, saved = observed(), copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    try:
        with forebay.Checkpointer(tmp_path, every=5) as checkpointer:
            checkpointer.prepare(state)
            checkpointer.step(1, state)
    finally:
        for hook in everybody:
            hook.remove()
    after = observed()
    assert str(after) == str(before) and not optimizer.state and not calls
    assert optimizer.state_dict() == saved and saved["state"] == {}
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was prepared since."""
    asked: list[int] = []
    size_of = Sizer.size

    def size(self: Sizer) -> int:
        asked.append(size_of(self))
        return asked[-1]

    monkeypatch.setattr(Sizer, "size", size)
    return asked


@pytest.fixture(params=[{"every": 3}, {"every_minutes": 1e6}], ids=["every", "every_minutes"])
def scheduled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[forebay.Checkpointer]:
    with forebay.Checkpointer(tmp_path, **request.param) as checkpointer:
        yield checkpointer


def test_the_first_step_of_a_schedule_prepares_once(scheduled: forebay.Checkpointer, sizes: list[int]) -> None:
    state, others = parts(), arenas()
    # Nobody's first call says what there is to be saved.
    assert scheduled.step(0 if scheduled._schedule._every is None else 1, None) is None and not sizes
    for step in (1, 2):
        # One that skips its first steps (of a scaler, or that accumulates) has no state yet.
        assert scheduled.step(step, state) is None
        assert len(sizes) == 1
    prepared, there = arenas() - others, taken(others)
    learn(state)
    assert there >= 2 * size_of(state), "both slots are there before the first save"
    before = faults()
    save = scheduled.save_now(3, state) if scheduled._schedule._every is None else scheduled.step(3, state)
    assert faults() - before < size_of(state) // PAGE // 50
    assert save is not None and save.wait_durable() and taken(others) == there
    assert scheduled.step(4, state) is None and len(sizes) == 1
    assert arenas() - others == prepared and len(prepared) == 1, "memory is taken once"


def test_what_memory_is_taken_is_told_before_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: by `prepare`, or else by the first step of a schedule, or its first save. Nobody saw the logger, who did not ask."""
    caplog.set_level(logging.INFO, logger="forebay")
    state, others = parts(), arenas()
    with forebay.Checkpointer(tmp_path / "asked", rng=False) as checkpointer:
        size = checkpointer.prepare(state)
        # With the moments that are to come; what the kernel gave is whole pages, of which the largest have 2 MiB.
        assert 6 * sum(own.nbytes for own in state["model"].parameters()) <= size <= taken(others) <= size + 8 * MIB
        assert checkpointer.prepare(state) == size
        learn(state)
        checkpointer.save_now(1, state)
    with forebay.Checkpointer(tmp_path / "scheduled", every=5, rng=False) as checkpointer:
        state = parts()
        for step in (1, 2):
            checkpointer.step(step, state)
        learn(state)
        for step in (5, 10):
            checkpointer.step(step, state)
    with forebay.Checkpointer(tmp_path / "always", every=1, rng=False) as checkpointer:
        for step in (1, 2):
            checkpointer.step(step, state)
    # The last one's first call is a save, whose bytes are known.
    texts = [
        f"saves take {total / MIB:.1f} MiB of this host's memory, 2 snapshots of {total / MIB / 2:.1f} MiB"
        for total in (size, size, 2 * size_of(state))
    ]
    assert caplog.messages == texts
    assert capfd.readouterr().err == "".join(f"forebay: {text}\n" for text in texts)


def test_more_memory_is_told_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with forebay.Checkpointer(tmp_path, every=1, rng=False) as checkpointer:
        for step, size in enumerate((1000, 1000, 2000, 2020)):
            checkpointer.step(step, {"w": torch.zeros(size * 1024 // 4)})
    told = [line.split()[3:5] for line in capfd.readouterr().err.splitlines()]
    assert told == [["2.0", "MiB"], ["3.9", "MiB"]]


def test_one_rank_tells_of_memory_for_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank: int) -> int:
        with forebay.Checkpointer(tmp_path, every=2, rng=False) as checkpointer:
            checkpointer.step(1, {"w": torch.zeros(1 << 20)})
        return 0

    run_ranks(2, work)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("forebay: ")]
    assert told == [
        "forebay: rank 0 of 2: saves take 8.0 MiB of this host's memory, 2 snapshots of 4.0 MiB"
        "; each other rank takes as much for what it saves"
    ]


@pytest.mark.parametrize("stream", ["kept", "closed", "none"])
def test_where_warnings_are_errors_memory_is_told_all_the_same(tmp_path: Path, stream: str) -> None:
    """Nor does it end a training that has no standard error."""
    program = """
import os, sys, torch, forebay
if sys.argv[2] == "closed":
    sys.stderr.close()
elif sys.argv[2] == "none":
    sys.stderr = None
with forebay.Checkpointer(sys.argv[1], every=2, rng=False) as checkpointer:
    for step in range(1, 5):
        checkpointer.step(step, {"w": torch.zeros(1 << 18)})
print("done")
"""
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path), stream]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    told = ["forebay: saves take 2.0 MiB of this host's memory, 2 snapshots of 1.0 MiB"]
    assert ended.stderr.splitlines() == (told if stream == "kept" else [])


@pytest.mark.parametrize("first", ["prepare", "save_now", "due"])
def test_a_step_after_another_call_prepares_nothing(tmp_path: Path, sizes: list[int], first: str) -> None:
    state = parts(64)
    with forebay.Checkpointer(tmp_path, every=4) as checkpointer:
        if first == "prepare":
            checkpointer.prepare(state)
        else:
            save = checkpointer.save_now(1, state) if first == "save_now" else checkpointer.step(4, state)
            assert save is not None and save.wait_durable()
        sizes.clear()
        checkpointer.step(5, state)
        assert not sizes


def test_without_a_schedule_no_memory_is_taken(tmp_path: Path) -> None:
    state, others = parts(64), arenas()
    with forebay.Checkpointer(tmp_path, on_signal="SIGUSR1") as checkpointer:
        assert checkpointer.step(1, state) is None
        assert arenas() == others


def test_what_cannot_be_saved_is_told_by_the_first_step(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, every=500) as checkpointer:
        with pytest.raises(TypeError, match=r"state\['odd'\]: object of type object cannot be saved"):
            checkpointer.step(1, {"odd": object()})


def ddp_parts(kind: str) -> dict[str, Any]:
    """Under DDP, and compiled above or below that, as the kind tells."""
    below, _, above = kind.partition("ddp")
    model: Any = torch.nn.Linear(1024, 1024)
    for way in [*below.split(), "ddp", *above.split()]:
        model = DistributedDataParallel(model) if way == "ddp" else torch.compile(model)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters())}


def hybrid_parts() -> dict[str, Any]:
    """Parameters of which two of four ranks each have the same half."""
    model = torch.nn.Linear(1024, 1024)
    mesh = init_device_mesh("cpu", (2, 2))
    for name, own in list(model.named_parameters()):
        spread = distribute_tensor(own.detach(), mesh, [Replicate(), Shard(0)])
        model.register_parameter(name, torch.nn.Parameter(spread))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters())}


@pytest.mark.parametrize(
    "kind, world_size",
    [("ddp", 2), ("fsdp", 2), ("hybrid", 4), ("ddp compiled", 2), ("compiled ddp compiled", 2)],
)
def test_ranks_take_what_they_save(tmp_path: Path, sizes: list[int], kind: str, world_size: int) -> None:
    def work(rank: int) -> Any:
        makers: dict[str, Callable[[], Any]] = {"hybrid": hybrid_parts, "fsdp": lambda: fsdp_parts(1)}
        state = makers.get(kind, lambda: ddp_parts(kind))()
        with forebay.Checkpointer(tmp_path, every=2, rng=False) as checkpointer:
            checkpointer.step(1, state)
            prepared = arenas()
            learn(state)
            save = checkpointer.step(2, state)
            assert save is not None and save.wait_durable()
            assert arenas() == prepared, "no second arena was made"
            held = [value for own in state["optim"].state.values() for value in own.values()]
            whole = sum(value.nbytes for value in [*state["model"].parameters(), *held])
            is_spread = isinstance(next(state["model"].parameters()), DTensor)
            return sizes, save.timeline()["bytes"], whole, is_spread

    for asked, written, whole, is_spread in run_ranks(world_size, work):
        assert is_spread == ("ddp" not in kind)
        # Shares of what ranks have alike are cut between rows, and a header has 4 KiB and 512 bytes a tensor at most.
        assert len(asked) == 1 and 0.99 * written <= asked[0] <= 1.01 * written + (16 << 10)
        if kind != "fsdp":
            assert written < 1.1 * whole / world_size
