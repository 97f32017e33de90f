"""What Hugging Face's callback and Lightning's plug-ins pass on to `Checkpointer`, and what comes of it in a training."""

from __future__ import annotations

import inspect
import json
import os
import signal
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay import _native, _passed

from .conftest import Child, arenas_of, wait_until
from .test_crash import is_running
from .test_failures import mend, shut
from .test_restart import LINGER_S, end
from .test_trainers import quiet, same, small_trainer, transformers  # noqa: F401  (a fixture)

import safetensors.torch  # noqa: E402  (after what may skip all)

import forebay.huggingface  # noqa: E402
import forebay.lightning  # noqa: E402

Report = Callable[[str], None]

GIVEN: dict[str, Any] = {
    "copy_threads": 1,
    "flush_rate": "1GiB",
    "patience": 5.0,
    "keep": 2,
    "every_minutes": 60.0,
    "keep_every": 4,
    "snapshots": 1,
    "on_busy": "skip",
    "on_error": "warn",
    "max_failures": 2,
    "on_signal": [signal.SIGUSR1],
    "local_keep": 1,
    "local_bytes": "1GiB",
    "linger": 7.0,
    "replicas": 1,
}
"""A value for each option of a job that is no path."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As children have: sums of several are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def names_of(kind: Any) -> set[str]:
    return set(kind.__optional_keys__)


def test_each_option_of_a_checkpointer_is_passed_on_or_refused() -> None:
    """With the type that it has there; one that is new must be thought of here."""
    types = typing.get_type_hints(forebay.Checkpointer.__init__)
    known = set(inspect.signature(forebay.Checkpointer).parameters) - {"url"}
    for kind in (_passed.JobOptions, _passed.CheckpointOptions):
        for name, own in typing.get_type_hints(kind).items():
            assert own == types[name], name
    job, single = names_of(_passed.JobOptions), names_of(_passed.CheckpointOptions)
    assert single < job and job == {*GIVEN, "local", "agent_log"}
    assert job | forebay.huggingface._REASONS.keys() == known - {"every"}
    assert not job & forebay.huggingface._REASONS.keys()
    assert single | forebay.lightning._REASONS.keys() == known - {"allow_pickle"}
    assert not single & forebay.lightning._REASONS.keys()


def made_with(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[dict[str, Any]]:
    """The options of each `Checkpointer` that a module makes from now on."""
    seen: list[dict[str, Any]] = []

    class Seen(forebay.Checkpointer):
        """One that tells."""

        def __init__(self, *args: Any, **options: Any) -> None:
            seen.append(options)
            super().__init__(*args, **options)

    monkeypatch.setattr(module, "Checkpointer", Seen)
    return seen


def test_options_of_the_callback_reach_its_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`local`, `linger`, `on_error` and others could not be said."""
    options = {**GIVEN, "local": tmp_path / "disk", "agent_log": tmp_path / "log"}
    seen = made_with(monkeypatch, forebay.huggingface)
    trainer, _ = small_trainer(tmp_path / "run", tmp_path / "out", 1, 20, options)
    trainer.train()
    assert len(seen) == 1 and {name: seen[0][name] for name in options} == options
    assert (tmp_path / "log").exists() and list((tmp_path / "disk").iterdir())
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "it is let go at the end"


