"""Checks of the arguments that users pass to the functions of `swapper`."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig, read_mapping
from swapper.errors import ConfigError
from swapper.optimizer.alike import difference
from swapper.storage.agreement import agreed, exchanged
from swapper.tensors.sharded import is_sharded

__all__ = ["ConfigLike", "as_config", "check_is_model", "check_is_optimizer", "optimizers_of", "tensors_of"]

_ALIKE = (
    *("offload_optimizer.device", "offload_optimizer.step_in_backward"),
    *("offload_gradient.device", "offload_gradient.encoding", "offload_param.device"),
)
"""Settings by which ranks have other collectives, or shards of one gradient other bits."""

ConfigLike = OffloadConfig | str | os.PathLike[str] | Mapping[str, Any]


def as_config(
    config: ConfigLike,
    optimizers: Iterable[object] = (),
    parameters: Iterable[torch.Tensor] = (),
    *,
    waited_for: Literal["never", "drive", "always"] = "never",
) -> OffloadConfig:
    """The config that was given, or that of the file or mapping.

    Args:
        config: what users pass.
        optimizers, parameters: if any of the parameters are sharded, this fails on all ranks if it does on one.
        waited_for: when other ranks, whose config is right, go on to wait for one that refuses its own, and so must
            hear of it: never, if it has "nvme" for a device, or always.

    Raises:
        ConfigError: it is none of these; or of sharded parameters ranks have settings that all must have alike.
    """
    groups = (group for each in optimizers if isinstance(each, Optimizer) for group in each.param_groups)
    sharded = any(map(is_sharded, (*parameters, *(p for group in groups for p in group["params"]))))
    with agreed(sharded):
        try:
            settings = _as_config(config)
        except ConfigError:
            with agreed(waited_for == "always" or (waited_for == "drive" and _is_of_drive(config))):
                raise
    if sharded:
        _refuse_different(settings)
    return settings


def _refuse_different(settings: OffloadConfig) -> None:
    """Refuse, on all ranks, what would let some wait for others in a step, or round otherwise. Collective."""
    ranks = exchanged([str(operator.attrgetter(name)(settings)).lower() for name in _ALIKE])
    for name, values in zip(_ALIKE, zip(*ranks, strict=True), strict=True):
        if found := difference(name, dict(enumerate(values))):
            raise ConfigError(f"{found}; where parameters are sharded all ranks must have the same")


def _as_config(config: ConfigLike) -> OffloadConfig:
    if isinstance(config, OffloadConfig):
        return config
    if isinstance(config, Mapping):
        return OffloadConfig.model_validate(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            f"config: {type(config).__name__} is not a config; give a swapper.OffloadConfig, a mapping, or the path of "
            "a YAML or JSON file"
        )
    return OffloadConfig.load(config)


def _is_of_drive(config: object) -> bool:
    """True if something in `config`, which may be wrong, has "nvme" for its device: ranks agree on its first use."""
    if isinstance(config, (str, os.PathLike)):
        try:
            config = read_mapping(Path(config))
        except ConfigError:
            return False
    sections = config.values() if isinstance(config, Mapping) else ()  # An `OffloadConfig` is never refused.
    return any(isinstance(each, Mapping) and each.get("device") == "nvme" for each in sections)


def check_is_model(model: object) -> None:
    """Raise ConfigError if `model` is no `torch.nn.Module`."""
    if not isinstance(model, torch.nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ConfigError(f"{name} is not a torch.nn.Module; the model comes first")


def optimizers_of(
    optimizer: Optimizer | Iterable[Optimizer] | None,
) -> tuple[list[Optimizer], Optimizer | Iterable[Optimizer] | None]:
    """The optimizers that `offload` was given, and what it returns for them."""
    if optimizer is None:
        return [], None
    if isinstance(optimizer, (OffloadConfig, Mapping, str, os.PathLike)):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} is a config, not an optimizer; without optimizers call "
            "swapper.offload(model, config=config)"
        )
    if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable):
        return [optimizer], optimizer  # What is no optimizer is refused by name where it would be wrapped.
    optimizers = list(optimizer)
    return optimizers, optimizer if isinstance(optimizer, Sequence) else optimizers


def check_is_optimizer(optimizer: object) -> None:
    """Raise ConfigError if `optimizer` is none of torch's."""
    if not isinstance(optimizer, Optimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ConfigError(f"optimizer: {name} is not a torch.optim.Optimizer; wrap the one inside it")


def tensors_of(tensors: object) -> list[torch.Tensor]:
    """The tensors that an iterable has. Raises ConfigError if it is none, or has anything else."""
    found: list[Any] = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    for item in found:
        if not isinstance(item, torch.Tensor):
            raise ConfigError(
                f"parameters: a {type(item).__name__} is not a tensor; give a module, a parameter or an iterable of "
                "them, such as model.parameters()"
            )
    return found
