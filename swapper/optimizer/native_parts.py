"""`Parts`: an operand as the native core may step it, which is one that has nothing else; and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swapper.optimizer.master_codec import damaged_master, join_master, ties_bytes_max
from swapper.optimizer.operands import Operand, Scratch
from swapper.optimizer.records import OpenBucket
from swapper.optimizer.segments import MASTER, Segment
from swapper.optimizer.state_codec import EncodedState
from swapper.optimizer.step_program import NativeSegment
from swapper.tensors.sharded import local_gradient
from swapper.tensors.strides import is_dense, spanned_bytes

__all__ = ["IMMUTABLE", "TOKEN_NUMEL", "Parts", "Placement", "native_segment", "parts_of", "share_memory", "token_of"]

TOKEN_NUMEL = 61
"""Real elements of a token: not a multiple of 8, so that it has a rest of each loop."""


IMMUTABLE = (int, float, bool, str, type(None))
"""Types of state that a copy of a reference is a copy of."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The state of a segment of which all that is large is in its record; true while `fits` says so.

    Attributes:
        keys, present, stride: of the segment and its parameter, when this was found.
        large: keys of what is in the record, in order: float32, as long as the segment, and dense in the same order.
        rest: the other keys.
    """

    keys: tuple[str, ...]
    present: frozenset[str]
    stride: tuple[int, ...]
    large: tuple[str, ...]
    rest: tuple[str, ...]

    def fits(self, segment: Segment, stride: tuple[int, ...]) -> bool:
        """True if `segment` has the state that this was found for, and its parameter these strides."""
        return self.present == segment.present and self.keys == tuple(segment.keys) and self.stride == stride

    def small_of(self, segment: Segment) -> Mapping[str, Any] | None:
        """The state of `segment` that is not `large`; None if it is not only numbers, strings and their like."""
        small = {key: segment.small[key] for key in self.rest}
        for value in small.values():
            if isinstance(value, Tensor):
                if value.dim() or not value.is_cpu:
                    return None
            elif not isinstance(value, IMMUTABLE):
                return None
        return small


def placement_of(segment: Segment) -> Placement | None:
    """The placement of `segment` as it is now; None if its record has state of another kind. Keeps it in `segment`."""
    p = segment.local
    stride = p.stride() if segment.whole else ()
    found = segment.placement
    if found is not None and found.fits(segment, stride):
        return found
    large = tuple(key for key in segment.keys if key in segment.present)
    specs = [segment.locations[key].spec for key in large]
    for spec in specs:
        if spec.dtype is not torch.float32 or spec.numel != segment.numel:
            return None
        if segment.whole and not (spec.stride == stride and is_dense(p)) and not _are_contiguous(p, spec.stride):
            return None
    segment.placement = Placement(
        tuple(segment.keys),
        frozenset(segment.present),
        stride,
        large,
        tuple(key for key in segment.keys if key not in segment.present),
    )
    return segment.placement


def _are_contiguous(p: Tensor, stride: tuple[int, ...]) -> bool:
    """True if `p` is contiguous, and a tensor of its shape with `stride` as well."""
    return p.is_contiguous() and torch.empty_strided(p.shape, stride, device="meta").is_contiguous()


def share_memory(segments: Iterable[Segment], operands: Iterable[Operand] = ()) -> bool:
    """True if a parameter has a byte in common with another, or a gradient: the class steps in order.

    Args:
        segments: of which all of the parameter is looked at. It and its gradient are in memory.
        operands: of which that part is looked at that they have.
    """
    whole = {segment.of: segment for segment in segments}.values()
    pairs = [(segment.local, _gradient_of(segment)) for segment in whole]
    pairs += [(each.bits, each.gradient) for each in operands if each.bits is not None]
    ranges = []
    for values, gradient in pairs:
        ranges.append((*_extent(values), True))
        if gradient is not None and gradient.layout is torch.strided:
            ranges.append((*_extent(gradient), False))
    ranges.sort()
    stop = parameters_stop = 0  # of those before
    for begin, end, is_parameter in ranges:
        if begin < (stop if is_parameter else parameters_stop):
            return True
        stop = max(stop, end)
        parameters_stop = max(parameters_stop, end if is_parameter else 0)
    return False


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses that its elements lie between, which may have gaps."""
    begin = tensor.data_ptr()
    return begin, begin + spanned_bytes(tensor)


def _is_aligned(*tensors: Tensor) -> bool:
    """True if each has memory that begins at a multiple of its elements' size. Of files that are mapped it may not."""
    return all((at := each.data_ptr()) and at % each.itemsize == 0 for each in tensors)


def _gradient_of(segment: Segment) -> Tensor | None:
    gradient = segment.parameter.grad
    return gradient if gradient is None else local_gradient(segment.parameter, gradient)


class Parts(NamedTuple):
    """An operand as the native core may step it.

    Attributes:
        values, gradient: 1-D. The gradient may be of any dtype if there is a master.
        keys: of the state that is as long, float32 and dense.
        state: the addresses of that; of what is encoded, of nothing.
        state_at: each of its tensors, 1-D, by its index; not of what is encoded.
        encoded: how each of it is encoded, None of one that is not; empty if none is.
        small: the rest of the state.
    """

    values: Tensor
    gradient: Tensor
    keys: tuple[str, ...]
    state: Sequence[int]
    state_at: Callable[[int], Tensor]
    small: Mapping[str, Any]
    encoded: Sequence[EncodedState | None] = ()


