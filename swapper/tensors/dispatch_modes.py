"""The `TorchDispatchMode`s of others, which see each operator: ours are kept from them, or refused.

[Note: Ctrl-C and dispatch modes] torch's own way to take modes off and put them back is a generator, which an interrupt
may leave in the middle: then a mode has no effect within the rest of its `with`, and is put back when the traceback
dies, at any later time. So they are taken off here, and an interrupt is put off until all are off, or back. One that
arrives at the very first instruction of `__exit__` cannot be: CPython may raise it before any code of ours runs, and
torch has no guard of C++ for the stack of modes. The `with` of the user then ends with torch's error that there is no
mode, whose context is the KeyboardInterrupt, and after it the stack is what it was before that `with`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._ops
from torch.utils._python_dispatch import _pop_mode, _push_mode

from swapper.errors import SwapError
from swapper.process.interrupts import interrupts_deferred

__all__ = ["outside_of_dispatch_modes", "refuse_fake_tensors"]

_FAKE = torch._C._TorchDispatchModeKey.FAKE


_count_early: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch
_pop_early: Callable[[], Any] = torch._ops._pop_mode_from_pre_dispatch
"""Of modes that see operators before autograd does, as `torch.export` has them."""


def outside_of_dispatch_modes() -> AbstractContextManager[object]:
    """Within it no `TorchDispatchMode` of others sees what is done, as one that notes operators to do them again."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    return _OutsideOfDispatchModes()


class _OutsideOfDispatchModes:
    """As torch's `_disable_current_modes`. See [Note: Ctrl-C and dispatch modes]."""

    def __init__(self) -> None:
        self._modes: list[Any] = []

    def __enter__(self) -> None:
        try:
            with interrupts_deferred():
                early = [_pop_early() for _ in range(_count_early())]
                self._modes = early + [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        except BaseException:  # What the handler of SIGINT raises, which may be the user's.
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with interrupts_deferred():
            modes, self._modes = self._modes, []
            for mode in reversed(modes):
                _push_mode(mode)


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
