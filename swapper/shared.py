"""What everything made from one `OffloadConfig` object shares: the pool, the engines and the run directories."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from swapper.buffers import BufferPool
from swapper.config import OffloadConfig
from swapper.handle import AsyncIOHandle
from swapper.store import TensorStore

__all__ = ["Shared", "close_all", "open_handles"]


class Shared:
    """The pool, engines and run directories of one `OffloadConfig` object, closed when the last optimizer lets go."""

    _all: ClassVar[weakref.WeakValueDictionary[int, Shared]] = weakref.WeakValueDictionary()

    def __init__(self, config: OffloadConfig, device: torch.device | None) -> None:
        self._configs = [config]  # Kept, so that their ids stay their own.
        self._holders = 0
        self.held_bytes = 0
        self.handles = open_handles(config)
        try:
            # The store comes first: what is wrong with a path is said before memory is taken.
            self.store = TensorStore(
                config.nvme_paths, _run_name(), _rank(), self.handles, verify=config.verify == "crc32c"
            )
            try:
                self.pool = BufferPool(config.pool_bytes, *self.handles, device=device)
            except BaseException:
                self.store.close()
                raise
        except BaseException:
            close_all(self.handles)
            raise

    @classmethod
    def of(cls, config: OffloadConfig, device: torch.device | None) -> Shared:
        """The one of this very object; made if there is none.

        Args:
            config: the object.
            device: of tensors that are copied to and from the pool, which is locked for it; None for none.
        """
        shared = cls._all.get(id(config))
        if shared is None:
            shared = cls._all[id(config)] = cls(config, device)
        elif device is not None:
            shared.pool.lock_for(device)  # It may have been made for parameters on the CPU.
        return shared

    @classmethod
    def existing(cls, config: OffloadConfig) -> Shared | None:
        """The one of this very object, if there is one."""
        return cls._all.get(id(config))

    @classmethod
    def join(cls, config: OffloadConfig, store: TensorStore) -> bool:
        """Let `config` share what has `store`, if it asks for the same, but for the accumulation of gradients.

        Returns:
            Whether it does now.
        """
        if (existing := cls.existing(config)) is not None:
            return existing.store is store
        for shared in list(cls._all.values()):
            steps = {"gradient_accumulation_steps": config.gradient_accumulation_steps}
            if shared.store is store and shared._configs[0].model_copy(update=steps) == config:
                cls._all[id(config)] = shared
                shared._configs.append(config)
                return True
        return False

    def hold(self, held_bytes: int) -> Callable[[], None]:
        """Count one more holder, which keeps `held_bytes` of the pool. Returns what lets go; it may be called twice."""
        self._holders += 1
        self.held_bytes += held_bytes
        done = False

        def release() -> None:
            nonlocal done
            if not done:
                done = True
                self._holders -= 1
                self.held_bytes -= held_bytes
            if self._holders == 0:
                self._close()

        return release

    def _close(self) -> None:
        for config in self._configs:
            if self._all.get(id(config)) is self:
                del self._all[id(config)]
        try:
            self.store.close()
            self.pool.close()
        finally:
            close_all(self.handles)


def open_handles(config: OffloadConfig) -> list[AsyncIOHandle]:
    """An engine for each drive, so that a slow one does not hold the queue of a fast one."""
    handles: list[AsyncIOHandle] = []
    aio = config.aio
    try:
        for _ in config.nvme_paths:
            handles.append(
                AsyncIOHandle(
                    backend=aio.backend,
                    block_bytes=aio.block_size,
                    queue_depth=aio.queue_depth,
                    threads=aio.intra_op_parallelism,
                    single_submit=aio.single_submit,
                    overlap_events=aio.overlap_events,
                )
            )
    except BaseException:
        close_all(handles)
        raise
    return handles


def close_all(handles: Sequence[AsyncIOHandle]) -> None:
    """Close every handle, whatever the others raise; then raise what the first did."""
    failures: list[BaseException] = []
    for handle in handles:
        try:
            handle.close()
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _run_name() -> str:
    """A name that no other run has; the same on all ranks, where rank 0 chooses it."""
    names = [secrets.token_hex(6)]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(names, src=0)
    return names[0]
