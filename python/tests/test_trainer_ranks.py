"""Lightning and Hugging Face's Trainer with several processes: training that goes on as if it had not stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import forebay
from forebay import _native

from .conftest import free_port, wait_until
from .test_crash import is_running
from .test_ranks import run_ranks, start_ranks
from .test_restart import LINGER_S
from .test_trainer_options import At, await_last, saver_of
from .test_trainers import pytorch_lightning, quiet, small_trainer  # noqa: F401  (a fixture)

import forebay.huggingface  # noqa: E402  isort: skip
import forebay.lightning  # noqa: E402  isort: skip
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy  # noqa: E402  isort: skip


def as_torchrun(world_size: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work` with the environment that torchrun sets, for libraries that join torch's group by themselves."""
    port = free_port()

    def run(rank: int, *rest: Any) -> Any:
        local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0, "NODE_RANK": 0}
        os.environ.update({name: str(value) for name, value in local.items()}, MASTER_PORT=str(port))
        try:
            return work(rank, *rest)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return run


def run_job(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """As `run_ranks`, with the environment of torchrun."""
    return run_ranks(world_size, as_torchrun(world_size, work), with_gloo=False)


class Model(pytorch_lightning.LightningModule):  # type: ignore[misc]
    """Something to train, whole or sharded."""

    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.is_sharded = is_sharded
        self.seen: list[list[float]] = []

    def configure_model(self) -> None:
        if self.is_sharded and not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.seen.append([self.trainer.global_step, loss.item()])
        return loss

    def configure_optimizers(self) -> Any:
        optim = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optim], [torch.optim.lr_scheduler.StepLR(optim, 1)]


def fit(folder: Path, strategy: Any, epochs: int, source: Any = None, seed: int = 0) -> list[list[float]]:
    """The losses of this rank."""
    ddp = isinstance(strategy, DDPStrategy)
    callback = pytorch_lightning.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = pytorch_lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        plugins=[forebay.lightning.CheckpointIO()] if ddp else [],
    )
    torch.manual_seed(seed)
    data = torch.utils.data.TensorDataset(torch.arange(48.0).view(12, 4) / 48)
    model = Model(isinstance(strategy, ModelParallelStrategy))
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=3), ckpt_path=source)
    return model.seen


class Fsdp1(FSDPStrategy):  # type: ignore[misc]
    """On the processor, which torch allows where it is asked for by name, and Lightning does not ask."""

    def _setup_model(self, model: Any) -> Any:
        wrap = torch.distributed.fsdp.FullyShardedDataParallel.__init__

        def init(itself: Any, *args: Any, **kwargs: Any) -> None:
            wrap(itself, *args, **{**kwargs, "device_id": torch.device("cpu")})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed.fsdp.FullyShardedDataParallel, "__init__", init)
            return super()._setup_model(model)


def strategies(kind: str) -> Any:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if kind == "fsdp":
        return forebay.lightning.sharded(Fsdp1)(state_dict_type="sharded", process_group_backend="gloo")
    size = int(os.environ["WORLD_SIZE"])
    sharded = forebay.lightning.sharded(ModelParallelStrategy)
    return sharded(data_parallel_size=size, tensor_parallel_size=1, process_group_backend="gloo")


@pytest.mark.parametrize("kind", ["ddp", "model-parallel", "fsdp"])
def test_lightning_resumes_bit_equal_with_several_processes(tmp_path: Path, kind: str) -> None:
    losses = run_job(2, lambda rank: fit(tmp_path / "one", strategies(kind), 3))
    kept = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert kept == [f"epoch={epoch}.ckpt" for epoch in range(3)]
    for name in kept:
        assert _native.verify(f"file://{tmp_path / 'one' / name}", None) == []
    source = tmp_path / "one" / "epoch=0.ckpt"
    resumed = run_job(2, lambda rank: fit(tmp_path / "two", strategies(kind), 3, source, seed=9))
    assert resumed == [[entry for entry in of_rank if entry[0] >= 2] for of_rank in losses]
    assert len(resumed[0]) == 4
    loaded = forebay.load(tmp_path / "one" / "epoch=2.ckpt")
    assert loaded["global_step"] == 6 and loaded["state_dict"]["net.0.weight"].shape == (8, 4)
    if kind != "ddp":
        # At another number of ranks the data differ: only that it goes on from there is compared.
        (alone,) = run_job(1, lambda rank: fit(tmp_path / "alone", strategies(kind), 2, source, seed=9))
        assert [entry[0] for entry in alone] == [2, 3, 4, 5]


