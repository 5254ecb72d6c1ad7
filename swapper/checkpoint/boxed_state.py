"""The state of one optimizer in a checkpoint, as it is wanted: of whole parameters, or of one box of each.

A checkpoint that ranks have saved together has parameters in parts, each of which is like a parameter of its own to
`StateReader`. What is wanted may be a part, as on as many ranks as then: it passes as it is. Otherwise it is put
together of those that have some of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from swapper.checkpoint.index import INDEX, SavedWhole
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.state_reader import Bits, StateReader
from swapper.checkpoint.streams import StreamPart, TensorStream, are_a_whole, read_box, stream_of, whole_box
from swapper.errors import SwapError
from swapper.optimizer.segments import MASTER
from swapper.tensors.sharded import Box
from swapper.tensors.strides import contiguous_stride

__all__ = ["BoxedState"]


class BoxedState:
    """Reads the state of one optimizer. Parameters are known by their positions among those that its groups have.

    Args:
        checkpoint: it stays open as long as this is used.
        number: of the optimizer in the checkpoint.
        boxes: of each parameter, what is wanted of it; None for all of it.
        bits: the values that masters of a box go with; None for those that the checkpoint has. Asked for only where
            the box is a part as it was saved.

    Attributes:
        parts: reads them.
        part_of: by position, the position of the part that is what is wanted. Others are put together.
        wholes: the parameters.
        saved: what the index says of the optimizer.

    Raises:
        SwapError: the index and the files do not fit together.
        SwapIOError: a file cannot be read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        number: int,
        boxes: Sequence[Box | None] | None = None,
        bits: Callable[[int, Sequence[tuple[int, int]]], Iterator[torch.Tensor]] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._what = f"optimizer {number}"
        self.saved = checkpoint.index.optimizers[number]
        self.wholes = self.saved.wholes()
        self._boxes: list[Box | None] = [None] * len(self.wholes)
        self.part_of: dict[int, int] = {}
        self._latest: tuple[int, dict[str, Any]] | None = None
        for position, whole in enumerate(self.wholes):
            if whole.shape is None:
                self.part_of[position] = whole.parts[0]
                continue
            if self.saved.sharded:
                self._check(position, whole)
            box = None if boxes is None else boxes[position]
            self._boxes[position] = box = box or whole_box(whole.shape)
            for part in whole.parts:
                if self._box_of(part) == box:
                    self.part_of[position] = part
        position_of = {part: position for position, part in self.part_of.items()}
        self.parts = StateReader(checkpoint, number, None if bits is None else _bits_of(bits, position_of))
        self._check_states()

    def _check(self, position: int, whole: SavedWhole) -> None:
        parts, shape = self.saved.parameters, whole.shape
        assert shape is not None
        if (
            not whole.parts
            or max(whole.parts) >= len(parts)
            or any(parts[part].dtype != whole.dtype or parts[part].shape is None for part in whole.parts)
            or not are_a_whole([self._box_of(part) for part in whole.parts], shape)
        ):
            raise self._incomplete(position)

    def _check_states(self) -> None:
        """Refuse parameters of whose parts some have state and others not, or another."""
        for position, whole in enumerate(self.wholes):
            known = {(*self.saved.parameters[part].keys, part in self.parts.with_master) for part in whole.parts}
            if len(known) > 1:
                raise self._incomplete(position)

    def _incomplete(self, position: int) -> SwapError:
        return SwapError(
            f"{self._checkpoint.directory / INDEX} is damaged: what it says of {self._what}, parameter {position}, "
            "does not fit together; use another checkpoint"
        )

    def _box_of(self, part: int) -> Box:
        saved = self.saved.parameters[part]
        shape = tuple(saved.shape or ())
        return Box(tuple(saved.offsets) or (0,) * len(shape), shape)

    @property
    def with_master(self) -> set[int]:
        """Slots of the parameters that have master weights."""
        return {position for position, whole in enumerate(self.wholes) if whole.parts[0] in self.parts.with_master}

    def has_state(self, position: int) -> bool:
        """True if the checkpoint has state of the parameter."""
        return self.parts.has_state(self.wholes[position].parts[0])

    def _parts_in(self, position: int) -> list[int]:
        """The parts that have elements of what is wanted; none if that has none."""
        if (part := self.part_of.get(position)) is not None:
            return [part]
        box = self._boxes[position]
        assert box is not None
        return [part for part in self.wholes[position].parts if self._box_of(part).overlaps(box)]

    def files(self) -> Iterator[str]:
        """The files that have something of what is wanted."""
        for position, whole in enumerate(self.wholes):
            for part in self._parts_in(position):
                yield from self.parts.files(part)
            first = whole.parts[0]
            if not self._parts_in(position) and {*self.saved.parameters[first].dtypes} - self.split(position):
                yield from self.parts.files(first)

    def split(self, position: int) -> set[str]:
        """The keys of the state that has an element for each of the parameter's."""
        whole = self.wholes[position]
        if self.saved.sharded:
            return {MASTER, *whole.split}
        shape = tuple(whole.shape or ())
        state = self.parts.state(whole.parts[0])
        return {MASTER, *(key for key, value in state.items() if tuple(getattr(value, "shape", ())) == shape != ())}

    def state(self, position: int) -> dict[str, Any]:
        """As of `StateReader`, of what is wanted."""
        if (part := self.part_of.get(position)) is not None:
            return self.parts.state(part)
        if self._latest is None or self._latest[0] != position:
            self._latest = position, self._joined(position)
        return dict(self._latest[1])

    def _joined(self, position: int) -> dict[str, Any]:
        whole, box = self.wholes[position], self._boxes[position]
        assert box is not None
        # Of others nothing is read; if there is none, keys and dtypes are those of any.
        parts_in = self._parts_in(position) or whole.parts[:1]
        states = [self.parts.state(part) for part in parts_in]
        found: dict[str, Any] = {}
        split = self.split(position)
        for key, first in states[0].items():
            values = [state[key] for state in states]
            if key not in split:
                found[key] = first
                continue
            dtypes = {value.dtype for value in values if isinstance(value, (TensorStream, torch.Tensor))}
            boxes = [self._box_of(part) for part in parts_in]
            if len(dtypes) != 1 or any(
                tuple(getattr(value, "shape", ())) != each.sizes for value, each in zip(values, boxes, strict=True)
            ):
                raise self._incomplete(position)
            (dtype,) = dtypes
            streams = [value if isinstance(value, TensorStream) else stream_of(value) for value in values]
            parts = [StreamPart(each, of.contiguous().read) for each, of in zip(boxes, streams, strict=True)]
            found[key] = TensorStream(dtype, box.sizes, contiguous_stride(box.sizes), read_box(parts, dtype, box))
        return found


def _bits_of(bits: Bits, position_of: Mapping[int, int]) -> Callable[..., Iterator[torch.Tensor] | None]:
    def find(part: int, ranges: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor] | None:
        return bits(position_of[part], ranges) if part in position_of else None

    return find
