"""`save_checkpoint` and `load_checkpoint`: all of a training in one directory, without copying what is on disk already.

[Note: one at a time] Two saves at once could publish out of order, and prune what the other counts on. So a process
makes one after the other: the next waits for one that still goes on in the background. What is being written belongs to
whoever takes it out of a list of one: the thread in the background, or the caller whom Ctrl-C strikes before that.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import importlib.metadata
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.directories import check_replaceable, remove_checkpoint, remove_leftovers
from swapper.checkpoint.index import INDEX, glance
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.saved_model import check_model, differences, plain_model, save_model, stored_state_dict
from swapper.checkpoint.saved_model import ready_to_load as ready_to_load_model
from swapper.checkpoint.saved_state import check_optimizers, loading, ready_to_load
from swapper.checkpoint.state_writer import kind_of, save_state
from swapper.checkpoint.values import decode, encode
from swapper.checkpoint.writer import VALUES, NewCheckpoint
from swapper.errors import ConfigError, SwapError, SwapIOError, show
from swapper.files.saving import SaveHandle
from swapper.storage.store import TensorStore

__all__ = [
    "OpenCheckpoint",
    "Several",
    "is_checkpoint",
    "load_checkpoint",
    "made_by",
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
    """What checkpoints of one training have in common."""

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


def save_checkpoint(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers = None, extra: object = None
) -> SaveHandle:
    """Save model, optimizer state and `extra` as `directory`, which appears when it is complete and synced.

    Records that are on disk are hard-linked, not copied: training goes on in other files, and pays nothing for their
    bytes. What lives in memory is written. Where linking cannot be (another file system, records over several drives)
    they are copied in the background, as they are now, while training goes on. A checkpoint that has the name already
    is whole until the new one takes its place, in one step.

    With `checkpoint.keep_last: N` in the optimizer's config, older checkpoints of this training beside `directory` are
    removed then, but for the last N; their files are used again. Training with several processes: call it on one, or on
    each with a directory of its own.

    Args:
        directory: any name; directories above it are made.
        model: any module; swapped or not, also within `DistributedDataParallel` or compiled.
        optimizer: one, several, or None; swapped or not.
        extra: schedulers' state dicts, random states, counters: nested dicts, lists, tuples, numbers, strings, bytes,
            tensors and NumPy arrays. Not pickled; tensors come back on the CPU.

    Returns:
        A handle: `done()`, and `wait()` which raises what failed in the background. Over already where all was linked.

    Raises:
        ConfigError: `model` is no module, or `optimizer` no optimizers.
        SwapError: something cannot be saved, named with what to do; or `directory` is something else than a checkpoint.
        SwapIOError: the drive failed or is full. Training goes on, and an earlier checkpoint is whole.
    """
    return save(directory, model, optimizer, extra)


def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    extra: object,
    *,
    over_files: bool = False,
    prune: bool = True,
) -> SaveHandle:
    """As `save_checkpoint`, for those whose users expect more of a name, or less.

    Args:
        over_files: a file or symbolic link that is `directory` is replaced by it, in one step.
        prune: do as `checkpoint.keep_last` says.
    """
    model = _checked_model(model)
    optimizers = _listed(optimizer)
    if _saving._is_owned():  # type: ignore[attr-defined]
        raise SwapError(
            "save_checkpoint was called within save_checkpoint, as by a signal handler; let the handler set a flag, "
            "and save when a step is over"
        )
    with _saving, contextlib.ExitStack() as undo:
        if _background is not None:
            _background.wait()
        owned = [NewCheckpoint(directory, over_files=over_files)]
        undo.callback(_discard, owned)
        (new,) = owned
        index = _described(model, optimizers, extra, new)
        keep_last = _keep_last(optimizers) if prune else None
        after = _After(new.directory, index["run"], keep_last, _stores(model, optimizers))
        # In a handler of the program's end nobody waits for a thread any more.
        if new.has_more_to_do and threading.main_thread().is_alive():
            del new  # It is the thread's.
            return _finish_in_background(owned, index, after)
        after.tidy(new.finish(index, refuse_unloadable))
        return SaveHandle(str(new.directory), None)


def refuse_unloadable(written: Path) -> None:
    """Refuse to publish what `load_checkpoint` would refuse, by its own rules; bytes of tensors are not read.

    Raises:
        SwapError: see above; a defect of ours. What was there under the name is whole.
    """
    try:
        with torch.inference_mode(False), Checkpoint(written) as checkpoint:
            check_model(checkpoint)
            check_optimizers(checkpoint)
    except SwapIOError:
        raise
    except SwapError as error:
        raise SwapError(
            f"the checkpoint was not saved, because it could not be loaded again: {error}. Nothing was replaced; this "
            "is a defect of swapper, so please report it"
        ) from error


def _discard(owned: list[NewCheckpoint]) -> None:
    with contextlib.suppress(IndexError):
        owned.pop().discard()


def _finish_in_background(owned: list[NewCheckpoint], index: dict[str, Any], after: _After) -> SaveHandle:
    """Let a thread take the only item of `owned`, and write the rest of it."""
    begun = threading.Event()

    def finish() -> None:
        global _background
        _background = over = threading.Event()
        try:
            with contextlib.suppress(IndexError):
                new = owned.pop()
                begun.set()
                after.tidy(new.finish(index, refuse_unloadable))
        finally:
            over.set()

    handle = SaveHandle(str(after.directory), finish)
    begun.wait()
    return handle


def load_checkpoint(directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers = None) -> Any:
    """Bring model and optimizer to where they were when `directory` was saved, to the bit.

    They need not be swapped as they were then: pool, buckets, drives and devices may be others, or none.

    Args:
        directory: from `save_checkpoint`.
        model: of the same structure, shapes and dtypes. It has memory, or is offloaded.
        optimizer: as was saved; of the same classes, with the same parameters in the same groups. Its options, as the
            learning rate, become the saved ones. None loads the model alone.

    Returns:
        `extra`, as it was given to `save_checkpoint`.

    Raises:
        ConfigError: as from `save_checkpoint`; or it is the checkpoint of something else: each tensor that differs is
            named. Nothing was changed.
        SwapError: a file is damaged, and named. Nothing is used that is not as it was written; but what came before
            it may be loaded already, so load another checkpoint before training goes on.
        SwapIOError: a file is missing or cannot be read.
    """
    model = _checked_model(model)
    optimizers = _listed(optimizer)
    directory = Path(os.path.abspath(directory))
    remove_leftovers(directory.parent)
    # What is loaded is to be used everywhere, also if this is called in inference mode.
    with torch.inference_mode(False), Checkpoint(directory) as checkpoint:
        index = checkpoint.index
        found = differences(model, checkpoint)
        if optimizer is not None:
            found += _optimizer_differences(model, optimizers, checkpoint)
        _refuse(found, directory)
        extra = decode(index.extra, "extra", checkpoint.small_tensor)
        loads = [
            ready_to_load(each, saved, checkpoint, number)
            for number, (each, saved) in enumerate(zip(optimizers, index.optimizers, strict=False))
        ]
        load_parameters = ready_to_load_model(model, checkpoint)
        parameters = list(model.parameters())
        with contextlib.ExitStack() as half_loaded:
            for each in optimizers:
                half_loaded.enter_context(loading(each, parameters, directory))
            load_parameters()
            for load in loads:
                load()
    _trainings[_known_by(model)] = _Training(index.run, index.sequence)
    return extra


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


def _described(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], extra: object, new: NewCheckpoint
) -> dict[str, Any]:
    """Write everything, and return what the index says of it."""
    values: dict[str, torch.Tensor] = {}
    encoded = encode(extra, "extra", values, "extra.")
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    training = _trainings.setdefault(_known_by(model), _Training(secrets.token_hex(8), 0))
    # Those of a training that was taken back to an earlier checkpoint since were made before this one too.
    training.sequence = max([training.sequence, *(n for n, _ in _siblings(new.directory, training.run))]) + 1
    _say_what_is_not_saved(optimizers, names)
    saved = [save_state(each, number, names, new, values) for number, each in enumerate(optimizers)]
    index = {
        **made_by(),
        "run": training.run,
        "sequence": training.sequence,
        "step": saved[0][1] if saved else None,
        "model": save_model(model, new, values),
        "optimizers": [fields for fields, _ in saved],
        "extra": encoded,
    }
    new.publish_records()
    new.write_tensors(VALUES, values)
    return index


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


@functools.cache
def _version() -> str:
    """Swapper's, read once: from then on the package may be gone or be another one."""
    try:
        return importlib.metadata.version("tensor-swapper")
    except (importlib.metadata.PackageNotFoundError, OSError):  # Used from a source tree.
        return "unknown"


