"""A signal that asks a job to end: one more step is saved, and then it ends as it would have."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import forebay
from forebay import _native

from .conftest import Child, Gate, Instead, leave_to_the_next_call, raising, trained, wait_until
from .test_crash import is_running
from .test_ranks import start_ranks

Report = Callable[[str], None]


def loop(place: Path, report: Report, **arguments: Any) -> None:
    """Trains until the process is ended; only a signal makes it save."""
    state = {"t": torch.zeros(100_000), "n": 0}
    checkpointer = forebay.Checkpointer(place, every=1_000_000, on_signal="SIGTERM", **arguments)
    for step in range(1, 1_000_000):
        state["t"] += 1
        state["n"] = step
        checkpointer.step(step, state)
        report(str(step))
        time.sleep(0.001)


def saved(place: Path) -> int:
    """The one step that is there, and whole."""
    state = {"t": torch.zeros(100_000), "n": 0}
    with forebay.Checkpointer(place, ranks=(0, 1)) as checkpointer:
        assert len(checkpointer.steps()) == 1
        step = checkpointer.restore(state)
    assert step == state["n"] and bool((state["t"] == step).all())
    return step


def test_a_signal_saves_the_step_and_ends_the_process(tmp_path: Path) -> None:
    child = Child(lambda report: loop(tmp_path, report))
    assert child.line() == "1"
    os.kill(child.pid, signal.SIGTERM)
    last = max([1, *map(int, child._lines.read().split())])
    assert child.join() == -signal.SIGTERM
    assert saved(tmp_path) == last + 1, "the step during which it came, or the next"


def test_a_signal_to_one_rank_saves_on_all(tmp_path: Path) -> None:
    children = start_ranks(2, lambda rank, report: loop(tmp_path, report, replicated=["t"]), with_gloo=False)
    assert [child.line() for child in children] == ["1", "1"]
    os.kill(children[1].pid, signal.SIGTERM)
    last = [max([1, *map(int, child._lines.read().split())]) for child in children]
    assert [child.join() for child in children] == [-signal.SIGTERM] * 2
    assert [saved(tmp_path)] * 2 == [step + 1 for step in last]


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_a_signal_to_all_processes_of_a_job_lets_workers_bring_the_next_batch(tmp_path: Path, way: str) -> None:
    """As torchrun and Slurm send it. Workers died of it, and torch raised that before the step that was to be saved."""

    def work(report: Report) -> None:
        state = {"t": torch.zeros(100_000), "n": 0}
        with forebay.Checkpointer(tmp_path, every=1_000_000, on_signal="SIGTERM") as checkpointer:
            data: Any = range(1_000_000)
            batches = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context=way)
            for step, _ in enumerate(batches, 1):
                state["t"] += 1
                state["n"] = step
                checkpointer.step(step, state)
                report(str(step))
                # None is at hand for the next step.
                time.sleep(0.001)

    child = Child(work)
    # One of each worker.
    assert [child.line(), child.line()] == ["1", "2"]
    # It leads its group.
    os.killpg(child.pid, signal.SIGTERM)
    last = max([2, *map(int, child._lines.read().split())])
    assert child.join() == -signal.SIGTERM
    assert saved(tmp_path) == last + 1
    # Nobody ends the workers, and a fork server that they came from.
    wait_until(lambda: not group_of(child.pid))


def group_of(leader: int) -> list[int]:
    """The processes of a group that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may have any sign in it: state, parent, group.
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and int(group) == leader:
            found.append(int(path.parent.name))
    return found


def has_heard(process: int) -> bool:
    """Whether no signal waits for a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return not any(int(line.split()[1], 16) for line in status.splitlines() if line[3:7] == "Pnd:")


def test_a_worker_heeds_signals_of_its_parent_alone() -> None:
    def work(report: Report) -> None:
        _native.heed_parent([signal.SIGTERM])
        report("ready")
        while True:
            signal.pause()

    child = Child(work)
    assert child.line() == "ready"
    subprocess.run(["kill", str(child.pid)], check=True)
    wait_until(lambda: has_heard(child.pid))
    os.kill(child.pid, signal.SIGTERM)
    assert child.join() == 0, "and not by the first one"


def caught() -> list[int]:
    """Those of some signals that this process has handlers for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return [signum for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM) if mask & 1 << (signum - 1)]


