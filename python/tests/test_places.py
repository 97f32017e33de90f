"""Paths as people write them: with a home directory, or of what is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import forebay
import forebay.convert
import forebay.dcp
import forebay.huggingface


def test_a_home_directory_is_none_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` was the name of a folder where the program ran."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    state = {"model": {"w": torch.arange(9.0)}}
    places: dict[str, Any] = {"local": "~/local", "agent_log": Path("~/log")}
    with forebay.Checkpointer("~/run", every=1, **places) as job:
        job.step(1, state)
    assert sorted(path.name for path in home.iterdir()) == ["local", "log", "run"]
    with forebay.Checkpointer(Path("~/run")) as job:
        assert job.restore(state) == 1
    forebay.save(state, "~/saved")
    assert torch.equal(forebay.load(home / "saved")["model"]["w"], state["model"]["w"])
    with forebay.dcp.Writer("~/dcp") as writer:
        dcp.save({"w": torch.arange(3)}, checkpoint_id=1, storage_writer=writer)
    torch.save({"w": torch.arange(9.0)}, home / "w.pt")
    forebay.convert.to_hugging_face("~/run", Path("~/hf"))
    forebay.convert.from_hugging_face(Path("~/hf"), "~/back")
    forebay.convert.to_dcp("~/run", Path("~/torch"))
    forebay.convert.from_dcp(Path("~/torch"), "~/back", 2, allow_pickle=True)
    forebay.convert.from_file(Path("~/w.pt"), "~/back", 3)
    assert forebay.convert.main(["~/run", "hf:~/hf2"]) == 0
    assert torch.equal(forebay.load(home / "back", step=0)["model"]["w"], state["model"]["w"])
    found = {path.name for path in home.iterdir()}
    assert found == {"back", "dcp", "hf", "hf2", "local", "log", "run", "saved", "torch", "w.pt"}
    assert list(here.iterdir()) == []


def test_a_place_that_is_not_there_is_said_to_be_none(tmp_path: Path) -> None:
    """Whoever misspelt a path was told to make a directory of that name, or of a file in it."""
    none, model = tmp_path / "runn", {"w": torch.zeros(9)}

    def job(use: Callable[[forebay.Checkpointer], Any]) -> Any:
        with forebay.Checkpointer(none) as checkpointer:
            return use(checkpointer)

    run = f"file://{none}: No such file or directory (hint: check the path; the first save of a run makes its directory)"
    path = f"{none}: No such file or directory (hint: check the path)"
    reads: list[tuple[str, Callable[[], Any]]] = [
        (run, lambda: forebay.load(none)),
        (run, lambda: forebay.load(none, into=model, step=3)),
        (run, lambda: forebay.load_model(none, model)),
        (run, lambda: job(lambda checkpointer: checkpointer.restore({"model": model}, step=2))),
        (run, lambda: job(lambda checkpointer: checkpointer.load_model(model))),
        (run, lambda: forebay.convert.to_hugging_face(str(none), tmp_path / "out")),
        (run, lambda: forebay.convert.to_dcp(str(none), tmp_path / "out")),
        (run, lambda: forebay.dcp.Reader(none).read_metadata()),
        (path, lambda: forebay.convert.from_hugging_face(none, str(tmp_path / "out"))),
        (path, lambda: forebay.convert.from_dcp(none, str(tmp_path / "out"), allow_pickle=True)),
        (path, lambda: forebay.convert.from_file(none, str(tmp_path / "out"))),
    ]
    for text, read in reads:
        with pytest.raises(forebay.CheckpointNotFound) as caught:
            read()
        assert str(caught.value) == text
    with pytest.raises(forebay.CheckpointNotFound, match="holds no checkpoint of torch.distributed.checkpoint"):
        forebay.convert.from_dcp(tmp_path, str(tmp_path / "out"), allow_pickle=True)
    # A run that is new has nothing, which is no error; and nothing was made by looking.
    assert job(lambda checkpointer: checkpointer.restore({"model": model})) is None
    assert forebay.huggingface.checkpoint(none, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
