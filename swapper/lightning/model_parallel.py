"""`SwapModelParallelStrategy` (FSDP2, tensor parallelism) and `SwapFSDPStrategy` (FSDP1): the state is on a drive.

See [Note: two Lightnings] in `swapper.strategy.swapping`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.fsdp import FullyShardedDataParallel

from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.errors import SwapError
from swapper.lightning.strategy import Swapping, kills_and_waits
from swapper.storage.agreement import agreed
from swapper.strategy.arguments import ConfigLike, given_among, not_of_ddp, settings_of
from swapper.strategy.sharding import apply_if_needed, check_fits_fsdp1, divide_ranks, load_whole_tensors
from swapper.strategy.swapping import SwappingStrategy, temporary_attribute
from swapper.tensors.sharded import is_sharded, reshard

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import FSDPPrecision, Precision
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
else:
    FSDPStrategy = ModelParallelStrategy = object

__all__ = ["OnFSDP", "OnModelParallel"]


class Sharding(Swapping):
    """The base of both strategies: all ranks save and load, by default the checkpoints of the stock strategy."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        kills_and_waits(self._launcher)

    @property
    def checkpoint_format(self) -> str:
        """ "full" (the default): what the stock strategy writes, distributed or one file. Or "directory".

        Raises:
            ConfigError: there is a `CheckpointIO`, and "directory" was asked for.
        """
        return super().checkpoint_format if self._wanted_format == "directory" else "full"

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint. All ranks call this.

        Raises:
            SwapError: something in it cannot be saved; named, with what to do.
            SwapIOError: the drive failed. An earlier directory is whole.
        """
        path = self.broadcast(filepath)
        if self.checkpoint_format == "full":
            if self.is_global_zero:
                self._remove_directory(path)  # The stock strategy would write into it.
            self.barrier()
        super().save_checkpoint(checkpoint, path, storage_options)


class OnModelParallel(Sharding, ModelParallelStrategy):
    """Trains what `configure_model` has sharded, in several processes, as `ModelParallelStrategy`."""

    strategy_name = "swapper_model_parallel"

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        checkpoint_format: Literal["directory", "full"] | None = None,
        annex: str | os.PathLike[str] | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
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
        **deepspeed: Any,
    ) -> None:
        given = given_among(locals())
        name = type(self).__name__
        settings = settings_of(name, config, given | deepspeed)
        self._configure(settings, checkpoint_format or "full", annex=annex)
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Begin whatever the Trainer is called for. With "auto" beside the size of the other dimension, it divides."""
        divide_ranks(self)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """As in the stock strategy. A model that is there, and of the right dtype, already is not moved again.

        Raises:
            ConfigError: it would have to be moved or converted, and an optimizer of an earlier `fit` is swapped.
        """
        module = self.lightning_module
        assert module is not None
        reshard(module)  # Parameters that an evaluation has left whole are no shards.
        # torch moves a DTensor by `swap_tensors`, even to where it is, which needs it to have no weak references.
        with temporary_attribute(module, "_apply", partial(apply_if_needed, module)):
            super().setup(trainer)

    def model_to_device(self) -> None:
        """As in the stock strategy."""
        super(Swapping, self).model_to_device()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """As in the stock strategy: only shards are swapped."""
        with super(Swapping, self).tensor_init_context(empty_init):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict, as in the stock strategy; for a directory each rank's shards, wherever they are."""
        if self.checkpoint_format == "full":
            return super(Swapping, self).lightning_module_state_dict()
        assert self.lightning_module is not None
        state: dict[str, Any] = self.lightning_module.state_dict()
        self._directories.remember(state)
        return state

    def _saves_together(self) -> bool:
        module = self.lightning_module
        assert module is not None
        reshard(module)
        return any(map(is_sharded, module.parameters()))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of the stock strategy, of either kind, or a directory.

        Raises:
            SwapError, SwapIOError: as from `load_checkpoint`, on all ranks.
        """
        path = self.broadcast(checkpoint_path)
        if not self.broadcast(is_checkpoint(path)):
            return super(Swapping, self).load_checkpoint(path, weights_only)
        with agreed():  # Else those that can open it would wait for one that cannot.
            return self._directories.load(path, self.lightning_module, self._annex, together=True)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True if the Trainer is to load state of optimizers: from a directory. From others `load_checkpoint` has."""
        return self._directories.is_open

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model from a directory; from others `load_checkpoint` has."""
        module = self.lightning_module
        assert module is not None
        if not self._directories.has(checkpoint):
            super(Swapping, self).load_model_state_dict(checkpoint, strict)
        elif not strict or not self._directories.load_model(checkpoint, module):
            load_whole_tensors(module, checkpoint["state_dict"], strict)


class OnFSDP(Sharding, FSDPStrategy):
    """Trains in several processes, as `FSDPStrategy`, which wraps the model in `FullyShardedDataParallel`."""

    strategy_name = "swapper_fsdp"

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        checkpoint_format: Literal["full"] | None = None,
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
        **fsdp: Any,
    ) -> None:
        given = given_among(locals())
        others = {name: fsdp.pop(name) for name in not_of_ddp(type(self), fsdp, FullyShardedDataParallel)}
        settings = settings_of(type(self).__name__, config, given | others)
        check_fits_fsdp1(type(self).__name__, settings, checkpoint_format)
        self._configure(settings, checkpoint_format)
        super().__init__(**fsdp)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of the stock strategy, of either kind.

        Raises:
            SwapError: it is a directory that another strategy of ours has saved.
        """
        path = self.broadcast(checkpoint_path)
        if is_checkpoint(path):
            raise SwapError(
                f"{os.fspath(path)} is a directory that another strategy of swapper saved, and not for FSDP1; write it "
                "as a file first: swapper checkpoint export DIRECTORY FILE --to lightning"
            )
        return super().load_checkpoint(path, weights_only)

    @property
    def precision_plugin(self) -> FSDPPrecision:
        """As in the stock strategy."""
        return super(SwappingStrategy, self).precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        stock = super(SwappingStrategy, type(self))
        stock.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]  # Refuses those of others.
        Swapping.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]
