"""Train and run PyTorch models that do not fit in memory: what does not is on local drives, exact to the bit."""

from typing import TYPE_CHECKING

from swapper.api import (
    CheckReport,
    check,
    from_pretrained,
    gathered,
    init,
    load_safetensors,
    materialize,
    of,
    offload,
    unwrap_optimizer,
    wrap_optimizer,
)
from swapper.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.files.fast_writer import FastWriter
from swapper.files.fastsave import load, save
from swapper.files.packing import WeightSizes, pack_weights, unpack_weights
from swapper.files.saving import SaveHandle
from swapper.metrics import Moves, Stats
from swapper.optimizer.probe import register_elementwise
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.parameter.swapper import ParameterSwapper
from swapper.storage.agreement import process_group

if TYPE_CHECKING:
    from swapper.hf.offloaded_cache import OffloadedCache as OffloadedCache

__all__ = [
    "CheckReport",
    "ConfigError",
    "FastWriter",
    "Moves",
    "OffloadConfig",
    "OptimizerSwapper",
    "ParameterSwapper",
    "SaveHandle",
    "Stats",
    "SwapError",
    "SwapIOError",
    "WeightSizes",
    "check",
    "from_pretrained",
    "gathered",
    "init",
    "load",
    "load_checkpoint",
    "load_safetensors",
    "materialize",
    "of",
    "offload",
    "pack_weights",
    "process_group",
    "register_elementwise",
    "save",
    "save_checkpoint",
    "unpack_weights",
    "unwrap_optimizer",
    "wrap_optimizer",
]


def __getattr__(name: str) -> object:
    if name == "OffloadedCache":  # Not above: transformers is optional, and takes seconds to import.
        from swapper.hf.offloaded_cache import OffloadedCache

        return OffloadedCache
    raise AttributeError(f"module 'swapper' has no attribute {name!r}")
