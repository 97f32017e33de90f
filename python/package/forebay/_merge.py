"""The trees of all ranks that saved, as one by names: for ranks that hold other parts of the state, such as stages of
another pipeline.

What goes by names: values of dicts whose keys are text, tensors of modules, and state of optimizers that was saved by
parameters' names. What only one rank has, or several have alike, is taken. What several have under one name and not
alike is one rank's own; so is what goes by number (an optimizer's own `state_dict`, a dict with other keys), since a
number means another parameter on each rank. A mark stands in its place, which is refused when it is wanted. Pure; the
tree itself is described in docs/formats-checkpoint.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, Optional

from ._errors import CheckpointMismatch
from ._keyed import is_data, pairs_of
from ._objects import is_stateful
from ._wrappers import bare

Node = Any
Same = Callable[[str, str], bool]
"""Whether two tensors of the step hold the same."""

Path = tuple[Any, ...]
"""The keys that lead to a place, after what the root is called."""

Known = Callable[[Any, Node, Path], Optional[tuple[str, Any]]]
"""How the state of a live object is taken, for which that node was saved at that place, and the state; None where nothing
of it is wanted."""

Keeps = Callable[[str], bool]
"""Whether an optimizer keeps an option of that name, whatever was saved."""

Groups = list[tuple[list[str], Node]]
"""Of each group of an optimizer the parameters' names and the options."""

MARK = "differs"
"""The tag of what ranks have that is not alike. No step holds it."""

_BY_NUMBER = "a number means another parameter on each rank: save the optimizer itself, in one state beside its module"
_OWN = "leave it out with only=, or restore as many ranks with the parts that saved"


def _keeps_none(option: str) -> bool:
    return False


def merged(trees: list[tuple[int, Node]], same: Same, first_counts: bool = False) -> tuple[Node, list[str]]:
    """One tree of those of several ranks, and where they differ. With `first_counts` the first one's stands there."""
    merger = _Merger(same, first_counts)
    return merger.merge(trees, "state"), merger.differing


def asked(
    node: Node, live: Any, known: Known, left: list[Path], keeps: Keeps = _keeps_none, path: Path = ("state",)
) -> Node:
    """What a live state asks for of a tree, by its own names; what it leaves is noted in `left`. Options that optimizers keep may
    have been any."""
    tag = tag_of(node)
    if tag == "object":
        if node["k"] not in ("module", "optimizer") or not is_stateful(live):
            return node
        return {**node, "v": _asked_of_object(node["v"], known(live, node, path), left, keeps, path)}
    if is_data(node):
        return node
    if pairs_of(node) is not None:
        if not isinstance(live, dict):
            return _asked_of_object(node, known(live, node, path), left, keeps, path) if is_stateful(live) else node
        groups = groups_of(node) if _has_groups(live) else None
        if groups is not None:
            return _asked_of_optimizer(node, groups, live, left, _keeps_none, path)
        chosen = _chosen(node, live, left, path)
        items = []
        for key, value in node["v"]:
            if type(key) is not str:
                items.append([key, value])
            elif key in chosen:
                items.append([key, asked(value, live[chosen[key]], known, left, keeps, (*path, key))])
        return {**node, "v": items}
    parts = node if isinstance(node, list) else node["v"] if tag == "tuple" else []
    if not parts or not isinstance(live, (list, tuple)) or len(live) != len(parts):
        return node
    found = [
        asked(part, value, known, left, keeps, (*path, index)) for index, (part, value) in enumerate(zip(parts, live))
    ]
    return found if isinstance(node, list) else {**node, "v": found}


def left_by_all(left: Sequence[Sequence[Path]]) -> list[Path]:
    """What every rank leaves, from what each of them does: the place itself, or one that it lies in."""
    known = [set(paths) for paths in left]
    found = sorted({path for paths in left for path in paths}, key=shown)

    def leaves(paths: set[Path], path: Path) -> bool:
        return any(path[:length] in paths for length in range(1, len(path) + 1))

    return [path for path in found if all(leaves(paths, path) for paths in known)]


