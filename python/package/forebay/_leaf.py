"""Tensors and arrays as the engine sees them: a name, an element type, a shape, and where the bytes are."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Literal, Optional

from . import _native
from ._errors import CheckpointInvalid, CheckpointMismatch

SIZES: dict[str, int] = dict(_native.dtypes())
"""Bytes of one element, by the name of the element type."""


@dataclass
class Leaf:
    """One tensor to be saved."""

    name: str
    dtype: str
    shape: list[int]
    """Over all ranks."""
    size: int
    """Bytes here."""
    source: Any
    """The object that holds the bytes; kept alive until they are copied."""
    address: Optional[int]
    """Where the bytes are, if they are dense in this process's memory."""
    device_address: Optional[int] = None
    """Where the bytes are, if they are dense in a CUDA device's memory."""
    version: Optional[int] = None
    """The tensor's version counter when it was taken, where it has one."""
    path: str = ""
    """Where it is in the state, for people."""
    is_late: bool = False
    """Whether it may be copied after `step()` returned."""
    placement: Literal["local", "lead", "replicated"] = "local"
    """Who else has it: nobody; others, of whom the lowest rank counts; others, all alike."""
    part: Optional[tuple[list[int], list[int]]] = None
    """Offsets and lengths of the box that is here, of a tensor that several ranks hold together."""
    holders: int = 1
    """Ranks that have that box alike."""


def torch_module() -> Any:
    """torch, if the program uses it already; else None."""
    return sys.modules.get("torch")


def numpy_module() -> Any:
    """numpy, if the program uses it already; else None."""
    return sys.modules.get("numpy")


def tensor_dtype(tensor: Any) -> Optional[str]:
    """The element type's name of a torch tensor that can be saved; None for any other."""
    torch = torch_module()
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    dtype = tensor.dtype
    if dtype not in _NAMES:
        name = str(dtype).removeprefix("torch.")
        _NAMES[dtype] = name if name in SIZES else None
    return _NAMES[dtype]


def refuse_meta(tensor: Any, path: str, unsaved: Callable[[], Sequence[str]] = lambda: ()) -> None:
    """Raises `CheckpointMismatch` for a tensor that has a shape and no memory: what is copied into it is gone, and nobody
    is told. `unsaved` names the buffers of its module that no checkpoint has: `to_empty` leaves anything in them."""
    parts = local_parts(tensor)
    if any(local.is_meta for local in ([tensor] if parts is None else [local for local, _, _ in parts])):
        text = "the tensor is on the meta device and has no memory to be restored into"
        names = list(unsaved())
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        then = f", and set {', '.join(names[:5])}{more} anew, which no state_dict has" if names else ""
        raise CheckpointMismatch(f"{path}: {text} (hint: to_empty() first{then})")


def shape_of(tensor: Any) -> Any:
    """The shape of a torch tensor as a list; a word for a nested one, which has another for each row."""
    sharded = sharded_class()
    # One of several ranks cannot even be asked.
    is_whole = sharded is None or not isinstance(tensor, sharded)
    return "nested" if is_whole and tensor.is_nested else list(tensor.shape)


def layout_of(tensor: Any) -> str:
    """How a torch tensor is laid out, for people."""
    return f"nested {tensor.layout}" if tensor.is_nested else str(tensor.layout)


_NAMES: dict[Any, Optional[str]] = {}
"""What torch's element types are called here, those that were met: a state has many tensors of few types."""


def plain_kinds() -> frozenset[type]:
    """The types of torch tensors that are no more than their elements."""
    torch = torch_module()
    return frozenset() if torch is None else _plain_kinds(torch)


@functools.cache
def _plain_kinds(torch: Any) -> frozenset[type]:
    return frozenset((torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)))


def array_dtype(array: Any) -> Optional[str]:
    """The element type's name of a numpy array or scalar that can be saved; None for any other."""
    name = array.dtype.name
    is_plain = array.dtype.kind in "biufc" and array.dtype.isnative
    return name if is_plain and name in SIZES else None


