"""Split masters, against a reference in integer arithmetic."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swapper.errors import SwapError
from swapper.io import _native
from swapper.optimizer import master_codec

THREADS = [1, 2, 3, 7]
NUMEL_FOR_SEVEN_THREADS = 7 * 2**18 + 12345


def as_float(bits: Tensor) -> Tensor:
    """Bits as int64 in [0, 2**32) -> float32."""
    return (bits - (bits >= 2**31).long() * 2**32).to(torch.int32).view(torch.float32)


def as_bits(tensor: Tensor) -> Tensor:
    """The bits of 16- or 32-bit elements, as int64 and not negative."""
    if tensor.element_size() == 2:
        return tensor.view(torch.int16).long() & 0xFFFF
    return tensor.view(torch.int32).long() & 0xFFFFFFFF


def is_nan(bits: Tensor) -> Tensor:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def random_bits(numel: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**32, (numel,), generator=torch.Generator().manual_seed(seed))


def random_bits_with_ties(numel: int, seed: int = 0) -> Tensor:
    """One in eight is a tie, as in masters made from fp16 weights."""
    return random_bits(numel, seed) & ~0x1FFF


def pack(bits: list[int]) -> bytes:
    return bytes(sum(bit << i for i, bit in enumerate(bits[k : k + 8])) for k in range(0, len(bits), 8))


def reference_split(bits: Tensor) -> tuple[Tensor, Tensor, bytes, int]:
    """The format as the module's docstring words it: param, low, ties and how many bits they are."""
    high, low = bits >> 16, bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    param = torch.where(is_nan(bits), 0x7FC0, high + up.long())
    low = torch.where(is_nan(bits), 0, low)
    ties = up[low == 0x8000].long().tolist()
    return param, low, pack(ties), len(ties)


def split(bits: Tensor, low_dtype: torch.dtype = torch.int16) -> tuple[Tensor, Tensor, Tensor, int]:
    numel = bits.numel()
    param = torch.full((numel,), float("nan"), dtype=torch.bfloat16)
    low = torch.full((numel,), 0x5A5A, dtype=torch.int16).view(low_dtype)
    ties = torch.full((master_codec.ties_bytes_max(numel),), 0xAA, dtype=torch.uint8)
    tie_bits = master_codec.split_master(as_float(bits), param, low, ties)
    return param, low, ties, tie_bits


def assert_split_and_joined(bits: Tensor) -> None:
    param, low, ties, tie_bits = split(bits)
    expected_param, expected_low, expected_ties, expected_tie_bits = reference_split(bits)
    assert torch.equal(as_bits(param), expected_param)
    assert torch.equal(as_bits(low), expected_low)
    assert tie_bits == expected_tie_bits
    written = master_codec.ties_bytes_max(tie_bits)
    assert bytes(ties[:written].tolist()) == expected_ties
    assert bool((ties[written:] == 0xAA).all()), "bytes past the last tie bit are left alone"

    master = torch.full((bits.numel(),), 7.0)
    master_codec.join_master(param, low, ties[:written].clone(), tie_bits, master)
    assert torch.equal(as_bits(master), torch.where(is_nan(bits), 0x7FC00000, bits))


@pytest.fixture(params=THREADS, ids=lambda threads: f"threads{threads}")
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# Both signs of: zero and the smallest denormals, the largest denormals and smallest normals, one and its neighbours
# (odd and even), carries into the exponent, the largest floats and what overflows, infinity, NaNs.
MAGNITUDES = [0, 1, 2, 0x7E, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x3FFF, 0x4000, 0x7F7E, 0x7F7F]
MAGNITUDES += [0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFF]
HIGH_HALVES = [sign | magnitude for sign in (0, 0x8000) for magnitude in MAGNITUDES]


@pytest.mark.parametrize("high", HIGH_HALVES, ids=hex)
def test_every_low_half_comes_back(high: int) -> None:
    assert_split_and_joined((high << 16) + torch.arange(0x10000))


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ids=hex)
def test_every_high_half_comes_back(low: int) -> None:
    assert_split_and_joined((torch.arange(0x10000) << 16) + low)


