"""Train PyTorch models that do not fit in memory: what does not is on local drives, exact to the bit."""

from swapper.api import CheckReport, check, of, offload, unwrap_optimizer, wrap_optimizer
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.fastsave import FastWriter, SaveHandle, load, save
from swapper.optimizer import OptimizerSwapper, Stats
from swapper.parameter import ParameterSwapper
from swapper.trial import register_elementwise

__all__ = [
    "CheckReport",
    "ConfigError",
    "FastWriter",
    "OffloadConfig",
    "OptimizerSwapper",
    "ParameterSwapper",
    "SaveHandle",
    "Stats",
    "SwapError",
    "SwapIOError",
    "check",
    "load",
    "of",
    "offload",
    "register_elementwise",
    "save",
    "unwrap_optimizer",
    "wrap_optimizer",
]
