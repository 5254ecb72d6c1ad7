"""Clipping of gradients: norms as torch takes them, and changes that wait until a gradient is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from swapper.io.devices import keep_for_current_stream
from swapper.tensors.evicted_gradients import raw_gradient

__all__ = ["Change", "TakenNorm", "clamped_to", "in_order_of_clipping", "norm_of", "scaled_by", "total_norm"]

Change = Callable[[torch.Tensor], object]
"""Changes each element of a tensor in place, whatever its neighbours are."""


@dataclass(eq=False, slots=True)
class TakenNorm:
    """The norm of a whole gradient, taken as `foreach=None` takes it, and what its bits depend on besides."""

    value: torch.Tensor
    norm_type: float
    threads: int

    def is_as_asked(self, norm_type: float, foreach: bool | None) -> bool:
        """Return True if taking the norm now would give the same bits."""
        if self.norm_type != norm_type:
            return False
        if self.value.device.type == "cpu":
            return self.threads == torch.get_num_threads()
        return foreach is None  # The thread that took it is autograd's, and may have another number.


def scaled_by(scale: torch.Tensor) -> Change:
    """Multiplies with a scalar, as `torch.nn.utils.clip_grad_norm_` does, perhaps not on the stream of `scale`."""

    def change(gradient: torch.Tensor) -> None:
        gradient.mul_(scale.to(gradient.device))
        keep_for_current_stream(scale)

    return change


def clamped_to(clip_value: float) -> Change:
    """Clamps, as `torch.nn.utils.clip_grad_value_` does on the CPU."""

    def change(gradient: torch.Tensor) -> None:
        torch._foreach_clamp_min_([gradient], -clip_value)
        torch._foreach_clamp_max_([gradient], clip_value)

    return change


def in_order_of_clipping(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """In the order in which `torch.nn.utils.clip_grad_norm_` takes the norms of their gradients."""
    gradients = [p if (gradient := raw_gradient(p)) is None else gradient for p in parameters]
    like = [torch.empty(0, dtype=gradient.dtype, device=gradient.device) for gradient in gradients]
    groups = _group_tensors_by_device_and_dtype([like], with_indices=True)  # type: ignore[list-item]
    return [parameters[i] for _, indices in groups.values() for i in indices]


def norm_of(gradient: torch.Tensor, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """The norm of one gradient, as `torch.nn.utils.clip_grad_norm_` takes it."""
    if gradient.device.type != "cpu" and foreach is not False:
        foreach_norm: torch.Tensor = torch._foreach_norm([gradient], norm_type)[0]
        return foreach_norm
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm


def total_norm(norms: list[torch.Tensor], device: torch.device, norm_type: float, finite: bool) -> torch.Tensor:
    """The norm of all gradients, of the `norms` of each, as `torch.nn.utils.clip_grad_norm_` takes it.

    Raises:
        RuntimeError: it is to be `finite`, and is not.
    """
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if finite and torch.logical_or(total.isnan(), total.isinf()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return total
