"""Plug-ins for `torch.distributed.checkpoint`: its `save`, `async_save` and `load`, to and from Forebay's own steps.

    writer = forebay.dcp.Writer("s3://bucket/run7", keep=3)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=500, storage_writer=writer)
    dcp.load(state, storage_reader=forebay.dcp.Reader("s3://bucket/run7"))

A step that is written here is like any other: `Checkpointer.restore`, `forebay.load` and `forebay ckpt` read it, and
the `Reader` reads what a `Checkpointer` saved. torch decides who writes which part of which tensor; this module gives
each rank's parts to an agent and lets the step be committed once all of them are stored. What the ranks must agree on
goes through torch's own collectives, so that they may be on any number of hosts.

`async_save` stages with torch's own stagers, or with a `Stager`, which copies straight into the memory that is uploaded.
Values that are no tensors are stored as such, never as pickles, unless `allow_pickle` says so.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import secrets
import threading
import time
import warnings
from typing import Any, Optional, Union

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from . import _native
from . import _options as options
from ._checkpointer import Checkpointer
from ._errors import (
    CheckpointConflict,
    CheckpointError,
    CheckpointInvalid,
    CheckpointNotFound,
    CheckpointSuperseded,
    CheckpointWarning,
)
from ._flatten import KEPT, Flattener
from ._leaf import Leaf, elements_of, tensor_dtype, tensor_leaf
from ._lengths import Lengths
from ._loading import newest_steps, restore_threads, with_step
from ._opened import Opened, Reading
from ._paths import Node, Path, nest
from ._ranks import Ranks, meeting_place, new_start, surroundings, use_together
from ._save import Save
from ._shares import Share
from ._stager import Staged, Stager, box_of, is_stored
from ._turns import Turns
from ._url import bucket_url, make_directory, source_url
from ._watchdog import watchdog_limit_s

__all__ = ["Reader", "Stager", "Writer"]

_PATIENCE_S = 600.0
"""How long ranks that read together wait for each other."""

_LOADED: dict[str, tuple[str, int]] = {}
"""The step that this process loaded last of a place, and the start that saved it: what is saved there goes on from it."""

_COUNTED: dict[str, tuple[Optional[int], int]] = {}
"""Of each writer that copies came of to this process (`async_save` sends one for each save), the number that the last copy came
with, and the one that is next."""

CheckpointId = Union[int, str, "os.PathLike[str]", None]


@dataclasses.dataclass(frozen=True)
class _Part:
    """What the coordinator tells a rank about a save."""

    rank: int
    world_size: int
    step: int
    job: Optional[str]
    """The record of the job that the ranks save as; None for a rank alone."""


@dataclasses.dataclass
class _Held:
    """The coordinator's part of a save, until all other ranks have sealed theirs."""

    checkpointer: Checkpointer
    step: int
    snapshot: _native.Snapshot


class _Own(Checkpointer):
    """A Writer's, of which several may save to one place at once, each through a start of its own."""

    _is_only = False


