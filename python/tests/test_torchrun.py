"""Jobs that torchrun starts, and starts again: a checkpointer in each rank, as a user has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import _native

from .conftest import SCALE, wait_until
from .test_crash import is_running
from .torchrun_program import KILLED_AT, LAST

PROGRAM = Path(__file__).with_name("torchrun_program.py")


def torchrun(size: int, folder: Path, act: str, *options: str) -> list[dict[str, Any]]:
    """What each rank of a job told, in their order."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *options]
    # Of the store that torchrun shares with its ranks, those of a second start take addresses of the first, now and
    # then, and cannot connect (pytorch/pytorch#135712).
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*torchrun, str(PROGRAM), str(folder), act]
    ended = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
    (folder / "told").unlink()
    assert sorted(line.pop("rank") for line in lines) == list(range(size))
    return lines


# At other numbers of ranks in long runs.
@pytest.mark.parametrize("size", [1, 2, 4] if SCALE > 1 else [2])
def test_a_rank_that_is_killed_is_started_again_and_all_go_on(tmp_path: Path, size: int) -> None:
    """Losses and tensors are those of a job that nobody killed; its steps are restored at other numbers of ranks."""
    (tmp_path / "kill").touch()
    found = torchrun(size, tmp_path, "train", "--max-restarts=1")
    assert not (tmp_path / "kill").exists(), "a rank was killed"
    assert found == [{"start": KILLED_AT, "tier": "arena", "wrong": [], "losses_are_equal": True}] * size
    agents = [int(line) for line in (tmp_path / "agents").read_text().split()]
    assert len(agents) == 2 * size
    for agent in agents:
        wait_until(lambda: not is_running(agent))

    run = tmp_path / "run"
    with forebay.Checkpointer(run) as checkpointer:
        assert checkpointer.steps() == list(range(1, LAST + 1))
    for step in range(1, LAST + 1):
        (manifest,) = run.glob(f"steps/{step:020}/*.json")
        assert json.loads(manifest.read_text())["body"]["world_size"] == size
    assert _native.verify(f"file://{run}", None) == []

    for other in [1, 2, 4] if SCALE > 1 else [1, 4]:
        assert torchrun(other, tmp_path, "restore") == [{"start": LAST, "wrong": []}] * other
