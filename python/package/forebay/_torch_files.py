"""What torch's own files hold, as a step: read a tensor at a time, and written as it is read."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from . import _native
from ._errors import CheckpointCorrupt, CheckpointError, CheckpointInvalid
from ._flatten import Flattener
from ._leaf import SIZES, Leaf, densify, tensor_leaf
from ._paths import Node, Path as Keys, nest
from ._ranks import new_start
from ._stager import box_of
from ._url import make_directory


@dataclass
class _Part:
    """A tensor, or a part of one, that is to be saved."""

    name: str
    dtype: str
    shape: list[int]
    box: Optional[_native.Part]
    """None for all of it."""
    read: Callable[[], Leaf]
    """Gives its bytes."""


def _fact(error: Exception) -> str:
    """What is wrong, of torch's text, which goes on about how to load a file all the same, in bold: that may run code. Of some
    errors it is a number alone."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("\n")[0]
    fact = re.split(r"(?<=[.!?])\s|\. |, to do so", text)[0].rstrip(".")
    return f"{type(error).__name__}({fact})" if not re.search("[A-Za-z]{3}", fact) else fact


def save_file(file: Path, url: str, step: int, allow_pickle: bool) -> None:
    """Saves what `torch.save` wrote to a file, which stays on the disk until it is copied."""
    try:
        # Files of before torch 1.6 cannot be mapped.
        mapped = zipfile.is_zipfile(file)
        state = torch.load(file, map_location="cpu", mmap=mapped, weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise CheckpointInvalid(f"{file} is no file of torch.save: {_fact(error)}") from error
        text = f"{file} holds other objects than tensors and plain values, or is no file of torch.save: {_fact(error)}"
        raise CheckpointInvalid(f"{text} (hint: --allow-pickle, if you trust whoever wrote it)") from error
    except (OSError, MemoryError):
        raise
    except (ImportError, AttributeError) as error:
        raise _unknown(str(file), error) from error
    except Exception as error:
        raise CheckpointInvalid(f"{file} is no whole file of torch.save: {_fact(error)}") from error
    flattener = Flattener(allow_pickle)
    tree = _told(partial(flattener.tree, "state", state))
    _save(url, step, [_part_of(leaf) for leaf in flattener.leaves], tree)


def save_directory(folder: Path, url: str, step: int) -> None:
    """Saves what a directory of torch.distributed.checkpoint holds: of each tensor the parts that ranks wrote."""
    reader = dcp.FileSystemReader(folder)
    with _damage(f"the list of {folder}"):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
    flattener = Flattener(allow_pickle=True)
    nodes: dict[str, Node] = {}
    parts: list[_Part] = []
    described = metadata.state_dict_metadata
    for name, entry in described.items():
        if isinstance(entry, TensorStorageMetadata):
            unique = flattener.unique(name)
            nodes[name] = {"t": "tensor", "n": unique}
            parts += _parts_of(reader, name, unique, entry)
    for name, entry in described.items():
        if name not in nodes:
            nodes[name] = json.loads(_told(partial(flattener.tree, name, _read(reader, name), name)))
    paths: dict[str, Keys] = metadata.planner_data or {}
    tree = nest([(paths.get(name, (name,)), nodes[name]) for name in described])
    parts += [_part_of(leaf) for leaf in flattener.leaves]
    _save(url, step, parts, json.dumps(tree, separators=(",", ":"), allow_nan=False))


def _parts_of(reader: dcp.FileSystemReader, name: str, unique: str, entry: TensorStorageMetadata) -> list[_Part]:
    """The parts of a tensor that a directory has."""
    dtype, shape = str(entry.properties.dtype).removeprefix("torch."), list(entry.size)
    if dtype not in SIZES:
        raise CheckpointInvalid(f"tensor `{name}` of {reader.path} is of type {dtype}, which cannot be saved")
    # Ranks that have nothing of a tensor are told of as well.
    chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes] or entry.chunks[:1]

    def part(chunk: ChunkStorageMetadata) -> _Part:
        def read() -> Leaf:
            tensor = _read(reader, name, chunk, entry.properties.dtype)
            return tensor_leaf(unique, name, tensor, dtype)

        return _Part(unique, dtype, shape, (False, list(chunk.offsets), list(chunk.sizes)), read)

    return [part(chunk) for chunk in chunks]


def _part_of(leaf: Leaf) -> _Part:
    return _Part(leaf.name, leaf.dtype, leaf.shape, box_of(leaf), lambda: leaf)


def _save(url: str, step: int, parts: list[_Part], tree: str) -> None:
    """Writes a step; of the parts no more than one is in memory at once."""
    make_directory(url)
    described = [(part.name, part.dtype, part.shape, part.box) for part in parts]
    writer = _native.StepWriter(url, new_start(), step, described)
    try:
        for index in writer.order:
            leaf = parts[index].read()
            address, keep = densify(leaf)
            writer.write(index, address, leaf.size)
            del leaf, keep
        writer.commit([("state", tree)])
    finally:
        writer.abort()


def _told(flatten: Callable[[], str]) -> str:
    """What cannot be saved is the files' fault here, not the caller's."""
    try:
        return flatten()
    except TypeError as error:
        raise CheckpointInvalid(str(error)) from error


class _Taker(LoadPlanner):  # type: ignore[misc]
    """Takes one entry of a directory, or one part of it."""

    def __init__(self, dtype: Optional[torch.dtype]) -> None:
        self.taken: Any = None
        self._dtype = dtype

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    create_local_plan = create_global_plan = finish_plan = set_up_planner

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        # Whoever trusts the directory's list trusts its values.
        self.taken = torch.load(value, weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self._dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.taken = tensor


def _read(
    reader: dcp.FileSystemReader,
    name: str,
    chunk: Optional[ChunkStorageMetadata] = None,
    dtype: Optional[torch.dtype] = None,
) -> Any:
    """A part of a tensor of a directory, or an entry that is no tensor."""
    kind = LoadItemType.BYTE_IO if chunk is None else LoadItemType.TENSOR
    sizes = torch.Size([]) if chunk is None else chunk.sizes
    index, zeros = MetadataIndex(name, None if chunk is None else chunk.offsets), torch.Size([0] * len(sizes))
    taker = _Taker(dtype)
    with _damage(f"`{name}` of {reader.path}"):
        reader.read_data(LoadPlan([ReadItem(kind, index, zeros, index, zeros, sizes)]), taker)
    return taker.taken


def _unknown(what: str, error: Exception) -> CheckpointInvalid:
    return CheckpointInvalid(f"{what} holds an object of a class that cannot be imported here: {error}")


@contextlib.contextmanager
def _damage(what: str) -> Iterator[None]:
    """What torch raises where it cannot read what it wrote may be anything."""
    try:
        yield
    except (OSError, CheckpointError, MemoryError):
        raise
    except (ImportError, AttributeError) as error:
        raise _unknown(what, error) from error
    except Exception as error:
        raise CheckpointCorrupt(f"{what} is damaged: {type(error).__name__}: {error}") from error
