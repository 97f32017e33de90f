"""The ranks of a job: who they are, and how they agree.

Everything that ranks do together is one kind of round, in which each says a few facts and all hear everything. What
went wrong on one rank is raised on all, with its number.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional, TypeVar

from . import _native
from ._errors import CheckpointCorrupt, CheckpointError, CheckpointInvalid, CopiesHang
from ._hosts import come, launched_on_several, open_door, torch_store
from ._leaf import torch_module
from ._presence import Presence
from ._url import meeting_name

T = TypeVar("T")

_KINDS = {kind.__name__: kind for kind in CheckpointError.__subclasses__()}
"""What may go wrong on a rank, by name."""

_groups: collections.Counter[str] = collections.Counter()
"""How often this process joined a group for a place: ranks that do the same things meet under the same number."""


class Ranks:
    """This process among the ranks that save to one place together."""

    def __init__(
        self,
        url: str,
        ranks: Optional[tuple[int, int]],
        patience_s: float,
        numbers: Optional[Sequence[int]] = None,
    ) -> None:
        """With `ranks` given, as rank and number of ranks, all are on this host; `numbers` are what people know them by."""
        self._url = url
        self._given = ranks
        self._patience_s = patience_s
        self._numbers = numbers
        self._near: Optional[Ranks] = None
        self._found: Optional[tuple[int, int]] = None
        self._are_apart: Optional[bool] = None
        """Whether they found that they are on several hosts, where nothing told it."""
        self._places: list[str] = []
        """Where each of them is, once they met."""
        self._group: Optional[_native.Group] = None
        self._acts: list[str] = []
        """What this rank is at, within one another."""
        self._left: Optional[str] = None
        """At which of these another rank failed and told so, while this one was further within: that round has been."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._find()[0]

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self._find()[1]

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.world_size == 1

    @property
    def are_spread(self) -> bool:
        """Whether they are on several hosts. Where nothing told that, they meet first."""
        told = self.are_told_apart if self._are_apart is None else self._are_apart
        if told is None:
            told = self._are_apart = len(set(self._meet())) > 1
        return told

    @property
    def are_told_apart(self) -> Optional[bool]:
        """Whether they are on several hosts, as far as that is known without the others; None where they have to meet first."""
        if self._given is not None:
            return False
        told = launched_on_several(self.world_size)
        # Ranks of several hosts meet through torch.distributed alone.
        return False if told is None and torch_store() is None else told

    def here(self) -> list[int]:
        """The ranks of this host, this one among them."""
        if not self.are_spread:
            return list(range(self.world_size))
        hosts = self.hosts()
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def hosts(self) -> list[int]:
        """The host that each rank is on, by the first rank that is there."""
        if not self.are_spread:
            return [0] * self.world_size
        places = self._meet()
        return [places.index(place) for place in places]

    def near(self) -> Ranks:
        """Those among one another: they can lend each other memory."""
        here = self.here()
        if len(here) == self.world_size:
            return self
        if self._near is None:
            url = f"{self._url} beside rank {here[0]}"
            self._near = Ranks(url, (here.index(self.rank), len(here)), self._patience_s, here)
        return self._near

    def gather(self, act: str, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Does `work`, and gives what it gave on each rank, in their order. All ranks must be at the same `act`.

        Raises what `work` raised here; else, with the rank's number, what it raised elsewhere. `work` may have rounds of its own:
        where a rank fails between these, its word that it did is heard in the next of them by all others, which fail with it.
        """
        self.refuse_others()
        if self.alone:
            return [work()]
        failure: Optional[BaseException] = None
        self._acts.append(act)
        try:
            facts = work()
        except BaseException as error:
            failure, facts = error, {"failed": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
        finally:
            self._acts.pop()
        words: list[dict[str, Any]] = []
        left, self._left = self._left, None
        if failure is not None and left is not None:
            # All heard of it in a round within this one; whether this is the one that the rank which failed was at, or not yet.
            self._left = None if left == act else left
        else:
            try:
                texts = self._join().gather(json.dumps({"act": act, "facts": facts}), self._patience_s)
                words = [json.loads(text) for text in texts]
            # A rank that failed is heard by others who lend memory, whose word is none.
            except (CheckpointError, ValueError):
                if failure is None:
                    raise
        failed = [(rank, word) for rank, word in enumerate(words) if "failed" in word["facts"]]
        # The outermost of those that ranks failed at: what is within it is over for all.
        told = {word["act"] for _, word in failed}
        self._left = next((outer for outer in self._acts if outer in told), self._left)
        if failure is not None:
            try:
                raise failure
            finally:
                # Else all frames that it passes refer to themselves, through it and this one.
                failure = None
        for rank, word in failed:
            # All ranks go on alike: what is not there for one is not there for all.
            kind = error_named(word["facts"]["kind"])
            raise kind(f"rank {self._number(rank)} failed to {word['act']}: {word['facts']['failed']}")
        for rank, word in enumerate(words):
            if word["act"] != act:
                own, other = self._number(self.rank), self._number(rank)
                raise CheckpointInvalid(f"rank {own} is at `{act}` while rank {other} is at `{word['act']}`")
        return [word["facts"] for word in words]

    def first(self, act: str, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, to all; it must be what JSON can say."""
        given: T = self.gather(act, lambda: {"given": work() if self.rank == 0 else None})[0]["given"]
        return given

    def gather_whole(self, act: str, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """As `gather`. Raises `CheckpointCorrupt` on all ranks when `work` does so on one, and `CopiesHang`."""
        damage: list[CheckpointCorrupt] = []

        def try_here() -> dict[str, Any]:
            try:
                return {"facts": work(), "damage": None, "hangs": False}
            except CheckpointCorrupt as error:
                damage.append(error)
                return {"facts": {}, "damage": str(error), "hangs": isinstance(error, CopiesHang)}

        words = self.gather(act, try_here)
        # All do the same next, whatever each of them met.
        kind = CopiesHang if any(word["hangs"] for word in words) else CheckpointCorrupt
        if damage and isinstance(damage[0], kind):
            raise damage[0]
        for rank, word in enumerate(words):
            if word["damage"] is not None and word["hangs"] == (kind is CopiesHang):
                raise kind(f"rank {self._number(rank)}: {word['damage']}")
        return [word["facts"] for word in words]

    def lend(self, together: _native.Together) -> None:
        """Has all ranks, which are on one host, lend each other memory. Raises `CheckpointUnavailable` when one is gone."""
        # Not all may have come so far.
        self.gather("lend memory", dict)
        together.lend(None if self.alone else self._join(), self._patience_s)

    def leave(self) -> None:
        """Ends the group of those who met, for which this process has sockets and rank 0's a thread: what refers to it may stay for
        long, as Python frees what refers to each other now and then. Who says anything there from now on hears that this one is
        gone."""
        self._group = None
        if self._near is not None:
            self._near.leave()

    def forget(self) -> None:
        """For a forked child: lets go of the others without a word."""
        if self._group is not None:
            self._group.forget()
        if self._near is not None:
            self._near.forget()

    def refuse_others(self) -> None:
        """Raises `CheckpointInvalid` where torch.distributed, which was set up since, says that this is another rank, or one of
        another number: each rank would save as if it were alone."""
        present = None if self._given is not None else _numbers_of_torch()
        if present is None or present == self._find():
            return
        (rank, world_size), (own, others) = present, self._find()
        text = f"it was made as rank {own} of {others}, and torch.distributed says that this is rank {rank} of {world_size}"
        hint = f"make it after init_process_group, or with ranks=({rank}, {world_size})"
        raise CheckpointInvalid(f"the Checkpointer of {self._url}: {text} (hint: {hint})")

    def _find(self) -> tuple[int, int]:
        if self._found is None:
            rank, world_size = self._given or surroundings()
            if not 0 <= rank < world_size:
                raise CheckpointInvalid(f"rank {rank} of {world_size}")
            self._found = rank, world_size
        return self._found

    def _number(self, rank: int) -> int:
        return rank if self._numbers is None else self._numbers[rank]

    def _meet(self) -> list[str]:
        """Where each of them is. They stay there, also once this one left."""
        if not self._places:
            self._join()
        return self._places

    def _join(self) -> _native.Group:
        if self._group is None:
            _groups[self._url] += 1
            names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
            place = [os.environ.get(name, "") for name in names]
            text = json.dumps([os.getuid(), *place, *meeting_name(self._url), _groups[self._url]])
            name = "forebay-" + hashlib.sha256(text.encode()).hexdigest()[:32]
            text = f"to restore or save at {self._url}, for {self._patience_s:g} s at most"
            hint = "to save alone, pass ranks=(0, 1)"
            if self._given is None and _numbers_of_torch() is None:
                hint += ", or unset RANK and WORLD_SIZE in the environment"
                if launched_on_several(self.world_size) is None:
                    several = "where ranks are on several hosts, set LOCAL_WORLD_SIZE, how many this one has"
                    hint = f"{several}, and call init_process_group first; {hint}"
            told = self.are_told_apart
            with Presence(name, self._find(), text, hint, bool(told)):
                # Where it is not known, they find out by what rank 0 says of its host.
                door, arrival = (None, None) if told is False else self._ways()
                self._group = _native.Group(name, self._find(), meeting_place(), self._patience_s, door, arrival)
                self._places = self._group.hosts()
        return self._group

    def _ways(self) -> tuple[Optional[_native.Door], Optional[_native.Arrival]]:
        """Rank 0's door for ranks of other hosts, or the way of one of these to it."""
        store = torch_store()
        if store is None:
            text = f"the job has {self.world_size} ranks on several hosts, which meet through torch.distributed"
            raise CheckpointInvalid(f"{text} (hint: call init_process_group first)")
        # torch has another store, or another part of it, for each start; torchrun counts these on each host for itself.
        name = f"forebay-{_groups[self._url]}-{self._url}"
        if self.rank == 0:
            return open_door(store, name, meeting_place()), None
        return None, come(store, name, meeting_place(), self._patience_s)


def use_together(ranks: Optional[Ranks], act: str, use: Callable[[], T]) -> T:
    """What `use` gives here. Raises `CheckpointCorrupt` on all ranks when it does so on one."""
    if ranks is None or ranks.alone:
        return use()
    used: list[T] = []

    def try_here() -> dict[str, Any]:
        used.append(use())
        return {}

    ranks.gather_whole(act, try_here)
    return used[0]


def error_named(kind: str) -> type[CheckpointError]:
    """The exception of that name, for what went wrong on another rank."""
    return _KINDS.get(kind, CheckpointError)


Start = tuple[str, str, int, int]
"""Who starts a job: a nonce, and for people the host, the process and the time in milliseconds."""


def new_start() -> Start:
    """One that nobody else is."""
    return secrets.token_hex(16), socket.gethostname(), os.getpid(), time.time_ns() // 1_000_000


def meeting_place() -> str:
    """Where processes can meet: equal for those of one user that share a kernel and its network."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


def surroundings() -> tuple[int, int]:
    """Rank and number of ranks, by torch.distributed where it is in use, else by the environment as torchrun sets it."""
    found = _numbers_of_torch()
    if found is not None:
        return found
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise CheckpointInvalid(f"RANK and WORLD_SIZE of the environment are no numbers: {error}") from error


def _numbers_of_torch() -> Optional[tuple[int, int]]:
    """Rank and number of ranks by torch.distributed; None where it is not in use."""
    torch = torch_module()
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
