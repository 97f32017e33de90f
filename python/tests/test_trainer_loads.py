"""Lightning's ranks that load one checkpoint: read once between them where all come for it, and by each for itself else."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist

import forebay
from forebay import _coming, _native
from forebay._ranks import Ranks

from .conftest import PATIENCE_S, Proxy, chances
from .hosts import Hosts, hosts  # noqa: F401  (a fixture)
from .test_reading import read_bytes
from .test_ranks import run_ranks, start_ranks
from .test_trainer_ranks import run_job
from .test_trainers import pytorch_lightning, quiet  # noqa: F401  (a fixture)

import forebay.lightning  # noqa: E402  isort: skip
from pytorch_lightning.strategies import DDPStrategy  # noqa: E402  isort: skip

SIDE = 1024
WEIGHT_BYTES = 4 * SIDE * SIDE


class Counted(forebay.lightning.CheckpointIO):
    """The plug-in, which tells what each load has read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        before = read_bytes()
        loaded = super().load_checkpoint(*args, **kwargs)
        self.read.append(read_bytes() - before)
        return loaded


class Model(pytorch_lightning.LightningModule):  # type: ignore[misc]
    """Something large enough to be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(SIDE, SIDE, bias=False)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(folder: Path, epochs: int, source: Any = None) -> list[Any]:
    """What this rank read to resume, and the sum of its weights."""
    plugin = Counted()
    trainer = pytorch_lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[pytorch_lightning.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)],
        plugins=[plugin],
    )
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.ones(3, SIDE))
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=1), ckpt_path=source)
    return [plugin.read, model.net.weight.double().sum().item()]


def test_a_training_that_resumes_reads_its_checkpoint_once_for_all_ranks(tmp_path: Path) -> None:
    """Each rank read all of it."""
    whole = run_job(3, lambda rank: fit(tmp_path / "one", 2))
    resumed = run_job(3, lambda rank: fit(tmp_path / "two", 2, tmp_path / "one" / "epoch=0.ckpt"))
    assert [weights for _, weights in resumed] == [weights for _, weights in whole]
    read = [read for ((read,), _) in resumed]
    # The weights and two moments of them.
    assert 3 * WEIGHT_BYTES <= sum(read) <= 1.1 * 3 * WEIGHT_BYTES, read
    assert max(read) <= 1.3 * WEIGHT_BYTES, read


class Counter(Proxy):
    """A way to a store on which what comes of it is counted."""

    def __init__(self, endpoint: str) -> None:
        self.gets, self.bytes = 0, 0
        self._lock = threading.Lock()
        super().__init__(endpoint)

    def serve(self, visitor: socket.socket) -> None:
        store = socket.create_connection(self._store)
        back = threading.Thread(target=self._bring, args=[store, visitor], daemon=True)
        back.start()
        while data := visitor.recv(1 << 16):
            with self._lock:
                # No request is sent before the one before it was answered.
                self.gets += data.startswith(b"GET ")
            store.sendall(data)
        store.shutdown(socket.SHUT_RDWR)
        back.join()
        visitor.close()
        store.close()

    def _bring(self, store: socket.socket, visitor: socket.socket) -> None:
        try:
            while data := store.recv(1 << 16):
                with self._lock:
                    self.bytes += len(data)
                visitor.sendall(data)
        except OSError:
            pass


def checkpoint(number: int) -> dict[str, Any]:
    return {"global_step": number, "state_dict": {"w": torch.arange(1 << 20) * number}}


def is_one(loaded: dict[str, Any], number: int) -> bool:
    return loaded["global_step"] == number and bool(torch.equal(loaded["state_dict"]["w"], torch.arange(1 << 20) * number))


def test_ranks_ask_a_store_once_for_what_all_of_them_load(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"s3://checkpoints/lightning-{time.time_ns()}"
    forebay.lightning.CheckpointIO().save_checkpoint(checkpoint(3), place)
    counter = Counter(s3_endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", counter.endpoint)

    def load(rank: int) -> bool:
        return is_one(forebay.lightning.CheckpointIO().load_checkpoint(place), 3)

    def counted(ranks: int) -> tuple[int, int]:
        before = counter.gets, counter.bytes
        assert run_ranks(ranks, load) == [True] * ranks
        return counter.gets - before[0], counter.bytes - before[1]

    gets_alone, bytes_alone = counted(1)
    gets, size = counted(4)
    counter.close()
    assert bytes_alone >= 8 << 20
    assert size <= 1.05 * bytes_alone, (bytes_alone, size)
    # Each looks at the manifest for itself, and three have 2 MiB to ask for.
    assert gets <= gets_alone + 3 * 4, (gets_alone, gets)


def saved(folder: Path) -> list[Path]:
    """Two checkpoints."""
    places = [folder / "one.ckpt", folder / "two.ckpt"]
    for number, place in enumerate(places, 1):
        forebay.lightning.CheckpointIO().save_checkpoint(checkpoint(number), place)
    return places


def test_a_rank_that_loads_alone_does_so_and_keeps_nobody_from_loading_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = saved(tmp_path)

    def load(rank: int) -> Any:
        plugin = Counted()
        monkeypatch.setattr(forebay.lightning, "WAIT_S", 0.2)
        for alone in (0, 1, 1):
            if rank == alone:
                assert is_one(plugin.load_checkpoint(places[0]), 1)
            dist.barrier()
        monkeypatch.setattr(forebay.lightning, "WAIT_S", 30.0)
        for number, place in enumerate(places, 1):
            assert is_one(plugin.load_checkpoint(place), number)
        return plugin.read

    alone, other = run_ranks(2, load)
    assert len(alone) == 3 and alone[0] >= 8 << 20
    assert len(other) == 4 and min(other[:2]) >= 8 << 20
    for one, two in zip(alone[1:], other[2:]):
        assert max(one, two) <= 5 << 20, (one, two)


def test_ranks_that_load_different_checkpoints_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = saved(tmp_path)
    monkeypatch.setattr(forebay.lightning, "WAIT_S", 3600.0)

    def load(rank: int) -> bool:
        plugin = forebay.lightning.CheckpointIO(patience=3600)
        own = rank % 2
        return is_one(plugin.load_checkpoint(places[own]), own + 1)

    assert run_ranks(3, load) == [True] * 3


def test_ranks_without_torchs_group_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's spawning strategies load the last weights where nobody else is."""
    place = saved(tmp_path)[0]
    monkeypatch.setattr(forebay.lightning, "WAIT_S", 3600.0)

    def load(rank: int) -> bool:
        return rank == 1 or is_one(forebay.lightning.CheckpointIO(patience=3600).load_checkpoint(place), 1)

    assert run_ranks(2, load, with_gloo=False) == [True] * 2


