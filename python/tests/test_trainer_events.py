"""When Hugging Face's Trainer saves, logs and evaluates: a saved step has its evaluation, wherever that falls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay._saver import Saver

from .conftest import SCALE
from .test_trainers import Recorder, quiet, same, transformers  # noqa: F401  (a fixture)

import safetensors.torch  # noqa: E402  (after what may skip all)

import forebay.huggingface  # noqa: E402

STEPS = 8


def job(
    place: Path,
    folder: Path,
    source: Optional[str],
    rows: int = 20,
    every: int = 3,
    callbacks: Any = (),
    knows: bool = False,
    **settings: Any,
) -> tuple[Any, Recorder]:
    """A Trainer with dropout that trained for some steps of two rows, and what recorded its weights."""
    torch.manual_seed(1 if source is None else 2)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=8)
    numbers, recorder = torch.Generator().manual_seed(5), Recorder()
    data = [torch.randint(40, (8,), generator=numbers).tolist() for _ in range(rows)]
    chosen: dict[str, Any] = {"logging_steps": 1, "save_strategy": "no", "metric_for_best_model": "loss", **settings}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **chosen,
    )
    callback = None if knows else forebay.huggingface.Callback(place, every=every, keep=9)
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in data],
        eval_dataset=[{"input_ids": row, "labels": row} for row in data[:4]],
        callbacks=[*callbacks, *([callback] if callback else []), recorder],
    )
    if knows:
        trainer.add_callback(forebay.huggingface.Callback(place, every=every, keep=9, trainer=trainer))
    trainer.train(resume_from_checkpoint=source)
    return trainer, recorder


def told(history: list[dict[str, Any]], last: int = STEPS, names: Any = ("loss", "grad_norm", "eval_loss")) -> list[Any]:
    """What a log says of some steps, but for the time that it took, and for what is said at the end of a training."""
    entries = [entry for entry in history if entry["step"] <= last and "train_runtime" not in entry]
    return [[entry["step"], *(entry.get(name) for name in names)] for entry in entries]


def state_of(source: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(source) / "trainer_state.json").read_text())
    return found


WAYS: dict[str, dict[str, Any]] = {
    "at other steps": {"eval_strategy": "steps", "eval_steps": 2},
    # Of two epochs, the second one ends with the training.
    "at the end of an epoch": {"eval_strategy": "epoch", "rows": 8, "every": 4},
    "at the last step of an epoch": {"eval_strategy": "steps", "eval_steps": 4, "rows": 8, "every": 4},
    "after steps of two batches": {"eval_strategy": "steps", "eval_steps": 3, "gradient_accumulation_steps": 2, "rows": 18},
    "with each save": {"eval_strategy": "steps", "eval_steps": 3},
    "with each step, and rarely logged": {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 5},
    "never": {"eval_strategy": "no"},
    "never, and logged at the end of an epoch": {"eval_strategy": "no", "logging_strategy": "epoch", "rows": 6, "every": 3},
}
"""When the Trainer evaluates; those that are tried without a scale first."""


@pytest.mark.parametrize("way", list(WAYS)[: 4 * SCALE])
def test_a_saved_step_has_its_evaluation_and_goes_on_bit_equal(tmp_path: Path, way: str) -> None:
    place, folder, settings = tmp_path / "run", tmp_path / "out", WAYS[way]
    trainer, whole = job(place, tmp_path / "own", None, **settings)
    with forebay.Checkpointer(place) as checkpointer:
        steps = checkpointer.steps()
    every = settings.get("every", 3)
    assert steps == sorted({*range(every, STEPS + 1, every), STEPS})
    evaluated = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert bool(evaluated) == (settings["eval_strategy"] != "no")
    for step in steps:
        source = forebay.huggingface.checkpoint(place, folder, step)
        assert source is not None
        state = state_of(source)
        assert told(state["log_history"]) == told(trainer.state.log_history, step)
        assert len(state["log_history"]) == len(told(state["log_history"])), "a training that goes on has no end yet"
        assert state["global_step"] == step
        assert state["best_metric"] == min((loss for at, loss in evaluated.items() if at <= step), default=None)
        model = safetensors.torch.load_file(f"{source}/model.safetensors")
        assert all(torch.equal(value, whole.weights[step][name]) for name, value in model.items())
        # A Trainer that has nothing left to do makes another step in the middle of an epoch.
        if step == STEPS or step > every and SCALE == 1:
            continue
        again, resumed = job(tmp_path / f"from {step}", tmp_path / "own", source, **settings)
        assert list(resumed.weights) == list(range(step + 1, STEPS + 1))
        assert all(same(resumed.weights[at], whole.weights[at]) for at in resumed.weights)
        # The Trainer resumes no sum of losses that were not logged yet.
        names = ("loss", "eval_loss") if settings.get("logging_steps") != 5 else ("eval_loss",)
        assert told(again.state.log_history, names=names) == told(trainer.state.log_history, names=names)
        assert again.state.best_metric == trainer.state.best_metric


def test_what_the_trainer_trains_is_copied_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer is known by its steps: of that the state has the `state_dict` alone."""
    late: list[list[str]] = []

    def copy(self: Saver, *given: Any, plain: Any = Saver._copy) -> Any:
        found = plain(self, *given)
        late.append([leaf.name for leaf in found[0]])
        return found

    monkeypatch.setattr(Saver, "_copy", copy)
    job(tmp_path / "run", tmp_path / "own", None)
    assert ["model.transformer.h.0.mlp.c_fc.weight" in names for names in late] == [True] * 3