class Writer(StorageWriter):  # type: ignore[misc]
    """Writes steps for `dcp.save` and `dcp.async_save`; they return, or complete, once the step is durable.

    Keep one writer for all saves of a job: its agent and its memory stay with it. A second one supersedes it. A save that is
    begun before the one before is over (`async_save`) waits for that in its thread, and holds what was when it was begun.

    Args:
        url: Where the steps lie, as for `Checkpointer`.
        step: The number of the next step. Later ones count on from it; without it, from the newest step there is.
            `checkpoint_id` of `dcp.save` sets it as well: a number, or a text that ends in one, such as `step-500`.
            A step that is saved again replaces the earlier one.
        keep: As for `Checkpointer`.
        keep_every: As for `Checkpointer`.
        allow_pickle: As for `Checkpointer`.
        agent_log: As for `Checkpointer`.
        flush_rate: As for `Checkpointer`.

    Where torch's objects go over NCCL (a group of `nccl` alone), `dcp.save` has all ranks wait for the slowest upload inside of a
    collective, and NCCL's watchdog ends the job when that takes longer than the group's timeout, ten minutes by default: give
    `init_process_group` a longer one or `cpu:gloo,cuda:nccl`, or `dcp.save` a group of gloo. `async_save` asks for gloo anyway.

    Host memory: two copies of what this rank writes.
    """

    def __init__(
        self,
        url: Union[str, "os.PathLike[str]"],
        step: Optional[int] = None,
        *,
        keep: Optional[int] = None,
        keep_every: Optional[int] = None,
        allow_pickle: bool = False,
        agent_log: Optional[Union[str, "os.PathLike[str]"]] = None,
        flush_rate: Optional[Union[int, str]] = None,
    ) -> None:
        self._url = bucket_url(url)
        self._options: dict[str, Any] = {
            "keep": options.whole("keep", keep),
            "keep_every": options.whole("keep_every", keep_every),
            "agent_log": options.log("agent_log", agent_log),
            "flush_rate": options.size("flush_rate", flush_rate),
        }
        self._allow_pickle = options.flag("allow_pickle", allow_pickle)
        self._next = options.whole("step", step, least=0)
        self._name = secrets.token_hex(16)
        self._came_with: Optional[tuple[Optional[int]]] = None
        self._is_coordinator = True
        self._planned: Optional[_Part] = None
        self._is_sound = True
        self._lengths = Lengths()
        self._superseded: Optional[CheckpointSuperseded] = None
        self._seen: Optional[_Part] = None
        self._checkpointer: Optional[Checkpointer] = None
        self._held: Optional[_Held] = None
        self._staged: Optional[Staged] = None
        self._lock = threading.RLock()
        self._turns = Turns()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self._give_up()

    def __getstate__(self) -> dict[str, Any]:
        # `async_save` may save from a process of its own, which begins a job of its own.
        gone = ("_planned", "_seen", "_checkpointer", "_held", "_staged")
        own = ("_lock", "_turns")
        return {name: None if name in gone else value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _turns=Turns())
        self._came_with = (self._next,)
        came_with, counted = _COUNTED.get(self._name, (None, None))
        if counted is not None and came_with == self._next:
            # Where it came from knows of no save that was done here.
            self._next = counted

    def close(self) -> None:
        """Waits until the agent has ended. Nothing is lost without it: what was saved is durable."""
        self._give_up()
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        self._turns.take(is_new=True)
        self._give_up()
        if checkpoint_id is not None:
            self._next = _step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise CheckpointInvalid("a step is committed by all ranks together, which use_collectives=False rules out")
        self._turns.take()
        self._is_coordinator = is_coordinator
        self._give_up()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        make_directory(self._url)
        self._lengths.check(plans)
        if self._next is None:
            steps = newest_steps(self._url)
            self._next = max(step for step, _, _ in steps) + 1 if steps else 1
        size = len(plans)
        job = self._job_for(self._next, size)
        parts = [_Part(rank, size, self._next, job) for rank in range(size)]
        # Before others seal theirs: without it nobody could tell their agents that this rank's part does not come.
        self._checkpointer_for(parts[0])._ensure_agent()
        self._planned = parts[0]
        self._is_sound = False
        return [dataclasses.replace(plan, storage_data=part) for plan, part in zip(plans, parts)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        part = self._part_of(plan)
        checkpointer = self._checkpointer_for(part)
        checkpointer._ensure_agent()
        try:
            leaves, results = _take(plan, planner, self._allow_pickle)
            held = _Held(checkpointer, part.step, self._fill(checkpointer, part.step, leaves))
        except BaseException as error:
            # Those who sealed theirs need not wait for this one.
            checkpointer._give_up(part.step, None, error)
            raise
        self._next = part.step + 1
        if self._came_with is not None:
            _COUNTED[self._name] = (*self._came_with, self._next)
        if self._is_coordinator:
            # Until the others have sealed theirs: the state's tree, which is sealed here, tells of all of them.
            self._held = held
        else:
            _seal(held, []).wait_sealed()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        held, self._held = self._held, None
        if held is None:
            raise CheckpointInvalid("finish() without write_data()")
        nodes: dict[str, Node] = {result.index.fqn: result.storage_data for part in results for result in part}
        paths: dict[str, Path] = metadata.planner_data or {}
        ordered = [name for name in paths if name in nodes] + [name for name in nodes if name not in paths]
        tree = nest([(paths.get(name, (name,)), nodes[name]) for name in ordered])
        try:
            save = _seal(held, [("state", json.dumps(tree, separators=(",", ":"), allow_nan=False))])
        except CheckpointError as error:
            held.checkpointer._give_up(held.step, None, error)
            raise
        try:
            self._wait_durable(save)
        except CheckpointSuperseded as error:
            self._superseded = error
            raise
        self._is_sound = True

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Union[str, "os.PathLike[str]"]) -> bool:
        return re.search(r"\d+$", os.fspath(checkpoint_id)) is not None

    def _wait_durable(self, save: Save) -> None:
        """Waits, as the other ranks do inside of a collective, and warns in time where that may be the death of them."""
        limit_s = watchdog_limit_s() if self._planned is not None and self._planned.world_size > 1 else None
        if limit_s is not None and not save.wait_durable(limit_s / 4):
            text = f"step {save.step} is on its way since {limit_s / 4:.0f} s, and NCCL ends ranks that wait for {limit_s:.0f} s"
            hint = "save with async_save, through a group of gloo, or give init_process_group a longer timeout"
            warnings.warn(f"{text} (hint: {hint})", CheckpointWarning, stacklevel=3)
        save.wait_durable()

    def _part_of(self, plan: SavePlan) -> _Part:
        """This rank's part in the save at hand."""
        part: _Part = plan.storage_data
        if part == self._seen and self._next is not None:
            # The planner kept the plan of an earlier save. All ranks count alike.
            part = dataclasses.replace(part, step=self._next)
        else:
            self._seen = part
        planned = self._planned
        if self._is_coordinator and planned is not None and (part.step, part.job) != (planned.step, planned.job):
            text = "the planner kept a plan that was made for another writer, or before a save failed"
            raise CheckpointInvalid(f"{text} (hint: keep one Writer for all saves, or do without enable_plan_caching)")
        return part

    def _job_for(self, step: int, size: int) -> Optional[str]:
        """The record of the job that all ranks save `step` as; None for one rank, which has an agent's own.

        It is a new one after a save that failed: what some ranks stored of a step must not meet what others store of
        its next try. And it is one for a step that does not follow the last: a later start's steps count.
        """
        if self._superseded is not None:
            raise self._superseded
        last = self._planned
        if self._is_sound and last is not None and last.world_size == size and last.step < step:
            return last.job
        if self._checkpointer is not None and not _is_new(self._checkpointer):
            # Another start would supersede in turn what superseded this one.
            _native.refuse_if_superseded(self._url, self._checkpointer._nonce)
            self._let_go()
        return None if size == 1 else _native.begin_job(self._url, *new_start())

    def _checkpointer_for(self, part: _Part) -> Checkpointer:
        """What saves as that rank of that job."""
        ranks = (part.rank, part.world_size)
        with self._lock:
            return self._present_or_new(ranks, part.job)

    def _present_or_new(self, ranks: tuple[int, int], job: Optional[str]) -> Checkpointer:
        present = self._checkpointer
        if present is not None and (present._ranks.rank, present._ranks.world_size) == ranks:
            if present._job == job:
                return present
            if _is_new(present) and job is not None:
                present._join(job)
                return present
        self._let_go()
        present = self._checkpointer = self._new_checkpointer(ranks)
        if job is not None:
            present._join(job)
        return present

    def _new_checkpointer(self, ranks: tuple[int, int]) -> Checkpointer:
        # Memory that lingers and copies on a local disk are for a Checkpointer: the Reader reads from the store.
        checkpointer = _Own(self._url, rng=False, ranks=ranks, linger=0, **self._options)
        if self._url in _LOADED:
            checkpointer._session.go_on_from(*_LOADED[self._url])
        return checkpointer

    def _checkpointer_to_stage(self) -> Checkpointer:
        """What will probably save; which job it saves as is planned later."""
        with self._lock:
            if self._checkpointer is None:
                self._checkpointer = self._new_checkpointer(surroundings())
            return self._checkpointer

    def _fill(self, checkpointer: Checkpointer, step: int, leaves: list[Leaf]) -> _native.Snapshot:
        """A snapshot that holds what this rank is to write."""
        with self._lock:
            # What another save staged is left to that.
            staged = self._staged if self._staged is not None and self._staged.lends(leaves) else None
            if staged is not None:
                self._staged = None
        if staged is not None and staged.checkpointer is checkpointer and staged.holds(leaves):
            return staged.snapshot
        try:
            return _copy(checkpointer, step, leaves)
        finally:
            if staged is not None:
                staged.give_up()

    def _let_go(self) -> None:
        """Ends what saved so far, without a wait."""
        with self._lock:
            present, self._checkpointer = self._checkpointer, None
        if present is not None:
            present._let_go()

    def _give_up(self) -> None:
        """Lets go of a part whose save came to nothing on another rank."""
        held, self._held = self._held, None
        if held is not None:
            held.checkpointer._session.abandon(held.snapshot)
            held.checkpointer._give_up(held.step, None, CheckpointError("another rank failed to write its part"))


