"""Operands: the tensors that the optimizer's class steps on, made of the segments of one bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from swapper.io.devices import Copy, DeviceCopies
from swapper.optimizer.device_records import DeviceBucket
from swapper.optimizer.records import OpenBucket
from swapper.optimizer.segments import OptimizerParameter, Segment
from swapper.sizes import ALIGNMENT_BYTES, round_up
from swapper.storage.buffers import Lease
from swapper.tensors.sharded import local_gradient, sharded_like
from swapper.tensors.strides import is_dense

__all__ = ["Operand", "Scratch", "ScratchFull", "Slices", "attributes_of", "fetch", "make_tensors", "write_back"]


class ScratchFull(Exception):
    """There is no room for this in the half of a scratch buffer."""


class Scratch:
    """Hands out aligned pieces of one buffer, front to back.

    The last copy from or to it is the transfer of its lease, so that the pool gives the memory to nobody else before.

    Args:
        half: 0 or 1: only pieces of this half. What finds no room there raises `ScratchFull`; in all of it that would
            be an error of the plan.
    """

    def __init__(self, lease: Lease | None, half: int | None = None) -> None:
        self._lease = lease
        self._is_half = half is not None
        length_bytes = 0 if lease is None else lease.length_bytes
        middle = length_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._start = middle if half == 1 else 0
        self._stop = middle if half == 0 else length_bytes
        self._cursor = self._start

    def halves(self) -> tuple[Scratch, Scratch]:
        """The two halves of all of it."""
        return Scratch(self._lease, 0), Scratch(self._lease, 1)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `numel` elements; undefined content; 1-D; starts at a multiple of 64 bytes."""
        length = numel * dtype.itemsize
        if length == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        start = self._advance(length)
        assert self._lease is not None
        return self._lease.view(start, numel, dtype)

    def take_bytes(self, length_bytes: int) -> int:
        """As `take`, of bytes. Returns their address."""
        start = self._advance(length_bytes)
        assert self._lease is not None
        return self._lease.tensor.data_ptr() + start

    def _advance(self, length_bytes: int) -> int:
        start = self._cursor
        if start + length_bytes > self._stop:
            if self._is_half:
                raise ScratchFull
            raise AssertionError("scratch was not planned for")
        self._cursor = start + round_up(length_bytes, ALIGNMENT_BYTES)
        return start

    def note(self, copy: Copy | None) -> None:
        """`copy`, which is the last that was started, is from or to a piece."""
        if self._lease is not None and copy is not None:
            self._lease.transfer = copy

    def wait(self) -> None:
        """Wait for the copies.

        Raises:
            SwapIOError: the device failed.
        """
        if self._lease is not None and self._lease.transfer is not None:
            self._lease.transfer.wait()
            self._lease.transfer = None

    def release(self) -> None:
        """Give the buffer back. Idempotent."""
        if self._lease is not None:
            self._lease.release()

    def reset(self) -> None:
        """Take everything back. Copies to it that follow come after those from it; before the host writes: `wait`."""
        self._cursor = self._start


Slices = dict[Segment, tuple[torch.Tensor, torch.Tensor]]
"""Of segments that are not fetched yet: the elements of the parameter and of its gradient, 1-D, in their memory."""

_OF_DTENSOR = ("_local_tensor", "_spec")


@dataclass(eq=False, slots=True)
class Operand:
    """A segment during a step.

    Attributes:
        bits: the parameter's elements, 1-D; on the host. A view of the parameter where it is on the CPU.
        gradient: the same of its gradient; None where the class is given the user's own parameter.
        master: decoded, fp32, 1-D; None without one.
        tensor: given to the class.
        is_copied: what the class is given of the gradient, or of the parameter, may be a copy, as where strides differ.
        on_host: all of the parameter's values, of which `bits` is a view, where those are on the host though the
            parameter is on an accelerator; else None.
        edited: the user has changed the parameter, so the master is made anew from it. Set before `make_tensors` where
            other segments say so, and by it where the segment's own bits do. A tensor where only an accelerator knows.
    """

    segment: Segment
    bits: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    master: torch.Tensor | None = None
    tensor: torch.nn.Parameter | None = None
    edited: bool | torch.Tensor = False
    is_copied: bool = False
    on_host: torch.Tensor | None = None


