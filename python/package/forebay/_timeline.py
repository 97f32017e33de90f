"""What the saves and restores of one rank took: the last ones one by one, all of them as metrics."""

from __future__ import annotations

import collections
import threading
from typing import Any, Union

from ._ladder import Restored
from ._save import Record

_MAX_PAST = 100
"""Saves and restores that are told one by one."""

_FAMILIES = {
    "forebay_saves": ("counter", "Saves that were begun."),
    "forebay_saves_failed": ("counter", "Saves that failed."),
    "forebay_saves_skipped": ("counter", "Saves that were skipped because all snapshots were busy."),
    "forebay_saved_bytes": ("counter", "Bytes of this rank's parts of durable steps."),
    "forebay_save_seconds": (
        "summary",
        "Seconds from the beginning of a save until it returned, was staged, sealed, local, replicated, stored, durable.",
    ),
    "forebay_durable_step": ("gauge", "The newest step of this process that is durable."),
    "forebay_copies_missed": ("counter", "Saves without a copy on the local disk."),
    "forebay_replicas_missed": ("counter", "Saves without a copy in another host's memory."),
    "forebay_restored_bytes": ("counter", "Bytes that restores read."),
    "forebay_restore_seconds": ("summary", "Seconds that restores took."),
    "forebay_rdma_bytes": ("counter", "Bytes that network cards read out of other hosts' memory for restores."),
}
"""Each family's kind and what it says, in the order in which they are told."""

_PHASES = ("returned", "staged", "sealed", "local", "replicated", "stored", "durable")

_Totals = collections.defaultdict[tuple[str, str], float]
"""By family and label."""


class Timeline:
    """What happened so far. For any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()
        self._past: collections.deque[Union[Record, Restored]] = collections.deque()
        # Of what is not told one by one any more.
        self._totals: _Totals = collections.defaultdict(float)
        self._durable = -1

    def append(self, act: Union[Record, Restored]) -> None:
        """Something has begun, or is done."""
        with self._lock:
            self._past.append(act)
            if len(self._past) > _MAX_PAST:
                gone = self._past.popleft().as_dict()
                self._durable = max(self._durable, _durable_step(gone))
                _count(self._totals, gone)

    def entries(self) -> list[dict[str, Any]]:
        """The last ones, oldest first."""
        with self._lock:
            return [act.as_dict() for act in self._past]

    def metrics(self, **counted: int) -> str:
        """All of them, in the text format of Prometheus (version 0.0.4), and what was `counted` elsewhere, by families."""
        with self._lock:
            entries = [act.as_dict() for act in self._past]
            totals, durable = self._totals.copy(), self._durable
        for entry in entries:
            _count(totals, entry)
        durable = max([durable, *map(_durable_step, entries)])
        for family, value in counted.items():
            totals[f"{family}_total", ""] = value
        if durable >= 0:
            totals["forebay_durable_step", ""] = durable
        return "".join(_family(family, totals, self._rank) for family in _FAMILIES)


def _durable_step(entry: dict[str, Any]) -> int:
    return entry["step"] if entry.get("durable_s") is not None else -1


def _count(totals: _Totals, entry: dict[str, Any]) -> None:
    if entry["act"] == "restore":
        label = f',tier="{entry["tier"]}"'
        totals["forebay_restored_bytes_total", label] += entry["bytes"]
        totals["forebay_rdma_bytes_total", ""] += entry["rdma_bytes"]
        _observe(totals, "forebay_restore_seconds", label, entry["seconds"])
        return
    totals["forebay_saves_total", ""] += 1
    totals["forebay_saves_failed_total", ""] += int(entry["failed"] is not None)
    totals["forebay_saved_bytes_total", ""] += entry["bytes"] if entry["durable_s"] is not None else 0
    for phase in _PHASES:
        if entry[f"{phase}_s"] is not None:
            _observe(totals, "forebay_save_seconds", f',phase="{phase}"', entry[f"{phase}_s"])


def _observe(totals: _Totals, family: str, label: str, seconds: float) -> None:
    totals[f"{family}_sum", label] += seconds
    totals[f"{family}_count", label] += 1


def _family(family: str, totals: _Totals, rank: int) -> str:
    kind, says = _FAMILIES[family]
    names = {"counter": ("_total",), "summary": ("_sum", "_count"), "gauge": ("",)}[kind]
    of_family = [
        f'{name}{{rank="{rank}"{label}}} {value:.12g}\n'
        for (name, label), value in totals.items()
        if name in [family + suffix for suffix in names]
    ]
    if not of_family:
        return ""
    told = f"{family}_total" if kind == "counter" else family
    return "".join([f"# HELP {told} {says}\n", f"# TYPE {told} {kind}\n", *of_family])
