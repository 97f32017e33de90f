"""What each rank saves for itself though all have the same: told once, with the patterns that save it once."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import forebay

from .test_ranks import run_ranks

WIDTH = 512
"""A layer of this width is a MiB."""


def state_of(kind: str, rank: int) -> dict[str, Any]:
    torch.manual_seed(1)
    inner = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    wrapped = torch.nn.parallel.DistributedDataParallel(inner)
    model: Any = {"inner": inner, "ddp": wrapped, "dict": wrapped.state_dict(), "apart": inner, "small": inner[0].bias}[kind]
    own = torch.full((100,), float(rank))
    if kind == "apart":
        # As parameters that ranks share out by themselves (Megatron); the bias of the first alone is the same on all.
        with torch.no_grad():
            inner[0].weight += rank
            inner[1].weight += rank
            inner[1].bias += rank
    # Of which samples are not taken.
    strided = numpy.arange(20.0).reshape(4, 5).T
    return {"model": model, "loader": {"at": own, "strided": strided}}


def saved(place: Path, kind: str, **options: Any) -> list[list[str]]:
    """What each rank was warned of, over two saves."""

    def work(rank: int) -> Any:
        state = state_of(kind, rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Generators are the same on all ranks as well, and none's but theirs.
            torch.manual_seed(1)
            with forebay.Checkpointer(place, **options) as job:
                for step in (1, 2):
                    job.save_now(step, state)
                    state["loader"] = {"at": state["loader"]["at"], str(step): torch.zeros(3)}
        return [str(one.message) for one in caught if issubclass(one.category, forebay.CheckpointWarning)]

    return run_ranks(2, work)


def stored(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["inner", "dict"])
def test_what_ddp_has_within_is_told_with_what_saves_it_once(tmp_path: Path, kind: str) -> None:
    told, others = saved(tmp_path / "each", kind)
    assert others == [] and len(told) == 1, "once for the job"
    assert re.match(r"4 tensors \(2 MiB\) seem to be the same on all 2 ranks, each of which saves its own \(hint: ", told[0])
    (given,) = re.findall(r"replicated=\[(.*?)\]", told[0])
    assert given == "'model.*'"
    assert saved(tmp_path / "once", kind, replicated=[given.strip("'")]) == [[], []]
    assert 1.9 * stored(tmp_path / "once") < stored(tmp_path / "each") < 2.1 * stored(tmp_path / "once")


@pytest.mark.parametrize("kind", ["ddp", "apart", "small"])
def test_what_ranks_share_or_have_not_alike_is_not_told(tmp_path: Path, kind: str) -> None:
    assert saved(tmp_path, kind) == [[], []]


def test_where_warnings_are_errors_all_ranks_hear_of_it(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        state = state_of("inner", rank)
        with forebay.Checkpointer(tmp_path, rng=False) as job:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(Exception, match="seem to be the same on all 2 ranks"):
                    save = job.save_now(1, state)
                    assert save is not None
                    save.wait_durable()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                save = job.save_now(2, state)
                assert save is not None and save.wait_durable()
            return job.steps()

    assert run_ranks(2, work) == [[2], [2]]


def test_patterns_mean_what_is_alike_and_nothing_else() -> None:
    from forebay._copies import _patterns

    own = {"model.a.w", "model.a.b", "model.b.w", "optim.state.a.x", "n", "m"}
    assert _patterns(own - {"model.b.w", "m"}, own) == {"model.a.*", "optim.*", "n"}
    assert _patterns({"model.a.w"}, own) == {"model.a.w"}
    assert _patterns(own, own) == {"model.*", "optim.*", "n", "m"}
