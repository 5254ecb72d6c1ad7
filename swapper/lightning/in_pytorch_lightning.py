"""The classes for `pytorch_lightning`. Importing this registers the strategies there."""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins import TorchCheckpointIO
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from pytorch_lightning.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)

from swapper.lightning.files import CheckpointFiles
from swapper.lightning.model_parallel import OnFSDP, OnModelParallel
from swapper.lightning.monitor import Monitor
from swapper.lightning.strategy import OnDDP, OnOneDevice
from swapper.strategy.arguments import register
from swapper.strategy.swapping import SwappingStrategy

__all__ = [
    "SwapCheckpointIO",
    "SwapDDPStrategy",
    "SwapFSDPStrategy",
    "SwapModelParallelStrategy",
    "SwapMonitor",
    "SwapStrategy",
]


class SwapCheckpointIO(CheckpointFiles, TorchCheckpointIO):
    __doc__ = CheckpointFiles.__doc__


class SwapStrategy(OnOneDevice, SingleDeviceStrategy):  # type: ignore[misc]
    __doc__ = SwappingStrategy.__doc__
    files, wrapping = SwapCheckpointIO, _WrappingCheckpointIO


class SwapDDPStrategy(OnDDP, DDPStrategy):  # type: ignore[misc]
    __doc__ = SwappingStrategy.__doc__
    files, wrapping = SwapCheckpointIO, _WrappingCheckpointIO


class SwapModelParallelStrategy(OnModelParallel, ModelParallelStrategy):  # type: ignore[misc]
    __doc__ = SwappingStrategy.__doc__
    files, wrapping = SwapCheckpointIO, _WrappingCheckpointIO


class SwapFSDPStrategy(OnFSDP, FSDPStrategy):  # type: ignore[misc]
    __doc__ = SwappingStrategy.__doc__
    files, wrapping = SwapCheckpointIO, _WrappingCheckpointIO


class SwapMonitor(Monitor, Callback):  # type: ignore[misc]
    __doc__ = Monitor.__doc__


register(StrategyRegistry, SwapStrategy, SwapDDPStrategy, SwapModelParallelStrategy, SwapFSDPStrategy)
