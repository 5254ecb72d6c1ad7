"""`SwappedParameters` and `SwappedGradients`: what is on disk beside the optimizer's state, as a step uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from swapper.io.devices import Copy
from swapper.metrics import Metrics

__all__ = ["SwappedGradients", "SwappedParameters"]


class SwappedParameters(Protocol):
    """Parameters that are on disk too, as a step uses them."""

    def stepping(
        self, parameters: Iterable[torch.nn.Parameter], device: torch.device
    ) -> AbstractContextManager[Mapping[torch.nn.Parameter, torch.Tensor]]:
        """Within it the values of `parameters` are in memory on `device`, and may be changed.

        Args:
            parameters: those that are not swapped are passed over.
            device: where they are stepped: their own, or the CPU.

        Returns:
            Of parameters that are stepped on another device than their own: their values on `device`, tensors of the
            parameter's shape and strides. All others have their values themselves. Who changes such a tensor increments
            the parameter's version.
        """

    def note_stepped(self, parameter: torch.nn.Parameter, whole: int | None) -> None:
        """Within `stepping`: all of `parameter` is stepped, and `whole` the checksum of its bytes, if that is known."""

    def written_late(self, parameters: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Within it what changes of `parameters` is written only if its memory is needed, and else at the end of it."""

    def staying(
        self, parameters: Iterable[torch.nn.Parameter], following: Iterable[torch.nn.Parameter]
    ) -> AbstractContextManager[None]:
        """Within it records of `parameters`, which are in memory, stay there if some of `following` are in them."""


class SwappedGradients(Protocol):
    """Gradients that are evicted too, as a step uses them."""

    @property
    def metrics(self) -> Metrics:
        """Counts what moves."""

    @property
    def drops(self) -> int:
        """Count of parts that were prefetched and dropped."""

    def plan(self, parts: Iterable[tuple[int, torch.nn.Parameter, int, int]]) -> None:
        """The buckets have changed: see `OptimizerPlan.gradient_parts`."""

    def check(self) -> None:
        """Raise what is known to be wrong with any gradient: a step must not find out in the middle."""

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """True if `parameter` has a gradient, in memory or not."""

    def is_evicted(self, parameter: torch.nn.Parameter) -> bool:
        """True if it is not in memory."""

    def stage(self, parameter: torch.nn.Parameter, start: int) -> bool:
        """Start reading the part of it that starts at `start`. False if there is no room."""

    def taken(self, parameter: torch.nn.Parameter, start: int) -> AbstractContextManager[torch.Tensor]:
        """Within it that part is in memory: 1-D, in memory order."""

    def uploaded(
        self,
        parameter: torch.nn.Parameter,
        start: int,
        upload: Callable[[torch.Tensor, int], tuple[torch.Tensor, Copy | None]],
    ) -> tuple[torch.Tensor, Sequence[Callable[[torch.Tensor], object]]]:
        """Copy that part by `upload`, to so many bytes after a multiple of 64, less than those.

        Return the copy, and what is to be done to it, in order, when it is there.
        """

    def watches(self, parameter: torch.nn.Parameter) -> bool:
        """True if its gradients are looked at when they arrive."""

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take no more gradients of `parameters`."""

    def bring_back_all(self) -> None:
        """Have all gradients in memory."""

    def flush(self) -> None:
        """Wait until all that is evicted is on the drive."""

    def close(self) -> None:
        """Forget everything."""

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.nn.Parameter],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`."""

    def clip_grad_value_(self, parameters: Iterable[torch.nn.Parameter], clip_value: float) -> None:
        """As `torch.nn.utils.clip_grad_value_`."""
