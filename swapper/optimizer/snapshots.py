"""`Snapshot`: what one `state_dict()` has handed out, so that a load of the very same, unchanged, moves nothing.

[Note: loads of what is there] accelerate, for one, calls `state_dict()` and `load_state_dict()` of what it has
given, to bring state to a device. Such a load would write all state to the drive as it is there already. It is
recognised by all of these, the cheapest first:

- nothing was put into a record, discarded or found unreadable since (`BucketRecords.changes`), no step has failed, and
  no write is known to have failed;
- the state that is loaded is of the same parameters, with the same names, all that there are;
- each large tensor is the memory that was handed out, seen in the same way: its file is still mapped, and torch has
  not written to it (`_version`);
- torch's `load_state_dict` would cast none of them;
- small values are equal to the bit, and the checksums of large ones those of what was handed out.

Only the last sees what is written through `.data`, NumPy or a pointer. A CRC-32C changes for certain with any 32 bits
in a row, so with any change of one element of up to four bytes; of longer elements there is a CRC-32, too: of the two
one changes for certain with any 64 bits in a row, as their polynomials have no common factor.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from swapper.io.checksums import checksum, crc32
from swapper.optimizer.loaded_state import as_loaded, loaded_dtype
from swapper.optimizer.segments import OptimizerParameter
from swapper.tensors.inner import is_wrapper
from swapper.tensors.sharded import local_of

__all__ = ["CONTAINERS", "IMMUTABLE", "Snapshot", "SummedRange", "content_of", "summed_range"]

CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)

IMMUTABLE = (int, float, complex, str, bytes, type, Enum, torch.dtype, torch.device, type(None))


def content_of(value: Any) -> Any:
    """The bits of `value`, to be compared. `.data` and NumPy change them without a word to the version counter.

    What cannot be looked into is unlike anything else.
    """
    if isinstance(value, torch.Tensor):
        local = local_of(value).detach()
        if local.layout is not torch.strided or local.is_meta or is_wrapper(local):
            return object()
        bits = local.cpu().resolve_conj().resolve_neg().contiguous()
        return type(value), local.dtype, local.shape, _sums(bits)
    if isinstance(value, Mapping):
        return type(value), [(key, content_of(each)) for key, each in value.items()]
    if isinstance(value, CONTAINERS):
        return type(value), [content_of(each) for each in value]
    return (type(value), repr(value)) if isinstance(value, IMMUTABLE) else object()


def _sums(tensor: torch.Tensor) -> tuple[int, ...]:
    return (checksum(tensor), crc32(tensor)) if tensor.element_size() > 4 else (checksum(tensor),)


@dataclass(frozen=True)
class SummedRange:
    """A range of the elements of a tensor, in the order of memory, and the checksums of its bytes."""

    start: int
    stop: int
    sums: tuple[int, ...]


def summed_range(flat: torch.Tensor, start: int, stop: int) -> SummedRange:
    """The `SummedRange` of `flat`, which is 1-D, from `start` to `stop`, as it is now."""
    return SummedRange(start, stop, _sums(flat[start:stop]))


@dataclass(frozen=True)
class _Handed:
    """A large tensor that was handed out."""

    look: tuple[Any, ...]
    parts: tuple[SummedRange, ...]

    def is_there(self, value: torch.Tensor) -> bool:
        """True if `value` has the elements that were handed out. Reads them."""
        numel = max(part.stop for part in self.parts)
        flat = value.detach().as_strided((numel,), (1,))
        return all(summed_range(flat, part.start, part.stop) == part for part in self.parts)


def _look(value: Any) -> tuple[Any, ...]:
    """Return the memory of a tensor and how it sees it; unlike any other if it is no ordinary tensor on the CPU."""
    local = local_of(value)
    if type(local) is not torch.Tensor or local.device.type != "cpu" or local.layout is not torch.strided:
        return (object(),)
    views = local.is_conj(), local.is_neg()
    version = None if local.is_inference() else local._version
    return type(value), local.data_ptr(), local.dtype, local.shape, local.stride(), views, version


class Snapshot:
    """Notes all that a `state_dict()` has handed out. Keeps none of it alive.

    Args:
        mapping: the memory of its large tensors.
        changes: `BucketRecords.changes` when it was made.
    """

    def __init__(self, mapping: mmap.mmap, changes: int) -> None:
        self._mapping = weakref.ref(mapping)
        self._changes = changes
        self._entries: dict[OptimizerParameter, dict[str, Any]] = {}

    def add(self, of: OptimizerParameter, entries: Mapping[str, Any], parts: Mapping[str, list[SummedRange]]) -> None:
        """Note the state of one parameter.

        Args:
            entries: what is handed out, with local tensors.
            parts: of each large tensor, by key: the checksums of all its elements.
        """
        self._entries[of] = {
            key: _Handed(_look(value), tuple(parts[key])) if parts.get(key) else content_of(value)
            for key, value in entries.items()
        }

    def is_what_is_there(
        self,
        changes: int,
        with_state: Iterable[OptimizerParameter],
        given: Mapping[OptimizerParameter, Mapping[str, Any]],
        group_of: Callable[[OptimizerParameter], dict[str, Any]],
    ) -> bool:
        """True if a load of `given` would leave all state as it is. See [Note: loads of what is there].

        Args:
            changes: `BucketRecords.changes` now.
            with_state: all parameters that have state now.
            given: of each parameter the state that is loaded, with local tensors.
            group_of: the group of a parameter, whose options say what `load_state_dict` casts.
        """
        if changes != self._changes or self._mapping() is None:
            return False
        if not given.keys() == self._entries.keys() == set(with_state):
            return False
        large: list[tuple[_Handed, torch.Tensor]] = []
        for of, entries in given.items():
            noted, segment, group = self._entries[of], of.segments[0], group_of(of)
            if entries.keys() != noted.keys():
                return False
            for key, value in entries.items():
                was = noted[key]
                if not isinstance(was, _Handed):
                    if content_of(as_loaded(key, value, segment, group)) != was:
                        return False
                elif _look(value) != was.look or loaded_dtype(key, value, segment, group) != value.dtype:
                    return False
                else:
                    large.append((was, local_of(value)))
        return all(handed.is_there(value) for handed, value in large)
