"""A step as torch plans and does a load of it: `forebay.dcp.Reader`."""

from __future__ import annotations

import dataclasses
import io
from typing import Any, Optional

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from . import _native
from ._errors import CheckpointMismatch
from ._leaf import copy_elements, torch_dtype
from ._loading import MEANT_OTHERWISE, meant_otherwise, read_planned, whole_tree
from ._merge import numbered, shown
from ._paths import Node, flatten
from ._ranks import Ranks, surroundings
from ._tensors import Tensors
from ._unflatten import Builder


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a rank knows of a load: the step, as which start saved it, where the rank is, and how many ranks its job on several
    hosts has, else 0; from the coordinator, which rank it is, which ones are on its host, itself among them, and where these
    meet, or all of the job, where the load is that of all."""

    step: int
    commit: str
    place: str
    job: int
    meeting: str = ""
    rank: int = 0
    near: tuple[int, ...] = (0,)


class Opened:
    """A step and its entries, as this rank has them."""

    def __init__(self, step: _native.Step, allow_pickle: bool, threads: int) -> None:
        self.step = step
        self._allow_pickle = allow_pickle
        self._threads = threads
        rank, world_size = surroundings()
        is_other = world_size != step.world_size
        tree, self._source = whole_tree(step, rank % step.world_size, tells=is_other)
        self._entries = flatten(tree, self._builder().build)
        places = {shown(path): ".".join(map(str, path[1:])) for path in numbered(tree)} if is_other else {}
        self._refused = {place: places[place] for place in meant_otherwise(step, list(places))}

    def _builder(self) -> Builder:
        return Builder(Tensors(self.step, self._threads, self._source), self._allow_pickle)

    def metadata(self) -> Metadata:
        """What torch plans a load by. Of each tensor it is one part, since any part of it can be read."""
        tensors = self._builder().tensors
        described: dict[str, Any] = {}
        for name, (_, node) in self._entries.items():
            if not _is_tensor(node):
                described[name] = BytesStorageMetadata()
                continue
            _, dtype, shape = tensors.entry(node["n"])
            size = torch.Size(node["view"][0] if "view" in node else shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = TensorProperties(dtype=torch_dtype(dtype))
            described[name] = TensorStorageMetadata(properties, size, [chunk])
        return Metadata(described, planner_data={name: path for name, (path, _) in self._entries.items()})

    def read(self, items: list[ReadItem], planner: LoadPlanner, ranks: Optional[Ranks]) -> None:
        """Fills what the planner names. Ranks that can meet read what several of them want once."""
        aside: list[tuple[ReadItem, Any, Node]] = []
        places: list[tuple[ReadItem, Any]] = []

        def plan() -> Builder:
            builder = self._builder()
            for item in items:
                name = item.storage_index.fqn
                for place, start in self._refused.items():
                    if name == start or name.startswith(f"{start}."):
                        raise CheckpointMismatch(f"{place} {MEANT_OTHERWISE} (`{name}`)")
                _, node = self._entries[name]
                if item.type == LoadItemType.BYTE_IO:
                    builder.refuse_pickles(node)
                    aside.append((item, None, node))
                    builder.tensors.want(node)
                    continue
                place = planner.resolve_tensor(item).detach()
                places.append((item, place))
                if "view" in node:
                    aside.append((item, place, node))
                    builder.tensors.want(node)
                else:
                    part = (list(item.storage_offsets), list(item.lengths))
                    builder.tensors.bind_part(node["n"], part, place)
            return builder

        builder = read_planned(self.step, ranks, plan)
        for item, place, node in aside:
            value = builder.build(node)
            if place is None:
                planner.load_bytes(item, _saved(value))
                continue
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                value = value.narrow(dimension, offset, length)
            copy_elements(place, value)
        for item, place in places:
            planner.commit_tensor(item, place)


def _is_tensor(node: Node) -> bool:
    return isinstance(node, dict) and node.get("t") == "tensor"


def _saved(value: Any) -> io.BytesIO:
    """A value as planners take it."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
