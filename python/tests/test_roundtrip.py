"""What is saved comes back bit by bit."""

from __future__ import annotations

import collections
import ctypes
import enum
import json
import math
import random
import struct
import urllib.request
from pathlib import Path
from typing import Any, Callable

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forebay
import forebay.dcp
from forebay import _native
from forebay._flatten import Flattener
from forebay._leaf import Leaf

from .test_ranks import run_ranks
from .test_reading import read_bytes

DTYPES = sorted(
    {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
)
"""All that the installed torch has, not those that the product knows."""
REFUSED = {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}
"""Those whose tensors are more than their elements: they have a scale and a zero point."""
SAVED = [name for name in DTYPES if name not in REFUSED]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def filled(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes (of zeros and ones for bool)."""
    kind = getattr(torch, dtype)
    size = kind.itemsize * math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if dtype == "bool" else 256, (size,), dtype=torch.uint8, generator=generator)
    return (
        torch.frombuffer(bytearray(data.numpy().tobytes()), dtype=kind).view(shape)
        if size
        else torch.empty(shape, dtype=kind)
    )


def raw(value: torch.Tensor) -> bytes:
    """A tensor's bytes, whatever its type."""
    value = value.detach().clone(memory_format=torch.contiguous_format) if value.dtype.is_complex else value.detach()
    if not value.is_contiguous():
        # torch copies not every type.
        value = value.view(BITS[value.element_size()]).contiguous()
    return ctypes.string_at(value.data_ptr(), value.numel() * value.element_size())


def same(left: Any, right: Any) -> bool:
    """Equal in type, shape and every bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and raw(left) == raw(right)
        )
    if isinstance(left, (numpy.ndarray, numpy.generic)):
        return (
            type(left) is type(right)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, collections.defaultdict) and left.default_factory is not right.default_factory:
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def test_every_dtype_and_shape(url: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 5), (4, 3, 2)]
    state = {name: [filled(name, shape, index) for index, shape in enumerate(shapes)] for name in SAVED}
    forebay.save(state, url)
    assert same(forebay.load(url), state)


def test_every_dtype_is_known_by_its_size() -> None:
    sizes = {name: getattr(torch, name).itemsize for name in SAVED}
    known = dict(_native.dtypes())
    assert {name: known.get(name) for name in SAVED} == sizes


@pytest.mark.filterwarnings("ignore")  # torch speaks of types that are to go, and of some that are new
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_is_not_saved_is_refused_by_its_name(tmp_path: Path, dtype: str) -> None:
    refused = {"meta": torch.empty(3, dtype=getattr(torch, dtype), device="meta")}
    if dtype in REFUSED:
        refused["cpu"] = torch.empty(3, dtype=getattr(torch, dtype))
    for device, value in refused.items():
        with pytest.raises(TypeError, match=rf"state\['x'\]: .*torch\.{dtype} on {device}\) cannot be saved"):
            forebay.save({"fine": torch.zeros(3), "x": value}, tmp_path / "run")
    assert not list(tmp_path.glob("run/shards/*")) and not list(tmp_path.glob("run/steps/*"))


def views(dtype: str) -> dict[str, torch.Tensor]:
    """Tensors that do not lie densely, each in memory of its own; and one with its view, which are stored once."""
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda base: base.transpose(0, 2),
        "stepped": lambda base: base[::2, 1:, ::3],
        "narrow": lambda base: base.narrow(1, 1, 2),
        "element": lambda base: base[1, :, 2],
        "expanded": lambda base: base[:, :1].expand(4, 7, 6),
    }
    state = {name: make(filled(dtype, (4, 3, 6), seed)) for seed, (name, make) in enumerate(made.items())}
    base = filled(dtype, (4, 3, 6), 50)
    return {**state, "base": base, "turned": base.transpose(0, 1)}


@pytest.mark.parametrize("dtype", SAVED)
def test_views_of_every_dtype_come_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    state = views(dtype)
    forebay.save(state, tmp_path)
    loaded = forebay.load(tmp_path)
    assert same(loaded, state)
    # Into live ones that do not lie densely either.
    live = {}
    for seed, (name, value) in enumerate(state.items(), 100):
        other = filled(dtype, (*value.shape[::-1], 2), seed)[..., 0]
        live[name] = other.permute(*range(other.ndim)[::-1])
    assert not same(live, state)
    forebay.load(tmp_path, live)
    assert same(live, state)


def test_views_of_every_stride_come_back_as_their_values(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "transposed": base.clone().T,
        "stepped": base.clone()[::2, 1::3],
        "expanded": torch.arange(3.0).expand(5, 3),
        "conjugate": torch.complex(base[:1], base[1:2]).conj(),
        "imaginary": torch.complex(base[:1], base[1:2]).imag,
        "negative": torch.complex(base[:1], base[1:2]).conj().imag,
        "fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        "reversed": numpy.arange(5)[::-1],
    }
    forebay.save(state, tmp_path)
    loaded = forebay.load(tmp_path)
    for name, value in state.items():
        assert bool((loaded[name] == value).all()) and loaded[name].shape == value.shape, name


def test_views_are_restored_into_memory_that_lies_otherwise(tmp_path: Path) -> None:
    """The view of a live tensor within another one's memory, or of one that is not dense, was taken from elsewhere."""

    def flat(fill: float) -> dict[str, Any]:
        memory = torch.full((1000,), fill) + torch.arange(1000.0)
        module = torch.nn.Linear(5, 20, bias=False)
        module.weight.data = memory[300:400].view(20, 5)
        module.register_buffer("row", memory[310:315])
        return {"qkv": memory[100:200], "q": memory[110:120], "odd": memory[101:200:7], "module": module}

    def same_values(left: dict[str, Any], right: dict[str, Any]) -> bool:
        sides = [{**side, "module": dict(side["module"].state_dict())} for side in (left, right)]
        return same(*sides)

    saved = flat(0.0)
    forebay.save(saved, tmp_path)
    live, alone = flat(-5000.0), flat(-5000.0)
    forebay.load(tmp_path, live)
    assert same_values(live, saved)
    alone["q"], alone["odd"] = torch.zeros(10), torch.zeros(15)
    forebay.load(tmp_path, alone)
    assert same_values(alone, saved)
    module = flat(-5000.0)["module"]
    forebay.load_model(tmp_path, module, name="module")
    assert same(module.state_dict(), saved["module"].state_dict())

    base = torch.arange(12.0).reshape(3, 4)
    forebay.save({"b": base, "v": base[1], "w": base[:, 2], "l": [base[2]]}, tmp_path / "strided")
    strided = {"b": torch.zeros(4, 3).t(), "v": torch.zeros(4), "w": torch.zeros(3), "l": [torch.zeros(4)]}
    forebay.load(tmp_path / "strided", strided)
    assert same(strided, {"b": base, "v": base[1], "w": base[:, 2], "l": [base[2]]})


def test_a_tensor_whose_elements_share_memory_is_no_place(tmp_path: Path) -> None:
    forebay.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    live = {"a": torch.zeros(3), "b": torch.zeros(1).expand(3)}
    with pytest.raises(forebay.CheckpointMismatch, match=r"b.*share memory.*clone"):
        forebay.load(tmp_path, live)
    assert live["a"].sum() == 0, "nothing is changed"


def test_plain_values_of_every_type(url: str) -> None:
    state = {
        "none": None,
        "yes": True,
        "no": False,
        "big": 2**200,
        "negative": -5,
        "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, struct.unpack("d", b"\1\0\0\0\0\0\xf8\x7f")[0]],
        "text": "snow \N{SNOWMAN} \0 \ud800",
        "bytes": b"\0\xff",
        "long": bytes(range(256)) * 9,
        "array": bytearray(b"abc"),
        "complex": complex(1.5, math.inf),
        "tuple": (1, (2.0, "x"), []),
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter({"b": 2, (1, "a"): -1, 3: 0, "half": 0.5}),
        "made": [
            collections.defaultdict(kind, {"b": torch.arange(3), 1: collections.Counter()})
            for kind in (int, float, list, dict, set, str, bool, None)
        ],
        "keys": {1: "int", 2.5: "float", None: "none", True and "t": "str", (1, "a"): "tuple"},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "scalars": [numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True), numpy.complex128(1j)],
        "numpy": {
            d: numpy.arange(6).astype(d).reshape(2, 3)
            for d in ["bool", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16"]
        },
        "empty": {"d": {}, "l": [], "t": (), "a": numpy.empty((0, 3)), "s": "", "b": b""},
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "#": torch.tensor(3)},
        "__metadata__": torch.tensor(4),
    }
    forebay.save(state, url)
    assert same(forebay.load(url), state)


def test_what_shares_memory_is_stored_once_and_shares_it_again(tmp_path: Path) -> None:
    weight = torch.randn(1000, 100)
    array = numpy.zeros(5)
    state = {"head": weight, "embedding": weight, "turned": weight.T, "row": weight[7], "a": array, "b": array}
    forebay.save(state, tmp_path)
    assert sum(file.stat().st_size for file in (tmp_path / "shards").rglob("*.safetensors")) < weight.nbytes + 8192
    loaded = forebay.load(tmp_path)
    assert same(loaded, {**state, "turned": weight.T})
    loaded["head"].zero_()
    assert all(not loaded[name].any() for name in ("embedding", "turned", "row"))
    loaded["a"][0] = 1
    assert loaded["b"][0] == 1
    live = {name: value.clone() if isinstance(value, torch.Tensor) else value.copy() for name, value in state.items()}
    for value in live.values():
        value[...] = 0
    forebay.load(tmp_path, live)
    assert torch.equal(live["turned"], weight.T) and torch.equal(live["row"], weight[7])


def test_shards_are_safetensors(tmp_path: Path) -> None:
    state = {"w": filled("bfloat16", (5, 7)), "c": filled("complex64", (3,)), "s": torch.tensor(2.5)}
    forebay.save(state, tmp_path)
    (shard,) = (tmp_path / "shards").rglob("*.safetensors")
    with safe_open(shard, "pt") as file:
        assert sorted(file.keys()) == ["c", "s", "w"]
        assert same(file.get_tensor("w"), state["w"]) and same(file.get_tensor("s"), state["s"])
        assert raw(file.get_tensor("c")) == raw(state["c"])


def test_equal_states_have_equal_shards(tmp_path: Path) -> None:
    for step in (1, 2):
        forebay.save({"w": torch.arange(10)}, tmp_path, step=step)
    one, other = (tmp_path / "shards").rglob("*.safetensors")
    assert one.read_bytes() == other.read_bytes()
    assert len(list((tmp_path / "steps").iterdir())) == 2


def test_a_state_saved_again_under_its_step_replaces_the_former(url: str) -> None:
    forebay.save({"n": 1, "w": torch.zeros(3)}, url)
    forebay.save({"n": 2, "w": torch.ones(3)}, url)
    assert forebay.load(url)["n"] == 2
    assert len(_native.list_steps(url)) == 1


class Loader:
    """Something with a state of its own, as data loaders have."""

    def __init__(self) -> None:
        self.epoch, self.seen = 0, [0]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.seen = state["epoch"], state["seen"]


def test_restore_puts_everything_in_place(url: str) -> None:
    def fresh() -> dict[str, Any]:
        return {
            "tensor": torch.zeros(4),
            "strided": torch.zeros(3, 4).T,
            "array": numpy.zeros((2, 2)),
            "nested": {"list": [torch.zeros(2), 0, (torch.zeros(1), "a")], "value": 0},
            "loader": Loader(),
            "plain": [1],
            "parameter": torch.nn.Parameter(torch.zeros(2)),
        }

    state = fresh()
    state["tensor"] += 1
    state["strided"] += torch.arange(12).view(4, 3)
    state["array"] += 2
    state["nested"]["list"][0] += 3
    state["nested"]["list"][1] = 4
    state["nested"]["list"][2] = (torch.ones(1), "b")
    state["nested"]["value"] = 2.5
    state["loader"].epoch, state["loader"].seen = 7, [1, 2, 3]
    state["plain"] = [3, 4, 5]
    state["parameter"].data.fill_(9)
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.save_now(12, state)
    target = fresh()
    held = [target["tensor"], target["strided"], target["array"], target["nested"]["list"], target["parameter"]]
    with forebay.Checkpointer(url) as checkpointer:
        assert (checkpointer.latest(), checkpointer.steps()) == (12, [12])
        assert checkpointer.restore(target) == 12
    now = [target["tensor"], target["strided"], target["array"], target["nested"]["list"], target["parameter"]]
    assert all(before is after for before, after in zip(held, now))
    loader, other = target.pop("loader"), state.pop("loader")
    assert loader.state_dict() == other.state_dict()
    assert same(target.pop("parameter").detach(), state.pop("parameter").detach())
    assert same(target, state)


@pytest.mark.parametrize(
    "change, fact",
    [
        (lambda s: s.pop("t"), "state: the state lacks 't'"),
        (lambda s: s.update(extra=1), "state: the checkpoint lacks 'extra'"),
        (lambda s: s.update(t=torch.zeros(4)), r"state\['t'\]: torch.float32 \[3\] was saved"),
        (lambda s: s.update(t=torch.zeros(3).half()), r"the state has torch.float16"),
        (lambda s: s.update(t=numpy.zeros(3)), r"state\['t'\]: a torch tensor was saved, the state has a ndarray"),
        (lambda s: s.update(a=torch.zeros(2)), r"state\['a'\]: a numpy array was saved"),
        (lambda s: s["l"].pop(), r"state\['l'\]: 2 entries were saved, the state has 1"),
        (lambda s: s.update(o=3), r"state\['o'\]: an object with a state was saved, the state has a int"),
        (lambda s: s.update(n=torch.zeros(1)), r"state\['n'\]: a value \(int\) was saved, the state has a Tensor"),
        (lambda s: s.update(m=torch.nn.Linear(2, 3)), r"state\['m'\]"),
        (lambda s: s.update(m=torch.nn.Linear(2, 2, bias=False)), r"state\['m'\]: the state lacks 'bias'"),
    ],
)
def test_a_state_of_another_shape_is_left_alone(tmp_path: Path, change: Any, fact: str) -> None:
    def fresh() -> dict[str, Any]:
        return {
            "t": torch.zeros(3),
            "a": numpy.zeros(2),
            "l": [torch.zeros(1), torch.zeros(1)],
            "o": Loader(),
            "n": 0,
            "m": torch.nn.Linear(2, 2),
        }

    state = fresh()
    state["t"] += 1
    state["n"] = 5
    forebay.save(state, tmp_path)
    target = fresh()
    change(target)
    with pytest.raises(forebay.CheckpointMismatch, match=fact):
        forebay.load(tmp_path, target)
    assert isinstance(target["n"], torch.Tensor) or target["n"] == 0
    assert "t" not in target or not target["t"].any()


class Foreign:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Holder(Loader):
    def state_dict(self) -> dict[str, Any]:
        return {"foo": {"bar": [Foreign(1)]}}


class Tally(collections.Counter):  # type: ignore[type-arg]
    """One of its own kind."""


def looped() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def quantized(kind: torch.dtype) -> list[torch.Tensor]:
    """By one scale for all, and by one for each row."""
    rows, zeros = torch.zeros(4, 8), torch.zeros(4)
    return [
        torch.quantize_per_tensor(rows, 0.1, 0, kind),
        torch.quantize_per_channel(rows, torch.ones(4), zeros, 0, kind),
    ]


def nested(layout: torch.layout) -> torch.Tensor:
    """Two rows of other lengths."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4])
def test_quantized_tensors_are_refused_by_name(tmp_path: Path, kind: torch.dtype) -> None:
    """Also deep in a state, and through DCP; what they are made of can be saved: `int_repr()`, scales, zero points."""
    for tensor in quantized(kind):
        fact = f"tensor of {kind} on cpu"
        path = r"state\['x'\]\['w'\]: object of type torch.Tensor"
        with pytest.raises(TypeError, match=rf"{path} .*{fact}.* cannot be saved"):
            forebay.save({"fine": torch.zeros(3), "x": {"w": tensor}}, tmp_path / "run")
        with forebay.dcp.Writer(tmp_path / "run") as writer:
            with pytest.raises(dcp.api.CheckpointException, match=rf"x\.w: a torch.strided {fact} cannot be saved"):
                dcp.save({"x": {"w": tensor}}, checkpoint_id=1, storage_writer=writer)
    assert not list(tmp_path.glob("run/shards/*")) and not list(tmp_path.glob("run/steps/*"))


@pytest.mark.parametrize(
    "value, fact",
    [
        (Foreign(1), r"state\['x'\]: object of type tests.test_roundtrip.Foreign cannot be saved"),
        (Holder(), r"state\['x'\].foo\['bar'\]\[0\]: object of type tests.test_roundtrip.Foreign"),
        (lambda: 0, r"state\['x'\]: object of type function"),
        (torch.zeros(3).to_sparse(), r"state\['x'\]: object of type torch.Tensor \(torch.sparse_coo tensor"),
        (torch.zeros(3, device="meta"), r"on meta\) cannot be saved"),
        (nested(torch.strided), r"state\['x'\]: .* torch.Tensor \(nested torch.strided tensor of torch.float32"),
        ([nested(torch.jagged)], r"state\['x'\]\[0\]: object of type .*NestedTensor \(nested torch.jagged tensor"),
        (numpy.array(["a"]), r"state\['x'\]: object of type numpy.ndarray of <U1"),
        (numpy.array([object()]), "of object cannot be saved"),
        (numpy.zeros(2, ">f4"), "of >f4 cannot be saved"),
        (looped(), r"state\['x'\]\[0\]: it contains itself"),
        ({Foreign: 1}, r"a key of type type"),
        (collections.defaultdict(lambda: 0), r"state\['x'\]: object of type collections.defaultdict of <lambda> cannot"),
        ([collections.defaultdict(collections.Counter)], r"state\['x'\]\[0\]: .*defaultdict of Counter cannot be saved"),
        (collections.defaultdict(Foreign(1).__eq__), "collections.defaultdict of Foreign.__eq__ cannot be saved"),
        (Tally("aab"), r"state\['x'\]: object of type tests.test_roundtrip.Tally cannot be saved"),
        (collections.Counter({Foreign: 1}), r"a key of type type"),
        ({(1, collections.Counter): 1}, r"object of type type"),
        ([{torch.nn.ReLU()}], r"state\['x'\]\[0\]\[0\]: object of type .*ReLU in a set or a key cannot be saved"),
        (frozenset([(torch.nn.ReLU(),)]), r"state\['x'\]\[0\]\[0\]: object of type .*ReLU in a set or a key"),
        ({(1, torch.nn.ReLU()): 1}, r"state\['x'\]\[\(1, ReLU\(\)\)\].*: object of type .*ReLU in a set or a key"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: Path, value: Any, fact: str) -> None:
    with pytest.raises(TypeError, match=fact):
        forebay.save({"fine": torch.zeros(3), "x": value}, tmp_path / "run")
    assert not list(tmp_path.glob("run/shards/*")) and not list(tmp_path.glob("run/steps/*"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["own", "dcp", "staged"])
def test_parts_that_have_no_memory_of_their_own_are_refused(tmp_path: Path, way: str) -> None:
    """What a class answers for by itself (float8, quantized weights) is nowhere in memory: copied from address 0 it was the
    death of the trainer, and layers of one shape were taken for tied ones."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor

    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (1,))
        parts = [two(torch.full((3, 3), float(number)), torch.ones(3, 3)) for number in range(2)]
        state = {"a": torch.ones(3), "w": [DTensor.from_local(part, mesh, [Shard(0)]) for part in parts]}
        with pytest.raises((TypeError, dcp.api.CheckpointException), match=r"w.*0.*TwoTensor.* cannot be saved"):
            if way == "own":
                with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                    checkpointer.save_now(1, state)
                return False
            with forebay.dcp.Writer(tmp_path) as writer:
                if way == "dcp":
                    dcp.save(state, checkpoint_id=1, storage_writer=writer)
                    return False
                stager = forebay.dcp.Stager(writer)
                dcp.async_save(state, checkpoint_id=1, storage_writer=writer, async_stager=stager).result()
        return True

    assert run_ranks(1, work) == [True]
    assert not list(tmp_path.glob("steps/*"))


