"""Containers that have other directories at one path, and share a network: none takes another's memory for its own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _mounts, _url
from forebay._ranks import Ranks

from .conftest import Child
from .test_restart import LINGER_S, end, restored

Report = Callable[[str], None]

_CLONE_NEWNS = 0x20000


def contained(source: Path, place: Path, work: Callable[[Report], None]) -> Child:
    """A process of its own mounts, which has `source` at `place`."""

    def run(report: Report) -> None:
        assert ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", str(source), str(place)], check=True)
        work(report)

    return Child(run)


def test_memory_of_another_container_at_the_same_path_is_not_taken(tmp_path: Path) -> None:
    """A sweep whose containers have their own directories at `/output` got the weights of the one that was killed before."""
    if os.getuid() != 0:
        pytest.skip("NO MOUNTS: not root, so that containers at one path are not tried")
    first, other, output = (tmp_path / name for name in ("exp1", "exp9", "output"))
    for folder in (first, other, output):
        folder.mkdir()
    run = output / "run"

    def save(report: Report) -> None:
        job = forebay.Checkpointer(run, every=1, linger=LINGER_S)
        for step in (1, 2):
            handle = job.step(step, {"t": torch.full((300_000,), float(step)), "n": step})
        assert handle is not None and handle.wait_durable(60)
        report(str(job._agent.pid))
        signal.pause()

    def begin(report: Report) -> None:
        state: dict[str, Any] = {"t": torch.zeros(300_000), "n": 0}
        with forebay.Checkpointer(run, every=1) as job:
            report(json.dumps([job.restore(state), state["n"]]))

    def go_on(report: Report) -> None:
        _, found, job = restored(run)
        report(json.dumps([found.step, found.tier]))
        job.close()

    killed = contained(first, output, save)
    agent = int(killed.line())
    killed.kill()
    one = contained(other, output, begin)
    assert (json.loads(one.line()), one.join()) == ([None, 0], 0), "a run of its own"
    # The directory was made meanwhile, and mounted once more.
    again = contained(first, output, go_on)
    assert (json.loads(again.line()), again.join()) == ([2, "arena"], 0)
    end(agent)


def test_ranks_of_another_container_at_the_same_path_are_not_met(tmp_path: Path) -> None:
    """Two jobs of one sweep, each of two ranks, were one group: a rank of the one heard what the other's had to say."""
    if os.getuid() != 0:
        pytest.skip("NO MOUNTS: not root, so that containers at one path are not tried")
    output = tmp_path / "output"
    output.mkdir()
    children = {}
    # Those of different jobs come first.
    for job, rank in ((0, 0), (1, 1), (0, 1), (1, 0)):
        source = tmp_path / f"exp{job}"
        source.mkdir(exist_ok=True)

        def work(report: Report, job: int = job, rank: int = rank) -> None:
            ranks = Ranks(f"file://{output}/run", (rank, 2), 60)
            report(json.dumps([word["job"] for word in ranks.gather("tell", lambda: {"job": job})]))

        children[job, rank] = contained(source, output, work)
    told = {(job, rank): json.loads(child.line()) for (job, rank), child in children.items()}
    assert told == {(job, rank): [job, job] for job in range(2) for rank in range(2)}
    assert [child.join() for child in children.values()] == [0] * 4


@pytest.mark.parametrize(
    ("mount", "name"), [(["254:0", "/a"], ["254:0", "/a"]), (["server:/a", "/"], ["server:/a", "/"]), (["0:45", "/"], []), ([], [])]
)
def test_ranks_that_mount_their_place_each_for_itself_meet(
    monkeypatch: pytest.MonkeyPatch, mount: list[str], name: list[str]
) -> None:
    monkeypatch.setattr(_url, "mount_of", lambda _: mount)
    assert _url.meeting_name("file:///output/run") == ["file:///output/run", *name]
    assert _url.meeting_name("s3://bucket/run") == ["s3://bucket/run"]


TABLE = """\
20 1 254:0 / / rw - ext4 /dev/vda rw
21 20 254:0 /exps/exp1 /output rw shared:1 - ext4 /dev/vda rw
22 20 0:44 / /mnt/a\\040b rw - nfs4 server:/exports/a rw
23 20 0:45 / /scratch rw - overlay overlay rw,upperdir=/x
24 20 0:46 /on-top /scratch rw master:1 - tmpfs none rw
25 20 0:47 / /cifs rw - cifs //server/share rw
26 20 8:1 / /out rw - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/data/run", ["254:0", "/"]),
        ("/output", ["254:0", "/exps/exp1"]),
        ("/output/deep/run", ["254:0", "/exps/exp1"]),
        ("/out/run", ["8:1", "/"]),
        ("/outside", ["254:0", "/"]),
        # Such a one is mounted under another number next time.
        ("/mnt/a b/run", ["server:/exports/a", "/"]),
        ("/cifs/run", ["//server/share", "/"]),
        ("/scratch/run", ["0:46", "/on-top"]),
    ],
)
def test_mounts_are_found_by_the_kernels_table(path: str, mount: list[str]) -> None:
    assert _mounts._nearest(path, TABLE) == mount


def test_a_path_is_on_some_mount_whether_it_is_there_or_not(tmp_path: Path) -> None:
    found = _mounts.mount_of(str(tmp_path))
    assert len(found) == 2 and _mounts.mount_of(str(tmp_path / "not" / "there")) == found