def fetch(
    active: Sequence[Segment],
    remote: bool,
    gradients: Mapping[Segment, torch.Tensor],
    on_host: Mapping[torch.nn.Parameter, torch.Tensor],
    scratch: Scratch,
    copies: DeviceCopies,
    slices: Slices | None,
) -> list[Operand]:
    """Get at parameters and gradients; with `remote`, start copying them from the accelerator.

    Args:
        active: segments of one bucket that have a gradient, and whose parameters are in memory.
        gradients: slices on the host, 1-D and in memory order, of gradients that are not at their parameters.
        on_host: values of parameters on an accelerator that are stepped where they are, on the host.
        slices: gets those of a parameter's other segments, for the next calls; None if what is fetched may be somewhere
            else then.
    """
    operands = []
    for segment in active:
        if slices is not None and (found := slices.pop(segment, None) or _cut(segment, slices)) is not None:
            operands.append(Operand(segment, *found))
            continue
        p, local = segment.parameter, segment.local
        operand = Operand(segment, on_host=on_host.get(p))
        brought = gradients.get(segment)  # The gradient is swapped: this is its slice.
        gradient = p.grad if brought is None else None
        if gradient is not None and (segment.master or not segment.of.collective):
            gradient = local_gradient(p, gradient)
        assert brought is not None or gradient is not None
        if remote:
            # Both before `begin`: of what has other strides they are temporaries, made on the current stream.
            values = segment.slice_of(local if operand.on_host is None else operand.on_host)
            arrived = None if gradient is None else segment.slice_of(gradient)
            copies.begin()
            operand.bits = values
            if operand.on_host is None:
                operand.bits = scratch.take(segment.numel, p.dtype)
                scratch.note(copies.copy(operand.bits, values))
            operand.gradient = brought
            if arrived is not None:
                operand.gradient = scratch.take(segment.numel, arrived.dtype)
                scratch.note(copies.copy(operand.gradient, arrived))
        elif segment.master or not segment.whole:
            operand.bits = segment.slice_of(local)
            operand.gradient = segment.slice_of(gradient) if gradient is not None else brought
            operand.is_copied = not (local.is_contiguous() and (gradient is None or gradient.is_contiguous()))
        operands.append(operand)
    return operands


def _cut(segment: Segment, slices: Slices) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cut the parameter of `segment`, and its gradient. None if that takes a copy, or the class is given it itself."""
    p, of = segment.parameter, segment.of
    gradient = p.grad
    if type(p) is not torch.nn.Parameter or type(gradient) is not torch.Tensor:
        return None  # A DTensor, or of another swapper.
    if not (segment.master or not segment.whole) or gradient.layout is not torch.strided:
        return None
    if not (p.is_contiguous() and gradient.is_contiguous()):
        return None
    lengths = [each.numel for each in of.segments]
    values, gradients = (t.detach().view(-1).split_with_sizes(lengths) for t in (p, gradient))
    slices.update(zip(of.segments, zip(values, gradients, strict=True), strict=True))
    return slices.pop(segment)


def make_tensors(operands: Sequence[Operand], opened: OpenBucket, scratch: Scratch) -> None:
    """Make the tensors that the class steps on, with their gradients. The copies of `fetch` are done."""
    for operand in operands:
        segment = operand.segment
        if operand.bits is None:
            operand.tensor = segment.parameter
            if segment.of.sharded and not segment.of.collective:
                assert segment.parameter.grad is not None
                operand.tensor = torch.nn.Parameter(segment.local)
                operand.tensor.grad = local_gradient(segment.parameter, segment.parameter.grad)
                _bring_attributes(segment.of, operand.tensor)
            continue
        assert operand.gradient is not None
        values, gradient = operand.bits, operand.gradient
        if segment.master:
            values = operand.master = _make_master(operand, operand.bits, opened, scratch)
            room = scratch.take(segment.numel, torch.float32) if gradient.is_cpu else None
            gradient = gradient.to(torch.float32) if room is None else room.copy_(gradient)
        seen = segment.shaped(values), segment.shaped(gradient)
        if segment.of.collective:
            seen = sharded_like(seen[0], segment.parameter), sharded_like(seen[1], segment.parameter)
        operand.tensor = torch.nn.Parameter(seen[0])
        operand.tensor.grad = seen[1]
        _bring_attributes(segment.of, operand.tensor)


def attributes_of(of: OptimizerParameter) -> Mapping[str, Any]:
    """Return the attributes that the user has set on a parameter, such as a factor of its learning rate."""
    return {
        name: value
        for name, value in vars(of.parameter).items()
        if not name.startswith("_swapper_") and not (of.sharded and name in _OF_DTENSOR)
    }


def _bring_attributes(of: OptimizerParameter, tensor: torch.nn.Parameter) -> None:
    """Let the class see them."""
    there = vars(tensor)  # Of a DTensor what makes it one.
    there.update((name, value) for name, value in attributes_of(of).items() if name not in there)


def _make_master(operand: Operand, bits: torch.Tensor, opened: OpenBucket, scratch: Scratch) -> torch.Tensor:
    segment = operand.segment
    if isinstance(opened, DeviceBucket):
        return opened.make_master(segment, bits, operand.edited)
    # One that is kept as it is, is stepped where it is kept.
    master = scratch.take(segment.numel, torch.float32) if segment.is_split else opened.whole_master(segment)
    if operand.edited:
        master.copy_(bits)
    elif not opened.decode_master(segment, bits, master):
        operand.edited = segment.checksum is not None
    return master


def write_back(operand: Operand, remote: bool, copies: DeviceCopies, scratch: Scratch) -> None:
    """Bring the stepped values to the parameter, where the class did not step on its own memory."""
    segment, bits = operand.segment, operand.bits
    if segment.of.sharded or operand.on_host is not None:
        # The counter of its local tensor is another; and of memory of the pool no counter knows.
        increment_version(segment.parameter)
    if bits is None or operand.on_host is not None or (not remote and segment.local.is_contiguous()):
        return  # The class was given the parameter, or views of it; or what the pool has of it.
    parameter = segment.local.detach()
    if not is_dense(parameter):
        whole = parameter.reshape(-1)  # A copy, as it was cut.
        whole[segment.start : segment.stop].copy_(bits)
        parameter.copy_(whole.view(parameter.shape))
    elif remote:
        flat = parameter.as_strided((parameter.numel(),), (1,))
        scratch.note(copies.copy(flat[segment.start : segment.stop], bits))