def shown(path: Path) -> str:
    """A place, for people."""
    root, *keys = path
    return str(root) + "".join(f"[{key!r}]" for key in keys)


def _chosen(node: Node, names: Iterable[Any], left: list[Path], path: Path) -> dict[str, Any]:
    """Which of the live names each of a dict's keys is, if any: the same, or one that differs by wrappers' names."""
    saved = [key for key, _ in node["v"] if type(key) is str]
    chosen = {key: key for key in set(saved) & set(names)}
    others = {bare(name): name for name in names if type(name) is str and name not in chosen}
    chosen.update({key: others[bare(key)] for key in saved if key not in chosen and bare(key) in others})
    left += [(*path, key) for key in saved if key not in chosen]
    return chosen


def _asked_of_object(
    node: Node, has: Optional[tuple[str, Any]], left: list[Path], keeps: Keeps, path: Path
) -> Node:
    if has is None:
        return node
    kind, live = has
    if kind == "module" and pairs_of(node) is not None:
        chosen = _chosen(node, live, left, path)
        return {**node, "v": [pair for pair in node["v"] if type(pair[0]) is not str or pair[0] in chosen]}
    groups = groups_of(node) if kind == "optimizer" else None
    return node if groups is None else _asked_of_optimizer(node, groups, live, left, keeps, path)


def _asked_of_optimizer(
    node: Node, groups: Groups, live: Any, left: list[Path], keeps: Keeps, path: Path
) -> Node:
    """Its groups are the live ones: each gets the options that all of its parameters had."""
    holding: dict[str, list[int]] = {}
    for index, (names, _) in enumerate(groups):
        for name in names:
            holding.setdefault(name, []).append(index)
    found = []
    for number, group in enumerate(live["param_groups"]):
        lacking = [name for name in group["params"] if name not in holding and name in live["state"]]
        if lacking:
            raise CheckpointMismatch(f"{shown(path)}: the checkpoint lacks {', '.join(map(repr, lacking[:5]))}")
        names = [name for name in group["params"] if name in holding]
        # One without parameters has no names; its options change nothing.
        among = [index for name in names for index in holding[name]] or ([number] if number < len(groups) else [])
        options = [groups[index][1] for index in dict.fromkeys(among)]
        differing = {differing_option(options[0], other, lambda *_: False, keeps) for other in options[1:]} - {None}
        if not options or differing:
            what = ", ".join(map(repr, names[:5])) or "no parameters"
            what += f": they differ in {', '.join(map(repr, sorted(filter(None, differing))))}" if differing else ""
            raise CheckpointMismatch(f"{shown(path)}: no one group of options was saved for the live group of {what}")
        beside = [["param_names", group["param_names"]]] if "param_names" in group else []
        found.append(_as_dict([["params", names], *options[0]["v"], *beside]))
    wanted = {name for group in live["param_groups"] for name in group["params"]}
    left += [(*path, name) for name in holding if name not in wanted]
    state = dict(node["v"])["state"]
    kept = {**state, "v": [pair for pair in state["v"] if type(pair[0]) is str and pair[0] in wanted]}
    return _as_dict([["state", kept], ["param_groups", found]])


def rename(tree: Node, name_of: Callable[[str], str]) -> None:
    """Gives a tree other names for its tensors, in place."""
    for node in _tensors(tree):
        node["n"] = name_of(node["n"])


def tensor_names(tree: Node) -> set[str]:
    """What a tree calls its tensors."""
    return {node["n"] for node in _tensors(tree)}


def _tensors(tree: Node) -> Iterator[Node]:
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            if "n" in node:
                yield node
            todo.append(node.get("v"))


def goes_by_number(kind: str) -> bool:
    """Whether an object's state of this kind names parameters by their numbers."""
    return kind == "optimizer-own"


