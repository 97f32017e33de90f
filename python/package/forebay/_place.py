"""A tree put in place into a live state.

The state is compared with the tree before anything of it is changed. Then its tensors are read straight into place where
their memory allows it, and everything else follows once all of them passed their checks: a restore that fails on damaged
bytes leaves tensors that hold anything, and all else as it was.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any, Callable, Optional

from ._choice import APART_HINT, HINT, SHAPE_HINT, Choice
from ._errors import CheckpointMismatch
from ._keyed import FACTORIES, KEYED, TAGS, is_data
from ._leaf import (
    PARTITIONED,
    array_dtype,
    copy_elements,
    dtensor_class,
    elements_at,
    local_parts,
    numpy_module,
    partitioned,
    refuse_meta,
    shape_of,
    torch_dtype,
    torch_module,
)
from ._merge import MARK, Path, asked, goes_by_number, is_numbered, refuse_mark, shown, tag_of
from ._modules import Module, is_extra, takes_its_names_alone, unsaved_buffers
from ._objects import Pairs, give_state, is_stateful, state_of
from ._optimizers import names, tells_copies
from ._parts import differences, has_parts, is_empty, is_nothing, join, named_parts, torch_like
from ._place_optimizer import OptimizerPlacer, taken
from ._place_own import OwnPlacer
from ._renamed import Renamer
from ._tensors import IN_PART, Node
from ._unflatten import Builder
from ._wrappers import fitted


class Placer:
    """Plans how a tree goes into a live state, and then does it.

    `plan` changes nothing; it raises `CheckpointMismatch` at the first place where the two differ in shape. What is not
    chosen is left as it is, on both sides. Where it `fills`, what the state has nothing of yet (None, an empty dict or list)
    becomes what was saved there.
    """

    def __init__(self, builder: Builder, state: Any, choice: Choice, fills: bool = False) -> None:
        self._builder = builder
        self._tensors = builder.tensors
        self._state = state
        self._choice = choice
        self._only = choice.only
        self._is_within = False
        """Whether what is compared lies in something that is to be restored as a whole."""
        self._fills = fills
        self._unmatched = set(choice.patterns)
        self.missing: list[str] = []
        """What the state has and the tree lacks, by its names, where it need not."""
        self.unexpected: list[str] = []
        """What the tree has and the state lacks, by its names."""
        self.numbered: list[str] = []
        """Places of what was planned that go by numbers of parameters, which mean others on each rank of a job."""
        self.needed: list[Node] = []
        """Parts of the tree that `apply` builds."""
        self._pairs = Pairs(state, choice)
        self._optimizers = OptimizerPlacer(builder, self._pairs, choice, self._leaves, self.missing, self.unexpected)
        self._own = OwnPlacer(builder, self._pairs)
        self._places: dict[Any, tuple[Node, str]] = {}
        """What was planned to be put into memory, and where."""
        self._objects: list[tuple[str, Any, str, Node]] = []
        self._copies: list[Callable[[], Any]] = []
        self._in_place: dict[str, Callable[[Node, Any, str, str], None]] = {
            "tensor": self._place_tensor,
            "array": self._place_array,
            **dict.fromkeys(KEYED, self._place_items),
        }

    def plan(self, node: Node, left: Optional[list[Path]] = None) -> None:
        """Compares the tree with the live state. With `left`, a list, the tree may have more, which is noted there."""
        node = self._as_called(node)
        if left is not None:
            self._match_all(node, "")
            node = asked(node, self._state, self._known, left, self._choice.keeps_option)
        node = fitted(node, self._state, self._names_of, self._choice.strict)
        # A tensor or object at the root is its own place; anything immutable there could not be replaced.
        if self._place(node, self._state, "state", "") is not None:
            raise CheckpointMismatch("state: a value that cannot be changed in place")
        self._check_matched()
        self._own.check()

    def plan_model(self, node: Node, left: Optional[list[Path]] = None) -> None:
        """As `plan`, of a module's weights alone: the tree is a module's, or a dict of tensors."""
        node = self._as_called(node)
        if left is not None:
            self._match_all(node["v"] if node["t"] == "object" else node, "")
            node = asked(node, self._state, self._known, left, path=("model",))
        tree = node["v"] if node["t"] == "object" else fitted(node, self._state, self._names_of, self._choice.strict)
        self._give(self._place_module(tree, self._state, "model", ""), self._state, "module", "model")
        self._check_matched()

    def drop(self) -> None:
        """For a plan that comes to nothing: takes back what was made for it."""
        self._pairs.unmake()

    def _as_called(self, node: Node) -> Node:
        """The tree with the names that the state has."""
        return node if self._choice.rename is None else Renamer(self._choice, self._own_names).renamed(node, self._state)

    def _own_names(self, live: Any) -> Optional[Iterable[str]]:
        """The names of a module's tensors, or of an optimizer's parameters."""
        torch = torch_module()
        if not isinstance(live, torch.optim.Optimizer):
            return list(self._names_of(live))
        module = self._pairs.module_of(live)
        return None if module is None else [name for called in names(module).values() for name in called]

    def _names_of(self, module: Any) -> Any:
        return state_of(module, self._pairs)[1].keys()

    def _known(self, live: Any, node: Node, path: Path) -> Optional[tuple[str, Any]]:
        *around, name = (".".join(map(str, path[1:length])) for length in range(1, len(path) + 1))
        torch = torch_module()
        is_module = torch is not None and isinstance(live, torch.nn.Module)
        # An optimizer's state is made where there is none yet.
        is_wanted = is_module or self._wants_any(node, name) or any(map(self._wants, around))
        if not is_wanted:
            return None
        kind, state = taken(live, self._pairs, shown(path))
        return kind, self._optimizers.lessened(state, node, name) if kind == "optimizer" else state

    def _match_all(self, node: Node, name: str) -> None:
        """Notes which patterns name anything in a tree, of which the live state may lack that."""
        if self._choice.patterns:
            state = node["v"] if isinstance(node, dict) and node.get("t") == "object" else node
            for below, part in named_parts(state, name):
                self._wants(below)
                self._match_all(part, below)

    def _check_matched(self) -> None:
        if self._unmatched:
            hint = "hint: what is in a part of a module is named like 'model.head.*'"
            raise CheckpointMismatch(f"nothing is named like {', '.join(sorted(self._unmatched))} ({hint})")

    def _leaves(self, name: str) -> bool:
        """Whether what has that name is left out, with all that is in it."""
        matching = self._choice.leaves(name) if self._choice.without else ()
        self._unmatched.difference_update(matching)
        return bool(matching)

    def _wants(self, name: str) -> bool:
        """Whether what has that name is to be restored."""
        if self._leaves(name):
            return False
        if self._only is None:
            return True
        matching = {pattern for pattern in self._only if fnmatch.fnmatchcase(name, pattern)}
        self._unmatched -= matching
        return self._is_within or bool(matching)

    def _wants_any(self, node: Node, name: str) -> bool:
        """Whether anything in a tree is to be restored."""
        if self._leaves(name):
            return False
        if self._only is None or self._wants(name):
            return True
        if isinstance(node, dict) and node.get("t") == "object":
            node = node["v"]
            if self._wants(f"{name}."):
                return True
        elif is_data(node) and self._wants(f"{name}."):
            return True
        return any(self._wants_any(value, below) for below, value in named_parts(node, name))

    def apply(self) -> None:
        """Puts everything into place that was not read there; objects after what lies outside of them.

        Raises `CheckpointMismatch` where something of the state does not take what it is given, which says that the rest has
        it already.
        """
        states = [(path, value, kind, self._builder.build(node)) for path, value, kind, node in self._objects]
        states.sort(key=lambda entry: not entry[2].startswith("optimizer"))
        path = "state"
        try:
            for copy in self._copies:
                copy()
            for path, value, kind, state in states:
                give_state(value, kind, state, self._pairs)
        except Exception as error:
            raise CheckpointMismatch(f"{path}: it does not take the state that was saved: {error}; {IN_PART}") from error

    def _place(self, node: Node, live: Any, path: str, name: str) -> Optional[Callable[[], Any]]:
        """None where the live value is changed in place; else what gives the value to put in its stead."""
        if not self._wants_any(node, name):
            return None
        was = self._is_within
        # The name of a container means all that is in it.
        self._is_within = self._wants(name)
        try:
            return self._place_wanted(node, live, path, name)
        finally:
            self._is_within = was

    def _place_wanted(self, node: Node, live: Any, path: str, name: str) -> Optional[Callable[[], Any]]:
        tag = node.get("t") if isinstance(node, dict) else None
        if tag == MARK:
            # Refused once all else is found to fit.
            return self._later(node)
        # An empty dict or list that the program holds is filled.
        is_dict = isinstance(live, dict) and (tag in ("dict", "odict") or TAGS.get(type(live)) == tag)
        is_list = isinstance(node, list) and isinstance(live, list)
        if self._is_blank(live) and not is_dict and not is_list:
            return self._later(self._new(node, path, name))
        if tag == "object":
            if not is_stateful(live):
                raise _mismatch(path, "an object with a state", live)
            self._place_object(node, live, path, name)
            return None
        if tag in KEYED and is_stateful(live) and not isinstance(live, dict):
            self._place_object(self._as_object(node, live, path), live, path, name)
            return None
        in_place = self._in_place.get(tag or "")
        if in_place is not None:
            in_place(node, live, path, name)
            return None
        if isinstance(node, list) or tag == "tuple":
            return self._place_sequence(node, live, path, name)
        if torch_like(live) or is_stateful(live):
            raise _mismatch(path, f"a value ({tag or type(node).__name__})", live)
        return self._later(node)

    def _later(self, node: Node) -> Callable[[], Any]:
        """What builds a part of the tree once its tensors were read."""
        self.needed.append(node)
        return lambda: self._builder.build(node)

    def _is_blank(self, live: Any) -> bool:
        """Whether something was yet to come there. A state that holds nothing at all is a mistake."""
        is_empty = live is None or (isinstance(live, (dict, list)) and not live)
        return self._fills and is_empty and live is not self._state

    def _new(self, node: Node, path: str, name: str) -> Node:
        """What is wanted of a part of the tree of which the state has nothing. Raises `CheckpointMismatch` for what no value
        can be made of."""
        tag = tag_of(node)
        if tag == "object":
            raise CheckpointMismatch(f"{path}: an object's state was saved, the state has no object there to take it")
        if tag == "tensor" and self._tensors.is_shared(node):
            text = "a tensor was saved that ranks hold together, the state has none there that tells its parts"
            raise CheckpointMismatch(f"{path}: {text}")
        if tag in ("dict", "odict"):
            pairs = ((key, value, called) for called, (key, value) in zip(self._builder.keys(node["v"]), node["v"]))
            return {
                **node,
                "v": [
                    [key, self._new(value, f"{path}[{called!r}]", join(name, str(called)))]
                    for key, value, called in pairs
                    if self._wants_any(value, join(name, str(called)))
                ],
            }
        for index, part in enumerate(node if isinstance(node, list) else node["v"] if tag == "tuple" else ()):
            if isinstance(part, (dict, list)):
                self._new(part, f"{path}[{index}]", join(name, str(index)))
        return node

    def _place_object(self, node: Node, live: Any, path: str, name: str) -> None:
        kind, tree = node["k"], node["v"]
        if goes_by_number(kind):
            self.numbered.append(path)
        if kind == "module":
            tree = self._place_module(tree, live, path, name)
        elif kind in ("optimizer", "optimizer-own"):
            tree = self._optimizers.place(kind, tree, live, path, name)
        else:
            _refuse_meta_module(live, path)
            self._own.place(tree, live, path)
        self._give(tree, live, kind, path)

    def _give(self, tree: Optional[Node], live: Any, kind: str, path: str) -> None:
        """Has an object given its state, unless there is none to be given."""
        if tree is not None:
            self._objects.append((path, live, kind, tree))
            self.needed.append(tree)

    def _as_object(self, node: Node, live: Any, path: str) -> Node:
        """A dict that was saved as such, for one through torch.distributed.checkpoint, as the state of an object."""
        items = self._builder.items(node["v"])
        kind, torch = "own", torch_module()
        if torch is not None and isinstance(live, torch.nn.Module):
            # Names that are not torch's canonical ones may be the object's own, a wrapper's; torch's method takes no others.
            is_known = items.keys() == state_of(live, self._pairs)[1].keys()
            kind = "module" if is_known or takes_its_names_alone(live) else "own"
        elif torch is not None and isinstance(live, torch.optim.Optimizer):
            groups = items.get("param_groups", [])
            try:
                names = [name for group in self._builder.build(groups) for name in group["params"]]
                by_name = any(isinstance(name, str) for name in names)
                # DCP loses that parameters' numbers are numbers, and a state that is empty.
                state = items.get("state", {"v": []})["v"]
                numbered = state if by_name else [[int(number), value] for number, value in state]
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointMismatch(f"{path}: a dict that is no optimizer's state ({error!r})") from error
            kind = "optimizer" if by_name else "optimizer-own"
            node = {"t": "dict", "v": [["state", {"t": "dict", "v": numbered}], ["param_groups", groups]]}
        return {"t": "object", "k": kind, "v": node}

    def _place_module(self, node: Node, live: Any, path: str, name: str) -> Optional[Node]:
        """Binds a module's tensors; gives what of its state it has to be given yet, if any.

        torch finds a module's mismatches only while it loads; they are found before anything is changed.
        """
        torch = torch_module()
        if torch is None or not isinstance(live, torch.nn.Module):
            raise _mismatch(path, "a torch module", live)
        if (lost := partitioned(live)) is not None:
            raise CheckpointMismatch(f"{path}.{lost}: {PARTITIONED}")
        all_saved = self._builder.items(node["v"])
        saved, has = self._chosen_of(all_saved, state_of(live, self._pairs)[1], name)
        is_part = self._only is not None and not self._wants(f"{name}.")
        if (is_part or saved.keys() != all_saved.keys()) and tells_copies(live):
            raise CheckpointMismatch(f"{path}: a module of FSDP1 is restored as a whole only")
        saved, has = self._common(saved, has, path, name, is_module=True)
        module = Module(live)
        is_all = not module.loads
        for key, value in saved.items():
            is_bound, is_done = self._place_entry(module, value, has[key], f"{path}.{key}", key, is_part)
            is_all = is_all and is_bound and is_done
        if is_all or is_part or (all_saved and not saved):
            return None
        return {**node, "v": [pair for pair in node["v"] if type(pair[0]) is str and pair[0] in saved]}

    def _place_entry(self, module: Module, value: Node, told: Any, place: str, key: str, is_part: bool) -> tuple[bool, bool]:
        """Binds one tensor of a module, which tells that of it; whether it is bound, and whether the module has it then."""
        torch = torch_module()
        way = module.way(key, told)
        is_tensor = isinstance(value, dict) and value.get("t") == "tensor"
        if is_tensor and isinstance(told, torch.Tensor) and not is_extra(key):
            if module.keeps_shape(key, told):
                self._check_shape(value, told, place)
            refuse_meta(told, place, module.unsaved)
            if module.is_own(key, told):
                # Copies are of another memory each time that they are told.
                self._check_tied(value, told, place)
        if is_part and not module.is_own(key, told):
            refuse_mark(value)
            raise CheckpointMismatch(f"{place}: {WHOLE_ONLY}")
        bind = self._bind_aside if way == "aside" and not is_part else self._bind
        is_bound = is_tensor and bind(value, told)
        if is_tensor and not is_bound:
            _refuse_whole(told, place)
        if is_part and not is_bound:
            self._copy_entry(value, told, place)
        return is_bound, way == "in place"

    def _chosen_of(
        self, saved: dict[Any, Node], has: dict[Any, Any], name: str
    ) -> tuple[dict[Any, Node], dict[Any, Any]]:
        """Of what a module's state and the tree have what is chosen."""
        if not self._choice.patterns:
            return saved, has
        is_whole = self._wants(f"{name}.")

        def wants(key: Any) -> bool:
            called = join(name, str(key))
            return not self._leaves(called) if is_whole else self._wants(called)

        return {key: saved[key] for key in saved if wants(key)}, {key: has[key] for key in has if wants(key)}

    def _common(
        self, saved: dict[Any, Node], has: dict[Any, Any], path: str, name: str, is_module: bool = False
    ) -> tuple[dict[Any, Node], dict[Any, Any]]:
        """What both sides have. Raises `CheckpointMismatch` where one has more, unless that may be; and in any case where they
        have nothing in common that is all of the state, or a module."""
        if is_module:
            # Who has no such state, and who tells that there is nothing in it, mean the same.
            saved = {key: one for key, one in saved.items() if key in has or not (is_extra(key) and self._is_nothing(one))}
            has = {key: one for key, one in has.items() if key in saved or not (is_extra(key) and is_nothing(one))}
        found = dict(differences(saved, has))
        if not found:
            return saved, has
        if self._choice.strict:
            what, keys = next(iter(found.items()))
            raise CheckpointMismatch(f"{path}: {what} {keys} ({HINT})")
        common = [key for key in saved if key in has]
        if has and not common and (is_module or not name):
            told = "; ".join(f"{what} {keys}" for what, keys in found.items())
            raise CheckpointMismatch(f"{path}: nothing of it was saved under its names: {told} ({APART_HINT})")
        self.missing += [join(name, str(key)) for key in has if key not in saved and not is_empty(has[key])]
        self.unexpected += [join(name, str(key)) for key in saved if key not in has]
        return {key: saved[key] for key in common}, {key: has[key] for key in common}

    def _is_nothing(self, node: Node) -> bool:
        """As `is_nothing`, of a part of the tree."""
        if tag_of(node) == "tensor":
            return 0 in self._tensors.shape(node)
        return not node.get("v", True) if isinstance(node, dict) else is_nothing(node)

    def _check_shape(self, node: Node, live: Any, path: str) -> None:
        shape, live_shape = self._tensors.shape(node), shape_of(live)
        if shape != live_shape:
            raise CheckpointMismatch(f"{path}: {shape} was saved, the state has {live_shape} ({SHAPE_HINT})")

    def _check_tied(self, node: Node, live: Any, path: str) -> None:
        """Whether what is one tensor in the state was one, or several alike: of others the last one read would stay."""
        known = elements_at(live)
        former, place = self._places.setdefault(known, (node, path)) if known else (node, path)
        if former is not node and not self._tensors.hold_same(former, node):
            text = f"one tensor in the state, and was saved as another one than {place} that differs from it"
            raise CheckpointMismatch(f"{path}: {text} (hint: untie them, or take one of them with only=)")

    def _bind(self, node: Node, live: Any) -> bool:
        """Has a tensor read into a live one, converted where that is of another type."""
        return self._tensors.bind(node, live) or self._tensors.bind_apart(node, live)

    def _bind_aside(self, node: Node, live: Any) -> bool:
        """Has a tensor read into a new one, where that is no plain one of the processor's, which is built as all others."""
        torch = torch_module()
        dtensor = dtensor_class()
        if dtensor is not None and isinstance(live, dtensor):
            return self._bind(node, torch.empty_like(live))
        if local_parts(live) is not None:
            return self._bind(node, live)
        if live.is_cpu:
            return False
        dtype = torch_dtype(self._tensors.entry(node["n"])[1])
        return self._tensors.bind(node, torch.empty(self._tensors.shape(node), dtype=dtype, device=live.device))

    def _copy_entry(self, node: Node, live: Any, path: str) -> None:
        """Has one tensor of a module copied, of whatever type; the module as a whole is not given its state."""
        torch = torch_module()
        refuse_mark(node)
        is_tensor = isinstance(live, torch.Tensor) and isinstance(node, dict) and node.get("t") == "tensor"
        if not is_tensor or local_parts(live) is not None:
            raise CheckpointMismatch(f"{path}: {WHOLE_ONLY}")
        make = self._later(node)

        def copy() -> None:
            with torch.no_grad():
                copy_elements(live.detach(), make())

        self._copies.append(copy)

    def _place_items(self, node: Node, live: Any, path: str, name: str) -> None:
        if not isinstance(live, dict):
            raise _mismatch(path, "a dict", live)
        _check_factory(node, live, path)
        saved = self._builder.items(node["v"])
        has, are_data = live, is_data(node) and TAGS.get(type(live)) == node["t"]
        if self._choice.patterns:
            saved = {key: value for key, value in saved.items() if self._wants_any(value, join(name, str(key)))}
            has = {key: value for key, value in live.items() if key in saved or self._wants(join(name, str(key)))}
        if self._is_blank(live):
            for key, value in saved.items():
                new = self._later(self._new(value, f"{path}[{key!r}]", join(name, str(key))))
                self._copies.append(partial(_set, live, key, new))
            return
        then = self._exchange(live, saved, has) if are_data else None
        if are_data:
            saved, has = (
                {key: value for key, value in saved.items() if key in has},
                {key: value for key, value in has.items() if key in saved or has_parts(value)},
            )
        saved, _ = self._common(saved, has, path, name)
        if is_numbered(saved.items()):
            self.numbered.append(path)
        for key, value in saved.items():
            make = self._place(value, live[key], f"{path}[{key!r}]", join(name, str(key)))
            if make is not None:
                self._copies.append(partial(_set, live, key, make))
        if then is not None:
            self._copies.append(then)

    def _exchange(self, live: dict[Any, Any], saved: dict[Any, Node], has: dict[Any, Any]) -> Callable[[], Any]:
        """What brings keys that are data to those that were saved."""
        new = {key: self._later(value) for key, value in saved.items() if key not in has}
        gone = [key for key in has if key not in saved]
        return partial(_give_keys, live, new, gone, list(saved))

    def _place_sequence(self, node: Node, live: Any, path: str, name: str) -> Optional[Callable[[], Any]]:
        parts = node if isinstance(node, list) else node["v"]
        wanted = list if isinstance(node, list) else tuple
        if type(live) is not wanted:
            raise _mismatch(path, f"a {wanted.__name__}", live)
        holds_state = any(torch_like(part) or is_stateful(part) or isinstance(part, (dict, list)) for part in live)
        if not holds_state:
            # Plain values are replaced as a whole, whatever their number.
            whole = self._later(self._new(node, path, name) if self._is_blank(live) else node)
            if wanted is tuple:
                return whole
            self._copies.append(partial(_set, live, slice(None), whole))
            return None
        if len(parts) != len(live):
            raise CheckpointMismatch(f"{path}: {len(parts)} entries were saved, the state has {len(live)} ({SHAPE_HINT})")
        makes = [
            self._place(part, live[index], f"{path}[{index}]", join(name, str(index)))
            for index, part in enumerate(parts)
        ]
        if wanted is tuple:
            if all(make is None for make in makes):
                return None
            return lambda: tuple(old if make is None else make() for old, make in zip(live, makes, strict=True))
        for index, make in enumerate(makes):
            if make is not None:
                self._copies.append(partial(_set, live, index, make))
        return None

    def _place_tensor(self, node: Node, live: Any, path: str, name: str) -> None:
        torch = torch_module()
        if torch is None or not isinstance(live, torch.Tensor):
            raise _mismatch(path, "a torch tensor", live)
        dtype, shape, live_shape = self._tensors.entry(node["n"])[1], self._tensors.shape(node), shape_of(live)
        if shape != live_shape or f"torch.{dtype}" != str(live.dtype):
            saved = f"torch.{dtype} {shape}"
            raise CheckpointMismatch(f"{path}: {saved} was saved, the state has {live.dtype} {live_shape} ({SHAPE_HINT})")
        refuse_meta(live, path)
        self._own.note(live)
        is_plain = local_parts(live) is None and live.layout is torch.strided
        if is_plain and any(stride == 0 and size > 1 for size, stride in zip(live.shape, live.stride())):
            raise CheckpointMismatch(f"{path}: elements of the tensor share memory (an expanded one): clone() it")
        self._check_tied(node, live, path)
        if self._tensors.bind(node, live):
            return
        _refuse_whole(live, path)
        make = self._later(node)

        def copy() -> None:
            with torch.no_grad():
                copy_elements(live.detach(), make())

        self._copies.append(copy)

    def _place_array(self, node: Node, live: Any, path: str, name: str) -> None:
        numpy = numpy_module()
        if numpy is None or not isinstance(live, numpy.ndarray):
            raise _mismatch(path, "a numpy array", live)
        _, dtype, shape = self._tensors.entry(node["n"])
        if shape != list(live.shape) or dtype != live.dtype.name or array_dtype(live) is None:
            saved = f"{dtype} {shape}"
            has = f"{live.dtype} {list(live.shape)}"
            raise CheckpointMismatch(f"{path}: {saved} was saved, the state has {has} ({SHAPE_HINT})")
        if not live.flags.writeable:
            raise CheckpointMismatch(f"{path}: the array is read-only")
        if not self._tensors.bind(node, live):
            make = self._later(node)
            self._copies.append(lambda: numpy.copyto(live, make()))


