"""CRC-32C, against a table built here; CRC-32, against zlib."""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swapper.io import _native, checksums

THREADS = [1, 2, 3, 7]


@pytest.fixture(params=THREADS, ids=lambda threads: f"threads{threads}")
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [table_entry(byte) for byte in range(256)]


def reference_crc32c(data: bytes, seed: int = 0) -> int:
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# RFC 3720, appendix B.4 (which prints the bytes in the order in which they are sent), and the usual check value.
KNOWN = {
    "empty": (b"", 0),
    "check": (b"123456789", 0xE3069283),
    "zeros": (bytes(32), 0x8A9136AA),
    "ones": (b"\xff" * 32, 0x62A8AB43),
    "ascending": (bytes(range(32)), 0x46DD794E),
    "descending": (bytes(range(31, -1, -1)), 0x113FDB5C),
}


@pytest.mark.parametrize("name", KNOWN)
def test_checksum_of_known_vectors(name: str) -> None:
    data, expected = KNOWN[name]
    tensor = tensor_of(data)
    assert checksums.checksum(tensor) == expected
    assert _native.crc32c_by_table(tensor.data_ptr(), len(data)) == expected
    assert reference_crc32c(data) == expected


# Around words of 8 bytes, three lanes of 256 and of 4096 bytes, and what is folded, from 512 bytes on by 256.
@pytest.mark.parametrize(
    "length", [*range(40), 511, 512, 513, 767, 768, 769, 1023, 1024, 1025, 1543, 12287, 12288, 12289, 25000]
)
def test_checksum_equals_the_table(length: int) -> None:
    data = random.Random(length).randbytes(length + 3)
    tensor = tensor_of(data)
    for offset in range(4):
        expected = reference_crc32c(data[offset : offset + length], seed=0x1234)
        address = tensor.data_ptr() + offset
        assert _native.crc32c(address, length, 0x1234) == expected
        assert _native.crc32c_by_table(address, length, 0x1234) == expected


@settings(max_examples=200)
@given(st.binary(max_size=2000), st.integers(0, 2000))
def test_seed_continues_a_checksum(data: bytes, cut: int) -> None:
    tensor = tensor_of(data)
    cut = min(cut, len(data))
    first = _native.crc32c(tensor.data_ptr(), cut)
    whole = _native.crc32c(tensor.data_ptr() + cut, len(data) - cut, seed=first)
    assert whole == checksums.checksum(tensor) == reference_crc32c(data)


def test_checksum_does_not_depend_on_threads(threads: int) -> None:
    tensor = tensor_of(random.Random(0).randbytes(9 * 2**20 + 12345))
    for length in (2**21 - 1, 2**21, 7 * 2**20 + 3, len(tensor)):
        expected = _native.crc32c_by_table(tensor.data_ptr(), length, 99)
        assert _native.crc32c(tensor.data_ptr(), length, 99, threads) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_checksum_is_of_the_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.arange(60).reshape(3, 4, 5) % 7).to(dtype)
    data = bytes(tensor.flatten().view(torch.uint8).tolist())
    assert checksums.checksum(tensor) == reference_crc32c(data)
    assert checksums.checksum(tensor[0, 0, 0]) == reference_crc32c(data[: tensor.element_size()])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, 4).t(), "not contiguous"),
        (torch.zeros(1).expand(4), "not contiguous"),
        (torch.zeros(4, 4).to_sparse(), "not contiguous"),
        (torch.zeros(4, device="meta"), "on meta"),
    ],
    ids=["transposed", "expanded", "sparse", "meta"],
)
def test_checksum_refuses(tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checksums.checksum(tensor)


# Around words of 8 bytes, vectors of 16 and of 64, and blocks of 64 KiB.
@pytest.mark.parametrize("length", [*range(20), 63, 64, 65, 79, 80, 127, 128, 1000, 65535, 65536, 65537, 140_003])
def test_crc32_equals_zlib_and_copies_every_byte(length: int) -> None:
    data = random.Random(length).randbytes(length + 3)
    for offset in range(4):
        part = tensor_of(data)[offset : offset + length]
        expected = zlib.crc32(data[offset : offset + length], 0x1234)
        assert checksums.crc32(part, 0x1234) == expected
        assert _native.crc32_by_table(part.data_ptr(), length, 0x1234) == expected
        for to in (0, 1, 16):
            copy = torch.full((to + length + 1,), 7, dtype=torch.uint8)
            assert checksums.copy_crc32(copy[to : to + length], part, 0x1234) == expected
            assert torch.equal(copy[to : to + length], part)
            assert copy[:to].eq(7).all() and copy[-1] == 7
        memory = bytearray(length)
        assert checksums.copy_crc32(memoryview(memory), memoryview(data)[offset : offset + length], 0x1234) == expected
        assert memory == data[offset : offset + length]


def test_copy_with_crc32_refuses_what_would_go_beyond() -> None:
    with pytest.raises(ValueError, match="destination has 3 bytes; source has 4"):
        checksums.copy_crc32(torch.zeros(3, dtype=torch.uint8), torch.zeros(1))
    tensor = torch.zeros(8)
    with pytest.raises(ValueError, match="destination and source overlap"):
        checksums.copy_crc32(tensor[1:5], tensor[:4])
    with pytest.raises(ValueError, match="source is not contiguous"):
        checksums.copy_crc32(torch.zeros(16), torch.zeros(4, 4).t())
    with pytest.raises(BufferError):
        checksums.copy_crc32(memoryview(b"1234"), torch.zeros(1))
    with pytest.raises(BufferError):
        checksums.copy_crc32(torch.zeros(1), memoryview(b"12345678")[::2])
