"""Encoded state as it is described, written out in NumPy: what `swapper.optimizer` has of it in C++."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch.optim import Optimizer

from swapper.io.bf16_codec import RoundingKey

__all__ = ["LARGE_NUMEL", "Reference", "philox", "random_bits", "rounded"]

KEPT = {"step", "sum", "max_exp_avg_sq", "step_size", "prev", "ax", "row_var", "col_var"}
LARGE_NUMEL = 4096
"""Of a parameter whose fp32 state is 16 KiB."""

BLOCK = 256


def philox(call: np.ndarray, key: RoundingKey) -> list[np.ndarray]:
    """Philox4x32-10, after Salmon et al. 2011."""
    low = np.uint64(0xFFFFFFFF)
    c = [call & low, call >> np.uint64(32), np.full_like(call, key.step), np.full_like(call, key.parameter)]
    k0, k1 = key.seed, zlib.crc32(key.name.encode())
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            b & low,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            a & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def random_bits(first: int, numel: int, key: RoundingKey) -> np.ndarray:
    index = np.arange(first, first + numel, dtype=np.uint64)
    group, inside = index // np.uint64(512), index % np.uint64(512)
    words = np.stack(philox(group * np.uint64(64) + inside % np.uint64(64), key))
    half = (inside // np.uint64(64)).astype(np.int64)
    word = words[half // 2, np.arange(numel)]
    return (word >> (np.uint64(16) * (half % 2).astype(np.uint64))) & np.uint64(0xFFFF)


def rounded(values: torch.Tensor, first: int, key: RoundingKey, encoding: str = "bf16") -> torch.Tensor:
    """What finite fp32 values in 1-D are when they have been encoded and decoded."""
    if encoding in ("exact", "packed"):
        return values.clone()
    if encoding == "int8":
        return _rounded_to_int8(values, first, key)
    bits = values.view(torch.int32).numpy().astype(np.int64).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    bits = (bits + random_bits(first, values.numel(), key)) & np.uint64(0xFFFF0000)
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(torch.float32)


def _rounded_to_int8(values: torch.Tensor, first: int, key: RoundingKey) -> torch.Tensor:
    """As [Note: blocks of 256] has it, in float64, whose arithmetic is exact here."""
    numel = values.numel()
    blocks = np.zeros(-(-numel // BLOCK) * BLOCK)
    blocks[:numel] = values.numpy()
    random = np.zeros(blocks.size)
    random[:numel] = random_bits(first, numel, key)
    is_linear = np.signbit(blocks).reshape(-1, BLOCK).any(axis=1, keepdims=True)
    blocks, random = blocks.reshape(-1, BLOCK), random.reshape(-1, BLOCK)
    result = np.where(is_linear, _linear(blocks, random), _windows(np.abs(blocks), random))
    return torch.from_numpy(result.reshape(-1)[:numel].astype(np.float32))


def _linear(blocks: np.ndarray, random: np.ndarray) -> np.ndarray:
    fraction, exponent = np.frexp(np.abs(blocks).max(axis=1, keepdims=True))
    # 125 is 0.9765625 * 2**7.
    unit = np.maximum(exponent - 7 + (fraction > 0.9765625), -126)
    units = np.floor(np.abs(blocks) * 2.0**-unit * 2.0**24) / 2.0**24
    drawn = np.minimum(np.floor(units + (random + 0.5) / 65536), np.where(unit == 122, 63, 125))
    return np.copysign(drawn * 2.0**unit, blocks)


def _windows(blocks: np.ndarray, random: np.ndarray) -> np.ndarray:
    exponent = np.maximum(np.frexp(blocks)[1] - 1, -126)
    largest = float(np.finfo(np.float32).max)

    def level(values: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """The number of the level at or below."""
        return values.astype(np.float32).view(np.int32).astype(np.int64) >> shift

    high = blocks.max(axis=1, keepdims=True)
    low = np.where(blocks > 0, blocks, np.inf).min(axis=1, keepdims=True)
    low = np.where(high > 0, low, 0)
    bits = high.astype(np.float32).view(np.int32).astype(np.int64)

    def top(shift: np.ndarray) -> np.ndarray:
        return np.minimum(-(-bits >> shift), 0x7F7FFFFF >> shift)

    shift = np.full(high.shape, 8)
    for _ in range(12):
        shift += (top(shift) - level(low, shift) > 252) & (shift < 20)
    distance = np.ldexp(1.0, exponent - 23 + shift)
    below = np.floor(blocks / distance) * distance
    # Where a level has fewer bits than the random number, that is cut; where it has more, it is in the middle.
    drawn = np.where(shift < 16, np.floor(np.ldexp(random, shift - 16)) * np.ldexp(1.0, -shift), random / 65536)
    drawn = np.where(shift > 16, (random + 0.5) / 65536, drawn)
    above = below + distance
    result = np.where(((blocks - below) / distance + drawn >= 1) & (above <= largest), above, below)
    smallest = np.maximum(top(shift) - 252, np.maximum(level(low, shift), 1)) << shift
    smallest_value = smallest.astype(np.int32).view(np.float32).astype(np.float64)
    return np.where(blocks > 0, np.maximum(result, smallest_value), 0)


class Reference:
    """An optimizer of plain PyTorch whose state is rounded after each step."""

    def __init__(self, optimizer: Optimizer, encoding: str | Mapping[str, str] = "bf16") -> None:
        self.optimizer, self.encoding, self.steps = optimizer, encoding, 0
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, p in enumerate(parameters):
            state = self.optimizer.state.get(p, {})
            kept = {*KEPT, "grad_avg", "square_avg"} if "grad_avg" in state else KEPT
            for key, value in state.items():
                encoding = self.encoding if isinstance(self.encoding, str) else self.encoding.get(key, "exact")
                is_elementwise = torch.is_tensor(value) and value.shape == p.shape and key not in kept
                if encoding != "exact" and is_elementwise and p.numel() >= LARGE_NUMEL:
                    new = rounded(value.view(-1), 0, RoundingKey(key, self.steps, number), encoding)
                    value.copy_(new.view(value.shape))
