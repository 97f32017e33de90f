"""Jobs whose ranks are on several hosts, of which network namespaces stand in: nothing else is shared than the place of their
checkpoints and what torch.distributed shares."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import forebay
import forebay.dcp
from forebay import _hosts, _native, _replicas, _together
from forebay._pieces import Pieces
from forebay._ranks import Ranks

from .conftest import PATIENCE_S, SCALE, Child, arenas_of, chances, wait_until
from .test_dcp import everything, numbers, whole
from .test_ranks import fsdp_parts, fsdp_values
from .test_reading import read_bytes
from .test_restart import LINGER_S, end
from .test_torchrun import PROGRAM
from .torchrun_program import KILLED_AT, LAST

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


@contextlib.contextmanager
def shared_reads() -> Iterator[list[int]]:
    """How many rounds each read has that this rank does together with others."""
    together: Any = _native.Together
    reads: list[int] = []

    class Counting:
        def __init__(self, *given: Any) -> None:
            self._native = together(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._native, name)

        def read(self, *given: Any) -> Any:
            reads.append(self._native.rounds)
            return self._native.read(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "Together", Counting)
        yield reads


def held(hosts: Hosts, place: Path, parts: Callable[[int], dict[str, Any]], replicas: int = 0) -> list[int]:
    """Kills a job whose last step is in the memory of both hosts, and with `replicas` there alone; gives its agents."""

    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(place, every=1, linger=LINGER_S, replicas=replicas)
        state = parts(1)
        for step in (1, 2):
            train(state, 1)
            save = checkpointer.step(step, state)
            assert save is not None and save.wait_sealed(60)
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

    children = hosts.start(4, work)
    agents = [int(child.line()) for child in children]
    for child in children:
        child.kill()
    return agents


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


def test_a_job_on_two_hosts_is_saved_and_restored_there_and_elsewhere(hosts: Hosts, tmp_path: Path) -> None:
    place = tmp_path / "run"

    def save(rank: int) -> Any:
        state = fsdp_parts(1)
        train(state, 3)
        with forebay.Checkpointer(place, every=3) as checkpointer:
            assert checkpointer.step(3, state) is not None
        assert checkpointer._ranks.here() == ([0, 1] if rank < 2 else [2, 3])
        return fsdp_values(state)

    def restore(rank: int) -> Any:
        state = fsdp_parts(2)
        with forebay.Checkpointer(place) as checkpointer:
            assert checkpointer.restore(state) == 3 and checkpointer.restored is not None
            return [fsdp_values(state), checkpointer.restored.tier]

    expected = hosts.run(4, save)[0]
    assert _native.verify(f"file://{place}", None) == []
    assert hosts.run(4, restore) == [[expected, "store"]] * 4
    assert hosts.run(2, restore) == [[expected, "store"]] * 2, "one rank a host"


def wide(seed: int) -> torch.Tensor:
    """32 MiB."""
    return torch.arange(8 << 20, dtype=torch.int32) + seed


def restored_once(hosts: Hosts, place: Path) -> list[list[Any]]:
    """Whether each of four ranks that want all of `wide` has it, how many times the bytes it read of the store, and the warnings."""

    def restore(rank: int) -> Any:
        state, before = {"w": torch.zeros_like(wide(1))}, read_bytes()
        with warnings.catch_warnings(record=True) as told, forebay.Checkpointer(place, rng=False) as checkpointer:
            warnings.simplefilter("always")
            assert checkpointer.restore(state) == 5
        read = (read_bytes() - before) / state["w"].nbytes
        texts = [str(one.message) for one in told if one.category is forebay.CheckpointWarning]
        return [torch.equal(state["w"], wide(1)), read, texts]

    return hosts.run(4, restore)


def test_hosts_read_the_store_once_between_them(hosts: Hosts, tmp_path: Path) -> None:
    """All four ranks want all of it, and read a quarter each, whichever host they are on."""
    forebay.save({"w": wide(1)}, tmp_path, step=5)
    for right, read, told in restored_once(hosts, tmp_path):
        assert right and 0.25 <= read <= 0.26 and not told, (read, told)


@contextlib.contextmanager
def meetings() -> Iterator[list[tuple[str, int]]]:
    """At what this rank meets others, and how many they are with it."""
    gather = Ranks.gather
    met: list[tuple[str, int]] = []

    def noted(self: Ranks, act: str, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        met.append((act, self.world_size))
        return gather(self, act, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "gather", noted)
        yield met


def test_hosts_do_not_meet_while_they_read(hosts: Hosts, tmp_path: Path) -> None:
    """However many rounds there are, all ranks meet as often; those of a host meet at each of them."""
    forebay.save({"w": wide(1), "v": wide(2), "u": wide(3)}, tmp_path, step=5)

    def restore(rank: int) -> Any:
        found = []
        for only in ("w", "*"):
            state = {name: torch.zeros_like(wide(1)) for name in ("w", "v", "u")}
            with meetings() as met, shared_reads() as rounds, forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                assert checkpointer.restore(state, only=[only]) == 5
            assert torch.equal(state["w"], wide(1)) and torch.equal(state["u"], wide(3)) == (only == "*")
            found.append([rounds, met.count(("read a round", 2)), sum(number == 4 for _, number in met)])
        return found

    for first, second in hosts.run(4, restore):
        # A rank lends 16 MiB of the 32 or 96 MiB that its host's two have a round.
        assert (first[:2], second[:2]) == ([[1], 1], [[3], 3])
        assert first[2] == second[2]


def test_a_rank_that_fails_between_rounds_is_told_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {"w": wide(1), "v": wide(2), "turned": wide(3).view(64, -1).t()}

    forebay.save(state(), tmp_path, step=5)
    patience = 300

    def fail(*args: Any) -> None:
        raise forebay.CheckpointNoSpace("no room for it")

    def restore(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, rng=False, patience=patience) as checkpointer:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 3:
                    patch.setattr(Pieces, "take", fail)
                begun = time.monotonic()
                with pytest.raises(forebay.CheckpointNoSpace, match="no room for it"):
                    checkpointer.restore(state())
                assert time.monotonic() - begun < patience / 2, "nobody was waited for"
            # All are where they were, and go on.
            again = state()
            again["turned"].zero_()
            assert checkpointer.restore(again) == 5
        return bool((again["turned"] == state()["turned"]).all())

    assert hosts.run(4, restore) == [True] * 4


def test_a_rank_that_dies_while_hosts_read_is_told_to_all(hosts: Hosts, tmp_path: Path) -> None:
    state = {"w": wide(1), "v": wide(2), "turned": wide(3).view(64, -1).t()}
    forebay.save(state, tmp_path, step=5)
    patience = 300

    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, rng=False, patience=patience)
        if rank == 3:
            Pieces.take = lambda *given: os._exit(9)  # type: ignore[method-assign]
        begun = time.monotonic()
        # Ranks of the other host read in its stead until they know, and say so.
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        with pytest.raises(forebay.CheckpointUnavailable) as raised:
            checkpointer.restore(dict(state))
        report(str(raised.value) if time.monotonic() - begun < patience / 2 else "it waited")
        signal.pause()

    children = hosts.start(4, work)
    for child in children[:3]:
        assert "rank 3 of the job is gone" in child.line()
    assert children[3].join() == 9
    for child in children[:3]:
        child.kill()


def test_hosts_that_send_each_other_nothing_read_for_themselves(
    hosts: Hosts, tmp_path: Path, monkeypatch: Any
) -> None:
    """The ranks meet, and say where nobody reaches them: each host reads all of it once, and that is told."""
    forebay.save({"w": wide(1)}, tmp_path, step=5)
    new_door = _hosts.new_door

    def hidden() -> Any:
        door, address = new_door()
        return door, {**address, "addresses": ["127.0.0.1"]}

    monkeypatch.setattr(_together, "new_door", hidden)
    for right, read, told in restored_once(hosts, tmp_path):
        assert right and 0.5 <= read <= 0.51, read
        assert "ranks of other hosts cannot be reached" in told[0] and "must reach each other by TCP" in told[0]


def test_cards_that_are_not_there_are_told_and_done_without(hosts: Hosts, tmp_path: Path, monkeypatch: Any) -> None:
    """What cards do that are there is seen in `tests/tests/rdma.rs`."""
    forebay.save({"w": wide(1)}, tmp_path, step=5)
    monkeypatch.setenv("FOREBAY_RDMA", "mlx5_9:1:3")
    for right, read, told in restored_once(hosts, tmp_path):
        assert right and 0.25 <= read <= 0.26, read
        assert len(told) == 1 and "came over TCP, not RDMA: " in told[0] and "FOREBAY_RDMA" in told[0], told
    monkeypatch.setenv("FOREBAY_RDMA", "mlx5_9:one")

    def restore(rank: int) -> Any:
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            with pytest.raises(forebay.CheckpointInvalid) as raised:
                checkpointer.restore({"w": torch.zeros_like(wide(1))})
        return str(raised.value)

    for text in hosts.run(2, restore):
        assert '"mlx5_9:one" is no port (hint: use auto, off, or DEVICE[:PORT[:GID_INDEX]]' in text


def test_dcp_saves_and_loads_a_job_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        with forebay.dcp.Writer(tmp_path) as writer:
            dcp.save(everything(1, True), checkpoint_id=5, storage_writer=writer)
            dcp.async_save(everything(1, True), checkpoint_id=6, storage_writer=writer).result(PATIENCE_S)

    def load(rank: int) -> Any:
        expected, state = whole(everything(1, True)), everything(2, True)
        with shared_reads() as reads:
            dcp.load(state, storage_reader=forebay.dcp.Reader(tmp_path))
        return [whole(state) == expected, reads]

    hosts.run(4, save)
    assert _native.verify(f"file://{tmp_path}", None) == []
    assert hosts.run(4, load) == [[True, [1]]] * 4


def test_dcp_reads_the_store_once_for_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Half of a job, on both of its hosts, reads for each of them: it has no way from one to the other."""
    forebay.save({"w": wide(1)}, tmp_path, step=5)

    def load(rank: int) -> Any:
        found = []
        pair = dist.new_group([1, 2])
        for group in (None, pair):
            if group is None or rank in (1, 2):
                state, before = {"w": torch.zeros_like(wide(1))}, read_bytes()
                dcp.load(state, storage_reader=forebay.dcp.Reader(tmp_path), process_group=group)
                found.append((read_bytes() - before) / state["w"].nbytes)
                assert torch.equal(state["w"], wide(1))
        return found

    for rank, found in enumerate(hosts.run(4, load)):
        assert 0.25 <= found[0] <= 0.26, found
        assert len(found) == (2 if rank in (1, 2) else 1) and all(1 <= read <= 1.01 for read in found[1:]), found


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

    children = hosts.start(4, work)
    agents = [int(child.line()) for child in children]
    for child in children:
        child.kill()
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
                if step == 3 and rank == 2:
                    # Rank 0's copies are there, and rank 2's are with rank 0.
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


