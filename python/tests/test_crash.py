"""Processes die, stores vanish, tensors change under the copy: what was promised holds, the rest is told."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

import forebay
from forebay import _native

from .conftest import SCALE, Child, Gate, put_elsewhere, rounds, wait_until


def parts(seed: int) -> dict[str, Any]:
    """A model and an optimizer that made one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optim": optimizer, "ballast": torch.randn(1 << 20)}


def test_sealed_steps_survive_the_death_of_the_trainers_group(url: str) -> None:
    for seed in rounds(4):
        place = f"{url}/{seed}"
        last = random.Random(seed).randrange(1, 4)

        def train(report: Callable[[str], None]) -> None:
            state = parts(seed)
            checkpointer = forebay.Checkpointer(place, every=1)
            for step in range(1, last + 1):
                state["ballast"] += 1
                save = checkpointer.step(step, state)
                assert save is not None
            assert save.wait_sealed(60)
            report("sealed")
            signal.pause()

        child = Child(train)
        assert child.line() == "sealed", f"seed {seed}"
        child.kill()
        with forebay.Checkpointer(place) as checkpointer:
            wait_until(lambda: checkpointer.latest() == last)
            expected, target = parts(seed), parts(seed + 1)
            for _ in range(last):
                expected["ballast"] += 1
            assert checkpointer.restore(target) == last
        assert torch.equal(target["ballast"], expected["ballast"]), f"seed {seed}"
        for left, right in zip(target["model"].parameters(), expected["model"].parameters()):
            assert torch.equal(left, right), f"seed {seed}"
        assert _native.verify(place, None) == []


def test_death_at_any_moment_leaves_only_whole_steps(tmp_path: Path) -> None:
    for seed in rounds(6):
        place = tmp_path / str(seed)

        def train(report: Callable[[str], None]) -> None:
            state = {"n": 0, "t": torch.zeros(1 << 20)}
            saves = []
            with forebay.Checkpointer(place, every=1, keep=2) as checkpointer:
                for step in range(1, 1000):
                    state["t"] += 1
                    state["n"] = step
                    saves.append(checkpointer.step(step, state))
                    if step == 1:
                        report(str(checkpointer._agent.pid))
                    report(str(max((save.step for save in saves if save is not None and save.sealed), default=0)))

        child = Child(train)
        agent = int(child.line())
        # Every other one has sealed something, whatever keeps it up.
        sealed = 0
        while seed % 2 == 1 and sealed == 0:
            sealed = int(child.line())
        time.sleep(random.Random(seed).uniform(0, 0.4))
        os.killpg(child.pid, signal.SIGKILL)
        sealed = max([sealed, *map(int, child._lines.read().split())])
        assert child.join() == -signal.SIGKILL
        # What the agent was handed it commits before it leaves.
        wait_until(lambda: not is_running(agent))
        url = f"file://{place}"
        with forebay.Checkpointer(place) as checkpointer:
            latest = checkpointer.latest() or 0
            target = {"n": 0, "t": torch.zeros(1 << 20)}
            step = checkpointer.restore(target)
        assert (step or 0) == latest and target["n"] == (step or 0), f"seed {seed}"
        assert latest >= sealed, f"seed {seed}: step {sealed} was sealed, {latest} is the newest"
        assert bool((target["t"] == target["n"]).all()), f"seed {seed}: a torn step"
        assert _native.verify(url, None) == [] if place.exists() else sealed == 0, f"seed {seed}"


def test_the_agent_leaves_when_the_trainer_is_gone(tmp_path: Path) -> None:
    def train(report: Callable[[str], None]) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, every=1)
        save = checkpointer.step(1, {"t": torch.zeros(3)})
        assert save is not None and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    child = Child(train)
    agent = int(child.line())
    os.kill(agent, 0)
    child.kill()
    wait_until(lambda: not is_running(agent))


