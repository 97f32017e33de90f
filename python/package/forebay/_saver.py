"""A rank's way to its agent: snapshots are taken and sealed, and an agent that died is replaced."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any, NamedTuple, Optional

from . import _native
from ._devices import Devices, Sources
from ._errors import CheckpointError, CheckpointInvalid, CheckpointNoSpace, anew, warn
from ._ladder import Ladder
from ._leaf import Leaf, densify, fill, torch_module
from ._local import LocalCopies
from ._optimizers import note_step
from ._outcomes import Outcomes, Trouble
from ._process import start_agent
from ._ranks import Ranks, Start, error_named
from ._replicas import Replicas
from ._save import TICK_S, Save, Staging, check_unchanged, now
from ._shares import Share, share_size, source_offset
from ._signals import Notice
from ._url import make_directory

_FAREWELL_S = 30.0
"""How long `close()` waits for the agent to end once every save is committed, in seconds."""

_HANDOVER_S = 30.0
"""How long one that takes another's place waits for it, and for what no agent holds of it, in seconds."""

_CLOSED = "the checkpointer is closed (or this is a forked child, which may not save)"

_open: weakref.WeakSet[Saver] = weakref.WeakSet()
"""Those that nobody closed yet."""


def open_session(
    url: str, keep: Optional[int], keep_every: Optional[int], flush_rate: Optional[str], snapshots: int, start: Start
) -> _native.Session:
    """What a start saves through."""
    session = _native.Session(url, *start, keep, keep_every)
    if snapshots == 1:
        session.keep_one_snapshot()
    if flush_rate is not None:
        session.set_flush_rate(flush_rate)
    return session


class Back(NamedTuple):
    """An earlier step that a job went back to in one process."""

    start: Start
    """Who goes on from there."""
    seen: Optional[int]
    """The highest number of a start in the store by then; None where it did not tell."""
    origin: tuple[str, int]
    """The start of the nonce of the start that saved the step, and the step."""


