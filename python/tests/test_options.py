"""Options that are none are refused where they are given, by name and value, with what is allowed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
import forebay.dcp

from .conftest import Instead, raising, trained

COUNTS = [0, -1, 2.5, "3", True, [1], 2**70]
SECONDS = [-1, "5", float("nan"), float("inf"), True, [1], 1e30]
SIZES = [0, -1, "much", "", "0", "-5MiB", "5 parsecs", True, [1], float("nan"), b"5"]
BAD: dict[str, tuple[list[Any], str]] = {
    "every": (COUNTS, "a whole number, at least 1, or None"),
    "keep": (COUNTS, "a whole number, at least 1, or None"),
    "keep_every": (COUNTS, "a whole number, at least 1, or None"),
    "copy_threads": ([*COUNTS, 10**6], "a whole number, from 1 to 1024, or None"),
    "snapshots": ([*COUNTS, 3, None], "a whole number, from 1 to 2"),
    "local_keep": ([*COUNTS, None], "a whole number, at least 1"),
    "every_minutes": ([*SECONDS, 0], "a number of minutes, more than 0, to 1e+09, or None"),
    "linger": (SECONDS, "a number of seconds, from 0, to 1e+09, or None"),
    "patience": ([*SECONDS, 0, None], "a number of seconds, more than 0, to 1e+09"),
    "flush_rate": (SIZES, "a number of bytes, at least 1, with or without a unit, such as '200MiB', or None"),
    "local_bytes": (SIZES, "a number of bytes, at least 1, with or without a unit, such as '200MiB', or None"),
    "replicas": ([-1, 2, None, True], "a whole number, from 0 to 1"),
    "rng": (["no", 1, None], "True or False"),
    "allow_pickle": (["no", 0, None], "True or False"),
    "on_busy": (["drop", None, ["wait"]], "'wait' or 'skip'"),
    "on_error": (["ignore", None, ["warn"]], "'raise' or 'warn'"),
    "max_failures": ([*COUNTS, None], "a whole number, at least 1"),
    "replicated": (["ema.*", b"x", 5, None, [5]], "a list of patterns, such as ['ema.*']"),
    "ranks": ([5, (1,), (1, 1), (-1, 2), (0, 0), ("0", "1"), (0.0, 1.0), "01"], "this rank, from 0, and how many"),
    "local": ([5, "", " ", b"x", "a\0b"], "a path, or None"),
    "agent_log": ([5, "", b"x"], "a path, or None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_at_once(tmp_path: Path, name: str) -> None:
    values, allowed = BAD[name]
    given: dict[str, Any] = {"local": tmp_path / "disk"} if name == "local_bytes" else {}
    for value in values:
        with pytest.raises(forebay.CheckpointInvalid) as told:
            forebay.Checkpointer(tmp_path / "run", **{**given, name: value})
        assert str(told.value).startswith(f"{name} is {value!r}; it is {allowed}"), told.value
    assert not list(tmp_path.iterdir()), "nothing is made for what is refused"


NO_PLACES = [5, None, "", " ", b"x", "a\0b", "s3:/bucket", "gs:x", "ftp://x", "s3://", "file://x", "https://x/y"]
# As Lightning makes of a `dirpath`.
NO_PLACES += ["/work/file:/data/run", "/work/s3:/bucket/run/last.ckpt"]


@pytest.mark.parametrize("value", NO_PLACES)
def test_places_that_are_none_are_refused_at_once(value: Any) -> None:
    for refuse in (forebay.Checkpointer, forebay.load, forebay.dcp.Writer, forebay.dcp.Reader):
        with pytest.raises(forebay.CheckpointInvalid) as told:
            refuse(value)
        assert repr(value) in str(told.value) or f"`{value}`" in str(told.value), told.value


def test_a_directory_named_as_a_url_is_taken_where_it_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the message of a refused one told to write was refused, and so was what an earlier version had saved."""
    monkeypatch.chdir(tmp_path)
    with forebay.Checkpointer("./s3:/bucket/run") as checkpointer:
        checkpointer.save_now(1, {"n": 1})
    for again in (tmp_path / "s3:/bucket/run", tmp_path / "s3:/bucket/another"):
        with forebay.Checkpointer(again) as checkpointer:
            checkpointer.save_now(2, {"n": 2})
        assert forebay.load(again, step=2) == {"n": 2}


