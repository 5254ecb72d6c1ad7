"""`Shared`: the pool, the engines and the run directories of one `OffloadConfig` object.

[Note: two locks] Several threads may come to one config at once, and holders go in any thread, by finalizers at any
allocation. Whoever looks for the one of a config, and makes it, holds `_making`, and may wait for anything. A finalizer
takes `_counting` alone, in which nobody waits: so whatever the thread holds that it has cut off, there is no deadlock.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import torch

from swapper.config import AioConfig, OffloadConfig
from swapper.errors import SwapIOError, system_errors
from swapper.io.devices import memory_advice
from swapper.io.gds import GDSHandle, probe_cufile
from swapper.io.handle import AsyncIOHandle
from swapper.sizes import format_bytes
from swapper.storage.agreement import exchanged, rank_count, rank_of_process
from swapper.storage.buffers import BufferPool
from swapper.storage.device_pool import DevicePool
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.mounts import check_nvme_paths
from swapper.storage.runs import boot_id
from swapper.storage.spans import SourceFile
from swapper.storage.speed import DriveSpeed, measure_speeds
from swapper.storage.store import TensorStore
from swapper.storage.writes import wait_for_ends
from swapper.tensors.collectives import is_distributed
from swapper.tensors.sharded import is_sharded

__all__ = [
    "Engines",
    "Shared",
    "close_all",
    "drive_speeds",
    "is_done_by_all",
    "made",
    "pool_of_parameters",
    "why_not_direct",
]


log = logging.getLogger(__name__)

_MadeT = TypeVar("_MadeT")
_MUCH_OF_MEMORY = 0.8
"""Of the host's: pools of more leave too little for the models."""
_STAGING_ADVICE = (
    "records go between the drive and parameters through memory of the accelerator, of which aio.gds: off needs none; "
    "set that, or lower offload_param.device_bytes"
)


