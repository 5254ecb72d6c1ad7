"""The strategies of Lightning Fabric, for either package.

See [Note: two Lightnings] in `swapper.strategy.swapping`.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from swapper.api import init, offload
from swapper.checkpoint.checkpoint import OpenCheckpoint, Several, save
from swapper.checkpoint.saved_model import plain_model
from swapper.errors import ConfigError
from swapper.files.saving import PendingSave
from swapper.storage.agreement import agreed
from swapper.strategy.arguments import ConfigLike, not_of_ddp, settings_of
from swapper.strategy.ddp_sync import ddp_arguments
from swapper.strategy.swapping import OneDevice, SwappingStrategy, swapper_of, temporary_attribute
from swapper.tensors.evicted_views import EvictedView
from swapper.tensors.sharded import is_sharded, reshard
from swapper.tensors.tensor_refs import replaced

if TYPE_CHECKING:
    from lightning.fabric.accelerators.accelerator import Accelerator
    from lightning.fabric.plugins import CheckpointIO, Precision
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
    from lightning.fabric.strategies.strategy import Strategy
else:
    Strategy = SingleDeviceStrategy = DDPStrategy = object

__all__ = ["OnDDP", "OnOneDevice", "Swapping"]

_MODULES, _OPTIMIZERS = "swapper.modules", "swapper.optimizers"
State = dict[str, torch.nn.Module | Optimizer | Any]


class Swapping(SwappingStrategy, Strategy):
    """Swaps the optimizers that are set up, the gradients and the module's parameters, as the config says."""

    _in_background: ClassVar[bool] = True
    """True if the program goes on while records that cannot be linked are copied."""

    def _set_up(self) -> None:
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._saving = PendingSave()

    # --- Model and optimizers --------------------------------------------------------------------------------------

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build models within it whose parameters are where the config has them."""
        swapped = self._builds_swapped(self.root_device)
        with super().module_init_context(empty_init), init(self.offload_config) if swapped else nullcontext():
            yield

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Remember the module: its parameters are offloaded with their optimizer."""
        self._modules.add(module)
        return super().setup_module(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Swap an optimizer.

        Raises:
            ConfigError: the config cannot work with it, or the module was not set up before.
            SwapIOError: the drive failed, or has too little free space.
        """
        self._offload([optimizer])
        return super().setup_optimizer(optimizer)

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Optimizer], Any]:
        """Swap the optimizers, together, and with them the module's parameters. Raises as `setup_optimizer`."""
        module = self.setup_module(module)
        self._offload(optimizers)
        return module, [super(Swapping, self).setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def _offload(self, optimizers: Sequence[Optimizer]) -> None:
        wanted = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        modules = [module for module in self._modules if any(id(p) in wanted for p in module.parameters())]
        if self.offload_config.offload_param.device != "none":
            if not modules:
                raise ConfigError("offload_param: set up the module first, with fabric.setup or fabric.setup_module")
            if len(modules) > 1:
                raise ConfigError(
                    f"offload_param: an optimizer has parameters of {len(modules)} modules; give each an optimizer of "
                    "its own, or set up one module that has them all"
                )
        offload(modules[0] if len(modules) == 1 else torch.nn.Module(), optimizers, self.offload_config)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """As Fabric's, but without reading all evicted gradients at once."""
        swapper = swapper_of(optimizer)
        if swapper is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        return swapper.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """As Fabric's, but without reading all evicted gradients at once."""
        swapper = swapper_of(optimizer)
        if swapper is None:
            super().clip_gradients_value(module, optimizer, clip_val)
            return
        self.precision.unscale_gradients(optimizer)
        swapper.clip_grad_value_(clip_val)

    # --- Checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path,
        state: State,
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save `state`, on rank 0 or, with `together`, on all; a directory gets links to the files of records.

        Records that cannot be linked are copied in the background. The next save or load waits for that.

        Raises:
            ConfigError: it cannot be a directory.
            SwapError, SwapIOError: as from `swapper.save_checkpoint`; or what was left for the background has failed.
        """
        self._saving.wait()
        if self.checkpoint_format == "full":
            super().save_checkpoint(path, state, storage_options, filter)
            return
        path = self.broadcast(path) if self._together else path
        obstacles = {
            "a filter leaves out parts of it": bool(filter),
            "storage_options has no meaning for it": storage_options is not None,
            f"{os.fspath(path)} is not on a local file system": "://" in os.fspath(path),
        }
        for why, applies in obstacles.items():
            if applies:
                raise ConfigError(f"checkpoint_format: a directory cannot be made: {why}; use checkpoint_format='full'")
        modules, optimizers = _parts(state)
        whole = _whole(modules)  # On all ranks: if it fails, it fails on all, and none waits for rank 0.
        reshard(whole)
        together = self._together or any(map(is_sharded, whole.parameters()))
        with agreed(together):
            rest = {name: _plain(value) for name, value in state.items() if name not in {**modules, **optimizers}}
            extra = {_MODULES: list(modules), _OPTIMIZERS: list(optimizers), **rest}
            extra = replaced(extra, EvictedView, torch.clone) if together or self.is_global_zero else extra
        if not together and not self.is_global_zero:
            return
        self._saving.keep(
            save(path, whole, [*optimizers.values()], extra, over_files=True, together=together, annex=self._annex)
        )
        if not self._in_background:
            self._saving.wait()

    def load_checkpoint(
        self,
        path: str | Path,
        state: torch.nn.Module | Optimizer | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of either format.

        Returns:
            Everything saved that `state` does not name; of a directory without the state of optimizers.

        Raises:
            ConfigError: the directory is of something else; or `state` has optimizers other than all that were saved,
                or without the modules.
            KeyError: `state` has a name that the checkpoint lacks, and `strict`.
            SwapError, SwapIOError: as from `swapper.load_checkpoint`.
        """
        self._saving.wait()
        if self._is_directory(path):
            return self._load_directory(path, state, strict)
        with agreed(self._loads_together):
            return super().load_checkpoint(path, state, strict, weights_only)

    def _load_directory(
        self, path: str | Path, state: torch.nn.Module | Optimizer | State | None, strict: bool
    ) -> dict[str, Any]:
        self._saving.wait()
        with ExitStack() as stack:
            with agreed(self._loads_together):  # Else those that can open it would wait for one that cannot.
                annex = () if self._annex is None else self._annex
                opened = OpenCheckpoint(path, annex, together=self._loads_together)
                stack.enter_context(closing(opened))
            return self._load_opened(opened, state, strict)

    def _load_opened(
        self, opened: OpenCheckpoint, state: torch.nn.Module | Optimizer | State | None, strict: bool
    ) -> dict[str, Any]:
        if isinstance(state, torch.nn.Module):
            self._load_module(opened, state, copy.copy(opened.state_dict), strict)
            return {}
        with agreed(opened.together):
            modules, optimizers, named, order, extra = _matched(opened, state, strict)
        assert isinstance(state, dict)
        saved = {*named, *order, *extra}
        left = {**{name: _of_module(opened.state_dict, name, named) for name in named}, **extra}
        whole = modules.keys() == set(named)
        if whole:
            module = _whole({name: modules[name] for name in named})
            self._load_module(opened, module, copy.copy(opened.state_dict), strict)
            if optimizers:
                opened.load_optimizers(module, [optimizers[name] for name in order])
        for name, value in state.items():
            if name not in saved or name in optimizers:
                continue
            found = left.pop(name)
            if name in modules:
                # Of some of the modules; or the state dict of one was saved instead of it.
                if not whole:
                    self._load_tensors(modules[name], found, strict)
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(found)
            else:
                state[name] = found
        return left

    def _load_module(
        self, opened: OpenCheckpoint, module: torch.nn.Module, tensors: dict[str, Any], strict: bool
    ) -> None:
        if strict and not opened.converts(module):
            opened.load_model(module)
        else:
            self._load_tensors(module, tensors, strict)

    def _load_tensors(self, module: torch.nn.Module, tensors: dict[str, Any], strict: bool) -> None:
        self.load_module_state_dict(module, tensors, strict)


class OnOneDevice(Swapping, OneDevice, SingleDeviceStrategy):
    """Trains on one device."""

    host = "Fabric"

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        checkpoint_format: Literal["directory", "full"] | None = None,
        device: str | torch.device | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        **deepspeed: Any,
    ) -> None:
        self._configure(settings_of(type(self).__name__, config, deepspeed), checkpoint_format)
        self._parallel_devices = None if device is None else [torch.device(device)]
        super().__init__(device="cpu", accelerator=accelerator, checkpoint_io=checkpoint_io, precision=precision)


class OnDDP(Swapping, DDPStrategy):
    """Trains in several processes, as `DDPStrategy`."""

    _in_background = False  # The other processes may load it as soon as all have saved it.
    _loads_together = True

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        checkpoint_format: Literal["directory", "full"] | None = None,
        together: bool = False,
        annex: str | os.PathLike[str] | None = None,
        **ddp: Any,
    ) -> None:
        given = {name: ddp.pop(name) for name in not_of_ddp(type(self), ddp)}
        self._configure(settings_of(type(self).__name__, config, given), checkpoint_format, together, annex)
        self._refuse_annex_of_one()
        super().__init__(**ddp)

    def _load_tensors(self, module: torch.nn.Module, tensors: dict[str, Any], strict: bool) -> None:
        with agreed():  # They are read, and may fail, only here.
            super()._load_tensors(module, tensors, strict)

    def setup_module(self, module: torch.nn.Module) -> Any:
        """As in the stock strategy, but a model on the drive is synchronized one parameter at a time."""
        with temporary_attribute(self, "_ddp_kwargs", ddp_arguments(module, self._ddp_kwargs)):
            return super().setup_module(module)


