"""What programs for DeepNVMe are made of."""

from __future__ import annotations

import errno
import gc
import sys
import time
from pathlib import Path

import pytest
import torch
from launcher import run_program

from swapper.deepnvme import (
    aio_handle,
    cast_to_byte_tensor,
    gds_handle,
)
from swapper.io.handle import Slab

HANDLES = [aio_handle, gds_handle]
NEEDS_LOCK = pytest.mark.skipif(not Slab(6 << 20).locked, reason="may not lock 6 MiB of memory (RLIMIT_MEMLOCK)")
NEEDS_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


def contents(tensor: torch.Tensor) -> bytes:
    return cast_to_byte_tensor(tensor).cpu().numpy().tobytes()


def locked_bytes() -> int:
    gc.collect()  # What tests before this one have left is not to go while it counts.
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmLck"))


def settle(handle: aio_handle) -> None:
    """Until nothing is in flight, without a `wait()`."""
    while handle._handle.in_flight:
        time.sleep(0.001)


def full_errno(handle: aio_handle) -> int:
    """What a write to /dev/full fails with: kernel AIO does not know that device."""
    return errno.EINVAL if handle._handle.backend == "aio" else errno.ENOSPC


def run(program: str, *, expect: int = 0) -> str:
    """Run it in a process of its own. Returns what it wrote to stderr."""
    done = run_program([sys.executable, "-W", "error", "-c", program], timeout=240, capture_output=True, text=True)
    assert done.returncode == expect, done.stderr
    return done.stderr
