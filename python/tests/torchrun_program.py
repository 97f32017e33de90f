"""What `test_torchrun.py` has torchrun start, in each rank: `torchrun_program.py FOLDER ACT`.

`train` trains modules of DDP and of FSDP2, in float32 and in bfloat16 with tied weights, for six steps, each of which is
saved; where FOLDER holds a file `kill`, the
last rank removes it and kills itself once step 3 is sealed, and torchrun starts all ranks again. What comes out is
compared with a training that nobody interrupts, and written beside the steps. `shrink` trains on the same data on all ranks, and
where FOLDER holds `kill`, all that runs on the last host is killed once step 3 is sealed, torchrun and agents as well. `restore` compares what it restores, at
any number of ranks, with that. What each rank found it adds to FOLDER/`told`, and the process that saves for it to
FOLDER/`agents`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forebay

LAST = 6
KILLED_AT = 3

KINDS = ("ddp", "fsdp", "ddp16", "fsdp16")
"""Modules of 32 bits, and of 16 with what is odd beside it."""


class Half(torch.nn.Module):
    """bfloat16, one weight of two names, a scalar and a tensor of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = torch.nn.Linear(7, 7, bias=False, dtype=torch.bfloat16)
        self.upper = torch.nn.Linear(7, 7, bias=False, dtype=torch.bfloat16)
        self.upper.weight = self.lower.weight
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0, 7, dtype=torch.bfloat16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(1.01)
        found: torch.Tensor = self.upper(self.lower(batch.bfloat16()).tanh()) * self.scale.item()
        return found


