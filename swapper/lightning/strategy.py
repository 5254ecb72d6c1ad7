"""What the strategies have in common: optimizers that are swapped as soon as Lightning has made them.

[Note: two Lightnings] `lightning.pytorch` and `pytorch_lightning` are two packages with the same content, and a Trainer
of one refuses a strategy of the other. So the classes here have no base of Lightning's: `swapper.lightning.namespaces`
makes strategies of them, for either package. A type checker sees `lightning.pytorch`.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from swapper.api import init, offload, unwrap_optimizer
from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.checkpoint.values import encode
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError, show
from swapper.lightning.directories import Directories, placeholder
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.parameter.swapper import ParameterSwapper
from swapper.session import Shared
from swapper.strategy.arguments import ConfigLike, given_among, not_of_ddp, settings_of
from swapper.strategy.ddp_sync import has_parameters_away, make_same, ready_for_ddp
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

__all__ = ["OnDDP", "OnOneDevice", "Swapping"]

log = logging.getLogger(__name__)

_settings_of: weakref.WeakKeyDictionary[Optimizer, OffloadConfig] = weakref.WeakKeyDictionary()
"""What each optimizer was swapped with by a strategy."""

_DEATH_S = 5.0
"""How long a process that was killed may take to be dead."""


class Swapping(Strategy):
    """Swaps the optimizers of the LightningModule, its gradients and its parameters, as the config says."""

    offload_config: OffloadConfig

    def _take(self, config: ConfigLike | None, given: Mapping[str, Any], format: str | None) -> None:
        self.offload_config = settings_of(type(self).__name__, config, given)
        self._settings = self.offload_config
        self._interrupted = False
        if format not in (None, "directory", "full"):
            raise ConfigError(f"checkpoint_format: {show(format)} is not one of directory, full")
        self._wanted_format = format
        self._directories = Directories()
        self._own_io = self._files()
        self._prunes = True

    def setup_environment(self) -> None:
        """The beginning of whatever a Trainer is called for."""
        self._interrupted = False
        super().setup_environment()

    # --- The model -------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Within it what is built goes to the drive, if the config has parameters there."""
        with ExitStack() as stack:
            stack.enter_context(super().tensor_init_context(empty_init))
            if self.offload_config.offload_param.device == "nvme":
                stack.enter_context(init(self._settings))
            yield

    def setup(self, trainer: Trainer) -> None:
        """As in the stock strategy. Parameters that an earlier Trainer has on the drive come back to be converted."""
        module = self.lightning_module
        if module is not None and (keepers := _keepers(module)) and _is_converted(module, self.precision_plugin):
            for swapper in keepers:
                swapper.close(keep_values=True)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """As in the stock strategy; what is on the CPU and stays there is not looked at, as that would bring it all."""
        if self.root_device.type != "cpu" or not _is_on_the_cpu(self.model):
            super().model_to_device()  # type: ignore[safe-super]

    # --- The optimizers --------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Have Lightning make the optimizers, and swap them. Those of an earlier `fit` are closed: their state is gone.

        Raises:
            ConfigError: the config cannot work with this model and these optimizers.
            SwapIOError: the drive failed, or has too little free space.
        """
        former = [optimizer for optimizer in self.optimizers if _swapper_of(optimizer) is not None]
        super().setup_optimizers(trainer)
        for optimizer in former:
            if not any(optimizer is other for other in self.optimizers):
                _close(optimizer)
        _collect_former_runs(self.optimizers)
        self._check_hyper_parameters(trainer)
        self._prunes = not trainer.checkpoint_callbacks
        keep_last = self.offload_config.checkpoint.keep_last
        if keep_last is not None and not self._prunes:
            log.warning("checkpoint.keep_last: %d has no effect: the ModelCheckpoint decides what is kept", keep_last)
        self._settings = self._settings_for(trainer)
        for optimizer in self.optimizers:
            if _settings_of.get(optimizer, self._settings) != self._settings and _swapper_of(optimizer) is not None:
                unwrap_optimizer(optimizer)  # The module kept it from a Trainer with another config.
        new = [optimizer for optimizer in self.optimizers if _swapper_of(optimizer) is None]
        self._swap(new)

    def _check_hyper_parameters(self, trainer: Trainer) -> None:
        """Refuse what no directory can hold now, and not when the first checkpoint is made."""
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
        """The config with the Trainer's accumulation. The same object as long as nothing differs: it has the pool."""
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

    def _swap(self, optimizers: Sequence[Optimizer]) -> None:
        settings = self._settings
        module = self.lightning_module
        assert module is not None
        _make_way(module, settings)
        if optimizers:
            offload(module, optimizers, settings)
            _settings_of.update((optimizer, settings) for optimizer in optimizers)

    # --- Clipping --------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """As in the stock strategy."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # What is set on the object leaves its class, whose name is a key in checkpoints. A class that clips in a way of
        # its own goes on doing so.
        if plugin is not None:
            for clip in (_clip_grad_by_norm, _clip_grad_by_value):
                name = clip.__name__.removeprefix("_")
                if getattr(type(plugin), name).__module__.endswith("plugins.precision.precision"):
                    setattr(plugin, name, partial(clip, plugin))
        self._precision_plugin = plugin

    # --- Checkpoints -----------------------------------------------------------------------------------------------

    _files: ClassVar[type[CheckpointIO]]
    _wrapping: ClassVar[type[CheckpointIO]]
    """Classes of the package of Lightning: what writes and reads files, and what is put around such."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files. One that wraps another, and was given none, wraps ours."""
        io = self._checkpoint_io
        if io is None:
            return self._own_io
        if isinstance(io, self._wrapping):
            io.checkpoint_io = self._own_io  # type: ignore[attr-defined]  # Without effect if it has one.
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def checkpoint_format(self) -> str:
        """ "directory" or "full"; with a `CheckpointIO` of the user's, which writes files, "full" if nothing was said.

        Raises:
            ConfigError: there is one, and "directory" was asked for.
        """
        if self._wanted_format == "directory" and self._checkpoint_io is not None:
            raise ConfigError(
                f"checkpoint_format: a directory is not written by {type(self._checkpoint_io).__name__}; use 'full', "
                "or give no CheckpointIO"
            )
        return self._wanted_format or ("directory" if self._checkpoint_io is None else "full")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict. What is on the drive stays there."""
        state = super().lightning_module_state_dict()
        if self.checkpoint_format == "directory":
            self._directories.dumped(state)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer; for a directory without the state, which is published where it lies."""
        if self.checkpoint_format == "full":
            return super().optimizer_state(optimizer)
        return placeholder(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save what Lightning has made, on rank 0.

        Raises:
            SwapError: something in it cannot be saved; named, with what to do.
            SwapIOError: the drive failed. An earlier checkpoint is whole.
        """
        if self.checkpoint_format == "full":
            if self.is_global_zero and self.checkpoint_io is not self._own_io:
                self._removed(filepath)  # Those of others write into a directory.
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif storage_options is not None:
            raise TypeError("storage_options has no meaning for checkpoint_format='directory'")
        elif self.is_global_zero:
            assert self.lightning_module is not None
            self._directories.save(checkpoint, filepath, self.lightning_module, self.optimizers, prune=self._prunes)
        if self.lightning_module is not None and self.lightning_module.trainer.state.status.value != "running":
            self._directories.settle()  # Nothing goes on meanwhile, and the caller may look for it.
            self._rest()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """What was saved, in either format."""
        self._directories.settle()
        if is_checkpoint(checkpoint_path):
            return self._directories.load(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model."""
        assert self.lightning_module is not None
        if not strict or not self._directories.load_model(checkpoint, self.lightning_module):
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state."""
        assert self.lightning_module is not None
        if not self._directories.load_optimizers(checkpoint, self.lightning_module, self.optimizers):
            super().load_optimizer_state_dict(checkpoint)
        self._directories.close()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint of either format, on rank 0."""
        if self.is_global_zero and not self._removed(filepath):
            super().remove_checkpoint(filepath)

    def _removed(self, filepath: str | Path) -> bool:
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
        failure: Exception | None = None
        for optimizer in self.optimizers:
            swapper = _swapper_of(optimizer)
            try:
                if swapper is not None:
                    swapper.rest()
            except SwapError as error:
                failure = failure or error
        try:
            self._directories.settle()
        except SwapError as error:
            failure = failure or error
        self._directories.close()
        self._directories.dumped({})
        module = self.lightning_module
        stays = module is not None and _is_on_the_cpu(module)
        if stays:
            vars(module)["cpu"] = lambda: module  # Lightning calls it: see `model_to_device`.
        try:
            super().teardown()
        except Exception as error:
            failure = failure or error
        finally:
            if stays:
                del vars(module)["cpu"]
        try:
            self._rest()
        except SwapError as error:
            failure = failure or error
        if failure is not None and not self._interrupted:
            raise failure
        if failure is not None:
            log.error("after another exception: %s", failure)

    def _rest(self) -> None:
        """Between the calls of a Trainer the pool has no memory that it does not need."""
        for settings in (self._settings, *(_settings_of.get(optimizer) for optimizer in self.optimizers)):
            if settings is not None and (shared := Shared.existing(settings)) is not None:
                shared.rest()


def _collect_former_runs(optimizers: Sequence[Optimizer]) -> None:
    """Let the files and engines go of earlier fits that nobody can reach any more, before others are made.

    [Note: the end of a Trainer] After `fit` a Trainer can still save the state of its optimizers, so it keeps them. But
    a Trainer, its loops and its model refer to each other: when the program lets go of them, only the garbage collector
    finds out, and that need not come for many fits. So it is called here, if there is something to be found.

    Args:
        optimizers: of the fit that begins.
    """
    ours = {id(optimizer) for optimizer in optimizers}
    others = [optimizer for optimizer in list(_settings_of) if id(optimizer) not in ours]
    if any((swapper := _swapper_of(optimizer)) is not None and not swapper.closed for optimizer in others):
        del others
        gc.collect()


def _swapper_of(optimizer: Optimizer) -> OptimizerSwapper | None:
    swapper = getattr(optimizer, "swapper", None)
    return swapper if isinstance(swapper, OptimizerSwapper) else None


def _is_on_the_cpu(module: torch.nn.Module | None) -> bool:
    return module is not None and all(
        tensor.device.type == "cpu" for tensor in (*module.parameters(), *module.buffers())
    )


def _keepers(module: torch.nn.Module) -> list[ParameterSwapper]:
    """What has parameters of `module`, but for what built it."""
    homes = [home for p in module.parameters() if (home := home_of(p)) is not None and not home.temporary]
    keepers = {home.owner: home.keeper for home in homes}.values()
    return [keeper for keeper in keepers if isinstance(keeper, ParameterSwapper)]  # Else using them says it is closed.


def _is_converted(module: torch.nn.Module, plugin: Precision) -> bool:
    """Whether `plugin` gives parameters of `module` another dtype."""
    dtypes = sorted({p.dtype for p in module.parameters()}, key=str)
    probe = torch.nn.Module()
    for number, dtype in enumerate(dtypes):
        probe.register_parameter(str(number), torch.nn.Parameter(torch.empty(1, dtype=dtype), requires_grad=False))
    return [p.dtype for p in plugin.convert_module(probe).parameters()] != dtypes


def _make_way(module: torch.nn.Module, settings: OffloadConfig) -> None:
    """Bring back parameters that an earlier strategy has on the drive, unless they are where `settings` wants them."""
    for swapper in _keepers(module):
        wanted = settings.offload_param.device == "nvme" and swapper is vars(module).get("swapper")
        if not (wanted and Shared.join(settings, swapper.store)):
            swapper.close(keep_values=True)


def _close(optimizer: Optimizer) -> None:
    swapper = _swapper_of(optimizer)
    assert swapper is not None
    try:
        swapper.close()
    except SwapError as error:  # Of state that nobody wants any more.
        log.error("when the optimizer of an earlier fit was closed: %s", error)


def _clip_grad_by_norm(plugin: Precision, optimizer: Optimizer, clip_val: int | float) -> None:
    """As Lightning's, but gradients that are away are not all brought back."""
    swapper = _swapper_of(optimizer)
    if swapper is None:
        type(plugin).clip_grad_by_norm(plugin, optimizer, clip_val)
    else:
        swapper.clip_grad_norm_(clip_val)


def _clip_grad_by_value(plugin: Precision, optimizer: Optimizer, clip_val: int | float) -> None:
    """As Lightning's, but gradients that are away are not brought back."""
    swapper = _swapper_of(optimizer)
    if swapper is None:
        type(plugin).clip_grad_by_value(plugin, optimizer, clip_val)
    else:
        swapper.clip_grad_value_(clip_val)


class OnOneDevice(Swapping, SingleDeviceStrategy):
    """The part of `SwapStrategy` that is not Lightning's."""

    strategy_name = "swapper"

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
        # [Note: the device of a named strategy] Lightning makes it without arguments, and would train on the CPU
        # whatever the accelerator. It gives its devices to whoever has this attribute.
        self._parallel_devices: list[torch.device] | None = None if device is None else [torch.device(device)]
        self._take(config, given | deepspeed, checkpoint_format)
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, device="cpu"
        )

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, once the Trainer has chosen it. See [Note: the device of a named strategy]."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise ConfigError(
                f"{type(self).__name__} trains on one device, and the Trainer has {len(devices)}; set devices=1, or "
                "use SwapDDPStrategy"
            )
        self._parallel_devices = devices

    @property
    def root_device(self) -> torch.device:
        """Where the model is."""
        return self._parallel_devices[0] if self._parallel_devices else super().root_device