# A host that says nothing any more is found so after 40 s: in long runs.
@pytest.mark.parametrize("kind", ["killed", "cut off"][:SCALE])
def test_a_rank_that_is_gone_from_another_host_is_named(hosts: Hosts, tmp_path: Path, kind: str) -> None:
    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(tmp_path / "run", every=1)
        state = {"w": numbers(9)}
        save = checkpointer.step(1, state)
        assert save is not None and save.wait_durable(60)
        report("saved")
        if rank == 3:
            signal.pause()
        with pytest.raises(forebay.CheckpointUnavailable) as raised:
            checkpointer.step(2, state)
        report(str(raised.value))
        signal.pause()

    children = hosts.start(4, work)
    assert [child.line() for child in children] == ["saved"] * 4
    if kind == "killed":
        children[3].kill()
        assert all("rank 3 of the job is gone" in child.line() for child in children[:3])
    else:
        hosts.cut_off()
        told = [child.line() for child in children[:3]]
        assert "of the job is gone" in told[0] and told[0] == told[1] and "rank 0 is gone" in told[2], told
    for child in children:
        if child in Child.alive:
            child.kill()


def test_hosts_that_do_not_reach_each_other_are_told(hosts: Hosts, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_hosts, "addresses", lambda: ["127.0.0.1"])
            with forebay.Checkpointer(tmp_path / "run", patience=3.0) as checkpointer:
                with pytest.raises(forebay.CheckpointUnavailable) as raised:
                    checkpointer.save_now(1, {"w": numbers(9)})
        return str(raised.value)

    first, second = hosts.run(2, work)
    assert "rank 1 did not join the job's group within 3 s" in first
    assert "rank 0, on another host, was not reached within 3 s: it is at none of 127.0.0.1 (port" in second
    assert "hint: hosts of a job must reach each other by TCP" in second