class Saver:
    """What a `Checkpointer` saves with, whatever it saves and when."""

    _is_back = False
    """Whether it goes on from an earlier step, as another start than the one that it was made as."""
    _is_only = True
    """Whether another one of this URL and rank in this process ends it, as it does others."""

    def __init__(
        self,
        url: str,
        start: Start,
        session: _native.Session,
        ranks: Ranks,
        local: Optional[LocalCopies],
        threads: int,
        linger_s: float,
        agent_log: Optional[str],
        outcomes: Outcomes,
        notice: Notice,
        replicas: Optional[Replicas] = None,
    ) -> None:
        self._url = url
        self._start = start
        self._nonce: str = start[0]
        self._session = session
        self._ranks = ranks
        self._local = local
        self._replicas = replicas
        self._threads = threads
        self._linger_s = linger_s
        self._agent_log = agent_log
        self._lock = threading.RLock()
        self._devices = Devices(session)
        self._ladder = Ladder(url, ranks, local)
        self._job: Optional[str] = None
        self._agent: Any = None
        self._staging: Optional[Staging] = None
        self._outcomes = outcomes
        self._notice = notice
        self._hook_is_used = False
        self._has_place = False
        self._is_closed = False
        self._why_closed = _CLOSED
        _open.add(self)
        _forget_in_children(self)

    def _let_go(self, is_done: bool = False) -> None:
        """Ends the session, and leaves its memory. Unless the job is done, the agent keeps what it holds for a while."""
        self._is_closed = True
        self._notice.release()
        _open.discard(self)
        self._ladder.arena.leave()
        try:
            # What is copied was saved, as far as its caller knows.
            self._stop_staging()
        finally:
            if is_done:
                self._session.dismiss()
            else:
                self._session.leave()
            self._ranks.leave()

    def _leave(self) -> None:
        """As `_let_go`; what is held can be found then by the next one of this process as well."""
        holds = self._staging is not None or bool(self._session.held())
        self._let_go()
        if holds:
            self._await_door()

    def _stop_staging(self) -> None:
        """As `_finish_staging`; what went wrong is a warning."""
        try:
            self._finish_staging()
        except CheckpointError as error:
            warn(f"a save under way was given up: {error}")

    def _begin_anew(self, back: Back) -> None:
        """Goes on as another start, from where the job went back to. What was saved after that, and is not in the store, is given
        up; its slots are free then. The agents take the start's number once the store lets them."""
        nonce, host, pid, started_ms = self._ranks.first("begin anew", lambda: back.start)
        if self._local is not None:
            self._local.begin_anew(self._session, nonce)
        self._start, self._nonce, self._is_back = (nonce, host, pid, started_ms), nonce, True
        self._session.begin_anew(self._start, back.seen, back.origin)
        self._outcomes.leave(back.origin[1])
        while self._session.is_letting_go:
            self._listen(TICK_S)

    def _make_way(self, ranks: Ranks) -> None:
        """Ends this one for another one of its URL and rank, among these ranks, and tells what becomes of what it sealed.

        That is left to its agent, where the other one looks for what a killed process left. What would not be found there is
        waited for, but not for ever.
        """
        is_held = self._linger_s > 0 and self._ranks.world_size == ranks.world_size
        is_settled = False
        try:
            self._stop_staging()
            held = self._session.held()
            if held:
                # Of a dead agent's, another one holds it.
                self._ensure_agent()
            is_settled = not is_held and self._settle(_HANDOVER_S)
        finally:
            self._why_closed = "closed: another Checkpointer of this URL was made in this process"
            self._let_go(is_done=is_settled)
        if is_settled:
            # It holds memory.
            self._await_agent()
        elif held:
            self._await_door()
        try:
            self._warn_of_failures(all_pass=True)
            if held:
                late = f"was not in the store after {_HANDOVER_S:g} s"
                fate = "is in memory" if is_held else "is settled" if is_settled else late
                text = "another Checkpointer of it was open in this process, and is closed"
                hint = "close() it first, or use `with`"
                warn(f"{self._url}: {text}; step {held[0][1]}, its newest, {fate} (hint: {hint})")
        finally:
            self._notice.pass_on()

    def _await_door(self) -> None:
        """Waits until the agent that was left can be found: it may have been started just now."""
        deadline = time.monotonic() + _FAREWELL_S
        place = self._ladder.arena.place(self._ranks.rank)
        while self._linger_s > 0 and self._agent is not None and self._agent.poll() is None and time.monotonic() < deadline:
            try:
                found = _native.Predecessor.visit(place)
            except CheckpointError:
                # Whoever looks for it is told.
                return
            if found is not None and found.start == self._nonce:
                return
            time.sleep(0.01)

    def _await_agent(self) -> None:
        """Nothing is changed in the bucket after `close()`: the agent may still be deleting old steps."""
        if self._agent is not None:
            try:
                self._agent.wait(_FAREWELL_S)
            except subprocess.TimeoutExpired:
                warn("the checkpoint agent has not ended yet; it may still delete old steps")

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointInvalid(self._why_closed)

    def _begin_use(self) -> None:
        """To be called before the state is saved or brought back: from now on this is the one of its URL and rank."""
        self._check_open()
        if self._is_only and not self._has_place:
            end_former(self._url, self._ranks)
            self._has_place = True

    def _begin(
        self,
        leaves: list[Leaf],
        shares: list[Share],
        beside: _native.Text = (0, 0),
        again: Optional[_native.Named] = None,
    ) -> _native.Snapshot:
        """Takes a slot; where a failed save of the same step lies in memory, which nobody could tell from this one, its.
        `beside` is what the step says beside these tensors, as far as it is known: slices, and bytes of text."""
        self._devices.open(leaves)
        tensors = []
        for share in shares:
            leaf = leaves[share.leaf]
            tensors.append((share.name, leaf.dtype, leaf.shape, share.part))
        taken: list[_native.Snapshot] = []
        try:
            while not taken or again in self._session.held():
                # One that is on its way, as far as this rank heard, is free once it failed here, too.
                snapshot = self._session.begin(tensors, self._threads, 0.0, beside)
                if snapshot is None:
                    self._listen(TICK_S)
                else:
                    taken.append(snapshot)
            return taken.pop()
        finally:
            for snapshot in taken:
                self._session.abandon(snapshot)

    def _copy(
        self, step: int, snapshot: _native.Snapshot, leaves: list[Leaf], shares: list[Share]
    ) -> tuple[list[Leaf], bool]:
        """Copies what must be copied before the training goes on, and starts copying the rest. Gives that, and whether a device's
        engine copies any of it."""
        now, later = Sources(), Sources()
        filled: list[int] = []
        kept: list[Any] = []
        # Frozen ones as well, each time: of changes through `.data`, numpy, or another library's kernels torch counts none.
        for index, share in enumerate(shares):
            leaf, size = leaves[share.leaf], share_size(leaves[share.leaf], share.part)
            device = self._devices.find(leaf)
            can_wait = leaf.address is not None or device is not None
            sources = later if can_wait and leaf.is_late and self._hook_is_used else now
            if sources is later:
                # Where the tensor is given other memory (`p.data = x`), what is copied stays.
                leaf.source = leaf.source.detach()
            if device is not None and leaf.device_address is not None:
                sources.fetches.append((index, device, leaf.device_address + source_offset(leaf, share.part), size))
            elif leaf.address is None and size == leaf.size:
                fill(snapshot.place(index)[0], leaf)
                filled.append(index)
            else:
                address, keep = densify(leaf)
                kept.append(keep)
                sources.near.append((index, address + source_offset(leaf, share.part), size))
        if now.fetches or later.fetches:
            self._devices.follow()
        snapshot.checksum(filled, self._threads)
        snapshot.copy(now.near, now.fetches, self._threads)
        waiting = {shares[index].leaf for index in later.indexes()}
        check_unchanged(step, [leaf for index, leaf in enumerate(leaves) if index not in waiting])
        if waiting:
            _hold_optimizers()
            # Whatever becomes of this checkpointer, what the copy reads outlives it.
            owners = [leaves[index].source for index in waiting]
            snapshot.copy_in_background(later.near, later.fetches, self._threads, owners)
        return [leaves[index] for index in waiting], bool(later.fetches)

    def _give_up(self, step: int, number: Optional[int], error: BaseException) -> None:
        """Tells the other ranks that the step, which they may have sealed in the round of that number, will not be."""
        if not self._ranks.alone:
            self._session.give_up(step, number, str(error))

    def _without_memory(self, step: int, begun: float, error: BaseException) -> Save:
        """The save that failed with `error`, where the host has no memory for it and failures are warned of; else raises it."""
        if not isinstance(error, CheckpointNoSpace) or not self._outcomes.may_pass(error):
            raise error
        save = Save(self, step, None, begun)
        save._fail(error)
        self._outcomes.follow(save)
        return save

    def _stage(self, deadline: Optional[float]) -> bool:
        """As `_finish_staging`, unless the copy takes longer than until `deadline`."""
        while deadline is not None:
            staging = self._staging
            if staging is None or staging.is_copied:
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        self._finish_staging()
        return True

    def _finish_staging(self) -> None:
        """Waits for the background copy; seals the snapshot if nothing was changed meanwhile."""
        with self._lock:
            staging = self._staging
            if staging is None:
                return
            save = staging.save
            try:
                staging.finish()
                save._record.native = self._session.seal(
                    staging.snapshot, save.step, staging.round, staging.created_ms, staging.extras
                )
            except CheckpointError as error:
                self._end_staging(staging, error)
                raise
            # What a signal's handler raised before leaves all of it to the next call.
            self._staging = None
            self._outcomes.follow(save)

    def _end_staging(self, staging: Staging, error: CheckpointError) -> None:
        self._staging = None
        self._session.abandon(staging.snapshot)
        self._give_up(staging.save.step, staging.round, error)
        staging.save._fail(error)

    def _await_sources(self) -> None:
        """Waits until the state may change. What a device copied is checksummed and sealed behind the training, any other copy
        before this returns."""
        with self._lock:
            if self._hook_is_used and torch_module() is not None:
                # From the first step on: what it trains is copied behind the training.
                _hold_optimizers()
            staging = self._staging
            if staging is None or staging.is_read:
                return
            if not staging.is_far or not staging.snapshot.await_sources() or staging.is_copied:
                self._finish_staging()
                return
            try:
                staging.end_reading()
            except CheckpointError as error:
                self._end_staging(staging, error)
                raise
            if not self._seal_later(staging):
                self._finish_staging()

    def _seal_later(self, staging: Staging) -> bool:
        """Has a thread seal a snapshot once it is copied, however long no call comes; False where there is no thread for it."""
        if not staging.has_thread:
            try:
                # A process that ends waits for it: no daemon.
                threading.Thread(target=self._seal_behind, args=(staging,), name="forebay-seal").start()
            except RuntimeError:
                # The interpreter is about to end, or the host gives no thread.
                return False
            staging.has_thread = True
        return True

    def _seal_behind(self, staging: Staging) -> None:
        staging.snapshot.await_end()
        while not self._lock.acquire(timeout=TICK_S):
            # Who is in a call seals it, or keeps it from nobody once the process ends.
            if self._staging is not staging or not threading.main_thread().is_alive():
                return
        try:
            # What went wrong before the state might change is raised by the next call, which leaves it unchanged.
            if self._staging is staging and (staging.is_read or staging.is_fit()):
                self._finish_sealing()
        finally:
            self._lock.release()

    def _finish_sealing(self) -> None:
        """As `_finish_staging`, once the state may change: what goes wrong is told as what the agent tells is."""
        staging = self._staging
        try:
            self._finish_staging()
        except CheckpointError:
            if staging is not None:
                self._outcomes.follow(staging.save)

    def _ensure_agent(self) -> None:
        """Starts an agent if none is connected; it takes over what an earlier one left."""
        self._ranks.refuse_others()
        self._session.take_replies(0.0)
        if self._session.is_connected:
            return
        if self._job is None and (job := self._begin_job(self._start)) is not None:
            self._join(job)
        lost = self._session.lost()
        if self._agent is not None:
            self._agent.poll()
            text = f"the checkpoint agent (process {self._agent.pid}) ended unexpectedly; another one was started"
            steps = f" and saves steps {lost}" if lost else ""
            warn(text + steps)
        make_directory(self._url)
        arena = self._ladder.arena
        predecessor = arena.take()
        if predecessor is not None:
            self._session.adopt(predecessor, arena.is_used)
        self._session.set_lost(arena.lost, arena.lost_before, arena.kept)
        # What was seen later says nothing of when this start began: its number may be among them.
        if self._agent is None and not self._is_back and self._ladder.seen is not None:
            self._session.set_seen(self._ladder.seen)
        if self._linger_s > 0:
            self._session.set_linger(arena.place(self._ranks.rank), self._linger_s)
        if self._local is not None:
            self._local.announce(self._session, self._nonce)
        if self._replicas is not None:
            self._replicas.announce(self._session)
        fd, self._agent = start_agent(self._agent_log)
        self._session.connect(fd)

    def _begin_job(self, start: Start) -> Optional[str]:
        """Has rank 0 take one incarnation for all ranks, if there are others."""
        if self._ranks.alone:
            return None

        def begin() -> str:
            make_directory(self._url)
            if self._local is not None:
                self._local.begin(start[0])
            return _native.begin_job(self._url, *start)

        return self._ranks.first("begin the job", begin)

    def _join(self, job: str) -> None:
        """Makes this the checkpointer of one rank of a job that was begun."""
        self._job = job
        self._nonce = json.loads(job)["start"]["nonce"]
        _native.join_job(self._session, job, self._ranks.rank, self._ranks.world_size)

    def _settle(self, timeout: Optional[float] = None) -> bool:
        """Waits until no sealed save is under way; False when `timeout` seconds passed first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._session.is_busy:
            left = TICK_S if deadline is None else min(TICK_S, deadline - time.monotonic())
            if left < 0:
                return False
            self._listen(left)
        return True

    def _settle_together(self, step: Optional[int], may_be_near: bool) -> None:
        """Waits until no rank has a save of `step` under way, or any save if that is None; one with a copy on the local disk
        of each rank, if it is the newest, will do where it `may_be_near`."""
        waits = False

        def look() -> dict[str, Any]:
            nonlocal waits
            self._listen(TICK_S if waits else 0.0)
            under_way = self._outcomes.under_way(step)
            waits = bool(under_way) and not (may_be_near and under_way[-1].local)
            return {"waits": waits}

        while any(word["waits"] for word in self._ranks.gather("settle saves", look)):
            pass

    def _listen(self, patience_s: float) -> None:
        """Takes what the agent said; replaces it if it died."""
        self._session.take_replies(patience_s)
        self._pass_warnings_on()
        if not self._session.lost():
            return
        # One that waits for a save may be another thread than the one that saves, which may have noticed it, too.
        if self._lock.acquire(timeout=max(0.0, patience_s)):
            try:
                if self._session.lost() and not self._is_closed:
                    self._ensure_agent()
            finally:
                self._lock.release()

    def _pass_warnings_on(self) -> None:
        for message in self._session.take_warnings():
            warn(message)

    def _tell_failures(self, may_count: bool) -> None:
        """Raises what went wrong with earlier saves, or warns of it, on this rank. Where ranks meet they tell it together."""
        self._pass_warnings_on()
        trouble = self._outcomes.trouble(may_count)
        if trouble is not None:
            self._outcomes.were_raised([trouble.step])
            raise anew(trouble.error)
        self._warn_of_failures()

    def _find_trouble(self) -> Optional[Trouble]:
        """What this rank has to tell where all meet."""
        self._pass_warnings_on()
        trouble = self._outcomes.trouble()
        if trouble is None:
            self._warn_of_failures()
        return trouble

    def _warn_of_failures(self, all_pass: bool = False) -> None:
        while (text := self._outcomes.next_warning(all_pass)) is not None:
            warn(text)

    def _raise_together(self, own: Optional[Trouble], facts: list[Optional[dict[str, Any]]]) -> None:
        """Where any rank has a trouble, raises on all: its own, or with the rank's number that of another one."""
        others = [(rank, fact) for rank, fact in enumerate(facts) if fact is not None]
        if not others:
            return
        self._outcomes.were_raised([fact["step"] for _, fact in others])
        if own is not None:
            raise anew(own.error)
        rank, fact = others[0]
        raise error_named(fact["kind"])(f"rank {rank}: {fact['text']}")