def plain(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of no module, two names of which are of one memory."""
    shared = torch.full((5, 3), seed + 0.3, dtype=torch.bfloat16)
    return {
        "one": shared,
        "other": shared,
        "scalar": torch.tensor(float(seed), dtype=torch.float64),
        "nothing": torch.empty(3, 0, dtype=torch.int16),
    }


def parts(seed: int) -> dict[str, Any]:
    """Modules, optimizers and tensors, of the same values on all ranks."""
    torch.manual_seed(seed)
    state: dict[str, Any] = {"losses": [], "plain": plain(seed)}
    for kind in KINDS:
        layers = [torch.nn.Linear(7, 13), torch.nn.BatchNorm1d(13), torch.nn.Dropout(0.1), torch.nn.Linear(13, 5)]
        model = Half() if kind.endswith("16") else torch.nn.Sequential(*layers)
        if kind.startswith("ddp"):
            # Without it DDP orders gradients anew after its first step: four ranks' sums are rounded otherwise then.
            model = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            fully_shard(model)
        state[kind] = model
        state[f"{kind}_optim"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return state


def train(state: dict[str, Any]) -> None:
    """One step, on data of each rank's own generator."""
    for kind in KINDS:
        loss = state[kind](torch.randn(4, 7)).square().mean()
        loss.backward()
        state[f"{kind}_optim"].step()
        state[f"{kind}_optim"].zero_grad()
        state["losses"].append(loss.item())
    state["plain"]["one"].mul_(1.25)
    state["plain"]["scalar"].add_(0.1)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """All tensors, those of modules and optimizers as one process would have them."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    tensors: dict[str, Any] = {f"plain.{name}": value.clone() for name, value in state["plain"].items()}
    for kind in KINDS:
        model, optim = get_state_dict(state[kind], state[f"{kind}_optim"], options=options)
        tensors |= {f"{kind}.{name}": value.clone() for name, value in model.items()}
        for name, own in optim["state"].items():
            tensors |= {f"{kind}_optim.{name}.{key}": value.clone() for key, value in own.items()}
    return tensors


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is, and its bytes."""
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).tolist()


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of tensors that are not equal, bit by bit."""
    assert one.keys() == other.keys() and len(one) == 2 * (9 + 6 * 3) + 2 * (4 + 3) + 4, list(one)
    assert {torch.bfloat16, torch.float32, torch.float64, torch.int64} <= {value.dtype for value in one.values()}
    assert sum(value.numel() == 0 for value in one.values()) == 3
    return [name for name in one if bits(one[name]) != bits(other[name])]


def untied(state: dict[str, Any]) -> list[str]:
    """Names that are not of one memory any more."""
    modules = {kind: getattr(state[kind], "module", state[kind]) for kind in KINDS if kind.endswith("16")}
    pairs = {kind: (module.lower.weight, module.upper.weight) for kind, module in modules.items()}
    pairs["plain"] = (state["plain"]["one"], state["plain"]["other"])
    # The objects: a rank that holds nothing of a DTensor has no memory of it.
    return [name for name, (one, other) in pairs.items() if one is not other]


def tell(path: Path, what: Any) -> None:
    """Adds a line to a file."""
    with path.open("a") as file:
        file.write(json.dumps(what) + "\n")


def act_train(folder: Path, rank: int) -> dict[str, Any]:
    """Trains, from where an earlier start got to."""
    fate, state = folder / "kill", parts(0)
    with forebay.Checkpointer(folder / "run", every=1) as checkpointer:
        torch.manual_seed(100 + rank)
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, LAST + 1):
            train(state)
            save = checkpointer.step(step, state)
            assert save is not None
            if step == start + 1:
                tell(folder / "agents", checkpointer._agent.pid)
            if step == KILLED_AT and fate.exists():
                assert save.wait_sealed(60)
                # It is sealed on all ranks, and all of them have seen the file.
                dist.barrier()
                if rank == dist.get_world_size() - 1:
                    fate.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()
        restored = checkpointer.restored
        found: dict[str, Any] = {"start": start, "tier": restored and restored.tier}
    expected = parts(0)
    torch.manual_seed(100 + rank)
    for _ in range(LAST):
        train(expected)
    tensors = whole(state)
    found["wrong"] = differing(tensors, whole(expected)) + untied(state)
    found["losses_are_equal"] = state["losses"] == expected["losses"]
    torch.save(tensors, folder / f"expected.{rank}.pt")
    return found


def sharded() -> dict[str, Any]:
    """A module over all ranks, whose sums of gradients are exact however many these are, of powers of two."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5))
    fully_shard(model)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train_alike(state: dict[str, Any], step: int) -> None:
    """A step, on the same data on all ranks."""
    data = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
    state["model"](data).square().mean().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def act_shrink(folder: Path, rank: int) -> dict[str, Any]:
    """Trains, from where an earlier start of more ranks got to."""
    fate, state, world_size = folder / "kill", sharded(), dist.get_world_size()
    is_last = os.environ["GROUP_RANK"] == str(world_size // int(os.environ["LOCAL_WORLD_SIZE"]) - 1)
    with forebay.Checkpointer(folder / "run", every=1, rng=False, replicas=1, linger=120) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, LAST + 1):
            train_alike(state, step)
            save = checkpointer.step(step, state)
            if step == KILLED_AT and fate.exists():
                assert save is not None and save.wait_replicated(60)
                dist.barrier()
                if is_last:
                    os.kill(checkpointer._agent.pid, signal.SIGKILL)
                    if os.environ["LOCAL_RANK"] == "0":
                        fate.unlink()
                        os.kill(os.getppid(), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                # Fails, as the others are gone.
                dist.barrier()
        restored = checkpointer.restored
    expected = sharded()
    for step in range(1, LAST + 1):
        train_alike(expected, step)
    options = StateDictOptions(full_state_dict=True)
    one, other = (get_state_dict(each["model"], each["optim"], options=options)[0] for each in (state, expected))
    wrong = [name for name in one if bits(one[name]) != bits(other[name])]
    return {"start": start, "tier": restored and restored.tier, "ranks": world_size, "wrong": wrong}


def act_restore(folder: Path, rank: int) -> dict[str, Any]:
    """Restores into other values."""
    state = parts(1)
    with forebay.Checkpointer(folder / "run") as checkpointer:
        start = checkpointer.restore(state)
    # Of DDP's buffers those of rank 0 count; FSDP2 leaves each rank its own, and so is what is of no module.
    saved_by = len(list(folder.glob("expected.*.pt")))
    first, own = (torch.load(folder / f"expected.{number}.pt") for number in (0, rank % saved_by))
    expected = {name: first[name] if name.startswith("ddp") else own[name] for name in first}
    return {"start": start, "wrong": differing(whole(state), expected) + untied(state)}


def main() -> None:
    """Does what the command line says, as one rank."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {"train": act_train, "shrink": act_shrink, "restore": act_restore}[sys.argv[2]](folder, rank)
    tell(folder / "told", {"rank": rank, **found})
    dist.barrier()
    dist.destroy_process_group()
    # torch 2.15 aborts now and then where a process ends that used gloo, with nothing of Forebay's in it.
    os._exit(0)


if __name__ == "__main__":
    main()
