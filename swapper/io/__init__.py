"""Tensors to and from files: handles, device memory, checksums."""
