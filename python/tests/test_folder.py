"""Steps in a folder on a disk of this host: written past the page cache, and read through a mapping."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

import pytest
import torch

import forebay


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    with path.open("rb") as file:
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=prot)
    pages = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
    start = ctypes.c_char.from_buffer(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    told = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(memory)), pages)
    del start
    memory.close()
    assert told == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


def needs_local_disk(folder: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True).stdout.strip()
    if kind not in ("ext2/ext3", "xfs", "btrfs", "f2fs"):
        pytest.skip(f"NOT TESTED: {folder} lies on {kind}, which is no file system of a disk")


def test_a_save_leaves_the_page_cache_alone_and_a_restore_is_exact(tmp_path: Path) -> None:
    needs_local_disk(tmp_path)
    place = tmp_path / "run"
    saved = {"large": torch.arange(6 << 20, dtype=torch.int32), "small": torch.arange(777), "n": 1}
    forebay.save(saved, place, step=1)
    (shard,) = place.glob("shards/**/*.safetensors")
    assert shard.stat().st_size > 24 << 20
    assert cached_pages(shard) <= 1, "the last page, which is not whole"
    for _ in ("from the disk", "from the page cache"):
        state = {"large": torch.zeros(6 << 20, dtype=torch.int32), "small": torch.zeros(777, dtype=torch.int64), "n": 0}
        with forebay.Checkpointer(place) as checkpointer:
            assert checkpointer.restore(state) == 1
        assert torch.equal(state["large"], saved["large"]) and torch.equal(state["small"], saved["small"])


def test_a_shard_that_was_cut_off_is_told(tmp_path: Path) -> None:
    forebay.save({"large": torch.arange(6 << 20, dtype=torch.int32)}, tmp_path, step=1)
    (shard,) = tmp_path.glob("shards/**/*.safetensors")
    os.truncate(shard, shard.stat().st_size - (5 << 20))
    with forebay.Checkpointer(tmp_path) as checkpointer, pytest.raises(forebay.CheckpointCorrupt, match="bytes, not"):
        checkpointer.restore({"large": torch.zeros(6 << 20, dtype=torch.int32)}, step=1)
