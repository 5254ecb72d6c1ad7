"""The classes for `lightning.pytorch`. Importing this registers the strategies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapper.lightning.namespaces import bind, register

if TYPE_CHECKING:
    from swapper.lightning.files import FilesOfTorch as SwapCheckpointIO
    from swapper.lightning.monitor import Monitor as SwapMonitor
    from swapper.lightning.strategy import OnDDP as SwapDDPStrategy
    from swapper.lightning.strategy import OnOneDevice as SwapStrategy
else:
    globals().update(bind("lightning.pytorch", __name__))

__all__ = ["SwapCheckpointIO", "SwapDDPStrategy", "SwapMonitor", "SwapStrategy"]

register("lightning.pytorch", globals())
