"""Trainers that Hugging Face's callback does not save, however they were started, and those that save as well."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forebay

from .test_partitioned import partitioned
from .test_ranks import run_ranks
from .test_trainers import small_trainer, transformers  # noqa: F401  (a fixture)

import forebay.huggingface  # noqa: E402  (after what may skip all)


def begin(place: Path, model: Any = None, trainer: Any = None, **arguments: Any) -> list[str]:
    """What a callback warns of as a training begins."""
    callback = forebay.huggingface.Callback(place, every=3, trainer=trainer)
    given = SimpleNamespace(save_strategy="no", **arguments) if "save_strategy" not in arguments else SimpleNamespace(**arguments)
    state = SimpleNamespace(save_steps=3, global_step=0, stateful_callbacks={})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback.on_train_begin(given, state, None, model=model)
    assert callback._checkpointer is not None
    callback._leave()
    return [str(one.message) for one in caught if issubclass(one.category, forebay.CheckpointWarning)]


@pytest.mark.parametrize("name", ["FSDP", "DeepSpeed"])
def test_what_shards_is_refused_however_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By the Trainer's arguments, by `accelerate launch`, and by the Trainer's own word."""
    match = rf"shard their models \({name}\) are not saved by this callback.*forebay.dcp.*DeepSpeed has checkpoints of its own"
    lower = name.lower()
    for how in ({lower: "full_shard"}, {"trainer": SimpleNamespace(**{f"is_{lower}_enabled": True})}):
        with pytest.raises(forebay.CheckpointInvalid, match=match):
            begin(tmp_path, **how)
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "false")
    assert begin(tmp_path, torch.nn.Linear(2, 2)) == []
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(forebay.CheckpointInvalid, match=match):
        begin(tmp_path, torch.nn.Linear(2, 2))


def test_what_is_sharded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(forebay.CheckpointInvalid, match=r"shard their models \(DeepSpeed\)"):
        begin(tmp_path, partitioned())

    def work(rank: int) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = torch.nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(forebay.CheckpointInvalid, match="'weight' is a tensor that processes hold together"):
            begin(tmp_path, model)
        wrapped = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
        with pytest.raises(forebay.CheckpointInvalid, match=r"shard their models \(FSDP\)"):
            begin(tmp_path, wrapped)
        return True

    assert run_ranks(2, work) == [True, True]


def test_a_trainer_that_saves_as_well_is_told(tmp_path: Path) -> None:
    (told,) = begin(tmp_path, save_strategy=transformers.trainer_utils.SaveStrategy("steps"))
    assert "saves checkpoints of its own as well (save_strategy='steps'): each is written twice (hint: " in told
    assert "TrainingArguments(save_strategy='no')" in told
    for quiet in ({}, {"save_strategy": "steps", "load_best_model_at_end": True}):
        assert begin(tmp_path, **quiet) == []


def test_a_trainer_of_one_process_trains(tmp_path: Path) -> None:
    trainer, _ = small_trainer(tmp_path / "run", tmp_path / "out", 1, 20)
    trainer.train()
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.steps() == [3, 6, 8]
