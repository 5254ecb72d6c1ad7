"""What the strategies for both packages of Lightning Fabric have in common.

See [Note: two Lightnings] in `swapper.lightning.strategy`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from swapper.api import init, offload
from swapper.checkpoint import OpenCheckpoint, is_checkpoint, load_checkpoint, save_checkpoint
from swapper.errors import ConfigError, show
from swapper.optimizer import OptimizerSwapper
from swapper.strategy_arguments import ConfigLike, settings_of

if TYPE_CHECKING:
    from lightning.fabric.accelerators.accelerator import Accelerator
    from lightning.fabric.plugins import CheckpointIO, Precision
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
else:
    SingleDeviceStrategy = object

__all__ = ["Swapping"]

_ORDER = "swapper.order"
State = dict[str, torch.nn.Module | Optimizer | Any]


class Swapping(SingleDeviceStrategy):
    """The part of `swapper.fabric.SwapStrategy` that is not Lightning's."""

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
        if checkpoint_format not in (None, "directory", "full"):
            raise ConfigError(f"checkpoint_format: {show(checkpoint_format)} is not one of directory, full")
        self.offload_config = settings_of(type(self).__name__, config, deepspeed)
        self._wanted_format = checkpoint_format
        self._own_io = self._files()
        self._module: weakref.ref[torch.nn.Module] | None = None
        # See [Note: the device of a named strategy] in `swapper.lightning.strategy`.
        self._parallel_devices: list[torch.device] | None = None if device is None else [torch.device(device)]
        super().__init__(device="cpu", accelerator=accelerator, checkpoint_io=checkpoint_io, precision=precision)

    # --- The device ------------------------------------------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, once Fabric has chosen it."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise ConfigError(
                f"{type(self).__name__} trains on one device, and Fabric has {len(devices)}; set devices=1"
            )
        self._parallel_devices = devices

    @property
    def root_device(self) -> torch.device:
        """Where the model is."""
        return self._parallel_devices[0] if self._parallel_devices else super().root_device

    # --- Model and optimizers --------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Within it what is built goes to the drive, if the config has parameters there."""
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        if self.offload_config.offload_param.device == "nvme":
            stack.enter_context(init(self.offload_config))
        return stack

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Remember the module: its parameters are offloaded with the optimizer."""
        module = super().setup_module(module)
        self._module = weakref.ref(module)
        return module

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
        module = None if self._module is None else self._module()
        if module is None:
            if self.offload_config.offload_param.device != "none":
                raise ConfigError("offload_param: set up the module first, with fabric.setup or fabric.setup_module")
            module = torch.nn.Module()
        offload(module, optimizers, self.offload_config)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """As Fabric's, but gradients that are away are not all brought back."""
        swapper = getattr(optimizer, "swapper", None)
        if not isinstance(swapper, OptimizerSwapper):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        return swapper.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """As Fabric's, but gradients that are away are not brought back."""
        swapper = getattr(optimizer, "swapper", None)
        if not isinstance(swapper, OptimizerSwapper):
            super().clip_gradients_value(module, optimizer, clip_val)
            return
        self.precision.unscale_gradients(optimizer)
        swapper.clip_grad_value_(clip_val)

    # --- Checkpoints -----------------------------------------------------------------------------------------------

    _files: ClassVar[type[CheckpointIO]]

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files."""
        return self._own_io if self._checkpoint_io is None else super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def checkpoint_format(self) -> str:
        """What is saved: with a `CheckpointIO` of the user's, which writes files, "full" if nothing was said."""
        return self._wanted_format or ("directory" if self._checkpoint_io is None else "full")

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: State,
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save `state`; as a directory what is on the drive is linked, and one module and its optimizers are needed.

        Raises:
            ConfigError: it cannot be a directory.
            SwapError, SwapIOError: as from `swapper.save_checkpoint`.
        """
        if self.checkpoint_format == "full":
            super().save_checkpoint(str(path), state, storage_options, filter)
            return
        module, optimizers = _parts(state)
        why = (
            "a filter leaves out parts of it"
            if filter
            else "storage_options has no meaning for it"
            if storage_options is not None
            else f"{os.fspath(path)} is not on a local file system"
            if "://" in os.fspath(path)
            else "it holds one module, and the state has none, or several"
            if module is None
            else None
        )
        if module is None or why is not None:
            raise ConfigError(f"checkpoint_format: a directory cannot be made: {why}; use checkpoint_format='full'")
        rest = {name: _plain(value) for name, value in state.items() if value is not module and name not in optimizers}
        extra = {_ORDER: list(optimizers), **rest}
        save_checkpoint(path, module, list(optimizers.values()), extra).wait()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: torch.nn.Module | Optimizer | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load what was saved, in either format. Of a directory the module is always loaded, and strictly.

        Raises:
            ConfigError: the directory is of something else; or `state` has no module, or other optimizers.
            SwapError, SwapIOError: as from `swapper.load_checkpoint`.
        """
        if not is_checkpoint(path):
            return super().load_checkpoint(str(path), state, strict, weights_only)
        if isinstance(state, torch.nn.Module):
            load_checkpoint(path, state)
            return {}
        module, optimizers = _parts(state if isinstance(state, dict) else {})
        if module is None or not isinstance(state, dict):
            raise ConfigError(f"{os.fspath(path)} is a directory: give fabric.load the module, in `state`")
        opened = OpenCheckpoint(path)
        opened.close()
        extra = opened.extra
        if not isinstance(extra, dict) or _ORDER not in extra:
            raise ConfigError(f"{os.fspath(path)} was not saved by Fabric; load it with swapper.load_checkpoint")
        order = extra.pop(_ORDER)
        if optimizers and list(optimizers) != order:
            raise ConfigError(f"{os.fspath(path)} has the optimizers {order}, and `state` has {list(optimizers)}")
        load_checkpoint(path, module, list(optimizers.values()) if optimizers else None)
        for name, value in state.items():
            if value is module or name in optimizers:
                continue
            if name not in extra:
                if strict:
                    raise KeyError(f"the checkpoint has no {name!r}, which `state` has")
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(extra.pop(name))
            else:
                state[name] = extra.pop(name)
        return extra


def _parts(state: State) -> tuple[torch.nn.Module | None, dict[str, Optimizer]]:
    """The module, if there is just one, and the optimizers."""
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    return modules[0] if len(modules) == 1 else None, optimizers


def _plain(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else value
