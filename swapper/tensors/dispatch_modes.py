"""The `TorchDispatchMode`s of others, which see each operator: ours are kept from them, or refused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from swapper.errors import SwapError

__all__ = ["outside_of_dispatch_modes", "refuse_fake_tensors"]

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def outside_of_dispatch_modes() -> AbstractContextManager[object]:
    """Within it no `TorchDispatchMode` of others sees what is done, as one that notes operators to do them again."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    outside: AbstractContextManager[object] = _disable_current_modes()
    return outside


def refuse_fake_tensors() -> None:
    """Raise within a `FakeTensorMode`, as `torch.export` has it: what is made there has no values, and would stay.

    Raises:
        SwapError: there is one.
    """
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_FAKE) is not None:
        raise SwapError(
            "swapped parameters were used within a FakeTensorMode, as torch.export and torch.fx have it, where they "
            "would come without values; export or trace the model before swapper.offload"
        )