def test_options_of_lightning_reach_its_checkpointers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {name: GIVEN[name] for name in names_of(_passed.CheckpointOptions) - {"agent_log"}}
    options["agent_log"] = tmp_path / "log"
    seen = made_with(monkeypatch, forebay.lightning)
    plugin = forebay.lightning.CheckpointIO(**options)
    plugin.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, tmp_path / "one.ckpt")

    class Strategy:
        """As much of one as is asked."""

        model, optimizers = torch.nn.Linear(2, 2), ()

        def broadcast(self, value: Any) -> Any:
            return value

    sharded = forebay.lightning.sharded(Strategy, **options)()
    sharded.save_checkpoint({"global_step": 2, "state_dict": sharded.model.state_dict()}, tmp_path / "two.ckpt")
    sharded.load_checkpoint(tmp_path / "two.ckpt")
    assert [{name: one[name] for name in options} for one in seen] == [options] * 3


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_strategy_that_shards_is_as_strict_as_the_module(tmp_path: Path, is_strict: bool) -> None:
    """`strict_loading = False` of a LightningModule: its checkpoints may have other parts than it has."""

    class Strategy:
        """As much of one as is asked."""

        optimizers = ()

        def __init__(self, model: Any) -> None:
            self.model = self.lightning_module = model

        def broadcast(self, value: Any) -> Any:
            return value

    def module(seed: int, **more: Any) -> Any:
        torch.manual_seed(seed)
        made = torch.nn.ModuleDict({"net": torch.nn.Linear(2, 2), **more})
        made.strict_loading = is_strict  # type: ignore[assignment]
        return made

    sharded = forebay.lightning.sharded(Strategy)
    was, metric = module(1), torch.nn.Linear(3, 3)
    sharded(was).save_checkpoint({"global_step": 2, "state_dict": was.state_dict()}, tmp_path / "one.ckpt")
    now, before = module(2, metric=metric), metric.weight.clone()
    if is_strict:
        with pytest.raises(forebay.CheckpointMismatch, match="the checkpoint lacks 'metric.bias', 'metric.weight'"):
            sharded(now).load_checkpoint(tmp_path / "one.ckpt")
    else:
        assert sharded(now).load_checkpoint(tmp_path / "one.ckpt") == {"global_step": 2}
    assert torch.equal(now["net"].weight, was["net"].weight) is not is_strict and torch.equal(metric.weight, before)


NO_OPTIONS = [
    ("every", "3", r"every is '3'; it is a whole number, at least 1, or None \(hint: None takes the Trainer's save_steps\)"),
    ("every", 0, "every is 0; it is a whole number, at least 1, or None"),
    ("every", 2.5, "every is 2.5; it is"),
    ("every", True, "every is True; it is"),
    ("keep", 0, "keep is 0; it is"),
    ("flush_rate", "fast", "flush_rate is 'fast'; it is a number of bytes"),
    ("linger", -1, "linger is -1; it is a number of seconds"),
    ("on_error", "ignore", "on_error is 'ignore'; it is 'raise' or 'warn'"),
    ("on_signal", "SIGNOT", "on_signal: 'SIGNOT' is no signal"),
    ("local_bytes", "5GiB", "local_bytes is '5GiB'; it is of use with local="),
    ("ranks", (0, 1), r"Callback\(\) takes no ranks: .*hint: "),
    ("rng", True, r"Callback\(\) takes no rng: .*hint: "),
]


@pytest.mark.parametrize("name, value, told", NO_OPTIONS)
def test_what_is_no_option_of_the_callback_is_refused_at_once(tmp_path: Path, name: str, value: Any, told: str) -> None:
    """Not by the training, minutes later; `every="3"` was a TypeError of a comparison."""
    with pytest.raises(forebay.CheckpointInvalid, match=told):
        forebay.huggingface.Callback(tmp_path / "run", **{name: value})
    assert not list(tmp_path.iterdir())


def test_what_nobody_knows_is_told_as_python_tells_it(tmp_path: Path) -> None:
    for made in (
        lambda: forebay.huggingface.Callback(tmp_path, liger=5),
        lambda: forebay.lightning.CheckpointIO(liger=5),
        lambda: forebay.lightning.sharded(object, liger=5),
    ):
        with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'liger'"):
            made()


def test_what_has_no_meaning_for_lightning_is_refused_with_its_reason() -> None:
    wanted = {"on_signal": "acts on signals by itself", "on_error": "deletes the checkpoint before", "linger": "no memory is held"}
    wanted |= {"local": "a place of its own", "keep": "save_top_k"}
    for name in forebay.lightning._REASONS:
        for who, make in (("CheckpointIO", forebay.lightning.CheckpointIO), ("sharded", None)):
            told = rf"^{who}\(\) takes no {name}: .*{wanted.get(name, '')}.*hint: "
            with pytest.raises(forebay.CheckpointInvalid, match=told):
                forebay.lightning.sharded(object, **{name: None}) if make is None else make(**{name: None})
    for options in ({"flush_rate": "fast"}, {"patience": 0}, {"allow_pickle": "no"}):
        with pytest.raises(forebay.CheckpointInvalid, match=next(iter(options))):
            forebay.lightning.CheckpointIO(**options)
        with pytest.raises(forebay.CheckpointInvalid, match=next(iter(options))):
            forebay.lightning.sharded(object, **options)


