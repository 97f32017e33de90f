"""What the tests share: places to save to, counts, and children that die."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict  # noqa: F401  (slow: before any fork)

# torch's objects stay: children that are forked have no use for copies of what looking for garbage among them touches.
gc.freeze()

SCALE = int(os.environ.get("FOREBAY_TEST_SCALE", "1"))
"""Multiplies the rounds of every random test."""

PATIENCE_S = 60.0
"""How long a test waits for what must happen."""


def rounds(count: int) -> Iterator[int]:
    """Seeds for `count` rounds, times the scale."""
    return iter(range(count * SCALE))


def chances(count: int, most: int) -> Iterator[random.Random]:
    """Generators for `count` rounds, times the scale, and `most` at most, seeded by chance.

    The seed of each is printed, which is seen when the test fails; `FOREBAY_TEST_SEED` repeats that round alone.
    """
    given = os.environ.get("FOREBAY_TEST_SEED")
    seeds = [int(given)] if given else (secrets.randbits(48) for _ in range(min(count * SCALE, most)))
    for seed in seeds:
        print(f"repeat with FOREBAY_TEST_SEED={seed}")
        yield random.Random(seed)


def wait_until(happened: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Waits for something that must happen."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def arenas_of(process: int) -> list[Path]:
    """The descriptors of checkpoint memory that a process has open."""
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            if "memfd:forebay-checkpoint" in os.readlink(entry):
                found.append(entry)
        except FileNotFoundError:
            # Closed meanwhile, or the listing's own.
            continue
    return found


def memory_taken(process: int) -> dict[int, int]:
    """Bytes that the kernel has given to each memory for snapshots of a process, by inode.

    Faults tell less: one of a huge page brings as much as 512 others.
    """
    found = [entry.stat() for entry in arenas_of(process)]
    return {arena.st_ino: 512 * arena.st_blocks for arena in found}


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """A test that expects a warning of ours says so."""
    import warnings

    import forebay

    with warnings.catch_warnings():
        warnings.simplefilter("error", forebay.CheckpointWarning)
        yield


@pytest.fixture(autouse=True)
def stores_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of a store that is silent says how long it is waited for."""
    monkeypatch.setattr("forebay._held.PATIENCE_S", PATIENCE_S)


@pytest.fixture(autouse=True)
def agents_do_not_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that wants agents to wait for successors says so."""
    monkeypatch.setattr("forebay._checkpointer.LINGER_S", 0.0)


def free_port() -> int:
    """A port that is nobody's, and stays so until it is used: none of those that whoever asks for any is given."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(1024, given) or range(1024, 1 << 16)
    first = secrets.choice(ports)
    for port in [*range(first, ports.stop), *range(1024, first)]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A real S3 server on loopback."""
    port = free_port()
    try:
        import moto  # noqa: F401
    except ImportError:
        pytest.skip("NO S3 SERVER: moto is not installed, so that nothing is tested on s3://")
    launcher = Path(__file__).parents[2] / "tests/src/one_at_a_time.py"
    command = [sys.executable, str(launcher), "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            urllib.request.urlopen(endpoint, timeout=1).close()
            return True
        except OSError:
            return False

    try:
        wait_until(answers)
        os.environ.update(
            AWS_ENDPOINT_URL=endpoint,
            AWS_ALLOW_HTTP="true",
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",
            AWS_REGION="us-east-1",
        )
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/checkpoints", method="PUT")).close()
        yield endpoint
    finally:
        server.kill()
        server.wait()


def put_elsewhere(checkpointer: Any) -> None:
    """Has it be as one of another process: the next of its URL that is made here does not close it."""
    from forebay import _saver

    _saver._open.discard(checkpointer)


def trained(width: int = 300) -> dict[str, Any]:
    """A model with its optimizer, without which no parameter is copied behind the training."""
    model = torch.nn.Linear(width, width)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}


def leave_to_the_next_call(checkpointer: Any) -> None:
    """Has no thread seal what is copied behind the training: for what happens meanwhile the copy is too soon done."""
    checkpointer._seal_behind = lambda staging: None


class Instead:
    """Something with one of its methods replaced, for what an extension does not let be patched."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self._inner = inner
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._inner, name)


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that fails, whatever it is called with."""

    def fail(*_: Any) -> None:
        raise error

    return fail


class Proxy:
    """Something on the way to a store: each visitor is served by a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._store = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._welcome, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def serve(self, visitor: socket.socket) -> None:
        raise NotImplementedError

    def _welcome(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=[visitor], daemon=True).start()


class Gate(Proxy):
    """A way to a store that can be shut: connections are taken then, and not passed on until it is open."""

    def __init__(self, endpoint: str) -> None:
        self._opened = threading.Event()
        self._passing: list[socket.socket] = []
        self._lock = threading.Lock()
        super().__init__(endpoint)

    def open(self) -> None:
        self._opened.set()

    def shut(self) -> None:
        """Nothing passes from now on, on connections that were passed on before neither."""
        with self._lock:
            self._opened.clear()
            for passing in self._passing:
                with contextlib.suppress(OSError):
                    passing.shutdown(socket.SHUT_RDWR)
            self._passing.clear()

    def close(self) -> None:
        self._opened.set()
        super().close()

    def serve(self, visitor: socket.socket) -> None:
        self._opened.wait()
        store = socket.create_connection(self._store)
        while not self._passes(visitor, store):
            self._opened.wait()
        back = threading.Thread(target=_pump, args=[store, visitor], daemon=True)
        back.start()
        _pump(visitor, store)
        back.join()
        visitor.close()
        store.close()

    def _passes(self, *connections: socket.socket) -> bool:
        """Whether these may pass; who shuts the gate ends them then."""
        with self._lock:
            if self._opened.is_set():
                self._passing += connections
            return self._opened.is_set()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture
def gate(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A shut gate before the store, which whatever is started from now on takes."""
    gate = Gate(s3_endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
    yield gate
    gate.close()


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> str:
    """A place that nothing was saved to yet."""
    if request.param == "file":
        return f"file://{tmp_path}/run"
    request.getfixturevalue("s3_endpoint")
    return f"s3://checkpoints/{os.path.basename(tmp_path)}-{time.time_ns()}"


@pytest.fixture(autouse=True)
def children_end_with_their_test() -> Iterator[None]:
    """What a failed test leaves would keep whoever reads its output waiting."""
    yield
    for child in list(Child.alive):
        child.kill()


class Child:
    """A forked process in a group of its own; forked, because torch is imported already."""

    alive: set[Child] = set()
    """Those that were not waited for."""

    def __init__(self, work: Callable[[Callable[[str], None]], None]) -> None:
        read, write = os.pipe()
        begun, begins = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            os.close(begun)
            os.setsid()
            os.close(begins)
            # The pool of threads did not survive the fork.
            torch.set_num_threads(1)
            try:
                work(lambda line: print(line, file=os.fdopen(os.dup(write), "w"), flush=True))
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(write)
        os.close(begins)
        # Until it has a group, that cannot be killed.
        os.read(begun, 1)
        os.close(begun)
        self._lines = os.fdopen(read)
        Child.alive.add(self)

    def line(self) -> str:
        """The next line that the child reported; empty once it ended."""
        return self._lines.readline().strip()

    def kill(self) -> None:
        """SIGKILLs the child's whole group."""
        os.killpg(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> int:
        """Waits for the child's end; gives its exit code."""
        _, status = os.waitpid(self.pid, 0)
        Child.alive.discard(self)
        self._lines.close()
        return os.waitstatus_to_exitcode(status)
