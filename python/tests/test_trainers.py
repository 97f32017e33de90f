"""Lightning and Hugging Face's Trainer with the real libraries: training that goes on as if it had not stopped."""

from __future__ import annotations

import collections
import fcntl
import itertools
import json
import os
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay import _adapters, _native

from .conftest import PATIENCE_S, Child

pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="LIGHTNING is not installed")
transformers = pytest.importorskip("transformers", reason="TRANSFORMERS is not installed")

import safetensors.torch  # noqa: E402

import forebay.huggingface  # noqa: E402
import forebay.lightning  # noqa: E402


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Neither library may look for others' services, nor draw bars."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", forebay.CheckpointWarning)
        yield


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Model(pytorch_lightning.LightningModule):  # type: ignore[misc]
    """Something to train, with randomness of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optim = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optim], [torch.optim.lr_scheduler.MultiStepLR(optim, [1, 2, 5])]


class Weights(pytorch_lightning.Callback):  # type: ignore[misc]
    """The weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        # Lightning saves no generator: each step draws from one of its own.
        torch.manual_seed(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights[trainer.global_step] = {name: value.clone() for name, value in module.state_dict().items()}


def fit(folder: Path, epochs: int, source: Any = None, seed: int = 0) -> tuple[Model, Weights]:
    callback = pytorch_lightning.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{epoch}", monitor="loss", save_top_k=2, save_last=True
    )
    recorder = Weights()
    trainer = pytorch_lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, recorder],
        plugins=[forebay.lightning.CheckpointIO()],
    )
    torch.manual_seed(seed)
    data = torch.utils.data.TensorDataset(torch.arange(48.0).view(12, 4) / 48)
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=source)
    return model, recorder


def test_lightning_saves_rotates_and_resumes(tmp_path: Path) -> None:
    first, _ = fit(tmp_path, 4)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 3 and "last.ckpt" in kept, kept
    loaded = forebay.load(tmp_path / "last.ckpt")
    assert loaded["global_step"] == 12 and loaded["epoch"] == 3 and same(loaded["state_dict"], first.state_dict())
    assert loaded["hyper_parameters"] == {"width": 8}
    weights = Model()
    forebay.load_model(tmp_path / "last.ckpt", weights)
    assert same(weights.state_dict(), first.state_dict())
    assert _native.verify(f"file://{tmp_path / 'last.ckpt'}", None) == []
    # Nothing is left to do: the state is what was saved, not what a new model has.
    again, _ = fit(tmp_path / "again", 4, tmp_path / "last.ckpt", seed=1)
    assert same(again.state_dict(), first.state_dict())
    # What goes on is as if it had not stopped, moments and the schedule of the rate and all.
    _, whole = fit(tmp_path / "whole", 6)
    _, resumed = fit(tmp_path / "further", 6, tmp_path / "last.ckpt", seed=1)
    assert list(whole.weights) == list(range(1, 19)) and list(resumed.weights) == list(range(13, 19))
    assert not same(whole.weights[18], whole.weights[12])
    assert all(same(resumed.weights[step], whole.weights[step]) for step in resumed.weights)
    ends = [forebay.load(tmp_path / name / "last.ckpt") for name in ("whole", "further")]
    assert [end["global_step"] for end in ends] == [18, 18]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        moments = [end["optimizer_states"][0]["state"] for end in ends]
        assert moments[0].keys() == moments[1].keys()
        assert all(torch.equal(moments[0][number][key], moments[1][number][key]) for number in moments[0]), key
    assert ends[0]["lr_schedulers"] == ends[1]["lr_schedulers"]