def made_by() -> dict[str, str]:
    """What an index says of when it was written, and by what."""
    saved_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"swapper": _version(), "torch": str(torch.__version__), "saved_at": saved_at}


def _optimizer_differences(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], checkpoint: Checkpoint
) -> list[str]:
    """Where the optimizers are not those of the checkpoint, in words."""
    saved = checkpoint.index.optimizers
    if len(saved) != len(optimizers):
        return [f"there are {len(optimizers)} optimizers, and {len(saved)} in the checkpoint"]
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    found = []
    for number, (optimizer, there) in enumerate(zip(optimizers, saved, strict=True)):
        which = f"optimizer {number}" if len(saved) > 1 else "the optimizer"
        if kind_of(optimizer) != there.kind:
            found.append(f"{which} is a {kind_of(optimizer)}, and a {there.kind} in the checkpoint")
        if [place for places in there.groups for place in places] != list(range(len(there.parameters))):
            raise SwapError(f"{checkpoint.directory / INDEX} is damaged: the groups of {which} are not its parameters")
        groups = [[_of_parameter(p, names) for p in group["params"]] for group in optimizer.param_groups]
        were = []
        for places in there.groups:
            parameters = [there.parameters[place] for place in places]
            were.append([(p.name, None if p.shape is None else tuple(p.shape), p.dtype) for p in parameters])
        if len(groups) != len(were):
            found.append(f"{which} has {len(groups)} parameter groups, and {len(were)} in the checkpoint")
            continue
        where_was = {p[0]: g for g, group in enumerate(were) for p in group if p[0]}
        for g, (group, was) in enumerate(zip(groups, were, strict=True)):
            if len(group) != len(was):
                found.append(f"group {g} of {which} has {len(group)} parameters, and {len(was)} in the checkpoint")
            for i, (one, other) in enumerate(zip(group, was, strict=False)):
                if _agree(one, other):
                    continue
                if one[0] != other[0] and where_was.get(one[0], g) != g:
                    found.append(
                        f"{one[0]} is in group {g} of {which}, and in group {where_was[one[0]]} in the checkpoint"
                    )
                else:
                    found.append(
                        f"parameter {i} of group {g} of {which} is {_words(one)}, and {_words(other)} in the checkpoint"
                    )
    return found


