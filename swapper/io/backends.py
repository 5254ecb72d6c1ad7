"""The ladder of systems for asynchronous input and output, and what of it this machine offers.

[Note: ladder] `backend="auto"` takes the first rung that this machine offers:

    uring+fixed   io_uring, with the slabs registered: no page is pinned and unpinned at each request
    uring         io_uring; containers often forbid it (seccomp), and RLIMIT_MEMLOCK can forbid registration
    aio           kernel AIO; overlaps only with O_DIRECT
    threads       pread and pwrite on a few threads, with O_DIRECT where the file system has it
    buffered      the same through the page cache

Each refusal is kept with its reason. Whether a file is direct is a matter of its file system: see `File.direct`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from swapper.io import _native

__all__ = ["BACKENDS", "SYSTEMS", "Probe", "Refusal", "probe"]

SYSTEMS = {"uring+fixed": "uring", "uring": "uring", "aio": "aio", "threads": "threads", "buffered": "threads"}
"""Native backend of each rung of the ladder."""
BACKENDS = tuple(SYSTEMS)
"""The rungs of the ladder, best first."""


class Probe(NamedTuple):
    """Availability of a backend on this machine; `reason` says why it is not available, else it is empty."""

    backend: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Refusal:
    """A backend that was wanted and could not be had."""

    backend: str
    reason: str


@functools.cache
def probe() -> tuple[Probe, ...]:
    """Try every backend for real, best first. Once per process; later calls return the same answer."""
    probes = []
    for backend in BACKENDS:
        reason = _native.probe_backend(SYSTEMS[backend], fixed=backend == "uring+fixed")
        probes.append(Probe(backend, not reason, reason))
    return tuple(probes)
