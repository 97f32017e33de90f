"""A callback for Hugging Face's `Trainer`, and the way back.

    place = "s3://bucket/run7"
    trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"),
                      callbacks=[forebay.huggingface.Callback(place, every=500)])
    trainer.train(resume_from_checkpoint=forebay.huggingface.checkpoint(place, "out"))

The callback saves model, optimizer, scheduler, the scale of the loss, the Trainer's own state and its random number
generators, while the training goes on, each step after it was logged and evaluated. `checkpoint` writes a step as the
directory that the Trainer resumes from, which is also one that `from_pretrained` reads: of a PEFT model, that of `PeftModel`, out of
the adapters' own files. Under torchrun every process does the same; what all of
them hold is stored once. For Trainers that shard their models by FSDP there is `forebay.dcp`; DeepSpeed's are not saved.

Of a Trainer that was killed, and is started again on the same host, `checkpoint` writes the newest step that was sealed, out
of the memory that its agents still hold (`linger=`), in the store or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import secrets
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union, cast

import numpy
import safetensors.torch
import torch
import transformers
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

from . import _adapters, _native
from . import _options as options
from ._aside import NOTE, Foreign, ensure
from ._checkpointer import Checkpointer
from ._errors import (
    CheckpointCorrupt,
    CheckpointInvalid,
    CheckpointNotFound,
    CheckpointUnavailable,
    CheckpointWarning,
)
from ._held import OF_HOSTS
from ._ladder import OF_STORE
from ._leaf import local_parts, partitioned
from ._loading import load_rest
from ._optimizers import tells_copies
from ._passed import JobOptions, passed_on
from ._ranks import Ranks
from ._url import bucket_url, user_path
from .convert import SHARD_BYTES

if TYPE_CHECKING:
    # Type checkers bring it along. Python itself has it from 3.11 on only, and does not need it.
    from typing_extensions import Unpack

__all__ = ["Callback", "checkpoint"]

Place = Union[str, "os.PathLike[str]"]

_ENDS = "train_runtime"
"""What the Trainer logs of a whole training, once that is over."""

_LOADS_BEST_FIRST = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < (5, 3)
"""Whether it has loaded the best model by then (`load_best_model_at_end`), as before transformers 5.3."""

_ONE_FILE = 1 << 62
"""More than any model has."""

_PATIENCE_S = 3600.0
"""How long processes wait for the one that writes a checkpoint."""

_RANKS = "the callback knows what the Trainer's processes are, and what all of them have"

_REASONS = {
    "rng": "the Trainer resumes generators by itself, and they are saved for it",
    "allow_pickle": "nothing of what it saves is a pickle",
    "ranks": _RANKS,
    "replicated": _RANKS,
}
"""Options of `Checkpointer` that have no meaning here, and why."""

_GIVEN: dict[str, int] = {}
"""The step that `checkpoint` gave this process last, by its place: a training that begins with it goes on from it."""


class Callback(TrainerCallback):  # type: ignore[misc]
    """Saves while a Trainer trains, and once more at the end.

    A step is saved when the Trainer is done with it: with its entries of the log, its evaluation, and what followed from
    that, such as the best metric. One that the training dies in the evaluation of is not saved.

    States of other callbacks (what early stopping has counted) are those of the start of the training, as no callback is
    told of the others; who resumes them (`restore_callback_states_from_checkpoint`) is warned. With the Trainer they are
    saved as its own saves have them: `trainer.add_callback(Callback(url, trainer=trainer))`.

    The last step is saved before the best model takes its place (`load_best_model_at_end`). Before transformers 5.3 no callback
    is told of that: where the training ends in a way that cannot be foreseen the last step is not saved, which is warned of.

    Args:
        url: Where the steps lie, as for `Checkpointer`.
        every: Steps from one save to the next; by default the Trainer's `save_steps`.
        trainer: The Trainer that it is added to, of whose other callbacks the states are saved, too.
        options: As for `Checkpointer`: all but those that say what is saved, and by whom (`rng`, `ranks`, `replicated`,
            `allow_pickle`). A step that `on_busy="skip"` skips may be any but the last one. A signal (`on_signal`) is
            looked for before each step: the one that is done is saved, with its evaluation, and then the signal does
            what it did before, such as end the process. The Trainer's own way to heed one (`enable_jit_checkpoint`) then follows.

    Raises `CheckpointInvalid`, a `ValueError`, for an option that is none or has no meaning here.
    """

    def __init__(
        self,
        url: Place,
        every: Optional[int] = None,
        *,
        trainer: Optional[Any] = None,
        **options: Unpack[JobOptions],
    ) -> None:
        self._url = bucket_url(url)
        self._every = _checked_every(every)
        known: frozenset[str] = JobOptions.__optional_keys__
        self._options = cast(JobOptions, passed_on("Callback()", options, known, _REASONS))
        self._trainer = trainer
        self._checkpointer: Optional[Checkpointer] = None
        self._saved: Optional[int] = None
        self._has_stepped = False
        """Whether a step was made that the Trainer may not be done with."""
        self._has_ended_epoch = False
        """Whether what the Trainer does at the end of an epoch is all that is left before the next one, or the best model."""
        self._is_distributed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        what = _shards(args, self._trainer, kwargs.get("model"))
        if what is not None:
            text = f"Trainers that shard their models ({what}) are not saved by this callback"
            raise CheckpointInvalid(f"{text}, but, with FSDP, by forebay.dcp (hint: DeepSpeed has checkpoints of its own)")
        _warn_of_others(args)
        # A Trainer may train again, with other arguments: nothing of the last training is left.
        self._leave()
        self._saved, self._has_stepped, self._has_ended_epoch = None, False, False
        self._is_distributed = getattr(args, "parallel_mode", None) == ParallelMode.DISTRIBUTED
        if self._trainer is None:
            _warn_of_callbacks(args, state)
        # What the Trainer's processes all have; each has its own random numbers.
        alike = [f"{name}.*" for name in ("model", "optimizer", "scheduler")]
        every = self._every or max(int(state.save_steps), 1)
        self._checkpointer = Checkpointer(self._url, every, rng=False, replicated=alike, **self._options)
        if _GIVEN.get(self._url) == state.global_step:
            # What did not change since is not stored again, and what is in memory stays there until there is something newer.
            # Where the step is gone, or the store away, this is a start like any other.
            with contextlib.suppress(CheckpointNotFound, CheckpointCorrupt, CheckpointUnavailable):
                self._checkpointer._bring(state.global_step, lambda step: None)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._checkpointer is not None:
            self._checkpointer.before_optimizer_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer evaluates it next, and at the end of an epoch again.
        self._has_stepped = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Of the next one, whose data may have drawn random numbers: the Trainer resumes its generators behind them, too.
        self._step(state, **kwargs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The order of its data is not drawn yet, as it is not where the Trainer resumes the generators.
        self._has_ended_epoch = False
        self._step(state, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_ended_epoch = True
        if not control.should_log:
            # Else it is about to.
            self._save_before_best(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._checkpointer is None:
            return
        if _ENDS not in (logs or ()):
            self._save_before_best(args, state, control, **kwargs)
            return
        if _LOADS_BEST_FIRST:
            self._leave_best(args, state)
        # Of that entry a training that goes on knows nothing.
        self._save_last(dataclasses.replace(state, log_history=state.log_history[:-1]), **kwargs)
        # What follows may be the best model, in the last one's stead.
        self._checkpointer.before_optimizer_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save_before_best(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpointer = self._checkpointer
        if checkpointer is not None:
            with checkpointer:
                self._save_last(state, **kwargs)
        self._checkpointer = None

    def _step(self, state: Any, **kwargs: Any) -> None:
        """The Trainer is done with the last step, if it made one: it is saved where it is due, or a signal asks for it."""
        if self._has_stepped and self._checkpointer is not None:
            self._has_stepped = False
            save = self._checkpointer._step(state.global_step, partial(self._state, state, **kwargs))
            self._saved = self._saved if save is None else state.global_step

    def _save_before_best(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves the step where it is the last one, the Trainer is done with it, and is about to load the best model."""
        is_last = self._has_ended_epoch and control.should_training_stop and args.load_best_model_at_end
        # It logs, evaluates and saves in this order, and takes back what it was asked for as it does so.
        is_done = not (control.should_evaluate or control.should_save)
        if _LOADS_BEST_FIRST and is_last and is_done and self._checkpointer is not None:
            self._save_last(state, **kwargs)
            self._checkpointer.before_optimizer_step()

    def _leave_best(self, args: Any, state: Any) -> None:
        """Leaves the last step unsaved where the best model has taken its place, and warns of it."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        # One that is of this step is what was trained last.
        if self._saved == state.global_step or best is None or os.path.basename(best) == f"checkpoint-{state.global_step}":
            return
        self._saved = state.global_step
        # Where no step was made there is none to be missed.
        if self._has_stepped:
            text = f"the last step, {state.global_step}, is not saved: the Trainer has loaded the best model in its stead"
            hint = "transformers 5.3 lets callbacks know before it does so"
            warnings.warn(f"{text} (hint: {hint})", CheckpointWarning, stacklevel=3)

    def _save_last(self, state: Any, **kwargs: Any) -> None:
        """Saves the step if it is not, and whatever `on_busy` says."""
        checkpointer = self._checkpointer
        if checkpointer is None or self._saved == state.global_step:
            return
        made = self._state(state, **kwargs)
        if checkpointer.save_now(state.global_step, made) is None:
            checkpointer.wait()
            checkpointer.save_now(state.global_step, made)
        self._saved = state.global_step

    def _state(self, state: Any, **kwargs: Any) -> dict[str, Any]:
        """What is saved of the Trainer."""
        if self._trainer is not None:
            state = dataclasses.replace(state, stateful_callbacks=_stateful(self._trainer))
        return _state(state, is_distributed=self._is_distributed, **kwargs)

    def _leave(self) -> None:
        """Leaves what a training that died saves through: its agent commits what is sealed."""
        left, self._checkpointer = self._checkpointer, None
        if left is not None:
            left._let_go()
            left._notice.pass_on()


def _checked_every(every: Any) -> Optional[int]:
    try:
        found: Optional[int] = options.whole("every", every)
    except CheckpointInvalid as error:
        raise CheckpointInvalid(f"{error} (hint: None takes the Trainer's save_steps)") from None
    return found


def checkpoint(
    url: Place,
    folder: Place,
    step: Optional[options.StepName] = None,
    *,
    local: Optional[Place] = None,
) -> Optional[str]:
    """Writes a step of `Callback`'s, by default the newest, as `folder/checkpoint-STEP`, and gives that path.

    None if there is no step. It is looked for where `Checkpointer.restore` looks: in memory that agents of killed processes
    hold, in copies on the local disk where that is given as it was to the `Callback`, and in the store; the `forebay.json` in
    the directory names the tier where it is another one than the store. What was written already out of the store is given
    as it is, if the step is still the one that it was written from: a training that went back saves a step of that number anew,
    and then it is written anew, too. Every byte read is checked.

    Under torchrun every process calls it, and the first one writes. Of processes on several hosts one on each other host writes
    as well, unless it sees the first one's there, as in a folder that they share; out of the store, for which what agents hold is
    waited for.

    Raises `CheckpointInvalid` where a directory of that name is not of this function's, such as the Trainer's own.
    """
    place = bucket_url(url)
    given: list[str] = []
    with Checkpointer(place, rng=False, linger=0, local=local, patience=_PATIENCE_S) as reader:

        def use(found: _native.Step) -> None:
            given.append(_written_on_hosts(found, user_path(folder), reader._ranks))

        reader._ladder.arena.is_read_alone = True
        try:
            number = reader._bring(step, use)
        except CheckpointNotFound:
            if step is not None:
                raise
            number = None
    _GIVEN.pop(place, None)
    if number is None or reader.restored is None:
        return None
    if all(text.startswith((OF_STORE, OF_HOSTS)) for text in reader.restored.passed_over):
        # A nearer copy that was found damaged would be found again, and not read; memory of several hosts is read by all of them.
        _GIVEN[place] = number
    return given[-1]


def _stateful(trainer: Any) -> list[Any]:
    """What the Trainer saves the states of: those of its callbacks that have one, and its control's."""
    return [one for one in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(one, ExportableState)]


