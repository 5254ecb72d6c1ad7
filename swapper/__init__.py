"""Train PyTorch models that do not fit in memory: what does not is on local drives, exact to the bit."""

from swapper.api import (
    CheckReport,
    check,
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
from swapper.files.saving import SaveHandle
from swapper.metrics import Moves, Stats
from swapper.optimizer.probe import register_elementwise
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.parameter.swapper import ParameterSwapper

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
    "check",
    "gathered",
    "init",
    "load",
    "load_checkpoint",
    "load_safetensors",
    "materialize",
    "of",
    "offload",
    "register_elementwise",
    "save",
    "save_checkpoint",
    "unwrap_optimizer",
    "wrap_optimizer",
]
