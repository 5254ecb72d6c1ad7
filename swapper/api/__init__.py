"""The functions of `swapper`."""

from swapper.api.calls import (
    CheckReport,
    DriveReport,
    check,
    gathered,
    init,
    load_safetensors,
    materialize,
    offload,
    wrap_optimizer,
)
from swapper.api.pretrained import from_pretrained
from swapper.api.wrapped import of, unwrap_optimizer

__all__ = [
    "CheckReport",
    "DriveReport",
    "check",
    "from_pretrained",
    "gathered",
    "init",
    "load_safetensors",
    "materialize",
    "of",
    "offload",
    "unwrap_optimizer",
    "wrap_optimizer",
]
