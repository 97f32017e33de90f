"""A store that ignores the conditions of puts: a start finds out and says so, and starts overwrite nothing of each other."""

from __future__ import annotations

import collections
import json
import socket
import threading
import warnings
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay import _native

from .conftest import Proxy, _pump, put_elsewhere

PATIENCE_S = 60.0
"""How long a start's record is held back for another one's."""


class Deaf(Proxy):
    """A way to a store on which conditions are lost. Two puts of starts' records, where two are to come, go through at once."""

    def __init__(self, endpoint: str) -> None:
        self.puts: list[str] = []
        """The keys of what was put, each as often as it was."""
        self.meeting: Optional[threading.Barrier] = None
        super().__init__(endpoint)

    def serve(self, visitor: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            data = visitor.recv(1 << 16)
            if not data:
                return
            head += data
        head, body = head.split(b"\r\n\r\n", 1)
        request, *lines = head.split(b"\r\n")
        method, path, _ = request.decode().split()
        dropped = (b"if-match", b"if-none-match", b"connection")
        lines = [line for line in lines if line.split(b":")[0].strip().lower() not in dropped]
        if method == "PUT":
            self.puts.append(path.split("?")[0])
            if self.meeting is not None and "/runs/" in path:
                try:
                    self.meeting.wait(PATIENCE_S)
                except threading.BrokenBarrierError:
                    pass
        store = socket.create_connection(self._store)
        # One request a connection: the next one's head is to be seen as well.
        store.sendall(b"\r\n".join([request, *lines, b"Connection: close", b"", b""]) + body)
        back = threading.Thread(target=_pump, args=[store, visitor], daemon=True)
        back.start()
        _pump(visitor, store)
        back.join()
        visitor.close()
        store.close()


@pytest.fixture
def deaf(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    store = Deaf(s3_endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    yield store
    store.close()


def objects(endpoint: str, prefix: str) -> dict[str, bytes]:
    import boto3

    store = boto3.client("s3", endpoint_url=endpoint)
    listed = store.list_objects_v2(Bucket="checkpoints", Prefix=f"{prefix}/").get("Contents", [])
    keys = [entry["Key"] for entry in listed]
    return {key: store.get_object(Bucket="checkpoints", Key=key)["Body"].read() for key in keys}


def starts(found: dict[str, bytes]) -> list[dict[str, Any]]:
    return [json.loads(data) for key, data in found.items() if "/runs/" in key]


def test_a_start_finds_out_and_warns_once(deaf: Deaf, s3_endpoint: str, tmp_path: Path) -> None:
    place = f"s3://checkpoints/{tmp_path.name}-deaf"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with forebay.Checkpointer(place, rng=False) as checkpointer:
            for step in (1, 2):
                save = checkpointer.save_now(step, {"t": torch.full((9,), step)})
                assert save is not None and save.wait_durable(60)
                checkpointer.wait()
    words = [str(one.message) for one in told if one.category is forebay.CheckpointWarning]
    assert len(words) == 1 and "ignores conditional puts: make sure that only one job saves there" in words[0], words
    (start,) = starts(objects(s3_endpoint, f"{tmp_path.name}-deaf"))
    assert start["conditional"] is False and start["incarnation"] == 1
    assert _native.verify(place, None) == [] and forebay.load(place)["t"].tolist() == [2] * 9


def test_two_starts_of_one_number_overwrite_nothing_of_each_other(deaf: Deaf, s3_endpoint: str, tmp_path: Path) -> None:
    prefix = f"{tmp_path.name}-two"
    place, values = f"s3://checkpoints/{prefix}", {1: 10, 2: 20}
    deaf.meeting = threading.Barrier(2)
    durable = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        both: dict[int, forebay.Checkpointer] = {}
        for number in values:
            both[number] = forebay.Checkpointer(place, rng=False, on_error="warn")
            put_elsewhere(both[number])
        saves = {
            number: checkpointer.save_now(5, {"t": torch.full((1000,), values[number])})
            for number, checkpointer in both.items()
        }
        for number, save in saves.items():
            assert save is not None
            try:
                assert save.wait_durable(60)
                durable.append(number)
            except forebay.CheckpointSuperseded as error:
                assert "incarnation 1" in str(error)
        for checkpointer in both.values():
            checkpointer.close()
    found = objects(s3_endpoint, prefix)
    # Both took the first number; the record is the later one's, whose save counts.
    (start,) = starts(found)
    assert start["incarnation"] == 1 and durable
    manifests = {key: json.loads(data)["body"] for key, data in found.items() if "/steps/" in key}
    assert len(manifests) == len(durable)
    put = collections.Counter(key for key in deaf.puts if "/steps/" in key or "/shards/" in key)
    assert put and set(put.values()) == {1}, "no key was put twice"
    assert {key.removeprefix("/checkpoints/") for key in put} >= {key for key in found if "/runs/" not in key}
    shards = [shard["key"] for body in manifests.values() for shard in body["shards"]]
    assert len(set(shards)) == len(durable) and all(f"{prefix}/{shard}" in found for shard in shards)
    assert _native.verify(place, None) == []
    with forebay.Checkpointer(place, rng=False) as checkpointer:
        state = {"t": torch.zeros(1000, dtype=torch.int64)}
        assert checkpointer.restore(state) == 5
    assert state["t"].unique().tolist() in [[values[number]] for number in durable]
