"""Values of types that `torch.save` takes: they come back as what they were, or are refused by name, with what can be done."""

from __future__ import annotations

import collections
import enum
import pathlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import forebay


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    pass


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "value",
    [numpy.bool_(True), numpy.float32(1.5), numpy.float64(1.5), numpy.int64(3), numpy.float16(1), numpy.complex64(1 + 2j)],
)
def test_numbers_of_numpy_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    state = {"v": value, "deep": [(value,)]}
    forebay.save(state, tmp_path)
    into = forebay.load(tmp_path, into={"v": None, "deep": []})
    for found in (forebay.load(tmp_path), into):
        assert type(found["v"]) is type(value) and found["v"] == value
        assert type(found["deep"][0]) is tuple and type(found["deep"][0][0]) is type(value)


@pytest.mark.parametrize(
    "value, text",
    [
        (Color.RED, r"Color cannot be saved; save its `\.value`"),
        (Level.LOW, r"Level cannot be saved; save its `\.value`"),
        (Name("x"), r"Name cannot be saved; save it as a plain str\(\)"),
        (pathlib.PurePosixPath("/a"), r"pathlib.PurePosixPath cannot be saved; save it as text, str\(\)"),
        (Pair(1, torch.ones(2)), r"Pair cannot be saved; save it as a plain tuple\(\)"),
        (numpy.str_("x"), r"numpy.str_ of <U1 cannot be saved; save it as a plain str\(\)"),
        (numpy.datetime64("2020-01-01"), r"cannot be saved; save it as text, str\(\)"),
        (numpy.array(["x"]), r"numpy.ndarray of <U1 cannot be saved; save it as a plain array of numbers"),
        (range(3), r"range cannot be saved; give it state_dict\(\) and load_state_dict\(\), convert it"),
    ],
)
def test_what_comes_back_as_nothing_else_is_refused_with_a_hint(tmp_path: Path, value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"^state\['x'\]\['v'\]: object of type .*{text}.*, or pass allow_pickle=True$"):
        forebay.save({"x": {"v": value}}, tmp_path / "run")
    assert not (tmp_path / "run/steps").exists()
    forebay.save({"v": value}, tmp_path / "pickled", allow_pickle=True)
    found = forebay.load(tmp_path / "pickled", allow_pickle=True)["v"]
    assert type(found) is type(value) and str(found) == str(value)


@pytest.mark.parametrize(
    "key, text",
    [
        (Color.RED, r"a key of type .*Color cannot be saved; .*; use its `\.value`"),
        (Level.LOW, r"object of type .*Level cannot be saved; save its `\.value`"),
        (pathlib.PurePosixPath("/a"), r"a key of type .*PurePosixPath cannot be saved; .*; use it as text, str\(\)"),
        (numpy.int64(3), r"a key of type numpy.int64 cannot be saved; .*; use it as a plain value, `\.item\(\)`"),
        (b"x", r"a key of type bytes cannot be saved; keys are text, numbers, booleans, None, and tuples of these$"),
    ],
)
def test_keys_that_are_none_are_refused_with_a_hint(tmp_path: Path, key: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"^state\['x'\]\[.*\]: {text}"):
        forebay.save({"x": {key: 1}}, tmp_path)


def test_tensors_that_are_made_of_others_say_of_which(tmp_path: Path) -> None:
    """And those that are not dense how they become so."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Other(torch.Tensor):
        pass

    for tensor, match in (
        (TwoTensor(torch.ones(2), torch.ones(2)), r"TwoTensor.*hint: it is made of a, b: save these"),
        (torch.ones(2).as_subclass(Other), r"Other.*hint: save it as a plain one, .as_subclass\(torch.Tensor\)"),
        (torch.ones(2).to_sparse(), r"sparse_coo tensor.*hint: save it as a dense one, .to_dense\(\)"),
    ):
        with pytest.raises(TypeError, match=r"state\['t'\]: .*" + match):
            forebay.save({"t": tensor}, tmp_path)