class Caught(torch.utils.data.Dataset[list[int]]):
    """Of each item, which worker brings it, and which signals that one does not die of."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[int]:
        return [os.getpid(), *caught()]


def test_a_worker_of_a_fork_server_heeds_signals_of_its_trainer_alone() -> None:
    """The server is its parent."""

    def work(report: Report) -> None:
        _native.heed_parent([signal.SIGTERM], trainer)
        report("ready")
        while True:
            signal.pause()

    reader, writer = os.pipe()
    sender = os.fork()
    if sender == 0:
        os.close(writer)
        os.kill(int(os.read(reader, 100)), signal.SIGTERM)
        os._exit(0)
    trainer = sender
    child = Child(work)
    assert child.line() == "ready"
    os.kill(child.pid, signal.SIGTERM)
    wait_until(lambda: has_heard(child.pid))
    os.write(writer, str(child.pid).encode())
    assert child.join() == 0, "and not by the first one, of its parent"
    os.waitpid(sender, 0)
    os.close(reader)
    os.close(writer)


def own_handlers(connection: Any) -> None:
    """Tells what this process does at signals that ask to end."""
    from forebay._serving import ASKING

    connection.send([signal.getsignal(number) is signal.SIG_DFL for number in ASKING])


def test_a_fork_server_lives_on_and_what_it_starts_heeds_signals(tmp_path: Path) -> None:
    """But for workers, of which the test above is."""
    from forebay._serving import ASKING

    def work(report: Report) -> None:
        context = multiprocessing.get_context("forkserver")
        server = multiprocessing.forkserver._forkserver
        before = list(server._preload_modules)
        # Who runs this may have some passed over, as `nohup` does.
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)
        with forebay.Checkpointer(tmp_path, on_signal="SIGTERM"):
            here, there = context.Pipe()
            process = context.Process(target=own_handlers, args=(there,))
            process.start()
            report(str(all(here.recv())))
            process.join()
            os.kill(server._forkserver_pid, signal.SIGTERM)
            process = context.Process(target=own_handlers, args=(there,))
            pid = server._forkserver_pid
            process.start()
            report(str(all(here.recv()) and server._forkserver_pid == pid))
            process.join()
        report(str(server._preload_modules == before))

    child = Child(work)
    assert [child.line() for _ in range(3)] == ["True"] * 3
    assert child.join() == 0


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_workers_that_begin_anew_pass_over_the_signals_of_all_that_are_open(tmp_path: Path, way: str) -> None:
    """Such a worker has nothing of its trainer but what it is sent."""

    def begun() -> tuple[Any, list[int]]:
        data = Caught()
        batches = iter(torch.utils.data.DataLoader(data, num_workers=1, batch_size=None, multiprocessing_context=way))
        return batches, list(next(batches))

    def work(report: Report) -> None:
        worker = torch.utils.data._utils.worker
        before = worker._worker_loop
        with forebay.Checkpointer(tmp_path / "one", on_signal=["SIGUSR1"]):
            with forebay.Checkpointer(tmp_path / "two", on_signal=["SIGUSR2"]):
                _, (_, *signals) = begun()
                # Torch itself has a handler for the last one in any worker.
                assert signals == [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]
            batches, (pid, *signals) = begun()
            assert signals == [signal.SIGUSR1, signal.SIGTERM]
            subprocess.run(["kill", "-USR1", str(pid)], check=True)
            wait_until(lambda: has_heard(pid))
            assert is_running(pid)
            os.kill(pid, signal.SIGUSR1)
            wait_until(lambda: not is_running(pid))
            del batches
        assert worker._worker_loop is before
        report("done")

    child = Child(work)
    assert child.line() == "done"
    assert child.join() == 0


def test_an_error_after_a_signal_is_seen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It went with the process, which the signal ended as who left the checkpointer passed it on."""

    def work(report: Report) -> None:
        with forebay.Checkpointer(tmp_path, on_signal="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
            raise KeyError("what went wrong")

    assert Child(work).join() == -signal.SIGTERM
    assert "KeyError: 'what went wrong'" in capfd.readouterr().err


def one_waits_and_one_hangs(children: list[Child]) -> bool:
    """Whether rank 0 waits for words of rank 1, which stopped itself."""
    return has_stopped(children[1]) and "poll" in Path(f"/proc/{children[0].pid}/wchan").read_text()


def has_stopped(child: Child) -> bool:
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("restores", [False, True])
def test_ctrl_c_is_heard_while_a_rank_waits_for_one_that_hangs(tmp_path: Path, restores: bool) -> None:
    """That the other one hangs is no reason to wait for it; it hears that it was left."""

    def work(rank: int, report: Report) -> None:
        checkpointer, state = forebay.Checkpointer(tmp_path), {"n": rank}
        save = checkpointer.save_now(1, state)
        assert save is not None and save.wait_durable()
        report("saved")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            checkpointer.restore(state) if restores else checkpointer.save_now(2, state)
        except (KeyboardInterrupt, forebay.CheckpointUnavailable) as error:
            report(f"{type(error).__name__}: {error}")
        with pytest.raises(forebay.CheckpointUnavailable, match="group is over"):
            checkpointer.save_now(3, state)

    children = start_ranks(2, work, with_gloo=False)
    assert [child.line() for child in children] == ["saved", "saved"]
    wait_until(lambda: one_waits_and_one_hangs(children))
    os.kill(children[0].pid, signal.SIGINT)
    assert children[0].line() == "KeyboardInterrupt:"
    os.kill(children[1].pid, signal.SIGCONT)
    assert re.match("CheckpointUnavailable: rank 0 (of the job )?is gone", children[1].line())
    assert [child.join() for child in children] == [0, 0]


def test_ctrl_c_is_heard_where_a_long_word_is_not_taken(tmp_path: Path) -> None:
    """More than the socket of a rank 0 that hangs takes at once."""

    def work(rank: int, report: Report) -> None:
        group = _native.Group(f"forebay-test-{tmp_path}", (rank, 2), "here", 600.0)
        report("joined")
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            group.gather("x" * 8_000_000, 600.0)
        except (KeyboardInterrupt, forebay.CheckpointUnavailable) as error:
            report(f"{type(error).__name__}: {error}")

    children = start_ranks(2, work, with_gloo=False)
    assert [child.line() for child in children] == ["joined", "joined"]
    wait_until(lambda: has_stopped(children[0]) and "sock" in Path(f"/proc/{children[1].pid}/wchan").read_text())
    os.kill(children[1].pid, signal.SIGINT)
    assert children[1].line() == "KeyboardInterrupt:"
    os.kill(children[0].pid, signal.SIGCONT)
    assert "rank 1 of the job is gone" in children[0].line()
    assert [child.join() for child in children] == [0, 0]


def test_who_waits_for_a_rank_that_hangs_ends_when_asked_twice(tmp_path: Path) -> None:
    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, on_signal=["SIGTERM", "SIGUSR1"])
        checkpointer.save_now(1, {"n": rank})
        report("saved")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        checkpointer.save_now(2, {"n": rank})

    children = start_ranks(2, work, with_gloo=False)
    assert [child.line() for child in children] == ["saved", "saved"]
    wait_until(lambda: one_waits_and_one_hangs(children))
    os.kill(children[0].pid, signal.SIGTERM)
    os.kill(children[0].pid, signal.SIGUSR1)
    assert children[0].join() in (-signal.SIGTERM, -signal.SIGUSR1), "which of them Python saw first"
    children[1].kill()


