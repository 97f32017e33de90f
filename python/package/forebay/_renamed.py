"""A tree whose parts have the names of the live state, where that calls them otherwise (`rename=`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, Optional

from ._choice import Choice
from ._errors import CheckpointInvalid
from ._keyed import is_data, pairs_of
from ._leaf import torch_module
from ._merge import groups_of, tag_of
from ._parts import join

Node = Any


class Renamer:
    """Gives a tree the names that a state has; `names_of` tells those of a module's tensors, or an optimizer's parameters."""

    def __init__(self, choice: Choice, names_of: Callable[[Any], Optional[Iterable[str]]]) -> None:
        self._choice = choice
        self._names_of = names_of

    def renamed(self, node: Node, live: Any, name: str = "", saved: str = "") -> Node:
        """What lies in the state under `name`, and in the checkpoint under `saved`. A part is looked up where its container
        lies in the checkpoint, and has another name there only where `rename` gives one that lies in it."""
        tag, torch = tag_of(node), torch_module()
        if isinstance(node, list) or tag == "tuple":
            return self._sequence(node, live, name, saved)
        is_module = torch is not None and isinstance(live, torch.nn.Module)
        if tag == "object":
            if node["k"] == "module" and is_module and pairs_of(node["v"]) is not None:
                return {**node, "v": self._dict(node["v"], self._names_of(live) or (), name, saved)}
            if node["k"] == "optimizer" and groups_of(node["v"]) is not None:
                return {**node, "v": self._optimizer(node["v"], self._names_of(live) or (), name, saved)}
            return node
        if pairs_of(node) is None or is_data(node):
            return node
        if is_module:
            return self._dict(node, self._names_of(live) or (), name, saved)
        if not isinstance(live, dict):
            return node
        called = {key: self._called(key, name, saved) for key in live if type(key) is str}
        made = self._dict(node, called, name, saved)
        items = [
            [key, self.renamed(value, live[key], join(name, key), join(saved, called[key]))]
            if type(key) is str and key in called
            else [key, value]
            for key, value in made["v"]
        ]
        return {**made, "v": items}

    def _sequence(self, node: Node, live: Any, name: str, saved: str) -> Node:
        parts = node if isinstance(node, list) else node["v"]
        if not isinstance(live, (list, tuple)) or len(live) != len(parts):
            return node
        found = [
            self.renamed(part, value, join(name, str(index)), join(saved, str(index)))
            for index, (part, value) in enumerate(zip(parts, live))
        ]
        return found if isinstance(node, list) else {**node, "v": found}

    def _called(self, key: str, name: str, saved: str) -> str:
        """The key of something in the checkpoint, of its key in the state."""
        whole = join(name, key)
        found = self._choice.saved_name(whole)
        if found == whole:
            return key
        prefix = f"{saved}." if saved else ""
        if not found.startswith(prefix) or found == prefix:
            text = f"rename gives {found!r} for {whole!r}, which does not lie in {saved!r}"
            raise CheckpointInvalid(f"{text} (hint: a part is looked up where the dict or module that it is in lies)")
        return found[len(prefix) :]

    def _dict(self, node: Node, keys: Iterable[Any], name: str, saved: str) -> Node:
        """A dict of the tree by the live keys, and what none of them means by its own."""
        called = {key: self._called(key, name, saved) for key in keys if type(key) is str}
        values = {key: value for key, value in node["v"] if type(key) is str}
        found = [[key, values[there]] for key, there in called.items() if there in values]
        meant = {there for there in called.values() if there in values}
        # One whose own name now means another part is nobody's.
        rest = [
            [f"{key}~" if key in called else key, value] if type(key) is str else [key, value]
            for key, value in node["v"]
            if type(key) is not str or key not in meant
        ]
        return {**node, "v": [*found, *rest]}

    def _optimizer(self, node: Node, names: Iterable[str], name: str, saved: str) -> Node:
        """An optimizer's state by the names that parameters have now."""
        own = {self._called(key, join(name, "state"), join(saved, "state")): key for key in names}
        items = dict(node["v"])
        state = {**items["state"], "v": [[own.get(key, key), value] for key, value in items["state"]["v"]]}
        groups = [
            {
                **group,
                "v": [
                    [key, [own.get(called, called) for called in value] if key == "params" else value]
                    for key, value in group["v"]
                ],
            }
            for group in items["param_groups"]
        ]
        return {**node, "v": [["state", state], ["param_groups", groups]]}
