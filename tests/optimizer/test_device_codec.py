"""Masters that are split by torch's operations are those that the host's codec splits, to the bit."""

from __future__ import annotations

import pytest
import torch

from swapper.optimizer.device_codec import join_on_device, split_on_device, sum_of_bits
from swapper.optimizer.master_codec import join_master, split_master, ties_bytes_max

LOW = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF]


def all_masters(seed: int) -> torch.Tensor:
    """Every upper half there is (signed zeros, denormals, infinities, NaNs), with the lower halves that round."""
    high = torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(len(LOW) + 2)
    generator = torch.Generator().manual_seed(seed)
    low = torch.cat([torch.tensor(LOW), torch.randint(1 << 16, (2,), generator=generator)]).repeat(1 << 16)
    bits = (high << 16 | low)[torch.randperm(len(high), generator=generator)]
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def masters_of(kind: str, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "all ties":
        bits = torch.randint(1 << 16, (numel,), generator=generator) << 16 | 0x8000
        return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    values = torch.randn(numel, generator=generator)
    return values.half().float() if kind == "of fp16 weights" else values


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def check(masters: torch.Tensor) -> None:
    numel = len(masters)
    results = []
    for split in (split_master, split_on_device):
        param = torch.empty(numel, dtype=torch.bfloat16)
        low = torch.empty(numel, dtype=torch.int16)
        ties = torch.full((ties_bytes_max(numel),), 0xA5, dtype=torch.uint8)
        count = int(split(masters, param, low, ties))
        results.append((bytes_of(param), bytes_of(low), bytes_of(ties[: ties_bytes_max(count)]), count))
        if split is split_on_device:
            assert not ties[ties_bytes_max(count) :].any()
            joined, again = torch.empty(numel), torch.empty(numel)
            used = ties[: ties_bytes_max(count)]
            join_master(param, low, used, count, joined)
            assert bool(join_on_device(param, low, used, count, again))
            assert bytes_of(joined) == bytes_of(again)
            assert not bool(join_on_device(param, low, ties, count + 1, again)), "a tie too few is not noticed"
            if count:
                assert not bool(join_on_device(param, low, ties, count - 1, again)), "a tie too many is not noticed"
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", range(2))
def test_every_upper_half_is_split_and_joined_as_on_the_host(seed: int) -> None:
    check(all_masters(seed))


@pytest.mark.parametrize("kind", ["any", "all ties", "of fp16 weights"])
@pytest.mark.parametrize("numel", [1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097])
def test_any_length_is_split_and_joined_as_on_the_host(kind: str, numel: int) -> None:
    for seed in range(4):
        check(masters_of(kind, numel, seed))


def test_the_version_of_the_parameter_is_incremented() -> None:
    parameter = torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    slice_of_it = parameter.detach()[8:]
    split_on_device(torch.ones(8), slice_of_it, torch.empty(8, dtype=torch.int16), torch.empty(1, dtype=torch.uint8))
    assert parameter._version == 1 and parameter[8:].eq(1).all() and parameter[:8].eq(0).all()


def test_a_sum_of_bits_tells_each_small_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.optimizer.device_codec._SUMMED_NUMEL", 100)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(357, generator=generator).to(torch.bfloat16)
    former = sum_of_bits(values)
    assert torch.equal(sum_of_bits(values.clone()), former)
    seen = {int(former)}
    for place in range(357):
        for bit in range(16):
            changed = values.clone()
            changed.view(torch.int16)[place] ^= -(1 << 15) if bit == 15 else 1 << bit
            seen.add(int(sum_of_bits(changed)))
    for shift in range(1, 357):
        seen.add(int(sum_of_bits(values.roll(shift))))
    seen.add(int(sum_of_bits(-values)))
    assert len(seen) == 1 + 357 * 16 + 356 + 1
