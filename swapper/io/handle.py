"""`AsyncIOHandle`: reads and writes of tensors, on the host and on CUDA devices; and all names that go with it."""

from __future__ import annotations

import functools

import torch

from swapper.io import _native, bounce
from swapper.io._native import Checksums, FaultPlan, Slab
from swapper.io.backends import BACKENDS, Probe, Refusal, probe
from swapper.io.devices import is_accelerator
from swapper.io.file import File, exchange, keep_open
from swapper.io.host_handle import HostHandle
from swapper.io.transfer import Transfer

__all__ = [
    "BACKENDS",
    "AsyncIOHandle",
    "Checksums",
    "FaultPlan",
    "File",
    "Probe",
    "Refusal",
    "Slab",
    "Transfer",
    "exchange",
    "keep_open",
    "probe",
]


class AsyncIOHandle(HostHandle):
    """Reads and writes CPU and CUDA tensors asynchronously. Thread-safe; a context manager that closes.

    Its I/O threads make every system call, so that starting a transfer takes microseconds. Transfers start in order and
    run side by side; two that overlap in one file or in memory are not ordered against each other.

    CUDA tensors go in chunks through a ring of page-locked memory, four times `block_bytes` or 4 MiB, whichever is more
    (at most 256 MiB), which is allocated at the first such transfer. What the current stream has to do at the call
    comes before the transfer; what comes after it must wait for the transfer. See `swapper.io.bounce`.

    Closed when collected or at interpreter exit, if it was not before: transfers in flight are then completed, failures
    logged. In a forked child every use raises `SwapError`, and nothing is cleaned up.

    Args:
        backend: "auto", or one of `BACKENDS`. "uring" registers slabs where that is allowed, "uring+fixed" insists.
        block_bytes: the most that one request to the kernel moves; a multiple of 4096, up to 1 GiB.
        queue_depth: requests in flight, per thread; 1 to 4096.
        threads: I/O threads, each with a queue of its own; the blocks of one transfer are spread over them.
        single_submit: one request per system call instead of a batch.
        overlap_events: False: a batch of requests is over before the next is submitted.
        faults: failures on purpose, for tests.

    Raises:
        ValueError: an argument is out of range, or names no backend.
        SwapError: the backend that was named is not to be had; the message says why.
    """

    def _set_up(self) -> None:
        engine, rung, refusals = self._ledger.engine, self._rung, self._refusals
        self._bounce = bounce.Bounce(functools.partial(_ring_memory, engine, rung, refusals), self.block_bytes)
        self._ledger.drain = self._bounce.close

    def _takes(self, device: torch.device) -> bool:
        return is_accelerator(device)

    def _start_checked(
        self, operation: str, file: File, tensor: torch.Tensor, offset_bytes: int, checksums: Checksums | None
    ) -> Transfer:
        if not self._takes(tensor.device) or not tensor.nbytes:
            return super()._start_checked(operation, file, tensor, offset_bytes, checksums)
        native, length_bytes, unit_bytes = file.native(), tensor.nbytes, file.alignment_bytes
        if checksums is not None:
            block_bytes = checksums.block_bytes
            unit_bytes = max(unit_bytes, block_bytes)
            fits = offset_bytes % block_bytes == 0 and offset_bytes + length_bytes <= checksums.length_bytes
            if not fits or self.block_bytes % block_bytes or unit_bytes > self._bounce.chunk_bytes:
                raise ValueError(
                    f"checksums: blocks of {block_bytes} bytes of {checksums.length_bytes} do not fit a transfer of "
                    f"{length_bytes} bytes of device memory at byte {offset_bytes}"
                )
        engine = self._ledger.engine
        engine_start = engine.read if operation == "read" else engine.write
        job = bounce.Job(
            key=next(self._keys),
            operation=operation,
            path=file.path,
            offset_bytes=offset_bytes,
            storage=tensor.untyped_storage(),
            start_bytes=int(tensor.storage_offset()) * tensor.element_size(),
            length_bytes=length_bytes,
            unit_bytes=unit_bytes,
            copies=self._bounce.copies(tensor.device),
            start=lambda address, length, offset: engine_start(native, address, length, offset, 0, checksums),
            direct=self._direct(operation, file, tensor, offset_bytes) if checksums is None else None,
            over=self._ledger.over,
        )
        begin = functools.partial(self._bounce.start, job)
        return self._ledger.start(job.key, tensor, begin, operation, file.path, offset_bytes)

    def _direct(self, operation: str, file: File, tensor: torch.Tensor, offset_bytes: int) -> bounce.Direct | None:
        """For subclasses: the part of a transfer of device memory that can go without the ring."""
        return None


def _ring_memory(engine: _native.Engine, rung: str, refusals: list[Refusal], length_bytes: int) -> torch.Tensor:
    """Memory that device tensors pass through, registered where slabs are."""
    slab = Slab(length_bytes)
    if rung == "uring+fixed":
        reason = engine.register_slab(slab)
        if reason:
            refusals.append(Refusal("uring+fixed", f"the memory that device tensors pass through: {reason}"))
    return torch.frombuffer(slab, dtype=torch.uint8)