def torch_dtype(name: str) -> Any:
    """The element type of torch that has this name. Raises `CheckpointInvalid` where this torch has none."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointInvalid(f"this version of torch has no element type `{name}`")
    return found


@functools.cache
def converts(saved: str, live: Any, any_kind: bool) -> bool:
    """Whether torch makes elements of a type out of those that were saved; of `any_kind`, or of floating point alone."""
    torch = torch_module()
    dtype = torch_dtype(saved)
    if dtype == live:
        return True
    if dtype.is_complex > live.is_complex or not (any_kind or (dtype.is_floating_point and live.is_floating_point)):
        return False
    try:
        copy_elements(torch.zeros(1, dtype=live), torch.zeros(1, dtype=dtype))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def elements_of(tensor: Any, path: str) -> Any:
    """A part of a tensor as elements in memory: one that is on its way from other ranks is waited for. Raises `TypeError` for
    one of a class that answers for its elements by itself, and may have none anywhere."""
    torch = torch_module()
    coming = getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)
    if coming is not None and isinstance(tensor, coming):
        tensor = tensor.wait()
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise TypeError(f"{path}: a part of type {kind} ({tensor.dtype} on {tensor.device}) cannot be saved")
    return tensor


def partitioned(module: Any) -> Optional[str]:
    """The name of a parameter that DeepSpeed (ZeRO-3) has taken apart, if a module has any: its elements are elsewhere, and the
    parameter is an empty tensor, in the module's state as well."""
    return next((name for name, one in module.named_parameters() if is_partitioned(one)), None)


