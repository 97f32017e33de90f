"""Jobs on several hosts that are killed, or lose a host: what they go on from is in the memory of the hosts that are left."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist

import forebay
from forebay import _hosts, _native, _replicas, _together

from .conftest import Child, arenas_of, chances, wait_until
from .hosts import Hosts, Report, Work, ddp_parts, hosts, train  # noqa: F401  (one is a fixture)
from .test_crash import is_running
from .test_dcp import numbers
from .test_ranks import fsdp_parts, fsdp_values
from .test_restart import LINGER_S, end
from .torchrun_program import KILLED_AT, LAST


def killed(hosts: Hosts, work: Work) -> list[int]:
    """Kills a job of four ranks once each reported its agent; gives these."""
    children = hosts.start(4, work)
    agents = [int(child.line()) for child in children]
    for child in children:
        child.kill()
    return agents


def held(hosts: Hosts, place: Path, parts: Callable[[int], dict[str, Any]], replicas: int = 0) -> list[int]:
    """Kills a job whose last step is in the memory of both hosts, and with `replicas` there alone; gives its agents."""

    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(place, every=1, linger=LINGER_S, replicas=replicas)
        state = parts(1)
        for step in (1, 2):
            train(state, 1)
            save = checkpointer.step(step, state)
            assert save is not None and (step == 2 or save.wait_sealed(60))
            if replicas and step == 1:
                assert save.wait_durable(60)
                dist.barrier()
                if rank == 0:
                    (place / "shards").rename(place / "no-shards")
                    (place / "shards").touch()
                dist.barrier()
        assert save is not None
        with contextlib.suppress(forebay.CheckpointError):
            # That it was not saved may have been heard by then.
            save.wait_replicated(60)
        assert save.replicated
        report(str(checkpointer._agent.pid))
        signal.pause()

    return killed(hosts, work)


def flip_memory(agent: int) -> None:
    """Flips a bit in each KiB of what an agent holds of tensors."""
    # One memory may be open twice, or an older one still, while the agent takes it over.
    flipped = 0
    for arena in {arena.stat().st_ino: arena for arena in arenas_of(agent)}.values():
        with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for start in range(16384, len(memory), 1024):
                if any(memory[start : start + 1024]):
                    memory[start + 512] ^= 1
                    flipped += 1
    assert flipped


def goes_on(
    hosts: Hosts,
    place: Path,
    parts: Callable[[int], dict[str, Any]],
    values: Callable[[dict[str, Any]], Any],
    first: int = 0,
    ranks: int = 4,
) -> list[Any]:
    """What a job that is started again has: the step, where it was read, whether all is as it was, warnings, and files of the store
    that were read."""

    def restore(rank: int) -> Any:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with forebay.Checkpointer(place, every=1, linger=0.0) as checkpointer:
                state, expected = parts(2), parts(1)
                step = checkpointer.restore(state)
                restored = checkpointer.restored
        train(expected, 2)
        right = values(state) == values(expected) and state["n"] == 2
        texts = [str(one.message) for one in told if one.category is forebay.CheckpointWarning]
        assert restored is not None
        return [step, restored.tier, right, texts]

    return hosts.run(ranks, restore, first)


def parameters(state: dict[str, Any]) -> Any:
    return [parameter.tolist() for parameter in state["model"].parameters()]


@pytest.mark.parametrize("parts, values", [(fsdp_parts, fsdp_values), (ddp_parts, parameters)])
def test_a_killed_job_goes_on_from_the_memory_of_its_hosts(
    hosts: Hosts, tmp_path: Path, parts: Callable[[int], dict[str, Any]], values: Callable[[dict[str, Any]], Any]
) -> None:
    """Of what all ranks hold alike, each wrote a part, and has the others' from the other host."""
    place = tmp_path / "run"
    agents = held(hosts, place, parts)
    assert goes_on(hosts, place, parts, values) == [[2, "arena", True, []]] * 4
    for agent in agents:
        end(agent)
    assert _native.verify(f"file://{place}", None) == []


def test_a_killed_job_goes_on_whichever_host_its_ranks_are_on(hosts: Hosts, tmp_path: Path) -> None:
    place = tmp_path / "run"
    agents = held(hosts, place, fsdp_parts)
    assert goes_on(hosts, place, fsdp_parts, fsdp_values, first=1) == [[2, "arena", True, []]] * 4
    for agent in agents:
        end(agent)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("parts, values", [(fsdp_parts, fsdp_values), (ddp_parts, parameters)])