class At(transformers.TrainerCallback):  # type: ignore[misc]
    """Does something at the ends of some steps."""

    def __init__(self, acts: dict[int, Callable[[], None]]) -> None:
        self.acts = acts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.acts.get(state.global_step, lambda: None)()


def saver_of(trainer: Any) -> forebay.Checkpointer:
    callbacks = trainer.callback_handler.callbacks
    (one,) = [one for one in callbacks if isinstance(one, forebay.huggingface.Callback)]
    assert one._checkpointer is not None
    found: forebay.Checkpointer = one._checkpointer
    return found


def await_last(trainer: Any, outcome: str) -> None:
    """Waits until what was saved last has come to that, and tells nobody."""
    checkpointer = saver_of(trainer)
    save = checkpointer._last
    assert save is not None

    def heard() -> bool:
        checkpointer._session.take_replies(0.1)
        return save._progress() == outcome

    wait_until(heard)


def trained(place: Path, folder: Path, source: Optional[str] = None, **options: Any) -> Any:
    """What recorded the weights of a training of eight steps."""
    trainer, recorder = small_trainer(place, folder, 1 if source is None else 2, 20, options)
    trainer.train(resume_from_checkpoint=source)
    return recorder


@pytest.mark.parametrize("options", [{}, {"on_error": "warn"}, {"on_error": "warn", "max_failures": 1}])
def test_a_save_that_fails_ends_the_training_only_where_it_is_to(tmp_path: Path, options: dict[str, Any]) -> None:
    """The store is away while step 6 is saved. There was no way to go on."""
    run = tmp_path / "run"
    trainer, _ = small_trainer(run, tmp_path / "out", 1, 20, options)

    def away() -> None:
        await_last(trainer, "durable")
        shut(run)

    def back() -> None:
        await_last(trainer, "failed")
        mend(run)

    trainer.add_callback(At({4: away, 7: back}))
    if len(options) == 1:
        with pytest.warns(forebay.CheckpointWarning, match="^step 6 was not saved"):
            trainer.train()
    else:
        text = "^1 saves in a row failed" if options else "exists already"
        with pytest.raises(forebay.CheckpointError, match=text), warnings.catch_warnings():
            warnings.simplefilter("ignore", forebay.CheckpointWarning)
            trainer.train()
    with forebay.Checkpointer(run) as checkpointer:
        assert checkpointer.steps() == ([3, 8] if len(options) == 1 else [3])


def test_a_signal_saves_the_step_with_its_evaluation_and_ends_the_process(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "out"
    whole = trained(tmp_path / "whole", folder)

    def work(report: Report) -> None:
        trainer, _ = small_trainer(run, folder, 1, 20, {"every": 100, "on_signal": "SIGTERM"})
        trainer.add_callback(At({4: lambda: os.kill(os.getpid(), signal.SIGTERM)}))
        trainer.train()

    assert Child(work).join() == -signal.SIGTERM
    source = forebay.huggingface.checkpoint(run, folder)
    assert source == str(folder / "checkpoint-4")
    history = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4], "what was logged of the step is in it"
    resumed = trained(run, folder, source)
    assert list(resumed.weights) == [5, 6, 7, 8]
    assert all(same(resumed.weights[step], whole.weights[step]) for step in resumed.weights)


