"""Checkpoints over a store that fails, delays, refuses and loses answers: that costs time, and no byte.

Between Forebay and a real S3 server stands a proxy that speaks as much HTTP as that takes: one request a connection.
"""

from __future__ import annotations

import collections
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forebay
from forebay import _native

from .conftest import SCALE, Proxy, chances

TROUBLED = 0.25
"""How many requests something befalls: less than what is tried again until it succeeds."""
KINDS = 9
"""Of trouble."""
STEPS = 2
"""Saves of each start."""


class Troubles(Proxy):
    """The proxy."""

    def __init__(self, endpoint: str, chance: random.Random) -> None:
        self._chance = chance
        self._lock = threading.Lock()
        self.came: collections.Counter[str] = collections.Counter()
        super().__init__(endpoint)

    def _draw(self, head: bytes) -> str:
        """What befalls a request: conditions are refused of those that have one, conflicts are of writes."""
        method = head.split(b" ", 1)[0]
        kinds = ["500", "503", "closed", "lost", "cut", "late"]
        if method not in (b"GET", b"HEAD"):
            kinds.append("409")
        if b"\r\nif-none-match:" in head.lower() or b"\r\nif-match:" in head.lower():
            kinds += ["412", "done and 412"]
        with self._lock:
            if self._chance.random() >= TROUBLED:
                return ""
            # The rarer a kind was, the sooner it comes: all do within few saves.
            kind = min(kinds, key=lambda kind: (self.came[kind], self._chance.random()))
            self.came[kind] += 1
            return kind

    def serve(self, visitor: socket.socket) -> None:
        try:
            with visitor:
                head, body = _request(visitor)
                if head:
                    visitor.sendall(self._answer(self._draw(head), head, body))
        except OSError:
            # Whoever asked went away, or the server does.
            pass

    def _answer(self, kind: str, head: bytes, body: bytes) -> bytes:
        if kind == "closed":
            return b""
        if kind in ("500", "503", "409", "412"):
            return _refusal(kind)
        if kind == "late":
            time.sleep(0.1)
        answer = self._ask(head, body)
        if kind == "lost":
            return b""
        if kind == "done and 412":
            return _refusal("412")
        return answer[: len(answer) * 2 // 3] if kind == "cut" else answer

    def _ask(self, head: bytes, body: bytes) -> bytes:
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        lines.insert(1, b"Connection: close")
        with socket.create_connection(self._store) as store:
            store.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            return b"".join(iter(lambda: store.recv(1 << 16), b""))


def _request(visitor: socket.socket) -> tuple[bytes, bytes]:
    """A request's head without its empty line, and its body; nothing where the connection is closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = visitor.recv(1 << 16)
        if not more:
            return b"", b""
        data += more
    head, body = data.split(b"\r\n\r\n", 1)
    names = (line.split(b":", 1) for line in head.split(b"\r\n")[1:])
    length = next((int(value) for name, value in names if name.lower() == b"content-length"), 0)
    while len(body) < length:
        more = visitor.recv(1 << 16)
        if not more:
            return b"", b""
        body += more
    return head, body


def _refusal(status: str) -> bytes:
    codes = {"500": "InternalError", "503": "SlowDown", "409": "ConditionalRequestConflict", "412": "PreconditionFailed"}
    body = f"<Error><Code>{codes[status]}</Code><Message>a test of troubles</Message></Error>".encode()
    head = f"HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@pytest.fixture
def troubles(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Troubles]:
    """A store in trouble for whatever is started from now on."""
    (chance,) = chances(1, 1)
    troubles = Troubles(s3_endpoint, chance)
    monkeypatch.setenv("AWS_ENDPOINT_URL", troubles.endpoint)
    yield troubles
    troubles.close()


def test_a_store_in_trouble_costs_no_step_and_no_byte(
    troubles: Troubles, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"s3://checkpoints/{tmp_path.name}-{time.time_ns()}"
    generator = torch.Generator().manual_seed(7)
    last = 0
    saved: dict[int, list[torch.Tensor]] = {}
    # Saves of a few tensors are few requests: on until each kind of trouble came.
    for number in range(20 * SCALE):
        # One of several parts, one frozen, and one of a few bytes.
        state = {"large": torch.empty(9 << 20, dtype=torch.uint8), "frozen": torch.arange(1000), "small": torch.zeros(3)}
        with forebay.Checkpointer(place, keep=2) as checkpointer:
            assert checkpointer.restore(state) == (last or None)
            if last:
                found = [state["large"], state["small"]]
                assert all(torch.equal(one, other) for one, other in zip(found, saved[last])), f"step {last} differs"
            for _ in range(STEPS):
                last += 1
                state["large"].random_(generator=generator)
                state["small"].normal_(generator=generator)
                saved[last] = [state["large"].clone(), state["small"].clone()]
                checkpointer.save_now(last, state).wait_durable()
            saved = {step: tensors for step, tensors in saved.items() if step > last - 2}
        if number + 1 >= 2 * SCALE and len(troubles.came) == KINDS:
            break
    assert len(troubles.came) == KINDS, f"some trouble never came: {troubles.came}"
    # What came of it in the store, seen without trouble.
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    with forebay.Checkpointer(place) as checkpointer:
        # An older one may stay where its deletion failed: the next save's would take it.
        assert checkpointer.steps()[-2:] == [last - 1, last]
    assert _native.verify(place, None) == []
