"""A callback for Hugging Face's `Trainer`, and the way back.

    place = "s3://bucket/run7"
    trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"),
                      callbacks=[forebay.huggingface.Callback(place, every=500)])
    trainer.train(resume_from_checkpoint=forebay.huggingface.checkpoint(place, "out"))

The callback saves model, optimizer, scheduler, the scale of the loss, the Trainer's own state and its random number
generators, while the training goes on, each step after it was logged and evaluated. `checkpoint` writes a step as the
directory that the Trainer resumes from, which is also one that `from_pretrained` reads; one of a PEFT model, adapters and what
they adapt, in one file as the Trainer wants it, is for the Trainer alone. Under torchrun every process does the same; what all of
them hold is stored once. For Trainers that shard their models (FSDP, DeepSpeed) there is `forebay.dcp`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any, Optional, Union

import numpy
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

from . import _native
from . import _options as options
from ._aside import NOTE, Foreign, ensure
from ._checkpointer import Checkpointer
from ._errors import CheckpointInvalid, CheckpointNotFound, CheckpointWarning
from ._loading import load_rest, with_step
from ._ranks import Ranks
from ._url import bucket_url
from .convert import SHARD_BYTES

__all__ = ["Callback", "checkpoint"]

Place = Union[str, "os.PathLike[str]"]

_ENDS = "train_runtime"
"""What the Trainer logs of a whole training, once that is over and before it loads the best model."""

_ONE_FILE = 1 << 62
"""More than any model has."""

_PATIENCE_S = 3600.0
"""How long processes wait for the one that writes a checkpoint."""


class Callback(TrainerCallback):  # type: ignore[misc]
    """Saves while a Trainer trains, and once more at the end.

    A step is saved when the Trainer is done with it: with its entries of the log, its evaluation, and what followed from
    that, such as the best metric. One that the training dies in the evaluation of is not saved.

    States of other callbacks (what early stopping has counted) are those of the start of the training, as no callback is
    told of the others; who resumes them (`restore_callback_states_from_checkpoint`) is warned. With the Trainer they are
    saved as its own saves have them: `trainer.add_callback(Callback(url, trainer=trainer))`.

    Args:
        url: Where the steps lie, as for `Checkpointer`.
        every: Steps from one save to the next; by default the Trainer's `save_steps`.
        keep: As for `Checkpointer`.
        keep_every: As for `Checkpointer`.
        trainer: The Trainer that it is added to, of whose other callbacks the states are saved, too.
    """

    def __init__(
        self,
        url: Place,
        every: Optional[int] = None,
        *,
        keep: Optional[int] = None,
        keep_every: Optional[int] = None,
        trainer: Optional[Any] = None,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every is {every}; it is at least 1, or None")
        self._url = bucket_url(url)
        self._every = every
        self._interval = every or 1
        self._keep = (keep, keep_every)
        self._trainer = trainer
        self._checkpointer: Optional[Checkpointer] = None
        self._saved: Optional[int] = None
        self._is_due = False
        self._is_distributed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise CheckpointInvalid("Trainers that shard their models are not saved by this callback, but by forebay.dcp")
        # A Trainer may train again, with other arguments: nothing of the last training is left.
        self._interval = self._every or max(int(state.save_steps), 1)
        self._saved, self._is_due = None, False
        self._is_distributed = getattr(args, "parallel_mode", None) == ParallelMode.DISTRIBUTED
        if self._trainer is None:
            _warn_of_callbacks(args, state)
        keep, keep_every = self._keep
        # What the Trainer's processes all have; each has its own random numbers.
        alike = [f"{name}.*" for name in ("model", "optimizer", "scheduler")]
        options: dict[str, Any] = {"keep": keep, "keep_every": keep_every, "rng": False, "linger": 0}
        self._checkpointer = Checkpointer(self._url, replicated=alike, **options)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._checkpointer is not None:
            self._checkpointer.before_optimizer_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._checkpointer is None:
            return
        if state.global_step % self._interval == 0:
            # The Trainer evaluates it next, and at the end of an epoch again.
            self._is_due = True
        else:
            # Saves nothing, having no schedule; raises what went wrong with earlier saves.
            self._checkpointer.step(state.global_step, None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Of the next one, whose data may have drawn random numbers: the Trainer resumes its generators behind them, too.
        self._save_if_due(state, **kwargs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The order of its data is not drawn yet, as it is not where the Trainer resumes the generators.
        self._save_if_due(state, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._checkpointer is not None and _ENDS in (logs or ()):
            # Of that entry a training that goes on knows nothing.
            self._is_due = self._is_due or self._saved != state.global_step
            self._save_if_due(dataclasses.replace(state, log_history=state.log_history[:-1]), **kwargs)
            # What follows may be the best model, in the last one's stead.
            self._checkpointer.before_optimizer_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_due = self._is_due or self._saved != state.global_step
        checkpointer = self._checkpointer
        if checkpointer is not None:
            with checkpointer:
                self._save_if_due(state, **kwargs)
        self._checkpointer = None

    def _save_if_due(self, state: Any, **kwargs: Any) -> None:
        if self._is_due and self._checkpointer is not None:
            self._is_due = False
            if self._trainer is not None:
                state = dataclasses.replace(state, stateful_callbacks=_stateful(self._trainer))
            self._checkpointer.save_now(state.global_step, _state(state, is_distributed=self._is_distributed, **kwargs))
            self._saved = state.global_step


def checkpoint(url: Place, folder: Place, step: Optional[options.StepName] = None) -> Optional[str]:
    """Writes a step of `Callback`'s, by default the newest, as `folder/checkpoint-STEP`, and gives that path.

    None if there is no step. One that was written already is given as it is, if the step is still the one that it was
    written from: a training that went back saves a step of that number anew, and then it is written anew, too. Every byte
    read is checked. Under torchrun every process calls it, and the first one writes.

    Raises `CheckpointInvalid` where a directory of that name is not of this function's, such as the Trainer's own.
    """
    place = bucket_url(url)

    def write() -> Optional[str]:
        try:
            return with_step(place, step, None, lambda found: _written(found, Path(folder)))
        except CheckpointNotFound:
            if step is None:
                return None
            raise

    return Ranks(place, None, _PATIENCE_S).first("write a checkpoint", write)


def _stateful(trainer: Any) -> list[Any]:
    """What the Trainer saves the states of: those of its callbacks that have one, and its control's."""
    return [one for one in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(one, ExportableState)]


