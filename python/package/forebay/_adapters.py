"""Adapters of PEFT: what of a model is theirs, and the files that PEFT reads them from.

PEFT is not imported here: whoever has a model of its has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Optional

import safetensors
import safetensors.torch

from ._errors import CheckpointCorrupt

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""The files of one adapter, as PEFT calls them."""
_UNNAMED = "default"
"""The adapter whose files PEFT has beside the model's; those of others have a directory of that name."""


def is_adapted(model: Any) -> bool:
    """Whether it is PEFT's: the Trainer resumes no such model from several files."""
    peft = sys.modules.get("peft")
    kinds = tuple(getattr(peft, name) for name in ("PeftModel", "PeftMixedModel") if hasattr(peft, name))
    return isinstance(model, kinds)


def told_of(model: Any) -> Optional[str]:
    """As JSON, of each adapter its settings, and which tensors of the model are those of its file; None where the model has none.

    What is no tensor of the model's is in no step: prompts, which PEFT computes anew for its file, are left out.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    own, told = model.state_dict(), {}
    names = {id(tensor): name for name, tensor in own.items()}
    for adapter, config in model.peft_config.items():
        # Else it asks the hub what embeddings the base model has.
        found = peft.get_peft_model_state_dict(model, own, adapter, save_embedding_layers=False)
        tensors = {name: names.get(id(tensor)) for name, tensor in found.items()}
        if None not in tensors.values():
            told[adapter] = {"settings": _settings(model, config), "tensors": tensors}
    return json.dumps(told)


def _settings(model: Any, config: Any) -> dict[str, Any]:
    """What PEFT writes of them."""
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    base = model.get_base_model()
    settings["base_model_name_or_path"] = settings.get("base_model_name_or_path") or getattr(base, "name_or_path", None) or None
    settings["inference_mode"] = True
    if settings.get("task_type") is None:
        settings["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return settings


def write(told: str, folder: Path) -> None:
    """Writes the files of adapters, out of the `model.safetensors` that is in the folder."""
    with safetensors.safe_open(folder / "model.safetensors", "pt") as model:
        for adapter, facts in json.loads(told).items():
            if Path(adapter).name != adapter:
                raise CheckpointCorrupt(f"an adapter of PEFT's is called {adapter!r}, which is no name")
            place = folder if adapter == _UNNAMED else folder / adapter
            place.mkdir(exist_ok=True)
            tensors = {name: model.get_tensor(there) for name, there in facts["tensors"].items()}
            safetensors.torch.save_file(tensors, place / WEIGHTS, {"format": "pt"})
            (place / SETTINGS).write_text(json.dumps(facts["settings"], indent=2, sort_keys=True))
