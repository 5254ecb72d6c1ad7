"""Pages of memory that are brought before it is filled: which, of what kind, and what they leave as it was."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swapper.io import _native, fresh_memory
from swapper.io.fresh_memory import FreshMemory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has learnt of its memory is not what the next test shall begin with."""
    monkeypatch.setattr(fresh_memory, "_pace", fresh_memory._Pace())


@pytest.mark.parametrize("length", [0, 1, 4096, 10_000, 3_000_001, 19 << 20])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_content_stays_and_what_is_beside_too(length: int, threads: int) -> None:
    used = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        memory = bytearray(random.Random(length).randbytes(length + 200))
        before = bytes(memory)
        FreshMemory(memoryview(memory)[100 : 100 + length]).bring(length)
        assert memory == before
        fresh = torch.UntypedStorage(length + 1)
        FreshMemory(memoryview((ctypes.c_char * (length + 1)).from_address(fresh.data_ptr()))).bring(length + 1)
        with pytest.raises(BufferError):
            FreshMemory(memoryview(before))
    finally:
        torch.set_num_threads(used)


class Pages:
    """Stands for the native core: notes what is brought, and how long that takes on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.huge_s, self.small_s = 1.0, 1.0
        self.brought: list[tuple[bool, int, int]] = []

    def address_of(self, memory: memoryview, writable: bool) -> tuple[int, int]:
        return 64 * MIB, len(memory)

    def prefault_huge(self, address: int, length_bytes: int) -> None:
        self.brought.append((True, address, length_bytes))
        self.now_s += self.huge_s * length_bytes / (2 * MIB)

    def prefault(self, address: int, length_bytes: int, threads: int) -> None:
        self.brought.append((False, address, length_bytes))
        self.now_s += self.small_s * length_bytes / (2 * MIB)

    def perf_counter(self) -> float:
        return self.now_s

    def huge_bytes(self) -> int:
        return sum(length for huge, _, length in self.brought if huge)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    made = Pages()
    for module in ("fresh_memory", "host_memory"):
        monkeypatch.setattr(f"swapper.io.{module}._native", made)
    monkeypatch.setattr(fresh_memory, "time", made)
    yield made


def bring_all(length_bytes: int) -> None:
    memory: Any = mmap.mmap(-1, length_bytes)
    FreshMemory(memoryview(memory)).bring(length_bytes)


def test_where_huge_pages_come_faster_all_but_one_try_are_huge(pages: Pages) -> None:
    pages.huge_s = 0.2
    bring_all(256 * MIB)
    assert 256 * MIB - pages.huge_bytes() == 8 * MIB
    assert sum(length for _, _, length in pages.brought) == 256 * MIB
    ends = [address + length for _, address, length in pages.brought]
    assert [address for _, address, _ in pages.brought] == [64 * MIB, *ends[:-1]]


def test_where_a_host_brings_huge_pages_slowly_they_are_tried_ever_less(pages: Pages) -> None:
    pages.huge_s = 8
    for _ in range(16):
        bring_all(256 * MIB)
    assert 10 * MIB <= pages.huge_bytes() <= 32 * MIB  # of 4 GiB
    pages.huge_s = 0.2  # The memory of now was in use a moment ago.
    for _ in range(8):
        bring_all(256 * MIB)
    pages.brought.clear()
    bring_all(256 * MIB)
    assert pages.huge_bytes() == 256 * MIB


def test_huge_pages_that_turn_slow_within_one_tensor_are_left_at_once(pages: Pages) -> None:
    pages.huge_s = 0.2
    bring_all(64 * MIB)
    pages.huge_s = 8
    pages.brought.clear()
    bring_all(16 * MIB)
    assert pages.huge_bytes() == 4 * MIB  # The first, and one more try behind 8 MiB.


def test_a_thread_that_waited_does_not_make_slow_huge_pages_the_better_ones(pages: Pages) -> None:
    pages.huge_s = 8
    bring_all(64 * MIB)
    pages.small_s = 50
    bring_all(8 * MIB)
    pages.small_s = 1
    pages.brought.clear()
    bring_all(8 * MIB)
    assert pages.huge_bytes() == 0


@pytest.mark.parametrize("length", [MIB, 2 * MIB - 1])
def test_memory_that_no_huge_page_fits_into_is_no_try(pages: Pages, length: int) -> None:
    for _ in range(3):
        bring_all(length)
    assert not pages.huge_bytes()


def mappings(address: int, length_bytes: int) -> list[str]:
    """The lines of /proc/self/smaps with the flags of each mapping in a range."""
    flags, inside = [], False
    with open("/proc/self/smaps") as file:
        for line in file:
            if line.startswith("VmFlags"):
                flags += [line] if inside else []
            elif "-" in (begin := line.split()[0]) and not begin.endswith(":"):
                start, stop = (int(part, 16) for part in begin.split("-"))
                inside = start < address + length_bytes and stop > address
    return flags


def test_neighbouring_tensors_stay_one_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_memory, "_pace", fresh_memory._Pace(huge_s=0.1, small_s=1.0))
    monkeypatch.setattr(fresh_memory._Pace, "took", lambda *_: None)  # Huge pages come faster here, whatever they do.
    memory: Any = mmap.mmap(-1, 40 * MIB)
    address, _ = _native.address_of(memoryview(memory), True)
    tensor_bytes = 5 * MIB + 4096
    for start in range(0, 35 * MIB, tensor_bytes):  # As malloc lays them out: its header, then the tensor.
        FreshMemory(memoryview(memory)[start + 64 : start + tensor_bytes]).bring(tensor_bytes - 64)
    flags = mappings(address + 4096, 30 * MIB)
    assert len(flags) == 1
    assert " hg " in flags[0]


def test_nothing_far_beyond_what_is_asked_for_is_brought() -> None:
    memory: Any = mmap.mmap(-1, 64 * MIB)
    fresh = FreshMemory(memoryview(memory))
    fresh.bring(3 * MIB)
    address, length = _native.address_of(memoryview(memory), True)
    present = (ctypes.c_ubyte * (length // 4096))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), present) == 0
    assert all(page & 1 for page in present[: 3 * MIB // 4096])
    assert sum(page & 1 for page in present) * 4096 <= 3 * MIB + 10 * MIB