def test_a_handler_that_saves_while_its_rank_waits_is_refused(tmp_path: Path) -> None:
    """It would wait for its own wait."""

    def work(rank: int, report: Report) -> None:
        checkpointer = forebay.Checkpointer(tmp_path)
        checkpointer.save_now(1, {"n": rank})

        def save(number: int, frame: Any) -> None:
            try:
                checkpointer.restore({"n": 0})
            except forebay.CheckpointInvalid as error:
                report(str(error))

        signal.signal(signal.SIGUSR1, save)
        report("saved")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        saved = checkpointer.save_now(2, {"n": rank})
        assert saved is not None and saved.wait_durable()
        checkpointer.close()

    children = start_ranks(2, work, with_gloo=False)
    assert [child.line() for child in children] == ["saved", "saved"]
    wait_until(lambda: one_waits_and_one_hangs(children))
    os.kill(children[0].pid, signal.SIGUSR1)
    assert children[0].line().startswith("this rank waits for the others already (hint: ")
    os.kill(children[1].pid, signal.SIGCONT)
    assert [child.join() for child in children] == [0, 0], "and the save that waited goes on"


def test_the_handler_before_is_called_after_the_commit(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(checkpointer.steps()))
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        checkpointer = forebay.Checkpointer(tmp_path, every=3, on_busy="skip", on_signal=["SIGUSR1"])
        assert checkpointer.step(1, {"n": 1}) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [] and checkpointer.steps() == []
        save = checkpointer.step(2, {"n": 2})
        assert save is not None and save.durable and seen == [[2]]
        assert checkpointer.step(4, {"n": 4}) is None, "and the training goes on"
        checkpointer.save_now(5, {"n": 5})
        os.kill(os.getpid(), signal.SIGUSR1)
        save = checkpointer.step(5, {"n": 5})
        assert save is not None and save.durable and seen == [[2], [2, 5]]
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(seen) == 3, "who is asked twice does not wait"
        checkpointer.close()
        assert len(seen) == 4 and signal.getsignal(signal.SIGUSR1) is handler, "nothing is swallowed"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_that_cannot_be_waited_for(tmp_path: Path) -> None:
    for name in ("SIGNONE", "SIGKILL", 4711):
        with pytest.raises(forebay.CheckpointInvalid, match=str(name)):
            forebay.Checkpointer(tmp_path, on_signal=name)
    told = []

    def elsewhere() -> None:
        try:
            forebay.Checkpointer(tmp_path, on_signal="SIGUSR1")
        except forebay.CheckpointInvalid as error:
            told.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(told) == 1 and "main thread" in told[0]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.parametrize("where", ["join", "copy"])
