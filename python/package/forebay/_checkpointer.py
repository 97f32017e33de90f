"""The checkpointer of a training loop."""

from __future__ import annotations

import hashlib
import os
import secrets
import traceback
from collections.abc import Sequence
from typing import Any, Callable, Literal, Optional, Union

from . import _native
from . import _options as options
from ._errors import CheckpointConflict, CheckpointError, CheckpointInvalid
from ._flatten import Flattener
from ._garbage import uncollected
from ._loading import default_threads, extra_name, newest_steps, restore_threads
from ._local import LocalCopies
from ._outcomes import MAX_FAILURES, OnError, Outcomes, Trouble
from ._ranks import Ranks, new_start
from ._replicas import Replicas
from ._rng import rng_state
from ._save import TICK_S, Save, Staging, now
from ._restorer import Restorer
from ._saver import Back, end_former, open_session
from ._schedule import Schedule
from ._shares import Planner, share_size
from ._signals import Names, Notice, numbers_of
from ._sizes import SNAPSHOTS, Sizer, tell_memory
from ._sources import newest_common
from ._timeline import Timeline
from ._url import bucket_url, exists, source_url

LINGER_S = 600.0
"""How long an agent holds the newest steps for the successor of a killed trainer, in seconds: a restart on the same host
takes a minute or few, imports and all; a job that went elsewhere should give its memory back."""


