"""`ParameterHome`: what an evicted parameter knows of the record that has its values; and the copies that it gives."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from swapper.errors import SwapError
from swapper.parameter.cache import Held
from swapper.parameter.records import ParameterLocation
from swapper.sizes import SMALL_BYTES
from swapper.storage.spans import RecordStore
from swapper.tensors.evicted import EvictedParameter, EvictedTensor, refuse_copy
from swapper.tensors.homes import Home, TemporaryHome, home_of

if TYPE_CHECKING:
    from swapper.parameter.owner import ParameterOwner

__all__ = ["MappedCopies", "ParameterHome", "copy_in_memory", "follow_shape", "parts_of"]


class ParameterHome:
    """Brings the values of one parameter. See `homes.Home`.

    The parameter has this, and its record has the parameter. So this knows the record by its number only, and a
    parameter that nobody uses any more is freed at once, not when the garbage collector comes.
    """

    __slots__ = ("name", "number", "position", "reference", "stride")

    def __init__(self, reference: weakref.ref[Any], held: Held, position: int) -> None:
        self.reference = reference
        self.number, self.position = held.plan.number, position
        self.name, self.stride = held.plan.locations[position].name, held.plan.locations[position].stride

    def of_owner(self) -> ParameterOwner:
        """The owner, while there is one."""
        owner: ParameterOwner | None = self.reference()
        if owner is None:
            raise SwapError(
                "the values of this parameter are gone: its swapper was closed, or the garbage collector has freed its "
                "model, which was part of a cycle; keep the model as long as its parameters, or keep clones of them"
            )
        return owner

    @property
    def owner(self) -> object:
        """The reference, which all homes of one owner share, also when it is dead."""
        return id(self.reference)

    @property
    def keeper(self) -> object:
        """The owner itself."""
        return self.reference()

    @property
    def temporary(self) -> TemporaryHome | None:
        """None: the parameter stays with its owner."""
        return None

    def mapped_copy(self) -> torch.Tensor:
        """See `ParameterOwner.mapped_copy`."""
        return self.of_owner().mapped_copy(self.number, self.position)

    def present(self, homes: Iterable[Home]) -> contextlib.AbstractContextManager[None]:
        """See `ParameterOwner.used`."""
        return self.of_owner().used(parts_of(homes))

    def gather(self, homes: Iterable[Home]) -> contextlib.AbstractContextManager[None]:
        """See `ParameterOwner.gathered`."""
        return self.of_owner().gathered(parts_of(homes))

    def deepcopy(self, parameter: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary parameter, or buffer: in memory; of a whole model, which may not fit, in mapped files.

        Refused of other classes.
        """
        owner = self.of_owner()
        if type(parameter) not in (EvictedParameter, EvictedTensor):
            refuse_copy(f"{self.name}, a parameter of a class of its own")
        mapped = owner._copies if id(owner) in memo and parameter.device.type == "cpu" else None
        return copy_in_memory(owner.used(parts_of([self])), parameter, memo, mapped)


def copy_in_memory(
    present: contextlib.AbstractContextManager[None],
    parameter: torch.Tensor,
    memo: dict[int, Any],
    mapped: MappedCopies | None = None,
) -> torch.Tensor:
    """The copy that `copy.deepcopy` makes of a parameter or buffer that is in memory, as it is within `present`.

    Of a large one it is in a file that `mapped` makes, if that is given.
    """
    with present, torch._C.DisableTorchFunctionSubclass():
        values = parameter.detach()
        make = torch.empty_like if mapped is None or values.nbytes < SMALL_BYTES else mapped.empty_like
        twin = make(values).copy_(values).data  # Of version 0.
        if isinstance(parameter, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, parameter.requires_grad)
    memo[id(parameter)] = twin
    return twin


class MappedCopies:
    """The copies of parameters that somebody has now, in mapped files: they have an address, and cost disk.

    There is one of each parameter. The files have no names, and go with the last tensor.

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


def parts_of(homes: Iterable[Home | None]) -> list[tuple[Held, tuple[int, ...]]]:
    """The records and positions of our `homes`, all of one owner."""
    positions: dict[Held, dict[int, None]] = {}
    for home in homes:
        if isinstance(home, ParameterHome):
            positions.setdefault(home.of_owner()._all[home.number], {})[home.position] = None
    return [(held, tuple(those)) for held, those in positions.items()]


def follow_shape(held: Held, position: int, parameter: torch.Tensor) -> None:
    """Let `parameter` have another shape or dtype, of as many bytes, as where bitsandbytes packs codes."""
    location = held.plan.locations[position]
    known = parameter.nbytes == location.length_bytes and parameter.is_contiguous()
    if known and isinstance(home := home_of(parameter), ParameterHome):
        location.laid_out = location.laid_out or location.shape
        location.shape, location.stride, location.dtype = parameter.shape, parameter.stride(), parameter.dtype
        home.stride = location.stride
        if held.opened and held.opened[position].dtype != location.dtype:
            held.opened[position] = held.opened[position].view(location.dtype)
