"""What a host runs out of: disk, slots; and the memory that is taken before the first save."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay import _native

from .conftest import Gate, memory_taken, wait_until
from .test_ranks import run_ranks

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"NO SMALL DISK: mount: {mounted.stderr.strip()}, so that a full disk is not tested")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_flush_rate_is_a_size_and_more_than_nothing(tmp_path: Path) -> None:
    for rate in ("fast", "0", 0, -1):
        with pytest.raises(forebay.CheckpointInvalid, match="flush_rate"):
            forebay.Checkpointer(tmp_path, flush_rate=rate)
    with forebay.Checkpointer(tmp_path, flush_rate="1GiB") as checkpointer:
        checkpointer.save_now(1, {"t": torch.zeros(MIB)}).wait_durable()
        assert checkpointer.steps() == [1]


def test_what_the_ranks_only_together_cannot_say_is_refused_on_all(tmp_path: Path) -> None:
    """Each alone would fit, and all that they have would be uploaded before it was found."""

    def save(rank: int) -> Any:
        checkpointer, length = forebay.Checkpointer(tmp_path, rng=False), _native.text_length
        sent = checkpointer.save_now(1, {"x": torch.zeros(4) + rank, "rank": rank})
        assert sent is not None and sent.wait_durable(60)
        before = sorted(str(path) for path in tmp_path.rglob("*.safetensors"))
        _native.text_length = lambda name, data: 1200 * MIB
        told = []
        for _ in range(3):
            with pytest.raises(forebay.CheckpointInvalid) as refused:
                checkpointer.save_now(2, {"x": torch.ones(4) + rank, "rank": rank})
            told.append(str(refused.value))
        _native.text_length = length
        assert sorted(str(path) for path in tmp_path.rglob("*.safetensors")) == before
        sent = checkpointer.save_now(2, {"x": torch.ones(4) + rank, "rank": rank})
        assert sent is not None and sent.wait_durable(60)
        checkpointer.close()
        return told

    first, second = run_ranks(2, save, with_gloo=False)
    assert first == second and len(set(first)) == 1
    assert re.search(r"2 slices of tensors.* take up to \d+ bytes of text, more than 2147483648 \(hint: ", first[0])
    assert forebay.Checkpointer(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize("mib", [6, 12])
def test_a_full_disk_is_told_and_harms_no_step(small_disk: Path, mib: int) -> None:
    # In one PUT and in parts.
    run = small_disk / "run"
    with forebay.Checkpointer(run, rng=False) as checkpointer:
        checkpointer.save_now(1, {"t": torch.full((3 * MIB,), 1, dtype=torch.uint8)}).wait_durable()
        save = checkpointer.save_now(2, {"t": torch.full((mib * MIB,), 2, dtype=torch.uint8)})
        with pytest.raises(forebay.CheckpointError, match="step 2 was not saved") as told:
            save.wait_durable()
        assert isinstance(told.value, forebay.CheckpointNoSpace)
        assert "No space left" in str(told.value) and "keep fewer steps" in str(told.value)
        # What was written of it is gone, and there is room for another.
        assert checkpointer.steps() == [1] and not (run / f"shards/{2:020}").exists()
        checkpointer.save_now(3, {"t": torch.full((3 * MIB,), 3, dtype=torch.uint8)}).wait_durable()
        assert checkpointer.steps() == [1, 3]
    assert torch.equal(forebay.load(run)["t"], torch.full((3 * MIB,), 3, dtype=torch.uint8))
    assert _native.verify(f"file://{run}", None) == []


CAP_SYS_ADMIN = 21
CAP_SYS_NICE = 23


def without(capability: int) -> None:
    """A program that is started from here on has it not, whoever runs it: PR_CAPBSET_DROP of prctl(2)."""
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def session_level(agent: int) -> Optional[int]:
    """The nice level of an agent's session, where the kernel has one. A process of no session since boot reads nothing."""
    session = Path(f"/proc/{agent}/autogroup")
    words = session.read_text().split() if session.exists() else []
    return int(words[-1]) if words else None


