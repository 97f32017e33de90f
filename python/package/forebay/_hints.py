"""What can be done about what is no part of a state as it is."""

from __future__ import annotations

import enum
import os
from typing import Any, Optional

from ._leaf import numpy_module

_PICKLE = "or pass allow_pickle=True"

KEYS = "keys are text, numbers, booleans, None, and tuples of these"


def hint_for(value: Any) -> str:
    """How a value of a type that cannot be saved may be saved after all."""
    plain = _plain(value)
    if plain is not None:
        return f"save {plain}, {_PICKLE}"
    return f"give it state_dict() and load_state_dict(), convert it, {_PICKLE}"


def hint_for_key(value: Any) -> str:
    """The same for a key of a dict, which is not pickled."""
    plain = _plain(value)
    return KEYS if plain is None else f"{KEYS}; use {plain}"


def hint_for_tensor(value: Any, is_plain: bool) -> str:
    """How what a tensor holds may be saved, of one that is not dense, or is of a class (`is_plain` of none) that makes something of
    other tensors."""
    if is_plain:
        return "save it as a dense one, .to_dense(), or .dequantize()"
    try:
        parts = [name for name in value.__tensor_flatten__()[0] if isinstance(name, str)]
    except Exception:
        return "save it as a plain one, .as_subclass(torch.Tensor) or what its class gives as that, such as .dequantize()"
    what = ", ".join(parts) or "its class tells"
    return f"it is made of {what}: save these, and make it of them again; or a plain one, such as .dequantize() gives"


def _plain(value: Any) -> Optional[str]:
    """What says the same in plain values, for people; None where that is for them to know."""
    numpy = numpy_module()
    if isinstance(value, enum.Enum):
        return "its `.value`"
    if isinstance(value, os.PathLike):
        return "it as text, str()"
    for kind in (str, int, float, bytes, dict, list, tuple, set):
        if isinstance(value, kind) and type(value) is not kind:
            return f"it as a plain {kind.__name__}()"
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "it as a plain array of numbers, in this machine's byte order"
    if numpy is not None and isinstance(value, numpy.generic):
        is_plain = type(value.item()) in (bool, int, float, complex)
        return "it as a plain value, `.item()`" if is_plain else "it as text, str()"
    return None