def test_an_exception_of_a_signal_takes_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Ctrl-C while a snapshot is waited for took its slot; after the second one the next save waited for ever."""
    state = trained()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        leave_to_the_next_call(checkpointer)
        for step in (1, 2, 3):
            checkpointer.before_optimizer_step()
            if where == "copy":
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr("forebay._checkpointer.Staging", raising(KeyboardInterrupt()))
                    checkpointer.save_now(step, state)
                continue
            save = checkpointer.save_now(step, state)
            staging = checkpointer._staging
            assert save is not None and staging is not None
            snapshot, staging.snapshot = staging.snapshot, Instead(staging.snapshot, join=raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                checkpointer.before_optimizer_step()
            staging.snapshot = snapshot
            assert save.wait_durable()
        checkpointer.save_now(4, state)
    assert checkpointer.steps() == ([4] if where == "copy" else [1, 2, 3, 4])


def test_an_exception_of_a_signal_while_a_save_is_sealed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        leave_to_the_next_call(checkpointer)
        checkpointer.before_optimizer_step()
        save = checkpointer.save_now(1, state)
        session = checkpointer._session

        def seal(*words: Any) -> None:
            session.seal(*words)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(checkpointer, "_session", Instead(session, seal=seal))
            checkpointer.before_optimizer_step()
        checkpointer.before_optimizer_step()
        assert save is not None and save.wait_durable()
    assert checkpointer.steps() == [1]


def test_a_save_that_has_returned_outlives_the_error_after_it(tmp_path: Path) -> None:
    state = trained()
    with pytest.raises(MemoryError):
        with forebay.Checkpointer(tmp_path, linger=0) as checkpointer:
            checkpointer.before_optimizer_step()
            checkpointer.save_now(1, state)
            raise MemoryError("CUDA out of memory")
    assert checkpointer._agent.wait(60) == 0 and checkpointer.steps() == [1]


def test_a_save_that_has_returned_outlives_a_process_that_does_not_close(tmp_path: Path) -> None:
    program = """