class Shared:
    """The pool, engines and run directories of one `OffloadConfig` object, closed when the last holder releases it."""

    _all: ClassVar[weakref.WeakValueDictionary[int, Shared]] = weakref.WeakValueDictionary()
    _making: ClassVar[threading.RLock] = threading.RLock()  # See [Note: two locks].
    _counting: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, config: OffloadConfig, device: torch.device | None) -> None:
        # First: all ranks take part in it, whatever fails on one of them afterwards.
        run, meeting = _introduce(config)
        self._config = config  # Kept, so that its id stays its own.
        self._joined: dict[int, weakref.ref[OffloadConfig]] = {}  # by id, which another has once they are gone
        self._holders = 0
        self._together: dict[str, int] = {}  # holders that have one part of the pool together, by its name
        self._ended = False  # The last holder has gone.
        self.held_bytes = 0
        self._wanted_bytes = 0
        self._direct: Engines | None = None
        with ExitStack() as undo:
            with meeting:
                self._engines = Engines(config)
                self.handles = self._engines.handles
                undo.callback(self._engines.close)
                # The store comes first: an error of a path is raised before memory is taken.
                verify = config.verify == "crc32c"
                self.store = TensorStore(
                    config.nvme_paths, run, _rank(), self.handles, verify=verify, before_measuring=meeting.meet
                )
            undo.callback(self.store.close)
            self.pool = BufferPool(config.pool_bytes, *self.handles, device=device, ready_bytes=0)
            undo.pop_all()

    @classmethod
    def of(cls, config: OffloadConfig, device: torch.device | None) -> Shared:
        """Give the one of this very object; make it if there is none.

        Args:
            device: of tensors that are copied to and from the pool, which is locked for it; None for none.
        """
        with cls._making:
            shared = cls.existing(config)
            if shared is None:
                shared = cls._all[id(config)] = cls(config, device)
            elif device is not None:
                shared.pool.lock_for(device)  # It may have been made for parameters on the CPU.
            return shared

    @classmethod
    def existing(cls, config: OffloadConfig) -> Shared | None:
        """Give the one of this very object, if there is one. What was dropped has given its part back."""
        wait_for_ends()
        shared = cls._all.get(id(config))
        return shared if shared is not None and shared._is_of(config) and not shared._ended else None

    @classmethod
    def join(cls, config: OffloadConfig, store: TensorStore) -> bool:
        """Let `config` share the one that has `store`, if it asks for the same, but for the accumulation of gradients.

        Returns:
            True if it does now.
        """
        if (existing := cls.existing(config)) is not None:
            return existing.store is store
        for shared in dict.fromkeys(cls._all.values()):
            steps = {"gradient_accumulation_steps": config.gradient_accumulation_steps}
            if shared.store is store and shared._config.model_copy(update=steps) == config:
                shared._forget_gone()
                cls._all[id(config)] = shared
                shared._joined[id(config)] = weakref.ref(config)
                return True
        return False

    def _is_of(self, config: OffloadConfig) -> bool:
        """True if `config` made it or has joined, and is not another that has the id of one that is gone."""
        joined = self._joined.get(id(config))
        return config is self._config or (joined is not None and joined() is config)

    def _forget_gone(self) -> None:
        """Forget configs that have joined and that nobody has any more, as of fits that are over."""
        for number in [number for number, config in self._joined.items() if config() is None]:
            del self._joined[number]
            if self._all.get(number) is self:
                del self._all[number]

    @classmethod
    def held(
        cls,
        config: OffloadConfig,
        device: torch.device | None,
        held_bytes: int,
        wanted_bytes: int,
        *,
        together: str = "",
    ) -> tuple[Shared, Callable[[], None]]:
        """As `of`, and count one more holder.

        Args:
            config, device: as for `of`.
            held_bytes: the part of the pool that it keeps.
            wanted_bytes: the most of the pool that it can ever use, as far as it is known. Made ready now, so that no
                step has to; memory that turns out to be needed beyond it is made ready when it is leased.
            together: all holders that give this name keep the part of the pool together; "" for one of its own.

        Returns:
            The one of this very object; and a function that counts the holder out again, and may be called twice.

        Raises:
            SwapIOError: there is not so much memory.
        """
        release = None
        while release is None:  # The last other holder may go in between.
            shared = cls.of(config, device)
            release = shared._hold(held_bytes, wanted_bytes, together)
        try:
            shared.pool.make_ready(shared._wanted_bytes)
        except BaseException:
            release()
            raise
        return shared, release

    def _hold(self, held_bytes: int, wanted_bytes: int, together: str) -> Callable[[], None] | None:
        """Count one more holder, and give what counts it out. None if the last one has gone."""
        done = True

        def release() -> None:
            nonlocal done
            with self._counting:
                if not done:
                    done = True
                    self._count(-1, held_bytes, wanted_bytes, together)
                    self._ended = self._holders == 0
            if self._ended:
                self._close()

        with self._counting:
            if self._ended:
                return None
            self._count(1, held_bytes, wanted_bytes, together)
            done = False
        return release

    def _count(self, change: int, held_bytes: int, wanted_bytes: int, together: str) -> None:
        self._holders += change
        self._wanted_bytes += change * wanted_bytes
        if together:
            before = self._together.get(together, 0)
            self._together[together] = after = before + change
            if max(before, after) > 1:  # Another has the part.
                return
        self.held_bytes += change * held_bytes

    def device_pools(self, device: torch.device) -> Callable[[int], DevicePool]:
        """Make engines for cuFile, which the store then moves memory of an accelerator with. For who holds this.

        Returns:
            What makes a pool of so many bytes there; raises `torch.OutOfMemoryError` where there are not so many.
        """
        if self._direct is None:
            self._direct = Engines(self._config, GDSHandle)
        handles = [handle for handle in self._direct.handles if isinstance(handle, GDSHandle)]
        self.store.use_for_devices(handles)
        return lambda pool_bytes: DevicePool(pool_bytes, *handles, device=device)

    def staging(
        self, pool_bytes: int, device: torch.device, release: Callable[[], None]
    ) -> tuple[DevicePool, Callable[[], None]]:
        """Make a pool in the memory of an accelerator, see `device_pools`, and what closes it.

        Args:
            pool_bytes: its length.
            device: the accelerator.
            release: from `held`; called after an exception.

        Returns:
            The pool, and a function that closes it and then calls `release`.

        Raises:
            torch.OutOfMemoryError: the device has not so much memory.
        """
        try:
            with memory_advice(_STAGING_ADVICE):
                pool = self.device_pools(device)(pool_bytes)
        except BaseException:
            release()
            raise

        def close() -> None:
            try:
                pool.close()
            finally:
                release()

        return pool, close

    def sources(
        self, paths: Iterable[Path], release: Callable[[], None]
    ) -> tuple[dict[Path, SourceFile], Callable[[], None]]:
        """Open files of somebody else, to be read into leases of the pool.

        Args:
            paths: of the files.
            release: from `held`; called after an exception.

        Returns:
            The files, and a function that closes them and then calls `release`.

        Raises:
            SwapIOError: one cannot be opened.
        """
        paths = list(dict.fromkeys(paths))
        with ExitStack() as undo:
            undo.callback(release)
            by_device: dict[int, Path] = {}
            devices: list[int] = []
            for path in paths:
                with system_errors("open", path):
                    devices.append(os.stat(path).st_dev)
                by_device.setdefault(devices[-1], path)
            engines = Engines(self._config, paths=list(by_device.values()))
            undo.callback(engines.close)
            handles = dict(zip(by_device, engines.handles, strict=True))
            files: dict[Path, SourceFile] = {}
            for path, device in zip(paths, devices, strict=True):
                files[path] = SourceFile(path, handles[device])
                undo.callback(files[path].close)
            return files, undo.pop_all().close

    def rest(self) -> None:
        """Give the pool's memory back to the system until it is used again, except records that no drive has."""
        while self.pool.reclaim():
            pass
        self.pool.trim()

    def _close(self) -> None:
        for number in (id(self._config), *self._joined):
            if self._all.get(number) is self:
                del self._all[number]
        try:
            self.store.close()
            self.pool.close()
        finally:
            # Last: the store's files and the pool are registered with them.
            close_all([self._engines] if self._direct is None else [self._direct, self._engines])