_Known = tuple[str, tuple[int, ...] | None, str]
"""Name, shape and dtype of a parameter."""


def _agree(one: _Known, other: _Known) -> bool:
    """Whether `one` is what a checkpoint knows of it."""
    if other[2]:
        return one == other
    return other[0] in ("", one[0]) and other[1] in (None, one[1])


def _of_parameter(p: torch.Tensor, names: dict[int, str]) -> _Known:
    return names.get(id(p), ""), tuple(p.shape), str(p.dtype).removeprefix("torch.")


def _words(parameter: _Known) -> str:
    name, shape, dtype = parameter
    if not dtype:
        return f"{name or 'one without a name'} ({'of unknown shape' if shape is None else list(shape)})"
    return f"{name or 'one that the model does not have'} ({dtype}, {list(shape or ())})"


# --- What is over ----------------------------------------------------------------------------------------------------


def _keep_last(optimizers: Sequence[Optimizer]) -> int | None:
    """How many checkpoints are kept, as the first optimizer's config says."""
    kept = (getattr(getattr(each, "swapper", None), "keep_last", None) for each in optimizers)
    return next((count for count in kept if count is not None), None)


def _stores(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> list[TensorStore]:
    """Where files of old checkpoints can be of use."""
    swappers = [vars(model).get("swapper"), *(getattr(each, "swapper", None) for each in optimizers)]
    stores = [getattr(swapper, "store", None) for swapper in swappers]
    return list({id(store): store for store in stores if store is not None}.values())


def _siblings(directory: Path, run: str) -> list[tuple[int, Path]]:
    """The checkpoints of a training beside `directory`, itself among them, in the order in which they were made."""
    found = []
    try:
        beside = list(directory.parent.iterdir())
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "list", directory.parent) from error
    for path in beside:
        whose = None if path.name.startswith(".") else glance(path)
        if whose is not None and whose.run == run:
            found.append((whose.sequence, path))
    return sorted(found)


