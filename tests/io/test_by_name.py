"""Files that are opened by name have no descriptors while they are not used and others are, and nothing shows it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from isolation import alone, in_forked_child
from small_drives import as_nobody, random_bytes

from swapper.errors import SwapIOError
from swapper.io.file import keep_open
from swapper.io.handle import AsyncIOHandle, File

pytestmark = pytest.mark.timeout(240)

SOFT = 128
"""Descriptors that a process may have here. A quarter of them are of files that may be closed: 16 files."""
MANY = 100


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def open_now() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def is_open(file: File) -> bool:
    """Tell by looking, without opening it."""
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return any(os.path.realpath(name) == os.path.realpath(file.path) for name in names if os.path.lexists(name))


@contextlib.contextmanager
def closed(directory: Path, *, backend: str = "auto", length: int = 8192) -> Iterator[tuple[AsyncIOHandle, File]]:
    """A file that has no descriptors, as so many others were used after it."""
    few_descriptors()
    with AsyncIOHandle(backend=backend) as handle, contextlib.ExitStack() as stack:
        file = stack.enter_context(handle.open(directory / "file", "rw", by_name=True))
        handle.write(file, random_bytes(length)).wait()
        use_others(handle, directory, stack)
        assert not is_open(file)
        yield handle, file


def use_others(handle: AsyncIOHandle, directory: Path, stack: contextlib.ExitStack) -> None:
    for i in range(40):
        stack.enter_context(handle.open(directory / f"other-{i}", "rw", by_name=True))


def read(handle: AsyncIOHandle, file: File, length: int = 8192) -> torch.Tensor:
    handle.read(file, found := torch.zeros(length, dtype=torch.uint8)).wait()
    return found


def many_files(directory: Path) -> None:
    few_descriptors()
    with AsyncIOHandle() as handle, contextlib.ExitStack() as stack:
        before = open_now()
        files = [stack.enter_context(handle.open(directory / f"{i}", "rw", by_name=True)) for i in range(MANY)]
        for _ in range(2):
            transfers = [handle.write(file, random_bytes(8192, seed=i)) for i, file in enumerate(files)]
            for transfer in transfers:
                transfer.wait()
            assert open_now() <= before + SOFT // 2, "a quarter, and what was in flight"
            for i, file in enumerate(files):
                assert torch.equal(read(handle, file), random_bytes(8192, seed=i))
                assert file.size_bytes() == 8192
                file.check_written()
            assert open_now() <= before + SOFT // 4
        for file in files:
            file.sync()
    assert open_now() <= before


def test_many_files_take_a_quarter_of_the_descriptors(tmp_path: Path) -> None:
    alone(many_files, tmp_path)


def files_of_users(directory: Path) -> None:
    few_descriptors()
    with AsyncIOHandle() as handle, contextlib.ExitStack() as stack:
        files = [stack.enter_context(handle.open(directory / f"{i}", "rw")) for i in range(30)]
        use_others(handle, directory, stack)
        for file in files:
            os.unlink(file.path)
        assert all(read(handle, file, 0).numel() == 0 for file in files)
        number = files[0].fileno()
        use_others(handle, directory, stack)
        assert os.fstat(number).st_nlink == 0 and files[0].fileno() == number


def test_other_files_stay_open_whatever_happens_to_their_names(tmp_path: Path) -> None:
    alone(files_of_users, tmp_path)


def room_for_others(directory: Path) -> None:
    """Files that stay open, and what Python opens, find descriptors that files by name have."""
    few_descriptors()
    with AsyncIOHandle() as handle, contextlib.ExitStack() as stack:
        use_others(handle, directory, stack)
        fixed = []
        with pytest.raises(SwapIOError, match="ulimit -n") as caught:
            for i in range(SOFT):
                fixed.append(stack.enter_context(handle.open(directory / f"fixed-{i}", "rw")))
        assert caught.value.errno == errno.EMFILE and caught.value.path == str(directory / f"fixed-{len(fixed)}")
        assert open_now() >= SOFT - 2


def test_files_that_are_not_used_make_room_for_others(tmp_path: Path) -> None:
    alone(room_for_others, tmp_path)


def gone(directory: Path) -> None:
    with closed(directory) as (handle, file):
        os.rename(file.path, directory / "moved")
        for use in uses(handle, file):
            with pytest.raises(SwapIOError, match="ulimit -n") as caught:
                use()
            assert (caught.value.errno, caught.value.path) == (errno.ENOENT, file.path)
        os.rename(directory / "moved", file.path)
        assert torch.equal(read(handle, file), random_bytes(8192)), "it is there again"


def replaced(directory: Path) -> None:
    with closed(directory) as (handle, file):
        inode = os.stat(file.path).st_ino
        threading.Event().wait(0.02)  # A tick of the clock of the file system.
        for i in range(20):  # ext4 gives the inode to the next file.
            os.unlink(file.path)
            Path(file.path).write_bytes(bytes(8192))
            if os.stat(file.path).st_ino == inode:
                break
            os.rename(file.path, directory / f"taken-{i}")
            Path(file.path).touch()
        for use in uses(handle, file):
            with pytest.raises(SwapIOError, match=r"another file has its name now.*ulimit -n") as caught:
                use()
            assert (caught.value.errno, caught.value.path) == (errno.ESTALE, file.path)
        assert Path(file.path).read_bytes() in (b"", bytes(8192)), "nobody wrote to it"


def forbidden(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to be nobody")
    directory = Path("/var/tmp") / f"swapper-{os.getpid()}"
    directory.mkdir(mode=0o777)
    os.chmod(directory, 0o777)
    try:
        with as_nobody(), closed(directory) as (handle, file):
            os.chmod(file.path, 0o400)
            assert torch.equal(read(handle, file), random_bytes(8192)), "to read it is all that is asked"
            with pytest.raises(SwapIOError) as caught:
                handle.write(file, random_bytes(8192)).wait()
            assert (caught.value.errno, caught.value.path) == (errno.EACCES, file.path)
            with pytest.raises(SwapIOError):
                file.truncate(0)
            os.chmod(file.path, 0o600)
            handle.write(file, random_bytes(8192, seed=1)).wait()
            assert torch.equal(read(handle, file), random_bytes(8192, seed=1))
    finally:
        subprocess.run(["rm", "-r", str(directory)], check=True)


def without_descriptors(directory: Path) -> None:
    with closed(directory) as (handle, file), contextlib.ExitStack() as stack:
        held = [stack.enter_context(handle.open(directory / f"held-{i}", "rw", by_name=True)) for i in range(3)]
        for each in held:
            each.fileno()
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        assert torch.equal(read(handle, file), random_bytes(8192)), "another was closed for it"
        kept = [stack.enter_context(handle.open(directory / f"other-{i}", "rw", by_name=True)) for i in range(20)]
        with pytest.raises(SwapIOError):
            for each in (file, *kept):
                each.fileno()  # As they stay open now there is no room any more.
        last = kept[-1]
        for use in uses(handle, last):
            if use == last.size_bytes:  # Needs none.
                assert last.size_bytes() == 0
                continue
            with pytest.raises(SwapIOError, match="ulimit -n") as caught:
                use()
            assert (caught.value.errno, caught.value.path) == (errno.EMFILE, last.path)
        for descriptor in taken:
            os.close(descriptor)
        assert last.size_bytes() == 0


def uses(handle: AsyncIOHandle, file: File) -> list[Callable[[], object]]:
    return [
        lambda: read(handle, file),
        lambda: handle.write(file, random_bytes(8192, seed=1)).wait(),
        file.size_bytes,
        file.sync,
        lambda: file.truncate(0),
        lambda: file.preallocate(8192),
        file.descriptor,
        file.fileno,
    ]


@pytest.mark.parametrize("fault", [gone, replaced, forbidden, without_descriptors], ids=lambda fault: fault.__name__)
@pytest.mark.long
def test_a_file_that_cannot_be_opened_again_is_an_error_with_its_name(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    alone(fault, tmp_path)


def kept(directory: Path) -> None:
    with closed(directory) as (handle, file), contextlib.ExitStack() as stack:
        (directory / "link").symlink_to(directory)
        keep_open(directory / "link" / "file")
        os.unlink(file.path)
        use_others(handle, directory, stack)
        assert torch.equal(read(handle, file), random_bytes(8192))


def test_what_is_about_to_lose_its_name_can_be_kept_open(tmp_path: Path) -> None:
    alone(kept, tmp_path)


def lost(mount: Path, directory: Path) -> None:
    """What the kernel could not write is told only to those who had the file open then."""
    few_descriptors()
    with AsyncIOHandle(backend="buffered") as handle, contextlib.ExitStack() as stack:
        file = stack.enter_context(handle.open(mount / "file", "rw", by_name=True))
        handle.write(file, torch.full((40 << 20,), 7, dtype=torch.uint8)).wait()
        use_others(handle, directory, stack)
        assert not is_open(file)
        for _ in range(2):
            with pytest.raises(SwapIOError, match="page cache") as caught:
                file.check_written()
            assert caught.value.errno in (errno.EIO, errno.ENOSPC) and caught.value.path == file.path
            with pytest.raises(SwapIOError):
                handle.write(file, torch.full((40 << 20,), 7, dtype=torch.uint8)).wait()
                use_others(handle, directory, stack)
                file.sync()
            handle.write(file, torch.full((40 << 20,), 7, dtype=torch.uint8)).wait()
            use_others(handle, directory, stack)


@pytest.mark.root
@pytest.mark.long
def test_a_lost_write_is_told_though_the_file_was_closed(thin_drive: Path, tmp_path: Path) -> None:
    alone(lost, thin_drive, tmp_path)


def forked(directory: Path) -> None:
    with closed(directory) as (_, file):
        in_forked_child(lambda: as_it_is(file))
        as_it_is(file)


def as_it_is(file: File) -> None:
    with file.descriptor() as descriptor:
        assert os.pread(descriptor, 8192, 0) == bytes(random_bytes(8192).tolist())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_opens_files_for_itself(tmp_path: Path) -> None:
    alone(forked, tmp_path)


def in_threads(directory: Path) -> None:
    few_descriptors()
    with AsyncIOHandle() as handle, contextlib.ExitStack() as stack:
        files = [stack.enter_context(handle.open(directory / f"{i}", "rw", by_name=True)) for i in range(MANY)]
        for i, file in enumerate(files):
            handle.write(file, random_bytes(8192, seed=i)).wait()
        wrong: list[object] = []

        def work(start: int) -> None:
            try:
                for turn in range(3 * MANY):
                    i = (start + turn * 7) % MANY
                    assert torch.equal(read(handle, files[i]), random_bytes(8192, seed=i))
                    with files[i].descriptor() as descriptor:
                        assert os.path.samestat(os.fstat(descriptor), os.stat(files[i].path))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.long
def test_threads_use_more_files_than_may_be_open(tmp_path: Path) -> None:
    alone(in_threads, tmp_path)
