"""Forebay: checkpoints of training jobs, straight to object storage, without stalling the training.

    ck = forebay.Checkpointer("s3://bucket/run7", every=500, keep=3)
    state = dict(model=model, optim=optim, sched=sched)
    start = ck.restore(state) or 0
    for step in range(start + 1, total + 1):
        loss(model).backward()
        ck.before_optimizer_step()
        optim.step()
        ck.step(step, state)
    ck.close()

torch and numpy are used where they are installed; importing this package imports neither.
"""

from ._checkpointer import Checkpointer
from ._errors import (
    CheckpointConflict,
    CheckpointCorrupt,
    CheckpointDenied,
    CheckpointError,
    CheckpointInvalid,
    CheckpointMismatch,
    CheckpointMutated,
    CheckpointNoSpace,
    CheckpointNotFound,
    CheckpointSuperseded,
    CheckpointUnavailable,
    CheckpointWarning,
)
from ._files import load, load_model, save
from ._ladder import Restored
from ._save import Save

__all__ = [
    "Checkpointer",
    "CheckpointConflict",
    "CheckpointCorrupt",
    "CheckpointDenied",
    "CheckpointError",
    "CheckpointInvalid",
    "CheckpointMismatch",
    "CheckpointMutated",
    "CheckpointNoSpace",
    "CheckpointNotFound",
    "CheckpointSuperseded",
    "CheckpointUnavailable",
    "CheckpointWarning",
    "Restored",
    "Save",
    "load",
    "load_model",
    "save",
]
