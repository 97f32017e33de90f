"""What brings a state back: all of it, or the weights of a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

from . import _native
from . import _options as options
from ._errors import CheckpointInvalid, CheckpointNotFound
from ._ladder import Restored
from ._loading import load_step, load_weights
from ._ranks import new_start, use_together
from ._choice import Choice, Names as Renames, Options, chosen
from ._rng import set_rng_state
from ._saver import Back, Saver
from ._timeline import Timeline
from ._url import source_url


class Restorer(Saver):
    """A `Saver` that restores what it saved, or what others did before it."""

    restored: Optional[Restored] = None
    """What the last `restore` did: which step, from which tier."""
    _newest: Optional[int] = None
    """The step that all ranks last agreed to save."""
    _back: Optional[Back] = None
    """The step before that one which the job went back to since."""
    _past: Timeline
    _rng: bool
    _allow_pickle: bool
    _restore_threads: int

    def restore(
        self,
        state: Any,
        step: Optional[options.StepName] = None,
        *,
        only: Optional[Sequence[str]] = None,
        without: Sequence[str] = (),
        strict: bool = True,
        rename: Optional[Renames] = None,
        options: Options = "saved",
    ) -> Optional[int]:
        """Brings `state` back to the newest step that is whole, or to `step`, one for all ranks; gives it, or None if there is none.

        Tensors and arrays are filled in place, objects are given their state, plain values are replaced. Of optimizers all options
        are those that were saved (`lr`, `weight_decay`, `fused`), unless `options` says otherwise: the logger `forebay` (info) tells
        which were others. Modules, and
        optimizers beside them, keep the element types that they have; any other tensor is of the one that was saved. Where
        something in the state has nothing yet (None, an empty dict or list), it gets what was saved there by this rank, if as many ranks saved:
        plain values, and tensors in the processor's memory, but no objects and no parts of what ranks hold together. An object
        gets the parts of such tensors where its own `state_dict` has them, which is asked for that. Nothing is changed unless
        the state is shaped like the one that was saved; what DDP (`module.`) and `torch.compile` (`_orig_mod.`) put before
        names in dicts does not matter. Optimizers must have all parameters whose state was saved, and the class as far as that
        tells; weights that are tied now must have been alike. A newer step that is damaged is a warning; when all are, tensors
        may hold anything, and all else is as it was. Other errors say where the state was changed in part.

        What all ranks have in memory comes first: the newest steps that this job itself sealed, mostly two, or what
        the agents of its killed processes still hold. It is copied out of that memory, every byte checked, whether it is in
        the store, on its way there, or never will be; the store is only asked whether the job was started elsewhere meanwhile,
        or the step, once committed, deleted. Next come the copies on the local disk (`local`), unless the store has a newer
        step. Where neither has what is on its way to the store, it is waited for on all ranks, as `wait` does: one that fails
        is passed over, and told by the next call. `restored` tells where the step came from.

        Ranks may hold other parts of the state than those that saved: stages of another pipeline, or all of it in one process.
        Where what the rank of the same number saved (modulo how many did) does not fit on every rank, each looks up what it
        has, by its names, in what all saved: keys of dicts, modules' tensors, and the state of optimizers that lie in the state
        beside their modules. What only one rank saved, or several alike, is taken. `CheckpointMismatch` names what several
        saved and not alike (a loader's place), what goes by number (an optimizer's own `state_dict`), what none saved, and what
        no rank asks for. Where it fits and the number of ranks is another, a warning names what is not alike and taken by
        number; random number generators stay as they are; numbers of parameters that not all who saved mean alike are refused.

        With `only`, patterns (as of `fnmatch`) of names such as `model.encoder.*`, nothing else is read or changed, and may be
        missing on either side. Tensors go by their own names, values by theirs, objects other than modules (`optim.*`) whole or
        not at all; the name of a dict, list or module (`model`) means all in it. Random number generators stay as they are.

        `without` is the opposite: patterns of what is neither read nor changed, with all that is in it, while everything else is
        restored. Of optimizers that lie beside their modules, that is also the state of single parameters: a head of another
        size is left out by `["model.head.*", "optim.state.head.*"]`.

        With `strict=False`, what the checkpoint lacks is left as it is, and what the state lacks is not read: keys of dicts,
        modules' tensors, and parameters of optimizers beside their modules, which then have no state but what they have. Shapes
        and types must be the same, and some of the state, and of each module in it. `restored.missing` and
        `restored.unexpected` tell the names, and so does the logger `forebay` (a warning).

        `rename` says what the checkpoint calls what the state has under a name, by a dict of such names or a function, for
        keys of dicts, modules' tensors, and parameters of optimizers: `lambda name: name.replace("base_model.model.", "")`.
        A part is looked up where the dict or module lies that it is in. All of these are the same on all ranks.

        `options="live"` has optimizers in the state keep the options that the program gave them, and take their moments and
        counts alone; a list, such as `["weight_decay"]`, those of these names (`lr` with the `initial_lr` that schedulers note
        beside it). The program's `lr` is that of its own schedule's begin. A scheduler in the state would go on from there, or
        from rates that were saved, which the logger warns of: it is left out, and stepped as often as it was,
        `step = ck.restore(state, without=["scheduler"], options="live")`, then `for _ in range(step): scheduler.step()`. An option
        that asks for state which was not saved (`amsgrad`) is refused. An optimizer that counts in its groups (schedule-free
        ones) wants a list. What an optimizer's `state_dict()`, or an object of one's own around it, says is not looked into.

        A job that goes back to a step before its last save, and on from there, may save the steps after it again. It goes on at
        once, and from its next save on is another start's; what it had saved after that step, and is not committed by then, is
        given up. Until newer steps take its place there, the step stays in memory if it was. A step that is saved again counts
        instead of the one before. That one is deleted, unless it was pinned: `step="500.2"` is step 500 as
        start 2 of the run saved it (the incarnation in `forebay ckpt ls`).

        Raises `CheckpointNotFound` or `CheckpointCorrupt` for a `step` that is missing or damaged, and
        `CheckpointMismatch` when the state is not shaped like the one that was saved, or has tensors on the meta device.
        """
        choice = chosen(only, without, strict, rename, options)
        if state is None:
            raise CheckpointInvalid("state is None: nothing would be restored (hint: forebay.load gives what was saved)")
        with self._lock:
            self._begin_use()
            self._finish_staging()

            def use(found: _native.Step) -> Optional[dict[str, Any]]:
                with_rng = self._rng and choice.only is None
                threads = self._restore_threads
                return load_step(found, state, self._allow_pickle, threads, self._ranks, with_rng, choice)[1]

            return self._bring(step, use, goes_back=choice.only is None, choice=choice)

    def load_model(
        self,
        model: Any,
        step: Optional[options.StepName] = None,
        *,
        name: Optional[str] = None,
        only: Optional[Sequence[str]] = None,
        without: Sequence[str] = (),
        strict: bool = True,
        rename: Optional[Renames] = None,
    ) -> int:
        """Brings the weights of `model` back, in place, and reads nothing else; gives the step.

        `name` says which module (or dict of tensors) of the saved state is meant where it holds several, such as
        `model` or `models.ema`; `only`, `without`, `strict` and `rename` are as in `restore`, of names inside of it.

        What is in memory or under way comes first, as with `restore`, which tells what it raises.
        """
        choice = chosen(only, without, strict, rename)
        with self._lock:
            self._check_open()
            self._finish_staging()

            def use(found: _native.Step) -> None:
                load_weights(found, model, name, choice, self._allow_pickle, self._restore_threads, self._ranks)

            loaded = self._bring(step, use, choice=choice)
            if loaded is None:
                raise CheckpointNotFound(f"{source_url(self._url)} holds no step")
            return loaded

    def _bring(
        self,
        step: Optional[options.StepName],
        use: Callable[[_native.Step], Optional[dict[str, Any]]],
        goes_back: bool = False,
        choice: Optional[Choice] = None,
    ) -> Optional[int]:
        """Calls `use` with the newest step that is whole, or `step`, and sets the generators that it gives."""
        begun = time.monotonic()

        def note(found: _native.Step) -> tuple[_native.Step, Optional[dict[str, Any]]]:
            return found, use(found)

        def settle(number: Optional[int], may_be_near: bool) -> None:
            # All ranks saved, or none did.
            if self._newest is not None:
                self._settle_together(number, may_be_near)

        own = self._session, self._nonce
        found, generators = self._ladder.use(step, note, settle, own) or (None, None)
        if found is None:
            return None
        use_together(self._ranks, "set generators", lambda: set_rng_state(generators))
        seconds, rank, size = time.monotonic() - begun, self._ranks.rank, found.bytes_read
        by_card, passed_over = found.rdma_bytes, self._ladder.passed_over
        tier = "peer" if found.tier == "arena" and self._ladder.arena.is_of_peers else found.tier
        left = ((), ()) if choice is None else (choice.missing, choice.unexpected)
        self.restored = Restored(found.step, tier, rank, size, seconds, passed_over, by_card, *left)
        origin = found.attempt, found.step
        if goes_back:
            # As all ranks know it: this one may have failed where others saved.
            is_back = self._newest is not None and found.step < self._newest
            self._back = Back(new_start(), self._ladder.seen, origin) if is_back else None
        if self._back is None:
            self._session.go_on_from(*origin)
        self._past.append(self.restored)
        return found.step
