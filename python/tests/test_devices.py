"""Device memory, copied by the engine through a stand-in for the CUDA driver. A real one: `test_real_device.py`.

The stand-in (io/src/device/fake_driver.c) takes host memory for a device's, and does what is submitted only when
somebody waits for it. So these tests show the order of calls and the bytes, and nothing of speed.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import forebay

FAKE = Path(__file__).resolve().parents[2] / "io/src/device/fake_driver.c"

IMPORTS = """
import ctypes, json, os, signal, sys, warnings
import torch, forebay
import forebay._flatten, forebay._devices
from forebay import _leaf
"""

PRELUDE = """
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
"""
"""What each program begins with; `fake` is the stand-in, None where there is none."""

SERVER = """
import gc
import torch._dynamo  # As an optimizer does when it is made.

gc.freeze()

for line in sys.stdin:
    program, url, told, said = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(told, os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
        signal.alarm(120)
        exec(program)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs programs, each in a process of its own that goes on from here: torch takes seconds to import."""


class Driver:
    """Runs programs that find the stand-in for their driver."""

    def __init__(self, folder: Path) -> None:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", FAKE], check=True)
        self._folder = folder
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        command = [sys.executable, "-c", IMPORTS + SERVER]
        self._server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, url: Path, program: str) -> str:
        """What a program prints."""
        told, said = self._folder / "told", self._folder / "said"
        for output in (told, said):
            output.unlink(missing_ok=True)
        whole = PRELUDE + textwrap.dedent(program)
        requests, answers = self._server.stdin, self._server.stdout
        assert requests and answers
        requests.write(json.dumps([whole, str(url), str(told), str(said)]) + "\n")
        requests.flush()
        code = answers.readline().strip()
        assert code == "0", f"{code}: {said.read_text()}"
        return told.read_text()

    def close(self) -> None:
        """Ends the server."""
        self._server.kill()
        self._server.communicate()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("driver"))
    yield driver
    driver.close()


def test_a_snapshot_holds_what_was_submitted_before_it(driver: Driver, tmp_path: Path) -> None:
    driver.run(
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


def test_parameters_are_copied_behind_the_training(driver: Driver, tmp_path: Path) -> None:
    driver.run(
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
                assert save.staged and calls.count("copy") == 3 and "arrive" in calls, calls
                # Else the next hold would hold this one's end up, and the next step with it.
                while "settle" not in calls:
                    calls += [line.split()[0] for line in log()]
        """,
    )
    for step in (1, 2, 3):
        model = torch.nn.Linear(100, 50)
        forebay.Checkpointer(tmp_path).load_model(model, step=step)
        for name, tensor in torch.load(tmp_path.parent / f"{step}.pt").items():
            assert torch.equal(model.state_dict()[name], tensor), (step, name)


BEHIND = """
import json
import threading
from forebay import _save

model = torch.nn.Linear(100, 50)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}

def train():
    model(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

# The checksums of what the device copied take until they may end.
may_end = threading.Event()
plain = forebay.Checkpointer._seal_behind

def seal_behind(self, staging):
    assert may_end.wait(20)
    plain(self, staging)

_save.Staging.is_copied = property(lambda self: False)
forebay.Checkpointer._seal_behind = seal_behind
"""
"""How tests go on that look at what happens behind the training."""


def test_the_training_goes_on_once_the_device_has_copied(driver: Driver, tmp_path: Path) -> None:
    """It waited for the checksums, too. What changes after that is not in the step."""
    driver.run(
        tmp_path,
        BEHIND
        + """
train()
with forebay.Checkpointer(url, every=2, rng=False) as checkpointer:
    checkpointer.before_optimizer_step()
    torch.save(model.state_dict(), f"{url}/../2.pt")
    save = checkpointer.step(2, state)
    checkpointer.before_optimizer_step()
    assert save.staged and not save.sealed and save.timeline()["staged_s"] is not None, save
    train()
    # Neither a step that saves nothing waits for it, nor the change after that.
    assert checkpointer.step(3, state) is None
    checkpointer.before_optimizer_step()
    train()
    assert save.staged and not save.sealed
    may_end.set()
    # Nobody calls: a thread seals it.
    while not save.sealed:
        checkpointer._session.take_replies(0.1)
    second = checkpointer.step(4, state)
    assert save.wait_durable() and second.wait_durable()
""",
    )
    model = torch.nn.Linear(100, 50)
    forebay.Checkpointer(tmp_path).load_model(model, step=2)
    for name, tensor in torch.load(tmp_path.parent / "2.pt").items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert forebay.Checkpointer(tmp_path).steps() == [2, 4]