def _parts(state: State) -> tuple[dict[str, torch.nn.Module], dict[str, Optimizer]]:
    """The modules and the optimizers."""
    modules = {name: plain_model(value) for name, value in state.items() if isinstance(value, torch.nn.Module)}
    optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    return modules, optimizers


def _matched(
    opened: OpenCheckpoint, state: object, strict: bool
) -> tuple[dict[str, torch.nn.Module], dict[str, Optimizer], list[str], list[str], dict[str, Any]]:
    """The modules and optimizers of `state`, and of what was saved the names of both and all else.

    Raises:
        ConfigError, KeyError: as of `load_checkpoint`.
    """
    extra = opened.extra
    if not isinstance(extra, dict) or not {_MODULES, _OPTIMIZERS} <= extra.keys():
        raise ConfigError(f"{opened.directory} was not saved by Fabric; load it with swapper.load_checkpoint")
    named, order = extra.pop(_MODULES), extra.pop(_OPTIMIZERS)
    if not isinstance(state, dict) or not state:
        raise ConfigError(f"{opened.directory} is a directory: give fabric.load the modules, and all else, in `state`")
    modules, optimizers = _parts(state)
    if optimizers and (optimizers.keys() != set(order) or modules.keys() != set(named)):
        raise ConfigError(
            f"{opened.directory} has the modules {named} and the optimizers {order}, and `state` has "
            f"{list(modules)} and {list(optimizers)}; without optimizers it may have some of the modules"
        )
    saved = {*named, *order, *extra}
    if strict and (missing := [name for name in state if name not in saved]):
        raise KeyError(f"the checkpoint has no {missing[0]!r}, which `state` has; strict=False ignores that")
    if wrong := [name for name in order if name in state and name not in optimizers]:
        raise ConfigError(
            f"{opened.directory} has an optimizer {wrong[0]!r}, and in `state` that is none: give it, or leave the "
            "name out"
        )
    return modules, optimizers, named, order, extra


def _whole(modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """One module of those of a state: itself if there is one."""
    return next(iter(modules.values())) if len(modules) == 1 else Several(modules)


def _of_module(tensors: OrderedDict[str, Any], name: str, named: Sequence[str]) -> OrderedDict[str, Any]:
    """The state dict of one of the modules that were saved."""
    if len(named) == 1:
        return copy.copy(tensors)
    start = f"{name}."
    found = OrderedDict((key.removeprefix(start), value) for key, value in tensors.items() if key.startswith(start))
    if (versions := getattr(tensors, "_metadata", None)) is not None:  # of modules
        mine = {f"{key}.".removeprefix(start): value for key, value in versions.items() if f"{key}.".startswith(start)}
        vars(found)["_metadata"] = {key.removesuffix("."): value for key, value in mine.items()}
    return found


def _plain(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else value
