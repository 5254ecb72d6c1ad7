"""Storages of evicted parameters: named while a state dict is pickled, staged when their bytes are written.

[Note: one at a time] `torch.save` asks every tensor for its storage first and writes them all later. So a state dict
whose parameters are on disk has to give it copies, in mapped files. A pickler with `EvictedStorages` gets names
instead, and stages each one's bytes when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swapper.errors import SwapError
from swapper.tensors.evicted_views import EvictedView, PartOfView, Source, ViewOfParameter
from swapper.tensors.homes import gathered, home_of

__all__ = ["EvictedStorage", "EvictedStorages", "StoragePart"]


class EvictedStorage:
    """Stands for the storage of an evicted parameter."""

    def __init__(self, view: ViewOfParameter) -> None:
        self._view = view
        self._length_bytes = view.shape.numel() * view.dtype.itemsize

    def nbytes(self) -> int:
        """As of any storage."""
        return self._length_bytes

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """Yield the bytes, a 1-D tensor. They stay in memory until the end of the `with` block.

        Raises:
            SwapError: the parameter was given data of another shape, dtype or order in memory.
            SwapIOError: they could not be read.
        """
        view = self._view
        with gathered([view.parameter]), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            values = view.real()
            if values.stride() != view.stride:
                raise SwapError("a parameter was given data of another order in memory while it was saved")
            flat = values.as_strided((self._length_bytes // values.itemsize,), (1,), values.storage_offset())
            yield flat.view(torch.uint8)


class StoragePart:
    """Stands in a pickle for the typed storage of an evicted tensor.

    Attributes:
        storage: the storage.
        like: one of the same type and length, whose bytes are undefined.
    """

    def __init__(self, storage: EvictedStorage, like: torch.TypedStorage | torch.UntypedStorage) -> None:
        self.storage = storage
        self.like = like


class EvictedStorages:
    """The evicted storages of one pickle. Tensors that share a parameter share one."""

    def __init__(self) -> None:
        self._of: dict[int, EvictedStorage] = {}

    def reduce(self, item: object, protocol: int) -> tuple[Any, ...] | None:
        """The result of `item.__reduce_ex__(protocol)`, with a `StoragePart` for the storage.

        Returns:
            None if `item` is no tensor of a state dict whose parameter is evicted, or is nothing but its view.
        """
        found = self._hollow(item.source) if isinstance(item, EvictedView) else None
        if found is None:
            return None
        storage, tensor = found
        # torch's own, so that it is to the bit as without swapping.
        rebuild, (like, *rest) = tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return rebuild, (StoragePart(storage, like), *rest)

    def _hollow(self, source: Source) -> tuple[EvictedStorage, torch.Tensor] | None:
        """The storage of `source`, and a tensor that differs from its own in values only. Its memory is not touched."""
        if isinstance(source, PartOfView):
            found = self._hollow(source.whole)
            return found and (found[0], source.of(found[1]))
        if not isinstance(source, ViewOfParameter) or home_of(source.parameter) is None:
            return None
        storage = self._of.setdefault(id(source.parameter), EvictedStorage(source))
        memory = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        return storage, torch.empty(0, dtype=source.dtype, device="cpu").set_(memory, 0, source.shape, source.stride)
