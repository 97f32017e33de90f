"""Modules whose state has more than their attributes: bitsandbytes' 4-bit weights, beside adapters that are trained (QLoRA).

bitsandbytes itself is not needed, nor the devices that it is for: a stand-in tells what its `Linear4bit` does, some of it in
memory of its own (`weight.absmax`), some made anew whenever it is asked (`weight.quant_state.bitsandbytes__nf4`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay

KEY = "weight.quant_state.bitsandbytes__nf4"


class Linear4bit(torch.nn.Module):
    """A frozen weight in packed bytes, with what it takes to unpack it."""

    def __init__(self, seed: int, blocksize: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randint(255, (32, 1)).to(torch.uint8), requires_grad=False)
        self.absmax, self.blocksize = torch.rand(4), blocksize

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax if keep_vars else self.absmax.detach()
        packed = json.dumps({"blocksize": self.blocksize, "shape": [8, 8]}).encode()
        destination[f"{prefix}{KEY}"] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scales = self.absmax.repeat_interleave(16).view(8, 8)
        return batch @ (self.weight.view(8, 4).repeat(1, 2).float() / 255 * scales)


class Adapted(torch.nn.Module):
    def __init__(self, seed: int, blocksize: int = 64) -> None:
        super().__init__()
        self.base, self.lora = Linear4bit(seed, blocksize), torch.nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.base(batch) + self.lora(batch)  # type: ignore[no-any-return]


def state_of(seed: int, steps: int = 1) -> dict[str, Any]:
    model = Adapted(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.Sequential])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_quantized_model_and_its_adapters_come_back(tmp_path: Path, wrap: Any, steps: int) -> None:
    was, now = state_of(1), state_of(2, steps)
    forebay.save({"model": wrap(was["model"]), "optim": was["optim"]}, tmp_path, step=3)
    forebay.load(tmp_path, {"model": wrap(now["model"]), "optim": now["optim"]})
    saved, found = was["model"].state_dict(), now["model"].state_dict()
    assert saved.keys() == found.keys() and f"base.{KEY}" in saved
    assert all(torch.equal(saved[name], found[name]) for name in saved)
    batch = torch.randn(4, 8)
    assert torch.equal(was["model"](batch), now["model"](batch))
    moments = [state["optim"].state[state["model"].lora.weight]["exp_avg"] for state in (was, now)]
    assert torch.equal(*moments)


def test_what_it_does_not_take_and_has_not_is_refused(tmp_path: Path) -> None:
    """Packed in blocks of another size."""
    forebay.save({"model": Adapted(1)}, tmp_path)
    with pytest.raises(forebay.CheckpointMismatch, match=r"state\['model'\]: .*it takes no 'base.weight.quant_state"):
        forebay.load(tmp_path, {"model": Adapted(2, blocksize=32)})


def test_adapters_alone(tmp_path: Path) -> None:
    was, now = state_of(1), state_of(2)
    forebay.save(was, tmp_path)
    before = {name: tensor.clone() for name, tensor in now["model"].base.state_dict().items()}
    forebay.load_model(tmp_path, now["model"], only=["lora.*"])
    assert torch.equal(was["model"].lora.weight, now["model"].lora.weight)
    assert all(torch.equal(tensor, before[name]) for name, tensor in now["model"].base.state_dict().items())
