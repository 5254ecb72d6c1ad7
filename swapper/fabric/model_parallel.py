"""`SwapModelParallelStrategy` (FSDP2, tensor parallelism) and `SwapFSDPStrategy` (FSDP1) of Fabric.

See [Note: two Lightnings] in `swapper.strategy.swapping`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.checkpoint.saved_model import plain_model
from swapper.errors import ConfigError, SwapError
from swapper.fabric.strategy import State, Swapping
from swapper.strategy.arguments import ConfigLike, not_of_ddp, settings_of
from swapper.strategy.sharding import check_fits_fsdp1, divide_ranks, load_whole_tensors
from swapper.strategy.swapping import SwappingStrategy
from swapper.tensors.sharded import is_sharded

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.strategies.fsdp import FSDPStrategy
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
else:
    FSDPStrategy = ModelParallelStrategy = object

__all__ = ["OnFSDP", "OnModelParallel"]


class Sharding(Swapping):
    """The base of both strategies: all ranks save and load, by default the checkpoints of the stock strategy."""

    _in_background = False

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """There is none, as in the stock strategy."""
        return super(SwappingStrategy, self).checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        super(SwappingStrategy, type(self)).checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

    @property
    def checkpoint_format(self) -> str:
        """ "full" (the default): what the stock strategy writes, distributed or one file. Or "directory"."""
        return self._wanted_format or "full"

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Shard or wrap the module, and remember what that makes.

        Raises:
            ConfigError: `SwapModelParallelStrategy` has no `parallelize_fn`, and it is not sharded.
        """
        sharded: torch.nn.Module = super(Swapping, self).setup_module(module)
        self._modules.add(sharded)
        return sharded

    def save_checkpoint(
        self,
        path: str | Path,
        state: State,
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save `state`, as the stock strategy does or as a directory. All ranks call this.

        Raises:
            SwapError: `path` is a directory of ours, and the stock strategy's checkpoint is to have the name.
            ConfigError, SwapIOError: as of `SwapStrategy`, on all ranks.
        """
        path = self.broadcast(path)
        if self.checkpoint_format == "full":
            self._refuse_directory(path)
        super().save_checkpoint(path, state, storage_options, filter)

    def _refuse_directory(self, path: str | Path) -> None:
        if self.broadcast(is_checkpoint(path)):
            raise SwapError(
                f"{os.fspath(path)} is a directory that a strategy of swapper, or swapper.save_checkpoint, has saved, "
                f"which {type(self).__name__} does not take here; use another name, checkpoint_format='directory' with "
                "SwapModelParallelStrategy, or swapper checkpoint export to read it"
            )


class OnModelParallel(Sharding, ModelParallelStrategy):
    """Trains what `parallelize_fn` has sharded, in several processes, as `ModelParallelStrategy`."""

    _loads_together = True

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        parallelize_fn: Callable[[Any, Any], Any] | None = None,
        checkpoint_format: Literal["directory", "full"] | None = None,
        annex: str | os.PathLike[str] | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        **deepspeed: Any,
    ) -> None:
        name = type(self).__name__
        settings = settings_of(name, config, deepspeed)
        self._configure(settings, checkpoint_format or "full", annex=annex)
        super().__init__(
            parallelize_fn=parallelize_fn or _is_sharded_already,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """As in the stock strategy: only shards are swapped."""
        with super(Swapping, self).module_init_context(empty_init):
            yield

    def load_checkpoint(
        self,
        path: str | Path,
        state: torch.nn.Module | Optimizer | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of the stock strategy, of either kind, or a directory. All ranks call this.

        Raises:
            ConfigError, KeyError, SwapError, SwapIOError: as of `SwapStrategy`; of a directory on all ranks.
        """
        path = self.broadcast(path)
        if not self.broadcast(is_checkpoint(path)):
            return super(Swapping, self).load_checkpoint(path, state, strict, weights_only)
        return self._load_directory(path, state, strict)

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole tensors into the module, one at a time."""
        load_whole_tensors(plain_model(module), state_dict, strict)

    def setup_environment(self) -> None:
        """As in the stock strategy. With "auto" beside the size of the other dimension, it divides."""
        divide_ranks(self)
        super().setup_environment()

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Optimizer], Any]:
        """Shard the module and swap the optimizers.

        Raises:
            ConfigError: sharding has replaced parameters that an optimizer has; and as `setup_optimizer`.
        """
        before = {id(p): p for p in module.parameters()}
        module = self.setup_module(module)
        now = {id(p) for p in module.parameters()}
        for optimizer in optimizers:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if mine & (before.keys() - now):
                raise ConfigError(
                    "parallelize_fn replaces parameters that the optimizer has, which would train nothing: call "
                    "fabric.setup_module(model) first, make the optimizer, then call fabric.setup_optimizers(optimizer)"
                )
        self._offload(optimizers)
        return module, [super(Swapping, self).setup_optimizer(optimizer) for optimizer in optimizers], scheduler


class OnFSDP(Sharding, FSDPStrategy):
    """Trains in several processes, as `FSDPStrategy`, which wraps the module in `FullyShardedDataParallel`."""

    def __init__(
        self, config: ConfigLike | None = None, *, checkpoint_format: Literal["full"] | None = None, **fsdp: Any
    ) -> None:
        given = {name: fsdp.pop(name) for name in not_of_ddp(type(self), fsdp, FullyShardedDataParallel)}
        settings = settings_of(type(self).__name__, config, given)
        check_fits_fsdp1(type(self).__name__, settings, checkpoint_format)
        self._configure(settings, checkpoint_format)
        super().__init__(**fsdp)

    def load_checkpoint(
        self,
        path: str | Path,
        state: torch.nn.Module | Optimizer | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of the stock strategy, of either kind.

        Raises:
            SwapError: `path` is a directory that another strategy of ours has saved.
        """
        path = self.broadcast(path)
        self._refuse_directory(path)
        return super().load_checkpoint(path, state, strict, weights_only)

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Optimizer], Any]:
        """Wrap the module and swap the optimizers. Raises as `setup_optimizer`."""
        done = super(Swapping, self).setup_module_and_optimizers(module, optimizers, scheduler)
        self._offload(optimizers)
        return done

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """As in the stock strategy: the norm is that of all ranks."""
        return super(Swapping, self).clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)


def _is_sharded_already(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Takes the place of a `parallelize_fn` that the user has not given, as where a strategy is given by its name."""
    if not any(is_sharded(p) for p in module.parameters()):
        raise ConfigError(
            "the module is not sharded: apply fully_shard or parallelize_module, on fabric.strategy.device_mesh, "
            "before fabric.setup; or give SwapModelParallelStrategy(parallelize_fn=...)"
        )
    return module
