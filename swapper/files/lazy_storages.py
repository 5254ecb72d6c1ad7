"""Storages of parameters that are away: named while a state dict is pickled, brought when they are written.

[Note: one at a time] `torch.save` asks every tensor for its storage first and writes them all later, so that a state
dict whose parameters are on disk has to give it copies, in mapped files. Whoever pickles with `AwayStorages` gets names
instead, and brings each one's bytes when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swapper.errors import SwapError
from swapper.tensors.evicted_views import EvictedView, PartOfView, Source, ViewOfParameter
from swapper.tensors.homes import gathered, home_of

__all__ = ["AwayStorage", "AwayStorages", "StoragePart"]


class AwayStorage:
    """What the storage of a parameter is when its values are there.

    Attributes:
        length_bytes: of it.
    """

    def __init__(self, view: ViewOfParameter, length_bytes: int) -> None:
        self._view = view
        self.length_bytes = length_bytes

    def nbytes(self) -> int:
        """As of any storage."""
        return self.length_bytes

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """Within it the bytes are there: a 1-D tensor of them.

        Raises:
            SwapError: the parameter was given values of another shape.
            SwapIOError: they could not be read.
        """
        view = self._view
        with gathered([view.parameter]), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            values = view.real()
            if (values.shape, values.stride(), values.dtype) != (view.shape, view.stride, view.dtype):
                raise SwapError("a parameter was given values of another shape while it was saved")
            flat = values.as_strided((self.length_bytes // values.itemsize,), (1,), values.storage_offset())
            yield flat.view(torch.uint8)


class StoragePart:
    """Stands in a pickle for the typed storage of a tensor that is away.

    Attributes:
        storage: the storage.
        like: one of the same type and length, whose bytes are undefined.
    """

    def __init__(self, storage: AwayStorage, like: torch.TypedStorage | torch.UntypedStorage) -> None:
        self.storage = storage
        self.like = like


class AwayStorages:
    """Those of one pickle: tensors that share a parameter share one."""

    def __init__(self) -> None:
        self._of: dict[int, AwayStorage] = {}

    def reduce(self, item: object, protocol: int) -> tuple[Any, ...] | None:
        """What `item.__reduce_ex__(protocol)` gives, with a `StoragePart` for the storage.

        Returns:
            None if `item` is no tensor of a state dict whose parameter is away, or is nothing but its view.
        """
        if not isinstance(item, EvictedView):
            return None
        found = self._hollow(item.source)
        if found is None:
            return None
        storage, tensor = found
        # torch's own, so that it is to the bit what it would have been.
        rebuild, (like, *rest) = tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return rebuild, (StoragePart(storage, like), *rest)

    def _hollow(self, source: Source) -> tuple[AwayStorage, torch.Tensor] | None:
        """The storage of `source`, and a tensor that differs from its own in values only. Its memory is not touched."""
        if isinstance(source, PartOfView):
            found = self._hollow(source.whole)
            return found and (found[0], source.of(found[1]))
        if not isinstance(source, ViewOfParameter) or home_of(source.parameter) is None:
            return None
        length_bytes = source.shape.numel() * source.dtype.itemsize
        storage = self._of.setdefault(id(source.parameter), AwayStorage(source, length_bytes))
        memory = torch.UntypedStorage(length_bytes)  # type: ignore[no-untyped-call]
        return storage, torch.empty(0, dtype=source.dtype).set_(memory, 0, source.shape, source.stride)
