"""Two hosts, of which network namespaces stand in, and the jobs that tests have on them: nothing else is shared than the place of
their checkpoints and what torch.distributed shares."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .conftest import PATIENCE_S, Child
from .test_dcp import numbers
from .test_torchrun import PROGRAM

_CLONE_NEWNET = 0x40000000

Report = Callable[[str], None]
Work = Callable[[int, Report], None]


class Hosts:
    """Two hosts with a link between them; ranks of both share the directories of this one."""

    made = 0

    def __init__(self, meetings: Path) -> None:
        Hosts.made += 1
        self._names = [f"fb{os.getpid()}-{Hosts.made}-{number}" for number in (0, 1)]
        self._meetings, self._jobs = meetings, 0
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        link = ["eth0", "netns", self._names[0], "type", "veth", "peer", "name", "eth0", "netns", self._names[1]]
        _ip("link", "add", *link)
        for number, name in enumerate(self._names):
            _ip("-n", name, "address", "add", f"10.91.7.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in self._names:
            _ip("netns", "del", name)

    def cut_off(self) -> None:
        """Has neither hear of the other any more."""
        _ip("-n", self._names[0], "link", "set", "eth0", "down")

    def start(self, ranks: int, work: Work, first: int = 0) -> list[Child]:
        """A job of so many ranks, half of them on either host, that of rank 0 is the `first`."""
        self._jobs += 1
        here, number = ranks // 2, self._jobs

        def rank_of(rank: int) -> Callable[[Report], None]:
            def run(report: Report) -> None:
                self._enter((rank // here + first) % 2)
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(here))
                master = f"10.91.7.{first + 1}"
                os.environ.update(MASTER_ADDR=master, MASTER_PORT="29400", GLOO_SOCKET_IFNAME="eth0")
                os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
                meeting = f"file://{self._meetings / str(number)}"
                dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
                work(rank, report)

            return run

        return [Child(rank_of(rank)) for rank in range(ranks)]

    def run(self, ranks: int, work: Callable[[int], Any], first: int = 0) -> list[Any]:
        """What `work` gives on each rank."""
        children = self.start(ranks, lambda rank, report: report(json.dumps(work(rank))), first)
        lines = [child.line() for child in children]
        assert [child.join() for child in children] == [0] * ranks
        return [json.loads(line) for line in lines]

    def _enter(self, host: int) -> None:
        fd = os.open(f"/run/netns/{self._names[host]}", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(fd)


    def torchrun(self, folder: Path, act: str, *options: str, lost: Optional[int] = None) -> list[dict[str, Any]]:
        """What each of two ranks on either host told, which torchrun started, in no order; a host may be lost."""
        self._jobs += 1
        place = f"--rdzv-endpoint=10.91.7.1:{29500 + self._jobs}", "--rdzv-backend=c10d", f"--rdzv-id={self._jobs}"
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        # As in test_torchrun.py.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        started = []
        for host in (0, 1):
            # Who is gone is not waited for long.
            hurry = "" if lost is None else ",last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8"
            own = f"--rdzv-conf=is_host={1 - host}{hurry}", f"--local-addr=10.91.7.{host + 1}"
            nodes = "--nnodes=2" if lost is None else "--nnodes=1:2"
            torchrun = [sys.executable, "-m", "torch.distributed.run", nodes, "--nproc-per-node=2", *place, *own]
            command = [*torchrun, *options, str(PROGRAM), str(folder), act]
            enter = partial(self._enter, host)
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(command, env=variables, preexec_fn=enter, **pipes))
        try:
            told = [process.communicate(timeout=PATIENCE_S * 3)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        expected = [-signal.SIGKILL if host == lost else 0 for host in (0, 1)]
        assert [process.returncode for process in started] == expected, "\n".join(told)
        lines = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
        (folder / "told").unlink()
        assert sorted(line.pop("rank") for line in lines) == list(range(4 if lost is None else 2))
        return lines


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    meetings = tmp_path / "meetings"
    meetings.mkdir()
    made = Hosts(meetings)
    yield made
    made.remove()


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["model"](numbers(4, 30)).square().mean().backward()
        state["optim"].step()
        state["optim"].zero_grad()
        state["n"] += 1


def ddp_parts(seed: int) -> dict[str, Any]:
    """A model of which all ranks hold the same, and its optimizer."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(30, 300), torch.nn.Linear(300, 6)))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-2), "n": 0}