def test_a_process_that_ends_seals_what_the_device_has_copied(driver: Driver, tmp_path: Path) -> None:
    """Whoever closed it or not."""
    told = driver.run(
        tmp_path,
        BEHIND
        + """
train()
checkpointer = forebay.Checkpointer(url, every=1, linger=100)
checkpointer.before_optimizer_step()
checkpointer.step(1, state).wait_durable()
save = checkpointer.step(2, state)
checkpointer.before_optimizer_step()
print(json.dumps([parameter.sum().item() for parameter in model.parameters()]))
train()
threading.Timer(0.3, may_end.set).start()
""",
    )
    model = torch.nn.Linear(100, 50)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 2
    assert json.loads(told) == [parameter.sum().item() for parameter in model.parameters()]


def test_what_fails_behind_the_training_is_told_by_the_next_step(driver: Driver, tmp_path: Path) -> None:
    """As what the agent tells is; and it costs no slot."""
    told = driver.run(
        tmp_path,
        BEHIND
        + """
class Refusing:
    "A session that seals nothing while it is told so."
    is_refusing = True

    def __init__(self, session):
        self.session = session

    def seal(self, *given):
        if self.is_refusing:
            raise forebay.CheckpointError("no seal today")
        return self.session.seal(*given)

    def __getattr__(self, name):
        return getattr(self.session, name)

may_end.set()
train()
with forebay.Checkpointer(url, every=2) as checkpointer:
    checkpointer.before_optimizer_step()
    checkpointer._session = Refusing(checkpointer._session)
    for step in (2, 4, 6):
        save = checkpointer.step(step, state)
        checkpointer.before_optimizer_step()
        assert save.staged
        train()
        while checkpointer._staging is not None:
            pass
        try:
            checkpointer.step(step + 1, state)
        except forebay.CheckpointError as error:
            print(step, error)
    Refusing.is_refusing = False
    assert checkpointer.step(8, state).wait_durable()
""",
    )
    assert told.splitlines() == [f"{step} no seal today" for step in (2, 4, 6)]
    assert forebay.Checkpointer(tmp_path).steps() == [8]


def test_a_change_before_the_device_has_copied_is_told(driver: Driver, tmp_path: Path) -> None:
    told = driver.run(
        tmp_path,
        BEHIND
        + """
train()
with forebay.Checkpointer(url, every=1) as checkpointer:
    checkpointer.before_optimizer_step()
    checkpointer.step(1, state)
    with torch.no_grad():
        model.weight.add_(1)
    try:
        checkpointer.before_optimizer_step()
    except forebay.CheckpointMutated as error:
        print(error)
    may_end.set()
    assert checkpointer.step(2, state).wait_durable()
""",
    )
    assert told.startswith("step 1 was not saved: state['model'].weight changed while it was copied")
    assert forebay.Checkpointer(tmp_path).steps() == [2]


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemcpyDtoHAsync", "cuEventSynchronize", "cuEventRecord"])
def test_what_the_driver_refuses_is_told(driver: Driver, tmp_path: Path, call: str) -> None:
    driver.run(
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


def test_a_copy_behind_the_training_that_fails_costs_no_slot(driver: Driver, tmp_path: Path) -> None:
    """The slot was lost with the copy, and a later save waited for ever."""
    told = driver.run(
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
    program = PRELUDE + textwrap.dedent(
        """
        url = sys.argv[1]
        assert fake is None, "a driver was found"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forebay.save({"w": torch.ones(2000)}, url)
        told = [str(warning.message) for warning in caught if warning.category is forebay.CheckpointWarning]
        assert len(told) == 1 and "torch has to copy them: no CUDA driver is at hand" in told[0], told
        """
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", IMPORTS + program, str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
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
