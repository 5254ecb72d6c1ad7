"""`save_checkpoint` and `load_checkpoint`: all of a training in one directory, without copying what is on disk already.

[Note: one at a time] Two saves at once could publish out of order, and prune what the other counts on. So a process
makes one after the other: the next waits for one that still goes on in the background.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.additions import state_dict_of
from swapper.checkpoint.annexes import Adopt
from swapper.checkpoint.boxed_state import BoxedState
from swapper.checkpoint.directories import (
    check_replaceable,
    remove_checkpoint,
    remove_leftovers,
    remove_replaced,
    set_aside,
    set_aside_old,
    siblings,
)
from swapper.checkpoint.index import Index, glance, made_by
from swapper.checkpoint.ranks import joined, new_checkpoint, publish, remove_together, save_part
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.saved_model import (
    check_model,
    differences,
    flat_state_dict,
    plain_model,
    ready_to_load_model,
    save_tensors,
    stored_state_dict,
    write_for_others,
)
from swapper.checkpoint.state_loader import loading, optimizer_differences, ready_to_load_state
from swapper.checkpoint.state_writer import names_of_parameters, save_state
from swapper.checkpoint.values import decode
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import ConfigError, SwapError, SwapIOError, path_given, show
from swapper.files.saving import SaveHandle
from swapper.process.interrupts import interrupts_deferred
from swapper.storage.agreement import agreed, rank_count, rank_of_process
from swapper.storage.store import TensorStore
from swapper.tensors.sharded import is_flattened, is_sharded, reshard

__all__ = [
    "OpenCheckpoint",
    "Several",
    "is_checkpoint",
    "load_checkpoint",
    "refuse_unloadable",
    "remove",
    "save",
    "save_checkpoint",
]

log = logging.getLogger(__name__)

_SHOWN_DIFFERENCES = 20
Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass
class _Training:
    """The run that checkpoints of one training have in common, and how many there are."""

    run: str
    sequence: int


_trainings: weakref.WeakKeyDictionary[torch.nn.Module, _Training] = weakref.WeakKeyDictionary()
_said: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers of which it was said that values of their parameters are not saved."""
_saving = threading.RLock()
"""See [Note: one at a time]."""
_background: threading.Event | None = None
"""Set when the save that was last in the background is over."""


def _after_fork() -> None:
    global _saving, _background
    _saving, _background = threading.RLock(), None  # The threads that have them are the parent's.


os.register_at_fork(after_in_child=_after_fork)


# --- Saving ----------------------------------------------------------------------------------------------------------


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    extra: object = None,
    *,
    together: bool = False,
    annex: str | os.PathLike[str] | None = None,
) -> SaveHandle:
    """Save model, optimizer state and `extra` as `directory`, which appears when it is complete and synced.

    Records that are on disk are hard-linked, not copied: training goes on in other files, and pays nothing for their
    bytes. What lives in memory is written. Where linking cannot be (another file system, records over several drives)
    they are copied in the background, as they are now, while training goes on. A checkpoint that has the name already
    is whole until the new one takes its place, in one step.

    With `checkpoint.keep_last: N` in the optimizer's config, older checkpoints of this training beside `directory` are
    removed then, but for the last N; their files are used again. Training with several processes: call it on one, or on
    each with a directory of its own; or, with `together`, on all. Where anything is a DTensor, all must call it.

    Args:
        directory: any name; directories above it are made.
        model: any module; swapped or not, also within `DistributedDataParallel` or compiled.
        optimizer: one, several, or None; swapped or not.
        extra: schedulers' state dicts, random states, counters: nested dicts, lists, tuples, numbers, strings, bytes,
            tensors and NumPy arrays. Not pickled; tensors come back on the CPU.
        together: True if all processes of `torch.distributed` call this, with one `directory` that all of them have:
            then each writes a part of what is the same on all, as replicas of DDP are. The same on all processes, of
            which the others would wait else. Always done where anything is a DTensor.
        annex: a directory on this process's own drive, as its `nvme_path`: what is large of the checkpoint goes to a
            directory of its own in there, and only the rest to `directory`. For ranks whose drives are not shared; all
            give one, which may be another on each. The index names it; whoever loads the checkpoint must have it, and
            replacing or removing the checkpoint removes it.

    Returns:
        A handle: `done()`, and `wait()` which raises what failed in the background. Over already where all was linked.

    Raises:
        ConfigError: `model` is no module, or `optimizer` no optimizers.
        SwapError: something cannot be saved, named with what to do; or `directory` is something else than a checkpoint.
            Of processes that save together: what they should have alike differs, or their directories do.
        SwapIOError: the drive failed or is full. Training goes on, and an earlier checkpoint is whole. Of processes
            that save together all raise what one of them does.
    """
    return save(directory, model, optimizer, extra, together=together, annex=annex)