def _shards(args: Any, trainer: Any, model: Any) -> Optional[str]:
    """What has a Trainer shard its model, or has sharded it; `accelerate launch` tells that to accelerate alone, through the
    environment."""
    for name, option in (("FSDP", "fsdp"), ("DeepSpeed", "deepspeed")):
        said = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() in ("1", "true", "yes", "on", "t", "y")
        if getattr(args, option, None) or said or getattr(trainer, f"is_{option}_enabled", False):
            return name
    if not isinstance(model, torch.nn.Module):
        return None
    if tells_copies(model):
        return "FSDP"
    if partitioned(model) is not None:
        return "DeepSpeed"
    spread = (name for name, parameter in model.named_parameters() if local_parts(parameter) is not None)
    held = next(spread, None)
    return None if held is None else f"{held!r} is a tensor that processes hold together"


def _warn_of_others(args: Any) -> None:
    """Warns where the Trainer saves as well: it need not, unless it is to load the best model."""
    strategy = getattr(args, "save_strategy", "no")
    if strategy != "no" and not getattr(args, "load_best_model_at_end", False):
        text = f"the Trainer saves checkpoints of its own as well (save_strategy={str(getattr(strategy, 'value', strategy))!r})"
        hint = "TrainingArguments(save_strategy='no'), and every= of the Callback says when it saves"
        warnings.warn(f"{text}: each is written twice (hint: {hint})", CheckpointWarning, stacklevel=3)


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
        "is_adapted": _adapters.is_adapted(model),
        "adapters": _adapters.told_of(model),
        "config": None if config is None else config.to_json_string(use_diff=False),
    }


