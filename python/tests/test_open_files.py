"""Rank 0 has a connection to each other rank: a thousand are more than a process may have at first."""

from __future__ import annotations

import json
import resource
from typing import Callable

import pytest

from forebay import CheckpointUnavailable, _native

from .conftest import Child


def limited_to(soft: int, hard: int, ranks: int) -> tuple[str, int]:
    """What rank 0 is told that waits for so many in vain, and how many files its process may open then."""

    def work(report: Callable[[str], None]) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with pytest.raises(CheckpointUnavailable) as refused:
            _native.Group(f"forebay-test-open-files-{soft}-{hard}", (0, ranks), "here", 0.2)
        report(json.dumps([str(refused.value), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))

    child = Child(work)
    told, allowed = json.loads(child.line())
    assert child.join() == 0
    return told, allowed


def test_rank_0_may_open_as_many_files_as_it_has_ranks() -> None:
    told, allowed = limited_to(128, 4096, 1000)
    assert "did not join" in told and 1000 < allowed < 2000
    told, allowed = limited_to(1024, 4096, 3)
    assert "did not join" in told and allowed == 1024, "it is left alone where it will do"


def test_what_cannot_be_opened_is_told_before_it_is() -> None:
    told, allowed = limited_to(128, 512, 1000)
    assert "1000 open files are needed for the job's other ranks" in told and "may have 512 (hint: " in told
    assert allowed == 128
