"""States that begin with nothing in some place, None or an empty dict or list, and have something there later: the program
that starts anew begins with nothing again, and gets what was saved."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forebay

from .test_ranks import run_ranks

State = dict[str, Any]


def begun() -> State:
    """As the program begins."""
    torch.manual_seed(1)
    return {
        "model": torch.nn.Linear(4, 2),
        "best": None,
        "metrics": {},
        "log": [],
        "both": [None, torch.zeros(3), {}],
        "pair": (None, {"w": torch.zeros(2)}),
        "later": None,
    }


def gone_on() -> State:
    """As it is after a while."""
    state = begun()
    state["best"] = torch.arange(5.0)
    state["metrics"].update(loss=torch.tensor(0.25), curve=numpy.arange(3), parts={"a": [1, None]}, n=7, order={3: "x"})
    state["log"] += [torch.ones(2), "text", {"deep": torch.arange(2)}]
    state["both"] = [torch.full((2,), 9), torch.ones(3), {"x": torch.ones(1, dtype=torch.bfloat16)}]
    state["pair"] = ((torch.ones(1), 2), {"w": torch.ones(2)})
    state["later"] = {"w": torch.ones(3), "kind": "dict"}
    torch.nn.init.ones_(state["model"].weight)
    return state


def plain(value: Any) -> Any:
    """With tensors and arrays as their types and lists."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, torch.nn.Module):
        return plain(dict(value.state_dict()))
    return type(value)(plain(part) for part in value) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("way", ["restore", "load"])
def test_what_came_later_takes_the_place_of_nothing(tmp_path: Path, way: str) -> None:
    forebay.save(gone_on(), tmp_path, step=1)
    state = begun()
    metrics, log, filled = state["metrics"], state["log"], state["both"][1]
    if way == "load":
        assert forebay.load(tmp_path, state) is state
    else:
        with forebay.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state) == 1
    assert plain(state) == plain(gone_on())
    # What the program holds is what was filled.
    assert state["metrics"] is metrics and state["log"] is log and state["both"][1] is filled
    ordered = begun() | {"metrics": collections.OrderedDict()}
    forebay.load(tmp_path, ordered)
    assert type(ordered["metrics"]) is collections.OrderedDict and plain(dict(ordered["metrics"])) == plain(metrics)


def test_by_name(tmp_path: Path) -> None:
    forebay.save(gone_on(), tmp_path, step=1)
    with forebay.Checkpointer(tmp_path) as checkpointer:
        state = begun()
        checkpointer.restore(state, only=["metrics.parts.*", "later.w"])
        assert plain(state) == plain(begun() | {"metrics": {"parts": {"a": [1, None]}}, "later": {"w": torch.ones(3)}})
        assert checkpointer.restored is not None and checkpointer.restored.bytes == 12
        with pytest.raises(forebay.CheckpointMismatch, match=r"nothing is named like metrics\.lost"):
            checkpointer.restore(state, only=["metrics.lost"])


def test_what_needs_more_than_nothing_is_refused(tmp_path: Path) -> None:
    """A state without anything in it, an object that is not there, and places that have something else."""
    linear = torch.nn.Linear(3, 3)
    forebay.save({"first": torch.ones(4), "ema": {"model": linear}, "items": [linear], "best": torch.ones(2)}, tmp_path)
    for change, told in [
        ({"ema": {}}, r"state\['ema'\]\['model'\]: an object's state was saved"),
        ({"ema": None}, r"state\['ema'\]\['model'\]: an object's state was saved"),
        ({"items": []}, r"state\['items'\]\[0\]: an object's state was saved"),
        ({"best": 3}, r"state\['best'\]: a torch tensor was saved"),
        ({"best": {"x": 1}}, r"state\['best'\]: a torch tensor was saved"),
    ]:
        state = {"first": torch.zeros(4), "ema": {"model": linear}, "items": [linear], "best": torch.zeros(2), **change}
        with pytest.raises(forebay.CheckpointMismatch, match=told):
            forebay.load(tmp_path, state)
        assert not state["first"].any()
    with pytest.raises(forebay.CheckpointMismatch, match="the state lacks"):
        forebay.load(tmp_path, {})


def test_ranks_get_what_each_had_and_nobody_elses(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        spread = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        for name, best in ("own", torch.full((3,), float(rank))), ("spread", spread):
            with forebay.Checkpointer(tmp_path / name, rng=False) as checkpointer:
                checkpointer.save_now(1, {"w": torch.ones(2), "best": best, "metrics": {"rank": rank}})
        return True

    def restore(rank: int) -> Any:
        told = []
        for name in ("own", "spread"):
            state: State = {"w": torch.zeros(2), "best": None, "metrics": {}}
            with forebay.Checkpointer(tmp_path / name, rng=False) as checkpointer:
                if name == "own" and dist.get_world_size() == 2:
                    assert checkpointer.restore(state) == 1
                    told.append([state["best"].tolist(), state["metrics"]["rank"]])
                    continue
                with pytest.raises(forebay.CheckpointError) as raised:
                    checkpointer.restore(state)
            assert not state["w"].any() and state["best"] is None and not state["metrics"]
            told.append(str(raised.value))
        return told

    run_ranks(2, save)
    for rank, (own, spread) in enumerate(run_ranks(2, restore)):
        assert own == [[rank] * 3, rank] and "state['best']: a t" in spread
    for told in run_ranks(3, restore):
        assert all("state['best']" in text or "metrics" in text for text in told), told
