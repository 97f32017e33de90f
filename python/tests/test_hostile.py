"""Steps whose hashes are right, and whose state somebody wrote to do harm: each is refused by name, nothing is read."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import forebay
from forebay import _native
from forebay._grammar import check_tree, is_within
from forebay._loading import with_step
from forebay._outline import outline
from forebay._ranks import new_start
from forebay._url import bucket_url

from .conftest import rounds

TENSORS: dict[str, torch.Tensor] = {
    "t": torch.arange(4.0),
    "b": torch.zeros(300, dtype=torch.uint8),
    "half": torch.zeros(3, dtype=torch.bfloat16),
}


def written(place: Path, text: str, rng: str = "null", step: int = 2, found: str = "") -> None:
    """A step that says so of its state, its tensors and hashes as they should be: all that is to be found is in the state."""
    url = bucket_url(place)
    Path(place).mkdir(exist_ok=True)
    described = [(name, str(value.dtype)[6:], list(value.shape), None) for name, value in TENSORS.items()]
    writer = _native.StepWriter(url, new_start(), step, described)
    for index in writer.order:
        value = list(TENSORS.values())[index]
        writer.write(index, value.data_ptr(), value.nbytes)
    writer.commit([("state", text), ("rng", rng)])
    facts = [fact for _, _, fact in _native.verify(url, None)]
    assert len(facts) == bool(found) and all(found in fact for fact in facts), facts


def deep(before: str, inner: str, after: str, levels: int = 100_000) -> str:
    return before * levels + inner + after * levels


def tree(node: Any) -> str:
    """A state with one entry."""
    return json.dumps({"t": "dict", "v": [["x", node]]})


def view(*parts: Any) -> str:
    return tree({"t": "tensor", "n": "t", "view": list(parts)})


def saying(value: Any, tag: str) -> str:
    return tree({"t": tag, "v": value})


BIG = 1 << 70

VIEWS = [
    ([4], [1], 1),
    ([5], [1], 0),
    ([2, 2], [3, 1], 0),
    ([1], [1], -1),
    ([2], [-1], 1),
    ([1], [1], 1 << 40),
    ([1 << 40], [1], 0),
    ([1 << 62], [1 << 62], 0),
    ([BIG], [BIG], BIG),
    ([1 << 60], [0], 0),
    ([0], [1], 5),
    ([-1], [1], 0),
    ([2], [1, 1], 0),
    ([2.0], [1], 0),
    ([True], [1], 0),
    (["2"], [1], 0),
    ([2], [1], None),
    ("22", "11", 0),
    (2, 1, 0),
    ([2], [1]),
    ([2], [1], 0, 0),
    (),
]

HOSTILE: dict[str, tuple[str, str]] = {
    **{f"view-{index}": (view(*parts), "a view .* outside of tensor `t`") for index, parts in enumerate(VIEWS)},
    "view of none": (tree({"t": "tensor", "n": "t", "view": None}), "a view .* outside of tensor `t`"),
    "view of an array": (tree({"t": "array", "n": "t", "view": [[4], [1], 9]}), "a `array` with the fields"),
    "no tag": (tree({"v": []}), "an object with the tag None"),
    "a list as tag": (tree({"t": [], "v": []}), r"an object with the tag \[\]"),
    "no tensor": (tree({"t": "tensor", "n": "nobody"}), "names tensor `nobody`, which it does not hold"),
    "no name": (tree({"t": "tensor"}), "a `tensor` with the fields"),
    "a list as name": (tree({"t": "tensor", "n": ["t"]}), "a `tensor` of"),
    "a number as name": (tree({"t": "array", "n": 1}), "a `array` of"),
    "more than a tensor": (tree({"t": "tensor", "n": "t", "v": {"n": {}}}), "a `tensor` with the fields"),
    "an array of no type of numpy's": (tree({"t": "array", "n": "half"}), "an array `half` of bfloat16"),
    "bytes of another type": (tree({"t": "bytes", "n": "t"}), "does not hold a byte string"),
    "a pickle of another type": (tree({"t": "pickle", "n": "half"}), "does not hold a byte string"),
    "a module as dtype": (saying("nn", "dtype"), "a `dtype` of nn"),
    "no dtype": (saying("float 7", "dtype"), "a `dtype` of float 7"),
    "a number as dtype": (saying(7, "dtype"), "a `dtype` of 7"),
    "no device": (saying("nonsense::1", "device"), "a `device` of nonsense"),
    "a dict as device": (saying({}, "device"), "a `device` of"),
    "a size of text": (saying(["a"], "size"), "a `size` of"),
    "a float of few digits": (saying("7f", "float"), "a `float` of 7f"),
    "a float of no digits": (saying("zz", "float"), "a `float` of zz"),
    "a float of a list": (saying([], "float"), "a `float` of"),
    "no text": (saying("ff", "str"), "a `str` of ff"),
    "no base64": (saying("a", "bytes"), "a `bytes` of a"),
    "bytes of a number": (saying(3, "bytearray"), "a `bytearray` of 3"),
    "a complex of three": (saying([1, 2, 3], "complex"), "a `complex` of"),
    "a complex of tensors": (saying([{"t": "tensor", "n": "t"}, 1], "complex"), "a `complex` of"),
    "a scalar of objects": (tree({"t": "scalar", "d": "O", "v": "00" * 8}), "a `scalar` of 00"),
    "a scalar of none": (tree({"t": "scalar", "d": "float32", "v": ""}), "a `scalar` of"),
    "a scalar of two": (tree({"t": "scalar", "d": "int8", "v": "0000"}), "a `scalar` of 0000"),
    "a scalar of a list": (tree({"t": "scalar", "d": ["f4"], "v": "00" * 4}), "a `scalar` of 00"),
    "a dict of none": (saying(None, "dict"), "a `dict` of None"),
    "a dict of numbers": (saying([1], "dict"), "a `dict` that is not made of pairs"),
    "a dict of triples": (saying([[1, 2, 3]], "odict"), "a `odict` that is not made of pairs"),
    "a dict as key": (saying([[{"t": "dict", "v": []}, 1]], "dict"), "a `dict` as a key"),
    "a counter of numbers": (saying([1], "counter"), "a `counter` that is not made of pairs"),
    "a counter of text": (saying("ab", "counter"), "a `counter` of ab"),
    "a counter as key": (saying([[{"t": "counter", "v": []}, 1]], "counter"), "a `counter` as a key"),
    "a counter with a factory": (tree({"t": "counter", "f": "int", "v": []}), "a `counter` with the fields"),
    "a defaultdict of nothing": (saying([], "defaultdict"), "a `defaultdict` with the fields"),
    "a defaultdict of null": (tree({"t": "defaultdict", "f": None, "v": []}), "a `defaultdict` of None"),
    "a defaultdict of a list": (tree({"t": "defaultdict", "f": ["int"], "v": []}), r"a `defaultdict` of \['int'\]"),
    "a defaultdict of triples": (tree({"t": "defaultdict", "f": "int", "v": [[1, 2, 3]]}), "is not made of pairs"),
    "a defaultdict in a set": (saying([{"t": "defaultdict", "f": "int", "v": []}], "set"), "a `defaultdict` as a key"),
    "a list as a counter's key": (saying([[[], 1]], "counter"), "a list as a key"),
    "deep counters": (deep('{"t":"counter","v":[["x",', "1", "]]}", 201), "nested deeper than 200 levels"),
    "a list as key": (saying([[[], 1]], "dict"), "a list as a key"),
    "a list within a key": (saying([[{"t": "tuple", "v": [[1]]}, 1]], "dict"), "a list as a key"),
    "a set of lists": (saying([[1]], "set"), "a list as a key"),
    "a tuple of text": (saying("abc", "tuple"), "a `tuple` of abc"),
    "an object of no kind": (tree({"t": "object", "v": {"t": "dict", "v": []}}), "a `object` with the fields"),
    "an object of some kind": (tree({"t": "object", "k": [], "v": 1}), "an object of kind"),
    "a module of numbers": (tree({"t": "object", "k": "module", "v": 7}), "a module that is no dict"),
    "no JSON": ('{"t":', "does not parse"),
    "a number of 5,000 digits": ("[" + "9" * 5000 + "]", "does not parse"),
    "deep lists": (deep("[", "", "]"), "does not parse"),
    "lists somewhat deep": (deep("[", "1", "]", 400), "nested deeper than 200 levels"),
    "deep dicts": (deep('{"t":"dict","v":[["x",', "1", "]]}"), "does not parse"),
    "dicts somewhat deep": (deep('{"t":"dict","v":[["x",', "1", "]]}", 201), "nested deeper than 200 levels"),
    "deep objects": (deep('{"t":"object","k":"own","v":', "1", "}", 300), "nested deeper than 200 levels"),
    "deep keys": (deep('{"t":"tuple","v":[', "1", "]}", 300), "nested deeper than 200 levels"),
    "deep below a leaf": (deep('{"t":"complex","v":[1,', "1", "]}", 300), "a `complex` of"),
}

FOUND = {
    "no tensor": "lacks tensor `nobody`, which the `state` of rank 0 names",
    "no JSON": "has a `state` that is no tree",
    **dict.fromkeys(("deep lists", "deep dicts"), "it is nested without end"),
}
"""What `verify` finds in them; all else is for whoever restores."""

EVERY = [(name, text, fact) for name, (text, fact) in HOSTILE.items()]


def ways(place: Path) -> dict[str, Callable[[], Any]]:
    """All that reads a state."""

    def restore(state: Any) -> Any:
        with forebay.Checkpointer(place) as checkpointer:
            return checkpointer.restore(state, step=2)

    def load_model() -> Any:
        with forebay.Checkpointer(place) as checkpointer:
            return checkpointer.load_model(torch.nn.Linear(2, 2), step=2)

    model = torch.nn.Linear(2, 2)
    return {
        "load": lambda: forebay.load(place, step=2),
        "into a tensor": lambda: forebay.load(place, {"x": torch.zeros(4)}, step=2),
        "restore": lambda: restore({"x": torch.zeros(2)}),
        "restore a module": lambda: restore({"x": model}),
        "restore an optimizer": lambda: restore({"x": torch.optim.AdamW(model.parameters())}),
        "load_model": load_model,
        "outline": lambda: with_step(bucket_url(place), 2, None, lambda step: outline(step, False)),
    }


@pytest.mark.parametrize("name, text, fact", EVERY, ids=[name for name, _, _ in EVERY])
def test_a_hostile_state_is_refused_by_name(tmp_path: Path, name: str, text: str, fact: str) -> None:
    written(tmp_path / "run", text, found=FOUND.get(name, ""))
    for way, act in ways(tmp_path / "run").items():
        with pytest.raises(forebay.CheckpointCorrupt, match=fact) as told:
            act()
        assert len(str(told.value)) < 600, way


def test_an_older_step_is_used_in_its_stead(tmp_path: Path) -> None:
    written(tmp_path, tree({"t": "tensor", "n": "t"}), step=1)
    written(tmp_path, view([5], [1], 0))
    state = {"x": torch.zeros(4)}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(forebay.CheckpointWarning, match="step 1 is used instead of a newer one.*a view"):
            assert checkpointer.restore(state) == 1
    assert torch.equal(state["x"], TENSORS["t"])


def test_a_later_versions_state_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    later = [("a `matrix`", {"t": "matrix", "rows": 3})]
    later += [(f"a `defaultdict` of `{name}`", {"t": "defaultdict", "f": name, "v": []}) for name in ("eval", "tuple", "")]
    for fact, node in later:
        written(tmp_path, tree(node))
        with pytest.raises(forebay.CheckpointInvalid, match=f"{fact}, which this version does not know"):
            forebay.load(tmp_path)


@pytest.mark.parametrize(
    "tag, value, fact",
    [
        ("dtype", "float7_e3m4", "has no element type `float7_e3m4`"),
        ("device", "abacus:1", "has no kind of device `abacus:1`"),
    ],
)
def test_what_another_torch_has_is_no_damage(tmp_path: Path, tag: str, value: str, fact: str) -> None:
    """Nothing is wrong with the step: an older one is no stand-in for it."""
    written(tmp_path, tree(1), step=1)
    plain = {"t": tag, "v": value}
    written(tmp_path, tree({"t": "odict", "v": [["deep", [0, {"t": "tuple", "v": [plain]}]]]}))
    where = re.escape("state['x']['deep'][1][0]: torch ") + f".*{fact}.*hint"
    with forebay.Checkpointer(tmp_path) as checkpointer:
        for act in (lambda: checkpointer.restore({"x": 0}), lambda: forebay.load(tmp_path)):
            with pytest.raises(forebay.CheckpointInvalid, match=where):
                act()


@pytest.mark.parametrize(
    "node",
    [
        {"t": "dict", "v": []},
        {"t": "dict", "v": [["param_groups", 7]]},
        {"t": "dict", "v": [["param_groups", [{"t": "dict", "v": []}]]]},
        {"t": "dict", "v": [["state", 7], ["param_groups", []]]},
        {"t": "dict", "v": [["state", {"t": "dict", "v": [["one", 1]]}], ["param_groups", []]]},
        {"t": "object", "k": "optimizer", "v": 7},
        {"t": "object", "k": "optimizer-own", "v": {"t": "dict", "v": [["state", 7], ["param_groups", [7]]]}},
        {"t": "object", "k": "module", "v": {"t": "dict", "v": [[7, {"t": "tensor", "n": "t"}]]}},
        {"t": "object", "k": "module", "v": {"t": "dict", "v": [[{"t": "bytes", "n": "b"}, 1]]}},
    ],
)
def test_another_state_than_the_objects_is_a_mismatch(tmp_path: Path, node: Any) -> None:
    written(tmp_path, tree(node))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for state in ({"x": optimizer}, {"x": model}):
        with pytest.raises(forebay.CheckpointMismatch):
            forebay.load(tmp_path, state)
    assert not optimizer.state


@pytest.mark.parametrize(
    "rng", ["7", tree(1), json.dumps({"t": "dict", "v": [["python", [3, "00", None]]]}), view([9], [1], 0), "[" * 9999]
)
def test_generators_that_are_none_are_told(tmp_path: Path, rng: str) -> None:
    written(tmp_path, tree(1), rng, found="has a `rng` that is no tree" if rng[0] == "[" else "")
    before = torch.get_rng_state()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(forebay.CheckpointCorrupt):
            checkpointer.restore({"x": 0}, step=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_views_are_within_exactly_where_all_their_elements_are() -> None:
    for seed in rounds(300):
        choice = random.Random(seed)
        shape = [choice.randrange(4) for _ in range(choice.randrange(3))]
        sizes = [choice.randrange(4) for _ in range(choice.randrange(4))]
        strides, offset = [choice.randrange(5) for _ in sizes], choice.randrange(6)
        places = [offset]
        for size, stride in zip(sizes, strides):
            places = [place + index * stride for place in places for index in range(size)]
        count = torch.Size(shape).numel()
        expected = all(place < count for place in places) if places else offset <= count
        assert is_within([sizes, strides, offset], shape) == expected, f"seed {seed}"


@pytest.mark.parametrize("tag", [None, "tuple", "dict"])
def test_a_long_list_is_looked_at_as_it_is(tag: Optional[str]) -> None:
    """Of plain values nothing is made: a hundred bytes for each of millions would be much for a moment."""
    values = [[str(index), index] for index in range(50_000)] if tag == "dict" else list(range(50_000))
    node = values if tag is None else {"t": tag, "v": values}
    tracemalloc.start()
    try:
        check_tree(node, no_tensors)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20_000, most


def no_tensors(name: str) -> tuple[str, list[int]]:
    raise AssertionError(name)


def nested(kind: str, levels: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(levels):
        value = [value] if kind == "list" else {"x": value}
    return value


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_what_can_be_saved_can_be_loaded(tmp_path: Path, kind: str) -> None:
    forebay.save(nested(kind, 200), tmp_path)
    loaded, into = forebay.load(tmp_path), nested(kind, 200)
    forebay.load(tmp_path, into)
    for value in (loaded, into):
        while not isinstance(value, torch.Tensor):
            (value,) = value if kind == "list" else value.values()
        assert torch.equal(value, torch.ones(1))
    with pytest.raises(TypeError, match="nested deeper than 200 levels"):
        forebay.save(nested(kind, 201), tmp_path, step=1)


@pytest.mark.parametrize("length", [0, 7, 1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_shards_header_of_any_length_is_found_and_harms_no_restore(tmp_path: Path, length: int) -> None:
    """The first eight bytes of a shard say how long its header is: nobody takes memory for what they say."""
    forebay.save({"t": torch.arange(1000)}, tmp_path, step=1)
    (shard,) = [path for path in (tmp_path / "shards").rglob("*") if path.is_file()]
    with open(shard, "r+b") as file:
        file.write(length.to_bytes(8, "little"))
    (fault,) = _native.verify(f"file://{tmp_path}", None)
    assert shard.name in str(fault), fault
    # It goes by the manifest.
    assert torch.equal(forebay.load(tmp_path)["t"], torch.arange(1000))
