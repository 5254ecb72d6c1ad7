"""Recorded steps with square roots are split into programs that give what the operations give one after the other."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swapper.io import _native
from swapper.optimizer.master_codec import join_master, split_master, ties_bytes_max
from swapper.optimizer.step_program import (
    NativeSegment,
    Unsupported,
    best_instruction_set,
    compiled,
    scratch_for,
    ways_of,
)
from swapper.optimizer.step_recorder import COPY, PARAMETER, SQRT, Operation

ABS, ADD, MUL, MUL_NUMBER, FILL, CLAMP_MAX = 2, 5, 7, 8, 19, 21  # as in csrc/step_program.h
CONSTANTS = {ADD: (1.0,), MUL_NUMBER: (0.75,), FILL: (0.5,), CLAMP_MAX: (0.75,)}
NUMEL = 301

BY_TORCH: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    COPY: lambda a, b: a.clone(),
    ABS: lambda a, b: a.abs(),
    ADD: lambda a, b: a + b,
    MUL: lambda a, b: a * b,
    MUL_NUMBER: lambda a, b: a * 0.75,
    FILL: lambda a, b: torch.full_like(a, 0.5),
    CLAMP_MAX: lambda a, b: a.clamp(max=0.75),
    SQRT: lambda a, b: a.sqrt(),
}


def one_after_the_other(operations: list[Operation], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    registers = dict(enumerate(tensors))
    for each in operations:
        registers[each.out] = BY_TORCH[each.opcode](registers[each.a], registers[each.b])
    return [registers[i] for i in range(len(tensors))]


def natively(operations: list[Operation], tensors: list[torch.Tensor], is_split: bool, way: int) -> list[torch.Tensor]:
    """What the program of `operations` makes of `tensors`, of which the first may be a split master."""
    values, gradient, *state = (each.clone() for each in tensors)
    program = compiled(operations, len(state), way)
    bits, low = torch.empty(NUMEL, dtype=torch.bfloat16), torch.empty(NUMEL, dtype=torch.int16)
    ties, new_ties = torch.empty(2, ties_bytes_max(NUMEL), dtype=torch.uint8)
    places = [values.data_ptr(), 0, 0, 0, 0, 0]
    if is_split:
        tie_bits = split_master(values, bits, low, ties)
        places = [0, bits.data_ptr(), low.data_ptr(), ties.data_ptr(), tie_bits, new_ties.data_ptr()]
    segment = NativeSegment(NUMEL, *places, gradient, [each.data_ptr() for each in state], state.__getitem__)
    scratch = scratch_for(program.scratch_arrays, NUMEL)
    results = program.run([segment], scratch, 1, best_instruction_set())
    assert program.writes_parameter == any(each.out == PARAMETER for each in operations)
    if is_split and program.writes_parameter:
        join_master(bits, low, new_ties, results[0][0], values)
    return [values, gradient, *state]


def drawn(draw: random.Random, memory: int) -> list[Operation]:
    """Operations on memory and on registers that were written before; two in nine are square roots."""
    written, operations = [*range(memory)], []
    for _ in range(draw.randint(1, 14)):
        opcode = draw.choice([*BY_TORCH, SQRT])
        out = draw.choice([0, *range(2, memory + 5)])  # The gradient is only read.
        a, b = draw.choices(written[-6:] + written, k=2)
        b = b if opcode in (ADD, MUL) else a
        operations.append(Operation(opcode, out, a, b, a, CONSTANTS.get(opcode, ())))
        written.append(out)
    return operations


def assert_same(operations: list[Operation], memory: int, seed: int) -> None:
    tensors = list(torch.randn(memory, NUMEL, generator=torch.Generator().manual_seed(seed)).abs_())
    tensors[0] = tensors[0].half().float()  # One in eight is a tie.
    expected = one_after_the_other(operations, tensors)
    for way in ways_of(operations):
        for is_split in (False, True):
            for mine, other in zip(natively(operations, tensors, is_split, way), expected, strict=True):
                assert torch.equal(mine.view(torch.int32), other.view(torch.int32)), (way, seed, operations)


@pytest.mark.parametrize("memory", [2, 3, 4])
def test_any_operations_in_any_order(memory: int) -> None:
    split = 0
    for seed in range(700):
        operations = drawn(random.Random(seed), memory)
        try:
            compiled(operations, memory - 2, 0)
        except Unsupported as unsupported:
            assert "what comes of another" in str(unsupported)
            continue
        assert_same(operations, memory, seed)
        split += any(each.opcode == SQRT for each in operations)
    assert split > 100


def unary(opcode: int, out: int, a: int) -> Operation:
    return Operation(opcode, out, a, a, a)


ROOTS = {
    "twice of one": [unary(SQRT, 4, 2), unary(SQRT, 5, 2), Operation(ADD, 0, 4, 5, 4, (1.0,))],
    "of the parameter": [unary(SQRT, 4, 0), unary(COPY, 3, 4), unary(COPY, 0, 4)],
    "of a parameter that is done": [unary(ABS, 0, 0), unary(SQRT, 2, 0)],
    "in place": [unary(SQRT, 2, 2), unary(SQRT, 3, 3)],
    "of what changes": [unary(SQRT, 4, 2), Operation(MUL, 2, 2, 1, 2), unary(SQRT, 3, 2), Operation(MUL, 0, 0, 4, 0)],
    "of what two get": [Operation(MUL, 4, 2, 1, 2), unary(SQRT, 5, 4), unary(COPY, 2, 4), unary(COPY, 3, 4)],
    "beside what is exchanged": [unary(COPY, 4, 2), unary(COPY, 2, 3), unary(COPY, 3, 4), unary(SQRT, 0, 0)],
    "with and without": [Operation(MUL, 4, 2, 1, 2), unary(SQRT, 5, 4), Operation(MUL, 0, 4, 5, 4), unary(COPY, 2, 4)],
}


@pytest.mark.parametrize("name", ROOTS)
def test_roots(name: str) -> None:
    assert_same(ROOTS[name], 4, 0)


ROOT_OF_A_ROOT = [unary(SQRT, 3, 2), unary(ABS, 4, 3), unary(SQRT, 0, 4)]


def test_a_root_of_a_root_is_refused_between_two_programs() -> None:
    with pytest.raises(Unsupported, match="what comes of another"):
        compiled(ROOT_OF_A_ROOT, 1, 0)


needs_vendor = pytest.mark.skipif(
    not _native.has_vendor_sqrt(), reason="this torch takes roots by no vendor's function"
)


@needs_vendor
def test_a_root_of_a_root_is_taken_inside() -> None:
    way = ways_of(ROOT_OF_A_ROOT)[0]
    tensors = [torch.rand(NUMEL) for _ in range(3)]
    mine = natively(ROOT_OF_A_ROOT, tensors, False, way)
    assert torch.equal(mine[0], tensors[2].sqrt().abs().sqrt())
    assert compiled(ROOT_OF_A_ROOT, 1, way).scratch_arrays == 0


@needs_vendor
def test_the_vendors_threads_are_what_they_were_after_a_step() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    library.MKL_Set_Num_Threads_Local(3)  # Of this thread alone.
    try:
        natively(ROOT_OF_A_ROOT, [torch.rand(NUMEL) for _ in range(3)], False, ways_of(ROOT_OF_A_ROOT)[0])
    finally:
        assert library.MKL_Set_Num_Threads_Local(0) == 3


@needs_vendor
@pytest.mark.parametrize("threads", [1, 3])
def test_roots_inside_are_those_of_torch_wherever_an_array_begins_and_ends(threads: int) -> None:
    operations = [unary(SQRT, 2, 2), unary(COPY, 0, 2)]
    program = compiled(operations, 1, ways_of(operations)[0])
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 1 << 31, (1 << 18,), generator=generator, dtype=torch.int64)
    a = bits.to(torch.int32).view(torch.float32)
    expected = a.sqrt()
    for begin, stop in [(i, 1 << 18) for i in range(20)] + [
        (3, 3 + n) for n in (1, 2, 7, 8, 15, 16, 17, 255, 257, 1003)
    ]:
        state, values = a.clone()[begin:stop], torch.zeros(stop - begin)
        gradient = torch.zeros(stop - begin)
        places = (values.data_ptr(), 0, 0, 0, 0, 0)
        segment = NativeSegment(stop - begin, *places, gradient, [state.data_ptr()], [state].__getitem__)
        program.run([segment], None, threads, best_instruction_set())
        same = values.view(torch.int32) == expected[begin:stop].view(torch.int32)
        assert bool((same | (values.isnan() & expected[begin:stop].isnan())).all()), (begin, stop)
        assert torch.equal(state.view(torch.int32), values.view(torch.int32))
