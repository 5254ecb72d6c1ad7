"""The strategies for `lightning_fabric`. Importing this registers them there."""

from __future__ import annotations

from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.fsdp import FSDPStrategy
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from lightning_fabric.strategies.single_device import SingleDeviceStrategy

from swapper.fabric.model_parallel import OnFSDP, OnModelParallel
from swapper.fabric.strategy import OnDDP, OnOneDevice
from swapper.strategy.arguments import register
from swapper.strategy.swapping import SwappingStrategy

__all__ = ["SwapDDPStrategy", "SwapFSDPStrategy", "SwapModelParallelStrategy", "SwapStrategy"]


class SwapStrategy(OnOneDevice, SingleDeviceStrategy):  # type: ignore[misc]
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


class SwapDDPStrategy(OnDDP, DDPStrategy):  # type: ignore[misc]
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


class SwapModelParallelStrategy(OnModelParallel, ModelParallelStrategy):  # type: ignore[misc]
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


class SwapFSDPStrategy(OnFSDP, FSDPStrategy):  # type: ignore[misc]
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


register(STRATEGY_REGISTRY, SwapStrategy, SwapDDPStrategy, SwapModelParallelStrategy, SwapFSDPStrategy)