@pytest.mark.parametrize("make", [random_bits, random_bits_with_ties])
def test_param_equals_what_torch_rounds_to(make: object) -> None:
    bits = make(1_000_000)  # type: ignore[operator]
    bits = bits[~is_nan(bits)]
    param, *_ = split(bits)
    assert torch.equal(as_bits(param), as_bits(as_float(bits).to(torch.bfloat16)))


def test_special_values() -> None:
    inf = float("inf")
    largest = torch.finfo(torch.float32).max
    master = torch.tensor([0.0, -0.0, 1e-45, -1e-45, inf, -inf, largest, -largest, float("nan")])
    param, low, ties = torch.empty(9, dtype=torch.bfloat16), torch.empty(9, dtype=torch.int16), torch.empty(2).byte()
    assert master_codec.split_master(master, param, low, ties) == 0
    assert as_bits(param).tolist() == [0, 0x8000, 0, 0x8000, 0x7F80, 0xFF80, 0x7F80, 0xFF80, 0x7FC0]
    assert as_bits(low).tolist() == [0, 0, 1, 1, 0, 0, 0xFFFF, 0xFFFF, 0]
    joined = torch.empty(9)
    master_codec.join_master(param, low, ties, 0, joined)
    assert torch.equal(as_bits(joined), as_bits(master))


def test_tie_bits_are_packed_from_the_lowest() -> None:
    # High halves odd, even, odd, then an infinity, whose low half is no tie; then eight more, all odd.
    bits = torch.tensor([0x3F818000, 0x3F808000, 0xBF838000, 0x7F800000, 0x7F808000] + [0x00018000] * 8)
    _, low, ties, tie_bits = split(bits)
    assert as_bits(low)[4] == 0, "a NaN whose low half looks like a tie is none"
    assert tie_bits == 11
    assert ties[:2].tolist() == [0b11111101, 0b111]


TIES = st.integers(0, 0xFFFF).map(lambda high: high << 16 | 0x8000)


@given(st.lists(st.integers(0, 2**32 - 1) | TIES, max_size=300))
def test_any_bits_come_back(values: list[int]) -> None:
    assert_split_and_joined(torch.tensor(values, dtype=torch.int64))


def test_every_length_comes_back() -> None:
    for numel in range(201):
        assert_split_and_joined(random_bits(numel, seed=numel))
        assert_split_and_joined(random_bits_with_ties(numel, seed=numel))
        assert_split_and_joined(torch.full((numel,), 0x3F818000))


@pytest.mark.parametrize("numel", [2**15 - 1, 2**15, 2**15 + 1, 2**16 + 37])
def test_ties_continue_across_pieces(numel: int) -> None:
    assert_split_and_joined(random_bits_with_ties(numel))
    assert_split_and_joined(random_bits(numel) & ~0xFFFF | 0x8000)