def is_running(pid: int) -> bool:
    """Whether a thread of a process exists that is no zombie: its files are open until the last one has ended, be the first one
    a zombie long before."""

    def lives(thread: Path) -> bool:
        try:
            return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    try:
        return any(map(lives, Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return False


def test_an_agent_that_was_killed_is_told_and_replaced(tmp_path: Path) -> None:
    for seed in rounds(3):
        with forebay.Checkpointer(tmp_path / str(seed), every=1) as checkpointer:
            checkpointer.step(1, {"t": torch.full((1 << 20,), 1.0)})
            first = checkpointer._agent.pid
            time.sleep(random.Random(seed).uniform(0, 0.05))
            os.kill(first, signal.SIGKILL)
            checkpointer._agent.wait()
            with pytest.warns(forebay.CheckpointWarning, match=f"agent \\(process {first}\\) ended unexpectedly"):
                save = checkpointer.step(2, {"t": torch.full((1 << 20,), 2.0)})
            assert save is not None and save.wait_durable(60)
            checkpointer.wait()
            assert checkpointer.steps() == [1, 2], f"seed {seed}"
        assert bool((forebay.load(tmp_path / str(seed), step=1)["t"] == 1).all())
        assert _native.verify(f"file://{tmp_path}/{seed}", None) == []


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_step_is_sealed_though_no_call_comes(tmp_path: Path, has_optimizer: bool) -> None:
    """With the hook it was sealed by the next call: an evaluation that was killed cost the step, which lay whole in memory."""

    def train(report: Callable[[str], None]) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, every=1)
        checkpointer.before_optimizer_step()
        # Without parameters nothing is copied behind the training.
        state = parts(0) if has_optimizer else {"ballast": parts(0)["ballast"]}
        save = checkpointer.step(1, state)
        assert save is not None

        def is_sealed() -> bool:
            checkpointer._session.take_replies(0.1)
            return save.sealed

        wait_until(is_sealed, 20)
        wait_until(lambda: "forebay-seal" not in [thread.name for thread in threading.enumerate()])
        report("sealed")
        signal.pause()

    child = Child(train)
    assert child.line() == "sealed"
    child.kill()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        wait_until(lambda: checkpointer.latest() == 1)
    assert torch.equal(forebay.load(tmp_path)["ballast"], parts(0)["ballast"])


@pytest.mark.parametrize("is_seen_behind", [False, True])
def test_a_tensor_that_changes_under_the_copy_is_named(tmp_path: Path, is_seen_behind: bool) -> None:
    """By the next call, also where the thread that was to seal the step saw it first."""
    state, may_seal = parts(0), threading.Event()
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        checkpointer.before_optimizer_step()
        seal = checkpointer._seal_behind

        def seal_behind(staging: Any) -> None:
            assert may_seal.wait(60)
            seal(staging)

        checkpointer._seal_behind = seal_behind  # type: ignore[method-assign]
        save, staging = checkpointer.step(1, state), checkpointer._staging
        assert staging is not None
        with torch.no_grad():
            state["model"][0].weight.add_(1)
        if is_seen_behind:
            may_seal.set()
            wait_until(lambda: staging.failure is not None)
        with pytest.raises(forebay.CheckpointMutated, match=r"step 1 was not saved: state\['model'\].0.weight changed"):
            checkpointer.before_optimizer_step()
        assert save is not None
        with pytest.raises(forebay.CheckpointMutated):
            save.wait_durable(60)
        again = checkpointer.step(2, state)
        assert again is not None and (is_seen_behind or not again.sealed)
        may_seal.set()
        assert again.wait_staged(60) and again.staged and again.wait_durable(60)
        assert checkpointer.steps() == [2]


def test_without_the_hook_nothing_can_change_under_the_copy(tmp_path: Path) -> None:
    state = parts(0)
    before = state["model"][0].weight.detach().clone()
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        save = checkpointer.step(1, state)
        assert save is not None and save.staged
        with torch.no_grad():
            state["model"][0].weight.add_(1)
    assert torch.equal(forebay.load(tmp_path)["model"]["0.weight"], before)


def test_a_later_start_supersedes_this_one(url: str) -> None:
    old = forebay.Checkpointer(url, every=1)
    put_elsewhere(old)
    new = forebay.Checkpointer(url, every=1)
    with old, new:
        save = old.step(1, {"n": 1})
        assert save is not None and save.wait_durable(60)
        save = new.step(2, {"n": 2})
        assert save is not None and save.wait_durable(60)
        save = old.step(3, {"n": 3})
        assert save is not None
        with pytest.raises(forebay.CheckpointSuperseded, match="incarnation 2"):
            save.wait_durable(60)
        assert new.steps() == [1, 2]


@pytest.mark.parametrize("looks_again", [False, True])
def test_a_killed_agent_of_a_superseded_start_leaves_the_later_one_alone(url: str, looks_again: bool) -> None:
    old = forebay.Checkpointer(url, every=1)
    put_elsewhere(old)
    state = {"t": torch.zeros(3)}
    assert old.restore(state) is None
    new = forebay.Checkpointer(url, every=1)
    with old, new:
        save = old.step(1, state)
        assert save is not None and save.wait_durable(60)
        assert new.restore(state) == 1
        save = new.step(2, state)
        assert save is not None and save.wait_durable(60)
        if looks_again:
            assert old.restore(state, step=1) == 1
        assert old._agent is not None
        os.kill(old._agent.pid, signal.SIGKILL)
        old._agent.wait()
        with pytest.warns(forebay.CheckpointWarning, match="ended unexpectedly"):
            save = old.step(3, state)
        assert save is not None
        with pytest.raises(forebay.CheckpointSuperseded, match="incarnation 2"):
            save.wait_durable(60)
        save = new.step(3, state)
        assert save is not None and save.wait_durable(60)
        assert new.steps() == [1, 2, 3]


def test_errors_surface_at_the_next_call_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with forebay.Checkpointer(run, every=1) as checkpointer:
        save = checkpointer.step(1, {"n": 1})
        assert save is not None and save.wait_durable(60)
        (run / "shards").rename(run / "elsewhere")
        (run / "shards").write_text("in the way")
        save = checkpointer.step(2, {"t": torch.zeros(3)})
        assert save is not None
        while save._progress() != "failed":
            checkpointer._listen(1)
        with pytest.raises(forebay.CheckpointError, match="shards/.*exists already"):
            checkpointer.step(3, {"n": 3})
        (run / "shards").unlink()
        (run / "elsewhere").rename(run / "shards")
        save = checkpointer.step(4, {"t": torch.ones(3)})
        assert save is not None and save.wait_durable(60)
        assert checkpointer.steps() == [1, 4]


def test_a_busy_store_makes_saves_wait_or_be_skipped(s3_endpoint: str) -> None:
    # A store that takes connections and never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        real, fake = os.environ["AWS_ENDPOINT_URL"], f"http://127.0.0.1:{silent.getsockname()[1]}"
        os.environ["AWS_ENDPOINT_URL"] = fake
        try:
            checkpointer = forebay.Checkpointer("s3://checkpoints/silent", every=1, on_busy="skip")
            saves = [checkpointer.step(step, {"n": step}) for step in range(1, 6)]
        finally:
            os.environ["AWS_ENDPOINT_URL"] = real
        assert [save is not None for save in saves] == [True, True, False, False, False]
        assert checkpointer.skipped == 3
        assert not checkpointer.wait(0.1)
        agent = checkpointer._agent
        checkpointer._let_go()
        agent.kill()
        agent.wait()


def test_a_forked_worker_neither_saves_nor_holds_the_agent(tmp_path: Path) -> None:
    checkpointer = forebay.Checkpointer(tmp_path, every=1)
    save = checkpointer.step(1, {"t": torch.zeros(3)})
    assert save is not None and save.wait_durable(60)

    def work(report: Callable[[str], None]) -> None:
        try:
            checkpointer.step(2, {})
        except forebay.CheckpointInvalid as error:
            report(str(error))
        signal.pause()

    worker = Child(work)
    try:
        assert "forked child" in worker.line()
        agent = checkpointer._agent
        save = checkpointer.step(2, {"t": torch.ones(3)})
        assert save is not None and save.wait_durable(60)
        checkpointer.close()
        wait_until(lambda: not is_running(agent.pid))
    finally:
        worker.kill()


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        checkpointer.step(1, {"n": 1})
        with pytest.raises(forebay.CheckpointConflict, match="step 1 was saved already"):
            checkpointer.save_now(1, {"n": 1})
    with pytest.raises(forebay.CheckpointInvalid, match="closed"):
        checkpointer.step(2, {})


def test_what_a_killed_agent_had_begun_is_aborted_by_the_one_that_takes_its_place(
    gate: Gate, s3_endpoint: str, tmp_path: Path
) -> None:
    import boto3

    store = boto3.client("s3", endpoint_url=s3_endpoint)
    bucket, prefix = "checkpoints", tmp_path.name

    def uploads() -> set[str]:
        listed = store.list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix}/")
        return {upload["UploadId"] for upload in listed.get("Uploads", [])}

    gate.open()
    with forebay.Checkpointer(f"s3://{bucket}/{prefix}", every=1, flush_rate="256KiB") as checkpointer:
        save = checkpointer.step(1, {"t": torch.arange(24 << 20, dtype=torch.uint8)})
        assert save is not None and save.wait_sealed(60)
        wait_until(lambda: bool(uploads()))
        gate.shut()
        dead = uploads()
        os.kill(checkpointer._agent.pid, signal.SIGKILL)
        gate.open()
        # The next one need not be so slow that its upload is seen.
        checkpointer._session.set_flush_rate("1GiB")
        with pytest.warns(forebay.CheckpointWarning, match="ended unexpectedly"):
            assert save.wait_durable(60)
    assert len(dead) == 1 and uploads() == set()


