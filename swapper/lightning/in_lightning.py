"""The classes for `lightning.pytorch`. Importing this registers the strategies there."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import (
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


class SwapStrategy(OnOneDevice, SingleDeviceStrategy):
    __doc__ = SwappingStrategy.__doc__
    files, wrapping = SwapCheckpointIO, _WrappingCheckpointIO


class SwapDDPStrategy(OnDDP, DDPStrategy):
    __doc__ = SwappingStrategy.__doc__
    files, wrapping = SwapCheckpointIO, _WrappingCheckpointIO


class SwapModelParallelStrategy(OnModelParallel, ModelParallelStrategy):
    __doc__ = SwappingStrategy.__doc__
    files, wrapping = SwapCheckpointIO, _WrappingCheckpointIO


class SwapFSDPStrategy(OnFSDP, FSDPStrategy):
    __doc__ = SwappingStrategy.__doc__
    files, wrapping = SwapCheckpointIO, _WrappingCheckpointIO


class SwapMonitor(Monitor, Callback):
    __doc__ = Monitor.__doc__


register(StrategyRegistry, SwapStrategy, SwapDDPStrategy, SwapModelParallelStrategy, SwapFSDPStrategy)
