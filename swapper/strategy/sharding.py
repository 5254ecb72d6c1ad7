"""The common part of the strategies for FSDP2 and tensor parallelism of Lightning and Fabric."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from swapper.config import OffloadConfig
from swapper.errors import ConfigError, show
from swapper.tensors.homes import gathered
from swapper.tensors.sharded import box_of, is_sharded, local_of, reshard

__all__ = ["apply_if_needed", "check_fits_fsdp1", "divide_ranks", "load_whole_tensors"]


def check_fits_fsdp1(name: str, config: OffloadConfig, checkpoint_format: str | None) -> None:
    """Refuse what FSDP1 cannot have: parameters or gradients that leave memory, and checkpoints of our own format.

    Args:
        name: of the strategy, for messages.

    Raises:
        ConfigError: there is one of these.
    """
    asked = config.offload_param.device
    if asked != "none":
        raise ConfigError(
            f"offload_param.device: {asked} cannot be done with {name}: FSDP1 gathers and frees parameters by itself; "
            "leave it out, or use SwapModelParallelStrategy (FSDP2)"
        )
    for field, asked_for in (
        ("offload_gradient.device", config.offload_gradient.device != "none"),
        ("offload_optimizer.step_in_backward", config.offload_optimizer.step_in_backward),
    ):
        if asked_for:
            raise ConfigError(
                f"{field} cannot be used with {name}: FSDP1 reduces gradients in a buffer of its own, of which the "
                "optimizer sees views; leave it out, or use SwapModelParallelStrategy (FSDP2)"
            )
    if checkpoint_format not in (None, "full"):
        raise ConfigError(
            f"checkpoint_format: {show(checkpoint_format)} is not for {name}, whose checkpoints are those of the stock "
            "strategy: leave it out; state_dict_type chooses between a directory with shards and one file. "
            "SwapModelParallelStrategy (FSDP2) has it"
        )


@torch.no_grad()
def load_whole_tensors(module: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """`module.load_state_dict(state)`, where `state` has whole tensors of DTensors. One is in memory at a time.

    Args:
        module: sharded.
        state: by name, of the shapes of the module's, on any device and of any dtype.
        strict: as for `load_state_dict`.

    Raises:
        RuntimeError: as from `load_state_dict`.
    """
    reshard(module)
    own = module.state_dict(keep_vars=True)
    given = copy.copy(state) if isinstance(state, dict) else dict(state)  # With the versions of modules.
    for name, value in state.items():
        here = own.get(name)
        if not isinstance(here, torch.Tensor) or not is_sharded(here) or is_sharded(value) or value.shape != here.shape:
            continue
        part = value
        for dim, (offset, size) in enumerate(zip(*box_of(here), strict=True)):
            part = part.narrow(dim, offset, size)
        with gathered([here]):
            local_of(here).copy_(part)
        given[name] = here  # Given to itself, so that hooks of modules run.
    module.load_state_dict(given, strict=strict)


def divide_ranks(strategy: Any) -> None:
    """Have "auto" as the data-parallel size be what a given tensor-parallel size leaves of all ranks.

    The stock strategies take the number of nodes, and raise unless both happen to agree.
    """
    tensor, ranks = strategy._tensor_parallel_size, strategy.num_nodes * strategy.num_processes
    if strategy._data_parallel_size == "auto" and isinstance(tensor, int) and tensor > 0 and ranks % tensor == 0:
        strategy._data_parallel_size = ranks // tensor


def apply_if_needed(
    module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """`module._apply(function)`, as `to` calls it, unless that changes no device and no dtype. FSDP2 reshards anyway.

    Raises:
        ConfigError: it would change some, and torch refuses to because a parameter's optimizer is swapped.
    """
    reshard(module)  # Else parameters that were left unsharded would be taken for those to train.

    def changes(tensor: torch.Tensor) -> bool:
        new = function(tensor)
        return (new.device, new.dtype) != (tensor.device, tensor.dtype)

    with torch.no_grad():
        if not any(changes(tensor) for tensor in (*module.parameters(), *module.buffers())):
            return module
    try:
        applied: torch.nn.Module = type(module)._apply(module, function, recurse)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "weakref" not in str(error.__cause__):
            raise
        raise ConfigError(
            "the model is to be moved or converted, and an optimizer of an earlier fit has its parameters swapped; "
            "drop the former Trainer first, or make a new model"
        ) from error
    return applied
