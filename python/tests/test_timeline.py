"""What saves and restores took, as plain data and in the agent's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import forebay
from prometheus_client.parser import text_string_to_metric_families

from .conftest import leave_to_the_next_call, trained
from .test_ranks import run_ranks

MOMENTS = ("staged_s", "sealed_s", "stored_s", "durable_s")


def check_save(entry: dict[str, Any], step: int, rank: int, size: int) -> None:
    assert (entry["act"], entry["step"], entry["rank"], entry["bytes"]) == ("save", step, rank, size)
    moments = [entry[name] for name in MOMENTS]
    assert 0 < moments[0] and moments == sorted(moments) and entry["returned_s"] > 0 and entry["failed"] is None
    assert entry["replicated_s"] is None, "no other host holds anything"


def test_saves_and_restores_tell_what_they_took(tmp_path: Path) -> None:
    log = tmp_path / "log"
    state = {"t": torch.zeros(300_000)}
    with forebay.Checkpointer(tmp_path / "run", every=1, rng=False, agent_log=log) as checkpointer:
        saves = [checkpointer.step(step, state) for step in (1, 2)]
        first = saves[0].timeline() if saves[0] is not None else {}
        assert first["step"] == 1 and first["staged_s"] is not None
        assert all(save is not None and save.wait_replicated() and save.replicated for save in saves)
        checkpointer.wait()
        checkpointer.restore(state)
    entries = json.loads(json.dumps(checkpointer.timeline()))
    check_save(entries[0], 1, 0, 1_200_000)
    check_save(entries[1], 2, 0, 1_200_000)
    assert entries[2]["act"] == "restore" and entries[2]["seconds"] > 0
    assert [entries[2][name] for name in ("step", "tier", "rank", "bytes")] == [2, "arena", 0, 1_200_000]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    told = [line["fields"] for line in lines if line["fields"].get("message") == "durable"]
    assert [(fields["step"], fields["rank"]) for fields in told] == [(1, 0), (2, 0)]
    assert all(fields["bytes"] > 1_200_000 and fields["seconds"] > 0 for fields in told)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and the labels but the rank, which is 0's."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type != "unknown"
        for sample in family.samples:
            assert sample.labels.pop("rank") == "0"
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_metrics_count_all_saves_and_restores(tmp_path: Path) -> None:
    """More of them than `timeline` tells one by one."""
    state = {"t": torch.zeros(300)}
    with forebay.Checkpointer(tmp_path / "run", keep=1, rng=False) as checkpointer:
        assert "forebay_durable_step" not in checkpointer.metrics()
        for step in range(1, 111):
            checkpointer.save_now(step, state)
        checkpointer.wait()
        checkpointer.restore(state)
        found = samples(checkpointer.metrics())
    assert len(checkpointer.timeline()) == 100
    assert found["forebay_saves_total",] == 110 and found["forebay_saves_failed_total",] == 0
    assert found["forebay_saved_bytes_total",] == 110 * 1200 and found["forebay_durable_step",] == 110
    for phase in ("returned", "staged", "sealed", "stored", "durable"):
        assert found["forebay_save_seconds_count", phase] == 110
    assert found["forebay_save_seconds_sum", "sealed"] <= found["forebay_save_seconds_sum", "durable"]
    assert ("forebay_save_seconds_count", "local") not in found
    assert found["forebay_restore_seconds_count", "arena"] == 1 and found["forebay_restored_bytes_total", "arena"] == 1200
    assert found["forebay_rdma_bytes_total",] == 0
    assert found["forebay_saves_skipped_total",] == found["forebay_copies_missed_total",] == 0


def test_a_failed_save_says_so(tmp_path: Path) -> None:
    state = trained()
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.before_optimizer_step()
        leave_to_the_next_call(checkpointer)
        checkpointer.save_now(1, state)
        with torch.no_grad():
            state["model"].weight.add_(1)
        try:
            checkpointer.wait()
        except forebay.CheckpointMutated:
            pass
        (entry,) = checkpointer.timeline()
    assert entry["staged_s"] is None and "weight changed" in entry["failed"]


def test_each_rank_tells_its_own(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        state = {"own": torch.zeros(1000 * (rank + 1))}
        with forebay.Checkpointer(tmp_path, rng=False) as checkpointer:
            checkpointer.save_now(1, state)
            checkpointer.wait()
        return checkpointer.timeline()

    for rank, entries in enumerate(run_ranks(2, work, with_gloo=False)):
        check_save(entries[0], 1, rank, 4000 * (rank + 1))