def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    extra: object,
    *,
    over_files: bool = False,
    prune: bool = True,
    together: bool = False,
    annex: str | os.PathLike[str] | None = None,
) -> SaveHandle:
    """As `save_checkpoint`, for those whose users expect more of a name, or less.

    Args:
        over_files: a file or symbolic link that is `directory` is replaced by it, in one step.
        prune: do as `checkpoint.keep_last` says.
    """
    if _saving._is_owned():  # type: ignore[attr-defined]
        # Before anything collective: other ranks may be at another place of the save that goes on.
        raise SwapError(
            "save_checkpoint was called within save_checkpoint, as by a signal handler; let the handler set a flag, "
            "and save when a step is over"
        )
    together = _is_sharded(model, optimizer) or (together and rank_count() > 1)
    with agreed(together):
        model = _checked_model(model)
        optimizers = _listed(optimizer)
        _refuse_flattened("save_checkpoint", model, optimizers)
    with _saving, contextlib.ExitStack() as undo:
        if _background is not None:
            _background.wait()
        if together:
            return _save_together(directory, model, optimizers, extra, over_files, prune, annex)
        new = NewCheckpoint(directory, over_files=over_files, annex=annex)
        undo.callback(new.discard)
        index = _described(model, optimizers, extra, new)
        keep_last, adopt = _keep_last(optimizers) if prune else None, _adopter(model, optimizers)

        def finish() -> None:
            replaced = new.finish(index, refuse_unloadable)
            for path in set_aside_old(new.directory, index.run, keep_last, replaced):
                remove_replaced(path, adopt)

        # In a handler of the program's end nobody waits for a thread any more.
        if new.has_copies_to_make and threading.main_thread().is_alive():
            return _finish_in_background(new.directory, finish, undo)
        finish()
        return SaveHandle(str(new.directory), None)


def _save_together(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    extra: object,
    over_files: bool,
    prune: bool,
    annex: str | os.PathLike[str] | None,
) -> SaveHandle:
    """`save` by all ranks. See [Note: ranks] of `ranks`. Nothing of it is in the background."""
    adopt = _adopter(model, optimizers)
    with new_checkpoint(directory, over_files, annex) as new:
        saved = save_part(model, optimizers, extra, new)
        index = None
        with agreed():
            if saved:
                training = _next_of(model, new.directory)
                _say_what_is_not_saved(optimizers, names_of_parameters(model))
                index = Index(**made_by() | joined(saved), run=training.run, sequence=training.sequence)
                if not index.model.sharded:  # Tools of others can read them: all tensors are whole.
                    write_for_others(model, new, {name: index.model.tensors[name] for name in index.model.wholes()})
                new.seal(index, refuse_unloadable)
        replaced = publish(new, refuse_unloadable)
        keep_last = _keep_last(optimizers) if prune else None
        aside = [] if index is None else set_aside_old(new.directory, index.run, keep_last, replaced)
        remove_together(aside, adopt)
    return SaveHandle(str(new.directory), None)


def _finish_in_background(directory: Path, finish: Callable[[], None], undo: contextlib.ExitStack) -> SaveHandle:
    """Hand a new checkpoint, which `undo` discards, to a thread that writes the rest of it by `finish`."""
    global _background
    over = threading.Event()

    def write() -> None:
        try:
            finish()
        finally:
            over.set()

    # The thread has it as soon as it runs: this must not discard it then, and the next save must wait.
    with interrupts_deferred():
        handle = SaveHandle(str(directory), write)
        _background = over
        undo.pop_all()
    return handle