def test_a_training_that_died_keeps_no_signal_from_the_next(tmp_path: Path) -> None:
    """Its checkpointer, which nobody closed, took the signal that the next one passed on."""

    class Ends(Exception):
        """What the signal does."""

    def ends(number: int, frame: Any) -> None:
        raise Ends

    def raise_error() -> None:
        raise ArithmeticError("a loss that is none")

    before = signal.signal(signal.SIGUSR1, ends)
    try:
        trainer, _ = small_trainer(tmp_path / "run", tmp_path / "out", 1, 20, {"on_signal": "SIGUSR1"})
        at = At({4: raise_error})
        trainer.add_callback(at)
        with pytest.raises(ArithmeticError):
            trainer.train()
        first = saver_of(trainer)
        at.acts = {5: lambda: os.kill(os.getpid(), signal.SIGUSR1)}
        with pytest.raises(Ends):
            trainer.train()
        assert first._is_closed and saver_of(trainer) is not first
        saver_of(trainer).close()
        assert signal.getsignal(signal.SIGUSR1) == ends
        with forebay.Checkpointer(tmp_path / "run") as checkpointer:
            assert checkpointer.steps() == [3, 5]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_last_step_is_not_skipped(tmp_path: Path) -> None:
    callback = forebay.huggingface.Callback(tmp_path / "run", every=1, on_busy="skip")
    state, model = transformers.TrainerState(global_step=1), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    callback.on_train_begin(None, state, None)
    assert callback._checkpointer is not None
    rooms = [False, False, True]
    callback._checkpointer._has_room = lambda waits: rooms.pop(0)  # type: ignore[method-assign]
    callback.on_step_end(None, state, None)
    callback.on_step_begin(None, state, None, **parts)
    assert callback._checkpointer.skipped == 1 and len(rooms) == 2
    callback.on_train_end(None, state, None, **parts)
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.steps() == [1]


def killed_after(run: Path, folder: Path, step: int, outcome: str, stop_store: bool, **options: Any) -> int:
    """A Trainer that is killed once a step has come to that; gives its agent."""

    def work(report: Report) -> None:
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        trainer, _ = small_trainer(run, folder, 1, 20, options)

        def away() -> None:
            await_last(trainer, "durable")
            shut(run)

        def stop() -> None:
            await_last(trainer, outcome)
            report(str(saver_of(trainer)._agent.pid))
            signal.pause()

        trainer.add_callback(At({step + 1: stop, **({step - 1: away} if stop_store else {})}))
        trainer.train()

    child = Child(work)
    agent = int(child.line())
    child.kill()
    return agent


def test_a_killed_trainer_goes_on_from_memory(tmp_path: Path) -> None:
    """Step 6 never reached the store: the Trainer went back to step 3, as nothing was held for it."""
    run, folder = tmp_path / "run", tmp_path / "out"
    whole = trained(tmp_path / "whole", folder)
    agent = killed_after(run, folder, 6, "failed", True, linger=LINGER_S)
    mend(run)
    source = forebay.huggingface.checkpoint(run, folder)
    assert source == str(folder / "checkpoint-6") and is_running(agent), "it is held until the training has it"
    assert json.loads((folder / "checkpoint-6" / "forebay.json").read_text())["tier"] == "arena"
    trainer, recorder = small_trainer(run, folder, 2, 20, {"linger": LINGER_S})
    seen: list[Any] = []
    trainer.add_callback(At({7: lambda: seen.append(saver_of(trainer).restored)}))
    with pytest.warns(forebay.CheckpointWarning, match="step 6, which a killed trainer had sealed.*in memory alone"):
        trainer.train(resume_from_checkpoint=source)
    assert (seen[0].step, seen[0].tier) == (6, "arena")
    assert list(recorder.weights) == [7, 8]
    assert all(same(recorder.weights[step], whole.weights[step]) for step in recorder.weights)
    wait_until(lambda: not is_running(agent))
    with forebay.Checkpointer(run) as checkpointer:
        assert checkpointer.steps() == [3, 8]


def test_a_step_that_was_gone_on_from_stays_in_memory(tmp_path: Path) -> None:
    """The Trainer that was started again is killed, too, before it has saved anything."""
    run, folder = tmp_path / "run", tmp_path / "out"
    first = killed_after(run, folder, 6, "failed", True, linger=LINGER_S)
    mend(run)

    def work(report: Report) -> None:
        warnings.simplefilter("ignore", forebay.CheckpointWarning)
        source = forebay.huggingface.checkpoint(run, folder)
        trainer, _ = small_trainer(run, folder, 2, 20, {"linger": LINGER_S, "every": 100})

        def stop() -> None:
            report(str(saver_of(trainer)._agent.pid))
            report(saver_of(trainer)._ladder.arena.place(0))
            signal.pause()

        trainer.add_callback(At({8: stop}))
        trainer.train(resume_from_checkpoint=source)

    child = Child(work)
    second, place = int(child.line()), child.line()
    child.kill()
    wait_until(lambda: not is_running(first))
    # On a host that is slow, who comes at once is there before the agent knows of the end.
    wait_until(lambda: _native.Predecessor.visit(place) is not None)
    assert forebay.huggingface.checkpoint(run, tmp_path / "again") == str(tmp_path / "again" / "checkpoint-6")
    end(second)
    assert forebay.huggingface.checkpoint(run, tmp_path / "again") == str(tmp_path / "again" / "checkpoint-3")