def parts_of(operand: Operand, opened: OpenBucket, address: int) -> Parts | None:
    """The parts of `operand`; None if they are not all that it has. `address`: of the record."""
    segment = operand.segment
    p = segment.local
    values, gradient = operand.bits, operand.gradient
    if values is None and not segment.of.sharded:
        # The class, which is given the parameter itself, and its gradient, may ask what they are.
        given = segment.parameter.grad
        if type(p) is not torch.nn.Parameter or not p.requires_grad or type(given) is not Tensor or vars(given):
            return None
    if values is None or gradient is None:
        gradient = _gradient_of(segment)
        if p.dtype is not torch.float32 or gradient is None or gradient.dtype is not torch.float32:
            return None
        if not (p.is_contiguous() and gradient.layout is torch.strided and gradient.is_contiguous()):
            return None
        values, gradient = p.detach().view(-1), gradient.detach().view(-1)
    if not segment.master and (values.dtype is not torch.float32 or gradient.dtype is not torch.float32):
        return None
    if not (values.is_cpu and gradient.is_cpu and values.is_contiguous() and gradient.is_contiguous()):
        return None
    if values.is_neg() or gradient.is_neg():
        return None  # Its memory has the negative of what it is.
    if not _is_aligned(values, gradient):
        return None
    placed = placement_of(segment)
    small = None if placed is None else placed.small_of(segment)
    if placed is not None and small is not None:
        keys = placed.large

        def stored(i: int) -> Tensor:
            return opened.stored(segment, keys[i]).as_strided((segment.numel,), (1,))

        encoded = [opened.encoded_state(segment, key) for key in keys] if segment.encoded else ()
        addresses = [address + segment.locations[key].offset_bytes for key in keys]
        return Parts(values, gradient, keys, addresses, stored, small, encoded)
    if segment.encoded:
        return None  # The class's way decodes what it has.
    return _parts_in_memory(segment, opened.state_of(segment), values, gradient)


def _parts_in_memory(segment: Segment, state: Mapping[str, Any], values: Tensor, gradient: Tensor) -> Parts | None:
    """As `parts_of`, of state that may lie anywhere."""
    p = segment.local
    large: dict[str, Tensor] = {}
    small: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            alike = value.stride() == p.stride() and is_dense(p) if segment.whole else True
            if value.dtype is not torch.float32 or value.numel() != segment.numel or not value.is_cpu:
                return None
            if not (alike or p.is_contiguous()) or not (value.is_contiguous() or alike):
                return None
            large[key] = value.as_strided((segment.numel,), (1,))
        elif isinstance(value, Tensor):
            if not value.is_cpu:
                return None
            small[key] = value
        elif isinstance(value, IMMUTABLE):
            small[key] = value
        else:
            return None
    tensors = list(large.values())
    if not _is_aligned(*tensors):
        return None
    addresses = [each.data_ptr() for each in tensors]
    return Parts(values, gradient, tuple(large), addresses, tensors.__getitem__, small)


def native_segment(
    segment: Segment,
    opened: OpenBucket,
    parts: Parts,
    address: int,
    new_ties: int,
    scratch: Scratch,
    in_memory: Container[int],
) -> NativeSegment:
    """`parts` as a job of the native core. State that is encoded, and one of `in_memory`, gets memory of `scratch`."""
    values, gradient = parts.values, parts.gradient
    if gradient.dtype not in (torch.float32, torch.bfloat16):
        gradient = scratch.take(segment.numel, torch.float32).copy_(gradient)  # As for the class: it is planned for.
    if not segment.is_split:
        whole = opened.whole_master(segment) if segment.master else values
        numbers = segment.numel, whole.data_ptr(), 0, 0, 0, 0
    else:
        low = address + segment.locations[MASTER].offset_bytes
        ties = address + opened.ties_offset_bytes(segment)
        numbers = segment.numel, 0, values.data_ptr(), low, ties, segment.tie_bits
    if not parts.encoded:
        return NativeSegment(*numbers, new_ties, gradient, parts.state, parts.state_at)
    decoded: dict[int, Tensor] = {}
    addresses = list(parts.state)
    for i, encoded in enumerate(parts.encoded):
        if encoded is not None:
            if i in in_memory:
                decoded[i] = scratch.take(segment.numel, torch.float32)
            addresses[i] = decoded[i].data_ptr() if i in decoded else 0

    def state_at(i: int) -> Tensor:
        return decoded[i] if i in decoded else parts.state_at(i)

    return NativeSegment(*numbers, new_ties, gradient, addresses, state_at, parts.encoded)


def token_of(segment: Segment, opened: OpenBucket, parts: Parts) -> list[Tensor]:
    """Copies of the first elements of a segment: parameter or master, gradient, state; float32."""
    numel = min(segment.numel, TOKEN_NUMEL)
    values = torch.empty(numel, dtype=torch.float32, device="cpu")
    if not segment.is_split:
        values.copy_((opened.whole_master(segment) if segment.master else parts.values)[:numel])
    else:
        low = opened.stored(segment, MASTER)[:numel].contiguous()
        tie_bits = int((low.view(torch.int16) == -(1 << 15)).sum())
        if tie_bits > segment.tie_bits:
            raise damaged_master(f"more than {segment.tie_bits} ties")
        ties = opened.ties_of(segment)[: ties_bytes_max(tie_bits)].clone()
        join_master(parts.values[:numel].clone(), low, ties, tie_bits, values)
    state = []
    for i, key in enumerate(parts.keys):
        if key in segment.encoded:
            state.append(torch.empty(numel, dtype=torch.float32, device="cpu"))
            opened.decode_state(segment, key, state[-1])
        else:
            state.append(parts.state_at(i)[:numel].clone())
    return [values, parts.gradient[:numel].to(torch.float32), *state]
