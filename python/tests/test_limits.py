"""What a host runs out of: disk, slots; and the memory that is taken before the first save."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forebay
from forebay import _native

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"NO SMALL DISK: mount: {mounted.stderr.strip()}, so that a full disk is not tested")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("mib", [6, 12])
def test_a_full_disk_is_told_and_harms_no_step(small_disk: Path, mib: int) -> None:
    # In one PUT and in parts.
    run = small_disk / "run"
    with forebay.Checkpointer(run, rng=False) as checkpointer:
        checkpointer.save_now(1, {"t": torch.full((3 * MIB,), 1, dtype=torch.uint8)}).wait_durable()
        save = checkpointer.save_now(2, {"t": torch.full((mib * MIB,), 2, dtype=torch.uint8)})
        with pytest.raises(forebay.CheckpointError, match="step 2 was not saved") as told:
            save.wait_durable()
        assert isinstance(told.value, forebay.CheckpointNoSpace)
        assert "No space left" in str(told.value) and "keep fewer steps" in str(told.value)
        # What was written of it is gone, and there is room for another.
        assert checkpointer.steps() == [1] and not (run / f"shards/{2:020}").exists()
        checkpointer.save_now(3, {"t": torch.full((3 * MIB,), 3, dtype=torch.uint8)}).wait_durable()
        assert checkpointer.steps() == [1, 3]
    assert torch.equal(forebay.load(run)["t"], torch.full((3 * MIB,), 3, dtype=torch.uint8))
    assert _native.verify(f"file://{run}", None) == []


def test_the_first_save_faults_no_page_in(tmp_path: Path) -> None:
    state = {"t": torch.ones(64 * MIB, dtype=torch.uint8)}
    page = os.sysconf("SC_PAGE_SIZE")
    with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
        checkpointer.prepare(state)
        faults = []
        for step in (1, 2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            save = checkpointer.save_now(step, state)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            save.wait_durable()
        # Of 16,384 pages, for each of both slots; what is left is the interpreter's own.
        assert max(faults) < state["t"].nbytes // page // 50, faults
