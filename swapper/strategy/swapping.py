"""`SwappingStrategy`: the settings, checkpoint formats and devices that all strategies of Lightning and Fabric share.

[Note: two Lightnings] `lightning` and `pytorch_lightning` (for Fabric `lightning_fabric`) are packages of the same
content, and a Trainer of one refuses a strategy of the other. So only the modules `in_*` of `swapper.lightning` and
`swapper.fabric`, one for each package, have classes with a base of Lightning's. In all others the base is missing; type
checkers see that of `lightning`.

[Note: the device of a named strategy] Lightning constructs a strategy that is given by name without arguments, and
would train on the CPU whatever the accelerator. It sets `parallel_devices` of a strategy that has this attribute.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim import Optimizer

from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError, path_given, show
from swapper.io.devices import is_accelerator
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.storage.agreement import exchanged

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO

__all__ = ["OneDevice", "SwappingStrategy", "swapper_of", "temporary_attribute"]


class SwappingStrategy:
    """Trains with optimizer state, gradients and parameters where a config says.

    `SwapStrategy` trains on one device; `SwapDDPStrategy` is `DDPStrategy`, in which each process swaps its own;
    `SwapModelParallelStrategy` is `ModelParallelStrategy` (FSDP2 and tensor parallelism), in which each rank has the
    optimizer's state of its shards, and those of FSDP2 themselves, on its drive. `SwapFSDPStrategy` is `FSDPStrategy`
    (FSDP1) with the optimizer's state there.

    Args:
        config: an `OffloadConfig`, a mapping, or the path of a YAML or JSON file; also DeepSpeed's JSON or what it
            holds, read by `OffloadConfig.from_deepspeed`. With neither this nor arguments of `DeepSpeedStrategy` the
            optimizer's state goes to NVMe.
        checkpoint_format: "directory" (the default, unless `checkpoint_io` is given) publishes what is on the drive by
            hard links; "full" writes the files of the stock strategy. Both are read. Of a sharded model "full" is the
            default, all ranks save a directory together, and `SwapFSDPStrategy` has none.
        together: of `SwapDDPStrategy`: True if each process writes, or links, a part of a directory, which all of them
            must see, as `swapper.save_checkpoint(..., together=True)`; else rank 0 saves all of it.
        annex: of `SwapDDPStrategy` with `together`, and `SwapModelParallelStrategy`: a directory on this process's own
            drive for what is large of a directory that is saved, as `swapper.save_checkpoint(..., annex=annex)`; and
            where annexes of those that are loaded may be now.
        offload_optimizer, offload_optimizer_device: keep the optimizer's state on "cpu" (the default) or "nvme".
        offload_parameters, offload_params_device: the same for parameters. With both on "nvme" gradients go there too.
        nvme_path: a directory on the drive. Default: those in $SWAPPER_NVME_PATH, else `./.swapper`, which is made.
        block_size, queue_depth, single_submit, overlap_events, thread_count: as `aio` of a config.
        accelerator, checkpoint_io, precision_plugin: as for the stock strategy, as are its other arguments. Beside a
            `tensor_parallel_size` that is given, a `data_parallel_size` of "auto" is that of all other ranks.
        deepspeed: other arguments of `DeepSpeedStrategy` have no meaning here, and are named in one warning.

    Raises:
        ConfigError: config and arguments are both given, or cannot work; `together` or `annex` is, and checkpoints are
            files.

    Attributes:
        files: class of the `CheckpointIO` that is used if the user gives none.
        wrapping: class of those that wrap another `CheckpointIO`, if the host has such.
    """

    offload_config: OffloadConfig
    files: ClassVar[type[Any]]
    wrapping: ClassVar[type[Any] | tuple[()]] = ()
    _loads_together: ClassVar[bool] = False
    """True if all processes load what one does, so that what one of them raises is raised on all."""
    _checkpoint_io: CheckpointIO | None

    def _configure(
        self,
        config: OffloadConfig,
        checkpoint_format: str | None,
        together: bool = False,
        annex: str | os.PathLike[str] | None = None,
    ) -> None:
        if checkpoint_format not in (None, "directory", "full"):
            raise ConfigError(f"checkpoint_format: {show(checkpoint_format)} is not one of directory, full")
        if not isinstance(together, bool):
            raise ConfigError(f"together: {show(together)} is not a switch; write True or False")
        self.offload_config = config
        self._together = together
        self._annex = None if annex is None else path_given("annex", annex)
        self._wanted_format = checkpoint_format
        self._refuse_file_together(checkpoint_format)
        self._own_io: CheckpointIO = self.files()
        self._set_up()

    def _set_up(self) -> None:
        """Called when the settings are known; subclasses have more to set up."""

    def _builds_swapped(self, device: torch.device) -> bool:
        """True if parameters of models for `device` are swapped as they are made."""
        asked = self.offload_config.offload_param.device
        return asked == "nvme" or (asked == "cpu" and is_accelerator(device))

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads files: ours, or the user's, which wraps ours if it wraps another and was given none."""
        if self._checkpoint_io is None:
            return self._own_io
        if isinstance(self._checkpoint_io, self.wrapping):
            self._checkpoint_io.checkpoint_io = self._own_io  # Without effect if it has one.
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def checkpoint_format(self) -> str:
        """ "directory" or "full". The default is "full" with a `CheckpointIO` of the user's, which writes files.

        Raises:
            ConfigError: it is "full", and ranks are to save together, or to annexes.
        """
        found = self._wanted_format or ("directory" if self._checkpoint_io is None else "full")
        self._refuse_file_together(found)
        return found

    def _is_directory(self, path: str | os.PathLike[str]) -> bool:
        """True if `path` is a checkpoint that is a directory.

        Raises:
            SwapError: where all processes load it, it is one on some of them only: those would wait for the others.
        """
        found = exchanged(is_checkpoint(path)) if self._loads_together else [is_checkpoint(path)]
        if any(found) and not all(found):
            others = [rank for rank, is_there in enumerate(found) if not is_there]
            raise SwapError(
                f"{os.fspath(path)} is no checkpoint on ranks {others}, and a directory on the others: all processes "
                "load it, so all must see it at this path"
            )
        return found[0]

    def _refuse_file_together(self, checkpoint_format: str | None) -> None:
        if self._together and checkpoint_format == "full":
            raise ConfigError(
                "together: ranks share the save of a directory, and a file, which is what checkpoint_format='full' and "
                "a CheckpointIO write, is saved by rank 0; leave one of them out"
            )
        if self._annex is not None and checkpoint_format == "full":
            raise ConfigError(
                "annex: only a checkpoint that is a directory of ours has annexes; leave it out, or use "
                "checkpoint_format='directory' without a CheckpointIO"
            )

    def _refuse_annex_of_one(self) -> None:
        """Refuse that rank 0 saves all of the replicas to its own drive, which the others may not see."""
        if self._annex is not None and not self._together:
            raise ConfigError(
                "annex: without together=True rank 0 saves all, to a drive that other ranks may not see when they load "
                "it; set together=True too, or leave annex out"
            )


class OneDevice:
    """Trains on the device that the host sets, or that its constructor is given.

    Attributes:
        host: the object that chooses the devices, for messages.
    """

    host: ClassVar[str]
    _parallel_devices: list[torch.device] | None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, once the host has chosen it. See [Note: the device of a named strategy]."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise ConfigError(
                f"{type(self).__name__} trains on one device, and {self.host} has {len(devices)}; set devices=1, or "
                "use SwapDDPStrategy"
            )
        self._parallel_devices = devices

    @property
    def root_device(self) -> torch.device:
        """The device of the model."""
        if self._parallel_devices:
            return self._parallel_devices[0]
        device: torch.device = super().root_device  # type: ignore[misc]  # Of `SingleDeviceStrategy`.
        return device


def swapper_of(optimizer: Optimizer) -> OptimizerSwapper | None:
    """The swapper of an optimizer, or None if it is not swapped."""
    swapper = getattr(optimizer, "swapper", None)
    return swapper if isinstance(swapper, OptimizerSwapper) else None


@contextmanager
def temporary_attribute(owner: object, name: str, value: object) -> Generator[None, None, None]:
    """Give `owner` an attribute for a while, in place of the one that it has."""
    missing = object()
    former = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if former is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, former)
