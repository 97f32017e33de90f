"""A signal that asks the job to end: it is noted, and acted upon between two steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Optional, Union

from . import _options as options
from ._errors import CheckpointInvalid
from ._workers import shield

Names = Union[None, str, int, Sequence[Union[str, int]]]


def numbers_of(names: Names) -> list[signal.Signals]:
    """The signals that are named. Raises `CheckpointInvalid` where one is none."""
    try:
        given = [] if names is None else [names] if isinstance(names, (str, int)) else list(names)
        if any(isinstance(name, bool) for name in given):
            raise TypeError
    except TypeError:
        raise options.refused("on_signal", names, "a signal, such as 'SIGTERM', several, or None") from None
    numbers = []
    for name in given:
        try:
            numbers.append(signal.Signals[name] if isinstance(name, str) else signal.Signals(name))
        except (KeyError, ValueError) as error:
            raise _unusable(name, error) from error
    return numbers


def _unusable(name: Union[str, int], error: Exception) -> CheckpointInvalid:
    return CheckpointInvalid(f"on_signal: {name!r} is no signal that can be waited for: {error}")


class Notice:
    """Takes signals over until `release`; `pass_on` has them do what they did before."""

    def __init__(self, names: Names) -> None:
        numbers = numbers_of(names)
        self.received: Optional[int] = None
        """The first that came."""
        self._frame: Optional[FrameType] = None
        self._pid = os.getpid()
        self._is_released = False
        self._before: dict[int, Any] = {}
        self._unshield: Callable[[], None] = lambda: None
        for number in dict.fromkeys(numbers):
            try:
                if signal.getsignal(number) is None:
                    raise ValueError("something outside of Python handles it")
                self._before[number] = signal.signal(number, self._note)
            except (ValueError, OSError) as error:
                self.release()
                raise _unusable(number.name, error) from error
        if self._before:
            self._unshield = shield(list(self._before))

    @property
    def is_used(self) -> bool:
        """Whether any signal is waited for."""
        return bool(self._before)

    def release(self) -> None:
        """Gives back the signals that nobody else took over since."""
        self._is_released = True
        self._unshield()
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                try:
                    signal.signal(number, before)
                except ValueError:
                    # Not the main thread: the handler stays, and passes everything on.
                    pass

    def pass_on(self) -> None:
        """Has the signal that came, if one did, do what it would have done."""
        number, frame = self.received, self._frame
        self.received = self._frame = None
        if number is not None:
            self._chain(number, frame)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        # Who is asked a second time is to end at once; a forked child has nothing to save.
        if self._is_released or self.received is not None or os.getpid() != self._pid:
            self._chain(number, frame)
        else:
            self.received, self._frame = number, frame

    def _chain(self, number: int, frame: Optional[FrameType]) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
