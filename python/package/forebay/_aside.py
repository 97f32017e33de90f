"""Directories that are there whole or not at all, and say what they were written from.

Each is written beside its place, under a name that is this process's own, and then put there; what was there goes first.
Whoever is killed meanwhile leaves what was there, or what is new, or neither, and processes that write one at the same time,
on any hosts that share it, each leave a whole one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

NOTE = "forebay.json"
"""The file of such a directory that says what it was written from."""

_YOUNG_S = 60.0
"""How long after it was made a process's own directory may not be locked yet."""

_LEFT_S = 86_400.0
"""When what another host began to write is taken to be left for good, as it cannot be asked: no checkpoint takes a day."""

_TRIES = 100
"""How often others may come first."""


class Foreign(Exception):
    """There is something else in the place."""


def ensure(place: Path, facts: dict[str, str], write: Callable[[Path], None]) -> None:
    """Has a directory of those facts at `place`: what is there, if it has them, else one that `write` fills.

    Raises `Foreign`, and changes nothing, where something is there that tells no facts.
    """
    if _facts(place) == facts:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with _own(place) as own:
        new = own / "new"
        new.mkdir()
        write(new)
        (new / NOTE).write_text(json.dumps(facts), encoding="utf-8")
        for number in range(_TRIES):
            try:
                os.rename(new, place)
                return
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            if _facts(place) == facts:
                return
            with contextlib.suppress(FileNotFoundError):
                os.rename(place, own / f"old-{number}")
        raise OSError(errno.EBUSY, "others put theirs there again and again", str(place))


def _facts(place: Path) -> Optional[dict[str, str]]:
    """What the directory there was written from; none where there is nothing."""
    try:
        facts = json.loads((place / NOTE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.lexists(place):
            return None
        raise Foreign from None
    except ValueError:
        raise Foreign from None
    if not isinstance(facts, dict):
        raise Foreign
    return facts


@contextlib.contextmanager
def _own(place: Path) -> Iterator[Path]:
    """A directory of this process's beside `place`, which goes with everything in it; so do those of processes that died."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        host = file.read().strip()
    # Hidden: a Trainer that counts its checkpoints counts every name that begins like theirs.
    for other in place.parent.glob(f".{place.name}.*.part"):
        if _is_left(other, host):
            shutil.rmtree(other, ignore_errors=True)
    own = Path(tempfile.mkdtemp(prefix=f".{place.name}.{host}.", suffix=".part", dir=place.parent))
    try:
        with open(own / "lock", "wb") as lock:
            # Where there are no locks, it is known by its age.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _is_left(own: Path, host: str) -> bool:
    """Whether the process whose directory this is has died."""
    is_free = False
    try:
        with open(own / "lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Some file systems' locks are for one host only.
            is_free = f".{host}." in own.name
    except BlockingIOError:
        return False
    except OSError:
        pass
    try:
        age_s = time.time() - own.stat().st_mtime
    except FileNotFoundError:
        return False
    return age_s > (_YOUNG_S if is_free else _LEFT_S)