def refuse_unloadable(written: Path) -> None:
    """Refuse to publish what `load_checkpoint` would refuse, by its own rules; bytes of tensors are not read.

    Raises:
        SwapError: see above; a defect of ours. What was there under the name is whole.
    """
    try:
        with torch.inference_mode(False), Checkpoint(written, unfinished=True) as checkpoint:
            check_model(checkpoint)
            for number in range(len(checkpoint.index.optimizers)):
                state = BoxedState(checkpoint, number)
                state.parts.state_dict({}, range(len(state.wholes)))
    except SwapIOError:
        raise
    except SwapError as error:
        raise SwapError(
            f"the checkpoint was not saved, because it could not be loaded again: {error}. Nothing was replaced; this "
            "is a defect of swapper, so please report it"
        ) from error


def _described(model: torch.nn.Module, optimizers: Sequence[Optimizer], extra: object, new: NewCheckpoint) -> Index:
    """Write everything, and return what the index says of it."""
    encoded = new.encode(extra, "extra", "extra.")
    names = names_of_parameters(model)
    training = _next_of(model, new.directory)
    _say_what_is_not_saved(optimizers, names)
    saved = [save_state(each, number, names, state_dict_of(each), new) for number, each in enumerate(optimizers)]
    index = Index(
        **made_by(),
        run=training.run,
        sequence=training.sequence,
        step=saved[0].step if saved else None,
        model=save_tensors(flat_state_dict(model), new, model),
        optimizers=[each.saved for each in saved],
        extra=encoded,
    )
    new.publish_records()
    new.write_values()
    return index


def _next_of(model: torch.nn.Module, directory: Path) -> _Training:
    """The training of `model`, with the number of its next checkpoint."""
    training = _trainings.setdefault(_known_by(model), _Training(secrets.token_hex(8), 0))
    # Those of a training that was taken back to an earlier checkpoint since were made before this one too.
    training.sequence = max([training.sequence, *(n for n, _ in siblings(directory, training.run))]) + 1
    return training


