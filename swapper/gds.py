"""Moves tensors between device memory and files by cuFile: `GDSHandle`. See docs/deepnvme.md."""

from swapper.io.gds import CuFileProbe, GDSHandle, probe_cufile

__all__ = ["CuFileProbe", "GDSHandle", "probe_cufile"]