def thread_levels(agent: int) -> set[int]:
    """Nice levels of an agent's threads but the first."""
    levels = set()
    for thread in os.listdir(f"/proc/{agent}/task"):
        # One that ends meanwhile has none.
        with contextlib.suppress(ProcessLookupError):
            levels |= {os.getpriority(os.PRIO_PROCESS, int(thread))} if int(thread) != agent else set()
    return levels


def nice_levels(agent: int) -> set[int]:
    """Of an agent's session and of its threads but the first."""
    level = session_level(agent)
    return thread_levels(agent) | ({level} if level is not None else set())


def test_an_agent_gives_way_but_to_a_trainer_that_waits_or_is_gone(gate: Gate, tmp_path: Path) -> None:
    place = f"s3://checkpoints/{tmp_path.name}-gives-way"
    checkpointer = forebay.Checkpointer(place)
    save = checkpointer.save_now(1, {"t": torch.zeros(MIB, dtype=torch.uint8)})
    agent = checkpointer._agent
    wait_until(lambda: nice_levels(agent.pid) == {19})
    level = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, level - 1)
        os.setpriority(os.PRIO_PROCESS, 0, level)
    except PermissionError:
        pytest.skip("NO CAP_SYS_NICE: that an agent hurries is not tested")
    assert not save.wait_durable(0.25), "it was waited for"
    wait_until(lambda: nice_levels(agent.pid) == {0})
    gate.open()
    save.wait_durable()
    wait_until(lambda: nice_levels(agent.pid) == {19})
    gate.shut()
    checkpointer.save_now(2, {"t": torch.ones(MIB, dtype=torch.uint8)})
    wait_until(lambda: nice_levels(agent.pid) == {19})
    checkpointer._let_go()
    wait_until(lambda: nice_levels(agent.pid) == {0})
    gate.open()
    assert agent.wait(60) == 0 and forebay.load(place, step=2)["t"].min() == 1


def test_an_agent_that_cannot_hurry_keeps_a_part_of_the_processor(gate: Gate, tmp_path: Path) -> None:
    program = """
import sys, torch, forebay
checkpointer = forebay.Checkpointer(sys.argv[1])
save = checkpointer.save_now(1, {"t": torch.zeros(1 << 20, dtype=torch.uint8)})
assert not save.wait_durable(0.25)
print(checkpointer._agent.pid, flush=True)
input()
save.wait_durable()
print("durable", flush=True)
input()
checkpointer.close()
"""

    run = [sys.executable, "-c", program, f"s3://checkpoints/{tmp_path.name}-keeps"]
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdin=pipe, stdout=pipe, text=True, preexec_fn=lambda: without(CAP_SYS_NICE)) as child:
        assert child.stdin is not None and child.stdout is not None
        agent = int(child.stdout.readline())
        # A thread that the first one made has that one's level for a moment.
        wait_until(lambda: thread_levels(agent) == {10})
        gate.open()
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "durable\n"
        wait_until(lambda: thread_levels(agent) == {10})
        print(file=child.stdin, flush=True)
        assert child.wait(60) == 0


def test_agents_that_are_waited_for_at_once_all_hurry(gate: Gate, tmp_path: Path) -> None:
    """The kernel lets one write of a session's level through in 100 ms; the others kept theirs while they were waited for."""
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("NO AUTOGROUPS: that sessions hurry is not tested")
    program = """
import sys, torch, forebay
checkpointers = [forebay.Checkpointer(place) for place in sys.argv[1:]]
state = {"t": torch.zeros(1 << 20, dtype=torch.uint8)}
saves = [checkpointer.save_now(1, state) for checkpointer in checkpointers]
print(*[checkpointer._agent.pid for checkpointer in checkpointers], flush=True)
input()
print(*[save.wait_durable(0.25) for save in saves], flush=True)
input()
for checkpointer in checkpointers:
    checkpointer.close()
"""
    places = [f"s3://checkpoints/{tmp_path.name}-{name}" for name in "abcd"]
    run = [sys.executable, "-c", program, *places]
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdin=pipe, stdout=pipe, text=True, preexec_fn=lambda: without(CAP_SYS_ADMIN)) as child:
        assert child.stdin is not None and child.stdout is not None
        agents = [int(word) for word in child.stdout.readline().split()]
        wait_until(lambda: all(session_level(agent) == 19 for agent in agents))
        print(file=child.stdin, flush=True)
        assert child.stdout.readline().split() == ["False"] * len(places), "they were waited for"
        wait_until(lambda: all(session_level(agent) == 0 for agent in agents))
        gate.open()
        print(file=child.stdin, flush=True)
        assert child.wait(60) == 0


