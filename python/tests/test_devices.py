"""Device memory, copied by the engine through a stand-in for the CUDA driver. A real one: `test_real_device.py`.

The stand-in (io/src/device/fake_driver.c) takes host memory for a device's, and does what is submitted only when
somebody waits for it. So these tests show the order of calls and the bytes, and nothing of speed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import forebay

FAKE = Path(__file__).resolve().parents[2] / "io/src/device/fake_driver.c"

PRELUDE = """
import ctypes, os, sys, warnings
import torch, forebay
from forebay import _leaf

# Tensors of 4 KiB and more stand for those of a device; the stand-in's memory is the host's.
warnings.simplefilter("error", forebay.CheckpointWarning)

def stand_in(tensor):
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= 4096

def tensor_leaf(name, path, tensor, dtype, plain=_leaf.tensor_leaf):
    leaf = plain(name, path, tensor, dtype)
    if leaf.address is not None and stand_in(tensor):
        leaf.address, leaf.device_address = None, leaf.address
    return leaf

class Stream:
    cuda_stream = 0

import forebay._flatten, forebay._devices
forebay._flatten.tensor_leaf = tensor_leaf
forebay._devices.ordinal_of = lambda leaf: 0
torch.cuda.current_stream = lambda ordinal: Stream
try:
    fake = ctypes.CDLL("libcuda.so.1")
except OSError:
    fake = None

def log():
    text = ctypes.create_string_buffer(1 << 16)
    length = fake.fake_take_log(text, ctypes.c_size_t(1 << 16))
    return text.raw[:length].decode().splitlines()

def fill(tensor, value):
    "What the trainer submits: done once somebody waits for it."
    fake.fake_fill(None, ctypes.c_void_p(tensor.data_ptr()), value, ctypes.c_size_t(tensor.numel() * tensor.element_size()))

url = sys.argv[1]
"""
"""What each program begins with; `fake` is the stand-in, None where there is none."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in."""
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", FAKE], check=True)
    return folder


