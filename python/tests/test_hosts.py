"""Jobs whose ranks are on several hosts, and restore and save there together."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import forebay
import forebay.dcp
from forebay import _hosts, _native, _ranks, _together
from forebay._pieces import Pieces
from forebay._ranks import Ranks

from .conftest import PATIENCE_S, SCALE, Child, wait_until
from .hosts import Hosts, Report, hosts, train  # noqa: F401  (one is a fixture)
from .test_dcp import everything, numbers, whole
from .test_ranks import fsdp_parts, fsdp_values, run_ranks
from .test_reading import read_bytes


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
    is_open = tmp_path / "is-open"

    def open_door(*given: Any) -> Any:
        door = _hosts.open_door(*given)
        is_open.touch()
        return door

    def work(rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_hosts, "addresses", lambda: ["127.0.0.1"])
            patch.setattr(_ranks, "open_door", open_door)
            if rank == 1:
                wait_until(is_open.exists)
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
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, False),
        ({"LOCAL_WORLD_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"MPI_LOCALNRANKS": "8", "SLURM_STEP_NUM_NODES": "2"}, False),
        ({"SLURM_STEP_NUM_NODES": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "1"}, False),
        ({"LOCAL_WORLD_SIZE": "many"}, None),
        # DeepSpeed's launcher, of which each host has one; Horovod's; Cray's PALS.
        ({"LOCAL_SIZE": "4", "CROSS_SIZE": "2"}, True),
        ({"LOCAL_SIZE": "8", "CROSS_SIZE": "1"}, False),
        ({"HOROVOD_LOCAL_SIZE": "4"}, True),
        ({"PALS_LOCAL_SIZE": "4"}, True),
        # One that torchrun started there counts.
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_SIZE": "1"}, False),
    ],
)
def test_what_launchers_say_of_hosts_is_known(
    given: dict[str, str], expected: Optional[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_hosts_that_no_launcher_tells_of_find_each_other(hosts: Hosts, tmp_path: Path) -> None:
    """They waited for ten minutes, and were told how to save alone: over each other."""

    def work(rank: int) -> Any:
        for name in (*_hosts._HERE, _hosts._NODES):
            os.environ.pop(name, None)
        state = {"own": torch.full((9,), float(rank))}
        with forebay.Checkpointer(tmp_path / "run", patience=30.0) as checkpointer:
            assert checkpointer.restore(state) is None
            checkpointer.save_now(1, state)
            checkpointer.wait()
            state["own"].zero_()
            checkpointer.restore(state)
            ranks = checkpointer._ranks
            told = [ranks.are_spread, ranks.hosts(), ranks.here(), float(state["own"].sum())]
        with pytest.raises(forebay.CheckpointInvalid, match="this one's are on several"):
            forebay.Checkpointer(tmp_path / "run", local=str(tmp_path / "copies")).save_now(2, state)
        return told

    expected = [[True, [0, 0, 2, 2], [rank // 2 * 2, rank // 2 * 2 + 1], 9.0 * rank] for rank in range(4)]
    assert hosts.run(4, work) == expected


def test_ranks_of_one_host_that_no_launcher_tells_of_meet_there(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        assert not {*_hosts._HERE, _hosts._NODES} & {*os.environ}
        with forebay.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_now(1, {"own": torch.full((9,), float(rank))})
            ranks = checkpointer._ranks
        return [ranks.are_told_apart, ranks.are_spread, ranks.here()]

    assert run_ranks(2, work) == [[None, False, [0, 1]]] * 2


def test_a_training_on_two_hosts_resumes_from_a_directory_of_either(hosts: Hosts, tmp_path: Path) -> None:
    """Rank 0 wrote it on its own host, and those of the other one were given a path where nothing was."""
    pytest.importorskip("transformers", reason="TRANSFORMERS is not installed")
    import forebay.huggingface

    place, log = tmp_path / "run", tmp_path / "written"

    def write(step: _native.Step, part: Path, plain: Any = forebay.huggingface._write) -> None:
        with log.open("a") as file:
            file.write(f"{part}\n")
        plain(step, part)

    def save(rank: int, report: Report) -> None:
        model = torch.nn.Linear(300, 300)
        torch.nn.init.constant_(model.weight, 7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        state = types.SimpleNamespace(global_step=3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forebay.huggingface.dataclasses, "asdict", vars)
            made = forebay.huggingface._state(state, model, optimizer, scheduler)
        checkpointer = forebay.Checkpointer(place, rng=False, replicated=["model.*"], linger=100)
        checkpointer.save_now(3, made).wait_durable(PATIENCE_S)
        report(str(checkpointer._agent.pid))
        signal.pause()

    children = hosts.start(4, save)
    agents = [int(child.line()) for child in children]
    for child in children:
        child.kill()

    def bring(rank: int, folder: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forebay.huggingface, "_write", write)
            source = forebay.huggingface.checkpoint(place, folder)
        assert source == str(folder / "checkpoint-3")
        weight = safetensors.torch.load_file(f"{source}/model.safetensors")["weight"]
        names = {f"rng_state_{number}.pth" for number in range(4)} | {"optimizer.pt", "trainer_state.json"}
        return bool((weight == 7).all()) and names <= set(os.listdir(source))

    try:
        assert hosts.run(4, lambda rank: bring(rank, tmp_path / f"own-{rank // 2}")) == [True] * 4
        assert len(log.read_text().splitlines()) == 2, "once on each host"
        assert hosts.run(4, lambda rank: bring(rank, tmp_path / "shared")) == [True] * 4
        assert len(log.read_text().splitlines()) == 3, "once where both see it"
    finally:
        for agent in agents:
            os.kill(agent, signal.SIGKILL)
