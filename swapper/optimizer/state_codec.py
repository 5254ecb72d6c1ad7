"""Tensors of the state that are stored encoded as bf16 or int8, in the record of their bucket."""

from __future__ import annotations

from typing import NamedTuple

import torch

from swapper.io.bf16_codec import RoundingKey, decode_bf16, encode_bf16
from swapper.optimizer.int8_codec import blocks_of, decode_int8, encode_int8
from swapper.optimizer.segments import Memory, StateLocation

__all__ = ["EncodedState", "decode_state", "encode_state"]

_NUMBERS = {"bf16": 1, "int8": 2}


class EncodedState(NamedTuple):
    """A tensor of the state as it is stored encoded: `EncodedArray` in csrc/native_step.h.

    Attributes:
        encoding: 1 for bf16, 2 for int8.
        data, scales: addresses; the latter of int8.
        first: index of its first element in all of its parameter.
        seed, name, step, parameter: of its random bits; 32 bits each.
    """

    encoding: int
    data: int
    scales: int
    first: int
    seed: int
    name: int
    step: int
    parameter: int

    @classmethod
    def at(cls, location: StateLocation, record: int, first: int, rounding: RoundingKey) -> EncodedState:
        """Return the form of a tensor in the record at the address `record`."""
        data, scales = record + location.offset_bytes, record + location.scales_offset_bytes
        return cls(_NUMBERS[location.spec.encoding], data, scales, first, *rounding.numbers)


def decode_state(location: StateLocation, memory: Memory, values: torch.Tensor) -> None:
    """Write the first elements of an encoded tensor to `values`: float32, 1-D, in the order of memory."""
    numel = values.numel()
    stored = location.flat_view(memory)[:numel]
    if location.spec.encoding == "int8":
        decode_int8(stored, location.scales(memory)[: blocks_of(numel)], values)
    else:
        decode_bf16(stored, values)


def encode_state(
    value: torch.Tensor, location: StateLocation, memory: Memory, first: int, rounding: RoundingKey
) -> None:
    """Encode `value`, float32 of the shape of the tensor, to its place in a record.

    Args:
        first: index of its first element in all of its parameter.
        rounding: of its random bits.
    """
    spec = location.spec
    if value.stride() != spec.stride:
        value = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device="cpu").copy_(value)
    values = value.detach().as_strided((spec.numel,), (1,))
    stored = location.flat_view(memory)
    if spec.encoding == "int8":
        encode_int8(values, stored, location.scales(memory), first, rounding)
    else:
        encode_bf16(values, stored, first, rounding)
