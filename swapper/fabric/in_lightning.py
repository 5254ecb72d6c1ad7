"""The strategies for `lightning.fabric`. Importing this registers them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapper.fabric.namespaces import bind, register

if TYPE_CHECKING:
    from swapper.fabric.strategy import OnDDP as SwapDDPStrategy
    from swapper.fabric.strategy import OnOneDevice as SwapStrategy
else:
    globals().update(bind("lightning.fabric", __name__))

__all__ = ["SwapDDPStrategy", "SwapStrategy"]

register("lightning.fabric", globals())