def _written_on_hosts(step: _native.Step, folder: Path, ranks: Ranks) -> str:
    """Has the first rank write, and then, where they see nothing of that, the first one of each other host; gives the path."""
    path = ranks.first("write a checkpoint", lambda: _written(step, folder))
    if not ranks.are_spread:
        return path
    lowest = ranks.here()[0]
    is_other = 0 < ranks.rank == lowest
    words = ranks.gather(
        "write a checkpoint on each host", lambda: {"given": _written(step, folder) if is_other else None}
    )
    return path if lowest == 0 else cast(str, words[lowest]["given"])


def _written(step: _native.Step, folder: Path) -> str:
    place = folder / f"checkpoint-{step.step}"
    facts = {"commit": step.commit}
    if step.tier != "store":
        # Nothing tells such a step from what is, or will be, in the store under its number: it is always written anew.
        facts = {"commit": secrets.token_hex(16), "tier": step.tier}
    try:
        ensure(place, facts, lambda part: _write(step, part))
    except Foreign:
        text = f"{place} is not of forebay.huggingface.checkpoint, whose directories have a {NOTE}"
        raise CheckpointInvalid(f"{text} (hint: move or delete it, or give another folder)") from None
    return str(place)


def _write(step: _native.Step, part: Path) -> None:
    state = load_rest(step, ["model", "rng"])
    file_bytes = _ONE_FILE if state.get("is_adapted") else SHARD_BYTES
    if step.tier == "store":
        step.export(str(part), "model", file_bytes)
    else:
        model = load_rest(step, ["rng", *state])["model"]
        _write_model(dict(_tensors_in(model)), part, file_bytes)
    # Earlier versions told of none.
    if state.get("adapters") is not None:
        _adapters.write(state["adapters"], part)
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


def _tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in dicts and lists, named by their keys with dots between them, as the engine names what it exports."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(below, f"{name}.{key}" if name else str(key))


def _write_model(tensors: dict[str, torch.Tensor], folder: Path, file_bytes: int) -> None:
    """Writes files of at most so many bytes of tensors, unless one has more: the engine exports steps of the store only."""
    files: list[dict[str, torch.Tensor]] = [{}]
    room, seen = file_bytes, set()
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if files[-1] and size > room:
            files.append({})
            room = file_bytes
        # The library refuses tensors that share memory; each name gets its own bytes, as in an export.
        memory = tensor.untyped_storage()
        is_alone = tensor.is_contiguous() and memory.nbytes() == size and memory.data_ptr() not in seen
        seen.add(memory.data_ptr())
        files[-1][name] = tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
        room -= size
    count = len(files)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    for name, own in zip(names, files):
        safetensors.torch.save_file(own, folder / name, {"format": "pt"})
    if count > 1:
        weights = {tensor: name for name, own in zip(names, files) for tensor in own}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