def run(driver: Path, url: Path, program: str) -> str:
    """What a program prints that finds the stand-in for its driver."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(url)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_snapshot_holds_what_was_submitted_before_it(driver: Path, tmp_path: Path) -> None:
    run(
        driver,
        tmp_path,
        """
        state = {"big": torch.zeros(5000), "odd": torch.zeros(70, 70).t(), "small": torch.zeros(3)}
        with forebay.Checkpointer(url, rng=False) as checkpointer:
            fill(state["big"], 1)
            save = checkpointer.save_now(1, state)
            fill(state["big"], 2)
            assert save.wait_durable()
            calls = log()
            # Locked before the copy; the copy behind what was submitted; waited for before the end.
            order = [line.split()[0] for line in calls]
            assert order == ["register", "record", "wait", "copy", "record", "arrive", "settle"], calls
            assert calls[3] == "copy 20000", calls
            checkpointer.save_now(2, state).wait_durable()
            assert [line.split()[0] for line in log()][:1] == ["register"], "the other slot"
            checkpointer.save_now(3, state).wait_durable()
            assert "register" not in " ".join(log()), "once a slot"
        """,
    )
    ones = int.from_bytes(b"\x01" * 4, "little")
    for step, value in ((1, ones), (2, 2 * ones), (3, 2 * ones)):
        loaded = forebay.load(tmp_path, step=step)
        assert loaded["big"].view(torch.int32).unique().tolist() == [value], step
        assert loaded["odd"].shape == (70, 70) and loaded["small"].tolist() == [0, 0, 0]


def test_parameters_are_copied_behind_the_training(driver: Path, tmp_path: Path) -> None:
    run(
        driver,
        tmp_path,
        """
        import threading

        torch.manual_seed(1)
        model = torch.nn.Linear(100, 50)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        with forebay.Checkpointer(url, every=1, rng=False) as checkpointer:
            for step in range(1, 4):
                model(torch.ones(2, 100)).sum().backward()
                checkpointer.before_optimizer_step()
                optimizer.step()
                optimizer.zero_grad()
                torch.save(model.state_dict(), f"{url}/../{step}.pt")
                log()
                # Nobody's wait ends before it may. One that `step` makes is let go in the end, and told.
                fake.fake_hold(1)
                rescue = threading.Timer(20, fake.fake_hold, [0])
                rescue.start()
                save = checkpointer.step(step, state)
                early = [line.split()[0] for line in log()]
                assert not save.staged and early.count("record") >= 1 and not {"arrive", "settle"} & {*early}, early
                rescue.cancel()
                fake.fake_hold(0)
                checkpointer.before_optimizer_step()
                # The weight and both its moments: all that stands for a device's.
                calls = early + [line.split()[0] for line in log()]
                assert save.staged and calls.count("copy") == 3 and calls[-1] == "settle", calls
        """,
    )
    for step in (1, 2, 3):
        model = torch.nn.Linear(100, 50)
        forebay.Checkpointer(tmp_path).load_model(model, step=step)
        for name, tensor in torch.load(tmp_path.parent / f"{step}.pt").items():
            assert torch.equal(model.state_dict()[name], tensor), (step, name)


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemcpyDtoHAsync", "cuEventSynchronize", "cuEventRecord"])
def test_what_the_driver_refuses_is_told(driver: Path, tmp_path: Path, call: str) -> None:
    run(
        driver,
        tmp_path,
        f"""
        warnings.simplefilter("default")
        state = {{"big": torch.ones(5000)}}
        with forebay.Checkpointer(url) as checkpointer:
            fake.fake_fail({call.encode()!r}, 999)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    checkpointer.save_now(1, state).wait_durable()
                    told = " ".join(str(warning.message) for warning in caught)
                    assert {call!r} == "cuMemHostRegister", "only what can go on without"
                except forebay.CheckpointError as error:
                    told = str(error)
            assert {call!r} + " failed" in told and "(999)" in told, told
            checkpointer.save_now(2, state).wait_durable()
        """,
    )
    assert forebay.load(tmp_path, step=2)["big"].tolist() == [1.0] * 5000


def test_a_copy_behind_the_training_that_fails_costs_no_slot(driver: Path, tmp_path: Path) -> None:
    """The slot was lost with the copy, and a later save waited for ever."""
    told = run(
        driver,
        tmp_path,
        """
        from forebay import _saver
        warnings.simplefilter("default")
        plain, failing = _saver.check_unchanged, {2, 3}

        def check_unchanged(step, leaves):
            # Between what is copied before a save returns and what is copied behind the training.
            if step in failing:
                failing.remove(step)
                fake.fake_fail(b"cuEventSynchronize", 999)
            plain(step, leaves)

        _saver.check_unchanged = check_unchanged
        model = torch.nn.Linear(100, 50)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        with forebay.Checkpointer(url, every=1) as checkpointer:
            for step in range(1, 5):
                model(torch.ones(2, 100)).sum().backward()
                try:
                    checkpointer.before_optimizer_step()
                except forebay.CheckpointError as error:
                    print(step - 1, error)
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step(step, state)
            checkpointer.save_now(9, state).wait_durable()
        """,
    )
    failed = "cuEventSynchronize failed: CUDA_ERROR_UNKNOWN (999)"
    assert told.splitlines() == [f"2 {failed}", f"3 {failed}"]
    assert {number for number in (1, 4, 9) if forebay.load(tmp_path, step=number)} == {1, 4, 9}


def test_a_missing_driver_leaves_the_copying_to_torch(tmp_path: Path) -> None:
    """What the loader finds first under the driver's name is none, on a host that has one as well."""
    folder, place = tmp_path / "driver", tmp_path / "run"
    folder.mkdir()
    (folder / "libcuda.so.1").write_bytes(b"no library")
    run(
        folder,
        place,
        """
        assert fake is None, "a driver was found"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forebay.save({"w": torch.ones(2000)}, url)
        told = [str(warning.message) for warning in caught if warning.category is forebay.CheckpointWarning]
        assert len(told) == 1 and "torch has to copy them: no CUDA driver is at hand" in told[0], told
        """,
    )
    assert forebay.load(place)["w"].tolist() == [1.0] * 2000


