"""A host without the memory for saves: it is refused before the kernel ends a process for it, and what agents of killed
trainers hold of other jobs makes way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay import Checkpointer

from .conftest import wait_until

MIB = 1 << 20
STATE_MIB = 192
"""A save takes twice that: two snapshots."""

PROGRAM = """
import os, signal, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as group:
    group.write(str(os.getpid()))
import torch, forebay
url, mib, how = sys.argv[2], int(sys.argv[3]), sys.argv[4]
options = {
    "is killed early": {"flush_rate": "48MiB"},
    "warns, seldom": {"on_error": "warn", "every": 10},
    "warns, by time": {"on_error": "warn", "every": None, "every_minutes": 1e-9},
}
state = {"w": torch.arange((mib << 20) // 4, dtype=torch.int32)}
checkpointer = forebay.Checkpointer(url, **{"every": 1, "rng": False, **options.get(how, {})})
first = checkpointer.restore(state)
print(None if first is None else checkpointer.restored.tier, flush=True)
first = 0 if first is None else first + 1
for step in range(first, first + 4):
    save = checkpointer.step(step, state)
    if how == "is killed early" and step == 1:
        assert save.wait_sealed()
        break
    assert how.startswith("warns") or save.wait_durable()
print("trained", flush=True)
if how.startswith("is killed"):
    print(checkpointer._agent.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
"""


@pytest.fixture
def groups() -> Iterator[Callable[[], Path]]:
    """Control groups with room for one trainer and its snapshots, and not for those of another one as well; without swap."""
    kinds = [(Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max")]
    kinds.append((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"))
    made: list[Path] = []

    def make() -> Path:
        for root, limit, swap in kinds:
            group = root / f"forebay-test-{uuid.uuid4().hex[:8]}"
            try:
                group.mkdir()
            except OSError:
                continue
            if not (group / limit).exists():
                group.rmdir()
                continue
            made.append(group)
            (group / limit).write_text(str(4 * STATE_MIB * MIB + 256 * MIB))
            if (group / swap).exists():
                (group / swap).write_text("0" if swap == "memory.swap.max" else (group / limit).read_text())
            return group
        pytest.skip("NO CONTROL GROUPS: none for memory can be made here, so that a host that lacks it is not tested")

    yield make
    for group in made:
        for process in (group / "cgroup.procs").read_text().split():
            os.kill(int(process), signal.SIGKILL)
        wait_until(lambda group=group: not (group / "cgroup.procs").read_text())
        group.rmdir()


def train(group: Path, url: Path, mib: int, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(group), str(url), str(mib), how]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def kill(group: Path, url: Path, how: str = "is killed", tier: str = "None") -> int:
    """A trainer that is killed once it has saved; gives its agent, which has the memory."""
    killed = train(group, url, STATE_MIB, how)
    assert killed.returncode == -9 and killed.stdout.startswith(f"{tier}\ntrained\n"), killed
    agent = int(killed.stdout.split()[2])
    os.kill(agent, 0)
    return agent


def go_on(group: Path, url: Path, tier: str) -> None:
    """A trainer that restores from this tier, saves, and ends."""
    ended = train(group, url, STATE_MIB, "ends")
    assert (ended.returncode, ended.stdout) == (0, f"{tier}\ntrained\n"), ended.stderr


def test_memory_of_killed_trainers_makes_way_for_another_job(groups: Callable[[], Path], tmp_path: Path) -> None:
    group = groups()
    kill(group, tmp_path / "first")
    go_on(group, tmp_path / "other", "None")
    # The same job goes on from the store.
    go_on(group, tmp_path / "first", "store")


def test_memory_of_a_killed_trainer_is_there_for_its_own_job(groups: Callable[[], Path], tmp_path: Path) -> None:
    """It was counted as missing, refused, and what the agent held in it was lost."""
    group = groups()
    kill(group, tmp_path)
    kill(group, tmp_path, tier="arena")
    go_on(group, tmp_path, "arena")


def test_what_is_on_its_way_to_the_store_is_waited_for(groups: Callable[[], Path], tmp_path: Path) -> None:
    group = groups()
    kill(group, tmp_path / "first", "is killed early")
    go_on(group, tmp_path / "other", "None")
    assert Checkpointer(tmp_path / "first").steps() == [0, 1]


def test_memory_under_another_limit_stays(groups: Callable[[], Path], tmp_path: Path) -> None:
    group, other = groups(), groups()
    kill(group, tmp_path / "first")
    ended = train(other, tmp_path / "other", 2 * STATE_MIB, "ends")
    assert ended.returncode == 1 and "CheckpointNoSpace" in ended.stderr, ended.stderr
    go_on(group, tmp_path / "first", "arena")


@pytest.mark.parametrize("how", ["ends", "warns, seldom", "warns, by time"])
def test_a_state_that_does_not_fit_is_refused(groups: Callable[[], Path], tmp_path: Path, how: str) -> None:
    """The kernel ended the trainer."""
    ended = train(groups(), tmp_path, 2 * STATE_MIB, how)
    assert re.search(r"no memory for a snapshot of \d+ bytes: \d+ bytes of memory are left", ended.stderr), ended.stderr
    assert "hint: a checkpointer keeps two copies" in ended.stderr
    told = [step for step in range(4) if f"step {step} was not saved" in ended.stderr]
    if how == "warns, seldom":
        assert (ended.returncode, ended.stdout, told) == (0, "None\ntrained\n", [0]), ended.stderr
    elif how.startswith("warns"):
        # The third in a row is raised.
        assert ended.returncode == 1 and told[:2] == [0, 1] and "3 saves in a row failed" in ended.stderr, ended.stderr
    else:
        assert (ended.returncode, ended.stdout) == (1, "None\n"), ended.stderr
