"""The training side of the checkpoint scenario.

Holds a state of many tensors, and answers each line of stdin with one line of JSON on stdout:

    save     {"memcpy_s", "blocking_s", "local_s", "durable_s", "bytes"}: a warm memcpy of the same bytes by the same
             number of threads, the time that a save holds the training up, and the times until it is on the local disk
             (0 without) and committed; all of the state has changed since the last one
    restart  {"memcpy_s", "restart_s", "bytes"}: the first line to a process that takes the place of a killed one; the
             state comes out of the memory of that one
    back     {"memcpy_s", "back_s", "bytes"}: back to the newest step, out of this process's own memory
    train    {"alone_s", "saving_s", "flush_cpu_s", "saves"}: a training loop that computes on all processors, without saves,
             and with one saved as soon as the one before is committed; the agent's processor time in the second loop
    memory   {"extra_bytes"}: the most memory of this process and its agent beyond the state and the snapshots, more than
             before, while a step is saved, until it is durable, and brought back
    restore  {"memcpy_s", "restore_s", "read_bytes", "bytes"}: into the existing tensors, and what was read for it
    disk     {"write_s", "bytes"}: the same bytes written to a plain file and synced, by the same number of threads; as many
             files stay as steps do
    read     {"read_s", "bytes"}: the newest of these files read back into the memory that the bytes came from
    forget   {}: the page cache holds none of these files any more, and none of the steps in a folder
    others   {"torch_save_s", "safetensors_s", "dcp_save_s", "dcp_async_s", "dcp_tuned_s", "bytes"}: the same state on the
             same disk by other programs, not synced; of the last two the time until it returns, as it comes and with what
             torch offers for it: memory that stays between saves, and a file for each of as many threads
    end      waits for everything and ends

Started by the benchmark as `checkpoint.py URL MIB FOLDER [LOCAL]`; the store is in the environment.
"""

import ctypes
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Optional

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import forebay

TENSORS = 333
"""As many as in the model that the design was measured with."""
LAYERS, WIDTH, BATCH = 3, 2048, 512
"""Of the model of `train`: a step takes some 100 ms on two cores."""
LOOP_S = 8.0
"""How long a loop of `train` is to take."""
KEPT = 2
"""Steps that stay."""
PIECE = 16 << 20
"""Longest copy of one thread at a time, so that threads share one large tensor."""


def make_state(mib: int) -> dict[str, torch.Tensor]:
    """Tensors of uneven sizes, with bytes that no compression shrinks."""
    weights = [1 + index % 7 for index in range(TENSORS)]
    unit = (mib << 20) // sum(weights) // 4
    words = torch.randint(-(2**31), 2**31 - 1, (max(weights) * unit,), dtype=torch.int32)
    return {f"layer{index}.weight": words[: weight * unit].clone().view(torch.float32) for index, weight in enumerate(weights)}