def train(place: Path, folder: Path, seed: int, step: Any = None) -> Any:
    """A Trainer's losses and weights on this rank, and what `checkpoint` gave."""
    source = forebay.huggingface.checkpoint(place.parent / "one", folder, step) if step is not None else None
    trainer, recorder = small_trainer(place, folder, seed, 40, ddp_backend="gloo")
    trainer.train(resume_from_checkpoint=source)
    weights = {step: [value.double().sum().item() for value in saved.values()] for step, saved in recorder.weights.items()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [source, losses, [[step, *sums] for step, sums in weights.items()], trainer.args.world_size]


def test_the_trainer_of_hugging_face_resumes_bit_equal_with_several_processes(tmp_path: Path) -> None:
    whole = run_job(2, lambda rank: train(tmp_path / "one", tmp_path / "out", 1))
    assert [entry[3] for entry in whole] == [2, 2]
    with forebay.Checkpointer(tmp_path / "one") as checkpointer:
        assert checkpointer.steps() == [3, 6, 8]
    # What both processes hold is stored once, half by each.
    shards = sorted((tmp_path / "one" / "shards").glob(f"{3:020}/*/*.safetensors"))
    sizes = [path.stat().st_size for path in shards]
    assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes), sizes
    resumed = run_job(2, lambda rank: train(tmp_path / "two", tmp_path / "out", 2, step=3))
    for one, two in zip(whole, resumed):
        assert two[0] == str(tmp_path / "out" / "checkpoint-3")
        # The losses of the first three steps come with the checkpoint.
        assert two[1] == one[1] and len(two[1]) == 8
        assert two[2] == one[2][3:]
    names = {path.name for path in (tmp_path / "out" / "checkpoint-3").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names


def test_trainers_that_were_killed_go_on_from_the_memory_of_all(tmp_path: Path) -> None:
    """Each has its own random numbers, and half of what both have."""
    place, folder = tmp_path / "run", tmp_path / "out"
    whole = run_job(2, lambda rank: train(tmp_path / "one", tmp_path / "unused", 1))

    def killed(rank: int, report: Callable[[str], None]) -> None:
        trainer, _ = small_trainer(place, folder, 1, 40, {"linger": LINGER_S}, ddp_backend="gloo")

        def stop() -> None:
            await_last(trainer, "durable")
            report(str(saver_of(trainer)._agent.pid))
            signal.pause()

        trainer.add_callback(At({4: stop}))
        trainer.train()

    children = start_ranks(2, as_torchrun(2, killed), with_gloo=False)
    agents = [int(child.line()) for child in children]
    for child in children:
        child.kill()

    def resumed(rank: int) -> Any:
        source = forebay.huggingface.checkpoint(place, folder)
        trainer, recorder = small_trainer(place, folder, 2, 40, ddp_backend="gloo")
        seen: list[Any] = []
        trainer.add_callback(At({5: lambda: seen.append(saver_of(trainer).restored.tier)}))
        trainer.train(resume_from_checkpoint=source)
        weights = [[at, *(value.double().sum().item() for value in own.values())] for at, own in recorder.weights.items()]
        return [source, seen, weights]

    for one, two in zip(whole, run_job(2, resumed)):
        assert two == [str(folder / "checkpoint-3"), ["arena"], one[2][3:]]
    assert json.loads((folder / "checkpoint-3" / "forebay.json").read_text())["tier"] == "arena"
    for agent in agents:
        wait_until(lambda: not is_running(agent))
    with forebay.Checkpointer(place) as checkpointer:
        assert checkpointer.steps() == [3, 6, 8]
