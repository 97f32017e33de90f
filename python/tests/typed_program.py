"""What a typed user writes: checked by mypy --strict against the package's own annotations, and run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Optional

import forebay


def train(place: Path, total: int) -> int:
    """Counts to `total`, saving every second step."""
    state: dict[str, object] = {"count": 0, "note": "é", "log": [b"\x00" * 70_000, None, 2.5, True]}
    with forebay.Checkpointer(place, every=2, keep=2, on_error="warn", max_failures=5) as checkpointer:
        start: Optional[int] = checkpointer.restore(state)
        for step in range((start or 0) + 1, total + 1):
            state["count"] = step
            checkpointer.before_optimizer_step()
            checkpointer.step(step, state)
    return start or 0


def main(folder: Path) -> None:
    """Trains twice, and saves and loads beside it."""
    assert train(folder / "run", 3) == 0
    assert train(folder / "run", 6) == 2
    forebay.save({"values": [1, "two", 3.0]}, folder / "alone", step=7)
    loaded: dict[str, list[object]] = forebay.load(folder / "alone")
    assert loaded == {"values": [1, "two", 3.0]}
    try:
        forebay.load(folder / "nothing")
    except forebay.CheckpointNotFound as error:
        message: str = str(error)
        assert message
    else:
        raise AssertionError("nothing is there")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
