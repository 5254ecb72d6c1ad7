"""Asynchronous reads and writes between files and CPU tensors, on the fastest system that is allowed here."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
from typing import TypeVar

import torch

from swapper.errors import SwapError, SwapIOError, renewed
from swapper.io import _native
from swapper.io._native import Checksums, FaultPlan, Slab
from swapper.io.backends import BACKENDS, SYSTEMS, Refusal, probe
from swapper.io.file import File
from swapper.io.transfer import Ledger, Transfer
from swapper.process.finalizers import finalizer
from swapper.process.interrupts import interrupts_deferred

__all__ = ["HostHandle"]

_MAX_BLOCK_BYTES = 1 << 30
_MAX_OFFSET_BYTES = (1 << 63) - 1

log = logging.getLogger(__name__)

_Handle = TypeVar("_Handle", bound="HostHandle")


class HostHandle:
    """Reads and writes tensors of the host; the part of `AsyncIOHandle` that knows no devices. See there."""

    def __init__(
        self,
        *,
        backend: str = "auto",
        block_bytes: int = 1 << 20,
        queue_depth: int = 32,
        threads: int = 1,
        single_submit: bool = False,
        overlap_events: bool = True,
        faults: FaultPlan | None = None,
    ) -> None:
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"backend: {backend!r} is none of auto, {', '.join(BACKENDS)}")
        if not 4096 <= block_bytes <= _MAX_BLOCK_BYTES or block_bytes % 4096:
            raise ValueError(
                f"block_bytes: {block_bytes} is not a multiple of 4096 between 4096 and {_MAX_BLOCK_BYTES}"
            )
        if not 1 <= queue_depth <= 4096:
            raise ValueError(f"queue_depth: {queue_depth} is not between 1 and 4096")
        if not 1 <= threads <= 256:
            raise ValueError(f"threads: {threads} is not between 1 and 256")
        self.block_bytes = block_bytes
        self.queue_depth = queue_depth
        self.threads = threads
        self.single_submit = single_submit
        self.overlap_events = overlap_events
        self._faults = faults
        self._named = backend
        self._refusals: list[Refusal] = []
        self._rung, engine = self._first_available(backend)
        self._ledger = Ledger(engine)
        self._keys = itertools.count(1)
        self._closed = False
        self._finalizer = finalizer(self, _close_unattended, self._ledger)
        self._set_up()

    def _set_up(self) -> None:
        """For subclasses: called when the engine is ready."""

    def _new_engine(self, system: str) -> _native.Engine:
        return _native.Engine(
            backend=system,
            block_bytes=self.block_bytes,
            queue_depth=self.queue_depth,
            threads=self.threads,
            single_submit=self.single_submit,
            overlap_events=self.overlap_events,
            faults=self._faults,
        )

    def _first_available(self, wanted: str) -> tuple[str, _native.Engine]:
        # "uring" alone still starts at the top: it takes registration where it can.
        candidates = {"auto": BACKENDS, "uring": ("uring+fixed", "uring")}.get(wanted, (wanted,))
        probes = {found.backend: found for found in probe()}
        for rung in candidates:
            reason = probes[rung].reason
            if not reason:
                try:
                    return rung, self._new_engine(SYSTEMS[rung])
                except SwapIOError as error:  # As when `queue_depth` needs more than the probe did.
                    reason = str(error)
            self._refusals.append(Refusal(rung, reason))
        reasons = "; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in self._refusals)
        raise SwapError(f"the I/O backend {wanted!r} is not available here: {reasons}")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(backend={self.backend!r}, block_bytes={self.block_bytes}, "
            f"queue_depth={self.queue_depth}, threads={self.threads}{', closed' if self._closed else ''})"
        )

    @property
    def backend(self) -> str:
        """The rung in use, one of `BACKENDS`. "uring+fixed" becomes "uring" if a slab cannot be registered."""
        return self._rung

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The rungs above `backend` that were tried, and why each was refused."""
        return tuple(self._refusals)

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    @property
    def broken(self) -> bool:
        """True once the backend has failed: every transfer then raises the reason."""
        self._check_process()
        return self._ledger.engine.broken

    @property
    def in_flight(self) -> int:
        """Transfers that were started and are not over."""
        self._check_process()
        self._ledger.sweep()
        return len(self._ledger.in_flight)

    @property
    def unobserved_failures(self) -> int:
        """Transfers that failed and were not waited for since. `close` raises the first of them."""
        self._check_process()
        self._ledger.sweep()
        return len(self._ledger.failed)

    def open(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        create: bool | None = None,
        truncate: bool = False,
        exclusive: bool = False,
        direct: bool = True,
        by_name: bool = False,
    ) -> File:
        """Open a file for transfers. Unlike the builtin, "w" keeps what is there unless `truncate` is set.

        Args:
            path: file name. The descriptors close on exec.
            mode: "r", "w" or "rw".
            create: make it, with mode 0600, where it does not exist. None: unless `mode` is "r".
            truncate: empty it.
            exclusive: with `create`, refuse one that exists.
            direct: False: do not use O_DIRECT even where the file system has it.
            by_name: True: nobody takes the file's name while it is used, so its descriptors may be closed meanwhile.
                When more than a quarter of `ulimit -n` are open, those of the file that was used least recently go,
                and are opened again by its name. If another file has that by then, a use raises `SwapIOError` (ESTALE).
                On network and FUSE file systems they stay open.

        Raises:
            ValueError: no such mode, or a null character in `path`.
            SwapIOError: it cannot be opened; EISDIR for a directory.
        """
        self._check_process()
        if mode not in ("r", "w", "rw"):
            raise ValueError(f"mode: {mode!r} is none of 'r', 'w', 'rw'")
        name = os.fsdecode(path)
        if "\0" in name:
            raise ValueError(f"path: {name!r} has a null character")
        use_direct = direct and self._rung != "buffered"
        make = mode != "r" if create is None else create
        return File(name, _native.File(os.fsencode(name), mode, make, truncate, exclusive, use_direct, by_name))

    def read(
        self, file: File, tensor: torch.Tensor, offset_bytes: int = 0, *, checksums: Checksums | None = None
    ) -> Transfer:
        """Start filling `tensor` from the file. Returns at once.

        Args:
            file: from `open`, of this or another handle.
            tensor: contiguous, on the CPU or a CUDA device, any dtype. Filled without autograd noticing. Its content is
                undefined until the transfer is over; its storage is kept until then.
            offset_bytes: where in the file the first byte is.
            checksums: check what arrives against them, on the I/O threads. Each block must have been written with them,
                in one piece.

        Raises:
            ValueError: `tensor` is not contiguous, on no such device or without memory, or `offset_bytes` is out of
                range, or not the start of one of the blocks of `checksums`.
            SwapError: the handle is closed, or this is a forked child.
            SwapIOError: from `wait()`; EBADMSG, with the offset of the block, where the bytes are not those written.
        """
        return self._start("read", file, tensor, offset_bytes, checksums)

    def write(
        self, file: File, tensor: torch.Tensor, offset_bytes: int = 0, *, checksums: Checksums | None = None
    ) -> Transfer:
        """Start writing `tensor` into the file. Returns at once.

        Args and errors as for `read`. `tensor` must not change until the transfer is over. What was written survives a
        loss of power only after `File.sync`. `checksums` are set for the blocks written, on the I/O threads.
        """
        return self._start("write", file, tensor, offset_bytes, checksums)

    def _start(
        self, operation: str, file: File, tensor: torch.Tensor, offset_bytes: int, checksums: Checksums | None
    ) -> Transfer:
        self._check_process()
        if (tensor.device.type != "cpu" and not self._takes(tensor.device)) or tensor.layout != torch.strided:
            raise ValueError(f"a transfer needs a dense CPU or CUDA tensor, not {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"a transfer needs a contiguous tensor, not one of strides {tensor.stride()}")
        if not 0 <= offset_bytes <= _MAX_OFFSET_BYTES - tensor.nbytes:
            raise ValueError(f"offset_bytes: {offset_bytes} is out of range")
        if tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.element_size() + tensor.nbytes:
            raise ValueError("a transfer needs a tensor with memory; the storage of this one was made smaller than it")
        return self._start_checked(operation, file, tensor, offset_bytes, checksums)

    def _takes(self, device: torch.device) -> bool:
        """For subclasses: tell if `_start_checked` moves tensors of `device`, which is not the CPU."""
        return False

    def _start_checked(
        self, operation: str, file: File, tensor: torch.Tensor, offset_bytes: int, checksums: Checksums | None
    ) -> Transfer:
        engine, key = self._ledger.engine, next(self._keys)
        start = engine.read if operation == "read" else engine.write
        begin = functools.partial(start, file.native(), tensor.data_ptr(), tensor.nbytes, offset_bytes, key, checksums)
        return self._ledger.start(key, tensor, begin, operation, file.path, offset_bytes)

    def register(self, slab: Slab) -> bool:
        """Register memory with the kernel, so that transfers in it cost less CPU. Waits for what is in flight.

        The slab is kept alive until `unregister` or `close`.

        Returns:
            Whether it is registered. If not, transfers work all the same; the reason is added to `refusals`, and
            "uring+fixed" becomes "uring".

        Raises:
            SwapError: refused, and `backend="uring+fixed"` was asked for; or closed, or a forked child.
            SwapIOError: the backend has broken down.
        """
        self._check_process()
        if self._rung != "uring+fixed":
            return False
        reason = self._ledger.engine.register_slab(slab)
        if not reason:
            return True
        if reason.endswith(os.strerror(errno.EFAULT)):  # Pages of a pool are elsewhere; it registers all when it can.
            return False
        if self._named == "uring+fixed":
            raise SwapError(f"the I/O backend 'uring+fixed' is not available here: {reason}")
        self._refusals.append(Refusal("uring+fixed", reason))
        self._rung = "uring"
        return False

    def unregister(self, slab: Slab) -> None:
        """Undo `register`. Waits for what is in flight. Nothing happens if it is not registered."""
        self._check_process()
        self._ledger.engine.unregister_slab(slab)

    def close(self) -> None:
        """Complete what is in flight and end the I/O threads. Idempotent; does nothing in a forked child.

        Raises:
            SwapIOError: a transfer had failed, and nobody waited for it. Raised once, after closing.
        """
        if os.getpid() != self._ledger.pid:
            return
        self._closed = True
        if not self._ledger.drain(functools.partial(_close_unattended, self._ledger)):
            return
        self._ledger.engine.close()
        self._ledger.sweep()
        failed = list(self._ledger.failed.values())
        unseen: SwapIOError | None = None
        try:
            for transfer in failed[:1]:
                transfer.wait()
        except SwapIOError as error:
            more = f"; {len(failed) - 1} more transfers failed unseen" if len(failed) > 1 else ""
            detail = f"{error.detail}; nobody had waited for it{more}".removeprefix("; ")
            unseen = renewed(error, detail=detail)
        with interrupts_deferred():  # Forgotten only when it is raised: Ctrl-C before leaves it to the next call.
            self._ledger.failed.clear()
            self._finalizer.detach()
            if unseen is not None:
                raise unseen

    def __enter__(self: _Handle) -> _Handle:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except SwapIOError as error:
            if exc_type is None:
                raise
            log.error("%s", str(error))  # The error that is on its way already is the one to see.

    def _check_process(self) -> None:
        if os.getpid() != self._ledger.pid:
            raise SwapError("this I/O handle was made before a fork: it works in the parent only, make a new one")


def _close_unattended(ledger: Ledger) -> None:
    """Finalizer of a handle that nobody closed."""
    if os.getpid() != ledger.pid or not ledger.drain(functools.partial(_close_unattended, ledger)):
        return
    ledger.engine.close()
    ledger.sweep()
    for transfer in list(ledger.failed.values()):
        try:
            transfer.wait()
        except SwapIOError as error:
            log.error("a transfer failed and nobody waited for it: %s", str(error))
