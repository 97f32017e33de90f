"""A host without the memory for saves: it is refused before the kernel ends a process for it, and what agents of killed
trainers hold of other jobs makes way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

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
state = {"w": torch.arange((mib << 20) // 4, dtype=torch.int32)}
checkpointer = forebay.Checkpointer(url, every=1, rng=False, on_error="warn" if how == "warn" else "raise")
for step in (1, 2):
    save = checkpointer.step(step, state)
    assert how == "warn" or save.wait_durable()
print("trained", flush=True)
if how == "is killed":
    print(checkpointer._agent.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with room for one trainer and its snapshots, and not for those of another one as well; without swap."""
    roots = [(Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max")]
    roots.append((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"))
    for root, limit, swap in roots:
        made = root / f"forebay-test-{uuid.uuid4().hex[:8]}"
        try:
            made.mkdir()
        except OSError:
            continue
        if not (made / limit).exists():
            made.rmdir()
            continue
        (made / limit).write_text(str(4 * STATE_MIB * MIB + 256 * MIB))
        if (made / swap).exists():
            (made / swap).write_text("0" if swap == "memory.swap.max" else (made / limit).read_text())
        yield made
        for process in (made / "cgroup.procs").read_text().split():
            os.kill(int(process), signal.SIGKILL)
        wait_until(lambda: not (made / "cgroup.procs").read_text())
        made.rmdir()
        return
    pytest.skip("NO CONTROL GROUPS: none for memory can be made here, so that a host that lacks it is not tested")


def train(group: Path, url: Path, mib: int, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(group), str(url), str(mib), how]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_memory_of_killed_trainers_makes_way_for_another_job(group: Path, tmp_path: Path) -> None:
    killed = train(group, tmp_path / "first", STATE_MIB, "is killed")
    assert killed.returncode == -9 and killed.stdout.startswith("trained\n"), killed.stderr
    agent = int(killed.stdout.split()[1])
    os.kill(agent, 0)
    other = train(group, tmp_path / "other", STATE_MIB, "ends")
    assert (other.returncode, other.stdout) == (0, "trained\n"), other.stderr
    # The same job goes on from the store.
    again = train(group, tmp_path / "first", STATE_MIB, "ends")
    assert (again.returncode, again.stdout) == (0, "trained\n"), again.stderr


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_state_that_does_not_fit_is_refused(group: Path, tmp_path: Path, on_error: str) -> None:
    """The kernel ended the trainer."""
    ended = train(group, tmp_path, 2 * STATE_MIB, on_error)
    assert re.search(r"no memory for a snapshot of \d+ bytes: \d+ bytes of memory are left", ended.stderr), ended.stderr
    assert "hint: a checkpointer keeps two copies" in ended.stderr
    assert (ended.returncode, ended.stdout) == ((1, "") if on_error == "raise" else (0, "trained\n")), ended.stderr
    if on_error == "warn":
        assert [ended.stderr.count(f"step {step} was not saved") for step in (1, 2)] == [1, 1], ended.stderr