def test_tensors_whose_memory_was_given_back_are_refused(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        with pytest.raises(TypeError, match=r"state\['x'\]: .*no memory.* cannot be saved"):
            forebay.save({"fine": torch.zeros(3), "x": freed}, tmp_path)
        with forebay.dcp.Writer(tmp_path) as writer, pytest.raises(dcp.api.CheckpointException, match="x: .*no memory"):
            dcp.save({"x": freed}, checkpoint_id=1, storage_writer=writer)
        return True

    assert run_ranks(1, work) == [True]
    assert not list(tmp_path.glob("steps/*"))


@pytest.mark.parametrize("way", ["own", "dcp"])
def test_parts_that_are_still_on_their_way_are_waited_for(tmp_path: Path, way: str) -> None:
    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(12.0).view(6, 2)
        spread = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
        coming = all_gather_tensor(spread.to_local()[3 * rank : 3 * rank + 3], 0, mesh)
        state = {"w": DTensor.from_local(coming, mesh, [Replicate()], run_check=False)}
        kind = type(state["w"]._local_tensor).__name__
        if way == "own":
            with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
                checkpointer.save_now(1, state)
        else:
            with forebay.dcp.Writer(tmp_path) as writer:
                dcp.save(state, checkpoint_id=1, storage_writer=writer)
        return kind, torch.equal(forebay.load(tmp_path)["w"], whole)

    assert run_ranks(2, work) == [["AsyncCollectiveTensor", True]] * 2


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_refused_where_they_are_restored_into(tmp_path: Path) -> None:
    for name, path in (("x", r"state\['x'\]"), ("model", r"state\['model'\]\.rows")):
        state = {"x": torch.zeros(2), "model": torch.nn.Module()}
        state["model"].register_buffer("rows", torch.zeros(2))
        forebay.save(state, tmp_path)
        for layout in (torch.strided, torch.jagged):
            state = {"x": torch.zeros(2), "model": torch.nn.Module()}
            state["model"].register_buffer("rows", nested(layout) if name == "model" else torch.zeros(2))
            state["x"] = nested(layout) if name == "x" else state["x"]
            with pytest.raises(forebay.CheckpointMismatch, match=rf"{path}: .* was saved, the state has .*nested"):
                forebay.load(tmp_path, state)


class Noted(torch.nn.Linear):
    """Has something to tell that is no tensor."""

    noted: Any = None

    def get_extra_state(self) -> Any:
        return self.noted

    def set_extra_state(self, state: Any) -> None:
        self.noted = state


def test_a_pickle_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model = Noted(64, 64)
    model.noted = Path("x")
    forebay.save({"w": torch.ones(1 << 20), "model": model, "deep": [{"at": Path("y")}]}, tmp_path, allow_pickle=True)
    found, told = {"w": torch.zeros(1 << 20), "model": Noted(64, 64), "deep": [{"at": None}]}, "allow_pickle=True"
    was = found["model"].weight.detach().clone()
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        before = read_bytes()
        for act, place in (
            (lambda: checkpointer.restore(found), "(model._extra_state|deep.0.at)"),
            (lambda: checkpointer.restore(found, only=["w", "deep.*"]), "deep.0.at"),
            (lambda: forebay.load(tmp_path, found), "(model._extra_state|deep.0.at)"),
            (lambda: forebay.load_model(tmp_path, found["model"]), "model._extra_state"),
            (lambda: forebay.load(tmp_path), "(model._extra_state|deep.0.at)"),
        ):
            with pytest.raises(forebay.CheckpointInvalid, match=f"'{place}'.*{told}"):
                act()
        assert read_bytes() - before < 1 << 20
        assert not found["w"].any() and torch.equal(found["model"].weight, was)
        checkpointer.restore(found, only=["w", "model.weight"])
    assert found["w"].all() and torch.equal(found["model"].weight, model.weight)
    forebay.load(tmp_path, found, allow_pickle=True)
    assert found["model"].noted == Path("x") and found["deep"] == [{"at": Path("y")}]


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


def test_keys_that_the_tree_alone_does_not_tell(tmp_path: Path) -> None:
    """A tuple with a pickle, or with many bytes, was a bare KeyError of a restore: it is known once it was read."""
    long = bytes(300)

    def state(value: float) -> dict[Any, Any]:
        inner = {(Kind.ONE, long): torch.full((4,), value), (Kind.TWO, 1): [value], "plain": value}
        return {"d": inner, "o": Keeper({(Kind.TWO, "x"): torch.full((2,), value)}), (long, 1): value}

    with forebay.Checkpointer(tmp_path, allow_pickle=True) as checkpointer:
        checkpointer.save_now(1, state(1.0))
        found = state(2.0)
        checkpointer.restore(found)
    assert torch.equal(found["d"][Kind.ONE, long], torch.ones(4)) and found["d"][Kind.TWO, 1] == [1.0]
    assert found["d"]["plain"] == found[long, 1] == 1.0
    assert torch.equal(found["o"].held[Kind.TWO, "x"], torch.ones(2))
    other = state(2.0)
    with pytest.raises(forebay.CheckpointInvalid, match="pickled object .*allow_pickle=True"):
        forebay.load(tmp_path, other)
    assert other["d"]["plain"] == 2.0 and torch.equal(other["d"][Kind.ONE, long], torch.full((4,), 2.0))
    lacking = state(2.0)
    del lacking["d"][Kind.TWO, 1]
    with pytest.raises(forebay.CheckpointMismatch, match="the state lacks .*Kind.TWO"):
        forebay.load(tmp_path, lacking, allow_pickle=True)
    # What it reads is counted, and no more than that.
    with forebay.Checkpointer(tmp_path, rng=False, allow_pickle=True) as checkpointer:
        checkpointer.restore(found, only=["o"])
        assert checkpointer.restored is not None
        assert 8 <= checkpointer.restored.bytes < 2048


class Keeper:
    """Its state is what it holds."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self.held = held

    def state_dict(self) -> dict[Any, Any]:
        return self.held

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.held = state


def test_a_module_alone_is_given_its_pickle_where_that_is_allowed(tmp_path: Path) -> None:
    """It was refused whatever the checkpointer allowed, and the function could not be told."""
    model = Noted(4, 4)
    model.noted = Path("x")
    forebay.save({"model": model}, tmp_path, allow_pickle=True)
    found, other = Noted(4, 4), Noted(4, 4)
    with forebay.Checkpointer(tmp_path, allow_pickle=True) as checkpointer:
        checkpointer.load_model(found)
    forebay.load_model(tmp_path, other, allow_pickle=True)
    assert found.noted == other.noted == Path("x")
    assert torch.equal(found.weight, model.weight) and torch.equal(other.weight, model.weight)


def test_pickles_only_where_they_are_allowed(tmp_path: Path) -> None:
    state = {"x": Foreign(3), "names": numpy.array(["a", "b"]), "made": collections.defaultdict(Tally)}
    forebay.save(state, tmp_path, allow_pickle=True)
    with pytest.raises(forebay.CheckpointInvalid, match="allow_pickle=True"):
        forebay.load(tmp_path)
    loaded = forebay.load(tmp_path, allow_pickle=True)
    assert loaded["x"] == Foreign(3) and list(loaded["names"]) == ["a", "b"]
    assert loaded["made"].default_factory is Tally


def test_random_numbers_go_on_where_they_stopped(url: str) -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(3).tolist()

    # What was never used has no state yet, and numpy loads its generators when they are.
    draw()
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.save_now(1, {})
    expected = draw()
    draw()
    with forebay.Checkpointer(url) as checkpointer:
        assert checkpointer.restore({}) == 1
    assert draw() == expected


def test_nothing_saved_yet(url: str) -> None:
    with forebay.Checkpointer(url) as checkpointer:
        assert checkpointer.restore({}) is None
        assert (checkpointer.latest(), checkpointer.steps()) == (None, [])
        with pytest.raises(forebay.CheckpointNotFound, match="step 3|No such file"):
            checkpointer.restore({}, step=3)
    with pytest.raises(forebay.CheckpointNotFound):
        forebay.load(url)


def test_manifests_are_json(tmp_path: Path) -> None:
    forebay.save({"w": torch.zeros(2)}, tmp_path, step=5)
    (manifest,) = tmp_path.glob("steps/00000000000000000005/*.json")
    body = json.loads(manifest.read_text())["body"]
    assert (body["step"], body["world_size"], body["tensors"][0]["name"]) == (5, 1, "w")


def test_a_bucket_that_does_not_exist_is_named(s3_endpoint: str) -> None:
    urllib.request.urlopen(s3_endpoint).close()
    with pytest.raises(forebay.CheckpointError, match="(?i)bucket|404|not found"):
        forebay.load("s3://no-such-bucket/run")
    # Nor is it a place of which nothing was saved yet: a typo would train from the beginning.
    with pytest.raises(forebay.CheckpointNotFound, match="bucket s3://no-such-bucket/run does not exist"):
        forebay.Checkpointer("s3://no-such-bucket/run").restore({"n": 0})
    assert forebay.Checkpointer("s3://checkpoints/nothing-yet").restore({"n": 0}) is None
    with pytest.raises(ValueError, match="no known scheme"):
        forebay.load("ftp://host/run")


def test_views_and_tensors_without_elements_are_not_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each view was looked for among all tensors that were left, and each empty tensor among the empty ones before it."""
    compared, equal = [], Leaf.__eq__
    monkeypatch.setattr(Leaf, "__eq__", lambda one, other: compared.append(1) or equal(one, other))
    memory = torch.arange(3000.0)
    views = {f"v{index}": memory[index : index + 1] for index in range(3000)}
    empty = [torch.empty(0, index) for index in range(1, 3000)]
    flattener = Flattener(False)
    flattener.tree("state", {"all": memory, **views, "empty": empty})
    assert [leaf.name for leaf in flattener.leaves] == ["all", *(f"empty.{index}" for index in range(len(empty)))]
    assert compared == [] and max(map(len, flattener._starts.values())) <= 2