def test_result_does_not_depend_on_threads(threads: int) -> None:
    bits = random_bits_with_ties(NUMEL_FOR_SEVEN_THREADS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_split_and_joined(bits)
    finally:
        torch.set_num_threads(before)


def test_low_may_be_unsigned() -> None:
    bits = random_bits_with_ties(1000)
    param, low, ties, tie_bits = split(bits, torch.uint16)
    master = torch.empty(1000)
    master_codec.join_master(param, low, ties, tie_bits, master)
    assert torch.equal(as_bits(master), torch.where(is_nan(bits), 0x7FC00000, bits))


@pytest.mark.parametrize("offset_bytes", [1, 2, 4, 6])
def test_addresses_need_no_alignment(offset_bytes: int) -> None:
    numel = 1000
    bits = random_bits_with_ties(numel)
    expected_param, expected_low, expected_ties, expected_tie_bits = reference_split(bits)

    def buffer(length: int, content: bytes = b"") -> tuple[ctypes.Array[ctypes.c_char], int]:
        array = ctypes.create_string_buffer(length + 128)
        address = (ctypes.addressof(array) + 63) // 64 * 64 + offset_bytes
        ctypes.memmove(address, content, len(content))
        return array, address

    arrays, (master, param, low, ties, joined) = zip(
        buffer(4 * numel, as_float(bits).numpy().tobytes()),
        *(buffer(length) for length in (2 * numel, 2 * numel, numel, 4 * numel)),
        strict=True,
    )
    assert _native.split_master(master, param, low, ties, numel, 1) == expected_tie_bits
    assert ctypes.string_at(param, 2 * numel) == expected_param.to(torch.int16).numpy().tobytes()
    assert ctypes.string_at(low, 2 * numel) == expected_low.to(torch.int16).numpy().tobytes()
    assert ctypes.string_at(ties, len(expected_ties)) == expected_ties
    _native.join_master(param, low, ties, expected_tie_bits, joined, numel, 1)
    canonical = as_float(torch.where(is_nan(bits), 0x7FC00000, bits))
    assert ctypes.string_at(joined, 4 * numel) == canonical.numpy().tobytes()
    assert all(array[len(array) - 1] == b"\0" for array in arrays)


@pytest.mark.parametrize("numel", [100, NUMEL_FOR_SEVEN_THREADS])
@pytest.mark.parametrize("error", [-1, 1])
def test_wrong_number_of_ties_is_refused(numel: int, error: int) -> None:
    param, low, ties, tie_bits = split(random_bits_with_ties(numel))
    with pytest.raises(SwapError, match=rf"have {tie_bits} ties, not {tie_bits + error};.*verify: crc32c"):
        master_codec.join_master(param, low, ties, tie_bits + error, torch.empty(numel))


def test_ties_are_not_read_past_their_end() -> None:
    # All ties where the record says none: an empty `ties` has no address that could be read.
    numel = 1000
    param, low = torch.ones(numel, dtype=torch.bfloat16), torch.full((numel,), -0x8000, dtype=torch.int16)
    with pytest.raises(SwapError, match="damaged"):
        master_codec.join_master(param, low, torch.empty(0, dtype=torch.uint8), 0, torch.empty(numel))


def parts(numel: int = 64) -> dict[str, Tensor]:
    return {
        "master": torch.zeros(numel),
        "param": torch.zeros(numel, dtype=torch.bfloat16),
        "low": torch.zeros(numel, dtype=torch.int16),
        "ties": torch.zeros(master_codec.ties_bytes_max(numel), dtype=torch.uint8),
    }


@pytest.mark.parametrize("name", ["master", "param", "low", "ties"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.to(torch.float64), "torch.float64; it must be"),
        (lambda t: t.repeat_interleave(2)[::2], "not contiguous"),
        (lambda t: t.reshape(2, -1), "2 dimensions"),
        (lambda t: t.to("meta"), "on meta"),
        (lambda t: t[:-1], "elements; it must have"),
    ],
    ids=["dtype", "strides", "shape", "device", "numel"],
)
def test_wrong_tensor_is_refused_by_name(name: str, change: object, message: str) -> None:
    tensors = parts()
    tensors[name] = change(tensors[name])  # type: ignore[operator]
    # One master too few is seen as one param too many.
    named = "param" if name == "master" and message.startswith("elements") else name
    with pytest.raises(ValueError, match=rf"^{named} .*{message}"):
        master_codec.split_master(**tensors)
    with pytest.raises(ValueError, match=rf"^{named} .*{message}"):
        master_codec.join_master(tie_bits=len(tensors["master"].flatten()), **tensors)


@pytest.mark.parametrize("tie_bits", [-1, 65])
def test_impossible_tie_bits_are_refused(tie_bits: int) -> None:
    with pytest.raises(ValueError, match="tie_bits"):
        master_codec.join_master(tie_bits=tie_bits, **parts())


def test_overlap_is_refused() -> None:
    tensors = parts()
    tensors["low"] = tensors["master"].view(torch.int16)[64:]
    with pytest.raises(ValueError, match="low and master overlap"):
        master_codec.join_master(tie_bits=0, **tensors)
    with pytest.raises(ValueError, match="master and low overlap"):
        master_codec.split_master(**tensors)


def test_ties_bytes_max_rounds_up() -> None:
    assert [master_codec.ties_bytes_max(numel) for numel in (0, 1, 8, 9, 16, 17)] == [0, 1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="negative"):
        master_codec.ties_bytes_max(-1)
