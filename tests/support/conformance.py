"""What every handle must do, on any backend, by any way to open, with any harmless fault below: `Conformance`.

A test class inherits it and says, with the fixtures `subject` and `faults`, what it is about. A kind of handle for
tensors elsewhere than in host memory is one more subclass of `Subject`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from swapper.errors import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan, File, Slab, Transfer, probe

BLOCK = 64 << 10
SIZES = (0, 1, 511, 512, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 13)
AVAILABLE = [found.backend for found in probe() if found.available]
# Without registered memory "uring+fixed" is "uring": where both are to be had, one of them is enough.
CONFORMING = [backend for backend in AVAILABLE if backend != "uring" or "uring+fixed" not in AVAILABLE]
SLAB = Slab(2 << 20)

DTYPES = sorted(
    {dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)},
    key=str,
)


@dataclass(frozen=True)
class Subject:
    """One cell of the matrix: a backend, and whether files are opened with O_DIRECT."""

    backend: str
    direct: bool

    def __str__(self) -> str:
        return f"{self.backend}-{'direct' if self.direct else 'cached'}"

    def handle(self, **options: object) -> AsyncIOHandle:
        """A handle with small blocks and a short queue, unless `options` say otherwise."""
        settings = {"backend": self.backend, "block_bytes": BLOCK, "queue_depth": 4, **options}
        return AsyncIOHandle(**settings)  # type: ignore[arg-type]

    def open(self, handle: AsyncIOHandle, path: Path, mode: str = "rw", **options: bool) -> File:
        return handle.open(path, mode, direct=self.direct, **options)

    def place(self, data: torch.Tensor) -> torch.Tensor:
        """`data`, where transfers of this subject take it from and put it."""
        return data

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a placed tensor holds, in host memory."""
        return tensor


SUBJECTS = [Subject(backend, True) for backend in CONFORMING if backend != "buffered"]
SUBJECTS += [Subject(backend, False) for backend in CONFORMING]


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def in_slab(place: int, length: int, misalignment: int) -> torch.Tensor:
    """Zeros in half `place` of registered memory, whose address is `misalignment` beyond a multiple of 4096."""
    start = place * SLAB.length_bytes // 2 + misalignment
    return torch.frombuffer(SLAB, dtype=torch.uint8)[start : start + length].zero_()


def wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


@contextlib.contextmanager
def raises_io(
    number: int, operation: str, path: object, offset_bytes: int = -1, length_bytes: int = -1
) -> Iterator[None]:
    """A `SwapIOError` that tells exactly this."""
    with pytest.raises(SwapIOError) as raised:
        yield
    error = raised.value
    told = (error.errno, error.operation, error.path, error.offset_bytes, error.length_bytes)
    assert told == (number, operation, os.fsdecode(os.fspath(path)), offset_bytes, length_bytes)  # type: ignore[call-overload]
    assert isinstance(error, OSError) and isinstance(error, SwapError)
    assert error.filename == error.path and os.strerror(number) in str(error)


def fails(transfer: Transfer, number: int) -> None:
    """`transfer` is over, failed, and says so as often as it is asked."""
    for _ in range(2):
        with raises_io(number, transfer.operation, transfer.path, transfer.offset_bytes, transfer.length_bytes):
            transfer.wait()
        assert transfer.done()


