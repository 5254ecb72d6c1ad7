"""The functions of `swapper`."""

from swapper.api.calls import check, gathered, init, load_safetensors, materialize, offload, wrap_optimizer
from swapper.api.pretrained import from_pretrained
from swapper.api.wrapped import of, unwrap_optimizer
from swapper.check import CheckReport

__all__ = [
    "CheckReport",
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
