"""Moves tensors to and from files: `AsyncIOHandle`, for any program. See docs/deepnvme.md."""

from swapper.io.handle import (
    BACKENDS,
    AsyncIOHandle,
    Checksums,
    FaultPlan,
    File,
    Probe,
    Refusal,
    Slab,
    Transfer,
    exchange,
    probe,
)

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
    "probe",
]
