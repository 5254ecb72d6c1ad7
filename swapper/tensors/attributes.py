"""Names of the attributes that tensors get here: by them all layers tell what becomes of a use of a tensor."""

from __future__ import annotations

__all__ = ["ADDRESS", "HOME", "PARTS", "UNFILLED"]

HOME = "_swapper_home"
"""Of a swapped tensor, which holds its `Home`: a parameter, a buffer, or a tensor inside one."""

ADDRESS = "_swapper_address"
"""Of a parameter, which keeps the mapped copy whose address it gave."""

PARTS = "_swapper_parts"
"""Of a parameter whose parts come one by one, with its `Parts`."""

UNFILLED = "_swapper_unfilled"
"""Of a tensor that has no values yet; see `swapper.tensors.unfilled`."""