def test_whatever_lightning_removes_is_gone_or_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of runs before the plug-in and links were left, and so in silence was what could not be deleted."""
    plugin = forebay.lightning.CheckpointIO()
    for name in ("one.ckpt", "two.ckpt"):
        plugin.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, tmp_path / name)
    (tmp_path / "old.ckpt").write_bytes(b"as torch writes it")
    (tmp_path / "last.ckpt").symlink_to("one.ckpt")
    (tmp_path / "broken.ckpt").symlink_to("nowhere")
    for name in ("old.ckpt", "last.ckpt", "broken.ckpt", "none.ckpt"):
        plugin.remove_checkpoint(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["one.ckpt", "two.ckpt"]
    assert torch.equal(forebay.load(tmp_path / "one.ckpt")["w"], torch.ones(3)), "what a link leads to is left"

    unlink = os.unlink

    def refuse(path: Any, **kept: Any) -> None:
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, **kept)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.warns(forebay.CheckpointWarning, match="two.ckpt is not deleted: .*Permission denied"):
        plugin.remove_checkpoint(tmp_path / "two.ckpt")
    assert not list((tmp_path / "two.ckpt").glob("steps/*/*")), "what can be deleted is"
    monkeypatch.setattr(os, "unlink", unlink)
    plugin.remove_checkpoint(tmp_path / "two.ckpt")
    assert os.listdir(tmp_path) == ["one.ckpt"]


def test_lightning_removes_no_checkpoint_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `AsyncCheckpointIO` saves in a thread and removes at once, and half of a checkpoint stayed."""
    from pytorch_lightning.plugins.io import AsyncCheckpointIO

    plugin, began, may_end = AsyncCheckpointIO(forebay.lightning.CheckpointIO()), threading.Event(), threading.Event()
    save, order = forebay.lightning._save, []

    def save_late(*args: Any) -> None:
        began.set()
        assert may_end.wait(PATIENCE_S)
        save(*args)
        order.append("saved")

    def remove() -> None:
        plugin.remove_checkpoint(tmp_path / "one.ckpt")
        order.append("removed")

    monkeypatch.setattr(forebay.lightning, "_save", save_late)
    plugin.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, tmp_path / "one.ckpt")
    assert began.wait(PATIENCE_S)
    (tmp_path / "another.ckpt").write_bytes(b"")
    plugin.remove_checkpoint(tmp_path / "another.ckpt")
    remover = threading.Thread(target=remove)
    remover.start()
    remover.join(0.2)
    may_end.set()
    plugin.teardown()
    remover.join()
    assert order == ["saved", "removed"] and os.listdir(tmp_path) == []


class Recorder(transformers.TrainerCallback):  # type: ignore[misc]
    """The weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.weights[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}


def small_trainer(
    place: Path, folder: Path, seed: int, count: int, options: Any = None, **settings: Any
) -> tuple[Any, Recorder]:
    """A Trainer of a small model and `count` rows that saves every third of eight steps, and what records its weights."""
    chosen: dict[str, Any] = {"every": 3, "keep": 9, **(options or {})}
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=8)
    numbers = torch.Generator().manual_seed(5)
    rows = [torch.randint(40, (8,), generator=numbers).tolist() for _ in range(count)]
    recorder = Recorder()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=8,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=1,
        **settings,
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[forebay.huggingface.Callback(place, **chosen), recorder],
    )
    return trainer, recorder


def train(place: Path, folder: Path, source: Any, seed: int) -> Recorder:
    trainer, recorder = small_trainer(place, folder, seed, 20)
    trainer.train(resume_from_checkpoint=source)
    return recorder


def test_the_trainer_of_hugging_face_resumes_bit_equal(tmp_path: Path) -> None:
    place, folder = tmp_path / "run", tmp_path / "out"
    assert forebay.huggingface.checkpoint(place, folder) is None
    whole = train(place, folder, None, seed=1)
    with forebay.Checkpointer(place) as checkpointer:
        assert checkpointer.steps() == [3, 6, 8]
    source = forebay.huggingface.checkpoint(place, folder, step=3)
    assert source == str(folder / "checkpoint-3") == forebay.huggingface.checkpoint(place, folder, step=3)
    resumed = train(tmp_path / "other", folder, source, seed=2)
    assert list(resumed.weights) == [4, 5, 6, 7, 8]
    assert all(same(resumed.weights[step], whole.weights[step]) for step in resumed.weights)
    # The log's entry of the saved step is in it.
    history = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history] == [1, 2, 3]
    # The real library reads the directory as a model of its own, tied weights and all.
    model, told = transformers.GPT2LMHeadModel.from_pretrained(source, output_loading_info=True)
    assert same(model.state_dict(), whole.weights[3]) and not any(told.values()), told
    with pytest.raises(forebay.CheckpointNotFound):
        forebay.huggingface.checkpoint(place, folder, step=4)
    assert sorted(os.listdir(folder)) == ["checkpoint-3"]


def test_a_callback_that_is_used_again_saves_the_end_of_each_training(tmp_path: Path) -> None:
    """The last step of the second has the number of the first one's, and was taken to be saved."""
    place, folder = tmp_path / "run", tmp_path / "out"
    trainer, recorder = small_trainer(place, folder, 1, 20)
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, forebay.huggingface.Callback)]
    # None but the last.
    callback._every = 20
    for _ in range(2):
        trainer.train()
        source = forebay.huggingface.checkpoint(place, folder)
        assert source == str(folder / "checkpoint-8")
        assert same(transformers.GPT2LMHeadModel.from_pretrained(source).state_dict(), recorder.weights[8])
    # What a training that died was about to save, and how often, is nothing to the next one.
    callback._every, callback._has_stepped = None, True
    for interval in (4, 5):
        callback.on_train_begin(trainer.args, transformers.TrainerState(save_steps=interval), trainer.control)
        assert callback._checkpointer is not None
        assert (callback._checkpointer._schedule._every, callback._has_stepped) == (interval, False)
        callback._checkpointer.close()


