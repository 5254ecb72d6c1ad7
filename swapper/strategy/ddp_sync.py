"""A model that is the same in all processes which train it together, though it does not fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from swapper.tensors.homes import home_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["has_parameters_away", "make_same", "ready_for_ddp"]

_BROADCAST_BYTES = 250 << 20  # As `DistributedDataParallel`.


def has_parameters_away(model: torch.nn.Module) -> bool:
    """Whether any parameter of `model` is swapped."""
    return any(home_of(p) is not None for p in model.parameters())


def make_same(model: torch.nn.Module, group: ProcessGroup | None = None, *, buffers: bool = True) -> None:
    """Give the parameters of `model` in all processes the values of rank 0. To be called in all.

    `DistributedDataParallel` does so when it is made, and has all of them in memory for that. This has one of them.

    Args:
        model: what its `_ddp_params_and_buffers_to_ignore` names stays as it is.
        group: of the processes; None is all.
        buffers: those, too.

    Raises:
        RuntimeError: parameters have other shapes elsewhere.
        SwapIOError: the drive failed.
    """
    from torch.distributed import distributed_c10d
    from torch.distributed.utils import _sync_params_and_buffers, _verify_param_shape_across_processes

    among = group or distributed_c10d._get_default_group()
    left_out = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    tensors: list[torch.Tensor] = [p for name, p in model.named_parameters() if name not in left_out]
    if tensors:  # None at all is more than torch can bear.
        _verify_param_shape_across_processes(among, tensors)
    if buffers:
        tensors += [buffer for name, buffer in model.named_buffers() if name not in left_out]
    for tensor in tensors:
        _sync_params_and_buffers(among, [tensor.detach()], _BROADCAST_BYTES, 0)


def ready_for_ddp(model: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for a `DistributedDataParallel` around `model`, which is made the same here if it is swapped.

    Args:
        model: any.
        options: as the user wants them.
    """
    if not has_parameters_away(model) or not options.get("init_sync", True):
        return dict(options)
    # As DDP has it: what keeps buffers the same in every forward does so at the beginning.
    buffers = options.get("forward_sync_buffers") is not None or options.get("broadcast_buffers") is not False
    make_same(model, options.get("process_group"), buffers=buffers)
    return {**options, "init_sync": False}
