"""The strategy for `lightning.fabric`. Importing this registers it there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapper.fabric.namespaces import bind, register

if TYPE_CHECKING:
    from swapper.fabric.strategy import Swapping as SwapStrategy
else:
    globals().update(bind("lightning.fabric", __name__))

__all__ = ["SwapStrategy"]

register("lightning.fabric", globals())
