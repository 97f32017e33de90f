"""Lightning's checkpoints as Forebay's steps.

    trainer = Trainer(plugins=[forebay.lightning.CheckpointIO()])

is for strategies that save whole states from one process: one device, DDP. Those that shard (`FSDPStrategy`,
`ModelParallelStrategy`) ask no plug-in and write by themselves; for them

    Strategy = forebay.lightning.sharded(ModelParallelStrategy)
    trainer = Trainer(strategy=Strategy(data_parallel_size=8))

has each rank save its part, and read it again at any number of ranks.

Each checkpoint that Lightning writes becomes a directory (or a bucket prefix) of that name with one step in it, which
`forebay.load` and `forebay ckpt` read as well; `forebay.load_model(path, model)` takes the weights alone, in the place of
`load_from_checkpoint`, which opens a file. Where all ranks of torch.distributed load the same checkpoint, as they do when a
training resumes, they read it once between them; one that is asked for on some of them is waited for half a minute, in which
`forebay.load` does not join. What is kept and under which name is Lightning's business, and so is what a
signal does. A save that failed is raised: Lightning, once it takes a checkpoint for saved, deletes the one before. Its `dirpath`
is a directory, as of a mount: an `s3://` one Lightning looks at through fsspec, which needs s3fs, and of `file://` it makes a path.

Of the options of `Checkpointer`, both take `copy_threads`, `agent_log`, `flush_rate` and `patience`. Those that are about the
many steps of one place (`keep`, `local`, `linger`, `on_error`, `on_signal` and others) are refused, each with its reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union, cast

from . import _native
from ._checkpointer import Checkpointer
from ._coming import WAIT_S, meet_all
from ._errors import CheckpointError, CheckpointInvalid, CheckpointNotFound, CheckpointWarning, warn
from ._files import load
from ._leaf import PARTITIONED, partitioned
from ._loading import load_rest, load_step, restore_threads, with_step
from ._options import checked
from ._passed import CheckpointOptions, passed_on
from ._ranks import Ranks, surroundings
from ._url import bucket_url, source_url

if TYPE_CHECKING:
    # Type checkers bring it along. Python itself has it from 3.11 on only, and does not need it.
    from typing_extensions import Unpack

__all__ = ["CheckpointIO", "sharded"]

_INTERFACES = ("lightning.fabric.plugins.io.checkpoint_io", "lightning_fabric.plugins.io.checkpoint_io")
"""Where Lightning defines what a plug-in is, under either of its names."""

Place = Union[str, "os.PathLike[str]"]
S = TypeVar("S", bound=type[Any])

_HELD = ("state_dict", "optimizer_states")
"""What of a checkpoint the live model and optimizers hold."""

_PATIENCE_S = 600.0
"""How long ranks that read together wait for each other, in seconds, as those of a `Checkpointer`."""

_KEEPS = "what is kept is Lightning's to say (save_top_k)"
_SAVES = "when a checkpoint is saved is Lightning's to say"
_IS_LAST = "Lightning deletes the checkpoint before once this one's save returns, which has to be there then"
_COPIES = "copies on the local disk are of the steps of one place, and each of Lightning's checkpoints is a place of its own"
_IS_WHOSE = "what is in a checkpoint, and which processes save it, is Lightning's to say"

_REASONS = {
    "rng": _IS_WHOSE,
    "ranks": _IS_WHOSE,
    "replicated": _IS_WHOSE,
    "replicas": "a checkpoint is in the store when its save returns, and no memory is held after it",
    "keep": _KEEPS,
    "keep_every": _KEEPS,
    "every": _SAVES,
    "every_minutes": _SAVES,
    "snapshots": "each checkpoint has memory for one alone, which no other one waits for",
    "on_busy": "each checkpoint has memory of its own, which no other one keeps busy",
    "on_error": _IS_LAST,
    "max_failures": _IS_LAST,
    "on_signal": "Lightning acts on signals by itself, and says when a checkpoint is saved",
    "local": _COPIES,
    "local_keep": _COPIES,
    "local_bytes": _COPIES,
    "linger": "a checkpoint is in the store when its save returns, and no memory is held after it",
}
"""Options of `Checkpointer` that have no meaning here, and why."""

_busy: set[str] = set()
"""The places that a thread writes or removes: Lightning's `AsyncCheckpointIO` removes some while it writes others."""

