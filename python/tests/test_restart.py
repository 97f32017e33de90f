"""A trainer that was killed goes on from what its agent still holds in memory; what cannot be used is not."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay import _held, _native
from forebay._held import Memory

from .conftest import Child, arenas_of, rounds, wait_until
from .test_crash import is_running
from .test_ranks import start_ranks

Report = Callable[[str], None]

LINGER_S = 120.0
"""Longer than any test takes."""


def held_until(place: Path, last: int, first: int = 1) -> Child:
    """A trainer that saves steps and waits to be killed; gives the process, all of whose steps are in the store."""

    def work(report: Report) -> None:
        checkpointer = forebay.Checkpointer(place, every=1, linger=LINGER_S)
        state = {"t": torch.zeros(300_000), "n": 0}
        for step in range(first, last + 1):
            state["t"] += 1
            state["n"] = step
            save = checkpointer.step(step, state)
        assert save is not None and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    return Child(work)


def kill(child: Child) -> int:
    """Kills a trainer; gives its agent."""
    agent = int(child.line())
    child.kill()
    return agent


def end(agent: int) -> None:
    """Ends an agent that nobody will come to; one whose memory was taken over may have ended."""
    with suppress(ProcessLookupError):
        os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not is_running(agent))


def restored(place: Path, **arguments: Any) -> tuple[dict[str, Any], forebay.Restored, forebay.Checkpointer]:
    checkpointer = forebay.Checkpointer(place, every=1, linger=LINGER_S, **arguments)
    state = {"t": torch.full((300_000,), -1.0), "n": -1}
    address = state["t"].data_ptr()
    step = checkpointer.restore(state)
    assert checkpointer.restored is not None and checkpointer.restored.step == step == state["n"]
    assert state["t"].data_ptr() == address and bool((state["t"] == step).all()), "in place, and whole"
    return state, checkpointer.restored, checkpointer


def memory_of(agent: int) -> set[int]:
    """The arenas that a process has mapped, by inode."""
    lines = Path(f"/proc/{agent}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:forebay-checkpoint" in line}


def damage_newest_start(run: Path) -> None:
    """One bit of what says who started last."""
    record = max((run / "runs").iterdir())
    data = bytearray(record.read_bytes())
    data[data.index(b'"nonce"') + 1] ^= 1
    record.write_bytes(data)


def test_a_killed_trainer_goes_on_without_the_store(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    agent = kill(held_until(run, 3))
    # It may be about to look for old steps, which are away then.
    warnings.filterwarnings("ignore", ".*old steps were not deleted", forebay.CheckpointWarning)
    arenas, before = memory_of(agent), memory_of(os.getpid())
    run.rename(away)
    with pytest.warns(forebay.CheckpointWarning, match="the directory is missing, and step 3 is restored from memory"):
        state, report, checkpointer = restored(run)
    assert (report.step, report.tier, report.passed_over) == (3, "arena", ())
    assert report.bytes >= state["t"].nbytes and json.dumps(report.as_dict())
    assert not run.exists(), "nothing was looked for there"
    away.rename(run)
    state["n"], state["t"] = 4, state["t"] + 1
    save = checkpointer.step(4, state)
    assert save is not None and save.wait_durable(60)
    wait_until(lambda: not is_running(agent))
    assert memory_of(os.getpid()) - before == memory_of(checkpointer._agent.pid) == arenas, "the memory is the same"
    own = checkpointer._agent.pid
    checkpointer.close()
    assert checkpointer.steps() == [1, 2, 3, 4] and not is_running(own)
    assert memory_of(os.getpid()) <= before, "nor does one that is closed keep it"
    assert _native.verify(f"file://{run}", None) == []
    with forebay.Checkpointer(run) as after:
        assert after.restore(state) == 4 and after.restored is not None
        assert after.restored.tier == "store", "a trainer that is done leaves nothing"


def test_the_place_where_agents_are_found_is_handed_from_one_to_the_next(tmp_path: Path) -> None:
    name = f"\0{forebay.Checkpointer(tmp_path)._ladder.arena.place(0)}"

    def holder() -> int:
        """The process that visitors are told to find there: its memory is what they ask to be let go of."""
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(name)
            return int(struct.unpack("iII", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def work(report: Report) -> None:
        state, restored_, checkpointer = restored(tmp_path)
        state["n"], state["t"] = restored_.step + 1, state["t"] + 1
        checkpointer.step(restored_.step + 1, state).wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    agents = [kill(held_until(tmp_path, 1))]
    for _ in range(3):
        wait_until(lambda: holder() == agents[-1])
        agents.append(kill(Child(work)))
    wait_until(lambda: holder() == agents[-1])
    assert len(set(agents)) == 4
    end(agents[-1])
    with pytest.raises(ConnectionRefusedError):
        holder()


def test_a_directory_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose server is away answers to nothing, not even whether a directory is there."""
    run = tmp_path / "run"
    agent = kill(held_until(run, 3))
    answers = threading.Event()
    monkeypatch.setattr(_held, "PATIENCE_S", 0.1)

    def hang(url: str, patience_s: float) -> Any:
        raise forebay.CheckpointUnavailable(f"{url} did not answer for {patience_s} s")

    monkeypatch.setattr(_held._native, "survey", hang)
    monkeypatch.setattr(_held, "exists", lambda url: answers.wait() and False)
    try:
        with pytest.warns(forebay.CheckpointWarning, match="step 3 is restored from memory, and it is not known.*0.1 s"):
            state, report, checkpointer = restored(run)
    finally:
        answers.set()
    assert (report.step, report.tier, report.passed_over) == (3, "arena", ())
    checkpointer.close()
    end(agent)