def test_uploads_of_killed_agents_are_aborted_by_the_next_run(s3_endpoint: str, tmp_path: Path) -> None:
    """Here the server says of every upload that it is years old: what goes on is known by its note alone.

    The agent's second look comes five minutes after its first: long runs wait for it, others see that nothing went before.
    """
    import boto3

    store = boto3.client("s3", endpoint_url=s3_endpoint)
    bucket, prefix = "checkpoints", tmp_path.name

    def uploads() -> dict[str, str]:
        listed = store.list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix}/")
        return {upload["Key"]: upload["UploadId"] for upload in listed.get("Uploads", [])}

    def train(report: Callable[[str], None]) -> None:
        checkpointer = forebay.Checkpointer(f"s3://{bucket}/{prefix}", every=1, flush_rate="256KiB")
        save = checkpointer.step(1, {"t": torch.zeros(24 << 20, dtype=torch.uint8)})
        assert save is not None and save.wait_sealed(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    child = Child(train)
    agent = int(child.line())
    wait_until(lambda: bool(uploads()))
    os.kill(agent, signal.SIGKILL)
    child.kill()
    (dead,) = uploads()
    # Somebody's who goes on, as its note says, and two that are no checkpoint's.
    _, _, _, start, name = dead.split("/")
    live = f"{prefix}/shards/{2:020}/{start}/{name}"
    store.put_object(Bucket=bucket, Key=f"{prefix}/ranks/{2:020}/{start}/000000.alive", Body=b"")
    others = [live, f"{prefix}/shards/notes.bin", f"{prefix}/data/file"]
    for key in others:
        store.create_multipart_upload(Bucket=bucket, Key=key)
    assert sorted(uploads()) == sorted([dead, *others])

    with forebay.Checkpointer(f"s3://{bucket}/{prefix}") as checkpointer:
        checkpointer.save_now(1, {"t": torch.zeros(3)})
        if SCALE > 1:
            wait_until(lambda: dead not in uploads(), 600)
    assert sorted(uploads()) == sorted(others if SCALE > 1 else [dead, *others])
    part = store.upload_part(Bucket=bucket, Key=live, UploadId=uploads()[live], PartNumber=1, Body=b"whole")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    store.complete_multipart_upload(Bucket=bucket, Key=live, UploadId=uploads()[live], MultipartUpload=parts)
    assert store.get_object(Bucket=bucket, Key=live)["Body"].read() == b"whole"
