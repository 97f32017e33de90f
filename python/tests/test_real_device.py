"""A real CUDA device, where there is one: what the stand-in of `test_devices.py` cannot show."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forebay
import forebay.dcp
from forebay import _native
from forebay._leaf import SIZES
from forebay._saver import Saver

if not torch.cuda.is_available():
    pytest.skip("gpu: SKIPPED, this machine has none", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
LONG_CYCLES = 1_000_000_000
"""Of the device's clock: a good part of a second."""


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is, and its bytes."""
    # Torch takes some types of a byte apart as bytes alone.
    dense = tensor.detach() if tensor.element_size() > 1 else tensor.detach().view(torch.uint8)
    flat = dense.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, flat.cpu().numpy().tobytes()


def all_bits(state: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: bits(tensor) for name, tensor in state.items()}


def blank(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A tensor of the same layout, all zeros."""
    memory = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8, device=place)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of a training, by names."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, (_, own) in enumerate(optimizer.state.items()):
        found |= {f"optimizer.{number}.{name}": tensor for name, tensor in own.items()}
    return found


def training(width: int = 1024) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module of some megabytes and its optimizer."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Gradients of one step."""
    width = model[0].in_features
    loss: torch.Tensor = model(torch.randn(16, width, device=DEVICE)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    return loss


def test_tensors_of_every_element_type(tmp_path: Path) -> None:
    """Random bits of each; dense, strided, of one element and of none. Restored to the device, and to the host."""
    torch.manual_seed(1)
    types = {name: getattr(torch, name) for name in SIZES if isinstance(getattr(torch, name, None), torch.dtype)}
    saved: dict[str, torch.Tensor] = {}
    for name, dtype in types.items():
        width = SIZES[name]
        drawn = torch.randint(0, 2 if dtype == torch.bool else 256, (70 * 90 * width,), dtype=torch.uint8, device=DEVICE)
        dense = drawn.view(dtype).view(70, 90)
        saved |= {f"{name}.dense": dense, f"{name}.none": drawn[:0].clone().view(dtype)}
        saved |= {f"{name}.strided": dense.t(), f"{name}.one": drawn[:width].clone().view(dtype)[0]}
    assert len(types) > 15
    expected = all_bits(saved)
    forebay.save(saved, tmp_path)
    assert all_bits(forebay.load(tmp_path)) == expected
    for place in (DEVICE, torch.device("cpu")):
        live = {name: blank(tensor, place) for name, tensor in saved.items()}
        kept = {name: (tensor.device, tensor.stride(), tensor.data_ptr()) for name, tensor in live.items()}
        forebay.load(tmp_path, live)
        assert all_bits(live) == expected, place
        assert {name: (tensor.device, tensor.stride(), tensor.data_ptr()) for name, tensor in live.items()} == kept


def test_a_restore_into_tensors_of_a_real_device(tmp_path: Path) -> None:
    """Dense, strided and of two bytes an element; more than the buffer has, and less."""
    def made(fill: Any) -> dict[str, torch.Tensor]:
        return {
            "dense": fill(11 << 20).view(11, -1),
            "strided": fill(1 << 20).view(1 << 12, -1).t(),
            "last": fill(1 << 18).view(4, 64, 32, 32).to(memory_format=torch.channels_last),
            "half": fill(1 << 20).to(torch.bfloat16),
            "scalar": fill(1)[0],
        }

    saved = made(lambda count: torch.arange(count, dtype=torch.float32, device="cuda"))
    live = made(lambda count: torch.zeros(count, dtype=torch.float32, device="cuda"))
    kept = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in live.items()}
    forebay.save(saved, tmp_path)
    forebay.load(tmp_path, live)
    for name, tensor in saved.items():
        assert torch.equal(live[name], tensor), name
        assert (live[name].data_ptr(), live[name].stride()) == kept[name], name