def test_a_step_that_never_reached_the_store_is_restored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = held_until(run, 2)
    agent = int(child.line())
    child.kill()

    def work(report: Report) -> None:
        _, told, checkpointer = restored(run)
        assert told.tier == "arena"
        (run / "shards").rename(run / "elsewhere")
        (run / "shards").write_text("in the way")
        state = {"t": torch.full((300_000,), 3.0), "n": 3}
        save = checkpointer.step(3, state)
        assert save is not None
        while save._progress() != "failed":
            checkpointer._listen(0.1)
        report(str(checkpointer._agent.pid))
        signal.pause()

    second = kill(Child(work))
    wait_until(lambda: not is_running(agent))
    (run / "shards").unlink()
    (run / "elsewhere").rename(run / "shards")
    lost = "step 3, which a killed trainer had sealed, was not saved by its agent.*memory alone"
    with pytest.warns(forebay.CheckpointWarning, match=lost):
        _, report, checkpointer = restored(run)
        checkpointer._ensure_agent()
        checkpointer._listen(0.1)
    assert (report.step, report.tier) == (3, "arena")
    assert checkpointer.steps() == [1, 2]
    checkpointer.close()
    wait_until(lambda: not is_running(second))


def flip(agent: int, step: int) -> None:
    """Flips one bit of a step in an agent's memory."""
    for entry in arenas_of(agent):
        with open(entry, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            value = torch.full((1,), float(step)).numpy().tobytes() * 1000
            at = memory.find(value)
            assert at > 0
            memory[at + 1234] ^= 1
            return
    raise AssertionError("the agent holds no arena")


def test_a_flipped_bit_is_caught_and_the_store_is_used(tmp_path: Path) -> None:
    agent = kill(held_until(tmp_path, 2))
    flip(agent, 2)
    with pytest.warns(forebay.CheckpointWarning, match="step 2 in memory is not used.*`t`.*agent of rank 0 holds"):
        _, report, checkpointer = restored(tmp_path)
    assert (report.step, report.tier) == (2, "store") and "`t`" in report.passed_over[0]
    save = checkpointer.step(3, {"t": torch.zeros(300_000), "n": 3})
    assert save is not None and save.wait_durable(60)
    checkpointer.close()
    wait_until(lambda: not is_running(agent))


def test_nothing_is_left_of_a_damaged_step_without_a_store(tmp_path: Path) -> None:
    agent = kill(held_until(tmp_path / "run", 1))
    flip(agent, 1)
    (tmp_path / "run").rename(tmp_path / "away")
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.warns(forebay.CheckpointWarning), pytest.raises(forebay.CheckpointCorrupt, match="may hold anything"):
            checkpointer.restore({"t": torch.zeros(300_000), "n": 0})
    end(agent)


def test_a_killed_agent_leaves_the_store(tmp_path: Path) -> None:
    child = held_until(tmp_path, 2)
    agent = int(child.line())
    end(agent)
    child.kill()
    _, report, checkpointer = restored(tmp_path)
    assert (report.step, report.tier, report.passed_over) == (2, "store", ())
    checkpointer.close()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_later_start_elsewhere_makes_memory_stale(tmp_path: Path, is_damaged: bool) -> None:
    """Also one whose record cannot be read."""
    agent = kill(held_until(tmp_path, 2))
    # On another host the agent would not be found.
    elsewhere = forebay.Checkpointer(tmp_path, every=1)
    elsewhere._ladder.arena.leave()
    elsewhere.restore({"t": torch.zeros(300_000), "n": 0})
    elsewhere.step(3, {"t": torch.full((300_000,), 3.0), "n": 3})
    elsewhere.close()
    if is_damaged:
        damage_newest_start(tmp_path)
    _, report, checkpointer = restored(tmp_path)
    assert (report.step, report.tier) == (3, "store") and "started elsewhere" in report.passed_over[0]
    checkpointer._let_go()

    def work(report: Report) -> None:
        state, told, checkpointer = restored(tmp_path)
        assert told.tier == "store"
        checkpointer.prepare(state)
        report(str(checkpointer._agent.pid))
        signal.pause()

    own = kill(Child(work))
    wait_until(lambda: not is_running(agent) and not is_running(own))
    _, report, checkpointer = restored(tmp_path)
    assert (report.step, report.tier) == (3, "store"), "nor is it passed on to a third start"
    checkpointer.close()


@pytest.mark.parametrize("known", [True, False])
def test_memory_is_newer_than_the_starts_that_its_own_came_after(known: bool) -> None:
    """Until the agent of a start takes its number, that of the one before is the newest, and so is a step of that."""
    before, own = "b" * 32, "c" * 32
    after = [before[:8]] if known else []
    word = {"start": own, "began": ["here", 20], "after": after, "held": [[own, 4], [own, 3]], "durable": [], "kept": []}
    store = _held.Survey(before, 1, [(before[:8], 2)], ("here", 30))
    reason = _held._reason_against([word, {**word, "after": []}], (own, 4), store)
    assert reason == (None if known else "the job was started elsewhere since")


@pytest.mark.parametrize(
    "began, is_late", [(("here", 10), True), (("here", 20), False), (("elsewhere", 10), False), (None, False)]
)
def test_memory_is_newer_than_a_start_whose_agent_came_late(began: Optional[tuple[str, int]], is_late: bool) -> None:
    """A trainer was killed before its agent was up, which took its number after that of the next start, on this host."""
    late, own = "b" * 32, "c" * 32
    word = {"start": own, "began": ["here", 20], "after": [], "held": [[own, 4]], "durable": [], "kept": []}
    reason = _held._reason_against([word, word], (own, 4), _held.Survey(late, 2, [(late[:8], 2)], began))
    assert reason == (None if is_late else "the job was started elsewhere since")


def test_a_living_trainer_is_left_alone(tmp_path: Path) -> None:
    child = held_until(tmp_path, 2)
    agent = int(child.line())
    _, report, checkpointer = restored(tmp_path)
    assert (report.step, report.tier) == (2, "store")
    checkpointer.close()
    child.kill()
    _, report, checkpointer = restored(tmp_path)
    assert (report.step, report.tier) == (2, "arena"), "an onlooker changes nothing"
    checkpointer.close()
    assert is_running(agent), "one that only looks takes nothing over"
    end(agent)


def test_an_agent_waits_no_longer_than_it_was_told(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, every=1, linger=0.2)
        checkpointer.step(1, {"n": 1})
        report(str(checkpointer._agent.pid))
        signal.pause()

    agent = kill(Child(work))
    wait_until(lambda: not is_running(agent))


def rank_state() -> dict[str, Any]:
    return {"own": torch.zeros(50_000), "all": torch.zeros(200_000), "n": 0}


def advance(state: dict[str, Any], rank: int) -> None:
    state["own"] += 1 + rank
    state["all"] += 1
    state["n"] += 1


def rank_restores(place: Any, **settings: Any) -> list[list[Any]]:
    """Step, tier and whether all is right, of two ranks that restore and then save a step more."""

    def work(rank: int, report: Report) -> None:
        state = rank_state()
        with forebay.Checkpointer(place, every=1, replicated=["all"], linger=LINGER_S, **settings) as checkpointer:
            step = checkpointer.restore(state) or 0
            assert checkpointer.restored is not None
            same = bool((state["own"] == step * (1 + rank)).all() and (state["all"] == step).all())
            report(json.dumps([step, checkpointer.restored.tier, same and state["n"] == step]))
            advance(state, rank)
            save = checkpointer.step(step + 1, state)
            assert save is not None and save.wait_durable(60)

    children = start_ranks(2, work, with_gloo=False)
    lines = [json.loads(child.line()) for child in children]
    assert [child.join() for child in children] == [0, 0]
    return lines


def test_ranks_restore_each_others_parts_from_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def work(rank: int, report: Report) -> None:
        state = rank_state()
        checkpointer = forebay.Checkpointer(run, every=1, replicated=["all"], linger=LINGER_S)
        for step in (1, 2, 3):
            advance(state, rank)
            save = checkpointer.step(step, state)
        assert save is not None and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    agents = [kill(child) for child in start_ranks(2, work, with_gloo=False)]
    # No manifest or shard can be read; the runs' records and the steps' names may be looked at.
    for path in [*run.glob("steps/**/*"), *run.glob("shards/**/*")]:
        if path.is_file():
            path.write_text("damaged")
    assert rank_restores(run) == [[3, "arena", True]] * 2
    for agent in agents:
        wait_until(lambda: not is_running(agent))


def sealed_by_two(place: Path) -> list[int]:
    """Kills two ranks whose newest step is on its way to the store; gives their agents."""

    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(place, rng=False, linger=LINGER_S, flush_rate="128KiB")
        assert checkpointer.save_now(1, {"t": torch.full((50_000,), 1.0)}).wait_durable(60)
        assert checkpointer.save_now(2, {"t": torch.full((50_000,), 2.0)}).wait_sealed(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    return [kill(child) for child in start_ranks(2, work, with_gloo=False)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_from_memory(tmp_path: Path, ranks: int) -> None:
    """What all ranks had together and alike is there, and what is saved next is what the start after it goes on from, of however
    many ranks."""

    def work(rank: int, report: Report) -> None:
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        with forebay.Checkpointer(tmp_path, rng=False, linger=LINGER_S) as checkpointer:
            state = {"t": torch.zeros(50_000)}
            step = checkpointer.restore(state)
            assert checkpointer.restored is not None and step is not None
            report(json.dumps([step, checkpointer.restored.tier, bool((state["t"] == step).all())]))
            state["t"] += 1
            save = checkpointer.save_now(step + 1, state)
            assert save is not None and save.wait_durable(60)
            checkpointer._leave()

    agents = sealed_by_two(tmp_path)
    # The agents of those before, of their number and of another, wait as well.
    for number, step in ((ranks, 2), (2, 3), (ranks, 4)):
        children = start_ranks(number, work, with_gloo=False)
        assert [json.loads(child.line()) for child in children] == [[step, "arena", True]] * number
        assert [child.join() for child in children] == [0] * number
    for agent in agents:
        end(agent)


def test_what_another_number_of_ranks_holds_in_part_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older step was restored, and the newer one saved once more over that of the agents."""
    agents = sealed_by_two(tmp_path)
    wait_until(lambda: forebay.Checkpointer(tmp_path).steps() == [1, 2])
    end(agents[1])
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        assert checkpointer.restore({"t": torch.zeros(50_000)}) == 2
        assert checkpointer.restored is not None and checkpointer.restored.tier == "store"
    end(agents[0])
    # What takes longer is told.
    agents = sealed_by_two(tmp_path)
    end(agents[1])
    monkeypatch.setattr("forebay._others._on_its_way", lambda place: 7)
    monkeypatch.setattr("forebay._others._WAIT_S", 0.0)
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        with pytest.warns(forebay.CheckpointWarning, match="step 7, which 2 ranks sealed on this host, is not in the store"):
            assert checkpointer.restore({"t": torch.zeros(50_000)}) in (1, 2)
    end(agents[0])


def test_memory_that_one_rank_cannot_open_is_left_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, report: Report) -> None:
        state = rank_state()
        advance(state, rank)
        checkpointer = forebay.Checkpointer(tmp_path, every=1, replicated=["all"], linger=LINGER_S)
        save = checkpointer.step(1, state)
        assert save is not None and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    agents = [kill(child) for child in start_ranks(2, work, with_gloo=False)]
    visit = Memory._visit

    def one_is_gone(self: Memory, place: str, rank: int) -> Any:
        # Of the other's; its own it looked for before.
        return None if (self._ranks.rank, rank) == (0, 1) else visit(self, place, rank)

    monkeypatch.setattr(Memory, "_visit", one_is_gone)
    warnings.simplefilter("ignore", forebay.CheckpointWarning)
    assert rank_restores(tmp_path) == [[1, "store", True]] * 2
    for agent in agents:
        wait_until(lambda: not is_running(agent))


def test_a_step_that_one_rank_did_not_seal_is_left_by_all(tmp_path: Path) -> None:
    def work(rank: int, report: Report) -> None:
        state = rank_state()
        checkpointer = forebay.Checkpointer(tmp_path, every=1, replicated=["all"], linger=LINGER_S)
        for step in (1, 2):
            advance(state, rank)
            save = checkpointer.step(step, state)
        assert save is not None and save.wait_durable(60)
        if rank == 1:
            checkpointer._finish_staging = lambda: None  # type: ignore[method-assign]
        advance(state, rank)
        save = checkpointer.step(3, state)
        assert save is not None and (rank == 1 or save.wait_sealed(60))
        report(str(checkpointer._agent.pid))
        signal.pause()

    agents = [kill(child) for child in start_ranks(2, work, with_gloo=False)]
    assert rank_restores(tmp_path) == [[2, "arena", True]] * 2
    for agent in agents:
        end(agent) if is_running(agent) else None


def test_a_rank_whose_agent_is_gone_sends_all_to_the_store(tmp_path: Path) -> None:
    def work(rank: int, report: Report) -> None:
        state = rank_state()
        checkpointer = forebay.Checkpointer(tmp_path, every=1, replicated=["all"], linger=LINGER_S)
        advance(state, rank)
        save = checkpointer.step(1, state)
        assert save is not None and save.wait_durable(60)
        report(str(checkpointer._agent.pid))
        signal.pause()

    agents = [kill(child) for child in start_ranks(2, work, with_gloo=False)]
    end(agents[1])
    assert rank_restores(tmp_path) == [[1, "store", True]] * 2
    wait_until(lambda: not is_running(agents[0]))


def test_the_death_of_all_ranks_at_any_moment_loses_no_common_seal(tmp_path: Path) -> None:
    for seed in rounds(2):
        place = tmp_path / str(seed)

        def work(rank: int, report: Report) -> None:
            state = rank_state()
            checkpointer = forebay.Checkpointer(place, every=1, keep=2, replicated=["all"], linger=LINGER_S)
            for step in range(1, 1000):
                advance(state, rank)
                save = checkpointer.step(step, state)
                assert save is not None and save.wait_sealed(60)
                report(str(step))

        children = start_ranks(2, work, with_gloo=False)
        assert [child.line() for child in children] == ["1", "1"]
        time.sleep(random.Random(seed).uniform(0, 0.3))
        for child in children:
            os.killpg(child.pid, signal.SIGKILL)
        sealed = []
        for child in children:
            lines = child._lines.read().split()
            child.join()
            sealed.append(max([1, *map(int, lines)]))
        (step, tier, right), other = rank_restores(place)
        assert other == [step, tier, right] and right and tier == "arena", f"seed {seed}: {step} {tier} {other}"
        assert step >= min(sealed), f"seed {seed}: {step}, sealed were {sealed}"


def test_a_close_that_was_cut_off_leaves_what_is_sealed_to_the_next_start(tmp_path: Path) -> None:
    """Ctrl-C in the wait of `close` let go of the memory that the sealed step was in."""
    place = f"file://{tmp_path}/run"

    def work(report: Callable[[str], None]) -> None:
        checkpointer = forebay.Checkpointer(place, linger=10, flush_rate="1MiB")
        checkpointer.save_now(1, {"w": torch.arange(1 << 20)}).wait_sealed()
        try:
            # On a busy machine it may come before the wait.
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
            checkpointer.close()
        except KeyboardInterrupt:
            report("cut off")

    child = Child(work)
    assert child.line() == "cut off" and child.join() == 0
    state = {"w": torch.zeros(1 << 20, dtype=torch.int64)}
    with forebay.Checkpointer(place) as checkpointer:
        assert checkpointer.restore(state) == 1
    restored = checkpointer.restored
    assert restored is not None and restored.tier == "arena"
    assert torch.equal(state["w"], torch.arange(1 << 20))
