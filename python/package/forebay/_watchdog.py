"""How long ranks may wait for one of them inside of a collective of torch's."""

from __future__ import annotations

import datetime
from typing import Any, Optional

import torch
import torch.distributed as dist

_NCCL_S = 600.0
"""What torch gives NCCL where nothing else is said."""


def watchdog_limit_s() -> Optional[float]:
    """After how many seconds NCCL's watchdog ends ranks that wait for another; None where objects go without NCCL.

    It is that of the group of all ranks: torch tells a writer of no other one.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    devices = dict(one.split(":", 1) for one in dist.get_backend_config().split(",") if ":" in one)
    # torch sends objects through the processors' memory where it can.
    if "cpu" in devices or devices.get("cuda") != "nccl":
        return None
    try:
        group: Any = dist.group.WORLD
        timeout: datetime.timedelta = group._get_backend(torch.device("cuda")).options._timeout
        return timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return _NCCL_S
