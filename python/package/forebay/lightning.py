"""A plug-in for Lightning: `Trainer(plugins=[forebay.lightning.CheckpointIO()])`.

Each checkpoint that Lightning writes becomes a directory (or a bucket prefix) of that name with one step in it, which
`forebay.load` and `forebay ckpt` read as well. What is kept and under which name is Lightning's business. It is for
strategies that save whole states from one process (one device, DDP); sharded ones (FSDP) write by themselves.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, Optional, Union

from ._checkpointer import Checkpointer
from ._errors import CheckpointInvalid
from ._files import load
from ._url import bucket_url

__all__ = ["CheckpointIO"]

_INTERFACES = ("lightning.fabric.plugins.io.checkpoint_io", "lightning_fabric.plugins.io.checkpoint_io")
"""Where Lightning defines what a plug-in is, under either of its names."""

Place = Union[str, "os.PathLike[str]"]


class CheckpointIO:
    """Writes and reads Lightning's checkpoints. Import Lightning before one is made.

    Args:
        allow_pickle: Whether objects that are neither tensors nor plain values may be pickled, and unpickled, which
            can run any code.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        interfaces = [sys.modules[name] for name in _INTERFACES if name in sys.modules]
        if not interfaces:
            raise CheckpointInvalid("import lightning, or pytorch_lightning, before a CheckpointIO is made")
        for interface in interfaces:
            interface.CheckpointIO.register(type(self))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Place, storage_options: Optional[Any] = None) -> None:
        """Saves what Lightning gathered; returns once it is durable. An earlier one at `path` is replaced."""
        if storage_options is not None:
            raise TypeError("storage_options are for fsspec; Forebay takes credentials from the environment")
        alone: dict[str, Any] = {"keep": 1, "rng": False, "ranks": (0, 1), "linger": 0}
        with Checkpointer(path, allow_pickle=self._allow_pickle, **alone) as checkpointer:
            checkpointer.save_now(int(checkpoint.get("global_step", 0)), checkpoint)

    def load_checkpoint(
        self, path: Place, map_location: Optional[Any] = None, weights_only: Optional[bool] = None
    ) -> dict[str, Any]:
        """Loads a checkpoint into the processor's memory, whatever `map_location` says: Lightning copies it on."""
        loaded: dict[str, Any] = load(path, allow_pickle=self._allow_pickle and not weights_only)
        return loaded

    def remove_checkpoint(self, path: Place) -> None:
        """Deletes a checkpoint of Lightning's choice."""
        url = bucket_url(path)
        if url.startswith("file://"):
            shutil.rmtree(url[len("file://") :], ignore_errors=True)
            return
        # What Lightning itself lists buckets with.
        import fsspec

        system, place = fsspec.core.url_to_fs(url)
        if system.exists(place):
            system.rm(place, recursive=True)

    def teardown(self) -> None:
        """Nothing is left open between calls."""
