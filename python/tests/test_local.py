"""Copies on this host's disk: what is restored from them, and what makes them give way to the store."""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay import _native

from .conftest import Child, Gate, Instead, arenas_of, raising, rounds, wait_until
from .test_crash import is_running
from .test_limits import MIB, small_disk  # noqa: F401
from .test_ranks import run_ranks, start_ranks
from .test_restart import LINGER_S, advance, end, rank_restores, rank_state

Report = Callable[[str], None]


def state_of(step: int) -> dict[str, Any]:
    """A state with tensors of several sizes."""
    return {
        "large": torch.arange(300_000, dtype=torch.float32) + step,
        "small": torch.full((7,), step, dtype=torch.int64),
        "n": step,
    }


def save_steps(place: Any, disk: Path, last: int, first: int = 1, **arguments: Any) -> forebay.Checkpointer:
    """A checkpointer that saved steps, the last of which is on the disk and in the store."""
    checkpointer = forebay.Checkpointer(place, every=1, local=disk, **arguments)
    for step in range(first, last + 1):
        save = checkpointer.step(step, state_of(step))
        assert save is not None and save.wait_local(60) and save.local
    assert checkpointer.wait(60)
    return checkpointer


def killed(place: Any, disk: Path, last: int) -> None:
    """Has a trainer save steps; then it and its agent are killed, as when the host is."""

    def work(report: Report) -> None:
        report(str(save_steps(place, disk, last, linger=LINGER_S)._agent.pid))
        signal.pause()

    child = Child(work)
    agent = int(child.line())
    child.kill()
    end(agent)


def restored(
    place: Any, disk: Optional[Path] = None, **arguments: Any
) -> tuple[forebay.Restored, forebay.Checkpointer]:
    """What a restore of all of the state did; what it brought is whole."""
    checkpointer = forebay.Checkpointer(place, every=1, local=disk, **arguments)
    state = state_of(-1)
    step = checkpointer.restore(state)
    assert step is not None and checkpointer.restored is not None and checkpointer.restored.step == step
    expected = state_of(step)
    assert state["n"] == step and all(torch.equal(state[name], expected[name]) for name in ("large", "small"))
    assert checkpointer.timeline()[-1]["tier"] == checkpointer.restored.tier
    return checkpointer.restored, checkpointer


def files(disk: Path, pattern: str) -> list[Path]:
    return sorted(disk.glob(f"*/{pattern}"))


def test_copies_on_disk_are_restored_without_the_store(tmp_path: Path) -> None:
    run, disk, away = tmp_path / "run", tmp_path / "disk", tmp_path / "away"
    killed(run, disk, 3)
    run.rename(away)
    with pytest.warns(forebay.CheckpointWarning, match="is missing, and step 3 is restored from the local disk"):
        report, checkpointer = restored(run, disk)
    assert (report.step, report.tier, report.passed_over) == (3, "local", ())
    assert report.bytes >= 1_200_000 and not run.exists(), "nothing was looked for in the store"
    away.rename(run)
    save = checkpointer.step(4, state_of(4))
    assert save is not None and save.wait_durable(60)
    entry = save.timeline()
    assert entry["staged_s"] <= entry["sealed_s"] <= entry["local_s"] <= entry["stored_s"] <= entry["durable_s"]
    checkpointer.close()
    assert checkpointer.steps() == [1, 2, 3, 4] and _native.verify(f"file://{run}", None) == []
    # Nobody was killed now, and the copies are there: of the start before this one as well.
    run.rename(away)
    with pytest.warns(forebay.CheckpointWarning, match="is missing, and step"):
        assert restored(run, disk)[0].tier == "local"
        assert forebay.Checkpointer(run, local=disk).restore(state_of(0), step=3) == 3


