"""`NativeProgram`: a recorded step, as programs of the native core with a square root of torch's between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from swapper.io import _native
from swapper.optimizer.step_recorder import FIRST_STATE, FUSED, GRADIENT, PARAMETER, SQRT, Operation

__all__ = ["NativeProgram", "NativeSegment", "Unsupported", "best_instruction_set", "compiled"]

_REGISTERS_MAX = 24  # as in csrc/step_program.h


class Unsupported(Exception):
    """The recording cannot be replayed natively."""


class NativeSegment(NamedTuple):
    """A segment as the native core steps it: `StepJob` in csrc/native_step.h.

    Attributes:
        numel: elements.
        param: address of its float32 values; 0 if the master is split.
        bits, low, ties: addresses of the split master's parts, as for `join_master`; else 0.
        tie_bits: ties of the split master.
        new_ties: address of `ties_bytes_max(numel)` bytes that get the new ties; 0 if no split master is written.
        gradient: float32 or bfloat16, 1-D; only read.
        state: addresses of its state: float32, each `numel` elements, dense.
        state_at: the tensor that is at one of them, 1-D, by its index.
    """

    numel: int
    param: int
    bits: int
    low: int
    ties: int
    tie_bits: int
    new_ties: int
    gradient: Tensor
    state: Sequence[int]
    state_at: Callable[[int], Tensor]

    def job(self, scratch: Tensor | None) -> tuple[int, int, int, int, int, int, int, int, bool, list[int]]:
        """The fields of the job that follow its program."""
        gradient = self.gradient
        return (
            self.numel,
            self.param,
            self.bits,
            self.low,
            self.ties,
            self.tie_bits,
            self.new_ties,
            gradient.data_ptr(),
            gradient.dtype is torch.bfloat16,
            [*self.state] if scratch is None else [*self.state, scratch.data_ptr()],
        )


class NativeProgram:
    """A recorded step that can be replayed.

    Attributes:
        needs_scratch: each segment needs float32 scratch of its length.
        writes_parameter: the step changes the parameter.
    """

    def __init__(
        self, before: Sequence[Operation], after: Sequence[Operation] | None, root: tuple[int, bool] | None, state: int
    ) -> None:
        self.needs_scratch = after is not None
        arrays = state + self.needs_scratch
        self._before = _native_program(before, arrays) if before or after is None else None
        self._after = None if after is None else _native_program(after, arrays)
        self._root = root
        self.writes_parameter = any(PARAMETER in each.writes for each in (before if after is None else after))

    def run(
        self, segments: Sequence[NativeSegment], scratch: Tensor | None, threads: int, instruction_set: int
    ) -> list[tuple[int, int]]:
        """Step `segments`. Returns of each that has a split master its count of ties and the checksum of its bits.

        Args:
            scratch: float32, 1-D, as long as the longest segment, if `needs_scratch`.
            threads: the most that are used.
            instruction_set: see `best_instruction_set`.

        Raises:
            ValueError: a segment's split master is damaged. Nothing of its parameter and master is written; state that
                a square root is taken of may be.
        """
        if self._after is None:
            assert self._before is not None
            jobs = [(self._before, *segment.job(None)) for segment in segments]
            return _native.run_step(jobs, threads, instruction_set)
        assert scratch is not None and self._root is not None
        source, results = self._root[0], []
        for segment in segments:
            fields = segment.job(scratch)
            if self._before is not None:
                _native.run_step([(self._before, *fields)], threads, instruction_set)
            room = scratch[: segment.numel]
            torch.sqrt(room if self._root[1] else segment.state_at(source), out=room)
            results += _native.run_step([(self._after, *fields)], threads, instruction_set)
        return results


def best_instruction_set() -> int:
    """The fastest that this processor has, as `NativeProgram.run` takes it."""
    return _native.best_instruction_set()


def compiled(operations: Sequence[Operation], state: int, contraction: int) -> NativeProgram:
    """The program of `operations`.

    Args:
        state: count of state tensors: their registers begin at `FIRST_STATE`.
        contraction: of torch's fused kernels: see csrc/step_program.h.

    Raises:
        Unsupported: there are two square roots, or they cannot be split off.
    """
    operations = [replace(each, contraction=contraction) if each.opcode in FUSED else each for each in operations]
    roots = [i for i, each in enumerate(operations) if each.opcode == SQRT]
    if not roots:
        return NativeProgram(operations, None, None, state)
    if len(roots) > 1:
        raise Unsupported("several square roots")
    return _split(operations, roots[0], state)


def _split(operations: Sequence[Operation], at: int, state: int) -> NativeProgram:
    """What the root needs comes before it; all else after it, where the master is joined and split once."""
    root = operations[at]
    memory = range(FIRST_STATE, FIRST_STATE + state)
    before = _slice(operations, at, {root.a})
    changed = {register for i in before for register in operations[i].writes if register in memory}
    if any(PARAMETER in operations[i].writes for i in before) or root.out in memory or root.a == PARAMETER:
        raise Unsupported("a square root of what is not state")
    delayed = [i for i in range(at) if i not in before]
    for i in delayed:  # It would see, or undo, what comes before the root.
        later = {register for j in before if j > i for register in operations[j].writes if register in memory}
        if (operations[i].reads | operations[i].writes) & later:
            raise Unsupported("a square root in the middle of other state")
        earlier = {register for j in before if j < i for register in operations[j].writes}
        if operations[i].writes & earlier & set(memory):
            raise Unsupported("a square root of state that changes again")
    in_scratch = root.a not in memory
    after = [*delayed, *range(at + 1, len(operations))]
    again = _made_again(operations, before, after, memory, at)
    for i in again:
        if (operations[i].reads | operations[i].writes) & changed:
            raise Unsupported("a value from before a square root")
    if in_scratch and any(root.a in operations[i].reads | operations[i].writes for i in delayed):
        raise Unsupported("a value that is needed before its square root")
    if any(root.out in operations[i].writes for i in again):
        raise Unsupported("a square root in the place of what is needed again")
    scratch = FIRST_STATE + state

    def moved(order: Sequence[int], root_register: int) -> list[Operation]:
        places = {register: register for register in (PARAMETER, GRADIENT, *memory)}
        places[root_register] = scratch
        count = scratch + 1
        for i in order:
            for register in sorted(operations[i].reads | operations[i].writes):
                if register not in places:
                    places[register] = count
                    count += 1
        return [operations[i].moved(places.__getitem__) for i in order]

    if in_scratch and root.a != root.out and any(root.a in operations[i].reads for i in after):
        raise Unsupported("a value that is needed with and without its square root")
    first = moved(sorted(before), root.a if in_scratch else -1)
    second = moved(sorted({*again, *after}), root.out)
    return NativeProgram(first, second, (root.a - FIRST_STATE, in_scratch), state)


def _slice(operations: Sequence[Operation], end: int, wanted: set[int], known: int = -1) -> set[int]:
    """The operations before `end` that the content of the registers `wanted` comes from, without that at `known`."""
    found, live = set(), set(wanted)
    for i in reversed(range(end)):
        operation = operations[i]
        if i == known:
            live -= operation.writes
        elif operation.writes & live:
            found.add(i)
            live = (live - operation.writes) | operation.reads
    return found


def _made_again(
    operations: Sequence[Operation], before: set[int], after: Sequence[int], memory: range, root: int
) -> set[int]:
    """Those of `before` whose results, which are not in memory, are needed after the root too."""
    again: set[int] = set()
    fixed = {PARAMETER, GRADIENT, *memory}
    for i in after:
        for register in operations[i].reads - fixed:
            again |= {j for j in _slice(operations, i, {register}, root) if j in before}
    return again


def _native_program(operations: Sequence[Operation], arrays: int) -> _native.StepProgram:
    count = max([FIRST_STATE + arrays - 1, *(register for each in operations for register in each.reads | each.writes)])
    if count >= _REGISTERS_MAX:
        raise Unsupported("too many values at once")
    instructions = [(e.opcode, e.out, e.a, e.b, e.c, e.contraction, e.constants) for e in operations]
    return _native.StepProgram(instructions, arrays, count + 1)
