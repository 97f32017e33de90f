"""Saves and restores of a training on a CUDA device, beside what else moves the same bytes in the same process.

Started as `device.py [MIB] [FOLDER] [ROUNDS]`, by a Python that has torch and forebay: prints a line of JSON for each figure,
the median of the rounds and its ratio to the baseline. Where there is no device it says so and measures nothing.

The baseline of a save is a copy of the same tensors out of the device into memory that was locked before; that of a restore
is the way back.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import forebay

WIDTH, BATCH = 8192, 4096
"""Of the model: a step of a layer takes a few milliseconds of a large device."""
LOOP_STEPS = 60
"""Steps of the training loop that saves are measured beside."""


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` and all that it submits take."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


OUT, BACK = "cudaMemcpy into locked memory", "cudaMemcpy out of locked memory"
Pairs = list[tuple[float, float]]
"""Seconds of ours and of the baseline."""


def tell(name: str, pairs: Pairs, of: str) -> None:
    """Prints a figure: medians in seconds, and that of the ratios."""
    ratio = round(statistics.median(value / baseline for value, baseline in pairs), 3)
    value, baseline = (round(statistics.median(column), 4) for column in zip(*pairs))
    told = {"name": name, "s": value, "of": of, "baseline_s": baseline, "ratio": ratio}
    print(json.dumps(told), flush=True)


class Training:
    """A model and its optimizer, of some MiB together, all of it on the device."""

    def __init__(self, mib: int) -> None:
        # Weights in two bytes, and two moments of each.
        layers = max(1, (mib << 20) // (WIDTH * WIDTH * 2 * 3))
        torch.manual_seed(1)
        linear = [torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        self.model = torch.nn.Sequential(*linear)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.train()
        self.apply()

    def train(self) -> None:
        """Gradients of one step."""
        self.optimizer.zero_grad()
        self.model(self.batch).float().square().mean().backward()

    def apply(self) -> None:
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for own in self.optimizer.state.values() for value in own.values() if value.numel() > 1]
        return [parameter.detach() for parameter in self.model.parameters()] + moments


class Memcpy:
    """The limit: the same tensors copied into locked memory, and back."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._locked = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        self.out()

    def out(self) -> float:
        pairs = list(zip(self._locked, self._tensors))
        return timed(lambda: [target.copy_(source, non_blocking=True) for target, source in pairs])

    def back(self) -> float:
        pairs = list(zip(self._tensors, self._locked))
        return timed(lambda: [target.copy_(source, non_blocking=True) for target, source in pairs])


def saves(training: Training, memcpy: Memcpy, url: str, rounds: int) -> None:
    pairs: Pairs = []
    with forebay.Checkpointer(url, keep=1) as checkpointer:
        start = time.perf_counter()
        taken = checkpointer.prepare(training.state)
        told = {"name": "memory made and locked before the first save", "unit": "s", "bytes": taken}
        print(json.dumps({**told, "value": round(time.perf_counter() - start, 3)}), flush=True)
        for step in range(1, rounds + 2):
            training.train()
            training.apply()
            baseline = memcpy.out()
            begun = time.perf_counter()
            save = checkpointer.save_now(step, training.state)
            checkpointer.before_optimizer_step()
            pairs.append((time.perf_counter() - begun, baseline))
            assert save.wait_durable()
        tell("blocking time of the first save", pairs[:1], OUT)
        tell("blocking time of a save", pairs[1:], OUT)
        back: Pairs = []
        for _ in range(rounds):
            baseline = memcpy.back()
            back.append((timed(lambda: checkpointer.restore(training.state)), baseline))
            assert checkpointer.restored is not None and checkpointer.restored.tier == "arena"
        tell("back to the newest step, out of memory", back, BACK)