def is_numbered(pairs: Iterable[Sequence[Any]]) -> bool:
    """Whether tensors of a dict with these keys and values lie at keys that are no text."""
    return any(type(key) is not str and tensor_names(value) for key, value in pairs)


def numbered(node: Node, path: Path = ("state",)) -> Iterator[Path]:
    """The places of a tree that go by numbers of parameters: an optimizer's own state, and dicts with such keys."""
    tag = tag_of(node)
    if tag == "object":
        if goes_by_number(node["k"]):
            yield path
        yield from numbered(node["v"], path)
    elif (pairs := pairs_of(node)) is not None:
        if is_numbered(pairs):
            yield path
        for key, value in pairs:
            yield from numbered(value, (*path, key))
    elif isinstance(node, list) or tag == "tuple":
        for index, value in enumerate(node if isinstance(node, list) else node["v"]):
            yield from numbered(value, (*path, index))


def tag_of(node: Node) -> Optional[str]:
    """What an object of the tree is; None for plain JSON."""
    return node.get("t") if isinstance(node, dict) else None


def refuse_mark(node: Node) -> None:
    """Raises `CheckpointMismatch` for what ranks have that is not alike."""
    if tag_of(node) == MARK:
        ranks = " and ".join(map(str, node["ranks"]))
        text = f"{node['path']}: what ranks {ranks} saved differs, and the parts of the state are other ones here"
        raise CheckpointMismatch(f"{text} (hint: {node['hint']})")


class _Merger:
    def __init__(self, same: Same, first_counts: bool) -> None:
        self._same = same
        self._first_counts = first_counts
        self.differing: list[str] = []

    def merge(self, held: list[tuple[int, Node]], path: str) -> Node:
        """One node of those that ranks have in one place."""
        first = held[0][1]
        if all(self._is_same(first, other) for _, other in held[1:]):
            return first
        nodes = [node for _, node in held]
        tags = {tag_of(node) for node in nodes}
        if tags <= {"dict"} or tags <= {"odict"} or _are_named(nodes):
            if all(groups_of(node) is not None for node in nodes):
                return self._optimizer(held, path)
            items = [(rank, node["v"]) for rank, node in held]
            if all(type(key) is str for _, pairs in items for key, _ in pairs):
                return {**first, "v": self._items(items, path)}
        elif tags == {"object"} and all(node["k"] == first["k"] for node in nodes):
            states = [(rank, node["v"]) for rank, node in held]
            if first["k"] == "module":
                tree = self.merge(states, path)
                return tree if tag_of(tree) == MARK else {**first, "v": tree}
            if first["k"] == "optimizer" and all(groups_of(state) is not None for _, state in states):
                return {**first, "v": self._optimizer(states, path)}
        elif all(isinstance(node, list) for node in nodes) or tags == {"tuple"}:
            lists = [(rank, node if isinstance(node, list) else node["v"]) for rank, node in held]
            if all(len(parts) == len(lists[0][1]) for _, parts in lists):
                found = [
                    self.merge([(rank, parts[index]) for rank, parts in lists], f"{path}[{index}]")
                    for index in range(len(lists[0][1]))
                ]
                return found if isinstance(first, list) else {**first, "v": found}
        return self._differs(held, path)

    def _items(self, held: list[tuple[int, Node]], path: str) -> Node:
        values: dict[str, list[tuple[int, Node]]] = {}
        for rank, pairs in held:
            for key, value in pairs:
                values.setdefault(key, []).append((rank, value))
        return [[key, self.merge(having, f"{path}[{key!r}]")] for key, having in values.items()]

    def _optimizer(self, held: list[tuple[int, Node]], path: str) -> Node:
        """Groups whose options are the same become one, of the parameters of all."""
        states = [(rank, dict(node["v"])["state"]) for rank, node in held]
        found: list[tuple[Node, list[str]]] = []
        for _, node in held:
            # Groups of one rank stay apart.
            free = list(range(len(found)))
            taken = {name for _, names in found for name in names} if self._first_counts else set()
            for names, options in groups_of(node) or []:
                at = next((index for index in free if self._is_same(found[index][0], options)), None)
                if at is None:
                    found.append((options, []))
                    at = len(found) - 1
                else:
                    free.remove(at)
                found[at][1].extend(name for name in names if name not in taken and name not in found[at][1])
        groups = [_as_dict([["params", names], *options["v"]]) for options, names in found]
        return _as_dict([["state", self.merge(states, path)], ["param_groups", groups]])

    def _differs(self, held: list[tuple[int, Node]], path: str) -> Node:
        rank, first = held[0]
        self.differing.append(path)
        if self._first_counts:
            return first
        other = next(other for other, node in held[1:] if not self._is_same(first, node))
        is_dict = pairs_of(first) is not None and not is_data(first)
        by_number = is_dict or (tag_of(first) == "object" and goes_by_number(first["k"]))
        return {"t": MARK, "path": path, "ranks": [rank, other], "hint": _BY_NUMBER if by_number else _OWN}

    def _is_same(self, one: Node, other: Node) -> bool:
        return same_nodes(one, other, self._same)


