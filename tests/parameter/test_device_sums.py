"""What changes values on a device changes their sum. The arithmetic is the same everywhere, so it is the CPU here."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from swapper.parameter import device_sums
from swapper.parameter.device_sums import DeviceSums

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64]
LENGTHS = [1, 2, 3, 5, 64, 1000, 4097, (1 << 20) + 77]
"""Of which some are no whole number of words, and one is two pieces in most dtypes."""


@pytest.fixture(autouse=True)
def _no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sums, "current_streams", lambda devices: [])


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


def one_bit(values: torch.Tensor, chance: random.Random) -> None:
    data = bytes_of(values)
    data[chance.randrange(data.numel())] ^= 1 << chance.randrange(8)


def signs_of_two(values: torch.Tensor, chance: random.Random) -> None:
    data = bytes_of(values).view(-1, values.itemsize)
    for at in chance.sample(range(data.shape[0]), min(2, data.shape[0])):
        data[at, -1] ^= 0x80


def all_signs(values: torch.Tensor, chance: random.Random) -> None:
    bytes_of(values).view(-1, values.itemsize)[:, -1] ^= 0x80


def exchange(values: torch.Tensor, chance: random.Random) -> None:
    data = bytes_of(values).view(-1, values.itemsize)
    i, j = chance.randrange(data.shape[0]), chance.randrange(data.shape[0])
    data[[i, j]] = data[[j, i]]


def turn_around(values: torch.Tensor, chance: random.Random) -> None:
    data = bytes_of(values).view(-1, values.itemsize)
    data.copy_(data.flip(0))


def shift(values: torch.Tensor, chance: random.Random) -> None:
    data = bytes_of(values).view(-1, values.itemsize)
    data.copy_(data.roll(chance.choice([1, 4, 64, 1 << 18, 1 << 20]), 0))


def bits(values: torch.Tensor) -> bytes:
    return bytes_of(values).numpy().tobytes()


@pytest.mark.parametrize("change", [one_bit, signs_of_two, all_signs, exchange, turn_around, shift])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_any_change_is_seen(change: Callable[[torch.Tensor, random.Random], None], dtype: torch.dtype) -> None:
    chance = random.Random(f"{change.__name__} {dtype}")
    seen = 0
    for length in LENGTHS:
        values = torch.zeros(length, dtype=dtype)
        if chance.random() < 0.8:
            bytes_of(values).random_(256, generator=torch.Generator().manual_seed(length))
        sums = DeviceSums(torch.device("cpu"), values.nbytes)
        before, known = bits(values), sums.of([values])
        assert torch.equal(sums.of([values]), known)
        change(values, chance)
        assert (bits(values) == before) == torch.equal(sums.of([values]), known), length
        seen += bits(values) != before
    assert seen >= 2


def test_two_tensors_that_are_exchanged_are_seen() -> None:
    a, b = torch.randn(2, 1000)
    sums = DeviceSums(torch.device("cpu"), a.nbytes)
    assert not torch.equal(sums.of([a, b]), sums.of([b, a]))


def test_a_sum_stays_when_longer_tensors_come() -> None:
    """The weights that are there stay as they are."""
    values = torch.randn(1000)
    sums = DeviceSums(torch.device("cpu"), values.nbytes)
    known = sums.of([values])
    for longest_bytes in (5_000, 123_456, 1 << 24):
        sums.fit(longest_bytes)
        assert torch.equal(sums.of([values]), known)
        sums.of([torch.zeros(longest_bytes // 4)])
