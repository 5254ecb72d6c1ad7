"""Train PyTorch models whose optimizer state does not fit in memory: it lives on local drives, exact to the bit."""

from swapper.api import CheckReport, check, of, unwrap_optimizer, wrap_optimizer
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.optimizer import OptimizerSwapper, Stats
from swapper.trial import register_elementwise

__all__ = [
    "CheckReport",
    "ConfigError",
    "OffloadConfig",
    "OptimizerSwapper",
    "Stats",
    "SwapError",
    "SwapIOError",
    "check",
    "of",
    "register_elementwise",
    "unwrap_optimizer",
    "wrap_optimizer",
]
