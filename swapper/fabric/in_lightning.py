"""The strategies for `lightning.fabric`. Importing this registers them there."""

from __future__ import annotations

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.fsdp import FSDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from swapper.fabric.model_parallel import OnFSDP, OnModelParallel
from swapper.fabric.strategy import OnDDP, OnOneDevice
from swapper.strategy.arguments import register
from swapper.strategy.swapping import SwappingStrategy

__all__ = ["SwapDDPStrategy", "SwapFSDPStrategy", "SwapModelParallelStrategy", "SwapStrategy"]


class SwapStrategy(OnOneDevice, SingleDeviceStrategy):
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


class SwapDDPStrategy(OnDDP, DDPStrategy):
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


class SwapModelParallelStrategy(OnModelParallel, ModelParallelStrategy):
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


class SwapFSDPStrategy(OnFSDP, FSDPStrategy):
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


register(STRATEGY_REGISTRY, SwapStrategy, SwapDDPStrategy, SwapModelParallelStrategy, SwapFSDPStrategy)