class Checkpointer(Restorer):
    """Saves the state of a training job on schedule and brings it back.

    A save copies the state into shared memory and returns; a process of its own, which outlives this one, brings it
    to the store. Saving goes on while the training does; what went wrong with it is raised by the next call, or warned
    about (`on_error`).

    Args:
        url: Where the steps lie: `s3://bucket/prefix`, `gs://`, `az://`, `file:///directory`, or a directory.
        every: `step` saves when the step is a multiple of it; None leaves saving to `save_now`.
        every_minutes: `step` also saves when so many minutes passed since it last did; rank 0's clock counts, as of `on_signal`.
        keep: Steps to keep, the newest ones; None keeps all.
        keep_every: Of the others, those stay that are multiples of it. Pinned ones (`pin`, `forebay ckpt pin`) stay as well.
        rng: Whether to save and restore the random number generators of Python, numpy and torch as well, those that were
            used before the save.
        snapshots: Copies of what this rank saves that host memory has room for: 2, one of which is written while the other is on
            its way to the store; or 1, where two do not fit. Then a save has room once the one before it is committed, or
            given up, and a job that is killed while it copies goes on from the store.
        on_busy: What `step` does while all snapshots are still on their way to the store: `wait`, or `skip` the save and count
            it in `skipped`.
        on_error: What a save that failed in the background does: `raise` raises it at the next call of `step`, `save_now`,
            `wait` or `close`; `warn` makes it a `CheckpointWarning`, and the training goes on without that step. What the
            handle of a save waits for is raised either way, and so is at once what no later save can mend: a start that took
            over, a state or a call that is wrong, memory that is not there.
        max_failures: With `warn`, saves that fail in a row before it is raised after all; one that becomes durable starts
            the count anew, and so does raising it.
        on_signal: Signals, such as `SIGTERM`, upon which the next `step` saves, waits until that is committed, and then
            lets the signal do what it did before; a second one does so at once. Wherever it arrives, all ranks save: they ask each
            other about twice a second, at every 16th step at the latest. What went wrong with saves before comes after that one, as
            a `CheckpointWarning` where it is committed.
        allow_pickle: Whether objects of any other type may be pickled. Loading a pickle can run any code.
        copy_threads: Threads that copy; by default up to four, as the processors allow, and up to 16 of a restore.
        agent_log: A file for whatever the agent process prints; by default it is dropped.
        replicated: Patterns (as of `fnmatch`) of names of plain tensors that all ranks have alike, such as `ema.*`. Of a
            module's buffers those of the lowest rank count, as with DDP. What ranks have alike is compared in full when it is new,
            and by samples at every save; where it differs the save is refused on all ranks, and says what.
        ranks: This rank and how many there are, all on this host; by default those of torch.distributed, or RANK and
            WORLD_SIZE of the environment. `(0, 1)` saves alone.
        flush_rate: Bytes a second that each rank's agent sends to the store at most, such as `200MiB`; by default as fast as
            it can with what the training leaves of the processors, and while the job waits for a save as fast as it can.
        local: A directory of this host's disk, one for all ranks and for no other job at the same path (`/output` in containers),
            with copies of the newest steps: a restore reads them where memory is gone, and needs no store. For one host. By default none.
        local_keep: Steps that stay there; a directory needs room for one more.
        local_bytes: Bytes that copies take there at most, such as `200GiB`, an equal share for each rank: older steps that are
            in the store go first, and the newest that is not stays. A step that does not fit is stored without a copy, which
            is told once. By default as many as `local_keep` steps and one have.
        replicas: Other hosts that hold each rank's newest steps in their memory, 0 or 1: a job that lost a host goes on from what
            the next one has, as one whose processes were killed does from its own. Takes as much memory again. Bytes go by RDMA
            where hosts have network cards for it (`FOREBAY_RDMA`), else over TCP.
        linger: Seconds that the newest steps stay in memory after this process was killed; 0 lets them go at once. By
            default ten minutes. While another start that looked at them lives, and saves nothing yet, they stay, and for so
            long after it; 24 times as long in all at most, or until they are in the store. They go as soon as they are there
            where the agent was asked to end (SIGTERM), or other saves lack memory.
        patience: Seconds that ranks wait for each other before they name those that are missing.

    Raises `CheckpointInvalid`, a `ValueError`, for an option that is none.

    A job of several ranks saves and restores together: each rank has a checkpointer and calls `restore`, `step`,
    `save_now` and `close` alike. DTensors (FSDP2, tensor parallelism) are saved as the parts that they are, tensors of
    DDP once, split over the ranks; any other tensor is its rank's own. A step exists once every rank's part is
    stored. What one rank heard of earlier saves when the next one is due is raised on all of them, so that none waits for
    another in it; failures in a row are counted there, and by `wait` and `close`.

    Ranks of several hosts meet through torch.distributed, which is set up by then, and reach each other by TCP, at ports of
    their choice, unencrypted. What several want is read of the store once, and sent from host to host; where one cannot be
    reached the others read for themselves, with a warning. A killed job goes on from the memory of its hosts, whichever of them
    each rank is on now, and however many there are; where one of them is lost, from what others hold of it (`replicas`), else from
    the store.

    Where another one of its URL and rank is in use in this process (a notebook's cell that runs again), a new one with a
    schedule or `on_signal` closes that, and restores what it sealed; any other does so once it restores or saves.

    Host memory: two copies of what this rank saves (`snapshots`), and as much for another host's (`replicas`), whose size is told
    before the first save (`prepare`).
    """

    skipped = 0
    """Saves that were skipped because snapshots were busy."""

    def __init__(
        self,
        url: Union[str, "os.PathLike[str]"],
        every: Optional[int] = None,
        keep: Optional[int] = None,
        *,
        every_minutes: Optional[float] = None,
        keep_every: Optional[int] = None,
        rng: bool = True,
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: OnError = "raise",
        max_failures: int = MAX_FAILURES,
        on_signal: Names = None,
        allow_pickle: bool = False,
        copy_threads: Optional[int] = None,
        snapshots: int = SNAPSHOTS,
        agent_log: Optional[Union[str, "os.PathLike[str]"]] = None,
        replicated: Sequence[str] = (),
        ranks: Optional[tuple[int, int]] = None,
        flush_rate: Optional[Union[int, str]] = None,
        local: Optional[Union[str, "os.PathLike[str]"]] = None,
        local_keep: int = 2,
        local_bytes: Optional[Union[int, str]] = None,
        replicas: int = 0,
        linger: Optional[float] = None,
        patience: float = 600.0,
    ) -> None:
        given = options.checked(
            every=every, every_minutes=every_minutes, keep=keep, keep_every=keep_every, replicas=replicas, rng=rng,
            copy_threads=copy_threads, on_busy=on_busy, on_error=on_error, max_failures=max_failures, ranks=ranks,
            allow_pickle=allow_pickle, replicated=replicated, patience=patience, linger=linger, flush_rate=flush_rate,
            local=local, local_keep=local_keep, local_bytes=local_bytes, snapshots=snapshots,
        )
        threads = given["copy_threads"] or default_threads()
        outcomes = Outcomes(on_error, given["max_failures"])
        self._rng, self._allow_pickle, self._replicated = rng, allow_pickle, given["replicated"]
        place, start, signals = bucket_url(url), new_start(), numbers_of(on_signal)
        group = Ranks(place, given["ranks"], given["patience"])
        self._restore_threads = given["copy_threads"] or restore_threads(None if group.are_told_apart else group.world_size)
        self._snapshots: int = given["snapshots"]
        session = open_session(place, given["keep"], given["keep_every"], given["flush_rate"], self._snapshots, start)
        log = options.log("agent_log", agent_log)
        disk = given["local"], given["local_keep"], given["local_bytes"]
        copies = None if local is None else LocalCopies(place, group, *disk)
        exchange = Replicas(group, self._snapshots) if given["replicas"] else None
        # One that is made to look at steps, or to load a model, is in nobody's way.
        if is_used := self._is_only and bool(given["every"] or given["every_minutes"] or signals):
            end_former(place, group)
        linger_s = LINGER_S if given["linger"] is None else given["linger"]
        super().__init__(place, start, session, group, copies, threads, linger_s, log, outcomes, Notice(signals), exchange)
        self._has_place = is_used
        self._schedule = Schedule(given["every"], given["every_minutes"], self._notice)
        self._on_busy = on_busy
        self._planner = Planner(self._ranks)
        self._last: Optional[Save] = None
        """The save of it, unless it failed here before it was one."""
        self._past = Timeline(self._ranks.rank)
        self._has_memory = False
        self._told_bytes = 0
        """Bytes of this host's memory that were told of."""

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
            return
        # The error under way is the one to be seen; what is sealed gets committed by the agent.
        self._leave()
        if self._notice.received is not None:
            # The signal may end the process before it is told.
            traceback.print_exception(kind, error, trace)
        self._notice.pass_on()

    def _begin_from(self, back: Back) -> None:
        """Goes on as another start, from where the job went back to. Not before it saves: until then what this start sealed stays
        in memory, and goes to the store."""
        self._begin_anew(back)
        self._last, self._newest, self._back = None, None, None
        self._ensure_agent()

    def step(self, step: int, state: Any) -> Optional[Save]:
        """To be called once a step is done; saves if `every` says so. Tells what went wrong with earlier saves (`on_error`).

        Where there is a schedule and nothing was prepared or saved yet, the first call prepares (`prepare`).
        """
        return self._step(step, lambda: state)

    def _step(self, step: int, state_of: Callable[[], Any]) -> Optional[Save]:
        """As `step`, with a state that is made only where it is looked at."""
        step = options.whole("step", step, least=0, may_lack=False)
        with self._lock:
            self._schedule.count()
            self._begin_use()
            failed = self._await_sources_first()
            self._ensure_agent()
            # This may be a meeting of all ranks, which none may leave out.
            is_told, is_time = self._schedule.hear(self._ranks)
            if failed is not None and not is_told:
                failed._raise_if_failed()
            elif failed is not None:
                self._outcomes.follow(failed)
            saves = is_told or is_time or self._schedule.is_due(step)
            if saves:
                self._finish_sealing()
            if not is_told:
                self._tell_before(saves)
            save = self._save(step, state_of(), is_told) if saves else None
            if not (saves or self._has_memory) and self._schedule.is_used and (state := state_of()) is not None:
                # Now, while the training warms up, rather than in its first save.
                self._prepare(state)
            if is_told:
                self._end_with(save)
            return save

    def save_now(self, step: int, state: Any) -> Optional[Save]:
        """Saves whatever the schedule; None when `on_busy` is `skip` and all snapshots are busy.

        Raises `CheckpointConflict` for the step that was saved last, unless that save failed.
        """
        step = options.whole("step", step, least=0, may_lack=False)
        with self._lock:
            self._begin_use()
            self._finish_staging()
            self._ensure_agent()
            self._tell_before(True)
            return self._save(step, state)

    def before_optimizer_step(self) -> None:
        """To be called before parameters change: waits until they are copied.

        Once it was called, saves return before trained parameters and optimizer state are copied. A loop that calls it must
        do so before every change of them: the step of an optimizer of torch waits by itself, and a change by others that came
        too early is raised as `CheckpointMutated`, but for one through `.data`, which torch does not count. Parameters that no
        optimizer trains (averages, target networks, frozen ones), and embeddings with `max_norm`, are copied before saves return.
        """
        with self._lock:
            self._check_open()
            self._hook_is_used = True
            self._await_sources()

    def prepare(self, state: Any) -> int:
        """Takes the memory for saves of a state like this one, and gives its bytes: the first save is as fast as the next.

        Nothing of the state is changed. An optimizer of torch.optim that never stepped is given room for the state that its
        first step makes. Without it the first `step` of a schedule does this. What it takes is told on standard error, in one
        line of rank 0's, and to the logger `forebay` (info) by each rank; once, and again where it has become much more.
        """
        with self._lock:
            self._begin_use()
            self._finish_staging()
            self._ensure_agent()
            return self._prepare(state)

    def _prepare(self, state: Any) -> int:
        sizer = Sizer(self._allow_pickle, self._replicated, self._ranks)
        sizer.tree("state", state)
        if self._rng:
            sizer.tree("rng", rng_state(), "rng")
        self._devices.open(sizer.leaves)
        self._session.prepare(size := sizer.size(), self._threads)
        self._has_memory = True
        return self._tell_memory(size)

    def _tell_memory(self, size: int) -> int:
        """Tells what memory snapshots of `size` bytes take, unless that is known; gives the bytes."""
        replicas = None if self._replicas is None else int(self._ranks.are_spread)
        total = (1 + (replicas or 0)) * self._snapshots * size
        # A size is an estimate before the first save.
        if total > self._told_bytes * 9 // 8:
            self._told_bytes = total
            tell_memory(self._ranks, size, self._snapshots, replicas)
        return total

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Waits until no save is under way; False when `timeout` seconds passed first. Tells what went wrong (`on_error`)."""
        with self._lock:
            self._check_open()
            self._finish_staging()
            if not self._settle(timeout):
                return False
            self._tell_failures(may_count=True)
            return True

    @property
    def copies_missed(self) -> int:
        """Saves of this rank that have no copy on the local disk (`local`), which failed, hung, or had no room."""
        return self._session.copies_missed

    @property
    def replicas_missed(self) -> int:
        """Saves of this rank that no other host has a copy of in its memory (`replicas`), which did not reach it, or had no room."""
        return self._session.replicas_missed

    @property
    def copies_hung(self) -> int:
        """Restores that left the copies on the local disk (`local`), which gave nothing for 60 s, for the next tier."""
        return 0 if self._local is None else self._local.hung

    def timeline(self) -> list[dict[str, Any]]:
        """What this rank's last hundred saves and restores did, oldest first: `Save.timeline`, `Restored.as_dict`."""
        return self._past.entries()

    def metrics(self) -> str:
        """What all of this rank's saves and restores took, in the text format of Prometheus: counters, sums of seconds, the
        newest durable step. As far as this process heard, as in `Save.timeline`. May be called from any thread.

        Answer a scrape with it, or write it to a file of node_exporter's textfile collector.
        """
        missed = {"forebay_copies_missed": self.copies_missed, "forebay_replicas_missed": self.replicas_missed}
        return self._past.metrics(forebay_saves_skipped=self.skipped, **missed)

    def latest(self) -> Optional[int]:
        """The newest committed step, or None. Whether it is whole is seen when it is read. Ranks may hear of different ones."""
        steps = newest_steps(self._url) if exists(self._url) else []
        return steps[0][0] if steps else None

    def steps(self) -> list[int]:
        """Every committed step, ascending."""
        return sorted(step for step, _, _ in newest_steps(self._url)) if exists(self._url) else []

    def pin(self, step: options.StepName) -> None:
        """Keeps a step from being deleted (`keep`) until it is unpinned: the best one so far. One that is on its way to the store
        is waited for, so that it is pinned when this returns. One rank may call it, or each of them; a step that another start
        saves again stays beside that.

        Raises `CheckpointNotFound` for a step that is not there, and what went wrong with it where it was not saved.
        """
        number, start = options.step_name(step)
        if number is None:
            raise options.refused("step", step, "a whole number, at least 0, or one such as '500.2' (as start 2 saved it)")
        with self._lock:
            self._check_open()
            self._finish_staging()
            for save in self._outcomes.under_way(number):
                save.wait_durable()
            _native.set_pin(source_url(self._url), number, start, True)

    def unpin(self, step: options.StepName) -> None:
        """Leaves a step to `keep` again, which deletes it with the next save where it is not among those that stay. One that is
        not pinned is no error; one that is not there is `CheckpointNotFound`."""
        number, start = options.step_name(step)
        if number is None:
            raise options.refused("step", step, "a whole number, at least 0, or one such as '500.2' (as start 2 saved it)")
        _native.set_pin(source_url(self._url), number, start, False)

    def pins(self) -> list[int]:
        """Every pinned step, ascending."""
        return sorted({step for step, _ in _native.list_pins(self._url)}) if exists(self._url) else []

    def close(self) -> None:
        """Waits until no save is under way and the agent has ended. Tells what went wrong (`on_error`)."""
        with self._lock:
            if self._is_closed:
                return
            is_done = False
            try:
                try:
                    self.wait()
                    is_done = True
                except CheckpointError:
                    is_done = True
                    raise
                self._let_go(is_done=True)
                self._await_agent()
            finally:
                # Where the wait was cut off, as by Ctrl-C, what is sealed is kept for the next start.
                self._let_go(is_done)
                self._notice.pass_on()

    def _let_go(self, is_done: bool = False) -> None:
        super()._let_go(is_done)
        # It refers to this one: neither would be freed before Python's collector comes.
        self._last = None

    def _await_sources_first(self) -> Optional[Save]:
        """Waits for what is read of the state. Gives its save where that failed, which a signal that asks for another save puts
        off."""
        staging = self._staging
        try:
            self._await_sources()
        except CheckpointError:
            if staging is None or not self._notice.is_used:
                raise
            return staging.save
        return None

    def _end_with(self, save: Optional[Save]) -> None:
        """Waits for the save that a signal asked for; then tells what went wrong with any, and passes the signal on."""
        self._finish_staging()
        self._settle()
        if save is not None and save.durable:
            # It makes up for those that failed before.
            self._warn_of_failures(all_pass=True)
        self._tell_failures(may_count=True)
        self._notice.pass_on()

    def _tell_before(self, saves: bool) -> None:
        """Tells of earlier saves, unless several ranks are about to do so together, in `_save`."""
        if self._ranks.alone or not saves:
            # Of several ranks some may not have heard yet.
            self._tell_failures(may_count=self._ranks.alone)

    @uncollected
    def _save(self, step: int, state: Any, must: bool = False) -> Optional[Save]:
        """Saves; None where there is no room, unless it `must`: then a save of the step that is there, or on its way, will do."""
        begun, waits = now(), must or self._on_busy == "wait"
        if self._back is not None:
            self._begin_from(self._back)
        flattener = Flattener(self._allow_pickle, self._replicated)
        extras: list[tuple[str, str]] = []
        trouble: Optional[Trouble] = None

        def take() -> dict[str, Any]:
            nonlocal trouble
            if not must:
                trouble = self._find_trouble()
            elif step == self._newest:
                # Where it comes to nothing there is another try.
                self._settle()
            fate = self._fate(step)
            extras.append(("state", flattener.tree("state", state)))
            if self._rng:
                extras.append(("rng", flattener.tree("rng", rng_state(), "rng")))
            # What ranks compare; trees are told apart by which of their names may become others as well.
            is_alone = self._ranks.alone
            said = [extras[0][1], *flattener.ties]
            tree = "" if is_alone else hashlib.sha256("\0".join(said).encode()).hexdigest()
            structure = "" if is_alone else self._planner.structure(flattener.leaves, flattener.ties)
            # What is to be raised is not kept waiting.
            is_over = trouble is not None or fate == "saved"
            room = is_over or self._has_room(waits)
            fact = None if trouble is None else trouble.as_fact()
            # Tells this try of the step from another one, of which something may be in the store.
            number = None if is_alone else secrets.randbits(64)
            texts = [_native.text_length(extra_name(name, self._ranks.rank), data) for name, data in extras]
            samples = None if is_alone else self._planner.sample(flattener.leaves, structure, step)
            agreed = {"step": step, "tree": tree, "structure": structure, "round": number, "fate": fate, "texts": texts}
            keeps = None if self._replicas is None else self._replicas.say(self._session)
            return {**agreed, "samples": samples, "room": room, "held": self._session.held(), "trouble": fact, "keeps": keeps}

        words = self._ranks.gather("save", take)
        steps = [word["step"] for word in words]
        if steps != [step] * len(steps):
            raise CheckpointInvalid(f"the ranks are at different steps: {steps}")
        options.check_order(step, self._newest)
        if self._replicas is not None:
            self._replicas.hear(self._session, [word["keeps"] for word in words])
        self._raise_together(trouble, [word["trouble"] for word in words])
        fates = [word["fate"] for word in words]
        # What failed on one rank will on all, which may not have heard yet.
        is_again = "failed" in fates
        if "saved" in fates and not is_again:
            if must:
                return self._last
            raise CheckpointConflict(f"step {step} was saved already in this run")
        if not all(word["room"] for word in words):
            self.skipped += 1
            return None
        if is_again and not must:
            self._outcomes.is_known(step)
        self._newest, self._last = step, None
        return self._take_snapshot(step, words, flattener, extras, begun, is_again)

    def _fate(self, step: int) -> Optional[Literal["saved", "failed"]]:
        """What became of a save of the step that all ranks agreed upon last, as far as this rank knows."""
        if step != self._newest:
            return None
        return "failed" if self._last is None or self._last._find_failure() is not None else "saved"

    def _take_snapshot(
        self,
        step: int,
        words: list[dict[str, Any]],
        flattener: Flattener,
        extras: list[tuple[str, str]],
        begun: float,
        is_again: bool,
    ) -> Save:
        """Saves what all ranks agreed upon."""
        again = (self._nonce, step)
        # What all ranks have is kept until they all have something newer, which what failed is not.
        held = [[entry for entry in word["held"] if tuple(entry) != again] for word in words]
        self._session.keep(newest_common(held))
        leaves = flattener.leaves
        rank, number = self._ranks.rank, words[0]["round"]
        snapshot: Optional[_native.Snapshot] = None
        try:
            told = [word["structure"] for word in words], [word["samples"] for word in words]
            shares = self._planner.plan(leaves, flattener.ties, *told)
            if self._planner.aliases:
                extras = [(name, text) for (name, _), text in zip(extras, flattener.renamed(self._planner.aliases))]
            if rank > 0 and words[rank]["tree"] == words[0]["tree"]:
                # Rank 0's says the same.
                del extras[0]
            # All ranks count alike: what no manifest can say is refused on each of them.
            beside = self._planner.beside(words)
            snapshot = self._begin(leaves, shares, beside, again if is_again else None)
            self._has_memory = True
            late, is_far = self._copy(step, snapshot, leaves, shares)
            self._schedule.begin_anew()
            save = Save(self, step, sum(share_size(leaves[share.leaf], share.part) for share in shares), begun)
            if self._schedule.is_used:
                # The first step of a schedule may be one that it saves.
                self._tell_memory(save._record.size or 0)
            named = [(extra_name(name, rank), data) for name, data in extras]
            self._staging = Staging(save, number, snapshot, late, is_far, named)
        except BaseException as error:
            self._staging = None
            if snapshot is not None:
                self._session.abandon(snapshot)
            self._give_up(step, number, error)
            save = self._without_memory(step, begun, error)
            self._has_memory = True
            self._schedule.begin_anew()
        self._last = save
        self._past.append(save._record)
        staging = self._staging
        if staging is None or not (self._hook_is_used and staging.late and self._seal_later(staging)):
            self._finish_staging()
        save._record.returned_at = now()
        return save

    def _has_room(self, waits: bool) -> bool:
        has_room = self._session.has_room(0.0)
        while not has_room and waits:
            self._listen(TICK_S)
            has_room = self._session.has_room(0.0)
        return has_room
