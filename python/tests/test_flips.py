"""One bit flipped anywhere in what a restore reads: it is caught, and the next tier is used.

In memory and on the local disk that is the store; in the store it is the step before. Long runs flip every place that the
gate takes a few dozen of, and a thousand by chance in each tier.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay import _native

from .conftest import SCALE, Child, arenas_of, rounds
from .test_damage import manifest_of, shard_of
from .test_local import files, restored, save_steps, state_of
from .test_ranks import run_ranks, start_ranks
from .test_restart import LINGER_S, advance, end, kill, rank_state

Places = list[tuple[int, int]]
"""Bytes and bits."""

BY_CHANCE = 50
"""Flips at seeded positions in each tier, times the scale."""


def some(places: list[int], count: int) -> Places:
    """All of them in a long run, else about so many, the first and the last among them; each with a bit."""
    if SCALE == 1 and len(places) > count:
        places = [*places[: -1 : max(1, len(places) // count)], places[-1]]
    return [(at, at % 8) for at in places]


def by_chance(size: int, count: int = BY_CHANCE) -> Places:
    """Seeded places among so many bytes."""
    chances = (random.Random(seed) for seed in rounds(count))
    return [(choice.randrange(size), choice.randrange(8)) for choice in chances]


def slice_ends(body: dict[str, Any]) -> list[int]:
    """The first and the last byte of every slice."""
    slices = [part for tensor in body["tensors"] for part in tensor["slices"] if part["end"] > part["start"]]
    return sorted(at for part in slices for at in (part["start"], part["end"] - 1))


def fields(text: str) -> list[int]:
    """A byte of every field of a JSON document, names and values."""
    return [at + 1 for at in range(len(text) - 1) if text[at] in ',:{["' and text[at + 1] not in "{["]


def header_fields(shard: bytes, header: int) -> list[int]:
    """The same of a shard's header, its length and its end."""
    text = shard[8:header].decode().rstrip(" ")
    return [*range(8), *(8 + at for at in fields(text)), header - 1]


def body_of(file: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(file.read_text())["body"]
    return body


def flipped(file: Path, places: Places) -> Iterator[str]:
    """Flips one bit after another of a file, and back; tells which."""
    whole = file.read_bytes()
    for position, bit in places:
        data = bytearray(whole)
        data[position] ^= 1 << bit
        file.write_bytes(data)
        yield f"{file.name}: byte {position} bit {bit}"
        file.write_bytes(whole)


def expect(place: Path, step: int, told: str, where: str, disk: Optional[Path] = None) -> None:
    """A restore reads the store, brings that step, whole, and says why nothing nearer or newer was used."""
    with pytest.warns(forebay.CheckpointWarning, match=told):
        report, checkpointer = restored(place, disk)
    assert (report.step, report.tier) == (step, "store"), where
    checkpointer.close()


def test_in_memory(tmp_path: Path) -> None:
    def work(report: Callable[[str], None]) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, every=1, rng=False, linger=LINGER_S)
        save = checkpointer.step(1, state_of(1))
        assert save is not None and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    agent = kill(Child(work))
    # The first step of a start is stored as it lies in memory.
    body, shard = body_of(manifest_of(tmp_path, 1)), shard_of(tmp_path, 1).read_bytes()
    header = body["shards"][0]["header"]
    places = some(slice_ends(body), 14) + some(header_fields(shard, header), 12) + by_chance(len(shard))
    (arena,) = arenas_of(agent)
    with open(arena, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        start = memory.find(shard)
        assert start >= 0
        for position, bit in places:
            memory[start + position] ^= 1 << bit
            expect(tmp_path, 1, "step 1 in memory is not used", f"byte {position} bit {bit}")
            memory[start + position] ^= 1 << bit
    report, checkpointer = restored(tmp_path)
    assert report.tier == "arena"
    checkpointer.close()
    end(agent)


NAME, VALUE = "a tensor that is named once", "a value that is no tensor"


def named_state(fill: float) -> dict[str, Any]:
    return {NAME: torch.full((1000,), fill), "text": VALUE if fill else ""}


def flip_told(agent: int, text: str) -> str:
    """Flips a bit in each place where a text lies in a process's own memory; gives what stands there now."""
    other = chr(ord(text[0]) ^ 1) + text[1:]
    count = 0
    try:
        memory = open(f"/proc/{agent}/mem", "r+b")
    except PermissionError:
        end(agent)
        pytest.skip("NOT TESTED: no other process's memory may be written here")
    with memory:
        for line in Path(f"/proc/{agent}/maps").read_text().splitlines():
            bounds, access, *_, inode = line.split(maxsplit=5)[:5]
            if access != "rw-p" or inode != "0":
                continue
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            memory.seek(start)
            data, at = memory.read(stop - start), -1
            while (at := data.find(text.encode(), at + 1)) >= 0:
                memory.seek(start + at)
                memory.write(other[:1].encode())
                count += 1
    assert count, text
    return other


def test_in_what_an_agent_tells_of_its_memory(tmp_path: Path) -> None:
    """A changed value was restored, and a changed name not found, as if the training had saved them so."""

    def work(report: Callable[[str], None]) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, every=1, rng=False, linger=LINGER_S)
        save = checkpointer.step(1, named_state(1))
        assert save is not None and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    agent = kill(Child(work))

    def tier() -> str:
        with forebay.Checkpointer(tmp_path) as checkpointer:
            state = named_state(0)
            assert checkpointer.restore(state) == 1 and checkpointer.restored is not None
            assert state["text"] == VALUE and bool((state[NAME] == 1).all())
            return checkpointer.restored.tier

    for text in (NAME, VALUE):
        other = flip_told(agent, text)
        with pytest.warns(forebay.CheckpointWarning, match="in memory is not used.*changed after it was sealed"):
            assert tier() == "store", text
        flip_told(agent, other)
    assert tier() == "arena"
    end(agent)


