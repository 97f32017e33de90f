"""The states of random number generators: Python's, numpy's, torch's and CUDA's, those that are in use."""

from __future__ import annotations

import contextlib
import random
import struct
import sys
from typing import Any

from ._errors import CheckpointCorrupt, warn
from ._leaf import numpy_module, torch_module


def rng_state() -> dict[str, Any]:
    """What `set_rng_state` takes."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": (version, struct.pack(f"<{len(words)}I", *words), gauss)}
    # numpy loads its generators on first use, which takes several times as long as all of this.
    generators, torch = sys.modules.get("numpy.random"), torch_module()
    if generators is not None:
        state["numpy"] = generators.get_state()
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Any) -> None:
    """Sets every generator whose state was saved and which this program uses; none where there is no state.

    Raises `CheckpointCorrupt` where it is none, and leaves all of them as they are.
    """
    if state is None:
        return
    before = rng_state()
    try:
        _set(state)
    except Exception as error:
        with contextlib.suppress(Exception):
            _set(before)
        text = "the state of the random number generators is none, all else was restored"
        raise CheckpointCorrupt(f"{text}: {type(error).__name__}: {error}") from error


def _set(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, struct.unpack(f"<{len(words) // 4}I", words), gauss))
    numpy, torch = numpy_module(), torch_module()
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if torch is not None and "torch" in state:
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and "cuda" in state:
            _set_cuda(torch, state["cuda"])


def _set_cuda(torch: Any, states: Any) -> None:
    count = torch.cuda.device_count()
    if len(states) == count:
        torch.cuda.set_rng_state_all(states)
    elif torch.cuda.is_initialized():
        text = f"the states of {len(states)} CUDA generators were saved, and this process sees {count} devices"
        warn(f"{text}: theirs stay as they are")
