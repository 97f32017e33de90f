"""Tensors and arrays as the engine sees them: a name, an element type, a shape, and where the bytes are."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any, Optional

from . import _native

SIZES: dict[str, int] = dict(_native.dtypes())
"""Bytes of one element, by the name of the element type."""


@dataclass
class Leaf:
    """One tensor to be saved."""

    name: str
    dtype: str
    shape: list[int]
    size: int
    """Bytes."""
    source: Any
    """The object that holds the bytes; kept alive until they are copied."""
    address: Optional[int]
    """Where the bytes are, if they are dense in this process's memory."""
    version: Optional[int] = None
    """The tensor's version counter when it was taken, where it has one."""
    path: str = ""
    """Where it is in the state, for people."""
    is_late: bool = False
    """Whether it may be copied after `step()` returned."""


def torch_module() -> Any:
    """torch, if the program uses it already; else None."""
    return sys.modules.get("torch")


def numpy_module() -> Any:
    """numpy, if the program uses it already; else None."""
    return sys.modules.get("numpy")


def tensor_dtype(tensor: Any) -> Optional[str]:
    """The element type's name of a torch tensor that can be saved; None for any other."""
    torch = torch_module()
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    name = str(tensor.dtype).removeprefix("torch.")
    return name if is_plain and name in SIZES else None


def array_dtype(array: Any) -> Optional[str]:
    """The element type's name of a numpy array or scalar that can be saved; None for any other."""
    name = array.dtype.name
    is_plain = array.dtype.kind in "biufc" and array.dtype.isnative
    return name if is_plain and name in SIZES else None


def tensor_leaf(name: str, path: str, tensor: Any, dtype: str) -> Leaf:
    """A torch tensor, wherever it is and however it is strided."""
    size = tensor.numel() * SIZES[dtype]
    is_dense = tensor.device.type == "cpu" and tensor.is_contiguous()
    if is_dense and (tensor.is_conj() or tensor.is_neg()):
        is_dense = False
    address = tensor.data_ptr() if is_dense else None
    version = None if tensor.is_inference() else tensor._version
    return Leaf(name, dtype, list(tensor.shape), size, tensor, address, version, path)


def array_leaf(name: str, path: str, array: Any, dtype: str) -> Leaf:
    """A numpy array, however it is strided."""
    address = array.ctypes.data if array.flags.c_contiguous else None
    return Leaf(name, dtype, list(array.shape), array.nbytes, array, address, None, path)


def bytes_leaf(name: str, path: str, data: bytes) -> Leaf:
    """A byte string."""
    # The array shares the bytes object's memory and keeps it alive.
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    return Leaf(name, "uint8", [len(data)], len(data), data, address, None, path)


def fill(address: int, leaf: Leaf) -> None:
    """Copies a leaf whose bytes are not dense in this process's memory to `address`."""
    if leaf.size == 0:
        return
    memory = (ctypes.c_char * leaf.size).from_address(address)
    torch = torch_module()
    if torch is not None and isinstance(leaf.source, torch.Tensor):
        source = leaf.source.detach()
        target = torch.frombuffer(memory, dtype=torch.uint8).view(source.dtype).view(source.shape)
        target.copy_(source)
        return
    numpy = numpy_module()
    target = numpy.frombuffer(memory, dtype=leaf.source.dtype).reshape(leaf.source.shape)
    target[...] = leaf.source


def has_changed(leaf: Leaf) -> bool:
    """Whether a tensor was written since it was taken, by its version counter."""
    return leaf.version is not None and leaf.source._version != leaf.version