def _say_what_is_not_saved(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    for number, optimizer in enumerate(optimizers):
        lost = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
        if lost and optimizer not in _said:
            _said.add(optimizer)
            log.warning(
                "optimizer %d has %d parameters that the model does not have: their state is saved, and their values "
                "are not; give one torch.nn.ModuleDict of all modules as the model, or save the values as extra",
                number,
                lost,
            )


# --- Old checkpoints -------------------------------------------------------------------------------------------------


def _keep_last(optimizers: Sequence[Optimizer]) -> int | None:
    """The number of checkpoints to keep, from the config of the first optimizer that says it."""
    kept = (getattr(getattr(each, "swapper", None), "keep_last", None) for each in optimizers)
    return next((count for count in kept if count is not None), None)


def _adopter(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> Adopt:
    """Gives files of checkpoints that are removed to the stores of `model` and `optimizers`, which write them again."""
    swappers = [vars(model).get("swapper"), *(getattr(each, "swapper", None) for each in optimizers)]
    found = [getattr(swapper, "store", None) for swapper in swappers]
    stores: list[TensorStore] = list({id(store): store for store in found if store is not None}.values())
    return lambda path: any(store.adopt(path) for store in stores)


# --- Loading ---------------------------------------------------------------------------------------------------------


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    *,
    together: bool = False,
    annex: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
) -> Any:
    """Bring model and optimizer to where they were when `directory` was saved, to the bit.

    They need not be swapped as they were then: pool, buckets, drives and devices may be others, or none.

    Args:
        directory: from `save_checkpoint`.
        model: of the same structure, shapes and dtypes. It has memory, or is offloaded.
        optimizer: as was saved; of the same classes, with the same parameters in the same groups. Its options, as the
            learning rate, become the saved ones. None loads the model alone.
        together: True if all processes of `torch.distributed` call this, as replicas of DDP: then what one of them
            raises is raised on all, and none trains on while others cannot. The same on all processes, of which the
            others would wait else. Always done where anything is a DTensor.
        annex: a directory, or several, that annexes of the checkpoint are in now, if they are not where they were
            saved. May be another on each rank.

    Returns:
        `extra`, as it was given to `save_checkpoint`.

    Raises:
        ConfigError: as from `save_checkpoint`; or it is the checkpoint of something else: each tensor that differs is
            named. Nothing was changed.
        SwapError: a file is damaged, and named. Nothing is used that is not as it was written; but what came before
            it may be loaded already, so load another checkpoint before training goes on.
        SwapIOError: a file is missing or cannot be read; or is in an annex that this process does not reach, which is
            named. Of the latter nothing was changed.

        Where several processes load together, what one of them raises is raised on all, with its rank.
    """
    together = _is_sharded(model, optimizer) or together
    with contextlib.ExitStack() as stack:
        with agreed(together):
            model = _checked_model(model)
            optimizers = None if optimizer is None else _listed(optimizer)
            _refuse_flattened("load_checkpoint", model, optimizers or ())
            opened = OpenCheckpoint(directory, annex, together=together)
            stack.enter_context(contextlib.closing(opened))
        opened.load(model, optimizers)
        return opened.extra


def _known_by(model: torch.nn.Module) -> torch.nn.Module:
    """The module that is there as long as the training."""
    return next(model.children(), model) if isinstance(model, Several) else model


def _checked_model(model: object) -> torch.nn.Module:
    """The user's own module, if it is one."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model: a {type(model).__name__} is no torch.nn.Module; give the module itself, and several as one "
            "torch.nn.ModuleDict of them"
        )
    return plain_model(model)


def _refuse(found: Sequence[str], directory: Path) -> None:
    """Raise if there are differences."""
    if found:
        rest = f"; and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
        raise ConfigError(
            f"{directory} is not a checkpoint of this model and optimizer: "
            f"{'; '.join(found[:_SHOWN_DIFFERENCES])}{rest}. Nothing was loaded"
        )


def _is_sharded(model: object, optimizer: object) -> bool:
    """True if anything is a DTensor, so that all ranks save and load together. Of any arguments."""
    if isinstance(model, torch.nn.Module):
        reshard(model)
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        if isinstance(each, Optimizer):
            tensors += (p for group in each.param_groups for p in group["params"])
    return any(map(is_sharded, tensors))


def _refuse_flattened(operation: str, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
    stepped = (p for each in optimizers for group in each.param_groups for p in group["params"])
    if any(map(is_flattened, [*model.parameters(), *stepped])):
        raise ConfigError(
            f"{operation} does not know FullyShardedDataParallel (FSDP1), where each rank has a shard of every tensor; "
            "use torch.distributed.checkpoint with get_state_dict and set_state_dict, or FSDP2 (fully_shard)"
        )


def _listed(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    several = [optimizer] if not isinstance(optimizer, Sequence) else list(optimizer)
    wrong = [each for each in several if not isinstance(each, Optimizer)]
    if wrong:
        raise ConfigError(
            f"optimizer: a {type(wrong[0]).__name__} is no torch.optim.Optimizer; give an optimizer itself, a list of "
            "them, or None, and what else is to be saved as extra"
        )
    return several


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """True if `path` is a directory that `save_checkpoint` made."""
    return os.path.isdir(path) and glance(Path(path)) is not None


def remove(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers = None, together: bool = False
) -> None:
    """Remove a checkpoint. Its files are used again, where they are of use to `model` or `optimizer`.

    Args:
        together: all ranks do this, each for the annexes that it reaches.

    Raises:
        SwapError: it is something else than a checkpoint, or has something in it that is not ours.
    """
    path, adopt = Path(os.path.abspath(directory)), _adopter(plain_model(model), _listed(optimizer))
    with agreed(together):
        check_replaceable(path)
    if together:
        remove_together([] if rank_of_process() else [aside for aside in [set_aside(path)] if aside], adopt)
    else:
        remove_checkpoint(path, adopt)


class Several(torch.nn.Module):
    """Modules that are saved as one model. May be made anew for each checkpoint.

    Raises:
        ConfigError: a name has a dot, which torch has between the names of modules.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        for name in modules:
            if "." in name:
                raise ConfigError(f"a module named {show(name)} cannot be in a directory with others: rename it")
        self._modules.update(modules)


class OpenCheckpoint:
    """A checkpoint whose parts are loaded one after another, where `load_checkpoint` would be too early or too late.

    Args:
        annex: as of `load_checkpoint`.
        together: all ranks load it, each of its methods: what one of them raises is raised on all.

    Attributes:
        optimizers: how many it has.

    Raises:
        SwapError, SwapIOError: as from `load_checkpoint`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        annex: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        *,
        together: bool = False,
    ) -> None:
        self.together = together
        self.directory = Path(os.path.abspath(path_given("directory", directory)))
        several = [annex] if isinstance(annex, (str, bytes, os.PathLike)) else annex or ()
        annexes = [Path(os.path.abspath(path_given("annex", each))) for each in several]
        remove_leftovers(self.directory.parent)
        self._checkpoint = Checkpoint(self.directory, annexes=annexes)
        self.optimizers = len(self._checkpoint.index.optimizers)

    @functools.cached_property
    def extra(self) -> Any:
        """As it was given to `save_checkpoint`: by this rank, if there were as many, else by rank 0."""
        index = self._checkpoint.index
        data = index.extra
        if index.ranks == rank_count():
            data = index.own_extra.get(str(rank_of_process()), data)
        return decode(data, "extra", self._checkpoint.small_tensor)

    @functools.cached_property
    def state_dict(self) -> OrderedDict[str, Any]:
        """The model's tensors by their names; each is read, and checked, whenever it is used."""
        return stored_state_dict(self._checkpoint)

    def converts(self, model: torch.nn.Module) -> bool:
        """True if tensors of `model` have other dtypes than here, so that loading converts them."""
        here = self.state_dict
        state = plain_model(model).state_dict()
        return any(name in here and getattr(value, "dtype", None) != here[name].dtype for name, value in state.items())

    def load_model(self, model: torch.nn.Module) -> None:
        """As `load_checkpoint` without an optimizer."""
        self.load(plain_model(model), None)

    def load_optimizers(self, model: torch.nn.Module, optimizer: Optimizers) -> None:
        """As `load_checkpoint`, without the model, which was loaded before."""
        self.load(plain_model(model), _listed(optimizer), model_too=False)

    # What is loaded is to be used everywhere, also if this is called in inference mode.
    @torch.inference_mode(False)
    def load(self, model: torch.nn.Module, optimizers: Sequence[Optimizer] | None, *, model_too: bool = True) -> None:
        """As `load_checkpoint`.

        Args:
            model: the user's own module.
            optimizers: None leaves them alone.
            model_too: False leaves the model alone.
        """
        checkpoint, together = self._checkpoint, self.together or _is_sharded(model, optimizers or ())
        with agreed(together):
            found = differences(model, checkpoint) if model_too else []
            if optimizers is not None:
                found += optimizer_differences(model, optimizers, checkpoint)
            _refuse(found, self.directory)
            _ = self.extra  # Decoded now: what cannot be decoded is refused before anything is changed.
            loads = [ready_to_load_state(each, checkpoint, number) for number, each in enumerate(optimizers or ())]
            if model_too:  # First: masters are decoded with the parameters' values.
                loads.insert(0, ready_to_load_model(model, checkpoint))
        parameters = list(model.parameters()) if model_too else []
        # From the first tensor that is changed to the last, and if that ends in the middle, no optimizer steps.
        with contextlib.ExitStack() as half_loaded:
            for each in optimizers or ():
                half_loaded.enter_context(loading(each, parameters, self.directory))
            with agreed(together):
                for load in loads:
                    load()
        if model_too:  # Its next checkpoints belong to the same training.
            _trainings[_known_by(model)] = _Training(checkpoint.index.run, checkpoint.index.sequence)

    def close(self) -> None:
        """Close its files. Idempotent."""
        self._checkpoint.close()
