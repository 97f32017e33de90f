"""Children that a trainer forked, such as the workers of a data loader, and that outlive what they were forked for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import forebay
from forebay import convert

from .conftest import Child, arenas_of, leave_to_the_next_call, wait_until
from .test_crash import is_running
from .test_restart import end, held_until, kill, restored

Report = Callable[[str], None]


def test_a_forked_child_holds_nothing_of_what_a_killed_trainer_left(tmp_path: Path) -> None:
    """Until it ended, the memory of the trainer before stayed, and a child that read it was taken for a start to come."""
    agent = held_until(tmp_path, 3)
    kill(agent)
    state, found, checkpointer = restored(tmp_path)
    assert found.tier == "arena" and arenas_of(os.getpid())

    def work(report: Report) -> None:
        report(str(len(arenas_of(os.getpid()))))
        signal.pause()

    worker = Child(work)
    try:
        assert worker.line() == "0"
        # The parent's is untouched.
        save = checkpointer.save_now(4, state)
        assert save is not None and save.wait_durable(60)
        checkpointer.close()
    finally:
        worker.kill()


def test_a_child_does_not_wait_for_what_its_parent_copies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The thread that copies is none of its own."""
    parameter = torch.nn.Parameter(torch.zeros(10))
    optim = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    optim.state[parameter]["momentum_buffer"] = torch.ones(50_000_000)
    with forebay.Checkpointer(tmp_path, copy_threads=1) as checkpointer:
        leave_to_the_next_call(checkpointer)
        checkpointer.before_optimizer_step()
        save = checkpointer.save_now(1, {"optim": optim})
        assert save is not None and checkpointer._staging is not None
        worker = Child(lambda report: report("goes on"))
        assert worker.line() == "goes on" and worker.join() == 0
        assert "panicked" not in capfd.readouterr().err
        assert save.wait_durable(60)


def test_a_child_is_refused_while_a_thread_of_its_parent_saves(tmp_path: Path) -> None:
    """It waited for a thread that it does not have."""
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        held, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with checkpointer._lock:
                held.set()
                may_end.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)

        def work(report: Report) -> None:
            try:
                checkpointer.step(1, {"w": torch.zeros(3)})
            except forebay.CheckpointInvalid as error:
                report(str(error))

        worker = Child(work)
        try:
            assert "may not save" in worker.line()
        finally:
            worker.kill()
            may_end.set()
            thread.join()


def test_a_child_of_rank_0_that_outlives_it_is_in_nobodys_way(tmp_path: Path) -> None:
    """The next rank 0 found the meeting place taken, and the other ranks waited for one that nobody was at."""
    place = f"{os.getpid()}-{tmp_path.name}"

    def rank_of(rank: int, forks: bool) -> Callable[[Report], None]:
        def run(report: Report) -> None:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=place)
            with forebay.Checkpointer(tmp_path / "run", every=1, linger=0, patience=60) as checkpointer:
                state = {"w": torch.zeros(3)}
                report(str(checkpointer.restore(state)))
                if not forks:
                    return
                save = checkpointer.step(1, state)
                assert save is not None and save.wait_durable(60)
                if rank == 0 and os.fork() == 0:
                    # In a group of its own, which outlives its parent's.
                    os.setsid()
                    report(str(os.getpid()))
                    signal.pause()
                if rank == 0:
                    signal.pause()
                # It hears that rank 0 is gone, and not that it is silent.
                try:
                    checkpointer._ranks.gather("wait", dict)
                except forebay.CheckpointError as error:
                    report(str(error))

        return run

    first = [Child(rank_of(rank, True)) for rank in range(2)]
    assert [child.line() for child in first] == ["None"] * 2
    orphan = int(first[0].line())
    try:
        first[0].kill()
        assert "is gone" in first[1].line()
        first[1].kill()
        again = [Child(rank_of(rank, False)) for rank in range(2)]
        assert [child.line() for child in again] == ["1"] * 2
        assert [child.join() for child in again] == [0, 0]
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("moment", ["waits for the agent", "talks to it"])
def test_a_child_forked_beside_a_busy_thread_keeps_no_way_to_the_agent(tmp_path: Path, moment: str) -> None:
    """For as long as it lived the agent took the trainer, which was killed, for alive, and showed nobody what it held."""

    def train(report: Report) -> None:
        checkpointer = forebay.Checkpointer(tmp_path, linger=0)
        save = checkpointer.save_now(1, {"w": torch.ones(1000)})
        assert save is not None and save.wait_durable(60)
        agent, session = checkpointer._agent.pid, checkpointer._session
        # What is said to it is not taken, and it answers nothing.
        os.kill(agent, signal.SIGSTOP)
        acts: dict[str, Callable[[], None]] = {
            "waits for the agent": lambda: session.take_replies(60.0),
            "talks to it": lambda: session.give_up(2, None, "x" * (8 << 20)),
        }
        threading.Thread(target=acts[moment], daemon=True).start()
        time.sleep(1)
        if os.fork() == 0:
            os.setsid()
            report(f"{agent} {os.getpid()}")
        signal.pause()

    trainer = Child(train)
    agent, orphan = map(int, trainer.line().split())
    try:
        trainer.kill()
        os.kill(agent, signal.SIGCONT)
        wait_until(lambda: not is_running(agent))
    finally:
        os.kill(orphan, signal.SIGKILL)
        end(agent)


def test_forked_children_draw_chance_of_their_own(tmp_path: Path) -> None:
    """All had the numbers of one generator, their parent's: files that several wrote at once had the same names."""
    torch.save({"t": torch.zeros(3)}, tmp_path / "t.pt")

    def draw(report: Report) -> None:
        place = tmp_path / str(os.getpid())
        convert.main([f"pt:{tmp_path / 't.pt'}", str(place)])
        marks = {os.getxattr(file, "user.forebaywrite").split()[0] for file in place.glob("steps/**/*") if file.is_file()}
        report(b" ".join(sorted(marks)).decode())

    draw(lambda _: None)
    children = [Child(draw) for _ in range(2)]
    marks = [set(child.line().split()) for child in children]
    assert [child.join() for child in children] == [0, 0]
    assert marks[0] and marks[1] and not marks[0] & marks[1]