_freed = threading.Condition()


def sharded(strategy: S, allow_pickle: bool = False, **options: Unpack[CheckpointOptions]) -> S:
    """A class like `FSDPStrategy` or `ModelParallelStrategy` that saves and loads through Forebay, each rank its part.

    Give `FSDPStrategy` the `state_dict_type="sharded"`. `allow_pickle` and `options` are as for `CheckpointIO`, and so is what
    is raised for them.
    """
    given = _checked("sharded()", allow_pickle, options)

    class Sharded(strategy):  # type: ignore[misc, valid-type]
        def save_checkpoint(
            self, checkpoint: dict[str, Any], filepath: Place, storage_options: Optional[Any] = None
        ) -> None:
            """Saves what each rank has; returns once it is durable. An earlier one at `filepath` is replaced."""
            if storage_options is not None:
                raise TypeError("storage_options are for fsspec; Forebay takes credentials from the environment")
            # What Lightning gathered of such a module are tensors that tell nothing of it.
            name = partitioned(self.model) if hasattr(self.model, "named_parameters") else None
            if name is not None:
                raise CheckpointInvalid(f"{name}: {PARTITIONED}")
            _save(checkpoint, self.broadcast(os.fspath(filepath)), allow_pickle, None, given)

        def load_checkpoint(self, checkpoint_path: Place, weights_only: Optional[bool] = None) -> dict[str, Any]:
            """Brings model and, while fitting, optimizers back in place; gives the rest of the checkpoint."""
            place = self.broadcast(os.fspath(checkpoint_path))
            live = {"state_dict": self.model, "optimizer_states": list(self.optimizers)}
            held = _HELD if self.optimizers else _HELD[:1]
            rank, may_pickle = surroundings()[0], allow_pickle and not weights_only
            with Checkpointer(place, rng=False, linger=0, allow_pickle=may_pickle, **given) as checkpointer:
                if checkpointer.restore(live, only=[f"{key}.*" for key in held], strict=self._is_strict()) is None:
                    raise CheckpointNotFound(f"{source_url(place)} holds no step")
            return with_step(
                bucket_url(place), None, None, lambda step: load_rest(step, _HELD, rank % step.world_size, may_pickle)
            )

        def _is_strict(self) -> bool:
            """What the module asks for: with `strict_loading = False` the checkpoint and the model may have different parts."""
            return bool(getattr(getattr(self, "lightning_module", None), "strict_loading", True))

    Sharded.__name__ = Sharded.__qualname__ = f"Sharded{strategy.__name__}"
    return Sharded  # type: ignore[return-value]


def _checked(who: str, allow_pickle: bool, given: CheckpointOptions) -> CheckpointOptions:
    """What is passed on to `Checkpointer`, which is right."""
    checked(allow_pickle=allow_pickle)
    known: frozenset[str] = CheckpointOptions.__optional_keys__
    return cast(CheckpointOptions, passed_on(who, given, known, _REASONS))


def _save(
    checkpoint: dict[str, Any],
    path: Place,
    allow_pickle: bool,
    ranks: Optional[tuple[int, int]],
    given: CheckpointOptions,
) -> None:
    """Saves a checkpoint as the one step of its place; returns once it is durable."""
    options: dict[str, Any] = {"keep": 1, "rng": False, "linger": 0, "ranks": ranks}
    with Checkpointer(path, allow_pickle=allow_pickle, **options, **given) as checkpointer:
        checkpointer.save_now(int(checkpoint.get("global_step", 0)), checkpoint)


@contextlib.contextmanager
def _alone_at(url: str) -> Iterator[None]:
    """Waits for other threads at that place, and keeps them waiting."""
    with _freed:
        _freed.wait_for(lambda: url not in _busy)
        _busy.add(url)
    try:
        yield
    finally:
        with _freed:
            _busy.discard(url)
            _freed.notify_all()


