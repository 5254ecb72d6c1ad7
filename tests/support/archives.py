"""Comparison of torch's archives."""

from __future__ import annotations

import struct
import zlib

from swapper.files import archive


def without_id(data: bytes) -> bytes:
    """A file without what identifies it, which is of torch's choice: 40 digits, and their checksum."""
    entry = next(e for e in archive.read_directory(lambda at, n: data[at : at + n], len(data)) if "_id" in e.name)
    start = entry.offset_bytes + archive.header_bytes(data[entry.offset_bytes :])
    content = data[start : start + 40]
    assert content.isdigit()
    return data.replace(content, b"-" * 40).replace(struct.pack("<I", zlib.crc32(content)), b"----")
