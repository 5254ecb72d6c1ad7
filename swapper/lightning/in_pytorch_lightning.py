"""The classes for `pytorch_lightning`. Importing this registers the strategies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapper.lightning.namespaces import bind, register

if TYPE_CHECKING:
    from swapper.lightning.files import FilesOfTorch as SwapCheckpointIO
    from swapper.lightning.monitor import Monitor as SwapMonitor
    from swapper.lightning.strategy import OnDDP as SwapDDPStrategy
    from swapper.lightning.strategy import OnOneDevice as SwapStrategy
else:
    globals().update(bind("pytorch_lightning", __name__))

__all__ = ["SwapCheckpointIO", "SwapDDPStrategy", "SwapMonitor", "SwapStrategy"]

register("pytorch_lightning", globals())