def test_signals_files_and_combinations(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    before = signal.getsignal(signal.SIGUSR1)
    for value in ("SIGNOT", 999, "SIGKILL", 3.5, ["SIGUSR1", "SIGNOT"], True, [None]):
        with pytest.raises(forebay.CheckpointInvalid, match="on_signal"):
            forebay.Checkpointer(run, on_signal=value)
    with pytest.raises(forebay.CheckpointInvalid, match="local_bytes is '5GiB'.*local="):
        forebay.Checkpointer(run, local_bytes="5GiB", on_signal="SIGUSR1")
    with pytest.raises(forebay.CheckpointInvalid, match="agent_log.*No such file"):
        forebay.Checkpointer(run, agent_log=tmp_path / "none/agent.log", on_signal="SIGUSR1")
    with pytest.raises(forebay.CheckpointInvalid, match="agent_log.*directory"):
        forebay.Checkpointer(run, agent_log=tmp_path)
    assert signal.getsignal(signal.SIGUSR1) == before, "what was refused waits for no signal"
    # One that is named twice is passed on once.
    with forebay.Checkpointer(run, on_signal=["SIGUSR1", signal.SIGUSR1], local=disk, local_bytes=1e6) as checkpointer:
        checkpointer.save_now(1, {"n": 1})
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    "option",
    [{"keep": 0}, {"keep_every": "2"}, {"flush_rate": "fast"}, {"agent_log": 5}, {"allow_pickle": "no"}, {"step": -1}],
)
def test_what_dcp_saves_with_is_checked_too(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(forebay.CheckpointInvalid, match=next(iter(option))):
        forebay.dcp.Writer(tmp_path, **option)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    options: dict[str, Any] = {"every": numpy.int64(2), "keep": numpy.int32(3), "linger": numpy.float32(0)}
    options |= {"local": tmp_path / "local", "local_bytes": numpy.int64(1 << 30)}
    with forebay.Checkpointer(tmp_path, **options, patience=numpy.int64(9), flush_rate=numpy.float32(1 << 30)) as checkpointer:
        assert checkpointer.step(1, {"n": 1}) is None
        assert checkpointer.step(2, {"n": 1}) is not None


def test_places_that_cannot_be_made_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(forebay.CheckpointInvalid, match="is no directory and cannot be made one"):
            forebay.save({"n": 1}, place)
    # Root may write anywhere, but not there.
    with pytest.raises(forebay.CheckpointError, match="/proc/forebay is no directory"):
        forebay.save({"n": 1}, "/proc/forebay")


def test_a_single_pattern_is_not_taken_for_its_characters(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_now(1, {"model": model}).wait_durable()
        for use in (checkpointer.restore, checkpointer.load_model):
            with pytest.raises(forebay.CheckpointInvalid, match=r"^only is 'model\.\*'; it is a list of patterns"):
                use(model if use == checkpointer.load_model else {"model": model}, only="model.*")  # type: ignore[operator]
    with pytest.raises(forebay.CheckpointInvalid, match="^only is 'weight'"):
        forebay.load_model(tmp_path, model, only="weight")


def test_steps_that_are_none_are_refused_and_take_no_slot(tmp_path: Path) -> None:
    state = {"n": 1}
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        # More often than there are slots: a step that was none kept its slot for good.
        for value in ("5", -1, 2.5, None, True, 2**64):
            for refuse in (checkpointer.step, checkpointer.save_now):
                with pytest.raises(forebay.CheckpointInvalid, match="^step is .*a whole number, at least 0"):
                    refuse(value, state)
        checkpointer.save_now(1, state).wait_durable()
        for value in ("", "x", "1.", ".1", "1.1.1", "-1", "1e3", -1, 2.5, True):
            with pytest.raises(forebay.CheckpointInvalid, match="^step is .*, or None"):
                checkpointer.restore(state, value)
            with pytest.raises(forebay.CheckpointInvalid, match="^step is .*, or None"):
                forebay.load(tmp_path, step=value)
    assert checkpointer.steps() == [1]


def test_a_save_that_cannot_be_sealed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sealed it: who waited for it waited for ever, and the slot was lost."""
    fails = raising(forebay.CheckpointUnavailable("the agent is not there"))
    state = trained()
    with forebay.Checkpointer(tmp_path, every=1) as checkpointer:
        session = checkpointer._session
        # From here on copies go on in the background.
        checkpointer.before_optimizer_step()
        for step in (1, 2, 3):
            monkeypatch.setattr(checkpointer, "_session", Instead(session, seal=fails))
            save = checkpointer.step(step, state)
            assert save is not None
            for _ in range(2):
                with pytest.raises(forebay.CheckpointUnavailable, match="the agent is not there"):
                    save.wait_durable(timeout=60)
            monkeypatch.undo()
        assert checkpointer.save_now(4, state).wait_durable(timeout=60)


def test_torch_that_comes_with_the_state_is_known(tmp_path: Path) -> None:
    """Before the first save nobody had imported it."""
    program = """
import sys
import forebay
assert "torch" not in sys.modules

class Lazy:
    def state_dict(self):
        import torch
        return {"w": torch.full((3,), 7.0)}

    def load_state_dict(self, state):
        pass

forebay.save({"lazy": Lazy()}, sys.argv[1])
assert forebay.load(sys.argv[1])["lazy"]["w"].tolist() == [7.0] * 3
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_what_would_restore_nothing_is_refused(tmp_path: Path) -> None:
    run, state = tmp_path / "run", {"w": torch.ones(3)}
    with forebay.Checkpointer(run) as checkpointer:
        checkpointer.save_now(5, state)
        checkpointer.wait()
        with pytest.raises(forebay.CheckpointInvalid, match="state is None.*forebay.load"):
            checkpointer.restore(None)
        for restore in (checkpointer.restore, checkpointer.load_model):
            with pytest.raises(forebay.CheckpointInvalid, match="only is .*one pattern or more"):
                restore(state, only=[])
        with pytest.raises(forebay.CheckpointNotFound, match=r"holds no step 7 \(hint: 1 steps are committed there, the last 5"):
            checkpointer.restore(state, step=7)
    with pytest.raises(forebay.CheckpointInvalid, match="only is .*one pattern or more"):
        forebay.load_model(run, torch.nn.Linear(1, 1), only=())


@pytest.mark.parametrize("step", ["500", "500.2"])
def test_a_step_in_a_url_is_no_run_of_its_own(tmp_path: Path, step: str) -> None:
    url = f"file://{tmp_path}/run@{step}"
    for use in (forebay.Checkpointer, forebay.load, lambda url: forebay.Checkpointer(Path(url.removeprefix("file://")))):
        with pytest.raises(forebay.CheckpointInvalid, match=f"step='{step}' names one.*slash"):
            use(url)
    with forebay.Checkpointer(url + "/") as checkpointer:
        checkpointer.save_now(1, {"w": torch.ones(3)})
    assert forebay.load(url + "/")["w"].tolist() == [1, 1, 1]
