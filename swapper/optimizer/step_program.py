"""`NativeProgram`: a recorded step, as a program of the native core, or two with square roots of torch's between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from swapper.errors import SwapError
from swapper.io import _native
from swapper.optimizer.master_codec import damaged_master
from swapper.optimizer.state_codec import EncodedState
from swapper.optimizer.step_recorder import COPY, FIRST_STATE, FUSED, PARAMETER, SQRT, Operation

__all__ = [
    "NativeProgram",
    "NativeRun",
    "NativeSegment",
    "Unsupported",
    "best_instruction_set",
    "compiled",
    "refusal",
    "scratch_for",
    "ways_of",
]

_REGISTERS_MAX = 24  # as in csrc/step_program.h

_CONTRACTIONS = (2, 0, 1, 3)
"""Of torch's fused kernels: see csrc/step_program.h."""

_ROOTS_BETWEEN, _ROOTS_INSIDE = 0, 1


_Coded = tuple[int, bool, bool, int, int, int, int, int, int, int]
_Fields = tuple[int, int, int, int, int, int, int, int, bool, list[int], list[_Coded]]
_Job = tuple[_native.StepProgram, int, int, int, int, int, int, int, int, bool, list[int], list[_Coded]]

_PLAIN: _Coded = (0, False, False, 0, 0, 0, 0, 0, 0, 0)


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
        state: addresses of its state: float32, each `numel` elements, dense. 0 of what is encoded, and is not one of
            the program's `in_memory`.
        state_at: the tensor that is at one of them, 1-D, by its index.
        encoded: how each of its state is encoded, None of one that is not; or empty, where none is.
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
    encoded: Sequence[EncodedState | None] = ()

    def job(self, scratch: Sequence[Tensor], decodes: Set[int], encodes: Set[int]) -> _Fields:
        """The fields of the job that follow its program.

        Args:
            scratch: arrays that follow the state.
            decodes, encodes: indices of the state that is decoded before the program, and encoded after it.
        """
        gradient, encoded = self.gradient, self.encoded
        coded = [
            _PLAIN if each is None else (each[0], i in decodes, i in encodes, *each[1:])
            for i, each in enumerate(encoded)
        ]
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
            [*self.state, *(each.data_ptr() for each in scratch)],
            coded + [_PLAIN] * len(scratch) if coded else coded,
        )


class NativeProgram:
    """A recorded step that can be replayed.

    Args:
        before, after: what is done before square roots and after them; all of it if `after` is None.
        roots: of each the index of the state tensor that it is taken of, or None for its array of the scratch.
        state: count of state tensors.

    Attributes:
        scratch_arrays: float32 arrays as long as a segment that it needs beside, one for each root.
        writes_parameter: the step changes the parameter.
        in_memory: indices of the state tensors that it needs in memory, also if they are encoded. Of others a tile is
            decoded, stepped and encoded at a time.
    """

    def __init__(
        self, before: Sequence[Operation], after: Sequence[Operation] | None, roots: Sequence[int | None], state: int
    ) -> None:
        self.scratch_arrays = len(roots)
        arrays = state + len(roots)
        self._before = _native_program(before, arrays)
        self._has_before = bool(before) or after is None
        self._after = None if after is None else _native_program(after, arrays)
        self._roots = roots
        self.writes_parameter = any(PARAMETER in each.writes for each in (before if after is None else after))
        rooted = {root for root in roots if root is not None}
        first, last = _state_used(before, state) | rooted, _state_used(after or (), state)
        self.in_memory = rooted | (first & last)
        # What is decoded before the roots is in memory after them. What is encoded twice has the same random bits.
        self._first = first, _state_written(before, state)
        self._last = last - first, _state_written(after or (), state)

    @property
    def is_one_pass(self) -> bool:
        """True if it takes no square root between two passes, so that `NativeRun` can step by it."""
        return self._after is None

    def job(self, segment: NativeSegment) -> _Job:
        """One of its first pass over `segment`, with no scratch."""
        return (self._before, *segment.job((), *self._first))

    def run(
        self, segments: Sequence[NativeSegment], scratch: Tensor | None, threads: int, instruction_set: int
    ) -> list[tuple[int, int]]:
        """Step `segments`. Returns of each whose split master was written its count of ties and its bits' checksum.

        Args:
            scratch: of `scratch_for` the longest segment; None if `scratch_arrays` is 0.
            threads: the most that are used.
            instruction_set: see `best_instruction_set`.

        Raises:
            ValueError: a segment's split master is damaged. Nothing of its parameter and master is written; state that
                a square root is taken of may be.
        """
        if self._after is None:
            return _native.run_step([self.job(segment) for segment in segments], threads, instruction_set)
        assert scratch is not None
        rows = scratch[: self.scratch_arrays].unbind()
        results = []
        for segment in segments:
            if self._has_before or segment.encoded:
                _native.run_step([(self._before, *segment.job(rows, *self._first))], threads, instruction_set)
            for state, row in zip(self._roots, rows, strict=True):
                room = row[: segment.numel]
                torch.sqrt(room if state is None else segment.state_at(state), out=room)
            results += _native.run_step([(self._after, *segment.job(rows, *self._last))], threads, instruction_set)
        return results