def test_a_save_takes_no_memory_of_the_device(tmp_path: Path) -> None:
    """Nor does a restore in place: who trains has none to spare. Strided tensors take 16 MiB, however large they are."""
    for strided, most in ((torch.ones(8, device=DEVICE), 0), (torch.ones(4096, 3072, device=DEVICE).t(), 16 << 20)):
        model, optimizer = training()
        state = {"model": model, "optimizer": optimizer, "other": strided}
        with forebay.Checkpointer(tmp_path / str(most), every=1) as checkpointer:
            train(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for step in (1, 2):
                save = checkpointer.step(step, state)
                checkpointer.before_optimizer_step()
                assert save is not None and save.wait_durable(60)
            assert checkpointer.restore(state) == 2
        forebay.load(tmp_path / str(most), state)
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() <= before + most


def test_snapshots_are_of_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both slots, where the device writes without a copy between; torch asks the driver for it."""
    found: dict[int, bool] = {}

    def copy(self: Saver, step: int, snapshot: Any, *rest: Any, plain: Any = Saver._copy) -> Any:
        address, size = snapshot.place(0)
        memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
        found[step] = memory.is_pinned()
        return plain(self, step, snapshot, *rest)

    monkeypatch.setattr(Saver, "_copy", copy)
    with forebay.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save_now(step, {"t": torch.ones(1 << 20, device=DEVICE)}).wait_durable(60)
    assert found == {1: True, 2: True, 3: True}


def test_parameters_are_copied_while_the_device_is_busy(tmp_path: Path) -> None:
    """`step` returns while all that was submitted is still to be done; the optimizer waits for the copy of what is there
    then, and of nothing later."""
    model, optimizer = training()
    state, expected = {"model": model, "optimizer": optimizer}, {}
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        for step in range(1, 5):
            train(model, optimizer)
            checkpointer.before_optimizer_step()
            optimizer.step()
            done = torch.cuda.Event()
            torch.cuda._sleep(LONG_CYCLES)
            # What is submitted before the save is of the step: all weights twice as large.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
            done.record()
            save = checkpointer.step(step, state)
            # The device has not come so far: nothing waited for it, but in the first save, which makes the memory.
            assert save is not None and (step == 1 or not (done.query() or save.staged)), step
            loss = train(model, optimizer)
            checkpointer.before_optimizer_step()
            assert save.staged and done.query() and bool(loss.isfinite())
            expected[step] = all_bits(tensors_of(model, optimizer))
            assert save.wait_durable(60)
    for step, bytes_of in expected.items():
        other, its = training()
        forebay.load(tmp_path, {"model": other, "optimizer": its}, step=step)
        assert all_bits(tensors_of(other, its)) == bytes_of, step


def test_a_save_is_of_the_stream_that_it_is_asked_on(tmp_path: Path) -> None:
    """What this thread submitted to its own stream is in it, and a busy other stream is not waited for."""
    tensor, other = torch.zeros(1 << 20, device=DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save_now(1, {"t": tensor}).wait_durable(60)
        done = torch.cuda.Event()
        torch.cuda._sleep(LONG_CYCLES)
        done.record()
        with torch.cuda.stream(other):
            tensor.fill_(7)
            save = checkpointer.save_now(2, {"t": tensor})
        assert save.staged and not done.query()
        assert save.wait_durable(60)
    assert forebay.load(tmp_path, step=2)["t"].unique().tolist() == [7.0]


PROGRAM = """
import json, os, signal, sys
import torch, forebay

url, last, killed_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.use_deterministic_algorithms(True)
torch.manual_seed(3)
layers = [torch.nn.Linear(256, 512), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 256)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
state = {"model": model, "optimizer": optimizer}
with forebay.Checkpointer(url, every=1, linger=100.0) as checkpointer:
    start = checkpointer.restore(state) or 0
    tier = checkpointer.restored and checkpointer.restored.tier
    for step in range(start + 1, last + 1):
        loss = model(torch.randn(32, 256, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        checkpointer.before_optimizer_step()
        optimizer.step()
        print(json.dumps({"step": step, "loss": loss.item(), "tier": tier}), flush=True)
        save = checkpointer.step(step, state)
        if step == killed_at:
            checkpointer.before_optimizer_step()
            assert save.wait_sealed(60)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run(url: Path, last: int, killed_at: int = 0) -> list[dict[str, Any]]:
    """What a training told of its steps."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(url), str(last), str(killed_at)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (-9 if killed_at else 0), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_killed_training_goes_on_out_of_memory(tmp_path: Path) -> None:
    """Dropout and all: its losses are those of a training that nobody killed."""
    whole = run(tmp_path / "whole", 12)
    parts = run(tmp_path / "run", 12, killed_at=4) + run(tmp_path / "run", 12, killed_at=9) + run(tmp_path / "run", 12)
    assert [told["tier"] for told in parts] == [None] * 4 + ["arena"] * 8
    assert [(told["step"], told["loss"]) for told in parts] == [(told["step"], told["loss"]) for told in whole]
    assert len({told["loss"] for told in whole}) == 12
    assert _native.verify(f"file://{tmp_path / 'run'}", None) == []


@pytest.fixture
def nccl(tmp_path: Path) -> Any:
    """A job of one rank, which speaks through nccl."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


def modules() -> dict[str, Any]:
    """FSDP2 and DDP, on the device."""
    made: dict[str, Any] = {}
    for kind in ("fsdp", "ddp"):
        torch.manual_seed(len(made))
        model: Any = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 8))
        model = model.to(DEVICE)
        if kind == "fsdp":
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        made |= {kind: model, f"{kind}_optim": torch.optim.AdamW(model.parameters(), lr=0.01)}
    return made


def step_of(state: dict[str, Any]) -> list[float]:
    losses = []
    for kind in ("fsdp", "ddp"):
        loss = state[kind](torch.randn(16, 64, device=DEVICE)).square().mean()
        state[f"{kind}_optim"].zero_grad()
        loss.backward()
        losses.append(loss.item())
    return losses


def apply(state: dict[str, Any]) -> None:
    for kind in ("fsdp", "ddp"):
        state[f"{kind}_optim"].step()


def test_modules_of_a_job_that_speaks_through_nccl(tmp_path: Path, nccl: None) -> None:
    """Losses after a restore are those that came without it, tensors of several ranks are the device's."""
    state, losses = modules(), {}
    with forebay.Checkpointer(tmp_path / "run", every=1) as checkpointer:
        for step in range(1, 7):
            losses[step] = step_of(state)
            checkpointer.before_optimizer_step()
            apply(state)
            checkpointer.step(step, state)
    for first in (2, 5):
        state = modules()
        with forebay.Checkpointer(tmp_path / "run") as checkpointer:
            assert checkpointer.restore(state, step=first) == first
        again = {}
        for step in range(first + 1, 7):
            again[step] = step_of(state)
            apply(state)
        assert again == {step: losses[step] for step in again}


@pytest.mark.parametrize("is_staged", [False, True])
def test_torch_saves_tensors_of_the_device_through_us(tmp_path: Path, nccl: None, is_staged: bool) -> None:
    """`dcp.save`, and `dcp.async_save` staged into the memory that is uploaded, while the tensors change."""
    state = modules()
    step_of(state)
    apply(state)
    model, place = state["fsdp"], tmp_path / "run"
    tensors = model.state_dict()
    expected = {name: bits(getattr(tensor, "_local_tensor", tensor)) for name, tensor in tensors.items()}
    with forebay.dcp.Writer(place) as writer:
        if is_staged:
            stager, gloo = forebay.dcp.Stager(writer), dist.new_group(backend="gloo")
            pending = dcp.async_save(
                tensors, checkpoint_id=3, storage_writer=writer, async_stager=stager, process_group=gloo
            )
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.mul_(3)
            pending.result()
        else:
            dcp.save(tensors, checkpoint_id=3, storage_writer=writer)
    other = modules()["fsdp"]
    live = other.state_dict()
    dcp.load(live, checkpoint_id=3, storage_reader=forebay.dcp.Reader(place))
    assert {name: bits(getattr(tensor, "_local_tensor", tensor)) for name, tensor in live.items()} == expected
    assert all(tensor.device == DEVICE for tensor in live.values())
    loaded = forebay.load(place)
    assert {name: bits(tensor) for name, tensor in loaded.items()} == expected