def test_a_job_that_lost_a_host_goes_on_from_the_copies_of_another(
    hosts: Hosts,
    tmp_path: Path,
    parts: Callable[[int], dict[str, Any]],
    values: Callable[[dict[str, Any]], Any],
    lost: int,
) -> None:
    """Its ranks are where they were, or those of the host that is left on another one; starts that end before they save lose
    nothing."""
    place = tmp_path / "run"
    agents = held(hosts, place, parts, replicas=1)
    lost_agents, left = (agents[:2], agents[2:]) if lost == 0 else (agents[2:], agents[:2])
    for agent in lost_agents:
        end(agent)
    for first in (0, 1):
        assert goes_on(hosts, place, parts, values, first) == [[2, "peer", True, []]] * 4
    assert forebay.Checkpointer(place).steps() == [1]
    for agent in left:
        end(agent)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_was_sealed_comes_to_the_store_though_a_host_was_lost_before(hosts: Hosts, tmp_path: Path, lost: int) -> None:
    """The store is away as the host is lost. What ranks there had sealed, the agents store that keep the copies."""
    place, away = tmp_path / "run", tmp_path / "away"

    def work(rank: int, report: Report) -> None:
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        checkpointer, state = forebay.Checkpointer(place, every=1, linger=LINGER_S, replicas=1), fsdp_parts(1)
        for step in (1, 2):
            train(state, 1)
            save = checkpointer.step(step, state)
            assert save is not None and save.wait_replicated(60) and (step == 2 or save.wait_durable(60))
            dist.barrier()
            if step == 1 and rank == 0:
                place.rename(away)
            dist.barrier()
        report(str(checkpointer._agent.pid))
        signal.pause()

    def go_on(rank: int) -> Any:
        with forebay.Checkpointer(place, every=1, linger=0.0) as checkpointer:
            state = fsdp_parts(2)
            step, restored = checkpointer.restore(state), checkpointer.restored
            assert restored is not None
            train(state, 1)
            save = checkpointer.step(3, state)
            assert save is not None and save.wait_durable(60)
        return [step, restored.tier]

    agents = killed(hosts, work)
    for agent in agents[2 * lost : 2 * lost + 2]:
        end(agent)
    away.rename(place)
    assert hosts.run(4, go_on) == [[2, "peer"]] * 4
    # Agents of which a successor has what they held stay for what is under way.
    wait_until(lambda: not any(map(is_running, agents)))
    assert _native.verify(f"file://{place}", None) == []
    assert forebay.Checkpointer(place).steps() == [1, 2, 3]

    def restore(rank: int) -> Any:
        state, expected = fsdp_parts(2), fsdp_parts(1)
        step = forebay.Checkpointer(place).restore(state, step=2)
        train(expected, 2)
        return [step, fsdp_values(state) == fsdp_values(expected)]

    assert hosts.run(2, restore) == [[2, True]] * 2


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_fewer_ranks_go_on_from_the_memory_of_all(hosts: Hosts, tmp_path: Path, lost: Optional[int]) -> None:
    """As where a host is lost and there is no other: what was sharded over four is over two."""
    place = tmp_path / "run"
    agents = held(hosts, place, fsdp_parts, replicas=1)
    for agent in [] if lost is None else agents[2 * lost : 2 * lost + 2]:
        end(agent)
    tier = "arena" if lost is None else "peer"
    assert goes_on(hosts, place, fsdp_parts, fsdp_values, ranks=2) == [[2, tier, True, []]] * 2
    for agent in agents:
        end(agent)


def test_a_step_in_the_store_comes_before_an_older_one_in_memory(hosts: Hosts, tmp_path: Path) -> None:
    """Of the newest step a lost host had no copies, and all ranks' parts of the one before are in memory."""
    place = tmp_path / "run"

    def work(rank: int, report: Report) -> None:
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        checkpointer, state = forebay.Checkpointer(place, every=1, linger=LINGER_S, replicas=1), fsdp_parts(1)
        for step in (1, 2):
            train(state, 1)
            save = checkpointer.step(step, state)
            assert save is not None and save.wait_durable(60) and save.replicated == (step == 1)
            nowhere = {"addresses": ["127.0.0.1"], "port": 9, "secret": "none"}
            checkpointer._session.replicate_to(json.dumps(nowhere))
        report(str(checkpointer._agent.pid))
        signal.pause()

    agents = killed(hosts, work)
    for agent in agents[2:]:
        end(agent)
    assert goes_on(hosts, place, fsdp_parts, fsdp_values) == [[2, "store", True, []]] * 4
    for agent in agents[:2]:
        end(agent)


