"""Lightning Fabric: strategies that swap.

    import swapper.fabric
    fabric = Fabric(strategy=swapper.fabric.SwapStrategy("config/everything_nvme.yaml"))
    fabric = Fabric(strategy="swapper_nvme")

The names here are those for the package in use: `lightning`, or `lightning_fabric` if only that is imported already or
installed. With both, `swapper.fabric.in_lightning` and `swapper.fabric.in_lightning_fabric` have the names for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapper.strategy.arguments import import_in_use

if TYPE_CHECKING:
    from swapper.fabric.in_lightning import SwapDDPStrategy, SwapFSDPStrategy, SwapModelParallelStrategy, SwapStrategy

__all__ = ["SwapDDPStrategy", "SwapFSDPStrategy", "SwapModelParallelStrategy", "SwapStrategy"]

_module = import_in_use(__name__, {"lightning.fabric": "in_lightning", "lightning_fabric": "in_lightning_fabric"})


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(_module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