def content(folder: Path) -> dict[str, Any]:
    """All that a directory has, but where it comes from."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, "pt") as opened:
                names = sorted(opened.keys())
                found[path.name] = [opened.metadata(), {name: opened.get_tensor(name).tolist() for name in names}]
        elif path.suffix in (".pt", ".pth"):
            found[path.name] = repr(torch.load(path, weights_only=False))
        elif path.name != "forebay.json":
            found[path.name] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("tier", ["arena", "local"])
@pytest.mark.parametrize("file_bytes", [None, 4000])
def test_a_nearer_copy_is_written_as_the_one_in_the_store(
    tmp_path: Path, tier: str, file_bytes: Optional[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, names and values, tied weights and all, in one file or several."""
    run, folder = tmp_path / "run", tmp_path / "out"
    options = {"linger": LINGER_S} if tier == "arena" else {"linger": 0, "local": tmp_path / "disk"}
    if file_bytes is not None:
        monkeypatch.setattr(forebay.huggingface, "SHARD_BYTES", file_bytes)
    agent = killed_after(run, folder, 3, "durable", False, **options)
    near = forebay.huggingface.checkpoint(run, tmp_path / "near", local=options.get("local"))
    if tier == "arena":
        end(agent)
    wait_until(lambda: not is_running(agent))
    far = forebay.huggingface.checkpoint(run, tmp_path / "far")
    assert near is not None and far is not None
    notes = [json.loads((Path(source) / "forebay.json").read_text()) for source in (near, far)]
    assert (notes[0]["tier"], notes[1].get("tier")) == (tier, None)
    assert content(Path(near)) == content(Path(far))
    shards = [name for name in os.listdir(near) if name.endswith(".safetensors")]
    assert (len(shards) > 2) == (file_bytes is not None)
    # In the place of one of the memory comes that of the store, which has a name that nothing else has.
    assert forebay.huggingface.checkpoint(run, tmp_path / "near") == near
    assert json.loads((Path(near) / "forebay.json").read_text()) == notes[1]


def test_a_training_goes_on_from_the_step_before_a_damaged_one(tmp_path: Path) -> None:
    """It stored all of its first step anew, as if no step had been there."""
    run, folder = tmp_path / "run", tmp_path / "out"
    trained(run, folder)
    with forebay.Checkpointer(run) as checkpointer:
        last, before = sorted(checkpointer.steps(), reverse=True)[:2]
    (manifest,) = run.glob(f"steps/{last:020}/*.json")
    manifest.write_text("not one")
    with pytest.warns(forebay.CheckpointWarning, match=f"step {before} is used instead of a newer one"):
        source = forebay.huggingface.checkpoint(run, folder)
    assert source == str(folder / f"checkpoint-{before}")
    trainer, _ = small_trainer(run, folder, 2, 20, {})
    seen: list[Any] = []
    trainer.add_callback(At({before + 1: lambda: seen.append(saver_of(trainer).restored)}))
    trainer.train(resume_from_checkpoint=source)
    assert seen[0] is not None and (seen[0].step, seen[0].tier) == (before, "store")


def test_damaged_memory_leaves_the_store(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "out"
    agent = killed_after(run, folder, 3, "durable", False, linger=LINGER_S)
    for entry in arenas_of(agent):
        data = bytearray(Path(entry).read_bytes())
        for place in range(8192, len(data), 4096):
            data[place] ^= 1
        with open(entry, "r+b") as file:
            file.write(data)
    with pytest.warns(forebay.CheckpointWarning, match="step 3 in memory is not used"):
        source = forebay.huggingface.checkpoint(run, folder)
    assert source is not None
    assert "tier" not in json.loads((Path(source) / "forebay.json").read_text())
    assert sorted(os.listdir(folder)) == ["checkpoint-3"], "nothing is left of the other"
    end(agent)
