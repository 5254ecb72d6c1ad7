"""The strategy for one of the packages `lightning.fabric` and `lightning_fabric`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from swapper.fabric.strategy import Swapping
from swapper.strategy_arguments import ARGUMENTS, NAMES

__all__ = ["bind", "register"]


def bind(package: str, module: str) -> dict[str, Any]:
    """The class for a package, to be found in `module`."""
    strategies = importlib.import_module(f"{package}.strategies")

    class SwapStrategy(Swapping, strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
        _files = importlib.import_module(f"{package}.plugins").TorchCheckpointIO
        __doc__ = f"""Fabric on one device, with optimizer state, gradients and parameters where a config says.

    {ARGUMENTS}"""

    SwapStrategy.__module__, SwapStrategy.__qualname__ = module, "SwapStrategy"
    return {"SwapStrategy": SwapStrategy}


def register(package: str, classes: Mapping[str, Any]) -> None:
    """Let `Fabric(strategy="swapper_nvme")` of a package find the strategy. May be called again."""
    registry = importlib.import_module(f"{package}.strategies").STRATEGY_REGISTRY
    for name, arguments in NAMES.items():
        registry.register(name, classes["SwapStrategy"], description=f"swapper: {name}", override=True, **arguments)