def test_hosts_that_are_lost_at_random_moments_cost_no_step_that_had_its_copies(hosts: Hosts, tmp_path: Path) -> None:
    """The store is behind by one or two steps. Each time a host is lost with all that it held, at any moment after the new start's
    first copies, and with it what is left of the job but the other host's agent."""
    place, notes, agents, tiers = tmp_path / "run", tmp_path / "notes", set[int](), []
    notes.mkdir()

    def note(rank: int, name: str, number: int) -> None:
        (notes / f"new-{rank}").write_text(str(number))
        (notes / f"new-{rank}").rename(notes / f"{name}-{rank}")

    def noted(rank: int, name: str) -> int:
        path = notes / f"{name}-{rank}"
        return int(path.read_text()) if path.exists() else 0

    def work(rank: int, report: Report) -> None:
        # A step that other ranks sealed in vain is told by those who held it.
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        checkpointer = forebay.Checkpointer(place, every=1, linger=LINGER_S, replicas=1, flush_rate="2MiB")
        state = {"t": torch.full((300_000,), -1.0), "n": 0}
        step = checkpointer.restore(state) or 0
        restored = checkpointer.restored
        report(json.dumps([step, bool((state["t"] == 2 * step + rank).all()), None if restored is None else restored.tier]))
        while True:
            step += 1
            state["t"].fill_(2 * step + rank)
            save = checkpointer.step(step, state)
            note(rank, "agent", checkpointer._agent.pid)
            assert save is not None
            if save.wait_replicated(60):
                note(rank, "copied", step)

    def least_copied() -> int:
        return min(noted(rank, "copied") for rank in (0, 1))

    def start() -> list[Child]:
        children, least = hosts.start(2, work), least_copied()
        for step, is_right, tier in [json.loads(child.line()) for child in children]:
            assert step >= least and (step == 0 or is_right), (step, least, is_right, tier)
            tiers.append(tier)
        wait_until(lambda: least_copied() > step)
        return children

    for chance in chances(3, 60):
        children, lost = start(), chance.randrange(2)
        time.sleep(chance.uniform(0, 3))
        # A trainer that lives would start another agent.
        children[lost].kill()
        end(noted(lost, "agent"))
        time.sleep(chance.choice([0, chance.uniform(0, 1)]))
        if children[1 - lost] in Child.alive:
            children[1 - lost].kill()
        agents.add(noted(1 - lost, "agent"))
    for rank, child in enumerate(start()):
        child.kill()
        agents.add(noted(rank, "agent"))
    assert set(tiers) == {None, "peer"}
    for agent in agents:
        end(agent)
    assert _native.verify(f"file://{place}", None) == []


def test_copies_are_made_of_each_save_whatever_becomes_of_agents(hosts: Hosts, tmp_path: Path) -> None:
    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(tmp_path / "run", every=1, linger=LINGER_S, replicas=1)
        state, found = {"w": numbers(2000) + rank}, []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(1, 5):
                if step == 3:
                    # Rank 0's copies are with rank 2, and rank 2's are with rank 0.
                    dist.barrier()
                if step == 3 and rank == 2:
                    os.kill(checkpointer._agent.pid, signal.SIGKILL)
                    checkpointer._agent.wait()
                save = checkpointer.step(step, state)
                assert save is not None and save.wait_durable(60)
                found.append([save.replicated, save.timeline()["replicated_s"] is not None])
        texts = [str(one.message) for one in told if one.category is forebay.CheckpointWarning]
        metrics = [line for line in checkpointer.metrics().splitlines() if line.startswith("forebay_replicas_missed")]
        report(json.dumps([found, checkpointer.replicas_missed, metrics[-1].split()[-1], texts]))
        checkpointer.close()

    children = hosts.start(4, work)
    results = [json.loads(child.line()) for child in children]
    assert [child.join() for child in children] == [0] * 4
    for rank, (found, missed, counted, texts) in enumerate(results):
        assert found == [[True, True]] * 4 and (missed, counted) == (0, "0"), (rank, found)
        assert len(texts) == (rank == 2) and all("another one was started" in text for text in texts), texts


def test_a_damaged_part_is_read_of_its_copy(hosts: Hosts, tmp_path: Path) -> None:
    place = tmp_path / "run"
    agents = held(hosts, place, fsdp_parts, replicas=1)
    flip_memory(agents[3])
    for step, tier, right, told in goes_on(hosts, place, fsdp_parts, fsdp_values):
        assert (step, tier, right) == (2, "peer", True), (step, tier)
        assert len(told) == 1 and "step 2 in memory is not used" in told[0] and "damaged" in told[0], told
    for agent in agents:
        end(agent)