def test_what_one_ranks_agent_tells_sends_all_to_the_store(tmp_path: Path) -> None:
    def work(rank: int, report: Callable[[str], None]) -> None:
        state = rank_state()
        checkpointer = forebay.Checkpointer(tmp_path, every=1, replicated=["all"], linger=LINGER_S)
        advance(state, rank)
        save = checkpointer.step(1, state)
        assert save is not None and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    agents = [kill(child) for child in start_ranks(2, work, with_gloo=False)]
    flip_told(agents[1], "own@1")

    def restore(rank: int) -> list[Any]:
        state = rank_state()
        with forebay.Checkpointer(tmp_path, replicated=["all"]) as checkpointer:
            with pytest.warns(forebay.CheckpointWarning, match="in memory is not used.*rank 1's part changed"):
                step = checkpointer.restore(state)
            assert checkpointer.restored is not None
            return [step, checkpointer.restored.tier, bool((state["own"] == 1 + rank).all())]

    assert run_ranks(2, restore, with_gloo=False) == [[1, "store", True]] * 2
    for agent in agents:
        end(agent)


def test_on_the_local_disk(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    save_steps(run, disk, 2, local_keep=1, rng=False).close()
    (shard,), (seal,), (starts,) = files(disk, "shards/*/*/*"), files(disk, "seals/*/*/*.json"), files(disk, "starts")
    body, data = body_of(seal)["seal"], shard.read_bytes()
    in_shard = some(slice_ends(body), 14) + some(header_fields(data, body["header"]), 12) + by_chance(len(data), 30)
    in_seal = some(fields(seal.read_text()), 20) + by_chance(seal.stat().st_size, 15)
    in_starts = some(fields(starts.read_text()), 9) + by_chance(starts.stat().st_size, 5)
    for file, places in [(shard, in_shard), (seal, in_seal), (starts, in_starts)]:
        for where in flipped(file, places):
            expect(run, 2, "local disk (is|are) not used", where, disk)
    for file in (shard, seal, starts):
        whole = file.read_bytes()
        for left in (whole[:-1], whole[: len(whole) // 2], b""):
            file.write_bytes(left)
            expect(run, 2, "local disk (is|are) not used", f"{file.name} with {len(left)} bytes", disk)
        file.write_bytes(whole)
    report, checkpointer = restored(run, disk)
    assert report.tier == "local"
    checkpointer.close()
    shard.unlink()
    expect(run, 2, "step 2 on the local disk is not used", "no shard", disk)


def test_in_the_store(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save_now(step, state_of(step))
    manifest, shard = manifest_of(tmp_path, 2), shard_of(tmp_path, 2)
    body, data = body_of(manifest), shard.read_bytes()
    header = body["shards"][0]["header"]
    assert len(body["shards"]) == 1, "nothing of it is in the first step's"
    tensors = [(header + at, bit) for at, bit in by_chance(len(data) - header, 35)]
    for where in flipped(shard, some(slice_ends(body), 14) + tensors):
        expect(tmp_path, 1, "step 1 is used instead of a newer one.*damaged", where)
    for where in flipped(manifest, some(fields(manifest.read_text()), 25) + by_chance(manifest.stat().st_size, 15)):
        expect(tmp_path, 1, "step 1 is used instead of a newer one.*damaged", where)
    # No restore reads a header; `ckpt verify` does.
    for where in flipped(shard, some(header_fields(data, header), 12)):
        assert _native.verify(f"file://{tmp_path}", 2), where
        report, checkpointer = restored(tmp_path)
        assert report.step == 2, where
        checkpointer.close()
    assert restored(tmp_path)[0].step == 2 and _native.verify(f"file://{tmp_path}", None) == []
