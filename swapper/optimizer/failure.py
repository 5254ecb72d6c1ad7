"""What is remembered of a step or a load that ended in the middle, until it is made good."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence

import torch

from swapper.errors import SwapError, SwapIOError
from swapper.tensors.homes import home_of

__all__ = ["Failure", "Versions", "versions"]

Versions = Sequence[tuple["weakref.ref[torch.nn.Parameter]", int, int]]


def versions(parameters: Iterable[torch.nn.Parameter]) -> Versions:
    """What tells whether a parameter was loaded since: its version counter and address now."""
    return [(weakref.ref(p), p._version, _address(p)) for p in {id(p): p for p in parameters}.values()]


def _address(p: torch.nn.Parameter) -> int:
    """Of the values; 0 where they come and go, and only the version counts."""
    return 0 if home_of(p) is not None else p.data_ptr()


class Failure:
    """Something that ended in the middle, so that parameters and state do not belong together, or state is missing.

    Args:
        what: what failed.
        error: why; None if it is not known yet.
        parameters: that must be loaded before training goes on, as they are now.
    """

    def __init__(self, what: str, error: BaseException | None, parameters: Versions) -> None:
        self.state_loaded = False
        self.parameters = parameters
        self._cause: SwapIOError | None = None
        self._text = what
        if error is not None:
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Say what the reason was."""
        self._text += f" ({type(error).__name__}: {error})"
        # A copy has no traceback, whose frames would keep the optimizer alive.
        self._cause = copy.copy(error) if isinstance(error, SwapIOError) else None

    def check(self, operation: str) -> None:
        """Raise unless state and parameters were loaded since."""
        if not self.state_loaded:
            raise SwapError(
                f"{operation} is refused: {self._text}. Parameters and optimizer state no longer belong together: load "
                "both from a checkpoint (model.load_state_dict and optimizer.load_state_dict)"
            ) from self._cause
        for reference, version, address in self.parameters:
            p = reference()
            if p is not None and p.numel() and p._version == version and _address(p) == address:
                raise SwapError(
                    f"{operation} is refused: {self._text}. The optimizer's state was loaded again but the parameters "
                    "were not: load them from the same checkpoint (model.load_state_dict)"
                ) from self._cause