def _warn_of_callbacks(args: Any, state: Any) -> None:
    # That of the control means nothing beyond a step.
    names = sorted(state.stateful_callbacks.keys() - {"TrainerControl"})
    if names and getattr(args, "restore_callback_states_from_checkpoint", False):
        text = f"what {', '.join(names)} will have counted is not saved: a resume has it as it is now"
        warnings.warn(f"{text} (hint: trainer.add_callback(Callback(url, trainer=trainer)))", CheckpointWarning, stacklevel=3)


def _state(
    state: Any, model: Any, optimizer: Any, lr_scheduler: Any, is_distributed: bool = False, **others: Any
) -> dict[str, Any]:
    """What a Trainer resumes from; `is_distributed` as it takes itself to be, which one process under torchrun does."""
    config = getattr(model, "config", None)
    generators: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        cuda = torch.cuda.random
        generators["cuda"] = cuda.get_rng_state_all() if is_distributed else cuda.get_rng_state()
    # What accelerate wraps an optimizer in knows it.
    scaler = getattr(optimizer, "scaler", None)
    return {
        "model": model,
        "optimizer": optimizer.state_dict(),
        "scheduler": lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "rng": generators,
        # As the Trainer writes them.
        "trainer": json.dumps(dataclasses.asdict(state)),
        "is_adapted": _is_adapted(model),
        "config": None if config is None else config.to_json_string(use_diff=False),
    }


def _is_adapted(model: Any) -> bool:
    """Whether it is PEFT's, which whoever has one has imported: the Trainer resumes no such model from several files."""
    peft = sys.modules.get("peft")
    kinds = tuple(getattr(peft, name) for name in ("PeftModel", "PeftMixedModel") if hasattr(peft, name))
    return isinstance(model, kinds)


def _written(step: _native.Step, folder: Path) -> str:
    place = folder / f"checkpoint-{step.step}"
    try:
        ensure(place, {"commit": step.commit}, lambda part: _write(step, part))
    except Foreign:
        text = f"{place} is not of forebay.huggingface.checkpoint, whose directories have a {NOTE}"
        raise CheckpointInvalid(f"{text} (hint: move or delete it, or give another folder)") from None
    return str(place)


def _write(step: _native.Step, part: Path) -> None:
    state = load_rest(step, ["model", "rng"])
    step.export(str(part), "model", _ONE_FILE if state.get("is_adapted") else SHARD_BYTES)
    for name, key in (("optimizer.pt", "optimizer"), ("scheduler.pt", "scheduler"), ("scaler.pt", "scaler")):
        # Most have no scaler, and the Trainer takes one that is there.
        if state.get(key) is not None:
            torch.save(state[key], part / name)
    for rank in range(step.world_size):
        name = f"rng_state_{rank}.pth" if step.world_size > 1 else "rng_state.pth"
        torch.save(load_rest(step, ["model", *state], rank)["rng"], part / name)
    if state["config"] is not None:
        (part / "config.json").write_text(state["config"])
    (part / "trainer_state.json").write_text(state["trainer"])
