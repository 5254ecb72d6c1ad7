"""Lightning's checkpoints as directories: what Lightning wants to save is cut into what `save_checkpoint` takes.

[Note: references] Lightning makes a dictionary of all there is, and lets hooks read and change it. The tensors in it
that are the model's, wherever a hook may have put them, are saved as references to the model's files; what a hook has
replaced is saved as it is. On loading, references become tensors that are read when they are used. So hooks see what
they always see, and no tensor is copied that no hook has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint import OpenCheckpoint, is_checkpoint, remove, save_checkpoint
from swapper.errors import ConfigError, SwapError
from swapper.fastsave import SaveHandle

__all__ = ["Directories", "placeholder", "read_directory", "replaced"]

_REFERENCE = "swapper.model"
_DIRECTORY = "swapper.directory"
_STATES = "optimizer_states"


class _Elsewhere(dict[str, Any]):
    """Stands for the state dict of an optimizer, whose state is in files of its own."""


def placeholder(optimizer: Optimizer) -> dict[str, Any]:
    """What has the groups of `optimizer` as its state dict has them, and none of its state."""
    groups = []
    count = 0
    for group in optimizer.param_groups:
        places = list(range(count, count + len(group["params"])))
        count += len(places)
        groups.append({**group, "params": places})
    return _Elsewhere(state={}, param_groups=groups)


class Directories:
    """Saves and loads directories for one strategy.

    What a save leaves for the background is waited for before the next thing is done here, and by `settle`.
    """

    def __init__(self) -> None:
        self._saving: SaveHandle | None = None
        self._dumped: dict[int, tuple[str, torch.Tensor]] = {}
        self._open: OpenCheckpoint | None = None

    # --- Saving ----------------------------------------------------------------------------------------------------

    def dumped(self, state: Mapping[str, Any]) -> None:
        """Lightning was given `state` as the model's."""
        self._dumped = {id(value): (name, value) for name, value in state.items() if isinstance(value, torch.Tensor)}

    def save(
        self,
        checkpoint: Mapping[str, Any],
        directory: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Save what Lightning has made.

        Raises:
            ConfigError: it cannot be a directory.
            SwapError, SwapIOError: as from `save_checkpoint`.
        """
        if "://" in os.fspath(directory):
            raise ConfigError(
                f"checkpoint_format: a directory with hard links cannot be made at {os.fspath(directory)}; use "
                "checkpoint_format='full'"
            )
        self.settle()
        states = checkpoint.get(_STATES)
        if states is not None and not all(isinstance(state, _Elsewhere) for state in states):
            raise ConfigError(
                "checkpoint_format: a hook has changed checkpoint['optimizer_states'], which a directory does not "
                "have; use checkpoint_format='full'"
            )
        rest = {key: value for key, value in checkpoint.items() if key != _STATES}
        dumped, self._dumped = self._dumped, {}

        def refer(value: torch.Tensor) -> Any:
            return {_REFERENCE: dumped[id(value)][0]} if id(value) in dumped else value

        saved = list(optimizers) if states is not None else None
        handle = save_checkpoint(directory, model, saved, extra=replaced(rest, torch.Tensor, refer))
        if not handle.done():
            self._saving = handle
        else:
            handle.wait()

    def settle(self) -> None:
        """Wait for what is saved in the background.

        Raises:
            SwapIOError: it failed.
        """
        handle, self._saving = self._saving, None
        if handle is not None:
            handle.wait()

    def remove(
        self, directory: str | os.PathLike[str], model: torch.nn.Module | None, optimizers: Sequence[Optimizer]
    ) -> bool:
        """Remove a checkpoint that is a directory of ours. Returns whether it is."""
        self.settle()
        if not is_checkpoint(directory) or os.path.islink(directory):
            return False
        remove(directory, model if model is not None else torch.nn.Module(), list(optimizers))
        return True

    # --- Loading ---------------------------------------------------------------------------------------------------

    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """What was given to `save`, with tensors of the model that are read when they are used."""
        self.settle()
        self.close()
        self._open = OpenCheckpoint(directory)
        return read_directory(self._open)

    def load_model(self, checkpoint: Mapping[str, Any], model: torch.nn.Module) -> bool:
        """Load the model from its files. Returns False, and does nothing, if a hook has changed its state dict."""
        opened = self._opened(checkpoint)
        state = checkpoint["state_dict"]
        if opened is None or state.keys() != opened.state_dict.keys():
            return False
        if not all(state[name] is value for name, value in opened.state_dict.items()):
            return False
        opened.load_model(model)
        return True

    def load_optimizers(
        self, checkpoint: Mapping[str, Any], model: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> bool:
        """Load the state of the optimizers from its files. Returns whether it is there."""
        opened = self._opened(checkpoint)
        if opened is None:
            return False
        if not all(isinstance(state, _Elsewhere) for state in checkpoint[_STATES]):
            raise SwapError(
                "a hook has changed checkpoint['optimizer_states'] of a checkpoint that is a directory, where the "
                "state is not; change the optimizer afterwards"
            )
        opened.load_optimizers(model, list(optimizers))
        return True

    def _opened(self, checkpoint: Mapping[str, Any]) -> OpenCheckpoint | None:
        opened = self._open
        return opened if opened is not None and checkpoint.get(_DIRECTORY) == str(opened.directory) else None

    def close(self) -> None:
        """Close the files of what was loaded. Idempotent."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()


def read_directory(opened: OpenCheckpoint) -> dict[str, Any]:
    """What Lightning saved in a directory; of use as long as that is open."""
    if not isinstance(opened.extra, dict) or "pytorch-lightning_version" not in opened.extra:
        raise ConfigError(
            f"{opened.directory} was not saved by Lightning; load it with swapper.load_checkpoint(directory, model, "
            "optimizer)"
        )

    def read(value: dict[Any, Any]) -> Any:
        return opened.state_dict[value[_REFERENCE]] if value.keys() == {_REFERENCE} else value

    checkpoint: dict[str, Any] = replaced(opened.extra, dict, read)
    checkpoint[_DIRECTORY] = str(opened.directory)
    if opened.optimizers:
        checkpoint[_STATES] = [_Elsewhere(state={}, param_groups=[]) for _ in range(opened.optimizers)]
    return checkpoint


def replaced(value: Any, of: type, by: Callable[[Any], Any]) -> Any:
    """A copy of nested containers in which each item of class `of` is what `by` makes of it."""
    if isinstance(value, of):
        found = by(value)
        if found is not value:
            return found
    if type(value) is list:
        return [replaced(item, of, by) for item in value]
    if type(value) is tuple:
        return tuple(replaced(item, of, by) for item in value)
    if isinstance(value, dict):
        items = {key: replaced(item, of, by) for key, item in value.items()}
        if type(value) is dict or all(items[key] is item for key, item in value.items()):
            return items if type(value) is dict else value
        copy = value.copy()
        copy.update(items)
        return copy
    return value
