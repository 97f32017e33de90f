"""Which file system a path lies on: paths are this process's own where it is in a container, names of memory are not."""

from __future__ import annotations

import re

_TABLE = "/proc/self/mountinfo"


def mount_of(path: str) -> list[str]:
    """What tells the mount of an absolute path from others that are at the same place for other processes of this host: its device,
    or where that is none the server, and the directory of it that is mounted there. The path need not be there yet.

    Empty where the kernel does not tell. Nothing on the mount is asked, as it may hang.
    """
    try:
        with open(_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            return _nearest(path, table.read())
    except (OSError, ValueError, IndexError):
        return []


def _nearest(path: str, table: str) -> list[str]:
    """Of a table as in proc_pid_mountinfo(5)."""
    found: list[str] = []
    nearest = ""
    for line in table.splitlines():
        facts, _, origin = line.partition(" - ")
        _, _, device, root, place = (_plain(fact) for fact in facts.split(" ")[:5])
        # Later ones lie above.
        if f"{path}/".startswith(f"{place.rstrip('/')}/") and len(place) >= len(nearest):
            source = _plain(origin.split(" ")[1])
            # What is not a disk's has another number whenever it is mounted, and may have no other name than its kind (overlay).
            is_told = device.startswith("0:") and (":" in source or source.startswith("//"))
            found, nearest = [source if is_told else device, root], place
    return found


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
