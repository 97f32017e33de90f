"""One save on its way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable, Optional

from . import _native
from ._errors import CheckpointError, CheckpointInvalid, CheckpointMutated, anew
from ._leaf import Leaf, has_changed

if TYPE_CHECKING:
    from ._saver import Saver

TICK_S = 0.2
"""How long the engine waits before Python may look at signals, in seconds."""


class Record:
    """What is told of a save: plain facts, which hold neither the state nor whoever saved it."""

    def __init__(self, step: int, rank: int, size: Optional[int], begun: float) -> None:
        self.step = step
        self.rank = rank
        self.size = size
        self.begun = begun
        self.started = time.time()
        self.returned_at: Optional[float] = None
        self.staged_at: Optional[float] = None
        self.native: Optional[_native.Save] = None
        self.failed: Optional[str] = None

    def as_dict(self) -> dict[str, Any]:
        """As `Save.timeline` says."""
        sealed, local, replicated, stored, durable = (None,) * 5 if self.native is None else self.native.times
        moments = {
            "returned_s": self.returned_at,
            "staged_s": self.staged_at,
            "sealed_s": sealed,
            "local_s": local,
            "replicated_s": replicated,
            "stored_s": stored,
            "durable_s": durable,
        }
        seconds = {name: None if moment is None else round(moment - self.begun, 6) for name, moment in moments.items()}
        facts = {"step": self.step, "rank": self.rank, "bytes": self.size, "started": self.started}
        return {"act": "save", **facts, **seconds, "failed": self.failed}


class Save:
    """One save, from `step` or `save_now`: how far it is."""

    def __init__(
        self, owner: Saver, step: int, size: Optional[int] = None, begun: Optional[float] = None
    ) -> None:
        self._owner = owner
        self._record = Record(step, owner._ranks.rank, size, now() if begun is None else begun)
        self._failure: Optional[CheckpointError] = None
        """What went wrong, as nobody raised it: see `anew`."""

    def __repr__(self) -> str:
        return f"<forebay.Save step={self._record.step} {self._progress()}>"

    @property
    def step(self) -> int:
        """The step."""
        return self._record.step

    @property
    def staged(self) -> bool:
        """Whether everything is copied: the state may change."""
        return self._record.staged_at is not None

    @property
    def sealed(self) -> bool:
        """Whether the agent has it: it will be committed even if this process is killed now.

        The agent, a process of this host, goes on until then when it is asked to end (SIGTERM, SIGINT, SIGHUP), as service
        managers and batch systems ask every process of a job. What is not committed when it is killed itself (SIGKILL, at
        the end of their grace period, or of its container) is lost, unless a copy is on the local disk (`local`).
        """
        return self._progress() in ("sealed", "durable")

    @property
    def local(self) -> bool:
        """Whether a copy of this rank's part is on the local disk (`local=`)."""
        return self._record.native is not None and self._record.native.times[1] is not None

    @property
    def replicated(self) -> bool:
        """Whether as many other hosts as `replicas=` says hold this rank's part in memory: of none, as `sealed`."""
        if not self._owner._replicas:
            return self.sealed
        return self._record.native is not None and self._record.native.times[2] is not None

    @property
    def durable(self) -> bool:
        """Whether it is committed in the store."""
        return self._progress() == "durable"

    def timeline(self) -> dict[str, Any]:
        """What it took so far, as plain data: bytes of this rank's part, and seconds since it was begun until `step`
        returned, and until it was staged, sealed, local (this rank's part is on the local disk), replicated (other hosts hold
        it, where `replicas=` asks for any), stored (it is in the store) and durable.

        None for what did not happen yet, as far as this process heard (`wait_durable` hears all), or is not known.
        """
        told = self._record.as_dict()
        del told["act"]
        return told

    def wait_staged(self, timeout: Optional[float] = None) -> bool:
        """Waits until everything is copied; False when `timeout` seconds passed first.

        Raises what went wrong with this save; so do the next ones.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._owner._stage(deadline):
            return False
        self._raise_if_failed()
        return self._record.native is not None

    def wait_sealed(self, timeout: Optional[float] = None) -> bool:
        """Waits until the agent has it; False when `timeout` seconds passed first."""
        return self._wait(lambda: self.sealed, timeout)

    def wait_local(self, timeout: Optional[float] = None) -> bool:
        """Waits until a copy of this rank's part is on the local disk; False when `timeout` seconds passed first, or it was
        committed in the store without one."""
        return self._wait(lambda: self.local or self.durable, timeout) and self.local

    def wait_replicated(self, timeout: Optional[float] = None) -> bool:
        """Waits until as many other hosts as `replicas=` says hold it; False when `timeout` seconds passed first, or it was
        committed in the store without that."""
        return self._wait(lambda: self.replicated or self.durable, timeout) and self.replicated

    def wait_durable(self, timeout: Optional[float] = None) -> bool:
        """Waits until it is committed in the store; False when `timeout` seconds passed first."""
        return self._wait(lambda: self.durable, timeout)

    def _wait(self, happened: Callable[[], bool], timeout: Optional[float]) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._owner._stage(deadline):
            return False
        has_listened = False
        while True:
            # Seen first: what was heard before the close counts.
            is_over = self._owner._is_closed
            self._raise_if_failed()
            if happened():
                return True
            if is_over:
                text = f"the checkpointer was closed before step {self._record.step} was known to be there"
                raise CheckpointInvalid(f"{text} (hint: `forebay ckpt ls` tells what is in the store)")
            left = TICK_S if deadline is None else min(TICK_S, deadline - time.monotonic())
            if left < 0 and has_listened:
                return False
            self._owner._listen(max(left, 0.0))
            has_listened = True

    def _progress(self) -> str:
        if self._failure is not None:
            return "failed"
        return "staging" if self._record.native is None else self._record.native.progress

    def _find_failure(self) -> Optional[CheckpointError]:
        if self._failure is None and self._record.native is not None:
            try:
                self._record.native.raise_if_failed()
            except CheckpointError as error:
                self._fail(error)
        return self._failure

    def _fail(self, error: CheckpointError) -> None:
        """Takes note of what went wrong."""
        self._failure, self._record.failed = anew(error), str(error)

    def _raise_if_failed(self) -> None:
        failure = self._find_failure()
        if failure is not None:
            self._owner._outcomes.was_told(self)
            raise anew(failure)


class Staging:
    """A snapshot whose last tensors are copied in the background; `is_far` says that a device's engine copies some."""

    is_read = False
    """Whether the state may change: what is left is to checksum the copy, and to seal it."""
    has_thread = False
    """Whether a thread waits for that, to seal it."""
    failure: Optional[CheckpointError] = None
    """Why it will not be sealed, as nobody raised it: see `anew`."""

    def __init__(
        self,
        save: Save,
        number: Optional[int],
        snapshot: _native.Snapshot,
        late: list[Leaf],
        is_far: bool,
        extras: list[tuple[str, str]],
    ) -> None:
        self.save = save
        self.round = number
        self.snapshot = snapshot
        self.late = late
        self.is_far = is_far
        self.extras = extras
        self.created_ms = time.time_ns() // 1_000_000

    @property
    def is_copied(self) -> bool:
        """Whether the copy has ended, checksums and all, or failed."""
        return self.snapshot.is_copied

    def end_reading(self) -> None:
        """To be called once nothing is read any more, before anything may change. Raises `CheckpointMutated` where something did
        before."""
        if not self.is_read:
            check_unchanged(self.save.step, self.late)
            self.save._record.staged_at = now()
            self.is_read = True

    def finish(self) -> None:
        """Waits for the copy. Raises what it failed with, or that something was changed before it ended; again each time."""
        if self.failure is None:
            try:
                self.snapshot.join()
                self.end_reading()
                return
            except CheckpointError as error:
                self.failure = anew(error)
        raise anew(self.failure)

    def is_fit(self) -> bool:
        """Waits for the copy; whether it can be sealed."""
        try:
            self.finish()
        except CheckpointError:
            return False
        return True


def now() -> float:
    """Seconds since this machine started: the agent's clock as well."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def check_unchanged(step: int, leaves: list[Leaf]) -> None:
    """Raises `CheckpointMutated` when a tensor was written since it was taken."""
    changed = [leaf.path for leaf in leaves if has_changed(leaf)]
    if changed:
        text = f"step {step} was not saved: {', '.join(changed[:5])} changed while it was copied"
        hint = "call before_optimizer_step() before each change of parameters, as a forward with max_norm makes"
        raise CheckpointMutated(f"{text} (hint: {hint})")