def is_partitioned(parameter: Any) -> bool:
    """Whether DeepSpeed (ZeRO-3) has taken a parameter apart."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "ds_tensor")


PARTITIONED = (
    "a parameter that DeepSpeed has partitioned (ZeRO-3), of which there is nothing here "
    "(hint: DeepSpeed's own checkpoints have it; FSDP2 shards in a way that can be saved)"
)
"""Why it is neither saved nor restored."""


def tensor_leaf(name: str, path: str, tensor: Any, dtype: str) -> Leaf:
    """A torch tensor, wherever it is and however it is strided. Raises `TypeError` for one without memory, of which nothing
    can be copied."""
    size = tensor.numel() * SIZES[dtype]
    if size > 0 and tensor.device.type in ("cpu", "cuda") and tensor.data_ptr() == 0:
        raise TypeError(f"{path}: a tensor that has no memory (any more) cannot be saved")
    address, device_address = None, None
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        if tensor.is_cpu:
            address = tensor.data_ptr()
        if size > 0 and is_on_device(tensor):
            device_address = tensor.data_ptr()
    version = None if tensor.is_inference() else tensor._version
    return Leaf(name, dtype, list(tensor.shape), size, tensor, address, device_address, version, path)


def is_same(one: Any, other: Any) -> bool:
    """Whether two plain torch tensors are the same elements in one memory."""
    is_like = one.device == other.device and one.dtype == other.dtype and one.shape == other.shape
    is_like = is_like and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return bool(is_like and one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg())


def elements_at(tensor: Any) -> Any:
    """Which elements of this rank's memory a tensor is made of, to be compared; None where it has none here, or its class
    answers for them by itself."""
    torch, parts = torch_module(), local_parts(tensor)
    boxes = [(tensor, [], [])] if parts is None else parts
    if any(type(local) not in plain_kinds() or local.layout is not torch.strided for local, _, _ in boxes):
        return None
    found = []
    for local, offsets, lengths in boxes:
        if local.numel() > 0 and local.data_ptr() != 0:
            memory = local.device, local.dtype, local.data_ptr(), local.shape, local.stride()
            found.append((memory, local.is_conj(), local.is_neg(), str((offsets, lengths))))
    return tuple(found) or None


def is_on_device(tensor: Any) -> bool:
    """Whether a tensor's bytes are in a CUDA device's memory."""
    return bool(tensor.is_cuda)


def dtensor_class() -> Any:
    """torch's DTensor, if the program uses it already; else None."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def sharded_class() -> Any:
    """torch's ShardedTensor, which FSDP1 and TorchRec use, if the program uses it already; else None."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return getattr(module, "ShardedTensor", None)


def local_parts(tensor: Any) -> Optional[list[tuple[Any, list[int], list[int]]]]:
    """What this rank has of a tensor that several ranks hold together: plain tensors, and offsets and lengths of the
    boxes that they are. None for any other tensor."""
    if type(tensor) in plain_kinds():
        return None
    dtensor, sharded = dtensor_class(), sharded_class()
    if dtensor is not None and isinstance(tensor, dtensor):
        if tensor.device_mesh.get_coordinate() is None:
            # Its ranks are others; torch gives a part that is no box of it.
            return []
        (chunk,) = tensor.__create_chunk_list__()
        return [(tensor._local_tensor, list(chunk.offsets), list(chunk.sizes))]
    if sharded is not None and isinstance(tensor, sharded):
        shards = [(shard.tensor, shard.metadata) for shard in tensor.local_shards()]
        return [(local, list(place.shard_offsets), list(place.shard_sizes)) for local, place in shards]
    return None


def part_leaves(name: str, path: str, tensor: Any) -> list[Leaf]:
    """A DTensor or ShardedTensor: what this rank has of it, under one name."""
    placements = getattr(tensor, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise TypeError(f"{path}: a DTensor with pending sums ({placements}) cannot be saved")
    leaves = []
    for local, offsets, lengths in local_parts(tensor) or []:
        local = elements_of(local, path)
        dtype = tensor_dtype(local)
        if dtype is None:
            raise TypeError(f"{path}: a {type(tensor).__name__} of {local.layout} {local.dtype} cannot be saved")
        if list(local.shape) != lengths:
            raise TypeError(f"{path}: a {type(tensor).__name__} placed as {placements} is no box on this rank")
        leaf = tensor_leaf(name, path, local, dtype)
        leaf.shape, leaf.part, leaf.holders = list(tensor.shape), (offsets, lengths), holders(tensor)
        if 0 in leaf.shape:
            # There is nothing to be spread: each rank has all of it, whatever its box is, and one of them names it.
            leaf.part = ([0] * len(leaf.shape), leaf.shape)
        leaves.append(leaf)
    return leaves


def holders(tensor: Any) -> int:
    """Ranks that have the same part of a DTensor as this one; 1 for any other tensor."""
    placements = getattr(tensor, "placements", ())
    alike = [dimension for dimension, placement in enumerate(placements) if placement.is_replicate()]
    return math.prod(tensor.device_mesh.size(dimension) for dimension in alike)


def densify(leaf: Leaf) -> tuple[int, Any]:
    """Where the leaf's bytes are, dense in this process's memory, and what keeps them there."""
    if leaf.address is not None:
        return leaf.address, leaf.source
    memory = (ctypes.c_char * max(leaf.size, 1))()
    fill(ctypes.addressof(memory), leaf)
    return ctypes.addressof(memory), memory


def array_leaf(name: str, path: str, array: Any, dtype: str) -> Leaf:
    """A numpy array, however it is strided."""
    address = array.ctypes.data if array.flags.c_contiguous else None
    return Leaf(name, dtype, list(array.shape), array.nbytes, array, address, path=path)


def bytes_leaf(name: str, path: str, data: bytes) -> Leaf:
    """A byte string."""
    # The array shares the bytes object's memory and keeps it alive.
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    return Leaf(name, "uint8", [len(data)], len(data), data, address, path=path)


def fill(address: int, leaf: Leaf) -> None:
    """Copies a leaf whose bytes are not dense in this process's memory to `address`."""
    if leaf.size == 0:
        return
    memory = (ctypes.c_char * leaf.size).from_address(address)
    torch = torch_module()
    if torch is not None and isinstance(leaf.source, torch.Tensor):
        source = leaf.source.detach()
        target = torch.frombuffer(memory, dtype=torch.uint8).view(source.dtype).view(source.shape)
        pieces = -(-leaf.size // _PIECE) if source.is_cuda else 1
        if pieces == 1:
            copy_elements(target, source)
            return
        # A device makes each dense first, in memory that whoever trains may not have to spare.
        axis = 0 if source.shape[0] >= pieces else int(max(range(source.dim()), key=source.shape.__getitem__))
        for own, piece in zip(target.tensor_split(pieces, axis), source.tensor_split(pieces, axis)):
            copy_elements(own, piece)
        return
    numpy = numpy_module()
    target = numpy.frombuffer(memory, dtype=leaf.source.dtype).reshape(leaf.source.shape)
    target[...] = leaf.source


def copy_elements(place: Any, source: Any) -> None:
    """Copies a torch tensor's elements into another one of its shape, whatever their strides: by torch, but for types that
    it cannot copy (`torch.int4` and its like), which go as bytes."""
    torch = torch_module()
    is_narrow = source.dtype == place.dtype and str(source.dtype) in _NARROW
    if is_narrow:
        place, source = place.view(torch.uint8), source.view(torch.uint8)
    place.copy_(source)


_PIECE = 16 << 20
"""Bytes of a device's tensor that is not dense which torch copies at once."""

_NARROW = frozenset(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)) | {"torch.float4_e2m1fn_x2"}
"""Types of fewer bits than a byte, each element of which has one."""


def has_changed(leaf: Leaf) -> bool:
    """Whether a tensor was written since it was taken, by its version counter."""
    return leaf.version is not None and leaf.source._version != leaf.version
