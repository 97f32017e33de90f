"""Workers of a `DataLoader`, which are to live until their trainer ends them.

Who ends a job may ask each of its processes: torchrun signals the process group of a trainer, Slurm all of a job step. Workers
die of that, and torch raises in the trainer before its next step, which is the one that `on_signal` saves. So they do not
heed such a signal: they end when the trainer ends them, or is gone, as they see within seconds.

Those that are forked have what is put into torch here. Those that are spawned begin anew, and know what they are sent: what they
are to run, which puts it there first. So do those of a fork server, which has to live on as well (`_serving.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Optional

from . import _native

_SIGNALS, _HANDLERS = "torch.utils.data._utils.signal_handling", "_set_worker_signal_handlers"
_WORKER, _LOOP = "torch.utils.data._utils.worker", "_worker_loop"
"""What workers do, and what they do first: they have torch take signals over. Both by functions that are theirs alone."""


_SERVING = "forebay._serving"
"""What a fork server is to import."""


class _Loop:
    """What a worker runs: torch's own, which passes over `signals`, in a process that was spawned as well."""

    def __init__(self, signals: Sequence[int], before: Optional[Callable[..., Any]] = None) -> None:
        # What another one passes over is not taken back.
        of_others = before._signals if isinstance(before, _Loop) else ()
        self._signals: tuple[int, ...] = tuple(dict.fromkeys((*of_others, *signals)))
        self._before = before

    def __reduce__(self) -> Any:
        # Torch's own is known there by its name, which is this one's here.
        return _Loop, (self._signals,)

    def __call__(self, *given: Any, **named: Any) -> Any:
        loop = self._before
        if loop is None:
            trainer = multiprocessing.parent_process()
            loop = getattr(_imported(_WORKER), _LOOP)
            _put(_SIGNALS, _HANDLERS, _heeding_parent(self._signals, None if trainer is None else trainer.pid))
            if trainer is not None and trainer.pid != os.getppid():
                # The parent is a fork server, which torch looks at in the stead of the trainer; and that one lives for as long as what it
                # started does.
                threading.Thread(target=_end_with, args=(trainer,), name="forebay-trainer", daemon=True).start()
        return loop(*given, **named)


def _end_with(trainer: Any) -> None:
    """Ends this process once its trainer is gone."""
    trainer.join()
    os._exit(1)


def shield(signals: Sequence[int]) -> Callable[[], None]:
    """Has workers that are forked or spawned from here on pass over `signals`, and those of a fork server that does not run yet;
    gives what ends that."""
    if "torch" not in sys.modules:
        return lambda: None
    ends = [
        _put(_SIGNALS, _HANDLERS, _heeding_parent(signals)),
        _put(_WORKER, _LOOP, lambda before: _Loop(signals, before)),
        _preload(),
    ]

    def end() -> None:
        for one in ends:
            one()

    return end


def _preload() -> Callable[[], None]:
    """Has a fork server that is started from here on import what it lives on by; gives what ends that."""
    server = getattr(_imported("multiprocessing.forkserver"), "_forkserver", None)
    names = getattr(server, "_preload_modules", None)
    if server is None or not isinstance(names, list):
        # Another Python's is made in another way.
        return lambda: None
    server.set_forkserver_preload([*names, _SERVING])

    def end() -> None:
        rest = list(server._preload_modules)
        if _SERVING in rest:
            rest.remove(_SERVING)
            server.set_forkserver_preload(rest)

    return end


def _heeding_parent(signals: Sequence[int], trainer: Optional[int] = None) -> Callable[[Any], Any]:
    """What takes signals over in a worker, of what did so before; its trainer is its parent, or the process of that number."""

    def make(before: Any) -> Any:
        def begin(*given: Any) -> None:
            before(*given)
            _native.heed_parent(list(signals), trainer)

        return begin

    return make


def _put(name: str, attribute: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Puts what is made of a module's attribute in its place; gives what takes it back."""
    module = _imported(name)
    before: Any = getattr(module, attribute)
    made = make(before)
    setattr(module, attribute, made)

    def end() -> None:
        # Where others have put theirs on top since, that stays.
        if getattr(module, attribute) is made:
            setattr(module, attribute, before)

    return end


def _imported(name: str) -> Any:
    __import__(name)
    return sys.modules[name]