@pytest.mark.parametrize("where", ["look", "open", "read"])
def test_what_keeps_one_rank_from_loading_together_keeps_no_other_from_loading(tmp_path: Path, where: str) -> None:
    """Such as a directory that each host has for itself."""
    place = saved(tmp_path)[0]

    def load(rank: int) -> bool:
        plugin, fails = forebay.lightning.CheckpointIO(patience=3600), iter([True])
        with pytest.MonkeyPatch.context() as patch:

            def failing(real: Any) -> Any:
                def work(*args: Any, **kwargs: Any) -> Any:
                    if next(fails, False):
                        raise forebay.CheckpointNotFound("it is elsewhere")
                    return real(*args, **kwargs)

                return work

            if rank == 1 and where == "look":
                patch.setattr(forebay.lightning, "source_url", failing(forebay.lightning.source_url))
            elif rank == 1 and where == "open":
                patch.setattr(_native, "open_step", failing(_native.open_step))
            elif rank == 1:
                patch.setattr("forebay._loading.read_shared", failing(forebay._loading.read_shared))
            with pytest.warns(forebay.CheckpointWarning, match="for itself, not all together: .*it is elsewhere"):
                return is_one(plugin.load_checkpoint(place), 1)

    assert run_ranks(2, load) == [True] * 2


def test_a_rank_that_ends_as_all_load_keeps_no_other_waiting(tmp_path: Path) -> None:
    place = saved(tmp_path)[0]

    def load(rank: int) -> bool:
        if rank == 2:
            Ranks.lend = lambda *_: os._exit(0)  # type: ignore[assignment]
        with pytest.warns(forebay.CheckpointWarning, match="for itself, not all together"):
            return is_one(forebay.lightning.CheckpointIO(patience=3600).load_checkpoint(place), 1)

    children = start_ranks(3, lambda rank, report: report(str(load(rank))))
    assert [child.line() for child in children] == ["True", "True", ""]
    assert [child.join() for child in children] == [0, 0, 0]


def test_ranks_of_two_hosts_read_what_all_load_once(hosts: Hosts, tmp_path: Path) -> None:  # noqa: F811
    place = saved(tmp_path)[1]

    def load(rank: int) -> int:
        plugin = Counted()
        assert is_one(plugin.load_checkpoint(place), 2)
        return plugin.read[0]

    read = hosts.run(4, load)
    # What comes of the other host is read of a socket, and counted: 4 MiB that each host has of the other.
    assert sum(read) <= 1.1 * 2 * (8 << 20), read


def test_ranks_meet_only_where_all_come_in_whatever_moment_others_leave() -> None:
    """Of whom one leaves as the others hear that all came, those would wait for it."""
    world_size = 3
    for chance in chances(4, 40):
        store, chances_of = dist.HashStore(), [random.Random(chance.randrange(1 << 48)) for _ in range(world_size)]
        found: list[list[str]] = [[] for _ in range(world_size)]

        def come(rank: int, purpose: str, wait_s: float) -> Optional[str]:
            if rank == 0:
                name = _coming._hear(store, world_size, purpose, wait_s)
            else:
                name = _coming._come(store, rank, purpose, wait_s)
            found[rank] += [name] * (name is not None)
            return name

        def come_often(rank: int) -> None:
            own = chances_of[rank]
            for _ in range(60):
                come(rank, own.choice("aaab"), own.choice([0.0, 0.002, 0.01]))
            # In the end all come, and stay.
            while come(rank, "end", PATIENCE_S) is None:
                pass

        threads = [threading.Thread(target=come_often, args=[rank]) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] == found[1] == found[2] and len(set(found[0])) == len(found[0])