import sys, torch, forebay
checkpointer = forebay.Checkpointer(sys.argv[1], linger=0)
checkpointer.before_optimizer_step()
model = torch.nn.Linear(300, 300)
checkpointer.save_now(1, {"model": model, "optim": torch.optim.SGD(model.parameters())})
print(checkpointer._agent.pid)
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True)
    wait_until(lambda: not is_running(int(run.stdout)))
    assert forebay.load(tmp_path)["model"]["weight"].shape == (300, 300) and run.stderr == ""


def test_a_process_ends_beside_a_thread_that_is_in_a_call(gate: Gate, tmp_path: Path) -> None:
    """A loop in a thread of its own waits for a slot, as long as the store is away; the end of its process does not.

    It is to have come so far: a thread that is in a call of torch's when Python ends is ended there, upon which C++ aborts.
    """
    place = f"s3://checkpoints/{tmp_path.name}-ends"
    program = """
import sys, threading, time, torch, forebay
checkpointer = forebay.Checkpointer(sys.argv[1], linger=600)
for step in (1, 2):
    checkpointer.save_now(step, {"t": torch.full((1000,), step)}).wait_sealed()
waits, has_room = threading.Event(), checkpointer._has_room
checkpointer._has_room = lambda must: waits.set() or has_room(must)
threading.Thread(target=checkpointer.save_now, args=(3, {"t": torch.zeros(1000)}), daemon=True).start()
waits.wait()
assert not checkpointer._lock.acquire(blocking=False)
print(checkpointer._agent.pid)
"""
    command = [sys.executable, "-X", "faulthandler", "-c", program, place]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    gate.open()
    assert run.returncode == 0, run.stderr
    agent = int(run.stdout)
    try:
        wait_until(lambda: [step for step, *_ in _native.list_steps(place)] == [1, 2])
    finally:
        os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not is_running(agent))
    assert bool((forebay.load(place)["t"] == 2).all())


class Momentum(torch.nn.Module):
    """Two encoders, of which one follows the other."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)


@pytest.mark.parametrize("way", ["beside", "within", "beside a dict", "within, beside a dict"])
def test_what_no_optimizer_trains_is_copied_at_once(tmp_path: Path, way: str) -> None:
    """Averages are changed through `.data`, which torch does not count, when the training likes. A step was sealed with half of
    what a network within the trained module had become, or of one beside it where the optimizer's state came as a dict."""
    both = Momentum()
    trained, average = both.query, both.key
    average.weight.data.fill_(1.0)
    optimizer = torch.optim.AdamW(trained.parameters())
    with forebay.Checkpointer(tmp_path) as checkpointer:
        leave_to_the_next_call(checkpointer)
        checkpointer.before_optimizer_step()
        trained(torch.ones(300)).sum().backward()
        optimizer.step()
        state: dict[str, Any] = {"model": both} if "within" in way else {"model": trained, "average": average}
        state["optim"] = optimizer.state_dict() if "dict" in way else optimizer
        weight = trained.weight.detach().clone()
        checkpointer.save_now(1, state)
        staging = checkpointer._staging
        assert staging is not None
        paths = [leaf.path for leaf in staging.late if leaf.path.startswith("state['model']")]
        assert paths == [f"state['model'].{'query.' if 'within' in way else ''}weight"], "the trained one is copied behind"
        average.weight.data.fill_(2.0)
    loaded = forebay.load(tmp_path)
    model = loaded["model"]
    found = (model["query.weight"], model["key.weight"]) if "within" in way else (model["weight"], loaded["average"]["weight"])
    assert torch.equal(found[0], weight) and bool((found[1] == 1.0).all())


def test_an_embedding_that_its_forward_changes_is_copied_at_once(tmp_path: Path) -> None:
    """With `max_norm` each save was refused, with a hint to a call that the loop made."""
    model = torch.nn.Sequential(torch.nn.Embedding(100, 300, max_norm=1.0), torch.nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        for step in (1, 2, 3):
            model(torch.arange(100)).square().mean().backward()
            checkpointer.before_optimizer_step()
            optimizer.step()
            expected = model[0].weight.detach().clone()
            save = checkpointer.step(step, {"model": model, "optim": optimizer})
        model(torch.arange(100))
        assert not torch.equal(model[0].weight, expected)
        assert save is not None and save.wait_durable(60)
    assert torch.equal(forebay.load(tmp_path)["model"]["0.weight"], expected)