class NativeRun:
    """Steps of segments by programs of one pass, which begin at once, on up to `threads` threads of the core.

    Nobody uses their memory before `wait` has returned. One that is dropped waits, too.

    Raises:
        SwapError: a segment is not as described. Nothing has begun.
    """

    def __init__(self, steps: Sequence[tuple[NativeProgram, NativeSegment]], threads: int) -> None:
        jobs = [program.job(segment) for program, segment in steps]
        try:
            self._run = _native.StepRun(jobs, threads, best_instruction_set())
        except ValueError as error:
            raise refusal(error) from error

    def wait(self) -> list[tuple[int, int]]:
        """Wait for all. Returns as `NativeProgram.run` does.

        Raises:
            SwapError: the split master of a segment is damaged. Nothing of any of them was written.
        """
        try:
            return self._run.wait()
        except ValueError as error:
            raise refusal(error) from error


def _state_used(operations: Iterable[Operation], state: int) -> set[int]:
    """Indices of the state tensors, of so many, that `operations` read or write."""
    registers = {register for each in operations for register in each.reads | each.writes}
    return {register - FIRST_STATE for register in registers if FIRST_STATE <= register < FIRST_STATE + state}


def _state_written(operations: Iterable[Operation], state: int) -> set[int]:
    registers = {register for each in operations for register in each.writes}
    return {register - FIRST_STATE for register in registers if FIRST_STATE <= register < FIRST_STATE + state}


def refusal(error: ValueError) -> SwapError:
    """Return the error by which users are told what `NativeProgram.run` has refused."""
    if "ties" in str(error):  # The core has counted them; all else it refuses before it reads a value.
        return damaged_master(error)
    return SwapError(f"a native step was refused: {error}; with offload_optimizer.native_step: off the class steps")