class Reader(StorageReader):  # type: ignore[misc]
    """Reads a step for `dcp.load`, whoever saved it, at any number of ranks; each reads only what it needs.

    Args:
        url: Where the steps lie, as for `Checkpointer`.
        step: Which one; by default the newest. `checkpoint_id` of `dcp.load` sets it as well.
        allow_pickle: Whether pickled objects are loaded, which can run any code.
        threads: Threads that copy; by default up to 16, as the processors allow.

    A step whose manifest is damaged is passed over with a warning; damaged bytes of a tensor are an error.
    """

    def __init__(
        self,
        url: Union[str, "os.PathLike[str]"],
        step: Optional[options.StepName] = None,
        *,
        allow_pickle: bool = False,
        threads: Optional[int] = None,
    ) -> None:
        self._url = bucket_url(url)
        options.step_name(step)
        self._step = step
        self._allow_pickle = options.flag("allow_pickle", allow_pickle)
        self._threads = options.whole("threads", threads) or restore_threads()
        self._opened: Optional[Opened] = None

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        self._opened = None
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        self._opened = self._open(self._step)
        return self._opened.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        step = self._present().step
        ranks = Ranks(self._url, None, _PATIENCE_S)
        # Where nothing told it, their places do.
        job = 0 if ranks.are_told_apart is False else ranks.world_size
        return dataclasses.replace(plan, storage_data=Reading(step.step, step.commit, meeting_place(), job))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        shares: list[Reading] = [plan.storage_data for plan in plans]
        # A step that was committed meanwhile may have been seen by some ranks and not by others. One that was saved again
        # counts as it is now.
        step, commit = shares[0].step, shares[0].commit
        if any(share.step == step and share.commit != commit for share in shares):
            commit = self._open(step).step.commit
        near: dict[str, list[int]] = collections.defaultdict(list)
        for rank, share in enumerate(shares):
            near[share.place].append(rank)
        meeting, places = secrets.token_hex(16), [share.place for share in shares]
        # A load of some of a job's ranks has no way between hosts.
        job = len(shares) if len(near) > 1 and all(share.job == len(shares) for share in shares) else 0
        shares = [Reading(step, commit, place, job, meeting, rank, tuple(near[place])) for rank, place in enumerate(places)]
        return [dataclasses.replace(plan, storage_data=share) for plan, share in zip(plans, shares)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        share: Reading = plan.storage_data
        ranks = None
        if share.job > 0:
            ranks = Ranks(share.meeting, None, _PATIENCE_S)
        elif len(share.near) > 1:
            place = share.near.index(share.rank), len(share.near)
            ranks = Ranks(share.meeting, place, _PATIENCE_S, share.near)
        opened = use_together(ranks, "open a step", lambda: self._reopened(share.step, share.commit))
        opened.read(plan.items, planner, ranks)
        _LOADED[self._url] = (opened.step.attempt, opened.step.step)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _reopened(self, step: int, commit: str) -> Opened:
        """The step that all ranks read, which this one may not have seen when it looked for the newest."""
        planned = self._present()
        if planned.step.commit == commit:
            return planned
        opened = self._open(step)
        if opened.step.commit != commit:
            raise CheckpointConflict(f"step {step} was saved again while the ranks looked for it (hint: load it again)")
        if opened.metadata() != planned.metadata():
            steps = f"{planned.step.step} and {opened.step.step}"
            raise CheckpointConflict(f"the ranks saw steps {steps} as the newest, which differ; give one of them")
        return opened

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Union[str, "os.PathLike[str]"]) -> bool:
        return re.search(r"\d+$", os.fspath(checkpoint_id)) is not None

    def _present(self) -> Opened:
        if self._opened is None:
            raise CheckpointNotFound("read_metadata() comes first")
        return self._opened

    def _open(self, step: Optional[options.StepName]) -> Opened:
        return with_step(source_url(self._url), step, None, lambda found: Opened(found, self._allow_pickle, self._threads))


