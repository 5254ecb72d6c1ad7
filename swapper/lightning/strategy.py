"""The strategies of Lightning, for either package: they swap optimizers as soon as Lightning has made them.

See [Note: two Lightnings] in `swapper.strategy.swapping`.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer

from swapper.api import init, offload, unwrap_optimizer
from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.checkpoint.values import encode
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError
from swapper.lightning.directories import Directories, placeholder
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.parameter.candidates import swapped_tensors
from swapper.parameter.swapper import ParameterSwapper
from swapper.session import Shared
from swapper.storage.agreement import agreed
from swapper.strategy.arguments import ConfigLike, given_among, not_of_ddp, settings_of
from swapper.strategy.ddp_sync import ddp_arguments, has_evicted_parameters, synchronize
from swapper.strategy.swapping import OneDevice, SwappingStrategy, swapper_of, temporary_attribute
from swapper.tensors.homes import home_of

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
    from torch.nn.parallel import DistributedDataParallel
else:
    Strategy = SingleDeviceStrategy = DDPStrategy = object

__all__ = ["OnDDP", "OnOneDevice", "Swapping", "kills_and_waits"]

log = logging.getLogger(__name__)

_settings_of: weakref.WeakKeyDictionary[Optimizer, OffloadConfig] = weakref.WeakKeyDictionary()
"""Optimizer that a strategy has swapped: the config that it was swapped with."""

_DEATH_S = 5.0
"""Time that a process which was killed may take to be dead."""


class Swapping(SwappingStrategy, Strategy):
    """Swaps the optimizers of the LightningModule, its gradients and its parameters, as the config says."""

    def _set_up(self) -> None:
        self._settings = self.offload_config
        self._interrupted = False
        self._directories = Directories()
        self._prunes = True

    def setup_environment(self) -> None:
        """Begin whatever the Trainer is called for."""
        self._interrupted = False
        super().setup_environment()

    # --- The model -------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build models within it whose parameters are where the config has them."""
        swapped = self._builds_swapped(self.root_device)
        with super().tensor_init_context(empty_init), init(self._settings) if swapped else nullcontext():
            yield

    def setup(self, trainer: Trainer) -> None:
        """As in the stock strategy. Parameters that an earlier Trainer has on the drive come back to be converted."""
        module = self.lightning_module
        swappers = [] if module is None else _parameter_swappers(module)
        if module is not None and swappers and _converts(self.precision_plugin, module):
            for swapper in swappers:
                swapper.close(keep_values=True)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """As in the stock strategy, but a model that stays on its device is not moved: that would read it."""
        if self.model is None or not _stays(self.model, self.root_device):
            super().model_to_device()  # type: ignore[safe-super]

    # --- The optimizers --------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Have Lightning make the optimizers, and swap them. Those of an earlier `fit` are closed: their state is gone.

        Raises:
            ConfigError: the config cannot work with this model and these optimizers.
            SwapIOError: the drive failed, or has too little free space.
        """
        former = [optimizer for optimizer in self.optimizers if swapper_of(optimizer) is not None]
        super().setup_optimizers(trainer)
        kept = {id(optimizer) for optimizer in self.optimizers}
        for optimizer in former:
            if id(optimizer) not in kept:
                _close(optimizer)
        self._collect_former_runs()
        self._check_hyper_parameters(trainer)
        self._prunes = not trainer.checkpoint_callbacks
        keep_last = self.offload_config.checkpoint.keep_last
        if keep_last is not None and not self._prunes:
            log.warning("checkpoint.keep_last: %d has no effect: the ModelCheckpoint decides what is kept", keep_last)
        uploading = [type(logger).__name__ for logger in trainer.loggers if getattr(logger, "_log_model", False)]
        if uploading and not self._prunes and self.checkpoint_format == "directory":
            log.warning(
                "log_model of %s has no effect: it takes checkpoints that are files, and these are directories; use "
                "checkpoint_format='full'",
                ", ".join(uploading),
            )
        self._settings = self._settings_for(trainer)
        self._swap()

    def _collect_former_runs(self) -> None:
        """Release the files and engines of earlier fits that nobody can reach any more, before others are made.

        [Note: the end of a Trainer] After `fit` a Trainer can still save the state of its optimizers, so it keeps them.
        But a Trainer, its loops and its model refer to each other: when the program drops them, only the garbage
        collector finds out, which may take many fits. So it is called here, if there is something to be found.
        """
        ours = {id(optimizer) for optimizer in self.optimizers}
        others = [swapper_of(optimizer) for optimizer in list(_settings_of) if id(optimizer) not in ours]
        if any(swapper is not None and not swapper.closed for swapper in others):
            del others  # It would keep them reachable.
            gc.collect()

    def _check_hyper_parameters(self, trainer: Trainer) -> None:
        """Refuse hyperparameters that a directory cannot hold before training, and not at the first checkpoint."""
        if self.checkpoint_format == "full" or not trainer.checkpoint_callbacks:
            return
        for each in (self.lightning_module, getattr(trainer, "datamodule", None)):
            if each is not None and each.hparams:
                try:
                    encode(dict(each.hparams), f"hparams of {type(each).__name__}", {}, "")
                except SwapError as error:
                    raise ConfigError(
                        f"{error}; or leave it out with save_hyperparameters(ignore=...), or use "
                        "checkpoint_format='full'"
                    ) from None

    def _settings_for(self, trainer: Trainer) -> OffloadConfig:
        """The config with the Trainer's accumulation. The same object while nothing differs: the pool belongs to it."""
        module = self.lightning_module
        asked = self.offload_config
        if module is None or not module.automatic_optimization:
            return self._settings  # Only the user's loop knows.
        steps = trainer.accumulate_grad_batches
        # 1 is the default, and LightningCLI gives all defaults.
        if asked.gradient_accumulation_steps not in (1, steps):
            raise ConfigError(
                f"gradient_accumulation_steps: {asked.gradient_accumulation_steps} in the config, and "
                f"Trainer(accumulate_grad_batches={steps}); leave it out of the config"
            )
        if self._settings.gradient_accumulation_steps == steps:
            return self._settings
        return asked.model_copy(update={"gradient_accumulation_steps": steps})

    def _swap(self) -> None:
        settings, module = self._settings, self.lightning_module
        assert module is not None
        for optimizer in self.optimizers:
            if _settings_of.get(optimizer, settings) != settings and swapper_of(optimizer) is not None:
                unwrap_optimizer(optimizer)  # The module kept it from a Trainer with another config.
        for swapper in _parameter_swappers(module):
            # An earlier strategy has parameters away: they come back unless `settings` wants them there too.
            if not (swapper is vars(module).get("swapper") and _keeps(swapper, settings)):
                swapper.close(keep_values=True)
        if new := [optimizer for optimizer in self.optimizers if swapper_of(optimizer) is None]:
            offload(module, new, settings)
            _settings_of.update((optimizer, settings) for optimizer in new)

    # --- Clipping --------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """As in the stock strategy."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # Set on the object, because the name of its class is a key in checkpoints. A class that clips in a way of its
        # own goes on doing so.
        if plugin is not None:
            for name in _CLIPS:
                if getattr(type(plugin), name).__module__.endswith("plugins.precision.precision"):
                    setattr(plugin, name, partial(_clip, plugin, name))
        self._precision_plugin = plugin

    # --- Checkpoints -----------------------------------------------------------------------------------------------

    @property
    def checkpoint_format(self) -> str:
        """ "directory" or "full". The default is "full" with a `CheckpointIO` of the user's, which writes files.

        Raises:
            ConfigError: there is one, and "directory" was asked for.
        """
        if self._wanted_format == "directory" and self._checkpoint_io is not None:
            raise ConfigError(
                f"checkpoint_format: a directory is not written by {type(self._checkpoint_io).__name__}; use 'full', "
                "or give no CheckpointIO"
            )
        return super().checkpoint_format

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict. Evicted parameters stay on the drive."""
        state = super().lightning_module_state_dict()
        if self.checkpoint_format == "directory":
            self._directories.remember(state)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer; for a directory without the state, whose files are linked."""
        return super().optimizer_state(optimizer) if self.checkpoint_format == "full" else placeholder(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint, on rank 0 or, with `together`, on all.

        Raises:
            SwapError: something in it cannot be saved; named, with what to do.
            SwapIOError: the drive failed. An earlier checkpoint is whole.
        """
        if self.checkpoint_format == "full":
            if self.is_global_zero and self.checkpoint_io is not self._own_io:
                self._remove_directory(filepath)  # Another `CheckpointIO` would write into it.
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif storage_options is not None:
            raise TypeError("storage_options has no meaning for checkpoint_format='directory'")
        elif self._saves_together() or self.is_global_zero:
            assert self.lightning_module is not None
            self._directories.save(
                checkpoint,
                self.broadcast(filepath) if self._together else filepath,
                self.lightning_module,
                self.optimizers,
                prune=self._prunes,
                together=self._together,
                annex=self._annex,
            )
        if self.lightning_module is not None and self.lightning_module.trainer.state.status.value != "running":
            self._directories.saving.wait()  # The caller may look for it as soon as this returns.
            self._trim_pools()

    def _saves_together(self) -> bool:
        """True if all ranks have a part in a directory, and not rank 0 alone."""
        return self._together

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of either format."""
        self._directories.saving.wait()
        is_directory = self._is_directory(checkpoint_path)
        with agreed(self._loads_together):
            if is_directory:
                return self._directories.load(
                    checkpoint_path, self.lightning_module, self._annex, together=self._loads_together
                )
            return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model."""
        assert self.lightning_module is not None
        if not strict or not self._directories.load_model(checkpoint, self.lightning_module):
            with agreed(self._loads_together):  # A directory's tensors are read, and may fail, only here.
                super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state."""
        assert self.lightning_module is not None
        if not self._directories.load_optimizers(checkpoint, self.lightning_module, self.optimizers):
            with agreed(self._loads_together):
                super().load_optimizer_state_dict(checkpoint)
        self._directories.close()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint of either format, on rank 0; with annexes that several ranks have written on all."""
        if self._annex is not None and self._saves_together():
            path = self.broadcast(filepath)
            if self.broadcast(is_checkpoint(path)):
                self._directories.remove(path, self.lightning_module, self.optimizers, together=True)
                return
        if self.is_global_zero and not self._remove_directory(filepath):
            super().remove_checkpoint(filepath)

    def _remove_directory(self, filepath: str | Path) -> bool:
        return self._directories.remove(filepath, self.lightning_module, self.optimizers)

    # --- The end ---------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Remember that an exception is on its way, which `teardown` must not replace."""
        self._interrupted = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Wait until all is on the drive, and give the pool's memory back. What needs it later takes it again.

        Files stay: the state can be saved until the optimizer dies.

        Raises:
            SwapIOError: a write had failed. Logged if another exception is on its way, as is what the `CheckpointIO`
                raises.
        """
        steps: list[Callable[[], object]] = [
            *(swapper.rest for optimizer in self.optimizers if (swapper := swapper_of(optimizer)) is not None),
            self._directories.saving.wait,
            self._directories.close,
            self._teardown_stock,
            # Last: what Lightning does before may use the pools.
            self._trim_pools,
        ]
        failures = []
        for step in steps:
            try:
                step()
            except Exception as error:
                failures.append(error)
        if failures and not self._interrupted:
            raise failures[0]
        if failures:
            log.error("after another exception: %s", str(failures[0]))

    def _teardown_stock(self) -> None:
        module = self.lightning_module
        if module is not None and (_parameter_swappers(module) or _stays(module, torch.device("cpu"))):
            # The stock strategy calls `cpu`, which would read all parameters: see `model_to_device`.
            with temporary_attribute(module, "cpu", lambda: module):
                super().teardown()
        else:
            super().teardown()

    def _trim_pools(self) -> None:
        """Free what the pools, and parameters on an accelerator, do not need between the calls of a Trainer."""
        for swapper in () if self.lightning_module is None else _parameter_swappers(self.lightning_module):
            swapper.rest()
        for settings in (self._settings, *(_settings_of.get(optimizer) for optimizer in self.optimizers)):
            if settings is not None and (shared := Shared.existing(settings)) is not None:
                shared.rest()


def _stays(module: torch.nn.Module, device: torch.device) -> bool:
    """True if nothing is gained by moving `module` to `device`."""
    is_there = all(tensor.device == device for tensor in (*module.parameters(), *module.buffers()))
    return is_there and (device.type == "cpu" or bool(_parameter_swappers(module)))


def _parameter_swappers(module: torch.nn.Module) -> list[ParameterSwapper]:
    """Open swappers that have parameters of `module`, without those of `swapper.init`."""
    homes = [home for p in swapped_tensors(module) if (home := home_of(p)) is not None and not home.temporary]
    keepers = {home.owner: home.keeper for home in homes}.values()
    return [keeper for keeper in keepers if isinstance(keeper, ParameterSwapper)]  # Else using them says it is closed.


def _keeps(swapper: ParameterSwapper, settings: OffloadConfig) -> bool:
    """True if `swapper` has parameters where `settings` want them. From then on it belongs to `settings`."""
    if swapper.store is not None:
        return settings.offload_param.device == "nvme" and Shared.join(settings, swapper.store)
    steps = {"gradient_accumulation_steps": settings.gradient_accumulation_steps}
    former = swapper.made_with
    if not isinstance(former, OffloadConfig) or former.model_copy(update=steps) != settings:
        return False
    swapper.made_with = settings
    return True


def _converts(plugin: Precision, module: torch.nn.Module) -> bool:
    """True if `plugin` gives parameters of `module` another dtype."""
    dtypes = sorted({p.dtype for p in module.parameters()}, key=str)
    sample = torch.nn.Module()
    for number, dtype in enumerate(dtypes):
        sample.register_parameter(
            str(number), torch.nn.Parameter(torch.empty(1, dtype=dtype, device="cpu"), requires_grad=False)
        )
    return [p.dtype for p in plugin.convert_module(sample).parameters()] != dtypes


def _close(optimizer: Optimizer) -> None:
    swapper = swapper_of(optimizer)
    assert swapper is not None
    try:
        swapper.close()
    except SwapError as error:  # Of state that nobody wants any more.
        log.error("when the optimizer of an earlier fit was closed: %s", str(error))


_CLIPS: dict[str, Callable[[OptimizerSwapper, float], object]] = {
    "clip_grad_by_norm": OptimizerSwapper.clip_grad_norm_,
    "clip_grad_by_value": OptimizerSwapper.clip_grad_value_,
}
"""Methods of a precision plugin, and those that do the same without reading all evicted gradients at once."""


def _clip(plugin: Precision, name: str, optimizer: Optimizer, clip_val: int | float) -> None:
    swapper = swapper_of(optimizer)
    if swapper is None:
        getattr(type(plugin), name)(plugin, optimizer, clip_val)
    else:
        _CLIPS[name](swapper, clip_val)


class OnOneDevice(Swapping, OneDevice, SingleDeviceStrategy):
    """Trains on one device."""

    strategy_name = "swapper"
    host = "the Trainer"

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        checkpoint_format: Literal["directory", "full"] | None = None,
        device: str | torch.device | None = None,
        offload_optimizer: bool | None = None,
        offload_optimizer_device: Literal["cpu", "nvme"] | None = None,
        offload_parameters: bool | None = None,
        offload_params_device: Literal["cpu", "nvme"] | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool | None = None,
        overlap_events: bool | None = None,
        thread_count: int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **deepspeed: Any,
    ) -> None:
        given = given_among(locals())
        self._configure(settings_of(type(self).__name__, config, given | deepspeed), checkpoint_format)
        self._parallel_devices = None if device is None else [torch.device(device)]
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, device="cpu"
        )


class OnDDP(Swapping, DDPStrategy):
    """Trains in several processes, as `DDPStrategy`."""

    strategy_name = "swapper_ddp"
    _loads_together = True

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        checkpoint_format: Literal["directory", "full"] | None = None,
        together: bool = False,
        annex: str | os.PathLike[str] | None = None,
        offload_optimizer: bool | None = None,
        offload_optimizer_device: Literal["cpu", "nvme"] | None = None,
        offload_parameters: bool | None = None,
        offload_params_device: Literal["cpu", "nvme"] | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool | None = None,
        overlap_events: bool | None = None,
        thread_count: int | None = None,
        **ddp: Any,
    ) -> None:
        given = given_among(locals())
        others = {name: ddp.pop(name) for name in not_of_ddp(type(self), ddp)}
        self._configure(settings_of(type(self).__name__, config, given | others), checkpoint_format, together, annex)
        self._refuse_annex_of_one()
        super().__init__(**ddp)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen":
            kills_and_waits(self._launcher)

    # --- What DDP does with all parameters at once -----------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """As in the stock strategy, but a model on the drive is synchronized one parameter at a time."""
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == "fit" or not has_evicted_parameters(module):  # For `fit` see `_setup_model`.
            super().setup(trainer)
            return
        synchronize(module)
        names = [name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())]
        with temporary_attribute(module, "_ddp_params_and_buffers_to_ignore", names):
            super().setup(trainer)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        with temporary_attribute(self, "_ddp_kwargs", ddp_arguments(model, self._ddp_kwargs)):
            return super()._setup_model(model)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """As of `SwapStrategy`, but nothing of it goes on in the background: other ranks may load it at once."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._directories.remember({})  # Ranks other than 0 have not used it.
        self._directories.saving.wait()

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """As in the stock strategy."""
        module = self.lightning_module
        manual = module is not None and not module.automatic_optimization
        if manual and not self._pl_static_graph_delay_done and getattr(self.model, "static_graph", False):
            # In the first backward of a static graph DDP reduces gradients only now, when they have been evicted. They
            # stay in memory until the step.
            for swapper in map(swapper_of, self.optimizers):
                if swapper is not None and swapper.gradients is not None:
                    swapper.gradients.bring_back_all()
        super().post_backward(closure_loss)


def kills_and_waits(launcher: Any) -> None:
    """Have a launcher of subprocesses wait for the death of those that it kills. None is one of somebody else."""
    if launcher is not None:
        launcher.kill = partial(_kill_and_wait, launcher)


def _kill_and_wait(launcher: _SubprocessScriptLauncher, signum: signal.Signals) -> None:
    """As the launcher's `kill`, which on Ctrl-C kills all processes but this one, and wait until they are dead.

    Only then can the end of this one remove what they leave on the drive.
    """
    type(launcher).kill(launcher, signum)
    if signum == signal.SIGKILL:
        for process in launcher.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DEATH_S)
