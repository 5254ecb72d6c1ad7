"""A pool in pieces: a lease of as many bytes as are free is had, wherever others lie, and in memory of its own."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from interrupts import interrupted_at
from sampling import ALL, EVERY

import swapper
from swapper.errors import SwapIOError
from swapper.io import gathered_pages
from swapper.io.devices import copies_of
from swapper.io.gathered_pages import GatheredPages
from swapper.io.handle import AsyncIOHandle, Slab
from swapper.storage.buffers import BufferPool, Lease, PoolExhausted

PAGE = 4096
MIB = 1 << 20
BYTES = torch.randint(256, (33 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def in_status(name: str) -> int:
    """A count of the process in KiB: `VmLck`, what is locked; `VmRSS`, what is in memory; `VmSize`, its addresses."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def fill(lease: Lease, seed: int) -> None:
    lease.tensor.copy_(contents(lease.length_bytes, seed))


def contents(length_bytes: int, seed: int) -> torch.Tensor:
    return BYTES[seed % PAGE :][:length_bytes]


def in_pieces(pool: BufferPool, length_bytes: int = PAGE) -> list[Lease]:
    """Lease all of `pool` in leases of `length_bytes`, and release every other. Returns the others."""
    leases = [pool.acquire(length_bytes) for _ in range(pool.capacity_bytes // length_bytes)]
    for lease in leases[::2]:
        lease.release()
    return leases[1::2]


# --- The generator ----------------------------------------------------------------------------------------------------


class Program:
    """Leases that come and go in a drawn order, each with bytes that are compared, some in files in between.

    Attributes:
        refused: leases that the pool had no room for, though their bytes were free.
        gathered: leases of several pieces.
    """

    def __init__(self, number: int, handle: AsyncIOHandle, path: Path) -> None:
        self.chance = random.Random(number)
        self.refused = self.gathered = 0
        self._held: list[tuple[Lease, int]] = []
        self._numbers = itertools.count()
        self._others: list[BufferPool] = []
        self._path = path / "file"
        self._handle = handle
        self._size = self.chance.choice([64, 600]) * PAGE

    def run(self) -> None:
        with (
            self._handle.open(self._path, "rw", truncate=True) as self._file,
            BufferPool(self._size, self._handle, ready_bytes=self.chance.choice([0, None])) as pool,
        ):
            for _ in range(40):
                actions = [self.lease, self.lease, self.release, self.release, self.trim, self.register_another]
                self.chance.choice(actions)(pool)
                assert pool.used_bytes == sum(-(-lease.length_bytes // PAGE) * PAGE for lease, _ in self._held)
            while self._held:
                self.release(pool)
            for other in self._others:
                other.close()
            assert pool.used_bytes == 0
            pool.trim()
            with pool.acquire(self._size) as whole:  # All pages are where they were.
                assert whole.address == pool._slab.address
                self.through_a_file(whole, 0)

    def register_another(self, pool: BufferPool) -> None:
        """Other memory of the same engine comes or goes, and the engine registers all that it has anew."""
        if self._others and self.chance.random() < 0.5:
            self._others.pop().close()
        else:
            self._others.append(BufferPool(4 * PAGE, self._handle))

    def lease(self, pool: BufferPool) -> None:
        free_bytes = pool.capacity_bytes - pool.used_bytes
        most = self.chance.choice([self._size // 16, self._size // 4, free_bytes])
        length_bytes = max(most - self.chance.choice([0, 1, PAGE, self.chance.randrange(max(most, 1))]), 1)
        lease = pool.try_acquire(length_bytes, high=self.chance.random() < 0.5)
        if lease is None:
            self.refused += -(-length_bytes // PAGE) * PAGE <= free_bytes
            return
        self.gathered += lease._extent.pages is not None
        number = next(self._numbers)
        fill(lease, number)
        self._held.append((lease, number))

    def release(self, pool: BufferPool) -> None:
        if not self._held:
            return
        lease, number = self._held.pop(self.chance.randrange(len(self._held)))
        assert torch.equal(lease.tensor, contents(lease.length_bytes, number))
        start = self.chance.randrange(lease.length_bytes)
        assert torch.equal(
            lease.own_view(start, lease.length_bytes - start, torch.uint8), contents(lease.length_bytes, number)[start:]
        )
        assert lease.pool_has(lease.tensor) and not lease.pool_has(torch.zeros(1))
        if self.chance.random() < 0.3:
            self.through_a_file(lease, number)
        if self.chance.random() < 0.3:
            # Released while it is written: the memory must go to nobody before. What is written is compared.
            whole = lease.length_bytes // PAGE * PAGE
            lease.transfer = transfer = self._handle.write(self._file, lease.tensor[:whole]) if whole else None
            lease.release()
            if transfer is not None:
                self.lease(pool)
                transfer.wait()
                with self._path.open("rb") as file:
                    assert file.read(whole) == contents(lease.length_bytes, number)[:whole].numpy().tobytes()
        lease.release()

    def through_a_file(self, lease: Lease, number: int) -> None:
        """Write and read all whole pages: the engine has the memory registered, or not."""
        fill(lease, number)
        whole = lease.length_bytes // PAGE * PAGE
        if whole:
            self._handle.write(self._file, lease.tensor[:whole]).wait()
            lease.tensor.zero_()
            self._handle.read(self._file, lease.tensor[:whole]).wait()
            assert torch.equal(lease.tensor[:whole], contents(lease.length_bytes, number)[:whole])

    def trim(self, pool: BufferPool) -> None:
        pool.trim()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_a_lease_is_had_if_its_bytes_are_free(backend: str, tmp_path: Path) -> None:
    gathered, count = 0, 800 if EVERY else 200 if ALL else 60
    with AsyncIOHandle(backend=backend) as handle:
        locked_kib = in_status("VmLck")
        for number in range(count):
            program = Program(number, handle, tmp_path)
            program.run()
            assert program.refused == 0, number
            gathered += program.gathered
        gc.collect()
        assert in_status("VmLck") == locked_kib
    assert gathered > count // 4


@pytest.mark.long
def test_the_same_programs_are_refused_leases_where_pieces_cannot_be_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BufferPool, "_cannot_gather", "for this test")
    refused = 0
    with AsyncIOHandle(backend="threads") as handle:
        for number in range(60):
            program = Program(number, handle, tmp_path)
            program.run()
            assert program.gathered == 0
            refused += program.refused
    assert refused > 15
    with BufferPool(MIB) as pool:
        held = in_pieces(pool)
        with pytest.raises(PoolExhausted, match=f"{MIB // 2} free, in pieces: for this test; set pool_bytes"):
            pool.acquire(2 * PAGE)
        held.clear()


# --- One lease of several pieces --------------------------------------------------------------------------------------


def test_no_memory_is_taken() -> None:
    with BufferPool(64 * MIB) as pool:
        held = in_pieces(pool, 4 * MIB)
        before_kib = in_status("VmRSS")
        with pool.acquire(32 * MIB) as lease:
            fill(lease, 1)
            assert in_status("VmRSS") < before_kib + (40 << 10), "what `fill` makes, and not 32 MiB for the lease"
            assert torch.equal(lease.tensor, contents(32 * MIB, 1))
        assert pool.used_bytes == 32 * MIB == sum(lease.length_bytes for lease in held)
        del lease
        addresses_kib, mappings = in_status("VmSize"), len(Path("/proc/self/maps").read_text().splitlines())
        for _ in range(100):
            pool.acquire(32 * MIB).release()
        assert in_status("VmRSS") < before_kib + (8 << 10)
        assert in_status("VmSize") < addresses_kib + (256 << 10)
        assert len(Path("/proc/self/maps").read_text().splitlines()) < mappings + 50


def test_what_views_the_memory_keeps_the_addresses() -> None:
    pool = BufferPool(MIB)
    held = in_pieces(pool)
    lease = pool.acquire(MIB // 2)
    fill(lease, 3)
    view = lease.own_view(PAGE, MIB // 2 - PAGE, torch.uint8)
    pool.close()
    del held, pool, lease
    gc.collect()
    assert torch.equal(view, contents(MIB // 2, 3)[PAGE:])


def test_a_lease_of_inference_mode_is_written_to_after_it() -> None:
    with torch.inference_mode():
        pool = BufferPool(MIB)
        whole = pool.acquire(MIB)
        whole.view(0, 1, torch.float32).zero_()
    whole.view(0, 1, torch.float32).zero_()
    fill(whole, 4)
    whole.release()
    held = in_pieces(pool)
    with torch.inference_mode():
        lease = pool.acquire(MIB // 2)
    fill(lease, 3)
    assert len(held) == 128


def test_nothing_is_registered_while_pages_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncIOHandle() as handle, BufferPool(8 * MIB, handle, ready_bytes=0) as pool:
        held = in_pieces(pool, MIB)
        ready_bytes = pool.ready_bytes
        lease = pool.acquire(3 * MIB)
        registered: list[object] = []
        monkeypatch.setattr(handle, "register", registered.append)
        held.pop().release()
        pool.make_ready(8 * MIB)
        pool.trim()
        assert pool.ready_bytes == 8 * MIB >= ready_bytes and not registered
        lease.release()
        pool.trim()
        assert pool.ready_bytes < 8 * MIB and registered
        monkeypatch.undo()


def test_a_thread_has_a_lease_of_several_pieces_while_others_come_and_go() -> None:
    with BufferPool(4 * MIB) as pool:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            chance = random.Random(number)
            try:
                for _ in range(150):
                    lease = pool.try_acquire(chance.randrange(1, MIB))
                    if lease is not None:
                        seed = chance.randrange(1 << 30)
                        fill(lease, seed)
                        assert torch.equal(lease.tensor, contents(lease.length_bytes, seed))
                        lease.release()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and pool.used_bytes == 0


def test_ctrl_c_anywhere_leaves_all_pages_where_they_were() -> None:
    with BufferPool(MIB) as pool:
        held = in_pieces(pool, 16 * PAGE)

        def use() -> None:
            with pool.acquire(40 * PAGE) as lease:
                fill(lease, 5)
                assert torch.equal(lease.tensor, contents(40 * PAGE, 5))
            assert pool.used_bytes == MIB // 2

        for n in itertools.count():
            interrupted = interrupted_at(n, use, "storage/buffers.py", "storage/free_pieces.py")
            gc.collect()
            assert pool.used_bytes == MIB // 2 and not pool._gathered, n
            if not interrupted:
                break
        assert n > 50
        held.clear()
        with pool.acquire(MIB) as whole:
            assert whole.address == pool._slab.address
            fill(whole, 6)


# --- The system refuses -----------------------------------------------------------------------------------------------


class Refusing:
    """The C library, of which the `number`-th move fails."""

    def __init__(self, number: int, error: int) -> None:
        self.left = number
        self.error = error
        self._libc = gathered_pages._libc

    def __getattr__(self, name: str) -> object:
        return getattr(self._libc, name)

    def mremap(self, *arguments: int) -> object:
        self.left -= 1
        if self.left == -1:
            ctypes.set_errno(self.error)
            return ctypes.c_void_p(-1).value
        return self._libc.mremap(*arguments)


@pytest.mark.parametrize("number", range(4))
def test_a_pool_that_the_system_refuses_is_as_it_was(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with BufferPool(MIB) as pool:
        held = in_pieces(pool, 16 * PAGE)
        for seed, lease in enumerate(held):
            fill(lease, seed)
        locked_kib = in_status("VmLck")
        monkeypatch.setattr(gathered_pages, "_libc", Refusing(number, errno.EINVAL))
        with pytest.raises(PoolExhausted, match=r"in pieces: .*Invalid argument"):
            pool.acquire(64 * PAGE)
        monkeypatch.undo()
        assert pool.used_bytes == MIB // 2 and in_status("VmLck") == locked_kib and not pool._gathered
        assert all(torch.equal(lease.tensor, contents(16 * PAGE, seed)) for seed, lease in enumerate(held))
        assert pool.try_acquire(64 * PAGE) is None, "it is not tried again"
        del lease
        held.clear()
        with pool.acquire(MIB) as whole:
            fill(whole, 7)


def test_pages_that_cannot_be_put_back_are_an_error_until_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with BufferPool(MIB) as pool:
        held = in_pieces(pool, 16 * PAGE)
        lease = pool.acquire(64 * PAGE)
        monkeypatch.setattr(gathered_pages, "_libc", Refusing(2, errno.ENOMEM))
        lease.release()
        with pytest.raises(SwapIOError, match="mremap"):
            pool.acquire(PAGE)
        monkeypatch.undo()
        assert pool.used_bytes == MIB // 2
        held.clear()
        with pool.acquire(MIB) as whole:
            fill(whole, 8)


def test_a_piece_of_several_mappings_is_moved_in_as_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves split a mapping, and the kernel need not merge it again. A mapping without huge pages is another one."""
    slab = Slab(MIB)
    memory = torch.frombuffer(slab, dtype=torch.uint8)
    for start in range(5 * PAGE, MIB, 37 * PAGE):
        assert gathered_pages._libc.madvise(ctypes.c_void_p(slab.address + start), ctypes.c_size_t(7 * PAGE), 15) == 0
    memory.copy_(contents(MIB, 9))
    parts = [(512 * PAGE // 4, 100 * PAGE), (3 * PAGE, 90 * PAGE)]
    pages = GatheredPages([(slab.address + start, length) for start, length in parts], locked=slab.locked)
    there = torch.frombuffer(pages.memory, dtype=torch.uint8)
    assert torch.equal(there, torch.cat([contents(MIB, 9)[start : start + length] for start, length in parts]))
    there.fill_(1)
    pages.put_back()
    pages.put_back()
    expected = contents(MIB, 9)
    for start, length in parts:
        expected[start : start + length] = 1
    assert torch.equal(memory, expected)


# --- Devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_a_device_copies_from_and_to_gathered_pages_and_to_where_they_were(late: bool, device: str) -> None:
    """Its driver knows pages by the addresses at which they were locked. `late`: it is to lock them meanwhile."""
    place = torch.device(device)
    with BufferPool(16 * MIB, device=None if late else place) as pool:
        held = in_pieces(pool, MIB)
        lease = pool.acquire(5 * MIB)
        pool.lock_for(place)
        assert pool._memory.is_pinned() != late
        for _ in range(3):
            fill(lease, 1)
            there = lease.tensor.to(place, non_blocking=True)
            copies_of(place).wait_all()
            lease.tensor.zero_()
            lease.tensor.copy_(there, non_blocking=True)
            copies_of(place).wait_all()
            assert torch.equal(lease.tensor, contents(5 * MIB, 1))
        lease.release()
        held.clear()
        with pool.acquire(16 * MIB) as whole:
            assert pool._memory.is_pinned() and whole.address == pool._slab.address
            for seed in range(3):
                fill(whole, seed)
                there = whole.tensor.to(place, non_blocking=True)
                copies_of(place).wait_all()
                assert torch.equal(there.cpu(), contents(16 * MIB, seed))
                whole.tensor.zero_()
                whole.tensor.copy_(there, non_blocking=True)
                copies_of(place).wait_all()
                assert torch.equal(whole.tensor, contents(16 * MIB, seed))


# --- Parameters -------------------------------------------------------------------------------------------------------


def drawn_models(number: int) -> Iterator[tuple[random.Random, torch.nn.ModuleList]]:
    chance = random.Random(number)
    torch.manual_seed(number)
    yield (
        chance,
        torch.nn.ModuleList(
            torch.nn.Linear(64, chance.choice([64, 90, 200, 500, 700]), bias=False) for _ in range(chance.randint(4, 9))
        ),
    )


@pytest.mark.parametrize("number", range(200 if ALL else 12))
def test_parameters_that_fit_together_are_had_together_in_any_order(number: int, nvme_path: Path) -> None:
    """Uses begin and end in a drawn order, so that what is in use lies anywhere."""
    for chance, model in drawn_models(number):
        expected = [module.weight.detach().clone() for module in model]
        lengths = [-(-value.nbytes // PAGE) * PAGE + PAGE for value in expected]
        budget_bytes = chance.randint(2, 4) * max(lengths)
        config = swapper.OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes=budget_bytes,
            bucket_bytes=4 * PAGE,
            offload_param={"device": "nvme"},
        )
        swapper.offload(model, config=config)
        uses: dict[int, ExitStack] = {}
        for _ in range(60):
            n = chance.randrange(len(expected))
            if n in uses and chance.random() < 0.7:
                with uses.pop(n):
                    assert torch.equal(model[n].weight, expected[n])
            elif n not in uses and sum(lengths[m] for m in (n, *uses)) <= budget_bytes:
                uses[n] = ExitStack()
                uses[n].enter_context(swapper.gathered([model[n].weight]))
            for m in uses:
                assert torch.equal(model[m].weight, expected[m])
        for stack in uses.values():
            stack.close()
        model.swapper.close()