class Conformance:
    """The suite. What it expects holds under faults too, as long as they are harmless."""

    @pytest.fixture
    def faults(self) -> FaultPlan | None:
        return None

    @pytest.fixture
    def handle(self, subject: Subject, faults: FaultPlan | None) -> Iterator[AsyncIOHandle]:
        with subject.handle(faults=faults) as handle:
            assert handle.register(SLAB) == (subject.backend == "uring+fixed")
            yield handle
            assert handle.in_flight == 0 and handle.unobserved_failures == 0

    # --- Data arrives

    @pytest.mark.parametrize("size", SIZES)
    def test_written_bytes_are_read_back(
        self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path, size: int
    ) -> None:
        path = tmp_path / "file"
        for offset, misalignment in ((0, 0), (4096, 64), (1, 1), (5000, 0), (5000, 904)):
            data = random_bytes(size, offset)
            for registered in (True, False):
                source = in_slab(0, size, misalignment).copy_(data) if registered else data.clone()
                target = in_slab(1, size, misalignment) if registered else torch.zeros_like(data)
                source, target = subject.place(source), subject.place(target)
                with subject.open(handle, path, truncate=True) as file:
                    assert handle.write(file, source, offset).wait() == size
                    assert file.size_bytes() == (offset + size if size else 0)
                    assert handle.read(file, target, offset).wait() == size
                assert torch.equal(subject.content(target), data)
                assert torch.equal(subject.content(source), data)
                assert path.read_bytes()[offset:] == data.numpy().tobytes()
                assert path.read_bytes()[:offset].count(0) == (offset if size else 0)

    def test_only_the_bytes_asked_for_are_touched(
        self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path
    ) -> None:
        path, size = tmp_path / "file", 5 * BLOCK
        before, inner = random_bytes(size, 1), random_bytes(2 * BLOCK + 77, 2)
        for start in (0, 1, 4095, 4096, BLOCK - 1, BLOCK):
            path.write_bytes(before.numpy().tobytes())
            expected = before.clone()
            expected[start : start + inner.numel()] = inner
            with subject.open(handle, path) as file:
                handle.write(file, subject.place(inner.clone()), start).wait()
                assert path.read_bytes() == expected.numpy().tobytes()
                target = subject.place(torch.full((size,), 0x5C, dtype=torch.uint8))
                handle.read(file, target[start : start + inner.numel()], start).wait()
            content = subject.content(target)
            assert torch.equal(content[start : start + inner.numel()], inner)
            assert int((content == 0x5C).sum()) == size - inner.numel() + int((inner == 0x5C).sum())

    def test_unaligned_neighbours_written_together_do_not_disturb_each_other(
        self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path
    ) -> None:
        rng = random.Random(0)
        for round_number in range(4):
            cuts = sorted({0, *(rng.randrange(6 * BLOCK) for _ in range(12)), 6 * BLOCK})
            data = random_bytes(6 * BLOCK, round_number)
            source, target = subject.place(data.clone()), subject.place(torch.zeros_like(data))
            pieces = list(itertools.pairwise(cuts))
            rng.shuffle(pieces)
            with subject.open(handle, tmp_path / "file") as file:
                wait_all([handle.write(file, source[start:stop], start) for start, stop in pieces])
                wait_all([handle.read(file, target[start:stop], start) for start, stop in pieces])
            assert torch.equal(subject.content(target), data)
            assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()

    def test_any_dtype_and_shape(self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path) -> None:
        moved = set()
        with subject.open(handle, tmp_path / "file") as file:
            for seed, dtype in enumerate(DTYPES):
                data = random_bytes(33 * 64 * 16, seed)
                if dtype is torch.bool:
                    data &= 1
                try:
                    source = data.view(dtype).reshape(33, -1)
                except RuntimeError:  # Quantised ones are no plain view of bytes.
                    assert str(dtype).startswith("torch.q"), dtype
                    continue
                target = subject.place(torch.zeros_like(data)).view(dtype).reshape(33, -1)
                assert handle.write(file, subject.place(source)).wait() == data.numel()
                assert handle.read(file, target).wait() == data.numel()
                assert torch.equal(subject.content(target).flatten().view(torch.uint8), data)
                moved.add(dtype)
            assert {torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128} <= moved
            scalar = subject.place(torch.tensor(2.5, dtype=torch.float64))
            handle.write(file, scalar).wait()
            assert handle.read(file, subject.place(torch.zeros((), dtype=torch.float64))).wait() == 8

    @pytest.mark.parametrize(
        "options",
        [{"threads": 3}, {"single_submit": True}, {"overlap_events": False}, {"queue_depth": 1}, {"block_bytes": 4096}],
        ids=lambda options: "=".join(str(word) for word in next(iter(options.items()))),
    )
    def test_every_option_moves_the_same_bytes(
        self, subject: Subject, faults: FaultPlan | None, tmp_path: Path, options: dict[str, int]
    ) -> None:
        data = random_bytes((1 << 20) + 77)
        source, target = subject.place(data.clone()), subject.place(torch.zeros_like(data))
        with (
            subject.handle(faults=faults, **options) as handle,
            subject.open(handle, tmp_path / "file") as file,
        ):
            handle.write(file, source).wait()
            handle.read(file, target).wait()
        assert torch.equal(subject.content(target), data)

    # --- What cannot be moved

    def test_tensors_that_cannot_be_moved_are_refused(
        self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path
    ) -> None:
        refused: list[tuple[str, torch.Tensor]] = [
            ("contiguous", torch.zeros(4, 4).t()),
            ("contiguous", torch.zeros(16)[::2]),
            ("contiguous", torch.zeros(1).expand(8)),
            ("contiguous", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
            ("contiguous", torch.zeros(3, dtype=torch.complex64).conj()),
            ("contiguous", torch.zeros(3, dtype=torch.complex64).conj().imag),
            ("dense", torch.eye(3).to_sparse()),
            ("dense|CPU", torch.zeros(4, device="meta")),
        ]
        for numel in (1000, 0):
            shrunk = torch.zeros(2000)[1:]
            shrunk.untyped_storage().resize_(numel)
            refused.append(("memory", shrunk))
        with subject.open(handle, tmp_path / "file") as file:
            for (match, tensor), start in itertools.product(refused, (handle.read, handle.write)):
                with pytest.raises(ValueError, match=match):
                    start(file, tensor)
            for offset in (-1, 1 << 63, (1 << 63) - 3):
                with pytest.raises(ValueError, match="offset_bytes"):
                    handle.write(file, subject.place(torch.zeros(4)), offset)
            assert file.size_bytes() == 0 and handle.in_flight == 0

    @pytest.mark.parametrize(("size", "offset"), [(4096, 8192), (8192, 4096), (5000, 4097), (1, 5000), (3 * BLOCK, 0)])
    def test_read_past_the_end_fails(
        self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path, size: int, offset: int
    ) -> None:
        (tmp_path / "file").write_bytes(b"x" * 5000)
        with subject.open(handle, tmp_path / "file", "r") as file:
            fails(handle.read(file, subject.place(torch.zeros(size, dtype=torch.uint8)), offset), errno.ENODATA)
            # What is there can still be read, up to an end that is not aligned.
            target = subject.place(torch.zeros(5000, dtype=torch.uint8))
            assert handle.read(file, target).wait() == 5000
            assert bytes(subject.content(target).tolist()) == b"x" * 5000
            # Nothing is there to be read, but nothing was asked for either.
            assert handle.read(file, target[:0], 1 << 40).wait() == 0

    def test_file_that_was_cut_short_fails(self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path) -> None:
        data = random_bytes(4 * BLOCK)
        source, target = subject.place(data.clone()), subject.place(torch.zeros_like(data))
        with subject.open(handle, tmp_path / "file") as file:
            for length in (4 * BLOCK - 1, 3 * BLOCK, 2 * BLOCK + 4097, 1, 0):
                handle.write(file, source).wait()
                handle.read(file, target).wait()
                os.truncate(tmp_path / "file", length)
                fails(handle.read(file, target), errno.ENODATA)
                assert handle.read(file, target[:length]).wait() == length
                assert torch.equal(subject.content(target)[:length], data[:length])

    def test_missing_file(self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path) -> None:
        with raises_io(errno.ENOENT, "open", tmp_path / "missing"):
            subject.open(handle, tmp_path / "missing", "r")
        with raises_io(errno.ENOENT, "open", tmp_path / "missing" / "file"):
            subject.open(handle, tmp_path / "missing" / "file")
        assert not (tmp_path / "missing").exists()

    @pytest.mark.parametrize("mode", ["r", "w", "rw"])
    def test_what_is_no_file_is_refused(
        self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path, mode: str
    ) -> None:
        os.mkfifo(tmp_path / "pipe")
        with raises_io(errno.EISDIR, "open", tmp_path):
            subject.open(handle, tmp_path, mode)
        with raises_io(errno.ESPIPE, "open", tmp_path / "pipe"):
            subject.open(handle, tmp_path / "pipe", mode)

    @pytest.mark.parametrize(("mode", "refused"), [("r", "write"), ("w", "read")])
    def test_file_is_used_as_it_was_opened(
        self, subject: Subject, handle: AsyncIOHandle, tmp_path: Path, mode: str, refused: str
    ) -> None:
        (tmp_path / "file").write_bytes(b"x" * 2 * BLOCK)
        with subject.open(handle, tmp_path / "file", mode) as file:
            for size in (4096, 100, BLOCK + 5):
                tensor = subject.place(torch.zeros(size, dtype=torch.uint8))
                start = handle.write if refused == "write" else handle.read
                fails(start(file, tensor), errno.EBADF)
        assert (tmp_path / "file").read_bytes() == b"x" * 2 * BLOCK

    # --- Many at once

    def test_many_threads_share_one_handle(self, subject: Subject, faults: FaultPlan | None, tmp_path: Path) -> None:
        """Each has regions of one file to itself, and files of its own."""
        failures: list[BaseException] = []
        with (
            subject.handle(faults=faults, queue_depth=8, threads=2) as handle,
            subject.open(handle, tmp_path / "shared") as shared,
        ):

            def work(worker: int) -> None:
                try:
                    rng = random.Random(worker)
                    with subject.open(handle, tmp_path / str(worker)) as own:
                        for turn in range(5):
                            size = rng.randrange(1, 2 * BLOCK)
                            data = random_bytes(size, worker * 100 + turn)
                            source = subject.place(data.clone())
                            offset = worker * (2 * BLOCK + 777)
                            places = [(own, turn * 13), (shared, offset)]
                            wait_all([handle.write(file, source, at) for file, at in places])
                            targets = [subject.place(torch.zeros_like(data)) for _ in places]
                            wait_all(
                                [
                                    handle.read(file, target, at)
                                    for (file, at), target in zip(places, targets, strict=True)
                                ]
                            )
                            assert all(torch.equal(subject.content(target), data) for target in targets)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert handle.in_flight == 0
        assert not failures

    # --- Ends

    def test_close_completes_what_is_in_flight(
        self, subject: Subject, faults: FaultPlan | None, tmp_path: Path
    ) -> None:
        data = random_bytes(BLOCK + 1)
        source = subject.place(data.clone())
        handle = subject.handle(faults=faults, threads=2)
        with subject.open(handle, tmp_path / "file") as file:
            transfers = [handle.write(file, source, i * (BLOCK + 1)) for i in range(20)]
            handle.close()
            assert all(transfer.done() for transfer in transfers)
            wait_all(transfers)
            for start in (handle.read, handle.write):
                with pytest.raises(SwapError, match="closed"):
                    start(file, source)
        assert (tmp_path / "file").read_bytes() == data.numpy().tobytes() * 20
        handle.close()

    def test_dropped_handle_completes_what_is_in_flight(
        self, subject: Subject, faults: FaultPlan | None, tmp_path: Path
    ) -> None:
        data = random_bytes(8 * BLOCK)
        handle = subject.handle(faults=faults)
        transfer = handle.write(subject.open(handle, tmp_path / "file", "w"), subject.place(data.clone()))
        del handle
        assert transfer.done()
        assert transfer.wait() == 8 * BLOCK
        assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
