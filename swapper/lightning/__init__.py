"""Lightning: a strategy that swaps.

    import swapper.lightning
    trainer = L.Trainer(strategy="swapper_nvme")
    trainer = L.Trainer(strategy=swapper.lightning.SwapStrategy("config/everything_nvme.yaml"))

The names here are those for the package that is in use: `lightning`, or `pytorch_lightning` if only that is imported
already or installed. With both in one program, `swapper.lightning.in_lightning` and
`swapper.lightning.in_pytorch_lightning` have the names for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapper.lightning.directories import load_from_checkpoint
from swapper.strategy.arguments import import_in_use

if TYPE_CHECKING:
    from swapper.lightning.in_lightning import (
        SwapCheckpointIO,
        SwapDDPStrategy,
        SwapFSDPStrategy,
        SwapModelParallelStrategy,
        SwapMonitor,
        SwapStrategy,
    )

__all__ = [
    "SwapCheckpointIO",
    "SwapDDPStrategy",
    "SwapFSDPStrategy",
    "SwapModelParallelStrategy",
    "SwapMonitor",
    "SwapStrategy",
    "load_from_checkpoint",
]

_module = import_in_use(__name__, {"lightning.pytorch": "in_lightning", "pytorch_lightning": "in_pytorch_lightning"})


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(_module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