def test_the_first_save_faults_no_page_in(tmp_path: Path) -> None:
    # Large beside what the interpreter faults in meanwhile.
    state = {"t": torch.ones(256 * MIB, dtype=torch.uint8)}
    page = os.sysconf("SC_PAGE_SIZE")
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        checkpointer.prepare(state)
        taken, faults = memory_taken(os.getpid()), []
        assert sum(taken.values()) >= 2 * state["t"].nbytes, "both slots are there before the first save"
        for step in (1, 2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            save = checkpointer.save_now(step, state)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            save.wait_durable()
            assert memory_taken(os.getpid()) == taken, f"step {step}"
        # Of 65,536 pages, for each of both slots; what is left is the interpreter's own.
        assert max(faults) < state["t"].nbytes // page // 50, faults


def busy(place: str, on_busy: Any) -> tuple[forebay.Checkpointer, dict[str, Any]]:
    """A checkpointer both of whose slots are taken by saves that the store has not answered yet."""
    checkpointer = forebay.Checkpointer(place, every=1, on_busy=on_busy)
    state = {"t": torch.zeros(1000), "n": 0}
    for step in (1, 2):
        state["n"], state["t"] = step, state["t"] + 1
        save = checkpointer.step(step, state)
        assert save is not None and save.wait_sealed(60) and not save.durable
    assert not checkpointer._session.has_room(0.0)
    state["n"], state["t"] = 3, state["t"] + 1
    return checkpointer, state


def test_the_first_save_of_a_training_loads_no_compiler(tmp_path: Path) -> None:
    """It took 0.6 s and 100 MB. Who has an optimizer has it mostly, and one that steps loads it."""
    program = f'''
import sys, torch, forebay
with forebay.Checkpointer({str(tmp_path / "run")!r}) as job:
    state = {{"t": torch.zeros(1000)}}
    job.prepare(state)
    before = set(sys.modules)
    job.save_now(1, state)
    job.before_optimizer_step()
    print(len([name for name in set(sys.modules) - before if name.startswith("torch.")]), "torch._dynamo" in sys.modules)
'''
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["0", "False"], ended.stdout + ended.stderr


def test_a_save_waits_for_a_full_arena_and_goes_on(gate: Gate, tmp_path: Path) -> None:
    place = f"s3://checkpoints/{tmp_path.name}-waits"
    checkpointer, state = busy(place, "wait")
    listen, waited = checkpointer._listen, []

    def count(patience_s: float) -> None:
        waited.append(checkpointer._session.has_room(0.0))
        if len(waited) == 3:
            gate.open()
        listen(patience_s)

    checkpointer._listen = count  # type: ignore[method-assign]
    save = checkpointer.step(3, state)
    assert waited[:3] == [False] * 3, "it waited before the store answered"
    assert save is not None and save.wait_durable(60)
    checkpointer.close()
    assert (checkpointer.steps(), checkpointer.skipped) == ([1, 2, 3], 0)
    loaded = forebay.load(place)
    assert loaded["n"] == 3 and bool((loaded["t"] == 3).all())


def test_a_save_that_finds_a_full_arena_is_skipped_and_counted(gate: Gate, tmp_path: Path) -> None:
    place = f"s3://checkpoints/{tmp_path.name}-skips"
    checkpointer, state = busy(place, "skip")
    assert checkpointer.step(3, state) is None and checkpointer.save_now(3, state) is None
    assert checkpointer.skipped == 2
    gate.open()
    assert checkpointer.wait(60)
    save = checkpointer.step(4, state)
    assert save is not None and save.wait_durable(60)
    checkpointer.close()
    assert (checkpointer.steps(), checkpointer.skipped) == ([1, 2, 4], 2)
