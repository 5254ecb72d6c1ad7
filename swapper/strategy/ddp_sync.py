"""Synchronizes a model whose parameters are evicted among the processes of `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from swapper.tensors.homes import home_of
from swapper.tensors.inner import inner_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ddp_arguments", "has_evicted_parameters", "synchronize"]

_BROADCAST_BYTES = 250 << 20  # As `DistributedDataParallel`.


def has_evicted_parameters(model: torch.nn.Module) -> bool:
    """True if any parameter of `model` is swapped."""
    inside = (inner.tensor for p in model.parameters() for inner in inner_tensors("", p))
    return any(home_of(tensor) is not None for tensor in inside)


def synchronize(model: torch.nn.Module, group: ProcessGroup | None = None, *, buffers: bool = True) -> None:
    """Broadcast the parameters of `model` from rank 0, one at a time. Collective.

    `DistributedDataParallel` does so in its constructor, and has all of them in memory for that.

    Args:
        model: what its `_ddp_params_and_buffers_to_ignore` names stays as it is.
        group: of the processes; None is all.
        buffers: broadcast those too.

    Raises:
        RuntimeError: parameters have other shapes in another process.
        SwapIOError: the drive failed.
    """
    from torch.distributed import distributed_c10d
    from torch.distributed.utils import _sync_params_and_buffers, _verify_param_shape_across_processes

    among = group or distributed_c10d._get_default_group()
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    tensors: list[torch.Tensor] = [p for name, p in model.named_parameters() if name not in ignored]
    if tensors:  # torch requires at least one.
        _verify_param_shape_across_processes(among, tensors)
    if buffers:
        tensors += [buffer for name, buffer in model.named_buffers() if name not in ignored]
    for tensor in tensors:
        _sync_params_and_buffers(among, [tensor.detach()], _BROADCAST_BYTES, 0)


def ddp_arguments(model: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a `DistributedDataParallel` around `model`, which is synchronized here if it is swapped.

    Args:
        model: any.
        options: the arguments that the user gave.
    """
    if not has_evicted_parameters(model) or not options.get("init_sync", True):
        return dict(options)
    # As DDP: what broadcasts buffers in every forward also broadcasts them in the constructor.
    buffers = options.get("forward_sync_buffers") is not None or options.get("broadcast_buffers") is not False
    synchronize(model, options.get("process_group"), buffers=buffers)
    return {**options, "init_sync": False}