WHOLE_ONLY = "it is restored with its whole module only"
"""Why a part of a module's state is not taken."""


def _refuse_whole(live: Any, path: str) -> None:
    """Raises `CheckpointMismatch` for a tensor that several ranks hold, of which each could only be given all."""
    if local_parts(live) is not None:
        text = "that was saved as part of another tensor, or of a type that is not converted to its own"
        raise CheckpointMismatch(f"{path}: a {type(live).__name__} {text}")


def _refuse_meta_module(live: Any, path: str) -> None:
    """Raises `CheckpointMismatch` for a module that takes its state by itself and has no memory for it."""
    torch = torch_module()
    if torch is not None and isinstance(live, torch.nn.Module):
        for key, value in live.state_dict().items():
            if isinstance(value, torch.Tensor):
                refuse_meta(value, f"{path}.{key}", partial(unsaved_buffers, live))


def _check_factory(node: Node, live: Any, path: str) -> None:
    """Whether a live defaultdict makes what the saved one made."""
    if node["t"] == "defaultdict" and type(live) is defaultdict and live.default_factory is not FACTORIES[node["f"]]:
        made = getattr(live.default_factory, "__qualname__", live.default_factory)
        raise CheckpointMismatch(f"{path}: a defaultdict of {node['f']} was saved, the state has one of {made}")


def _set(container: Any, key: Any, make: Callable[[], Any]) -> None:
    container[key] = make()


def _give_keys(live: dict[Any, Any], new: dict[Any, Callable[[], Any]], gone: list[Any], order: list[Any]) -> None:
    """Brings the keys of a dict to those that were saved, and into their order where no others are left."""
    for key in gone:
        del live[key]
    # A Counter's own ways to be changed count.
    dict.update(live, {key: make() for key, make in new.items()})
    if live.keys() == set(order):
        ordered = [(key, live[key]) for key in order]
        live.clear()
        dict.update(live, ordered)


def _mismatch(path: str, saved: str, live: Any) -> CheckpointMismatch:
    return CheckpointMismatch(f"{path}: {saved} was saved, the state has a {type(live).__name__}")
