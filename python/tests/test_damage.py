"""Damaged checkpoints are never loaded: one clear error, or an older step with a loud warning."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import forebay
from forebay import _native

from .conftest import rounds


def state_of(step: int) -> dict[str, Any]:
    """A state with tensors of several sizes, one larger than a request."""
    return {
        "large": torch.arange(2_300_000, dtype=torch.float32) + step,
        "small": torch.full((7,), step, dtype=torch.int64),
        "half": torch.full((3, 3), step, dtype=torch.bfloat16),
        "n": step,
    }


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["n"] == right["n"] and all(torch.equal(left[name], right[name]) for name in ("large", "small", "half"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps, 1 and 2."""
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save_now(step, state_of(step))
    return tmp_path


def manifest_of(run: Path, step: int) -> Path:
    (manifest,) = run.glob(f"steps/{step:020}/*.json")
    return manifest


def body_of(run: Path, step: int) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(manifest_of(run, step).read_text())["body"]
    return body


def shard_of(run: Path, step: int) -> Path:
    return run / body_of(run, step)["shards"][0]["key"]


def flip(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def check_refused(run: Path, fact: str) -> None:
    """Step 2 is refused by name with the fact, and the newest whole step is 1, in place and with a warning."""
    with pytest.raises(forebay.CheckpointCorrupt, match=fact):
        forebay.load(run, step=2)
    target = state_of(0)
    with forebay.Checkpointer(run) as checkpointer:
        with pytest.raises(forebay.CheckpointCorrupt, match=fact):
            checkpointer.restore(target, step=2)
        assert target["n"] == 0, "a restore that fails on damaged bytes changes nothing but tensors"
        with pytest.warns(forebay.CheckpointWarning, match=f"step 1 is used instead of a newer one.*{fact}") as told:
            assert checkpointer.restore(target) == 1
        assert [warning.filename for warning in told] == [__file__], "where the restore is asked for"
        assert checkpointer.restored is not None and len(checkpointer.restored.passed_over) == 1
        assert re.search(f"store: .*{fact}", checkpointer.restored.passed_over[0])
    assert equal(target, state_of(1))
    findings = _native.verify(f"file://{run}", None)
    assert findings and {step for step, _, _ in findings} == {2}


@pytest.mark.parametrize("name", ["large", "small", "half"])
@pytest.mark.parametrize("end", ["first", "last"])
def test_a_flipped_bit_at_the_ends_of_every_slice(run: Path, name: str, end: str) -> None:
    (tensor,) = [tensor for tensor in body_of(run, 2)["tensors"] if tensor["name"] == name]
    parts = tensor["slices"]
    assert len(parts) == (36 if name == "large" else 1)
    flip(shard_of(run, 2), parts[0]["start"] if end == "first" else parts[-1]["end"] - 1)
    check_refused(run, f"tensor `{name}`")


def test_flipped_bits_anywhere_in_a_shard(run: Path) -> None:
    shard = shard_of(run, 2)
    whole = shard.read_bytes()
    header = body_of(run, 2)["shards"][0]["header"]
    for seed in rounds(15):
        choice = random.Random(seed)
        position, bit = choice.randrange(len(whole)), choice.randrange(8)
        flip(shard, position, bit)
        assert _native.verify(f"file://{run}", 2), f"seed {seed}: byte {position} bit {bit}"
        if position >= header:
            with pytest.raises(forebay.CheckpointCorrupt, match="damaged"):
                forebay.load(run, step=2)
        else:
            assert equal(forebay.load(run, step=2), state_of(2)), f"seed {seed}: the header is not read"
        shard.write_bytes(whole)
    assert _native.verify(f"file://{run}", None) == []


def test_a_flipped_bit_in_every_field_of_the_manifest(run: Path) -> None:
    manifest = manifest_of(run, 2)
    text = manifest.read_text()
    starts = [index + 1 for index in range(len(text) - 1) if text[index] in ',:{["' and text[index + 1] not in "{["]
    assert len(starts) > 100
    # A large tensor's slices are all alike: every field of the first few, and some of the others.
    starts = starts[:90] + starts[90:-40:17] + starts[-40:]
    for position in starts:
        flip(manifest, position)
        with pytest.raises(forebay.CheckpointCorrupt, match="manifest is damaged"):
            forebay.load(run, step=2)
        manifest.write_text(text)
    for seed in rounds(15):
        choice = random.Random(seed)
        position = choice.randrange(len(text))
        flip(manifest, position, choice.randrange(8))
        with pytest.raises(forebay.CheckpointCorrupt):
            forebay.load(run, step=2)
        manifest.write_text(text)
    flip(manifest, len(text) // 2)
    check_refused(run, "manifest is damaged")


@pytest.mark.parametrize(
    "damage, fact",
    [
        (lambda run: shard_of(run, 2).unlink(), "is missing"),
        (
            lambda run: shard_of(run, 2).write_bytes(shard_of(run, 2).read_bytes()[:-1]),
            "has 9204169 bytes, not 9204170",
        ),
        (lambda run: shard_of(run, 2).write_bytes(b""), "has 0 bytes, not"),
        (lambda run: manifest_of(run, 2).write_bytes(b""), "manifest is damaged"),
        (lambda run: manifest_of(run, 2).write_text(manifest_of(run, 2).read_text()[:-10]), "manifest is damaged"),
        (lambda run: manifest_of(run, 2).write_bytes(manifest_of(run, 1).read_bytes()), "holds the manifest of step 1"),
    ],
)
def test_missing_and_cut_files(run: Path, damage: Callable[[Path], Any], fact: str) -> None:
    damage(run)
    check_refused(run, fact)


def test_a_step_without_its_manifest_was_never_committed(run: Path) -> None:
    manifest_of(run, 2).unlink()
    with forebay.Checkpointer(run) as checkpointer:
        assert (checkpointer.latest(), checkpointer.steps()) == (1, [1])
        with pytest.raises(forebay.CheckpointNotFound, match="no step 2"):
            checkpointer.restore(state_of(0), step=2)
        target = state_of(0)
        assert checkpointer.restore(target) == 1
    assert equal(target, state_of(1))


def test_nothing_whole_is_an_error_and_changes_nothing(run: Path) -> None:
    for step in (1, 2):
        shard_of(run, step).unlink()
    target = state_of(0)
    with forebay.Checkpointer(run) as checkpointer:
        with pytest.raises(forebay.CheckpointCorrupt, match="no step that is whole.*step 2.*step 1"):
            checkpointer.restore(target)
    assert equal(target, state_of(0))


def test_steps_that_are_deleted_while_they_are_read_are_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Retention of another job goes on beside it: the newest step is taken, as it is by then."""
    opened: list[int] = []
    inner = _native.open_step

    def open_step(url: str, number: int, incarnation: int, attempt: str) -> _native.Step:
        opened.append(number)
        if len(opened) <= 2:
            last = max(forebay.Checkpointer(run).steps())
            forebay.save(state_of(last + 1), run, step=last + 1)
            for step in range(1, last + 1):
                shutil.rmtree(run / "steps" / f"{step:020}", ignore_errors=True)
        return inner(url, number, incarnation, attempt)

    monkeypatch.setattr(_native, "open_step", open_step)
    assert equal(forebay.load(run), state_of(4))
    assert opened == [2, 3, 4] and not recwarn.list
    del opened[:]
    with pytest.raises(forebay.CheckpointNotFound, match="step 4 was deleted while it was read"):
        forebay.load(run, step=4)
    monkeypatch.undo()
    assert equal(forebay.load(run), state_of(5))


def test_damage_on_an_object_store(s3_endpoint: str, tmp_path: Path) -> None:
    import boto3

    url = f"s3://checkpoints/{tmp_path.name}"
    with forebay.Checkpointer(url, rng=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save_now(step, state_of(step))
    store = boto3.client("s3", endpoint_url=s3_endpoint)
    listed = store.list_objects_v2(Bucket="checkpoints", Prefix=f"{tmp_path.name}/steps/{2:020}/")
    manifest = store.get_object(Bucket="checkpoints", Key=listed["Contents"][0]["Key"])["Body"].read()
    key = f"{tmp_path.name}/{json.loads(manifest)['body']['shards'][0]['key']}"
    shard = bytearray(store.get_object(Bucket="checkpoints", Key=key)["Body"].read())
    shard[-1] ^= 1
    store.put_object(Bucket="checkpoints", Key=key, Body=bytes(shard))
    with pytest.raises(forebay.CheckpointCorrupt, match="damaged"):
        forebay.load(url, step=2)
    with pytest.warns(forebay.CheckpointWarning, match="step 1 is used"):
        assert equal(forebay.load(url), state_of(1))
    store.delete_object(Bucket="checkpoints", Key=key)
    with pytest.raises(forebay.CheckpointCorrupt, match="is missing"):
        forebay.load(url, step=2)


def test_keep_deletes_old_steps_and_only_their_shards(tmp_path: Path) -> None:
    fixed = torch.arange(100)
    with forebay.Checkpointer(tmp_path, every=1, keep=2, rng=False) as checkpointer:
        for step in range(1, 6):
            checkpointer.step(step, {"fixed": fixed, "n": step} if step % 2 else {"t": torch.tensor(step)})
    assert len(_native.list_steps(f"file://{tmp_path}")) == 2
    assert len(list((tmp_path / "shards").rglob("*.safetensors"))) == 2
    with forebay.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [4, 5]
    assert _native.verify(f"file://{tmp_path}", None) == []