class Memcpy:
    """The limit: the same bytes copied into memory that was touched before."""

    def __init__(self, tensors: list[torch.Tensor], threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._targets = [torch.zeros_like(tensor) for tensor in tensors]
        pieces = []
        for target, tensor in zip(self._targets, tensors):
            size = tensor.numel() * tensor.element_size()
            for start in range(0, size, PIECE):
                pieces.append((target.data_ptr() + start, tensor.data_ptr() + start, min(PIECE, size - start)))
        self._shares = [pieces[index::threads] for index in range(threads)]
        self.seconds()

    def seconds(self) -> float:
        start = time.perf_counter()
        list(self._pool.map(_copy, self._shares))
        return time.perf_counter() - start

    def write(self, path: str) -> float:
        """Writes the bytes to a file, one after another, and syncs it."""
        start = time.perf_counter()
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        places = self._places()
        list(self._pool.map(lambda share: _each(os.pwrite, fd, places, share), self._shares))
        os.fsync(fd)
        os.close(fd)
        return time.perf_counter() - start

    def read(self, path: str) -> float:
        """Reads them back."""
        start = time.perf_counter()
        fd = os.open(path, os.O_RDONLY)
        places = self._places()
        list(self._pool.map(lambda share: _each(_pread, fd, places, share), self._shares))
        os.close(fd)
        return time.perf_counter() - start

    def _places(self) -> dict[int, int]:
        """Where in the file each piece is."""
        places, at = {}, 0
        for share in self._shares:
            for _, source, size in share:
                places[source] = at
                at += size
        return places


def _copy(pieces: list[tuple[int, int, int]]) -> None:
    for target, source, size in pieces:
        ctypes.memmove(target, source, size)


def _each(act: Callable[..., object], fd: int, places: dict[int, int], pieces: list[tuple[int, int, int]]) -> None:
    for target, source, size in pieces:
        act(fd, memoryview((ctypes.c_char * size).from_address(target)).cast("B"), places[source])


def _pread(fd: int, memory: memoryview, offset: int) -> None:
    os.preadv(fd, [memory], offset)


def _private_bytes(process: int) -> int:
    """The process's share of its memory (PSS of proc(5)), without shared memory, which holds the snapshots."""
    with open(f"/proc/{process}/smaps_rollup") as rollup:
        fields = dict(line.split(":") for line in rollup if line.startswith("Pss"))
    kib = {name: int(value.split()[0]) for name, value in fields.items()}
    return (kib["Pss"] - kib["Pss_Shmem"]) << 10


def _read_bytes() -> int:
    """Bytes that this process has read so far."""
    with open("/proc/self/io") as io:
        fields = dict(line.split(": ") for line in io)
    return int(fields["rchar"])


def _processor_s(process: int) -> float:
    """Processor time that a process took so far."""
    with open(f"/proc/{process}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Trainer:
    """A training loop that does nothing but save and restore."""

    def __init__(self, url: str, mib: int, folder: str, local: Optional[str] = None) -> None:
        self._folder = folder
        self._local = local
        self._threads = min(4, len(os.sched_getaffinity(0)))
        self._tensors = make_state(mib)
        self._bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())
        self._memcpy = Memcpy(list(self._tensors.values()), self._threads)
        self._url = url
        self._step = 0
        self._files = 0
        self._tuned: Optional[DefaultStager] = None
        self._before = _private_bytes(os.getpid())
        self._own: Optional[forebay.Checkpointer] = None

    def _checkpointer(self) -> forebay.Checkpointer:
        if self._own is None:
            self._own = forebay.Checkpointer(self._url, keep=KEPT, copy_threads=self._threads, local=self._local)
        return self._own

    def save(self) -> dict[str, float]:
        if self._own is None:
            self._checkpointer().prepare(self._state())
        self._step += 1
        self._change()
        memcpy = self._memcpy.seconds()
        start = time.perf_counter()
        save = self._checkpointer().save_now(self._step, self._state())
        self._checkpointer().before_optimizer_step()
        blocking = time.perf_counter() - start
        local = 0.0
        if self._local is not None:
            assert save.wait_local(), "no copy was kept on the local disk"
            local = time.perf_counter() - start
        save.wait_durable()
        durable = time.perf_counter() - start
        return {"memcpy_s": memcpy, "blocking_s": blocking, "local_s": local, "durable_s": durable, "bytes": self._bytes}

    def _change(self) -> None:
        """Every byte of a training state changes from step to step; what stays is not uploaded again."""
        for tensor in self._tensors.values():
            tensor.view(torch.int32).add_(0x01010101)

    def restart(self) -> dict[str, float]:
        return self._from_memory("restart_s")

    def back(self) -> dict[str, float]:
        return self._from_memory("back_s")

    def _from_memory(self, name: str) -> dict[str, float]:
        memcpy = self._memcpy.seconds()
        start = time.perf_counter()
        checkpointer = self._checkpointer()
        self._step = checkpointer.restore(self._state()) or 0
        seconds = time.perf_counter() - start
        restored = checkpointer.restored
        assert restored is not None and restored.tier == "arena", f"restored {restored}"
        return {"memcpy_s": memcpy, name: seconds, "bytes": self._bytes}

    def train(self) -> dict[str, float]:
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        batch = torch.randn(BATCH, WIDTH)
        saves: list[forebay.Save] = []
        changing = 0.0

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        def step_and_save() -> None:
            nonlocal changing
            step()
            # Hears what was committed.
            checkpointer.step(self._step, {})
            if not saves or saves[-1].durable:
                self._step += 1
                # The model stands for its computing only; what is saved changes as a whole.
                changing += _timed(self._change)
                saves.append(checkpointer.save_now(self._step, self._state()))

        checkpointer = self._checkpointer()
        for _ in range(3):
            step()
        steps = max(10, int(LOOP_S / _timed(step)))
        alone = _timed(lambda: [step() for _ in range(steps)])
        agent = checkpointer._agent.pid
        before = _processor_s(agent)
        saving = _timed(lambda: [step_and_save() for _ in range(steps)]) - changing
        flush = _processor_s(agent) - before
        checkpointer.wait()
        return {"alone_s": alone, "saving_s": saving, "flush_cpu_s": flush, "saves": len(saves)}

    def memory(self) -> dict[str, float]:
        processes = [os.getpid(), self._checkpointer()._agent.pid]
        most, done = [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.02):
                most.append(sum(map(_private_bytes, processes)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        self.save()
        self.back()
        done.set()
        watcher.join()
        return {"extra_bytes": max(most) - self._before}

    def restore(self) -> dict[str, float]:
        # What is open has the newest steps in memory.
        self.end()
        memcpy = self._memcpy.seconds()
        before = _read_bytes()
        start = time.perf_counter()
        with forebay.Checkpointer(self._url, copy_threads=self._threads) as checkpointer:
            step = checkpointer.restore(self._state())
        seconds = time.perf_counter() - start
        restored = checkpointer.restored
        assert step == self._step and restored is not None, f"restored step {step}, not {self._step}"
        assert restored.tier == "store", f"restored {restored}"
        # Of files the kernel counts, of a store the restore alone.
        read = max(restored.bytes, _read_bytes() - before)
        return {"memcpy_s": memcpy, "restore_s": seconds, "read_bytes": read, "bytes": self._bytes}

    def disk(self) -> dict[str, float]:
        self._files += 1
        write = self._memcpy.write(self._raw(self._files))
        if self._files > KEPT:
            os.unlink(self._raw(self._files - KEPT))
        return {"write_s": write, "bytes": self._bytes}

    def read(self) -> dict[str, float]:
        return {"read_s": self._memcpy.read(self._raw(self._files)), "bytes": self._bytes}

    def _raw(self, number: int) -> str:
        return os.path.join(self._folder, f"raw{number}")

    def forget(self) -> dict[str, float]:
        for place in (self._folder, self._url.removeprefix("file://")):
            for folder, _, names in os.walk(place):
                for name in names:
                    fd = os.open(os.path.join(folder, name), os.O_RDONLY)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
        return {}

    def others(self) -> dict[str, float]:
        path = os.path.join(self._folder, "other")
        told = {
            "torch_save_s": _timed(lambda: torch.save(self._tensors, path)),
            "safetensors_s": _timed(lambda: safetensors.torch.save_file(self._tensors, path)),
        }
        os.unlink(path)
        told["dcp_save_s"] = _timed(lambda: dcp.save(self._tensors, checkpoint_id=path, no_dist=True))
        shutil.rmtree(path)
        pending = []
        told["dcp_async_s"] = _timed(lambda: pending.append(dcp.async_save(self._tensors, checkpoint_id=path, no_dist=True)))
        pending[0].result()
        shutil.rmtree(path)
        if self._tuned is None:
            self._tuned = DefaultStager(StagingOptions(False, False, False, False))
            self._tuned_save(path).result()
            shutil.rmtree(path)
        told["dcp_tuned_s"] = _timed(lambda: pending.append(self._tuned_save(path)))
        pending[1].result()
        shutil.rmtree(path)
        return {**told, "bytes": self._bytes}

    def _tuned_save(self, path: str) -> Future[object]:
        writer = dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=self._threads)
        return dcp.async_save(self._tensors, storage_writer=writer, async_stager=self._tuned, no_dist=True)

    def end(self) -> dict[str, float]:
        if self._own is not None:
            self._own.close()
        self._own = None
        return {}

    def _state(self) -> dict[str, object]:
        return {"model": self._tensors, "step": self._step}


def main() -> None:
    trainer = Trainer(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
    commands = {
        "save": trainer.save,
        "restore": trainer.restore,
        "restart": trainer.restart,
        "back": trainer.back,
        "train": trainer.train,
        "memory": trainer.memory,
        "disk": trainer.disk,
        "read": trainer.read,
        "forget": trainer.forget,
        "others": trainer.others,
        "end": trainer.end,
    }
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
