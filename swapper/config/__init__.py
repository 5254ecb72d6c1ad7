"""All that a user can set: `OffloadConfig`, its sections, and sizes as people write them."""

from swapper.config.files import read_mapping
from swapper.config.settings import (
    AioConfig,
    CheckpointConfig,
    OffloadConfig,
    OffloadGradientConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    json_schema,
)
from swapper.sizes import format_size, parse_size

__all__ = [
    "AioConfig",
    "CheckpointConfig",
    "OffloadConfig",
    "OffloadGradientConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "format_size",
    "json_schema",
    "parse_size",
    "read_mapping",
]
