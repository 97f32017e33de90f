"""torch's own files as steps: a part at a time, as many as ranks wrote, and nothing of what is damaged."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forebay
from forebay import _native
from forebay.convert import main

from .test_convert import fails, same, tensors
from .test_dcp import everything, numbers, whole
from .test_ranks import run_ranks


@pytest.fixture(autouse=True)
def silence() -> Any:
    """torch warns of what it is told here: that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def text(state: Any) -> str:
    """A state as text, to be compared: dicts come back in any order."""
    return json.dumps(whole(state), sort_keys=True, default=repr)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_several_ranks_wrote_is_joined(tmp_path: Path, ranks: int) -> None:
    files, place = tmp_path / "files", tmp_path / "run"

    def save(rank: int) -> Any:
        state = everything(1, True)
        # Rows that ranks have several of, and columns, which are scattered.
        mesh = init_device_mesh("cpu", (ranks,))
        state["uneven"] = distribute_tensor(numbers(ranks + 1, 3), mesh, [Shard(0)])
        dcp.save(state, storage_writer=dcp.FileSystemWriter(files))
        return text(state)

    expected = run_ranks(ranks, save)[0]
    assert main([f"dcp:{files}", f"{place}@7", "--allow-pickle"]) == 0
    assert _native.verify(f"file://{place}", None) == []
    assert text(forebay.load(place, step=7)) == expected
    # What a rank wrote is what a reader of a part reads.
    assert main([f"{place}@7", f"dcp:{tmp_path / 'back'}"]) == 0
    assert main([f"dcp:{tmp_path / 'back'}", f"{tmp_path / 'again'}", "--allow-pickle"]) == 0
    assert text(forebay.load(tmp_path / "again")) == expected


def test_files_of_torch_save_come_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, place = tmp_path / "model.pt", tmp_path / "run"
    model = tensors()
    tied = {**model, "tied": model["float32"], "rows": model["float32"][1:3], "twice": model["int64"]}
    plain = {"n": 3, "names": ["a", "b"], "milestones": collections.Counter([2, 3, 3])}
    state = {"model": tied, "optim": {"lr": 0.5, "betas": (0.9, 0.99)}, **plain}
    torch.save(state, file)
    assert main([f"pt:{file}", f"{place}@5"]) == 0
    loaded = forebay.load(place, step=5)
    assert same(loaded["model"], tied) and list(loaded["model"]) == list(tied)
    assert {**loaded, "model": None} == {**state, "model": None}
    assert loaded["model"]["tied"].data_ptr() == loaded["model"]["float32"].data_ptr()
    # What was saved before torch 1.6, and a module's weights as they are mostly saved.
    torch.save(torch.nn.Linear(3, 2).state_dict(), file, _use_new_zipfile_serialization=False)
    assert main([f"pt:{file}", f"{place}@6"]) == 0
    torch.nn.Linear(3, 2).load_state_dict(forebay.load(place, step=6))
    torch.save({"path": Path("x")}, file)
    fails(capsys, [f"pt:{file}", f"{place}@7"], "--allow-pickle")
    assert main([f"pt:{file}", f"{place}@7", "--allow-pickle"]) == 0
    assert forebay.load(place, step=7, allow_pickle=True) == {"path": Path("x")}
    torch.save({"t": torch.eye(3).to_sparse()}, file)
    fails(capsys, [f"pt:{file}", f"{place}@8"], "state['t']")
    file.write_bytes(file.read_bytes()[:-100])
    fails(capsys, [f"pt:{file}", f"{place}@8"], "model.pt")
    fails(capsys, [f"pt:{tmp_path / 'none'}", f"{place}@8"], "No such file")
    fails(capsys, [f"pt:{tmp_path}", f"{place}@8"], "directory")
    fails(capsys, [str(place), f"pt:{file}"], "a SOURCE only")
    assert [step for step, *_ in _native.list_steps(f"file://{place}")] == [5, 6, 7]


def test_directories_that_do_not_hold_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, place = tmp_path / "files", tmp_path / "run"
    dcp.save({"w": torch.ones(100), "n": {"epoch": 3}}, storage_writer=dcp.FileSystemWriter(files))
    words = [f"dcp:{files}", str(place), "--allow-pickle"]
    (part,) = files.glob("*.distcp")
    data, listed = part.read_bytes(), (files / ".metadata").read_bytes()
    part.write_bytes(data[: len(data) // 2])
    fails(capsys, words, "is damaged")
    part.unlink()
    fails(capsys, words, part.name)
    part.write_bytes(data)
    (files / ".metadata").write_bytes(listed[:-9])
    fails(capsys, words, "the list of")
    (files / ".metadata").unlink()
    fails(capsys, words, ".metadata")
    assert _native.list_steps(f"file://{place}") == [] and not list(place.glob("shards/*/*/*"))


def test_what_this_python_lacks_is_told_and_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that cannot be imported was called damage, and without torch there was a traceback."""
    module = types.ModuleType("from_elsewhere")
    exec("class Config: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "from_elsewhere", module)
    files, place = tmp_path / "files", tmp_path / "run"
    state = {"w": torch.ones(3), "config": module.Config()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(files))
    torch.save(state, tmp_path / "model.pt")
    monkeypatch.delitem(sys.modules, "from_elsewhere")
    for source in (f"dcp:{files}", f"pt:{tmp_path / 'model.pt'}"):
        fails(capsys, [source, str(place), "--allow-pickle"], "that cannot be imported here")
    monkeypatch.delitem(sys.modules, "forebay._torch_files")
    monkeypatch.setitem(sys.modules, "torch", None)
    fails(capsys, [f"pt:{tmp_path / 'model.pt'}", str(place)], "need torch in this Python")


WATCHED = """
import sys
from forebay import _native, _torch_files, convert

def show_memory():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    print(int(line.split()[1]) << 10)

class Watched:
    def __init__(self, *words):
        self._writer = _writer(*words)
        self.order, self.commit, self.abort = self._writer.order, self._writer.commit, self._writer.abort

    def write(self, *words):
        self._writer.write(*words)
        show_memory()

_writer, _native.StepWriter = _native.StepWriter, Watched
show_memory()
sys.exit(convert.main(sys.argv[1:]))
"""
"""Converts, and prints what memory the process has before it begins, and whenever it has written a tensor."""


@pytest.mark.parametrize("kind", ["dcp", "pt"])
def test_what_is_larger_than_memory_passes_through_it(tmp_path: Path, kind: str) -> None:
    # So large that the allocator keeps nothing of what was freed.
    size, count = 40 << 20, 12
    state = {"model": {f"w{index}": torch.full((size,), index, dtype=torch.uint8) for index in range(count)}, "n": 3}
    files = tmp_path / "files"
    if kind == "dcp":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(files))
    else:
        torch.save(state, files)
    del state
    # In a process of its own: what this one has freed would be taken again there.
    words = [f"{kind}:{files}", str(tmp_path / "run"), "--allow-pickle"]
    told = subprocess.run([sys.executable, "-c", WATCHED, *words], check=True, capture_output=True, text=True).stdout
    used = [int(line) for line in told.split()]
    assert len(used) == 1 + count
    # Two of them, and what is on its way to the store.
    assert max(used) - used[0] < 2 * size + (128 << 20), used
    loaded = forebay.load(tmp_path / "run")
    assert all(bool((loaded["model"][f"w{index}"] == index).all()) for index in range(count)) and loaded["n"] == 3
