"""The strategies for one of the packages `lightning.fabric` and `lightning_fabric`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from swapper.fabric.strategy import OnDDP, OnOneDevice
from swapper.strategy import arguments as strategy_arguments
from swapper.strategy.arguments import ARGUMENTS

__all__ = ["bind", "register"]


def bind(package: str, module: str) -> dict[str, Any]:
    """The classes for a package, to be found in `module`."""
    strategies = importlib.import_module(f"{package}.strategies")

    files = importlib.import_module(f"{package}.plugins").TorchCheckpointIO

    class SwapStrategy(OnOneDevice, strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
        _files = files
        __doc__ = f"""Fabric on one device, with optimizer state, gradients and parameters where a config says.

    {ARGUMENTS}"""

    class SwapDDPStrategy(OnDDP, strategies.DDPStrategy):  # type: ignore[misc, name-defined]
        _files = files
        __doc__ = f"""`DDPStrategy`, with optimizer state, gradients and parameters of each process where a config says.

    {ARGUMENTS}"""

    for each in (SwapStrategy, SwapDDPStrategy):
        each.__module__, each.__qualname__ = module, each.__name__
    return {"SwapStrategy": SwapStrategy, "SwapDDPStrategy": SwapDDPStrategy}


def register(package: str, classes: Mapping[str, Any]) -> None:
    """Let `Fabric(strategy="swapper_nvme")` of a package find the strategies. May be called again."""
    strategy_arguments.register(importlib.import_module(f"{package}.strategies").STRATEGY_REGISTRY, classes)