def _remove(path: str) -> None:
    """Deletes what is there, whatever it is, and all of a directory that can be."""
    failed: list[OSError] = []

    def note(_: Any, __: str, told: Any) -> None:
        if not isinstance(told[1], FileNotFoundError):
            failed.append(told[1])

    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, onerror=note)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        failed.append(error)
    if failed:
        warnings.warn(f"the checkpoint at {path} is not deleted: {failed[0]}", CheckpointWarning, stacklevel=3)


class CheckpointIO:
    """Writes and reads Lightning's checkpoints. Import Lightning before one is made.

    Args:
        allow_pickle: Whether objects that are neither tensors nor plain values may be pickled, and unpickled, which
            can run any code.
        options: `copy_threads`, `agent_log`, `flush_rate` and `patience`, as for `Checkpointer`.

    Raises `CheckpointInvalid` for an option that is none, and for one of `Checkpointer` that has no meaning for single
    checkpoints of Lightning's choice, with the reason.
    """

    def __init__(self, allow_pickle: bool = False, **options: Unpack[CheckpointOptions]) -> None:
        self._allow_pickle = allow_pickle
        self._options = _checked("CheckpointIO()", allow_pickle, options)
        interfaces = [sys.modules[name] for name in _INTERFACES if name in sys.modules]
        if not interfaces:
            raise CheckpointInvalid("import lightning, or pytorch_lightning, before a CheckpointIO is made")
        for interface in interfaces:
            interface.CheckpointIO.register(type(self))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Place, storage_options: Optional[Any] = None) -> None:
        """Saves what Lightning gathered; returns once it is durable. An earlier one at `path` is replaced."""
        if storage_options is not None:
            raise TypeError("storage_options are for fsspec; Forebay takes credentials from the environment")
        with _alone_at(bucket_url(path)):
            _save(checkpoint, path, self._allow_pickle, (0, 1), self._options)

    def load_checkpoint(
        self, path: Place, map_location: Optional[Any] = None, weights_only: Optional[bool] = None
    ) -> dict[str, Any]:
        """Loads a checkpoint into the processor's memory, whatever `map_location` says: Lightning copies it on.

        Ranks that all load the same read it once between them. Whatever keeps them from that, each reads for itself then.
        """
        may_pickle = self._allow_pickle and not weights_only
        failure: Optional[CheckpointError] = None
        name = meet_all(f"load {bucket_url(path)}", min(WAIT_S, self._options.get("patience") or WAIT_S))
        if name is not None:
            try:
                return self._load_together(path, name, may_pickle)
            except CheckpointError as error:
                failure = error
        loaded: dict[str, Any] = load(path, allow_pickle=may_pickle)
        if failure is not None:
            warn(f"{bucket_url(path)}: each rank has read it for itself, not all together: {failure}")
        return loaded

    def _load_together(self, path: Place, name: str, may_pickle: bool) -> dict[str, Any]:
        """Loads what all ranks do, which meet under that name."""
        ranks = Ranks(f"{bucket_url(path)} {name}", None, self._options.get("patience") or _PATIENCE_S)

        def use(step: _native.Step) -> dict[str, Any]:
            loaded: dict[str, Any] = load_step(step, None, may_pickle, threads, ranks, are_alike=True)[0]
            return loaded

        try:
            ranks.gather("look for a checkpoint", lambda: {"place": source_url(path)})
            threads = self._options.get("copy_threads") or restore_threads(len(ranks.here()))
            return with_step(bucket_url(path), None, ranks, use)
        finally:
            ranks.leave()

    def remove_checkpoint(self, path: Place) -> None:
        """Deletes a checkpoint of Lightning's choice, one of its own (a file) and a link to one, too.

        What cannot be deleted is warned of. One that another thread writes is waited for.
        """
        url = bucket_url(path)
        with _alone_at(url):
            if url.startswith("file://"):
                _remove(url[len("file://") :])
                return
            # What Lightning itself lists buckets with.
            import fsspec

            system, place = fsspec.core.url_to_fs(url)
            if system.exists(place):
                system.rm(place, recursive=True)

    def teardown(self) -> None:
        """Nothing is left open between calls."""