def scratch_for(arrays: int, numel: int) -> Tensor | None:
    """Memory for `arrays` arrays of `numel` elements, each at a multiple of 64 bytes as torch's own; None for none."""
    return torch.empty(arrays, -(-numel // 16) * 16, dtype=torch.float32, device="cpu") if arrays else None


def best_instruction_set() -> int:
    """The fastest that this processor has, as `NativeProgram.run` takes it."""
    return _native.best_instruction_set()


def ways_of(operations: Sequence[Operation]) -> tuple[int, ...]:
    """The ways in which `operations` can be compiled, the best first. Which of them has torch's bits a trial says."""
    if any(each.opcode in FUSED for each in operations):
        return _CONTRACTIONS
    if any(each.opcode == SQRT for each in operations) and _native.has_vendor_sqrt():
        return _ROOTS_INSIDE, _ROOTS_BETWEEN
    return (_ROOTS_BETWEEN,)


def compiled(operations: Sequence[Operation], state: int, way: int) -> NativeProgram:
    """The program of `operations`.

    Args:
        state: count of state tensors: their registers begin at `FIRST_STATE`.
        way: one of `ways_of(operations)`.

    Raises:
        Unsupported: a square root is beside a fused kernel, or, between two programs, is taken of what comes of
            another; or the operations need too many registers.
    """
    has_roots = any(each.opcode == SQRT for each in operations)
    if any(each.opcode in FUSED for each in operations):
        if has_roots:
            raise Unsupported("a square root beside a fused kernel")
        operations = [replace(each, contraction=way) if each.opcode in FUSED else each for each in operations]
    elif has_roots and way == _ROOTS_BETWEEN:
        return _split(operations, state)
    return NativeProgram(operations, None, [], state)


def _split(operations: Sequence[Operation], state: int) -> NativeProgram:
    """Two programs: what the roots are taken of, and all else, where the master is joined and split once.

    Where registers are written more than once, they do not show what depends on what. So each operation makes a value
    of its own, and both programs compute what they need, of what memory has then: some of it twice.
    """
    memory = FIRST_STATE + state
    made, final = _values_of(operations, memory)
    roots = [each for each in made.values() if each.opcode == SQRT]
    before = _needed(made, [root.a for root in roots], set())
    if any(made[value].opcode == SQRT for value in before):
        raise Unsupported("a square root of what comes of another")
    changed = {register: value for register, value in final.items() if value != register}
    known = {root.out: memory + i for i, root in enumerate(roots)}
    # State that is done before the roots is written then, unless what it was is needed after them.
    done = {register: value for register, value in changed.items() if value in before and register != PARAMETER}
    while True:
        left = [(value, register) for register, value in changed.items() if register not in done]
        after = _needed(made, [value for value, _ in left], {*known, *done.values()})
        again = done.keys() & {value for each in after for value in made[each].reads}
        if not again:
            break
        done = {register: value for register, value in done.items() if register not in again}

    def state_of(value: int) -> int | None:
        """The index of the state tensor that has `value` between the two programs."""
        found = [register for register in range(FIRST_STATE, memory) if done.get(register, register) == value]
        return found[0] - FIRST_STATE if found else None

    sources = [state_of(root.a) for root in roots]
    places = [(value, register) for register, value in done.items()]
    places += [(root.a, memory + i) for i, root in enumerate(roots) if sources[i] is None]
    at_first = {register: register for register in range(memory)}
    between = {done.get(register, register): register for register in range(memory)} | known
    first = _placed([made[each] for each in sorted(before)], at_first, places, memory + len(roots))
    second = _placed([made[each] for each in sorted(after)], between, left, memory + len(roots))
    return NativeProgram(first, second, sources, state)


def _values_of(operations: Sequence[Operation], memory: int) -> tuple[dict[int, Operation], dict[int, int]]:
    """Return the operation that makes each value, on values in place of registers; and the last value of each register
    below `memory`. Of those the first has the register's number.
    """
    now = {register: register for register in range(memory)}
    made = {}
    for value, each in enumerate(operations, memory):
        is_copy = each.opcode == COPY and now[each.a] >= memory  # of a value that was made, so it is the same
        if not is_copy:
            made[value] = replace(each.reading(now.__getitem__), out=value)
        now[each.out] = now[each.a] if is_copy else value
    return made, {register: now[register] for register in range(memory)}


def _needed(made: Mapping[int, Operation], values: Iterable[int], known: set[int]) -> set[int]:
    """The values to make so that `values` are there, where `known` are."""
    found: set[int] = set()
    left = [*values]
    while left:
        value = left.pop()
        if value in made and value not in known and value not in found:
            found.add(value)
            left += made[value].reads
    return found


def _placed(
    operations: Sequence[Operation], there: Mapping[int, int], places: Sequence[tuple[int, int]], first_free: int
) -> list[Operation]:
    """`operations`, which are on values, on registers.

    Args:
        there: the registers of values that are there before.
        places: values, and the register that each is to be in at the end.
        first_free: from here on registers are of the tile alone.
    """
    registers, wanted = dict(there), dict(places)
    last = {value: i for i, each in enumerate(operations) for value in each.reads}
    holds = {register: value for value, register in there.items()}
    # At once into registers that hold nothing: what is copied may be overwritten later.
    placed = [_copy(at, there[value]) for value, at in places if value in there and at not in holds]
    late = [(value, at) for value, at in places if value not in there or at in holds]
    for i, each in enumerate(operations):
        read = each.reading(registers.__getitem__)
        out = wanted.get(each.out)
        if out is None or last.get(holds.get(out, -1), -1) > i:  # What is in its place is needed later.
            out = next(
                register
                for register in range(first_free, first_free + len(operations))
                if (value := holds.get(register, -1)) not in wanted and last.get(value, -1) <= i
            )
        holds[out] = each.out
        registers[each.out] = out
        placed.append(replace(read, out=out))
    return placed + [_copy(at, registers[value]) for value, at in late if registers[value] != at]


def _copy(out: int, a: int) -> Operation:
    return Operation(COPY, out, a, a, a)


def _native_program(operations: Sequence[Operation], arrays: int) -> _native.StepProgram:
    count = max([FIRST_STATE + arrays - 1, *(register for each in operations for register in each.reads | each.writes)])
    if count >= _REGISTERS_MAX:
        raise Unsupported("too many values at once")
    instructions = [(e.opcode, e.out, e.a, e.b, e.c, e.contraction, e.constants) for e in operations]
    return _native.StepProgram(instructions, arrays, count + 1)
