"""Split masters on an accelerator: what `master_codec` does on the host, in torch's integer operations.

Nothing here waits for the device, so that what is only known there stays there: the count of ties is a tensor. See
[Note: split masters] in `master_codec` for the format, which is the same to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join_on_device", "split_on_device", "sum_of_bits"]

_NAN = 0x7FC00000
_TIE = 0x8000
_SUMMED_NUMEL = 1 << 20
"""Elements that are summed at once: their temporaries take 8 bytes each, a few times."""


def split_on_device(master: Tensor, param: Tensor, low: Tensor, ties: Tensor) -> Tensor:
    """As `split_master`, for tensors on one device: start splitting fp32 masters into bf16 parameters and the rest.

    Args:
        master: float32, 1-D and contiguous, as all four.
        param: bfloat16; written. Autograd notices it.
        low: int16; written.
        ties: uint8, `ties_bytes_max(master.numel())` elements; written, with zeros behind the ties.

    Returns:
        The number of ties, int64, of shape `()`, on the device.
    """
    bits = master.view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN, bits)
    high, rest = bits >> 16, bits & 0xFFFF
    rounded = (bits + 0x7FFF + (high & 1)) >> 16
    param.view(torch.int16).copy_(rounded)  # The low 16 bits of each.
    low.copy_(rest)
    is_tie = rest == _TIE
    counted = is_tie.cumsum(0)
    number = counted - 1
    # Where there is no tie, nothing is added, and not all of it to one byte.
    byte = torch.where(is_tie, number, torch.arange(len(bits), device=bits.device)) >> 3
    bit = torch.where(is_tie, ((rounded - high) & 1) << (number & 7), 0)
    ties.zero_().scatter_add_(0, byte, bit.to(torch.uint8))
    return counted[-1]


def join_on_device(param: Tensor, low: Tensor, ties: Tensor, tie_bits: int, master: Tensor) -> Tensor:
    """As `join_master`, for tensors on one device: start writing to `master` what `split_on_device` was given.

    Args:
        param: bfloat16, 1-D and contiguous, as all four.
        low: int16.
        ties: uint8, as many bytes as `tie_bits` take.
        tie_bits: how many there are.
        master: float32; written.

    Returns:
        Whether `low` has `tie_bits` ties, bool, of shape `()`, on the device. If not, `master` is undefined.
    """
    rest = low.to(torch.int32) & 0xFFFF
    is_tie = rest == _TIE
    high = param.view(torch.int16).to(torch.int32) - (rest > _TIE).to(torch.int32)
    if tie_bits:
        counted = is_tie.cumsum(0)
        number = (counted - 1).clamp_(0, tie_bits - 1)
        bit = (ties[number >> 3].to(torch.int32) >> (number & 7).to(torch.int32)) & 1
        high -= torch.where(is_tie, bit, 0)
        fits = counted[-1] == tie_bits
    else:
        fits = is_tie.any().logical_not_()
    master.view(torch.int32).copy_((high << 16) | rest)
    return fits


def sum_of_bits(values: Tensor) -> Tensor:
    """A number that is another if any bit of `values` is, but for one case in 2^48 or less.

    It is the sum, modulo 2^64, of each element's bits times an odd number that its place decides.

    Args:
        values: 1-D and contiguous, of 2 bytes an element.

    Returns:
        int64, of shape `()`, on the device of `values`.
    """
    bits = values.view(torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), _SUMMED_NUMEL):
        part = bits[start : start + _SUMMED_NUMEL]
        # Multiplications by the constants of splitmix64, as signed numbers: neighbours get unrelated factors.
        factor = torch.arange(start + 1, start + 1 + len(part), device=bits.device) * -0x61C8864680B583EB
        factor = (factor ^ (factor >> 31)) * -0x40A7B892E31B1A47
        total += ((factor | 1) * part.to(torch.int64)).sum()
    return total