@functools.cache
def _hold_optimizers() -> None:
    """From now on a step of any optimizer of torch is noted, and waits for what is copied in the background: kernels of fused ones
    change tensors whose version counters stay as they are. One function for good, as `torch.compile` looks at what a step calls;
    torch's compiler, which takes most of a second to import and 100 MB, is for the first step to load, whose optimizer mostly did."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    register_optimizer_step_pre_hook(disable(_finish_before_step))


def _finish_before_step(optimizer: Any, *_: Any) -> None:
    note_step(optimizer)
    for saver in list(_open):
        if saver._hook_is_used and saver._staging is not None:
            saver._await_sources()


def end_former(url: str, ranks: Ranks) -> None:
    """Ends those of this URL and rank that are in use and nobody closed, before another one is used: it would be a later start,
    and what they sealed be lost.

    Raises `CheckpointInvalid` where one is in a call of another thread, which does not end.
    """
    for former in list(_open):
        if former._url != url or not former._has_place or former._is_closed or former._ranks.rank != ranks.rank:
            continue
        if not former._lock.acquire(timeout=_HANDOVER_S):
            text = "another Checkpointer of it in this process is in a call of another thread"
            raise CheckpointInvalid(f"{url}: {text} (hint: one at a time saves to a URL; close() that one first)")
        try:
            if not former._is_closed:
                former._make_way(ranks)
        finally:
            former._lock.release()


@atexit.register
def _end_all() -> None:
    """A process that ends without `close()` leaves what was saved to the agents; they keep it for a while."""
    for saver in list(_open):
        # Who is in a call, on another thread, is not waited for.
        if saver._is_closed or not saver._lock.acquire(blocking=False):
            continue
        try:
            saver._let_go()
        except Exception as error:
            print(f"forebay: a checkpointer could not be ended: {error}", file=sys.stderr)
        finally:
            saver._lock.release()


def _forget_in_children(saver: Saver) -> None:
    """A forked child (a data loader's worker) neither saves nor keeps the parent's agent waiting."""
    reference = weakref.ref(saver)

    def forget() -> None:
        parent = reference()
        if parent is not None:
            parent._is_closed = True
            # Threads of the parent's may have held it, and are not here.
            parent._lock = threading.RLock()
            # What a killed trainer left is the parent's, and a snapshot under way lies in its memory.
            parent._ladder.arena.leave()
            parent._staging = None
            parent._session.forget()
            parent._ranks.forget()

    os.register_at_fork(after_in_child=forget)
