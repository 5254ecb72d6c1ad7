"""Lightning's checkpoints as directories: cuts Lightning's dictionary into the arguments of `save_checkpoint`.

See `swapper.tensors.tensor_refs` for the tensors. Those of a directory are read when they are used; a hook may keep
them.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from swapper.checkpoint.checkpoint import OpenCheckpoint, is_checkpoint, remove, save
from swapper.errors import ConfigError, SwapError, show
from swapper.files.saving import PendingSave
from swapper.storage.agreement import agreed
from swapper.tensors.evicted_views import EvictedView
from swapper.tensors.sharded import is_sharded, reshard
from swapper.tensors.tensor_refs import OPTIMIZER_STATES, is_lightnings, refer, replaced, resolve

__all__ = ["Directories", "load_from_checkpoint", "placeholder"]

log = logging.getLogger(__name__)

_DIRECTORY = "swapper.directory"
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_ModuleT = TypeVar("_ModuleT")


class _NoState(dict[str, Any]):
    """Stands for the state dict of an optimizer whose state is in files of its own."""


def placeholder(optimizer: Optimizer) -> dict[str, Any]:
    """A state dict with the groups of `optimizer`, and none of its state."""
    groups = []
    count = 0
    for group in optimizer.param_groups:
        positions = list(range(count, count + len(group["params"])))
        count += len(positions)
        groups.append({**group, "params": positions})
    return _NoState(state={}, param_groups=groups)


class Directories:
    """Saves and loads directories for one strategy. Each method waits first for the save in the background.

    Attributes:
        saving: the save that goes on in the background.
    """

    def __init__(self) -> None:
        self.saving = PendingSave()
        self._names: dict[int, tuple[str, torch.Tensor]] = {}
        self._open: OpenCheckpoint | None = None

    # --- Saving ----------------------------------------------------------------------------------------------------

    def remember(self, state: Mapping[str, Any]) -> None:
        """Note that Lightning was given `state` as the model's, so that `save` knows its tensors again."""
        # With the tensors: while they live nothing else has their ids.
        self._names = {id(value): (name, value) for name, value in state.items() if isinstance(value, torch.Tensor)}

    def save(
        self,
        checkpoint: Mapping[str, Any],
        directory: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        prune: bool,
        together: bool,
        annex: str | None,
    ) -> None:
        """Save Lightning's checkpoint, in the place of whatever checkpoint has the name.

        Args:
            checkpoint: that Lightning has made.
            directory: that it is going to be.
            model: whose checkpoint it is.
            optimizers: in Lightning's order.
            prune: do as `checkpoint.keep_last` of the config says.
            together: all ranks do this, each for a part of what is the same on all.
            annex: as of `swapper.save_checkpoint`.

        Raises:
            ConfigError: it cannot be a directory.
            SwapError, SwapIOError: as from `save_checkpoint`.
        """
        self.saving.wait()
        reshard(model)
        with agreed(together or any(map(is_sharded, model.parameters()))):
            saved, extra = self._arguments(checkpoint, directory, optimizers)
        self.saving.keep(
            save(directory, model, saved, extra, over_files=True, prune=prune, together=together, annex=annex)
        )

    def _arguments(
        self, checkpoint: Mapping[str, Any], directory: str | os.PathLike[str], optimizers: Sequence[Optimizer]
    ) -> tuple[list[Optimizer] | None, Any]:
        """The optimizers and the `extra` of Lightning's checkpoint. Raises as `save`."""
        if "://" in os.fspath(directory):
            raise ConfigError(
                f"checkpoint_format: a directory with hard links cannot be made at {os.fspath(directory)}; use "
                "checkpoint_format='full'"
            )
        states = checkpoint.get(OPTIMIZER_STATES)
        if states is not None and states != [placeholder(optimizer) for optimizer in optimizers]:
            raise ConfigError(
                "checkpoint_format: a hook has changed checkpoint['optimizer_states'], which a directory does not "
                "have; use checkpoint_format='full'"
            )
        rest = {key: value for key, value in checkpoint.items() if key != OPTIMIZER_STATES or not states}
        names, self._names = self._names, {}
        referring = refer(rest, {number: name for number, (name, _) in names.items()})
        extra = replaced(referring, EvictedView, torch.clone)  # Parts of the model's tensors.
        return list(optimizers) if states is not None else None, extra

    def remove(
        self,
        directory: str | os.PathLike[str],
        model: torch.nn.Module | None,
        optimizers: Sequence[Optimizer],
        together: bool = False,
    ) -> bool:
        """Remove a checkpoint that is a directory of ours, unless it has files of others. Returns whether it is one.

        Args:
            together: all ranks do this, each for the annexes that it reaches.
        """
        self.saving.wait()
        if not is_checkpoint(directory) or os.path.islink(directory):
            return False
        try:
            remove(directory, model if model is not None else torch.nn.Module(), list(optimizers), together)
        except SwapError as error:
            log.warning("a checkpoint is left alone: %s", str(error))
        return True

    # --- Loading ---------------------------------------------------------------------------------------------------

    def load(
        self,
        directory: str | os.PathLike[str],
        model: torch.nn.Module | None,
        annex: str | None = None,
        *,
        together: bool = False,
    ) -> dict[str, Any]:
        """Lightning's checkpoint, with tensors of the model that are read when they are used.

        Args:
            model: that the checkpoint is for.
            annex: a directory that its annexes may be in now.
            together: all ranks load what is loaded from it.
        """
        self.saving.wait()
        self.close()
        self._open = OpenCheckpoint(directory, () if annex is None else annex, together=together)
        checkpoint = _lightnings(self._open)
        _warn_of_other_hyper_parameters(directory, checkpoint, model)
        return checkpoint

    def load_model(self, checkpoint: Mapping[str, Any], model: torch.nn.Module) -> bool:
        """Load the model from its files.

        Returns:
            False, and does nothing, if a hook has changed its state dict, or the model has other dtypes.
        """
        opened = self._opened(checkpoint)
        if opened is None:
            return False
        state = checkpoint["state_dict"]
        if (
            state.keys() != opened.state_dict.keys()
            or any(state[name] is not view or view.source.own is not None for name, view in opened.state_dict.items())
            or opened.converts(model)  # Lightning loads a model before it gives it the dtype of a "true" precision.
        ):
            return False
        opened.load_model(model)
        return True

    def load_optimizers(
        self, checkpoint: Mapping[str, Any], model: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> bool:
        """Load the state of the optimizers from its files. Returns whether the directory has it."""
        opened = self._opened(checkpoint)
        if opened is None or not opened.optimizers:
            return False
        if not all(isinstance(state, _NoState) for state in checkpoint[OPTIMIZER_STATES]):
            raise SwapError(
                "a hook has changed checkpoint['optimizer_states'] of a checkpoint that is a directory, where the "
                "state is not; change the optimizer afterwards"
            )
        opened.load_optimizers(model, list(optimizers))
        return True

    @property
    def is_open(self) -> bool:
        """True while a directory is loaded."""
        return self._open is not None

    def has(self, checkpoint: Mapping[str, Any]) -> bool:
        """True if `checkpoint` is that of the directory that was loaded last."""
        return self._opened(checkpoint) is not None

    def _opened(self, checkpoint: Mapping[str, Any]) -> OpenCheckpoint | None:
        opened = self._open
        return opened if opened is not None and checkpoint.get(_DIRECTORY) == str(opened.directory) else None

    def close(self) -> None:
        """Close the files of the checkpoint that was loaded, and forget the model's tensors. Idempotent."""
        opened, self._open = self._open, None
        self._names = {}
        if opened is not None:
            opened.close()


def _lightnings(opened: OpenCheckpoint) -> dict[str, Any]:
    """The checkpoint that Lightning saved in a directory."""
    if not is_lightnings(opened.extra):
        raise ConfigError(
            f"{opened.directory} was not saved by Lightning; load it with swapper.load_checkpoint(directory, model, "
            "optimizer)"
        )
    checkpoint: dict[str, Any] = resolve(opened.extra, opened.state_dict)
    checkpoint.setdefault("state_dict", copy.copy(opened.state_dict))  # An imported file has none beside the model.
    checkpoint[_DIRECTORY] = str(opened.directory)
    if opened.optimizers:
        checkpoint[OPTIMIZER_STATES] = [_NoState(state={}, param_groups=[]) for _ in range(opened.optimizers)]
    return checkpoint


def _warn_of_other_hyper_parameters(
    directory: str | os.PathLike[str], checkpoint: Mapping[str, Any], model: torch.nn.Module | None
) -> None:
    """Say that LightningCLI has made `model` with others: it takes those of a file, and does not look for ours."""
    own: Mapping[str, Any] = getattr(model, "hparams", {})
    if "_instantiator" not in own:
        return  # It was not made by LightningCLI.
    key: str = getattr(model, "CHECKPOINT_HYPER_PARAMS_KEY")  # noqa: B009  # Which torch's modules lack.
    saved = checkpoint.get(key, {})
    others = {name: show(value) for name, value in saved.items() if repr(own.get(name)) != repr(value)}
    if others:
        log.warning(
            "%s was saved with other hyperparameters than LightningCLI has made the model with, which takes those of a "
            "checkpoint from a file only; if they are to be as saved, give them again, with --config or --model: %s",
            os.fspath(directory),
            ", ".join(f"{name} {value}, here {show(own.get(name))}" for name, value in others.items()),
        )


def load_from_checkpoint(
    module: type[_ModuleT],
    checkpoint_path: str | os.PathLike[str],
    map_location: Any = "cpu",
    hparams_file: str | os.PathLike[str] | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **hyper_parameters: Any,
) -> _ModuleT:
    """`module.load_from_checkpoint(checkpoint_path)`, also for a directory that a strategy has saved.

    Args:
        module: a LightningModule's class, or a LightningDataModule's.
        checkpoint_path: of a directory, or of a file.
        map_location: a device, to which the new module goes; for a file whatever `torch.load` takes.
        hparams_file: YAML or CSV with hyperparameters, instead of those that were saved.
        strict: all names must be there, and no others; None asks `strict_loading` of the module.
        weights_only: as for `torch.load`, of a file. Nothing in a directory is pickled.
        **hyper_parameters: instead of those that were saved, as for `module.load_from_checkpoint`.

    Returns:
        A new module with the saved weights.

    Raises:
        ConfigError: the directory was not saved by Lightning; `map_location` is no device; or `module` is no class
            of Lightning's.
        SwapError, SwapIOError: a file is damaged or cannot be read.
    """
    made: _ModuleT
    if not is_checkpoint(checkpoint_path):
        load: Any = module
        made = load.load_from_checkpoint(
            checkpoint_path, map_location, hparams_file, strict, weights_only, **hyper_parameters
        )
        return made
    if not isinstance(map_location, str | torch.device | None):
        raise ConfigError(f"map_location: a {type(map_location).__name__} is no device, as a directory needs")
    bases = (name for each in module.__mro__ for name in _PACKAGES if each.__module__.startswith(f"{name}."))
    if (package := next(bases, None)) is None:
        raise ConfigError(f"module: {module.__name__} is no class of LightningModules or LightningDataModules")
    saving = importlib.import_module(f"{package}.core.saving")
    with closing(OpenCheckpoint(checkpoint_path)) as opened:
        checkpoint = _lightnings(opened)
        key: str = getattr(module, "CHECKPOINT_HYPER_PARAMS_KEY")  # noqa: B009  # Which torch's modules lack.
        if hparams_file is not None:
            csv = os.fspath(hparams_file).lower().endswith(".csv")
            read = saving.load_hparams_from_tags_csv if csv else saving.load_hparams_from_yaml
            checkpoint[key] = read(hparams_file)
        checkpoint.setdefault(key, {}).update(hyper_parameters)
        made = saving._load_state(module, checkpoint, strict=strict, **hyper_parameters)
    return made.to(map_location) if isinstance(made, torch.nn.Module) else made