@dataclass
class _After:
    """Tidies up when a checkpoint is there."""

    directory: Path
    run: str
    keep_last: int | None
    stores: list[TensorStore]

    def tidy(self, replaced: Path | None) -> None:
        """Remove the checkpoint that was replaced, and those that are too many. Never raises for what cannot be."""
        if replaced is not None:
            remove_checkpoint(replaced, self._adopt)
        try:
            too_many = _siblings(self.directory, self.run)[: -self.keep_last] if self.keep_last else []
        except SwapIOError as error:
            log.warning("old checkpoints are left alone: %s", error)
            return
        for _, path in too_many:
            try:
                check_replaceable(path)
            except SwapError as error:
                log.warning("an old checkpoint is left alone: %s", error)
                continue
            remove_checkpoint(path, self._adopt)

    def _adopt(self, path: Path) -> bool:
        return any(store.adopt(path) for store in self.stores)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory that `save_checkpoint` made."""
    return os.path.isdir(path) and glance(Path(path)) is not None


def remove(directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers = None) -> None:
    """Remove a checkpoint. Its files are used again, where they are of use to `model` or `optimizer`.

    Raises:
        SwapError: it is something else than a checkpoint, or has something in it that is not ours.
    """
    path = Path(os.path.abspath(directory))
    check_replaceable(path)
    stores = _stores(plain_model(model), _listed(optimizer))
    remove_checkpoint(path, lambda file: any(store.adopt(file) for store in stores))


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

    Attributes:
        extra: as it was given to `save_checkpoint`.
        state_dict: the model's tensors by their names; each is read, and checked, whenever it is used.
        optimizers: how many it has.

    Raises:
        SwapError, SwapIOError: as from `load_checkpoint`.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(os.path.abspath(directory))
        remove_leftovers(self.directory.parent)
        self._checkpoint = Checkpoint(self.directory)
        try:
            index = self._checkpoint.index
            self.extra = decode(index.extra, "extra", self._checkpoint.small_tensor)
            self.state_dict = stored_state_dict(self._checkpoint)
            self.optimizers = len(index.optimizers)
        except BaseException:
            self.close()
            raise

    def converts(self, model: torch.nn.Module) -> bool:
        """Whether tensors of `model` are of other dtypes than here, so that to load them is to convert them."""
        here = self.state_dict
        state = plain_model(model).state_dict()
        return any(name in here and getattr(value, "dtype", None) != here[name].dtype for name, value in state.items())

    @torch.inference_mode(False)
    def load_model(self, model: torch.nn.Module) -> None:
        """As `load_checkpoint` without an optimizer."""
        model = plain_model(model)
        _refuse(differences(model, self._checkpoint), self.directory)
        ready_to_load_model(model, self._checkpoint)()
        _trainings[_known_by(model)] = _Training(self._checkpoint.index.run, self._checkpoint.index.sequence)

    @torch.inference_mode(False)
    def load_optimizers(self, model: torch.nn.Module, optimizer: Optimizers) -> None:
        """As `load_checkpoint`, without the model, which was loaded before."""
        optimizers = _listed(optimizer)
        _refuse(_optimizer_differences(plain_model(model), optimizers, self._checkpoint), self.directory)
        loads = [
            ready_to_load(each, saved, self._checkpoint, number)
            for number, (each, saved) in enumerate(zip(optimizers, self._checkpoint.index.optimizers, strict=True))
        ]
        with contextlib.ExitStack() as half_loaded:
            for each in optimizers:
                half_loaded.enter_context(loading(each, [], self.directory))
            for load in loads:
                load()

    def close(self) -> None:
        """Close its files. Idempotent."""
        self._checkpoint.close()