def loops(training: Training, memcpy: Memcpy, url: str, rounds: int) -> None:
    """A training loop alone, and with a save whenever the one before is durable."""
    step = 0
    waits: list[float] = []
    held: list[float] = []
    count: list[int] = []
    pairs: Pairs = []

    def alone() -> None:
        for _ in range(LOOP_STEPS):
            training.train()
            training.apply()

    def saving() -> None:
        nonlocal step
        save = None
        for _ in range(LOOP_STEPS):
            training.train()
            begun = time.perf_counter()
            checkpointer.before_optimizer_step()
            waits.append(time.perf_counter() - begun)
            training.apply()
            step += 1
            # Hears what was committed.
            if save is None or save.durable:
                begun = time.perf_counter()
                save = checkpointer.save_now(step, training.state)
                held.append(time.perf_counter() - begun)
                count[-1] += 1
            else:
                checkpointer.step(step, {})

    with forebay.Checkpointer(url, keep=1) as checkpointer:
        checkpointer.prepare(training.state)
        alone()
        for _ in range(rounds):
            count.append(0)
            pairs.append((timed(saving), timed(alone)))
            checkpointer.wait()
    tell(f"training loop of {LOOP_STEPS} steps beside saves", pairs, "without saves")
    step_s = statistics.median(seconds for _, seconds in pairs) / LOOP_STEPS
    told = {"saves": count, "step_s": round(step_s, 4), "save_now_s": round(statistics.median(held), 4)}
    print(json.dumps({"name": "of that", **told, "longest_wait_s": round(max(waits), 4)}), flush=True)


def restores(training: Training, memcpy: Memcpy, url: str, rounds: int) -> None:
    """In place, out of files that the page cache holds."""
    forebay.save(training.state, url)
    pairs = [(timed(lambda: forebay.load(url, training.state)), memcpy.back()) for _ in range(rounds)]
    tell("restore from files in memory, in place", pairs, BACK)


def restarts(mib: int, url: str, rounds: int) -> None:
    """A trainer that was killed is started again, and reads its memory."""
    pairs: Pairs = []
    for _ in range(rounds + 1):
        command = [sys.executable, __file__, str(mib), url, "restart"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == -9, done.stderr
        told = json.loads(done.stdout)
        if told["tier"] is not None:
            assert told["tier"] == "arena", told
            pairs.append((told["restart_s"], told["memcpy_s"]))
    tell("restart of a killed trainer, in place", pairs, BACK)


def restart(mib: int, url: str) -> None:
    """One life of such a trainer."""
    training = Training(mib)
    memcpy_s = Memcpy(training.tensors()).back()
    checkpointer = forebay.Checkpointer(url, keep=1, linger=100.0)
    restart_s = timed(lambda: checkpointer.restore(training.state))
    tier = None if checkpointer.restored is None else checkpointer.restored.tier
    save = checkpointer.save_now((checkpointer.latest() or 0) + 1, training.state)
    checkpointer.before_optimizer_step()
    assert save.wait_durable()
    print(json.dumps({"tier": tier, "restart_s": restart_s, "memcpy_s": memcpy_s}), flush=True)
    os.kill(os.getpid(), 9)


def others(training: Training, memcpy: Memcpy, folder: str, rounds: int) -> None:
    """What torch offers, until it returns."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    tensors = {str(number): tensor for number, tensor in enumerate(training.tensors())}
    stager = DefaultStager(StagingOptions(True, False, False, True))
    path = os.path.join(folder, "other")

    def async_save(**options: Any) -> float:
        pending: list[Any] = []
        seconds = timed(lambda: pending.append(dcp.async_save(tensors, checkpoint_id=path, no_dist=True, **options)))
        pending[0].result()
        shutil.rmtree(path)
        return seconds

    def torch_save() -> float:
        seconds = timed(lambda: torch.save(tensors, path))
        os.unlink(path)
        return seconds

    async_save(async_stager=stager)
    for name, save in (
        ("torch.save", torch_save),
        ("DCP async_save until it returns", async_save),
        ("DCP async_save, pinned, until it returns", lambda: async_save(async_stager=stager)),
    ):
        pairs = [(save(), memcpy.out()) for _ in range(rounds)]
        tell(name, pairs, OUT)


def main() -> None:
    if not torch.cuda.is_available():
        print("gpu: SKIPPED, this machine has none")
        return
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 8 << 10
    if sys.argv[3:] == ["restart"]:
        restart(mib, sys.argv[2])
        return
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    folder = tempfile.mkdtemp(prefix="forebay-bench-", dir=sys.argv[2] if len(sys.argv) > 2 else "/dev/shm")
    try:
        restarts(mib, f"file://{folder}/restarts", rounds)
        shutil.rmtree(f"{folder}/restarts")
        training = Training(mib)
        memcpy = Memcpy(training.tensors())
        size = sum(tensor.nbytes for tensor in training.tensors())
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bytes": size}), flush=True)
        for number, part in enumerate((saves, loops, restores)):
            part(training, memcpy, f"file://{folder}/{number}", rounds)
            shutil.rmtree(f"{folder}/{number}")
        others(training, memcpy, folder, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