def test_a_scheduler_that_follows_the_evaluation_is_saved_after_it(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 3, "greater_is_better": True}
    settings |= {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}}
    trainer, whole = job(tmp_path / "run", tmp_path / "own", None, **settings)
    source = forebay.huggingface.checkpoint(tmp_path / "run", tmp_path / "out", 6)
    assert source is not None
    scheduler = torch.load(f"{source}/scheduler.pt", weights_only=True)
    assert scheduler["last_epoch"] == 2 and scheduler["_last_lr"][0] < trainer.args.learning_rate
    _, resumed = job(tmp_path / "other", tmp_path / "own", source, **settings)
    assert all(same(resumed.weights[at], whole.weights[at]) for at in (7, 8))


def test_what_early_stopping_counted_is_saved_and_resumed(tmp_path: Path) -> None:
    """What counts as better is what does not come about: the first evaluation is the best, each other one is counted."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "greater_is_better": True, "every": 2, "learning_rate": 1e-2}
    settings |= {"restore_callback_states_from_checkpoint": True}

    def stopped(place: Path, source: Optional[str]) -> tuple[int, Recorder]:
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=4)
        trainer, recorder = job(place, tmp_path / "own", source, callbacks=[stopping], knows=True, **settings)
        return trainer.state.global_step, recorder

    last, whole = stopped(tmp_path / "run", None)
    assert last == 5
    for step, counted in ((2, 1), (4, 3), (5, 4)):
        source = forebay.huggingface.checkpoint(tmp_path / "run", tmp_path / "out", step)
        assert source is not None
        states = state_of(source)["stateful_callbacks"]
        assert states.keys() == {"EarlyStoppingCallback", "TrainerControl"}
        assert states["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": counted}
        if step == 2:
            last, resumed = stopped(tmp_path / f"from {step}", source)
            assert (last, list(resumed.weights)) == (5, list(range(step + 1, 6)))
            assert all(same(resumed.weights[at], whole.weights[at]) for at in resumed.weights)
            # The object that counts is another one after a resume, and known as well.
            again = forebay.huggingface.checkpoint(tmp_path / f"from {step}", tmp_path / "again", 5)
            assert again is not None and state_of(again)["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"] == {
                "early_stopping_patience_counter": 4
            }


def load_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the Trainer do as before transformers 5.3: it logs the whole training, and tells callbacks, after that."""
    log = transformers.Trainer.log

    def log_late(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "train_runtime" in logs and trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
            trainer._load_best_model()
        log(trainer, logs, *args, **kwargs)

    monkeypatch.setattr(transformers.Trainer, "log", log_late)
    monkeypatch.setattr(forebay.huggingface, "_LOADS_BEST_FIRST", True)


BEST: dict[str, Any] = {"greater_is_better": True, "learning_rate": 1e-2, "load_best_model_at_end": True}
"""What counts as better is what does not come about: the first evaluation is the best."""

IN_STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
IN_EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "rows": 4}
BEFORE_BEST: dict[str, dict[str, Any]] = {
    "in steps": IN_STEPS,
    "in steps, and logged at the end of an epoch": {**IN_STEPS, "logging_strategy": "epoch", "rows": 8},
    "in epochs": IN_EPOCHS,
    "in epochs, and logged so": {**IN_EPOCHS, "logging_strategy": "epoch"},
}
"""When the Trainer evaluates and saves: at step 2 first."""