def pool_of_parameters(
    config: OffloadConfig, device: torch.device | None, kept_bytes: int, step_bytes: int = 0
) -> tuple[BufferPool | GrowingPool, TensorStore | None, Callable[[], None]]:
    """The pool and the store of parameters, and what releases them. Without a drive the pool is their own."""
    if config.offload_param.device == "cpu":
        own = GrowingPool(kept_bytes, device=device, step_bytes=step_bytes)
        return own, None, own.close
    shared, release = Shared.held(config, device, 0, 0)  # They make memory of the pool ready as they come.
    return shared.pool, shared.store, release


def is_done_by_all(config: OffloadConfig, parameters: Iterable[torch.Tensor]) -> bool:
    """True if all ranks of a distributed program wrap `parameters`: only then they can agree on how it went."""
    if rank_count() == 1:
        return False
    # The first use of a config gives all ranks the name of one run.
    uses = config.offload_optimizer.device, config.offload_gradient.device, config.offload_param.device
    return ("nvme" in uses and Shared.existing(config) is None) or any(map(is_sharded, parameters))


def made(make: Callable[[], _MadeT], release: Callable[[], object]) -> _MadeT:
    """Give what `make` makes; it takes over what `release` undoes, unless it fails."""
    try:
        return make()
    except BaseException:
        release()
        raise