class OnDDP(Swapping, DDPStrategy):
    """The part of `SwapDDPStrategy` that is not Lightning's."""

    strategy_name = "swapper_ddp"

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        checkpoint_format: Literal["directory", "full"] | None = None,
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
        self._take(config, given | others, checkpoint_format)
        super().__init__(**ddp)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self._launcher
        if self._start_method == "popen":
            launcher.kill = partial(_kill_and_wait, launcher)

    # --- What DDP does with all parameters at once -----------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """As in the stock strategy, but of a model on the drive one parameter at a time is synchronized."""
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == "fit" or not has_parameters_away(module):  # For `fit` see `_setup_model`.
            super().setup(trainer)
            return
        make_same(module)
        names = [name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())]
        with _attribute(module, "_ddp_params_and_buffers_to_ignore", names):
            super().setup(trainer)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        with _attribute(self, "_ddp_kwargs", ready_for_ddp(model, self._ddp_kwargs)):
            return super()._setup_model(model)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """As of `SwapStrategy`, but nothing of it goes on in the background: other ranks may load it at once."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._directories.dumped({})  # What is not rank 0 has not used it.
        self._directories.settle()

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """As in the stock strategy."""
        module = self.lightning_module
        manual = module is not None and not module.automatic_optimization
        if manual and not self._pl_static_graph_delay_done and getattr(self.model, "static_graph", False):
            # The first backward of a static graph: its gradients are reduced only now, when they have been taken. They
            # stay for the step.
            for optimizer in self.optimizers:
                swapper = _swapper_of(optimizer)
                if swapper is not None and swapper.gradients is not None:
                    swapper.gradients.bring_back_all()
        super().post_backward(closure_loss)


def _kill_and_wait(launcher: _SubprocessScriptLauncher, signum: signal.Signals) -> None:
    """As the launcher does, which on Ctrl-C kills all processes but this one.

    Only when they are dead the end of this one can remove what they leave on the drive.
    """
    type(launcher).kill(launcher, signum)
    if signum == signal.SIGKILL:
        for process in launcher.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DEATH_S)


@contextmanager
def _attribute(owner: object, name: str, value: object) -> Generator[None, None, None]:
    """Within it `owner` has this attribute."""
    former = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if former is None:
            delattr(owner, name)
        else:
            setattr(owner, name, former)
