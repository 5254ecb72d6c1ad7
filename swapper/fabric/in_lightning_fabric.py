"""The strategy for `lightning_fabric`. Importing this registers it there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapper.fabric.namespaces import bind, register

if TYPE_CHECKING:
    from swapper.fabric.strategy import Swapping as SwapStrategy
else:
    globals().update(bind("lightning_fabric", __name__))

__all__ = ["SwapStrategy"]

register("lightning_fabric", globals())