def test_a_restore_to_a_device_goes_through_one_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is at hand: tensors of 4 KiB and more stand for those of one. A piece is read and checked, copied, and
    its memory read into again."""
    from forebay import _pieces, _tensors

    buffers: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []

    def memory(size: int, is_locked: bool, plain: Any = _pieces._memory) -> Any:
        assert is_locked, "the device copies out of it"
        made = plain(size, False)
        buffers.append((ctypes.addressof(made[0]), size))
        return made

    def copy_elements(place: Any, source: Any, plain: Any = _pieces.copy_elements) -> None:
        copies.append((source.data_ptr(), source.nbytes))
        plain(place, source)

    def take_span(self: Any, kind: str, place: Any, plain: Any = _tensors.Tensors._take_span) -> Any:
        return None if kind == "tensor" and place.nbytes >= 4096 else plain(self, kind, place)

    monkeypatch.setattr(_pieces, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(_pieces, "_memory", memory)
    monkeypatch.setattr(_pieces, "_is_devices", lambda aside: True)
    monkeypatch.setattr(_pieces, "copy_elements", copy_elements)
    monkeypatch.setattr(_tensors.Tensors, "_take_span", take_span)

    def state_of(value: int) -> dict[str, Any]:
        torch.manual_seed(value)
        return {
            "long": torch.randn(700_001),
            "turned": torch.randn(3, 701, 211, dtype=torch.float64).permute(2, 0, 1),
            "bytes": torch.randint(0, 100, (5003,), dtype=torch.int8),
            "half": torch.randn(71, 73).bfloat16()[:, ::2],
            "complex": torch.randn(50, 60, dtype=torch.complex128).t(),
            "near": torch.randn(3),
        }

    saved, live = state_of(1), state_of(2)
    forebay.save(saved, tmp_path)
    forebay.load(tmp_path, live)
    for name, tensor in saved.items():
        assert torch.equal(live[name], tensor), name
    ((address, size),) = buffers
    assert size == 1 << 20
    assert all(address <= start and start + length <= address + size for start, length in copies)
    far = sum(tensor.nbytes for name, tensor in saved.items() if name != "near")
    assert sum(length for _, length in copies) == far and far > 6 * size
    # Once for each time that a half was filled.
    halves = (address, address + size // 2)
    assert sum(start in halves for start, _ in copies) == -(-far // (size // 2))


def test_memory_that_cannot_be_locked_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device reads from any memory: no restore fails for it."""
    from forebay import _pieces

    def empty(*shape: Any, plain: Any = torch.empty, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        made: torch.Tensor = plain(*shape, **options)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(_pieces, "_is_devices", lambda aside: True)
    state = {"near": torch.arange(10), "far": torch.arange(3000).view(50, 60).t()}
    forebay.save(state, tmp_path)
    live = {"near": torch.zeros(10, dtype=torch.int64), "far": torch.zeros(50, 60, dtype=torch.int64).t()}
    forebay.load(tmp_path, live)
    assert torch.equal(live["near"], state["near"]) and torch.equal(live["far"], state["far"])


def test_a_matrix_is_filled_as_an_array(tmp_path: Path) -> None:
    """A row of a matrix is a matrix; a half of the buffer ends within one."""
    saved = numpy.arange(3 << 18).reshape(3, -1)
    live = numpy.asmatrix(numpy.zeros((1 << 18, 3), dtype=saved.dtype)).T
    forebay.save({"m": saved}, tmp_path)
    forebay.load(tmp_path, {"m": live})
    assert type(live) is numpy.matrix and (live == saved).all()


def test_nothing_is_read_before_there_is_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay import _pieces

    def none(size: int, is_locked: bool) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(_pieces, "_memory", none)
    forebay.save({"near": torch.ones(10), "far": torch.ones(50, 60).t()}, tmp_path)
    live = {"near": torch.zeros(10), "far": torch.zeros(50, 60).t()}
    with pytest.raises(MemoryError):
        forebay.load(tmp_path, live)
    assert not live["near"].any() and not live["far"].any()