# Who cannot be reached any more is tried for 10 s for each save.
def test_saves_go_on_without_copies_where_a_host_takes_none(hosts: Hosts, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(_replicas, "addresses", lambda: ["127.0.0.1"])

    def work(rank: int) -> Any:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with forebay.Checkpointer(tmp_path / "run", every=1, replicas=1) as checkpointer:
                for step in (1, 2):
                    save = checkpointer.step(step, {"w": numbers(9)})
                    assert save is not None and save.wait_durable(60) and not save.replicated
                    assert not save.wait_replicated(0.1)
                missed = checkpointer.replicas_missed
        return [missed, [str(one.message) for one in told if one.category is forebay.CheckpointWarning]]

    for missed, told in hosts.run(2, work):
        assert missed == 2 and len(told) == 1, told
        assert "saves go on without copies in another host's memory (replicas): 127.0.0.1 (port " in told[0], told


def test_a_job_on_one_host_has_no_copies_and_is_told(tmp_path: Path, capfd: Any) -> None:
    with forebay.Checkpointer(tmp_path, every=1, replicas=1) as checkpointer:
        save = checkpointer.step(1, {"w": numbers(9)})
        assert save is not None and save.wait_durable(60) and not save.replicated
        assert checkpointer.replicas_missed == 1
    told = capfd.readouterr().err
    assert "2 snapshots of " in told and told.endswith("; all ranks are on one host, and no other has copies\n"), told


@pytest.mark.parametrize(
    "hosts_of, expected",
    [
        ([0, 0, 0], [None] * 3),
        ([0, 1], [1, 0]),
        ([0, 0, 2, 2], [2, 3, 0, 1]),
        ([0, 1, 0, 1], [1, 0, 3, 2]),
        ([0, 0, 2, 3, 3], [2, 2, 3, 0, 1]),
    ],
)
def test_each_host_has_its_copies_with_the_next(hosts_of: list[int], expected: list[Optional[int]]) -> None:
    assert [_replicas.keeper_of(rank, hosts_of) for rank in range(len(hosts_of))] == expected


@pytest.mark.parametrize("trouble", ["hidden", "damaged"])
def test_what_does_not_come_from_another_hosts_memory_is_waited_for_in_the_store(
    hosts: Hosts, tmp_path: Path, monkeypatch: Any, trouble: str
) -> None:
    place = tmp_path / "run"
    agents = held(hosts, place, ddp_parts)
    if trouble == "hidden":
        new_door = _hosts.new_door

        def hidden() -> Any:
            door, address = new_door()
            return door, {**address, "addresses": ["127.0.0.1"]}

        monkeypatch.setattr(_together, "new_door", hidden)
        fact = "what other hosts' memory has did not come from there"
    else:
        # What is damaged before it is in the store is lost.
        wait_until(lambda: forebay.Checkpointer(place).steps() == [1, 2])
        flip_memory(agents[3])
        fact = "damaged"
    for step, tier, right, told in goes_on(hosts, place, ddp_parts, parameters):
        assert (step, tier, right) == (2, "store", True)
        assert "step 2 in memory is not used" in told[0] and fact in told[0], told
        assert len(told) == (1 if trouble == "damaged" else 2) and all("cannot be reached" in text for text in told[1:])
    for agent in agents:
        end(agent)


def test_torchrun_starts_a_job_on_two_hosts_again(hosts: Hosts, tmp_path: Path) -> None:
    """A rank of it was killed: what DDP's ranks hold is on either host in part."""
    (tmp_path / "kill").touch()
    found = hosts.torchrun(tmp_path, "train", "--max-restarts=1")
    assert not (tmp_path / "kill").exists(), "a rank was killed"
    assert found == [{"start": KILLED_AT, "tier": "arena", "wrong": [], "losses_are_equal": True}] * 4
    assert _native.verify(f"file://{tmp_path}/run", None) == []
    assert hosts.torchrun(tmp_path, "restore") == [{"start": LAST, "wrong": []}] * 4


def test_torchrun_goes_on_with_the_host_that_is_left(hosts: Hosts, tmp_path: Path) -> None:
    """All that ran on the other one is killed, torchrun as well: half of the ranks go on from the memory of all."""
    (tmp_path / "kill").touch()
    found = hosts.torchrun(tmp_path, "shrink", "--max-restarts=1", lost=1)
    assert not (tmp_path / "kill").exists(), "a host was lost"
    assert found == [{"start": KILLED_AT, "tier": "peer", "ranks": 2, "wrong": []}] * 2
    assert _native.verify(f"file://{tmp_path}/run", None) == []