@pytest.mark.parametrize(("way", "is_first"), [("in steps", False), *((way, True) for way in BEFORE_BEST)])
def test_the_last_step_is_saved_before_the_best_model_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, is_first: bool
) -> None:
    """Before transformers 5.3 it had taken it: the step had the weights of one and the moments of another."""
    if is_first:
        load_best_first(monkeypatch)
    trainer, whole = job(tmp_path / "run", tmp_path / "own", None, **BEFORE_BEST[way], **BEST)
    assert trainer.state.best_global_step == 2 and same(trainer.model.state_dict(), whole.weights[2])
    source = forebay.huggingface.checkpoint(tmp_path / "run", tmp_path / "out", STEPS)
    assert source is not None
    model = transformers.GPT2LMHeadModel.from_pretrained(source)
    assert same(model.state_dict(), whole.weights[STEPS]) and not same(model.state_dict(), whole.weights[2])
    # With what the Trainer logged and found of it.
    assert told(state_of(source)["log_history"]) == told(trainer.state.log_history)
    assert state_of(source)["best_model_checkpoint"] == trainer.state.best_model_checkpoint is not None


@pytest.mark.parametrize("settings", [{**IN_STEPS, "eval_steps": 1, "save_steps": 1}, {**IN_EPOCHS, "rows": 2}])
def test_a_training_that_stops_early_saves_its_last_step_before_the_best_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    load_best_first(monkeypatch)
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=4)
    trainer, whole = job(tmp_path / "run", tmp_path / "own", None, callbacks=[stopping], **settings, **BEST)
    assert trainer.state.global_step == 5 and same(trainer.model.state_dict(), whole.weights[1])
    source = forebay.huggingface.checkpoint(tmp_path / "run", tmp_path / "out")
    assert source == str(tmp_path / "out" / "checkpoint-5")
    assert same(transformers.GPT2LMHeadModel.from_pretrained(source).state_dict(), whole.weights[5])


class ShortEpoch(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the epoch at a step. Of the last one nobody says that the training ends with it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 7


def test_a_last_step_that_the_best_model_has_replaced_is_not_saved_but_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_best_first(monkeypatch)
    settings = {**IN_STEPS, "rows": 8, "callbacks": [ShortEpoch()], **BEST}
    with pytest.warns(forebay.CheckpointWarning, match="the last step, 7, is not saved: .*best model.*hint: "):
        trainer, _ = job(tmp_path / "run", tmp_path / "own", None, **settings)
    assert trainer.state.global_step == 7
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.steps() == [3, 6]
    # One that is the best has been replaced by itself.
    settings |= {"greater_is_better": False, "eval_steps": 1, "save_steps": 1}
    job(tmp_path / "best", tmp_path / "again", None, **settings)
    with forebay.Checkpointer(tmp_path / "best") as checkpointer:
        assert checkpointer.steps() == [3, 6, 7]
