"""Packed bf16 values come back to the bit, in fewer bytes; what is damaged is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swapper.io.bf16_packing import pack_bf16, packed_bytes_most, unpack_bf16

CHUNK = 4096


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def packed(values: torch.Tensor) -> torch.Tensor:
    room = torch.empty(packed_bytes_most(values.numel()), dtype=torch.uint8)
    return room[: pack_bf16(values, room)].clone()


def assert_comes_back(values: torch.Tensor) -> torch.Tensor:
    found = packed(values)
    back = torch.empty_like(values)
    unpack_bf16(found, back)
    assert torch.equal(back.view(torch.int16), values.view(torch.int16))
    return found


def normal(*shape: int) -> torch.Tensor:
    return torch.empty(shape).normal_(0, 0.02, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def test_each_length_comes_back() -> None:
    for numel in (*range(601), CHUNK - 1, CHUNK, CHUNK + 1, 33 * CHUNK + 77):
        assert_comes_back(normal(numel))


def test_every_value_comes_back() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    assert_comes_back(bits.view(torch.bfloat16))
    mixed = normal(1 << 18)
    mixed[::4] = bits.view(torch.bfloat16)  # NaNs with their bits, infinities, denormals, both zeros.
    assert_comes_back(mixed)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_write_the_same(threads: int) -> None:
    values = normal(300, 1000)
    torch.set_num_threads(1)
    found = packed(values)
    torch.set_num_threads(threads)
    assert torch.equal(assert_comes_back(values), found)


def test_weights_take_less_than_eleven_bits() -> None:
    for weights in (normal(1000, 1000), torch.nn.Linear(1000, 1000).weight.detach().bfloat16()):
        assert packed(weights).numel() * 8 < 11 * weights.numel()


def test_what_does_not_shrink_grows_by_its_table() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 15), 1 << 15, (1 << 18,), generator=generator).to(torch.int16)
    assert assert_comes_back(bits.view(torch.bfloat16)).numel() <= 2 * bits.numel() * 1.002 + 128


def test_values_may_be_written_over_what_they_are_unpacked_from() -> None:
    values = normal(50 * CHUNK + 9)
    found = packed(values)
    memory = torch.empty(values.nbytes + 64, dtype=torch.uint8)
    memory[-found.numel() :] = found
    into = memory[: values.nbytes].view(torch.bfloat16)
    unpack_bf16(memory[-found.numel() :], into)
    assert torch.equal(into.view(torch.int16), values.view(torch.int16))
    memory[: found.numel()] = found
    with pytest.raises(ValueError, match="written over"):
        unpack_bf16(memory[: found.numel()], into)
    assert torch.equal(memory[: found.numel()], found)


@pytest.mark.parametrize("at", [0, 8, 16, 24, 28, 32 + 10, 32 + 12, 32 + 14, 32 + 15], ids=str)
def test_what_is_damaged_is_refused_and_nothing_written(at: int) -> None:
    values = normal(3 * CHUNK)
    found = packed(values)
    found[at] ^= 1
    back = torch.full_like(values, 3.0)
    with pytest.raises(ValueError, match="not what packing has made"):
        unpack_bf16(found, back)
    assert (back == 3).all()


def test_what_is_cut_off_is_refused() -> None:
    values = normal(3 * CHUNK)
    found = packed(values)
    for length in (0, 31, 32, 80, found.numel() - 64):
        with pytest.raises(ValueError, match="not what packing has made"):
            unpack_bf16(found[:length], torch.empty_like(values))
    with pytest.raises(ValueError, match="not what packing has made"):
        unpack_bf16(found, torch.empty(3 * CHUNK - 1, dtype=torch.bfloat16))