def test_memory_comes_before_the_disk(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        report(str(save_steps(tmp_path / "run", tmp_path / "disk", 2, linger=LINGER_S)._agent.pid))
        signal.pause()

    child = Child(work)
    agent = int(child.line())
    child.kill()
    report, checkpointer = restored(tmp_path / "run", tmp_path / "disk")
    assert (report.step, report.tier) == (2, "arena")
    # Going on from memory is going on from the copies of the same start.
    checkpointer.prepare(state_of(0))
    checkpointer.close()
    wait_until(lambda: not is_running(agent))
    assert restored(tmp_path / "run", tmp_path / "disk")[0].tier == "local"


@pytest.mark.parametrize("tier", ["arena", "local"])
def test_nearer_tiers_need_none_that_is_farther(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Memory with a store that is silent and without the disk; the disk with damaged memory and such a store."""
    monkeypatch.setattr("forebay._held.PATIENCE_S", 0.1)
    place, disk = f"s3://checkpoints/{tmp_path.name}-tiers", tmp_path / "disk"
    gate.open()

    def work(report: Report) -> None:
        report(str(save_steps(place, disk, 2, linger=LINGER_S)._agent.pid))
        signal.pause()

    child = Child(work)
    agent = int(child.line())
    child.kill()
    gate.shut()
    if tier == "arena":
        disk.rename(tmp_path / "away")
        with pytest.warns(forebay.CheckpointWarning, match="from memory, and it is not known whether the job went on"):
            report, checkpointer = restored(place, disk)
        assert report.passed_over == ()
    else:
        (shard,) = [path for path in files(disk, "shards/*/*/*") if int(path.parts[-3]) == 2]
        (arena,) = arenas_of(agent)
        with open(arena, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[memory.find(shard.read_bytes()) + shard.stat().st_size - 1] ^= 1
        unknown = "step 2 is restored from {}, and it is not known whether the job went on"
        with (
            pytest.warns(forebay.CheckpointWarning, match=unknown.format("memory")),
            pytest.warns(forebay.CheckpointWarning, match=unknown.format("the local disk")),
            pytest.warns(forebay.CheckpointWarning, match="step 2 in memory is not used"),
        ):
            report, checkpointer = restored(place, disk)
        assert "step 2" in report.passed_over[0]
    assert (report.step, report.tier) == (2, tier)
    checkpointer.close()
    end(agent)


def test_old_copies_go_and_others_stay(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    save_steps(run, disk, 6, local_keep=3).close()
    there = {int(path.parts[-3]) for path in files(disk, "shards/*/*/*")}
    assert there == {4, 5, 6} and len(files(disk, "seals/*/*/*.json")) == len(files(disk, "seals/*/*/*.durable")) == 3
    # A start that does not go on from them: they are of no use to any that follows.
    save_steps(run, disk, 9, 8).close()
    assert {int(path.parts[-3]) for path in files(disk, "shards/*/*/*")} == {8, 9}
    assert {int(path.parts[-3]) for path in files(disk, "seals/*/*/*")} == {8, 9}
    assert restored(run, disk)[0].step == 9


def test_what_was_deleted_from_the_store_or_is_older_is_not_used(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    save_steps(run, disk, 3).close()
    shutil.rmtree(run / "steps" / f"{3:020}")
    report, checkpointer = restored(run, disk)
    assert (report.step, report.tier) == (2, "store") and "step 3 was deleted" in report.passed_over[0]
    checkpointer.close()
    shutil.rmtree(disk)
    save_steps(run, disk, 5, 5).close()
    # A disk that missed the starts since.
    shutil.copytree(disk, tmp_path / "early")
    save_steps(run, disk, 7, 6).close()
    assert restored(run, tmp_path / "early")[0].passed_over == ("local: the job was started elsewhere since",)


def test_copies_are_not_those_of_an_empty_directory_at_the_same_path(tmp_path: Path) -> None:
    """One that was emptied to begin anew, or another host's or container's: the job got the other one's step where the newest of
    its copies had not been in the store."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    save_steps(run, disk, 2).close()
    files(disk, "seals/*/*/*.durable")[-1].unlink()
    shutil.rmtree(run)
    run.mkdir()
    with forebay.Checkpointer(run, every=1, local=disk) as job:
        with pytest.warns(forebay.CheckpointWarning, match="nothing is restored: local: no job ever started in the store"):
            assert job.restore(state_of(-1)) is None


def test_a_later_start_elsewhere_makes_copies_stale(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    save_steps(run, disk, 2).close()
    with forebay.Checkpointer(run, every=1) as elsewhere:
        elsewhere.step(3, state_of(3))
    report, checkpointer = restored(run, disk)
    assert (report.step, report.tier) == (3, "store") and "started elsewhere" in report.passed_over[0]
    save = checkpointer.step(4, state_of(4))
    assert save is not None and save.wait_durable(60)
    checkpointer.close()
    assert restored(run, disk)[0].tier == "local", "and its own are good"
    assert {int(path.parts[-3]) for path in files(disk, "shards/*/*/*")} == {4}


def test_a_full_local_disk_is_told_once_and_saves_go_on(small_disk: Path, tmp_path: Path) -> None:  # noqa: F811
    def state(step: int) -> dict[str, Any]:
        return {"t": torch.full((3 * MIB,), step, dtype=torch.uint8)}

    checkpointer = forebay.Checkpointer(tmp_path / "run", every=1, local=small_disk, rng=False)
    told, is_local = [], []
    for step in range(1, 7):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            save = checkpointer.step(step, state(step))
            assert save is not None
            is_local.append(save.wait_local(60))
            assert save.wait_durable(60)
        told += [str(warning.message) for warning in seen]
    assert is_local == [True, True, False, False, False, False]
    assert len(told) == 1 and "saves go on without copies" in told[0] and "No space left" in told[0]
    checkpointer.close()
    assert checkpointer.steps() == [1, 2, 3, 4, 5, 6]
    with forebay.Checkpointer(tmp_path / "run", local=small_disk, rng=False) as after:
        target = state(0)
        assert after.restore(target) == 6 and bool((target["t"] == 6).all())
        assert after.restored is not None and after.restored.tier == "store"
        assert after.restored.passed_over == ("local: the store has a newer step 6",)
        # And once there is room again there are copies again.
        shutil.rmtree(next(small_disk.glob("*/shards")) / f"{1:020}")
        save = after.save_now(7, state(7))
        assert save is not None and save.wait_local(60)


def test_copies_stay_below_a_ceiling_and_go_oldest_first(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    ceiling = 5 << 19

    def taken() -> int:
        return sum(path.stat().st_size for path in files(disk, "shards/*/*/*") + files(disk, "seals/*/*/*"))

    with forebay.Checkpointer(run, every=1, local=disk, local_keep=9, local_bytes="2560KiB", rng=False) as checkpointer:
        for step in range(1, 6):
            save = checkpointer.step(step, {"t": torch.full((1 << 20,), step, dtype=torch.uint8)})
            assert save is not None and save.wait_local(60) and save.wait_durable(60)
            assert taken() <= ceiling
        assert {int(path.parts[-3]) for path in files(disk, "shards/*/*/*")} == {4, 5}
        with pytest.warns(forebay.CheckpointWarning, match="3.00 MiB of rank 0 of 1, which do not fit below local_bytes"):
            save = checkpointer.step(6, {"t": torch.zeros(3 << 20, dtype=torch.uint8)})
            assert save is not None and save.wait_durable(60) and not save.local
            checkpointer._pass_warnings_on()
        # It is told once, and what fits has a copy again.
        for step, size in ((7, 3 << 20), (8, 1 << 20)):
            save = checkpointer.step(step, {"t": torch.zeros(size, dtype=torch.uint8)})
            assert save is not None and save.wait_durable(60) and save.local == (size == 1 << 20)
            assert taken() <= ceiling
        assert checkpointer.copies_missed == 2
    assert checkpointer.steps() == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(forebay.CheckpointInvalid, match="local_bytes"):
        forebay.Checkpointer(run, local=disk, local_bytes="much").save_now(9, {"n": 1})


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(forebay.CheckpointInvalid, match="no place for copies"):
        forebay.Checkpointer(tmp_path / "run", local=tmp_path / "file")
    with pytest.raises(ValueError, match="local_keep is 0"):
        forebay.Checkpointer(tmp_path / "run", local=tmp_path, local_keep=0)


def ranks_restore(place: Any, disk: Path) -> list[list[Any]]:
    """As `rank_restores`, with copies on `disk`."""
    warnings.simplefilter("ignore", forebay.CheckpointWarning)
    return rank_restores(place, local=disk)


def ranks_save(place: Any, disk: Path, last: int, shut: Callable[[], None] = lambda: None) -> None:
    """Two ranks save steps, the last of them after `shut`; once all are on the disk, ranks and agents are killed."""

    def work(rank: int, report: Report) -> None:
        state = rank_state()
        checkpointer = forebay.Checkpointer(place, every=1, replicated=["all"], local=disk)
        for step in range(1, last + 1):
            if step == last:
                checkpointer.wait(60)
                report(str(checkpointer._agent.pid))
                signal.sigwait([signal.SIGUSR1])
            advance(state, rank)
            save = checkpointer.step(step, state)
            assert save is not None and save.wait_local(60)
        report("local")
        signal.pause()

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        children = start_ranks(2, work, with_gloo=False)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    agents = [int(child.line()) for child in children]
    shut()
    for child in children:
        os.kill(child.pid, signal.SIGUSR1)
    assert [child.line() for child in children] == ["local", "local"]
    for agent in agents:
        end(agent)
    for child in children:
        child.kill()


def test_ranks_restore_each_others_copies(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    ranks_save(run, disk, 3)
    # Manifests and shards are out of reach; the runs' records may be looked at.
    for folder in ("steps", "shards"):
        if (run / folder).exists():
            (run / folder).rename(tmp_path / folder)
    for marker in files(disk, "seals/*/*/*.durable"):
        marker.unlink()
    assert ranks_restore(run, disk) == [[3, "local", True]] * 2


def test_a_copy_that_one_rank_lacks_is_left_by_all(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    ranks_save(run, disk, 3)
    (seal,) = files(disk, f"seals/{3:020}/*/000001-*.json")
    seal.unlink()
    run.rename(tmp_path / "away")
    lines = ranks_restore(run, disk)
    assert lines == [[2, "local", True]] * 2


@pytest.mark.parametrize(("alone", "found"), [(0, None), (1, ([], 0, []))])
def test_ranks_that_go_on_from_memory_agree_whose_copies_stay(tmp_path: Path, alone: int, found: Any) -> None:
    """A rank that could not look, or saw something else than the others, had the others' older copies deleted."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    settings: dict[str, Any] = {"every": 1, "replicated": ["all"], "linger": LINGER_S, "local": disk, "local_keep": 9}

    def save(rank: int, report: Report) -> None:
        state, checkpointer = rank_state(), forebay.Checkpointer(run, **settings)
        for step in (1, 2):
            advance(state, rank)
            save = checkpointer.step(step, state)
            assert save is not None and save.wait_local(60) and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    def go_on(rank: int) -> Any:
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        if rank == alone:
            away = forebay.CheckpointError("the disk is away")
            _native.look_local = (lambda _: found) if found else raising(away)  # type: ignore[assignment]
        state = rank_state()
        with forebay.Checkpointer(run, **settings) as checkpointer:
            step = checkpointer.restore(state)
            advance(state, rank)
            save = checkpointer.step(3, state)
            assert save is not None and save.wait_local(60) and checkpointer.restored is not None
            return step, checkpointer.restored.tier

    children = start_ranks(2, save, with_gloo=False)
    agents = [int(child.line()) for child in children]
    for child in children:
        child.kill()
    assert run_ranks(2, go_on, with_gloo=False) == [[2, "arena"]] * 2
    wait_until(lambda: not any(map(is_running, agents)))
    there = sorted((int(path.parts[-3]), path.name[:6]) for path in files(disk, "seals/*/*/*.json"))
    assert there == [(step, f"{rank:06}") for step in (1, 2, 3) for rank in (0, 1)]
    assert len(files(disk, "shards/*/*/*")) == 6


def test_damage_of_one_ranks_copy_sends_all_to_the_store(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    ranks_save(run, disk, 3)
    newest = max(step for step, *_ in _native.list_steps(f"file://{run}"))
    for shard in files(disk, "shards/*/*/000001-*"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    assert ranks_restore(run, disk) == [[newest, "store", True]] * 2


def test_all_ranks_know_a_save_by_one_number(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    ranks_save(tmp_path / "run", disk, 3)
    numbers = []
    for step in (2, 3):
        seals = [json.loads(path.read_text())["body"]["seal"] for path in files(disk, f"seals/{step:020}/*/*.json")]
        assert len(seals) == 2
        (known,) = {seal["round"] for seal in seals}
        numbers.append(known)
    assert numbers[0] != numbers[1] and all(re.fullmatch("[0-9a-f]{16}", known) for known in numbers)


def test_a_step_that_only_the_disk_has_is_told_where_another_number_of_ranks_goes_on(gate: Gate, tmp_path: Path) -> None:
    """Nobody but as many ranks as saved it can commit it: that said which file was missing."""
    place, disk = f"s3://checkpoints/{tmp_path.name}-{time.time_ns()}", tmp_path / "disk"
    gate.open()
    ranks_save(place, disk, 2, gate.shut)
    gate.open()
    state = rank_state()
    with forebay.Checkpointer(place, replicated=["all"], local=disk) as checkpointer:
        with pytest.warns(forebay.CheckpointWarning, match="the 2 ranks that saved differ"):
            assert checkpointer.restore(state) == 2
        with pytest.warns(forebay.CheckpointWarning, match="step 2 stays .*: it was saved by 2 ranks, and the job has 1"):
            save = checkpointer.save_now(3, state)
            assert save is not None and save.wait_durable(60)
            checkpointer.wait()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_only_the_disk_has_is_brought_to_the_store(gate: Gate, tmp_path: Path, ranks: int) -> None:
    place, disk = f"s3://checkpoints/{tmp_path.name}-{time.time_ns()}", tmp_path / "disk"
    gate.open()
    if ranks == 2:
        ranks_save(place, disk, 2, gate.shut)
        gate.open()
        assert [entry[0] for entry in _native.list_steps(place)] == [1]
        assert ranks_restore(place, disk) == [[2, "local", True]] * 2
    else:

        def work(report: Report) -> None:
            checkpointer = save_steps(place, disk, 1)
            report(str(checkpointer._agent.pid))
            signal.sigwait([signal.SIGUSR1])
            save = checkpointer.step(2, state_of(2))
            assert save is not None and save.wait_local(60) and not save.durable
            report("local")
            signal.pause()

        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        child = Child(work)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        agent = int(child.line())
        gate.shut()
        os.kill(child.pid, signal.SIGUSR1)
        assert child.line() == "local"
        end(agent)
        child.kill()
        gate.open()
        report, checkpointer = restored(place, disk)
        assert (report.step, report.tier) == (2, "local")
        save = checkpointer.step(3, state_of(3))
        assert save is not None and save.wait_durable(60)
        checkpointer.close()
    listed = [(step, incarnation) for step, incarnation, *_ in _native.list_steps(place)]
    assert sorted(listed) == [(1, 1), (2, 1), (3, 2)], "as the start that saved it would have brought it"
    assert _native.verify(place, None) == []
    assert len(files(disk, f"seals/{2:020}/*/*.durable")) == ranks


def test_a_step_of_a_start_that_the_store_never_knew_stays_on_the_disk(gate: Gate, tmp_path: Path) -> None:
    place, disk = f"s3://checkpoints/{tmp_path.name}-{time.time_ns()}", tmp_path / "disk"

    def work(report: Report) -> None:
        checkpointer = forebay.Checkpointer(place, every=1, local=disk)
        save = checkpointer.step(1, state_of(1))
        assert save is not None and save.wait_local(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    child = Child(work)
    agent = int(child.line())
    end(agent)
    child.kill()
    gate.open()
    report, checkpointer = restored(place, disk)
    assert (report.step, report.tier) == (1, "local")
    with pytest.warns(forebay.CheckpointWarning, match="step 1 stays on the local disk alone.*never heard"):
        save = checkpointer.step(2, state_of(2))
        assert save is not None and save.wait_durable(60)
        checkpointer._pass_warnings_on()
    checkpointer.close()
    assert checkpointer.steps() == [2]


def test_copies_of_a_start_that_the_store_never_knew_count_after_what_it_restored(gate: Gate, tmp_path: Path) -> None:
    place, disk = f"s3://checkpoints/{tmp_path.name}-{time.time_ns()}", tmp_path / "disk"
    gate.open()
    for step in (1, 2):
        # Two starts: the newest is not the one whose step is restored.
        with forebay.Checkpointer(place, every=1) as earlier:
            earlier.step(step, state_of(step))

    def work(report: Report) -> None:
        checkpointer = forebay.Checkpointer(place, every=1, local=disk)
        assert checkpointer.restore(state_of(-1), step=1) == 1
        report("restored")
        signal.sigwait([signal.SIGUSR1])
        save = checkpointer.step(2, state_of(2))
        assert save is not None and save.wait_local(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    child = Child(work)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert child.line() == "restored"
    gate.shut()
    os.kill(child.pid, signal.SIGUSR1)
    end(int(child.line()))
    child.kill()
    gate.open()
    report, _ = restored(place, disk)
    assert (report.step, report.tier, report.passed_over) == (2, "local", ())
    with forebay.Checkpointer(place, every=1) as elsewhere:
        elsewhere.step(3, state_of(3))
    report, _ = restored(place, disk)
    assert (report.step, report.tier) == (3, "store") and "started elsewhere" in report.passed_over[0]


def test_the_death_of_ranks_and_agents_at_any_moment_loses_no_common_copy(tmp_path: Path) -> None:
    for seed in rounds(2):
        place, disk = tmp_path / f"run{seed}", tmp_path / f"disk{seed}"

        def work(rank: int, report: Report) -> None:
            state = rank_state()
            checkpointer = forebay.Checkpointer(place, every=1, keep=2, replicated=["all"], local=disk)
            for step in range(1, 1000):
                advance(state, rank)
                save = checkpointer.step(step, state)
                if step == 1:
                    report(str(checkpointer._agent.pid))
                assert save is not None and save.wait_local(60)
                report(str(step))

        children = start_ranks(2, work, with_gloo=False)
        agents = [int(child.line()) for child in children]
        assert [child.line() for child in children] == ["1", "1"]
        time.sleep(random.Random(seed).uniform(0, 0.3))
        for pid in agents + [child.pid for child in children]:
            os.kill(pid, signal.SIGKILL)
        copied = []
        for child in children:
            lines = child._lines.read().split()
            child.join()
            copied.append(max([1, *map(int, lines)]))
        (step, tier, right), other = ranks_restore(place, disk)
        assert other == [step, tier, right] and right, f"seed {seed}: {step} {tier} {other}"
        assert step >= min(copied), f"seed {seed}: {step}, copied were {copied}"
        assert _native.verify(f"file://{place}", None) == [], f"seed {seed}"


def hanging(step: Any) -> Any:
    """A copy on a disk that begins to hang once it is read."""
    return Instead(step, read=raising(forebay.CheckpointUnavailable("the local disk did not answer for 60 s")))


def test_a_disk_that_hangs_gives_way_to_the_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    with forebay.Checkpointer(run, local=disk) as checkpointer:
        for step in (1, 2):
            checkpointer.save_now(step, {"t": torch.full((9,), step)}).wait_durable()
    opened, open_local = [], _native.open_local

    def hang(directory: str, named: Any) -> Any:
        opened.append(named)
        return hanging(open_local(directory, named))

    monkeypatch.setattr(_native, "open_local", hang)
    state = {"t": torch.zeros(9, dtype=torch.int64)}
    with forebay.Checkpointer(run, local=disk) as checkpointer:
        with pytest.warns(forebay.CheckpointWarning, match="step 2 on the local disk is not used: .*did not answer"):
            assert checkpointer.restore(state) == 2
        assert checkpointer.restored is not None and checkpointer.restored.tier == "store"
        assert checkpointer.restored.passed_over == ("local: the local disk did not answer for 60 s",)
        # The other copy there is not waited for as well.
        assert checkpointer.copies_hung == 1 and len(opened) == 1
        assert state["t"].tolist() == [2] * 9
        checkpointer.save_now(3, state).wait_durable()


def test_a_disk_that_hangs_for_one_rank_is_left_by_all(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"

    def save(rank: int) -> None:
        with forebay.Checkpointer(run, local=disk) as checkpointer:
            for step in (1, 2):
                checkpointer.save_now(step, {"t": torch.full((9,), step + 10 * rank)}).wait_durable()

    def restore(rank: int) -> Any:
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        if rank == 1:
            open_local = _native.open_local
            _native.open_local = lambda *words: hanging(open_local(*words))  # type: ignore[assignment]
        state = {"t": torch.zeros(9, dtype=torch.int64)}
        with forebay.Checkpointer(run, local=disk) as checkpointer:
            checkpointer.restore(state)
            assert checkpointer.restored is not None
            return checkpointer.restored.tier, checkpointer.copies_hung, state["t"].tolist()

    run_ranks(2, save)
    assert run_ranks(2, restore) == [["store", 1, [2] * 9], ["store", 1, [12] * 9]]