def _step_of(checkpoint_id: Union[int, str, "os.PathLike[str]"]) -> int:
    """The step that a `checkpoint_id` means."""
    if isinstance(checkpoint_id, int):
        step: int = options.whole("checkpoint_id", checkpoint_id, least=0, may_lack=False)
        return step
    # `checkpoint-500`, but neither a negative number nor one with a point.
    found = re.search(r"(?:^|[^\d.])(\d+)$", re.sub(r"^-(?=\d+$)", ".", os.fspath(checkpoint_id)), re.ASCII)
    if found is None:
        raise CheckpointInvalid(f"checkpoint_id {checkpoint_id!r} names no step: it is a number, or ends in one")
    return _step_of(int(found.group(1)))


def _take(plan: SavePlan, planner: SavePlanner, allow_pickle: bool) -> tuple[list[Leaf], list[WriteResult]]:
    """What this rank is to write: the tensors, and of each item what the state's tree says of it."""
    flattener = Flattener(allow_pickle)
    leaves: list[Leaf] = []
    results: list[WriteResult] = []
    for item in plan.items:
        name = item.index.fqn
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            data.seek(0)
            # This process wrote these bytes just now.
            value = torch.load(data, weights_only=False)
            size, node = data.tell(), json.loads(flattener.tree(name, value, name))
        else:
            leaf = _tensor_leaf(item, data.detach())
            size, node = leaf.size, {"t": "tensor", "n": leaf.name}
            if is_stored(leaf):
                leaves.append(leaf)
        results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=node))
    return leaves + flattener.leaves, results


