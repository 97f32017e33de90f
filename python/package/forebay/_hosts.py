"""How ranks of several hosts find each other: rank 0 says in torch.distributed's own store where its door is."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from typing import Any, Optional

from . import _native
from ._errors import CheckpointUnavailable
from ._leaf import torch_module

_HERE = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "HOROVOD_LOCAL_SIZE", "LOCAL_SIZE"
)
"""Where launchers say how many ranks this host has: torchrun and those like it, Open MPI, MPICH and Intel MPI, Cray's PALS,
Horovod, DeepSpeed."""
_NODES = "SLURM_STEP_NUM_NODES"
"""Where Slurm says on how many hosts they are."""

_ATTEMPT_S = 10.0
"""How long the addresses of rank 0 are tried before it is asked again where it is."""
_PAUSES_S = (0.02, 0.5)
"""The first and the longest pause between two looks for what rank 0 says."""


def launched_on_several(world_size: int) -> Optional[bool]:
    """Whether the job's ranks are on several hosts, as what launched them says; None where nothing does."""
    if world_size == 1:
        return False
    for name in _HERE:
        with contextlib.suppress(ValueError):
            if name in os.environ:
                return int(os.environ[name]) < world_size
    nodes = os.environ.get(_NODES, "").strip()
    return nodes not in ("0", "1") if nodes else None


def torch_store() -> Optional[Any]:
    """The store that torch.distributed's processes share; None where it is not in use."""
    torch = torch_module()
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def open_door(store: Any, name: str, place: str) -> _native.Door:
    """Opens rank 0's, and tells the others in the store, where they look for that name; `place` is its host."""
    door, address = new_door()
    store.set(name, json.dumps({"place": place, **address}))
    return door


def new_door() -> tuple[_native.Door, dict[str, Any]]:
    """Opens a port of this process, and gives where others find it, and what they are to say there."""
    secret = secrets.token_hex(32)
    door = _native.Door(secret)
    return door, {"addresses": addresses(), "port": door.port, "secret": secret}


def come(store: Any, name: str, place: str, patience_s: float) -> Optional[_native.Arrival]:
    """The way to rank 0; None where it is on this host, which is at `place`, too.

    Raises `CheckpointUnavailable` where it does not say where it is in time, or cannot be reached there.
    """
    deadline, pause = time.monotonic() + patience_s, _PAUSES_S[0]
    who, tried = "rank 0", "it has not come so far"
    while True:
        if store.check([name]):
            # Again each time: it may have been another, earlier process's.
            said = json.loads(store.get(name))
            if said["place"] == place:
                return None
            arrival = _native.Arrival.at(said["addresses"], said["port"], said["secret"], _ATTEMPT_S)
            if arrival is not None:
                return arrival
            who, tried = "rank 0, on another host,", f"it is at none of {', '.join(said['addresses'])} (port {said['port']})"
        if time.monotonic() > deadline:
            text = f"{who} was not reached within {patience_s:g} s: {tried}"
            raise CheckpointUnavailable(f"{text} (hint: hosts of a job must reach each other by TCP, at any port)")
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])


def wanted_cards() -> str:
    """The network cards that may read other hosts' memory (RDMA): `auto`, `off`, or `DEVICE[:PORT[:GID_INDEX]],...`."""
    return os.environ.get("FOREBAY_RDMA", "auto")


def addresses() -> list[str]:
    """Under which others may reach this host, likely ones first."""
    master, name = os.environ.get("MASTER_ADDR", ""), socket.gethostname()
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: it is where packets to the others' meeting point leave from, or that itself.
        probe.connect((master, 9))
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    near = ("127.", "::1", "localhost")
    far = [address for address in [*found, master, name] if address and not address.startswith(near)]
    return list(dict.fromkeys(far or [*found, name]))