@pytest.mark.parametrize("mode", ["NOT_PARALLEL", "DISTRIBUTED"])
def test_generators_of_devices_are_saved_as_the_trainer_resumes_them(tmp_path: Path, mode: str) -> None:
    """One process under torchrun is distributed to the Trainer, which took one device's state for those of all."""
    draws = types.SimpleNamespace(get_rng_state=lambda: torch.ones(4), get_rng_state_all=lambda: [torch.zeros(4)] * 2)
    cuda = types.SimpleNamespace(is_available=lambda: True, random=draws)
    args = types.SimpleNamespace(parallel_mode=transformers.training_args.ParallelMode[mode])
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    callback = forebay.huggingface.Callback(tmp_path / "run", every=1)
    state = transformers.TrainerState(global_step=1)
    callback.on_train_begin(args, state, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forebay.huggingface, "torch", types.SimpleNamespace(cuda=cuda, random=torch.random))
        callback.on_train_end(args, state, None, **parts)
    source = forebay.huggingface.checkpoint(tmp_path / "run", tmp_path / "out")
    saved = torch.load(f"{source}/rng_state.pth", weights_only=False)["cuda"]
    if mode == "DISTRIBUTED":
        assert isinstance(saved, list) and [one.tolist() for one in saved] == [[0.0] * 4] * 2
    else:
        assert saved.tolist() == [1.0] * 4


def adapted() -> Any:
    """A model with two adapters of PEFT's, of which the first is trained."""
    import peft

    torch.manual_seed(3)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, lora)
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["c_fc"], init_lora_weights=False))
    return model