def same_nodes(one: Node, other: Node, same: Same) -> bool:
    """Whether two parts of trees say the same, and tensors that they name hold it."""
    todo = [(one, other)]
    while todo:
        one, other = todo.pop()
        if one is other:
            continue
        if type(one) is not type(other):
            return False
        if isinstance(one, list):
            if len(one) != len(other):
                return False
            todo += zip(one, other)
        elif not isinstance(one, dict):
            if one != other:
                return False
        elif one.keys() != other.keys():
            return False
        elif "n" in one and one["n"] != other["n"] and not same(one["n"], other["n"]):
            return False
        else:
            todo += [(one[key], other[key]) for key in one if key != "n"]
    return True


def differing_option(one: Node, other: Node, same: Same, keeps: Keeps = _keeps_none) -> Optional[str]:
    """The first option of two groups that is not the same, if any, and that an optimizer does not keep; 0 and 0.0 are."""
    options, others = ({str(key): value for key, value in group["v"]} for group in (one, other))
    for key in (name for name in [*options, *others] if not keeps(name)):
        if key not in options or key not in others:
            return key
        if options[key] != others[key] and not same_nodes(options[key], others[key], same):
            return key
    return None


def groups_of(state: Node) -> Optional[Groups]:
    """The parameters' names and the options of each group of an optimizer's state, where that goes by names."""
    pairs = state["v"] if tag_of(state) in ("dict", "odict") else []
    items = dict(pairs) if all(type(key) is str for key, _ in pairs) else {}
    if items.keys() != {"state", "param_groups"} or not isinstance(items["param_groups"], list):
        return None
    groups = []
    for group in items["param_groups"]:
        pairs = group["v"] if tag_of(group) == "dict" else []
        names = next((value for key, value in pairs if key == "params"), None)
        if not isinstance(names, list) or not all(type(name) is str for name in names):
            return None
        # What torch calls them beside, in optimizers that were given names, says nothing more.
        groups.append((names, _as_dict([pair for pair in pairs if pair[0] not in ("params", "param_names")])))
    return groups if tag_of(items["state"]) == "dict" else None


def _has_groups(live: dict[Any, Any]) -> bool:
    """Whether a dict is what torch's `get_optimizer_state_dict` gives."""
    groups = live.get("param_groups")
    if not isinstance(live.get("state"), dict) or not isinstance(groups, list):
        return False
    return all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)


def _are_named(nodes: list[Node]) -> bool:
    """Whether all are of one kind of defaultdict, whose keys are names."""
    kinds = {(tag_of(node), node["f"] if tag_of(node) == "defaultdict" else None) for node in nodes}
    return len(kinds) == 1 and tag_of(nodes[0]) == "defaultdict" and not all(map(is_data, nodes))


def _as_dict(pairs: list[list[Node]]) -> Node:
    return {"t": "dict", "v": pairs}
