"""Copies of parameters in mapped files: they have an address for as long as somebody wants one, and cost disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from swapper.parameter.records import ParameterLocation
from swapper.storage.record_store import RecordStore

__all__ = ["MappedCopies"]


class MappedCopies:
    """The copies that somebody has now, one of each parameter. Their files have no names, and go with the last tensor.

    Args:
        store: gives the files.
    """

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._copies: dict[ParameterLocation, tuple[weakref.ref[torch.Tensor], int]] = {}

    def get(self, location: ParameterLocation, checksum: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Give the copy of one parameter, made or brought up to date.

        Args:
            location: of the parameter.
            checksum: of its values now.
            fill: copies them into a tensor of its shape and strides.

        Raises:
            NvmePathError: there is no space for it.
        """
        reference, filled = self._copies.get(location, (None, 0))
        copy = None if reference is None else reference()
        if copy is None:
            copy = self._map(location.dtype, location.numel).as_strided(location.shape, location.stride)
        elif filled == checksum:
            return copy
        fill(copy)
        self._copies[location] = (weakref.ref(copy), checksum)
        return copy

    def empty_like(self, values: torch.Tensor) -> torch.Tensor:
        """As `torch.empty_like`, in a file of its own.

        Raises:
            NvmePathError: there is no space for it.
        """
        like = torch.empty_like(values, device="meta")
        return self._map(values.dtype, values.numel()).as_strided(like.shape, like.stride())

    def _map(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        with self._store.scratch_file(numel * dtype.itemsize) as file:
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)