class _Engine:
    """One I/O engine, and how many use it. Each calls `close` once."""

    _all: ClassVar[dict[tuple[object, ...], _Engine]] = {}
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, key: tuple[object, ...], handle: AsyncIOHandle) -> None:
        self._key = key
        self.handle = handle
        self._users = 0

    @classmethod
    def of(cls, make: type[AsyncIOHandle], settings: AioConfig, drive: object) -> _Engine:
        """Give the one of these settings on this drive; make it if there is none that works."""
        # The process is part of the key, too: a child cannot use its parent's.
        key = (make, settings, drive, os.getpid())
        with cls._lock:
            engine = cls._all.get(key)
            if engine is not None:
                engine._users += 1
                # A finalizer that ran before the line above may have closed it.
                if not engine.handle.closed and not engine.handle.broken:
                    return engine
                engine._users -= 1
            engine = cls(
                key,
                make(
                    backend=settings.backend,
                    block_bytes=settings.block_size,
                    queue_depth=settings.queue_depth,
                    threads=settings.intra_op_parallelism,
                    single_submit=settings.single_submit,
                    overlap_events=settings.overlap_events,
                ),
            )
            engine._users = 1
            cls._all[key] = engine
            return engine

    def close(self) -> None:
        """Have one user less. The last closes it, which raises a failure that nobody has waited for, of any user."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            if self._all.get(self._key) is self:
                del self._all[self._key]
        self.handle.close()


class Engines:
    """An engine for each drive of a config, so that a slow one does not hold the queue of a fast one.

    Configs of equal settings share the engine of a drive: several models, or fits of which the earlier still live.

    Args:
        config: has the settings.
        kind: class of the handles; None: `AsyncIOHandle`.
        paths: one on each drive; None: its `nvme_paths`.

    Attributes:
        handles: in the order of the paths.
    """

    def __init__(
        self, config: OffloadConfig, kind: type[AsyncIOHandle] | None = None, paths: Sequence[Path] | None = None
    ) -> None:
        self._engines: list[_Engine] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for drive in _drives(config.nvme_paths if paths is None else paths):
                self._engines.append(_Engine.of(kind or AsyncIOHandle, config.aio, drive))  # Tests replace the class.
            undo.pop_all()
        self.handles = [engine.handle for engine in self._engines]

    def close(self) -> None:
        """Release all. Raises as `close_all`. Idempotent."""
        engines, self._engines = self._engines, []
        close_all(engines)


def drive_speeds(config: OffloadConfig) -> list[DriveSpeed]:
    """Measure the speed of each drive of a config, as `measure_speeds`.

    Raises:
        NvmePathError: as that, or a path is no directory that can be written to.
        ConfigError: a path is in memory, or two are not two places.
    """
    check_nvme_paths(config.nvme_paths)
    with closing(Engines(config)) as engines:
        return measure_speeds(config.nvme_paths, engines.handles)


class _Closes(Protocol):
    def close(self) -> None: ...


def close_all(opened: Sequence[_Closes]) -> None:
    """Close each, whatever the others raise; then raise the first exception."""
    failures: list[BaseException] = []
    for each in opened:
        try:
            each.close()
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


@memory_advice(_STAGING_ADVICE)
def why_not_direct(config: OffloadConfig, device: torch.device | None) -> str:
    """Say why records cannot go between the drives of `config` and `device` without the pool; "" if they can.

    Writes and reads a file on each drive, and removes it; not with None for the device, where "" is less certain.
    """
    if config.aio.gds == "off":
        return "aio.gds is off"
    if config.verify != "none":
        return f"verify: {config.verify} takes checksums of records on the host"
    found = probe_cufile()
    if not found.available or device is None:
        return found.reason
    try:
        with GDSHandle() as handle:
            return next(filter(None, (handle.why_not_direct(path, device) for path in config.nvme_paths)), "")
    except SwapIOError as error:
        return str(error)


def _drives(paths: Sequence[Path]) -> list[object]:
    """Give each of `paths` a key of its drive. Several paths of one config are taken for several drives in any case."""
    drives: list[object] = []
    for path in paths:
        try:
            drive: object = os.stat(path).st_dev
        except OSError:  # The store says what is wrong with it.
            drive = path
        drives.append((drive, sum(isinstance(other, tuple) and other[0] == drive for other in drives)))
    return drives


def _rank() -> int:
    if is_distributed():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


class _Meeting:
    """Has all ranks measure their drives at once, as they use them: those of one host may share some.

    Within it a rank meets the others before it measures. One that measures nothing, or fails before, meets them at its
    end, so that nobody waits for it.

    Args:
        is_held: some rank measures drives.
    """

    def __init__(self, is_held: bool) -> None:
        self._is_held = is_held

    def meet(self) -> None:
        """Wait for all ranks. The second time return at once."""
        is_held, self._is_held = self._is_held, False
        if is_held:
            exchanged(None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):  # Not after Ctrl-C: the others may be anywhere.
            self.meet()


def _introduce(config: OffloadConfig) -> tuple[str, _Meeting]:
    """Let all ranks know of this process, and say what those of one host take of it together.

    Returns:
        A name that no other run has; the same on all ranks, where rank 0 chooses it. And where they meet to measure.
    """
    host = f"{socket.gethostname()} {boot_id()}"
    ranks = exchanged((secrets.token_hex(6), host, rank_of_process(), config.pool_bytes, len(config.nvme_paths) > 1))
    here = [(rank, pool_bytes) for _, of, rank, pool_bytes, _ in ranks if of == host]
    if len(here) > 1 and here[0][0] == rank_of_process():
        pools_bytes = sum(pool_bytes for _, pool_bytes in here)
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        is_much = pools_bytes > _MUCH_OF_MEMORY * memory_bytes
        log.log(
            logging.WARNING if is_much else logging.INFO,
            "%d processes on this host have pools of %s together, of %s of memory%s",
            len(here),
            format_bytes(pools_bytes),
            format_bytes(memory_bytes),
            ": pool_bytes is of each process, lower it" if is_much else "",
        )
    return ranks[0][0], _Meeting(any(measures for *_, measures in ranks))
