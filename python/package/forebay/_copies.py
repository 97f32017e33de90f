"""Plain tensors that every rank has for itself, and that seem to be the same on all: whoever saves DDP's inner module, or its
`state_dict()`, means one copy, and gets one of each rank, which no other number of ranks can share out.

Told by samples, at the first save alone: that they are the same by now is no promise that they will be, and so it is for the
program to say (`replicated=`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional

from ._alike import digest_each
from ._leaf import Leaf, torch_module

LEAST_BYTES = 1 << 20
"""Less than that on each rank is not worth a word."""

_MOST_PATTERNS = 5


def samples_of(leaves: Sequence[Leaf]) -> dict[str, str]:
    """What samples of this rank's own tensors hash to, by their names."""
    own = sorted((leaf for leaf in leaves if _is_own(leaf)), key=lambda leaf: leaf.name)
    return {} if sum(leaf.size for leaf in own) < LEAST_BYTES else digest_each(own)


def told_of(leaves: Sequence[Leaf], samples: Sequence[Mapping[str, str]]) -> Optional[str]:
    """What is to be said where most bytes of what each rank has for itself seem to be the same on all; the same on all ranks, as
    that is of those that all have."""
    first, *others = samples
    alike = {name for name, digest in first.items() if all(other.get(name) == digest for other in others)}
    own = {leaf.name: leaf.size for leaf in leaves if _is_own(leaf)}
    size = sum(own.get(name, 0) for name in alike)
    if size < LEAST_BYTES or 2 * size < sum(own.values()):
        return None
    patterns = [repr(pattern) for pattern in sorted(_patterns(alike, set(own)))]
    given = ", ".join(patterns[:_MOST_PATTERNS]) + (", ..." if len(patterns) > _MOST_PATTERNS else "")
    text = f"{len(alike)} tensors ({size >> 20} MiB) seem to be the same on all {len(samples)} ranks, each of which saves its own"
    hint = f"replicated=[{given}] saves them once, and so does DDP's module itself in the stead of what it wraps"
    return f"{text} (hint: {hint})"


def _is_own(leaf: Leaf) -> bool:
    if leaf.placement != "local" or leaf.part is not None or leaf.size == 0:
        return False
    torch = torch_module()
    # Generators are each rank's, whatever they begin with; an array that is not dense is not sampled.
    is_sampled = leaf.address is not None or (torch is not None and isinstance(leaf.source, torch.Tensor))
    return is_sampled and not leaf.path.startswith("rng")


def _patterns(alike: set[str], own: set[str], prefix: str = "") -> set[str]:
    """Patterns that mean those names, and none of the others that this rank has."""
    parts: dict[str, set[str]] = {}
    for name in own:
        part, dot, _ = name[len(prefix) :].partition(".")
        parts.setdefault(f"{prefix}{part}{dot}", set()).add(name)
    found: set[str] = set()
    for part, names in parts.items():
        if not part.endswith("."):
            found |= names & alike
        elif names <= alike:
            found.add(f"{part}*")
        elif names & alike:
            found |= _patterns(names & alike, names, part)
    return found
