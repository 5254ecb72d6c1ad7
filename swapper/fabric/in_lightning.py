"""The strategies for `lightning.fabric`. Importing this registers them there."""

from __future__ import annotations

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from swapper.fabric.strategy import OnDDP, OnOneDevice
from swapper.strategy.arguments import register
from swapper.strategy.swapping import SwappingStrategy

__all__ = ["SwapDDPStrategy", "SwapStrategy"]


class SwapStrategy(OnOneDevice, SingleDeviceStrategy):
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


class SwapDDPStrategy(OnDDP, DDPStrategy):
    __doc__ = SwappingStrategy.__doc__
    files = TorchCheckpointIO


register(STRATEGY_REGISTRY, SwapStrategy, SwapDDPStrategy)
