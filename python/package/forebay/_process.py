"""Starting the agent: a process of its own session, tied to this one by a socket only."""

import os
import signal
import socket
import subprocess
import sys
from typing import IO, Any, Optional, Union

_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go to every process of a job, by which an agent does not end before what is sealed is in the store."""

_AGENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_agent.py")


class Agent(subprocess.Popen):  # type: ignore[type-arg]
    """The process. It outlives this one, and whoever started it, where that is not closed: nothing to be warned of."""

    def __del__(self) -> None:
        super().__del__(_warn=_no_warning)  # type: ignore[call-arg]


def _no_warning(*_: Any, **__: Any) -> None:
    pass


def start_agent(log: Optional[str]) -> tuple[int, Agent]:
    """Starts an agent; gives this end of its socket and the process.

    The agent neither shares this process's group (a signal to the group spares it) nor its standard streams (who
    waits for them to close does not wait for the agent); what it prints goes to the file `log`, if one is given. Signals
    that ask it to end it notes, from its first moment, and ends once it has nothing left to save.
    """
    if not sys.executable:
        raise RuntimeError("sys.executable is not set, so that the checkpoint agent cannot be started")
    near, far = socket.socketpair()
    with far:
        output: Union[int, IO[bytes]] = subprocess.DEVNULL if log is None else open(log, "ab")
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            # Inherited: the agent itself could hold them back only once it runs, and by then it may have taken over what
            # another one held.
            signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
            # Isolated and without site-packages: it starts in tens of milliseconds and imports nothing of the user's.
            process = Agent(
                [sys.executable, "-I", "-S", _AGENT, str(far.fileno())],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                cwd="/",
                start_new_session=True,
            )
            # Whoever was held back comes now, and may raise.
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        except BaseException:
            near.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
            if not isinstance(output, int):
                output.close()
    return near.detach(), process