def test_what_jobs_on_several_hosts_do_without_is_told(hosts: Hosts, tmp_path: Path, monkeypatch: Any) -> None:
    def local(rank: int) -> Any:
        with pytest.raises(forebay.CheckpointInvalid) as raised:
            forebay.Checkpointer(tmp_path / "run", local=str(tmp_path / "copies"))
        return str(raised.value)

    for text in hosts.run(2, local):
        assert "this one's are on several (hint: leave it out" in text
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(forebay.CheckpointInvalid, match="4 ranks on several hosts.*init_process_group first"):
            checkpointer.save_now(1, {"w": numbers(9)})


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, False),
        ({"LOCAL_WORLD_SIZE": "8"}, False),
        ({"LOCAL_WORLD_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"MPI_LOCALNRANKS": "8", "SLURM_STEP_NUM_NODES": "2"}, False),
        ({"SLURM_STEP_NUM_NODES": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "1"}, False),
        ({"LOCAL_WORLD_SIZE": "many"}, False),
    ],
)
def test_what_launchers_say_of_hosts_is_known(given: dict[str, str], expected: bool, monkeypatch: Any) -> None:
    for name in (*_hosts._HERE, _hosts._NODES):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert _hosts.launched_on_several(8) is expected
    assert not _hosts.launched_on_several(1)


def test_addresses_are_those_that_others_can_reach(monkeypatch: Any) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.91.7.200")
    found: Optional[list[str]] = _hosts.addresses()
    assert found and "10.91.7.200" in found and not any(address.startswith("127.") for address in found)