def _tensor_leaf(item: WriteItem, tensor: Any) -> Leaf:
    """The part of a tensor that an item is."""
    name, data = item.index.fqn, item.tensor_data
    tensor = elements_of(tensor, name)
    dtype = tensor_dtype(tensor)
    if dtype is None:
        raise TypeError(f"{name}: a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be saved")
    leaf = tensor_leaf(name.translate(KEPT), name, tensor, dtype)
    leaf.shape, leaf.part = list(data.size), (list(data.chunk.offsets), list(data.chunk.sizes))
    return leaf


def _copy(checkpointer: Checkpointer, step: int, leaves: list[Leaf]) -> _native.Snapshot:
    """Copies what this rank is to write."""
    shares = [Share(index, leaf.name, box_of(leaf)) for index, leaf in enumerate(leaves)]
    snapshot = checkpointer._begin(leaves, shares)
    try:
        checkpointer._copy(step, snapshot, leaves, shares)
    except BaseException:
        checkpointer._session.abandon(snapshot)
        raise
    return snapshot


def _is_new(checkpointer: Checkpointer) -> bool:
    """Whether it saved nothing yet, and belongs to no job."""
    return checkpointer._agent is None and checkpointer._job is None


def _seal(held: _Held, extras: list[tuple[str, str]]) -> Save:
    """Gives a part to the agent."""
    save = Save(held.checkpointer, held.step)
    created_ms = time.time_ns() // 1_000_000
    # A job saves a step once: another try is another job's.
    save._record.native = held.checkpointer._session.seal(held.snapshot, held.step, None, created_ms, extras)
    return save
