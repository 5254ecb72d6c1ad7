"""`OtherTensors` finds tensors that share a parameter's memory, which then must not leave it.

[Note: tensors that are about to go] Some of those that share memory are gone in a moment, without any code of the user
that drops them:

- A process group returns from a broadcast when the values have arrived. Its thread holds the tensors until it has the
  CPU again and, since they have Python objects, the GIL. A backward on an accelerator ends in the same way.
- A thread of the user, as one that logs, has a tensor for as long as it looks at it.
- A cycle that nobody can reach, as of an old Trainer, has its tensors until the garbage collector comes.

To look twice proves nothing about them: both looks may come before that thread runs. So the garbage collector runs, and
`Patience` gives the GIL to others until they are gone, or for a time that a loaded machine needs to run each thread
once. Then all tensors are looked through again: what is gone may have left another view. Only a look that finds none
is believed at once. Among millions of objects a look takes a second, so what looks take after the first is limited too.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

__all__ = ["PATIENCE_S", "OtherTensors", "Patience", "is_shared"]

PATIENCE_S = 1.0
"""The most that is waited for tensors that are about to go before a parameter is left in memory."""


_LOOKING = 3
"""Times the seconds of waiting that all looks but the first may take."""


class Patience:
    """Waits for what other threads and the garbage collector are about to let go.

    Args:
        seconds: the most that all waits take together, beside that of the garbage collector. With 0 there are none.
            What is looked for after each may take some times as long, and a last look.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._looks_left_s = _LOOKING * seconds
        self._pause_s = 0.0

    def count_look(self, seconds: float) -> None:
        """To look through all tensors once more took so long. Ends all waits if that was too long."""
        self._looks_left_s -= seconds
        if self._looks_left_s < 0:
            self._left_s = 0.0

    def outlasted_by(self, condition: Callable[[], bool]) -> bool:
        """True if `condition()` is still true in the end. See [Note: tensors that are about to go]."""
        while condition():
            if self._left_s <= 0:
                return True
            if not self._pause_s:
                gc.collect()
            # Longer each time, whatever is waited for: the caller may look at all tensors after each.
            self._pause_s = min(2 * self._pause_s or 0.001, 0.05)
            time.sleep(self._pause_s)  # Without the GIL.
            self._left_s -= self._pause_s
        return False


class OtherTensors:
    """Tensors of Python code that share memory with parameters, and are no parameters of the model.

    Tensors that autograd saved of one are in C++ and do not count: they have the values of their time, as they should,
    and the version counter says when they must not be used any more. But one that Python code has had counts for as
    long as anybody holds it, since its values may be meant to follow: `p.data` that was saved, or is being received
    into.
    Memory may have users besides that cannot be known: the NumPy array that a parameter was made of, and what another
    library got of a parameter by DLPack.

    Args:
        patience: for tensors that are about to go; None for a caller that asks again later.
    """

    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience(0)
        self._by_storage: dict[int, list[weakref.ref[torch.Tensor]]] | None = None
        self._has_looked = False

    def view(self, parameter: torch.Tensor, aliases: Sequence[torch.Tensor] = ()) -> bool:
        """True if such a tensor shares the memory of `parameter`, which is in memory; or somebody has its storage.

        Args:
            aliases: tensors that may.
        """
        while is_shared(parameter, ours=1 + len(aliases)):
            if self._by_storage is None:
                self._look()
            if not self._knows_one(parameter, aliases):
                return False
            if self._patience.outlasted_by(partial(self._knows_one, parameter, aliases)):
                return True
            self._by_storage = None
        return False

    def _look(self) -> None:
        start_s = time.monotonic()
        self._by_storage = _tensors_by_storage()
        if self._has_looked:
            self._patience.count_look(time.monotonic() - start_s)
        self._has_looked = True

    def _knows_one(self, parameter: torch.Tensor, aliases: Sequence[torch.Tensor]) -> bool:
        assert self._by_storage is not None
        storage = parameter.untyped_storage()._cdata
        tensors = [tensor for ref in self._by_storage.get(storage, ()) if (tensor := ref()) is not None]
        with torch._C.DisableTorchFunctionSubclass():
            ours = {id(parameter), *map(id, aliases)}
            shares = any(id(t) not in ours and t.untyped_storage()._cdata == storage for t in tensors)
        return shares or _holders(parameter)[1] > _NO_HOLDER


def is_shared(tensor: torch.Tensor, *, ours: int) -> bool:
    """True if more tensors than `ours` share the memory of `tensor`, of C++ too; or somebody has its storage."""
    tensors, storages = _holders(tensor)
    return tensors > ours or storages > _NO_HOLDER


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Count the tensors on the storage of `tensor`, and the references to that storage's Python object."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1, sys.getrefcount(storage)


_NO_HOLDER = _holders(torch.empty(1, device="cpu"))[1]
"""To the Python object of a storage that nobody has."""


def _tensors_by_storage() -> dict[int, list[weakref.ref[torch.Tensor]]]:
    """List the tensors of Python code by their storage."""
    if gc.get_freeze_count():
        gc.unfreeze()  # Those that are frozen are in no list.
    found: dict[int, list[weakref.ref[torch.Tensor]]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            kind = type(item)
            # Those that dispatch to Python have no storage of their own.
            if not issubclass(kind, torch.Tensor) or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                continue
            with contextlib.suppress(NotImplementedError, RuntimeError):  # As have some others.
                found.setdefault(item.untyped_storage()._cdata, []).append(weakref.ref(item))
    return found
