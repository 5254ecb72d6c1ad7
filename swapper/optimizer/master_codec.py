"""Splits fp32 masters into their 16-bit parameters and what those lack, and joins them again, to the bit.

[Note: split masters] With `master_weights` a bf16 parameter has an fp32 master. The parameter is the
master rounded to nearest even, so the `exact` encoding stores, beside the parameter, only what the
parameter lacks (the idea of Megatron-LM's `store_param_remainders`, which truncates where this rounds):

- `param`, bf16: equal to `master.to(torch.bfloat16)`, except that every NaN is 0x7FC0;
- `low`, 16 bits each: the low half of the master's bits; 0 for a NaN;
- `ties`: for each element whose low half is 0x8000, in the order of the elements, one bit: 1 if rounding
  took the high half up by one, 0 if it left it. Bit `k` is bit `k % 8`, from the lowest, of byte `k // 8`.

With `b` the parameter's bits, the master's high half is `b` where `low < 0x8000`, `b - 1` where
`low > 0x8000`, and `b - bit` where they are equal. Zeros keep their sign, denormals and what overflows to
infinity come back whole; NaNs come back as 0x7FC00000. Random masters have 15 ties in a million, masters
made from fp16 weights one in eight, the worst case is all: 2.125 bytes for each element.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from swapper.errors import SwapError
from swapper.io import _native
from swapper.io.host_memory import require_on_host

__all__ = ["damaged_master", "join_master", "split_master", "ties_bytes_max"]

_LOW_DTYPES = (torch.int16, torch.uint16)


def ties_bytes_max(numel: int) -> int:
    """Bytes that hold the tie bits of `numel` masters in the worst case, when every one is a tie.

    Raises:
        ValueError: `numel` is negative.
    """
    if numel < 0:
        raise ValueError(f"numel is {numel}; it cannot be negative")
    return (numel + 7) // 8


def split_master(master: Tensor, param: Tensor, low: Tensor, ties: Tensor) -> int:
    """Split fp32 masters into their bf16 parameters and what it takes to get the masters back.

    The format is described in [Note: split masters]. Uses up to `torch.get_num_threads()` threads and
    releases the GIL; what is written does not depend on the number of threads. Autograd does not notice
    the write to `param`: its version counter is not advanced.

    Args:
        master: float32. Like all four: on the CPU, contiguous, one-dimensional, any alignment, and
            without a byte in common with the others.
        param: bfloat16, `master.numel()` elements; written.
        low: int16 or uint16, `master.numel()` elements; written.
        ties: uint8, `ties_bytes_max(master.numel())` elements or more; the first
            `ties_bytes_max(result)` are written, with zeros for bits that are not used, the others kept.

    Returns:
        The number of tie bits, which `join_master` needs.

    Raises:
        ValueError: a tensor is not as described.
    """
    numel = master.numel()
    _require("master", master, (torch.float32,), numel)
    _require("param", param, (torch.bfloat16,), numel)
    _require("low", low, _LOW_DTYPES, numel)
    _require("ties", ties, (torch.uint8,), ties_bytes_max(numel), or_more=True)
    _require_disjoint(master=master, param=param, low=low, ties=ties)
    return _native.split_master(
        master.data_ptr(), param.data_ptr(), low.data_ptr(), ties.data_ptr(), numel, torch.get_num_threads()
    )


def join_master(param: Tensor, low: Tensor, ties: Tensor, tie_bits: int, master: Tensor) -> None:
    """Write to `master` what `split_master` was given: the same bits, and 0x7FC00000 for every NaN.

    Nothing is checked but the number of ties: where `param` has changed since, `master` is not near it.
    Uses up to `torch.get_num_threads()` threads and releases the GIL.

    Args:
        param: bfloat16, `master.numel()` elements. Like all four: on the CPU, contiguous,
            one-dimensional, any alignment, and without a byte in common with the others.
        low: int16 or uint16, `master.numel()` elements.
        ties: uint8, `ties_bytes_max(tie_bits)` elements or more.
        tie_bits: the result of `split_master`.
        master: float32; written.

    Raises:
        ValueError: a tensor or `tie_bits` is not as described.
        SwapError: `low` does not have `tie_bits` ties, so that these are not the parts of one master.
            `master` is then undefined.
    """
    numel = master.numel()
    _require("master", master, (torch.float32,), numel)
    _require("param", param, (torch.bfloat16,), numel)
    _require("low", low, _LOW_DTYPES, numel)
    if not 0 <= tie_bits <= numel:
        raise ValueError(f"tie_bits is {tie_bits}; {numel} masters have 0 to {numel}")
    _require("ties", ties, (torch.uint8,), ties_bytes_max(tie_bits), or_more=True)
    _require_disjoint(param=param, low=low, ties=ties, master=master)
    try:
        _native.join_master(
            param.data_ptr(),
            low.data_ptr(),
            ties.data_ptr(),
            tie_bits,
            master.data_ptr(),
            numel,
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise damaged_master(error) from error


def damaged_master(reason: object) -> SwapError:
    """Return the error of a master whose parts do not fit each other, as no write leaves them."""
    return SwapError(
        f"a stored master is damaged: {reason}; its record is not as it was written: load a checkpoint, "
        "and set verify: crc32c, by which the file is named"
    )


def _require(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int, *, or_more: bool = False) -> None:
    require_on_host(name, tensor)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} has {tensor.dim()} dimensions; it must have one")
    if tensor.numel() < numel or (tensor.numel() > numel and not or_more):
        raise ValueError(f"{name} has {tensor.numel()} elements; it must have {numel}{' or more' if or_more else ''}")


def _require_disjoint(**tensors: Tensor) -> None:
    """Raise ValueError if two of the tensors, all contiguous, have a byte in common."""
    ranges = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in tensors.items() if tensor.nbytes)
    for (begin, length, name), (other_begin, _, other_name) in pairwise(ranges):
        if other_begin < begin + length:
            first, second = (known for known in tensors if known in (name, other_name))
            raise ValueError(f"{first} and {second} overlap in memory")