def test_a_model_of_peft_is_resumed_and_its_adapters_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer took a directory of several files for an adapter's, and found none; and PEFT found none in one."""
    import peft

    monkeypatch.setattr(forebay.huggingface, "SHARD_BYTES", 20)
    out = tmp_path / "out"
    words = [torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(seed)) for seed in range(16)]
    data = [{"input_ids": some, "labels": some} for some in words]

    def trained(place: Path, until: int = 4, source: Optional[str] = None) -> Any:
        model = adapted()
        options: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
        args = transformers.TrainingArguments(str(out), max_steps=4, learning_rate=0.1, **options)
        trainer = transformers.Trainer(model, args, train_dataset=data)
        trainer.add_callback(forebay.huggingface.Callback(place, every=2, trainer=trainer))

        class Ends(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop |= state.global_step == until

        trainer.add_callback(Ends())
        trainer.train(resume_from_checkpoint=source)
        return model

    place, expected = tmp_path / "run", trained(tmp_path / "whole").state_dict()
    half = trained(place, 2).state_dict()
    assert not same(half, expected)
    source = forebay.huggingface.checkpoint(place, out)
    assert source is not None
    files = [name for name in os.listdir(source) if name.startswith(("adapter", "model", "other"))]
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors", "model.safetensors", "other"]
    assert same(safetensors.torch.load_file(f"{source}/model.safetensors"), half)
    assert same(trained(place, source=source).state_dict(), expected)
    fresh = peft.PeftModel.from_pretrained(adapted().unload(), source)
    fresh.load_adapter(f"{source}/other", "other")
    read = fresh.state_dict()
    assert any(".lora_A.other." in name for name in read) and same(read, {name: half[name] for name in read})
    # What PEFT makes of prompts is in no step, and a name from a step leads nowhere else.
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert _adapters.told_of(peft.get_peft_model(adapted().unload(), prompts)) == "{}"
    with pytest.raises(forebay.CheckpointCorrupt, match="which is no name"):
        _adapters.write(json.dumps({"../other": {}}), Path(source))


def put(place: Path, step: int, value: float, scaler: Any = None) -> None:
    """A step as the callback saves it, of a model of that one value."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if scaler is not None:
        optimizer.scaler = scaler  # type: ignore[attr-defined]
    state, scheduler = transformers.TrainerState(global_step=step), torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    with forebay.Checkpointer(place, rng=False, linger=0) as checkpointer:
        checkpointer.save_now(step, forebay.huggingface._state(state, model, optimizer, scheduler))


def got(place: Path, folder: Path, step: Any = None) -> tuple[str, float]:
    """What `checkpoint` writes: its name, and the model's one value."""
    source = forebay.huggingface.checkpoint(place, folder, step)
    assert source is not None
    value: float = safetensors.torch.load_file(f"{source}/model.safetensors")["weight"][0, 0].item()
    return os.path.basename(source), value


def test_a_directory_of_a_step_that_was_saved_anew_is_written_anew(tmp_path: Path) -> None:
    """One that went back and trained on resumed from the weights that it had left."""
    place, folder = tmp_path / "run", tmp_path / "out"
    put(place, 500, 1.0)
    put(place, 1000, 2.0)
    assert got(place, folder) == ("checkpoint-1000", 2.0)
    assert got(place, folder, 500) == ("checkpoint-500", 1.0)
    put(place, 1000, 7.0)
    assert got(place, folder) == ("checkpoint-1000", 7.0)
    other = tmp_path / "other"
    put(other, 1000, 9.0)
    assert got(other, folder) == ("checkpoint-1000", 9.0), "nor is it another run's"
    inode = (folder / "checkpoint-1000").stat().st_ino
    assert got(other, folder) == ("checkpoint-1000", 9.0)
    assert (folder / "checkpoint-1000").stat().st_ino == inode, "what is there is not written again"
    assert sorted(os.listdir(folder)) == ["checkpoint-1000", "checkpoint-500"]


@pytest.mark.parametrize("named", [None, "not JSON", "[]"])
def test_a_directory_that_another_program_wrote_is_left(tmp_path: Path, named: Any) -> None:
    place, folder = tmp_path / "run", tmp_path / "out"
    put(place, 3, 1.0)
    (folder / "checkpoint-3").mkdir(parents=True)
    (folder / "checkpoint-3" / "model.safetensors").write_text("the Trainer's own")
    if named is not None:
        (folder / "checkpoint-3" / "forebay.json").write_text(named)
    with pytest.raises(forebay.CheckpointInvalid, match=r"checkpoint-3 is not of .*checkpoint.*hint: "):
        forebay.huggingface.checkpoint(place, folder)
    assert (folder / "checkpoint-3" / "model.safetensors").read_text() == "the Trainer's own"
    assert os.listdir(folder) == ["checkpoint-3"]


def killed_at(change: int, place: Path, folder: Path) -> bool:
    """Whether a process that `checkpoint` is called in, and that is killed before that change of names, comes to it."""

    def work(report: Any) -> None:
        rename, changes = os.rename, itertools.count(1)

        def rename_or_die(source: Any, target: Any) -> None:
            if next(changes) == change:
                os._exit(0)
            rename(source, target)

        os.rename = rename_or_die  # type: ignore[assignment]
        forebay.huggingface.checkpoint(place, folder)
        report("done")

    child = Child(work)
    line = child.line()
    assert child.join() == 0
    return line != "done"


def test_a_kill_while_a_directory_is_written_leaves_a_whole_one_or_none(tmp_path: Path) -> None:
    place, folder = tmp_path / "run", tmp_path / "out"
    put(place, 3, 1.0)
    got(place, folder)
    put(place, 3, 2.0)
    seen: list[Any] = []
    for change in range(1, 10):
        if not killed_at(change, place, folder):
            break
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
        assert names in ([], ["checkpoint-3"])
        values = [safetensors.torch.load_file(folder / name / "model.safetensors")["weight"][0, 0] for name in names]
        seen.append([value.item() for value in values])
    # The new one cannot take the place of the old; that goes; the new one cannot come.
    assert seen == [[1.0], [1.0], []] and got(place, folder) == ("checkpoint-3", 2.0)
    left = list(folder.glob(".checkpoint-3.*"))
    assert len(left) == len(seen)
    # What is locked is in use; what nobody locks any more is left, but just begun it may be about to be locked.
    lock = open(left[0] / "lock")
    fcntl.flock(lock, fcntl.LOCK_EX)
    far = left[1].rename(folder / ".checkpoint-3.another-host.x.part")
    for one in (left[0], far, left[2]):
        os.utime(one, (time.time() - 3600,) * 2)
    put(place, 3, 3.0)
    assert got(place, folder) == ("checkpoint-3", 3.0)
    assert set(folder.glob(".*")) == {left[0], far}
    lock.close()
    os.utime(far, (0, 0))
    put(place, 3, 4.0)
    assert got(place, folder) == ("checkpoint-3", 4.0) and os.listdir(folder) == ["checkpoint-3"]


@pytest.mark.parametrize("change", [1, 2, 3])
def test_others_may_write_a_directory_at_the_same_time(
    tmp_path: Path, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = tmp_path / "run", tmp_path / "out"
    put(place, 3, 1.0)
    got(place, folder)
    put(place, 3, 2.0)
    rename, changes = os.rename, itertools.count(1)

    def rename_late(source: Any, target: Any) -> None:
        if next(changes) == change:
            assert got(place, folder) == ("checkpoint-3", 2.0)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_late)
    assert got(place, folder) == ("checkpoint-3", 2.0)
    assert next(changes) > change and os.listdir(folder) == ["checkpoint-3"]


def test_the_scale_of_the_loss_is_saved_and_resumed(tmp_path: Path) -> None:
    """Without it, the first steps of a training with 16-bit numbers are lost to a scale that is too large."""
    place, folder = tmp_path / "run", tmp_path / "out"

    def scaled(place: Path, source: Any) -> tuple[dict[str, Any], Recorder]:
        trainer, recorder = small_trainer(place, folder, 1, 20)
        # As accelerate makes one on a GPU; it changes with each second step.
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        trainer.train(resume_from_checkpoint=source)
        return trainer.accelerator.scaler.state_dict(), recorder

    (scale, whole), source = scaled(place, None), forebay.huggingface.checkpoint(place, folder, 3)
    assert scale["scale"] == 64.0 * 2**4
    saved = torch.load(folder / "checkpoint-3" / "scaler.pt", weights_only=True)
    assert (saved["scale"], saved["_growth_tracker"]) == (128.0, 1)
    again, resumed = scaled(tmp_path / "other", source)
    assert again == scale and list(resumed.weights) == [4, 5, 6, 7, 8]
    assert all(same(resumed.weights[step], whole.weights[step]) for step in resumed.weights)
    put(tmp_path / "none", 3, 1.0)
    got(tmp_path / "none", tmp_path / "without")
    assert not (tmp_path / "without" / "checkpoint-3" / "scaler.pt").exists(), "which a Trainer without one would load"
    # As the Trainer loads it.
    scheduler = torch.load(tmp_path / "without" / "checkpoint-3" / "scheduler.pt", weights_only=True)
    assert scheduler["milestones"] == collections.Counter([2, 4]) and type(scheduler["milestones"]) is collections.Counter


def test_who_resumes_states_of_callbacks_is_warned_that_they_are_not_saved(tmp_path: Path) -> None:
    stopping = transformers.EarlyStoppingCallback()
    for restores, stateful, warns in ((True, [stopping], 1), (False, [stopping], 0), (True, [], 0)):
        callback = forebay.huggingface.Callback(tmp_path)
        state = transformers.TrainerState(stateful_callbacks=[*stateful, transformers.TrainerControl()])
        args = types.SimpleNamespace(restore_callback_states_from_checkpoint=restores)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            callback.on_train_begin(args, state, None)
        messages = [str(one.message) for one in told if one.category is forebay.CheckpointWarning]
        assert ["EarlyStoppingCallback" in message for message in messages] == [True] * warns
        assert callback._checkpointer is not None
        callback._checkpointer.close()


def test_trainers_that_shard_their_models_are_refused(tmp_path: Path) -> None:
    callback = forebay.huggingface.Callback(tmp_path)
    for sharding in ({"fsdp": ["full_shard"]}, {"deepspeed": {"zero_optimization": {"stage": 2}}}):
        with pytest.raises(forebay.CheckpointError, match="forebay.dcp"):
            callback.on_train_begin(types.SimpleNamespace(**sharding), None, None)
