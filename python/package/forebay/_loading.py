"""Finding a step that is whole and reading it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import Any, Callable, Iterator, Optional, Protocol, TypeVar

from . import _asked, _native
from . import _options as options
from ._choice import HINT, Choice
from ._errors import (
    CheckpointConflict,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    warn,
)
from ._garbage import uncollected
from ._grammar import check_tree
from ._keyed import KEYED
from ._merge import MARK, Path, left_by_all, merged, rename, shown, tag_of, tensor_names
from ._ranks import Ranks, use_together
from ._parts import named_parts
from ._place import Placer
from ._tensors import IN_PART, NOBODY, Node, Tensors
from ._together import read_shared
from ._unflatten import Builder
from ._wrappers import bare

T = TypeVar("T")

MOST_DELETED = 10
"""Steps that may be deleted while they are read before it is an error."""


def default_threads() -> int:
    """Threads that copy: up to four, as the processors allow."""
    return min(4, len(os.sched_getaffinity(0)))


def restore_threads(ranks: Optional[int] = None) -> int:
    """Threads that bring a state back, beside which nothing trains: up to 16, as the processors allow where so many ranks of
    this host do the same; by default as many as torchrun says."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = ranks or (int(said) if said.isdecimal() else 0) or 1
    return max(default_threads(), min(16, len(os.sched_getaffinity(0)) // ranks))


def newest_steps(url: str, also_superseded: bool = False) -> list[tuple[int, int, str]]:
    """Every step that counts as (step, incarnation, attempt), newest first."""
    return _find_steps(url, also_superseded)[1]


class NoStep(CheckpointNotFound):
    """The place has no such step: it is there, or will be with the first save."""

    # Shown as what is documented.
    __module__, __qualname__ = CheckpointNotFound.__module__, CheckpointNotFound.__qualname__


def _find_steps(url: str, also_superseded: bool) -> tuple[int, list[tuple[int, int, str]]]:
    """The highest number that a start has, and what `newest_steps` gives."""
    newest, listed = _native.find_steps(url)
    counts = [entry[:3] for entry in reversed(listed) if also_superseded or not entry[4]]
    return newest, counts


def with_step(
    url: str,
    step: Optional[options.StepName],
    ranks: Optional[Ranks],
    use: Callable[[_native.Step], T],
    note_newest: Callable[[int], None] = lambda number: None,
    note_damaged: Callable[[Sequence[str]], None] = lambda damaged: None,
) -> T:
    """Calls `use` with the step asked for (also one that another start saved again, where its start is named), or with
    the newest one that is whole on every rank.

    Raises `CheckpointCorrupt` when the step asked for is damaged, or all of them are, and `CheckpointNotFound` when
    there is none. An older step than the newest is used with a warning only. What is deleted while it is read, as
    retention does beside a job that saves, is not damaged: what is there instead is looked for. The highest number that a
    start had when the step that is used was looked for is told by `note_newest`, what is wrong with newer ones by `note_damaged`.
    """
    asked = "" if step is None else f" {step}"
    committed: list[int] = []
    step, start = options.step_name(step)

    def look() -> list[tuple[int, int, str]]:
        list_all = partial(_find_steps, url, start is not None)
        number, found = list_all() if ranks is None else ranks.first("list the steps", list_all)
        note_newest(number)
        committed[:] = sorted({at for at, _, _ in found})
        return [(at, of, name) for at, of, name in found if step in (None, at) and start in (None, of)]

    try:
        found = look()
    except CheckpointNotFound as error:
        # A directory is made by the first save, and may be by now: all ranks heard that it was not there. A bucket is not.
        if url.startswith("file://"):
            raise NoStep(str(error)) from error
        raise
    if not found:
        hint = f" (hint: {len(committed)} steps are committed there, the last {committed[-1]})" if committed else ""
        raise NoStep(f"{url} holds no step{asked}{hint}")
    damaged: list[str] = []
    touched: list[str] = []
    deleted = 0
    while found:
        entry = number, incarnation, attempt = found.pop(0)
        opened: Optional[_native.Step] = None
        try:
            with telling_what_was_read(touched):
                opened = use_together(ranks, "open a step", partial(_native.open_step, url, number, incarnation, attempt))
                used = use_together(ranks, "read a step", partial(use, opened))
        except CheckpointCorrupt as error:
            touched += [] if opened is None else [str(error)]
            with telling_what_was_read(touched):
                there = look()
            if entry in there:
                if step is not None:
                    raise
                damaged.append(str(error))
            elif deleted == MOST_DELETED or not there:
                text = f"{url}: step {number} was deleted while it was read, and so were {deleted} before it"
                told = f"; {IN_PART}" if touched else ""
                raise CheckpointNotFound(f"{text} (hint: a larger `keep`){told}") from error
            else:
                found, damaged, deleted = there, [], deleted + 1
            continue
        if damaged:
            text = f"{url}: step {number} is used instead of a newer one that is damaged: {'; '.join(damaged)}"
            warn(text)
            note_damaged(damaged)
        return used
    raise CheckpointCorrupt(f"{url} holds no step that is whole: {'; '.join(damaged)}")


@contextlib.contextmanager
def telling_what_was_read(damaged: Sequence[str]) -> Iterator[None]:
    """Has an error say, too, that copies were read before which are `damaged`: the state may hold anything of them."""
    try:
        yield
    except CheckpointCorrupt:
        raise
    except CheckpointError as error:
        if not damaged:
            raise
        text = str(error) if IN_PART in str(error) else f"{error}; {IN_PART}"
        raise type(error)(f"{text}. Before: {'; '.join(damaged)}") from error


@dataclasses.dataclass
class _Tree:
    """A state as it was saved."""

    node: Node
    rank: int
    """Whose tensors it names."""
    left: Optional[list[Path]] = None
    """Where it is of all ranks: what is there and not asked for, to be noted. None where it is one rank's."""


@dataclasses.dataclass
class _Plan:
    """What is to be read of a step, and where it goes."""

    tensors: Tensors
    builder: Builder
    placer: Optional[Placer]
    tree: Node
    generators: Node = None


class Planned(Protocol):
    """Anything that wants tensors."""

    tensors: Tensors


P = TypeVar("P", bound=Planned)


def read_planned(step: _native.Step, ranks: Optional[Ranks], plan: Callable[[], P]) -> P:
    """Makes a plan and reads what it wants.

    What more than one rank wants of the store is read once, and goes to all hosts that want it; so does what lies in another
    host's memory. All meet once all of them have read: none changes anything else before.
    """

    def read_here() -> P:
        planned = plan()
        planned.tensors.read()
        return planned

    is_shared = ranks is not None and not ranks.alone and step.tier != "local"
    if ranks is None or not is_shared or (step.tier == "arena" and not ranks.are_spread):
        return use_together(ranks, "read tensors", read_here)
    made: list[P] = []

    def make() -> dict[str, Any]:
        made.append(plan())
        return {"commit": step.commit}

    words = ranks.gather_whole("plan a restore", make)
    if any(word["commit"] != step.commit for word in words):
        raise CheckpointConflict(f"step {step.step} was saved again, and ranks read both (hint: load it again)")
    read_shared(step, ranks, made[0].tensors)
    return made[0]


@uncollected
def load_step(
    step: _native.Step,
    into: Any,
    allow_pickle: bool,
    threads: int,
    ranks: Optional[Ranks] = None,
    with_rng: bool = False,
    choice: Optional[Choice] = None,
    are_alike: bool = False,
) -> tuple[Any, Optional[dict[str, Any]]]:
    """The state of a step, put in place into `into` if that is given, and its random number generators.

    Those are None where the step has none of this rank's or they are not asked for. What each rank has of its own is
    taken from the rank of the same number, modulo how many saved, or of rank 0 where all are to be alike; where that does
    not fit on every rank, all goes by names. Of `into` what is chosen is put in place.
    """

    choice = choice or Choice()
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    source = 0 if are_alike else rank % step.world_size
    tried: list[Placer] = []

    def plan(tree: _Tree) -> _Plan:
        # A generator's state is one rank's; a job of another size has other ranks.
        has_rng = with_rng and step.world_size == world_size
        generators = parse(step, (has_rng and _extra(step, "rng", source)) or "null", source)
        rename(generators, Tensors(step, threads, source).full_name)
        tensors = Tensors(step, threads, tree.rank)
        builder = Builder(tensors, allow_pickle)
        # Of a job of another size, what a rank has nothing of may be what another one had.
        fills = tree.left is None and step.world_size == world_size
        placer = None if into is None else Placer(builder, into, choice, fills)
        if placer is not None:
            tried.append(placer)
            placer.plan(tree.node, tree.left)
        wanted = tree.node if placer is None else placer.needed
        builder.refuse_pickles(wanted)
        tensors.want(wanted)
        tensors.want(generators)
        return _Plan(tensors, builder, placer, tree.node, generators)

    def fit() -> _Plan:
        if into is None:
            return plan(_Tree(*whole_tree(step, source)))
        return _fitting(step, ranks, source, plan, choice)

    try:
        found = read_planned(step, ranks, fit)
    except BaseException:
        for placer in tried:
            placer.drop()
        raise
    if found.placer is not None:
        found.placer.apply()
        choice.note(found.placer.missing, found.placer.unexpected, tells=rank == 0)
    state = found.builder.build(found.tree) if found.placer is None else into
    return state, found.builder.build(found.generators)


@uncollected
def load_weights(
    step: _native.Step,
    model: Any,
    name: Optional[str],
    choice: Choice,
    allow_pickle: bool,
    threads: int,
    ranks: Optional[Ranks] = None,
) -> None:
    """Puts the weights of one module of a step into `model`, in place, and reads nothing else."""

    def plan(tree: _Tree) -> _Plan:
        modules = dict(_modules(tree.node, ""))
        node = _find(tree.node, name) if name is not None else None
        if name is None and len(modules) == 1:
            (node,) = modules.values()
        if name is None and not modules:
            # As Lightning keeps a module's weights.
            node = _find(tree.node, "state_dict")
        if node is None:
            known = ", ".join(repr(found) for found in modules) or "none"
            what = f"no module or dict {name!r}" if name is not None else "not one module alone"
            raise CheckpointMismatch(f"step {step.step} holds {what} (hint: name= says which; its modules: {known})")
        tensors = Tensors(step, threads, tree.rank)
        builder = Builder(tensors, allow_pickle)
        placer = Placer(builder, model, choice)
        placer.plan_model(node, tree.left)
        builder.refuse_pickles(placer.needed)
        tensors.want(placer.needed)
        return _Plan(tensors, builder, placer, tree.node)

    def called(tree: Node) -> str:
        return next((found for found, _ in _modules(tree, "")), "") if name is None else name

    source = 0 if ranks is None else ranks.rank % step.world_size
    placer = read_planned(step, ranks, lambda: _fitting(step, ranks, source, plan, choice, called)).placer
    if placer is not None:
        placer.apply()
        choice.note(placer.missing, placer.unexpected, tells=ranks is None or ranks.rank == 0)


def load_rest(step: _native.Step, skipped: Sequence[str], rank: int = 0, allow_pickle: bool = False) -> dict[str, Any]:
    """Of a state that is a dict, as a rank of the saving job had it, what has other keys than those."""
    tree = state_tree(step, rank)
    if not isinstance(tree, dict) or tree["t"] != "dict":
        raise CheckpointCorrupt(f"step {step.step}: its state is no dict")
    rest = {"t": "dict", "v": [pair for pair in tree["v"] if pair[0] not in skipped]}
    tensors = Tensors(step, default_threads(), rank)
    tensors.want(rest)
    tensors.read()
    state: dict[str, Any] = Builder(tensors, allow_pickle).build(rest)
    return state


def _modules(node: Node, name: str) -> Iterator[tuple[str, Node]]:
    if isinstance(node, dict) and node.get("t") == "object":
        if node["k"] == "module":
            yield name, node
        return
    for below, part in named_parts(node, name):
        yield from _modules(part, below)


def _find(node: Node, name: str) -> Optional[Node]:
    """The module or dict of that name."""
    todo = [("", node)]
    while todo:
        found, node = todo.pop()
        tag = node.get("t") if isinstance(node, dict) else None
        if found == name and (tag in KEYED or (tag == "object" and node["k"] == "module")):
            return node
        todo += named_parts(node, found)
    return None


def _fitting(
    step: _native.Step,
    ranks: Optional[Ranks],
    source: int,
    plan: Callable[[_Tree], _Plan],
    choice: Choice,
    within: Callable[[Node], str] = lambda tree: "",
) -> _Plan:
    """A plan by what the rank `source` saved, with a warning of what ranks had not alike where others are there now; where that
    does not fit on every rank, by names from what all saved.

    By names each rank takes what it asks for, and all together everything, unless a part alone is wanted, by names within the
    part of the tree that `within` names. Where the two need not be alike, what is missing in what one rank saved is none that
    others did. Raises `CheckpointInvalid` where the ranks do not choose alike.
    """
    made: list[_Plan] = []
    failure: Optional[CheckpointMismatch] = None

    def try_own() -> dict[str, Any]:
        nonlocal failure
        try:
            planned = plan(_Tree(state_tree(step, source), source))
            if planned.placer is not None and step.world_size != world_size:
                for place in meant_otherwise(step, planned.placer.numbered):
                    raise CheckpointMismatch(f"{place} {MEANT_OTHERWISE}")
            missing = [] if planned.placer is None else planned.placer.missing
            if missing and step.world_size > 1 and _others_have(step, missing, choice, within):
                raise CheckpointMismatch(f"what rank {source} saved lacks {missing[0]!r}, which others have")
            made.append(planned)
        except CheckpointMismatch as error:
            failure = error
        return {"fits": failure is None, "choice": choice.told()}

    is_alone = ranks is None or ranks.alone
    world_size = 1 if ranks is None else ranks.world_size
    words = [try_own()] if ranks is None else ranks.gather("compare the state", try_own)
    _asked.refuse_unlike([word["choice"] for word in words])
    if all(word["fits"] for word in words):
        if ranks is None or ranks.rank == 0:
            _tell_taken(step, world_size, within, choice)
        return made.pop()
    if failure is not None and is_alone and step.world_size == 1:
        raise failure
    left: list[Path] = []
    made.clear()

    def try_names() -> dict[str, Any]:
        made.append(plan(_Tree(_merged(step, range(step.world_size))[0], NOBODY, left)))
        return {"left": left}

    words = [try_names()] if ranks is None else ranks.gather("look for names", try_names)
    paths = [[tuple(path) for path in word["left"] if choice.means(_name_of(path))] for word in words]
    nobodys = left_by_all(paths)
    if nobodys and choice.only is None and choice.strict:
        text = f"the state lacks what was saved, on every rank: {', '.join(map(shown, nobodys[:5]))}"
        raise CheckpointMismatch(f"{text} ({HINT})")
    found = made.pop()
    if found.placer is not None and choice.only is None:
        found.placer.unexpected += map(_name_of, nobodys)
    return found


def _name_of(path: Sequence[Any]) -> str:
    """What is at a place, as patterns name it."""
    return ".".join(map(str, path[1:]))


def _others_have(step: _native.Step, missing: Sequence[str], choice: Choice, within: Callable[[Node], str]) -> bool:
    """Whether any rank saved what has one of these names."""
    tree = _merged(step, range(step.world_size), first_counts=True)[0]
    root = within(tree)
    prefix = f"{root}." if root else ""
    known = {bare(name.removeprefix(prefix)) for name in _names(tree, "")}
    return any(bare(one) in known for name in missing for one in (name, choice.saved_name(name)))


def _names(node: Node, name: str) -> Iterator[str]:
    """The names of all that a tree has."""
    yield name
    if tag_of(node) == "object":
        node = node["v"]
    for below, part in named_parts(node, name):
        yield from _names(part, below)


def _tell_taken(
    step: _native.Step, world_size: int, within: Callable[[Node], str], choice: Choice
) -> None:
    """Warns of what each rank that saved had as its own and not as others, where other ranks take it by their numbers."""
    saved = step.world_size
    is_alike = all(_extra(step, "state", rank) is None for rank in range(1, saved))
    if saved == world_size or (is_alike and all("@" not in name for name, _, _, _ in step.tensors())):
        return
    tree = _merged(step, range(saved))[0]
    root = within(tree)
    marks = [(name.removeprefix(root).removeprefix("."), path) for name, path in _marks(tree, "") if _lies_in(name, root)]
    places = [path for name, path in marks if choice.means(name)]
    if places:
        named = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
        took = "each takes what the rank of its number had"
        took += "" if world_size < saved else f" modulo {saved}"
        text = f"step {step.step}: the {saved} ranks that saved differ in {named}; {world_size} restore, and {took}"
        warn(f"{text} (hint: leave it out with only=, and set it for as many ranks as there are now)")


def _marks(node: Node, name: str) -> Iterator[tuple[str, str]]:
    """The names of what ranks have not alike, in a tree of all, and its places."""
    tag = tag_of(node)
    if tag == MARK:
        yield name, node["path"]
    elif tag == "object":
        yield from _marks(node["v"], name)
    else:
        for below, part in named_parts(node, name):
            yield from _marks(part, below)


def _lies_in(name: str, root: str) -> bool:
    return not root or f"{name}.".startswith(f"{root}.")


MEANT_OTHERWISE = "goes by numbers, of which ranks mean other parameters by each: that they fit is chance"


def meant_otherwise(step: _native.Step, places: Sequence[str]) -> list[str]:
    """Which of the places that go by numbers of parameters differ between the ranks that saved."""
    if not places or all("@" not in name for name, _, _, _ in step.tensors()):
        return []
    differing = _merged(step, range(step.world_size), first_counts=True)[1]
    return [place for place in places if any(one.startswith(place) or place.startswith(one) for one in differing)]


def whole_tree(step: _native.Step, rank: int, tells: bool = True, tells_all: bool = False) -> tuple[Node, int]:
    """The state as a rank of the saving job had it, with what only others had; and whose tensors that names. Where there is
    such, or in any case with `tells_all`, a warning tells what they had otherwise than that rank."""
    tree = state_tree(step, rank)
    if step.world_size == 1:
        return tree, rank
    named = tensor_names([tree, parse(step, _extra(step, "rng", rank) or "null", rank)])
    has_all = all(name.partition("@")[0] in named for name, _, _, _ in step.tensors())
    if has_all and not tells_all:
        return tree, rank
    others = [other for other in range(step.world_size) if other != rank]
    if has_all:
        # The others that have the same tree have the same tensors, but for their own: one of them stands for those.
        own, known = tensor_names(tree), {name for name, _, _, _ in step.tensors()}
        alike = [other for other in others if not _has_own(step, other, own, known)]
        others = [other for other in others if other not in set(alike[1:])]
    whole, differing = _merged(step, [rank, *others], first_counts=True)
    if differing and (tells or tells_all):
        text = f"step {step.step}: ranks differ in {', '.join(differing[:5])}, of which rank {rank}'s is given"
        warn(text)
    return (tree, rank) if has_all else (whole, NOBODY)


def _has_own(step: _native.Step, rank: int, names: Iterable[str], known: Container[str]) -> bool:
    """Whether a rank has a tree of its own, or tensors of its own under names in that of all."""
    return _extra(step, "state", rank) is not None or any(extra_name(name, rank) in known for name in names)


def _merged(step: _native.Step, ranks: Sequence[int], first_counts: bool = False) -> tuple[Node, list[str]]:
    tensors = Tensors(step, 1, NOBODY)
    own = tensors.own()
    named: dict[str, set[str]] = {}
    made: set[tuple[str, tuple[str, ...]]] = set()
    trees: list[tuple[int, Node]] = []
    parts: dict[bytes, Node] = {}
    for rank in ranks:
        text = _state_text(step, rank)
        tree = None
        if text not in named:
            tree = parse(step, text, rank, tensors)
            named[text] = tensor_names(tree)
        # Ranks whose trees say the same, and none of whose tensors there are their own, have one: it is looked at once.
        key = text, tuple(name for name in own.get(str(rank), ()) if name.rpartition("@")[0] in named[text])
        if key not in made:
            made.add(key)
            tree = parse(step, text, rank, tensors) if tree is None else tree
            rename(tree, tensors.of(rank).full_name)
            _share_parts(tree, parts)
            trees.append((rank, tree))
    return merged(trees, tensors.are_same, first_counts)


def _share_parts(tree: Node, known: dict[bytes, Node]) -> None:
    """Has a tree share what other ones have alike: of a thousand, each with a place of its own in its data, most is the same."""
    if tag_of(tree) == "dict":
        for pair in tree["v"]:
            digest = hashlib.sha256(json.dumps(pair[1]).encode()).digest()
            pair[1] = known.setdefault(digest, pair[1])


def state_tree(step: _native.Step, rank: int) -> Node:
    """The state as a rank of the saving job had it."""
    return parse(step, _state_text(step, rank), rank)


def _state_text(step: _native.Step, rank: int) -> str:
    text = _extra(step, "state", rank) or _extra(step, "state", 0)
    if text is None:
        raise CheckpointCorrupt(f"step {step.step} has no state")
    return text


def extra_name(name: str, rank: int) -> str:
    """What an extra of a rank is called in the step."""
    return f"{name}@{rank}" if rank else name


def _extra(step: _native.Step, name: str, rank: int) -> Optional[str]:
    return step.extra(extra_name(name, rank))


def parse(step: _native.Step, text: str, rank: int, known: Optional[Tensors] = None) -> Node:
    """The tree of an extra of a rank; of a step whose tensors are known they are not listed again."""
    tensors = Tensors(step, 1, rank) if known is None else known.of(rank)
    try:
        tree = json.loads(text)
        check_tree(tree, lambda name: tensors.entry(name)[1:])
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"step {step.step}: its state does not parse: {error}") from error
    return tree
