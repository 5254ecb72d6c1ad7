"""The ZIP files of `torch.save`: offsets of their records, and the bytes between the payloads.

The layout is that of torch 2.6 and newer, to the bit: records are stored, not compressed; each payload starts at a
multiple of the alignment, behind a local header that is padded by an extra field `FB`; the checksum and the lengths
come in a descriptor behind it; the directory ends with a ZIP64 end record. What is 2^32 - 1 or larger goes into ZIP64
extra fields. (APPNOTE.TXT of PKWARE, version 6.3.)
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = [
    "ZIP_START",
    "ArchiveEntry",
    "BadArchive",
    "check_payloads",
    "descriptor",
    "directory",
    "header_bytes",
    "local_header",
    "read_directory",
]

ZIP_START = b"PK\3\4"
"""The first bytes of each such file."""

_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _HAS_DESCRIPTOR = 0x0800, 0x0008
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<4sIQI")
_ZIP64_EXTRA, _PADDING_EXTRA = 1, b"FB"
_COMMENT_BYTES_MAX = _MAX_16
_IS_FOLDER = 0x10
"""Bit of an entry's attributes."""

LOCAL_HEADER_BYTES = _LOCAL.size
"""Length of a local header without the name and extra fields that it announces."""


class BadArchive(ValueError):
    """The file is no whole ZIP file."""


@dataclass(frozen=True)
class ArchiveEntry:
    """An entry of a ZIP file; torch calls it a record.

    Attributes:
        name: within the ZIP file, with the archive's own name before it.
        offset_bytes: of its local header.
        length_bytes: of the stored payload.
        crc32: of the stored payload; None if it is not known: not computed yet, not by torch, or not of these bytes
            because they are compressed.
    """

    name: str
    offset_bytes: int
    length_bytes: int
    crc32: int | None = None


def local_header(record: ArchiveEntry, alignment_bytes: int) -> bytes:
    """The bytes before a payload, which starts at a multiple of `alignment_bytes` in the file."""
    name = record.name.encode()
    extra = _zip64(record, local=True)
    start = record.offset_bytes + _LOCAL.size + len(name) + len(extra) + 4
    padding = -start % alignment_bytes
    extra += struct.pack("<2sH", _PADDING_EXTRA, padding) + b"Z" * padding
    return _LOCAL.pack(ZIP_START, 0, _flags(record), 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def header_bytes(header: bytes) -> int:
    """The length of a local header, from its first `LOCAL_HEADER_BYTES`.

    Raises:
        BadArchive: it is none.
    """
    if len(header) < _LOCAL.size or not header.startswith(ZIP_START):
        raise BadArchive("a local header is damaged")
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    return int(_LOCAL.size + name_bytes + extra_bytes)


def descriptor(record: ArchiveEntry) -> bytes:
    """The bytes behind a payload; none behind an empty one."""
    if not record.length_bytes:
        return b""
    layout = "<4sIQQ" if max(record.offset_bytes, record.length_bytes) >= _MAX_32 else "<4sIII"
    return struct.pack(layout, b"PK\7\10", record.crc32 or 0, record.length_bytes, record.length_bytes)


def directory(records: Sequence[ArchiveEntry], offset_bytes: int) -> bytes:
    """The end of the file.

    Args:
        records: with their checksums, in their order.
        offset_bytes: of the directory: behind the last record.
    """
    parts = []
    for record in records:
        name = record.name.encode()
        extra = _zip64(record)
        length, offset = min(record.length_bytes, _MAX_32), min(record.offset_bytes, _MAX_32)
        head = (b"PK\1\2", 0, 0, _flags(record), 0, 0, 0, record.crc32 or 0, length, length, len(name), len(extra))
        parts += [_CENTRAL.pack(*head, 0, 0, 0, 0, offset), name, extra]
    length_bytes, count = sum(map(len, parts)), len(records)
    end = offset_bytes + length_bytes
    few = min(count, _MAX_16)
    parts += [
        _END_64.pack(b"PK\6\6", _END_64.size - 12, 0x031E, 45, 0, 0, count, count, length_bytes, offset_bytes),
        _LOCATOR_64.pack(b"PK\6\7", 0, end, 1),
        _END.pack(b"PK\5\6", 0, 0, few, few, min(length_bytes, _MAX_32), min(offset_bytes, _MAX_32), 0),
    ]
    return b"".join(parts)


def _zip64(record: ArchiveEntry, *, local: bool = False) -> bytes:
    """The extra field for lengths and offsets that do not fit into 32 bits."""
    large: list[int] = []
    if record.length_bytes >= _MAX_32:
        # Length and stored length. torch leaves the latter 0 in a local header: the descriptor has it.
        large += [record.length_bytes, 0 if local else record.length_bytes]
    if record.offset_bytes >= _MAX_32:
        large.append(record.offset_bytes)
    return struct.pack(f"<HH{len(large)}Q", _ZIP64_EXTRA, 8 * len(large), *large) if large else b""


def _flags(record: ArchiveEntry) -> int:
    return _UTF8 | (_HAS_DESCRIPTOR if record.length_bytes else 0)


def read_directory(read: Callable[[int, int], bytes], length_bytes: int) -> list[ArchiveEntry]:
    """The records of a ZIP file, in the order of its directory.

    Args:
        read: returns so many bytes at an offset, less at the end of the file.
        length_bytes: of the file.

    Raises:
        BadArchive: it is no whole ZIP file: truncated, or damaged.
    """
    end_bytes = min(_END.size, length_bytes)
    tail = read(length_bytes - end_bytes, end_bytes)
    at = 0
    if not tail.startswith(b"PK\5\6"):  # A comment may follow it.
        tail_bytes = min(length_bytes, _END.size + _COMMENT_BYTES_MAX)
        tail = read(length_bytes - tail_bytes, tail_bytes)
        at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise BadArchive("its end is missing: it was truncated, or is no file of torch.save")
    end = length_bytes - len(tail) + at
    _, _, _, _, count, directory_bytes, start, _ = _END.unpack_from(tail, at)
    if end >= _LOCATOR_64.size:
        signature, _, end_64, _ = _LOCATOR_64.unpack(read(end - _LOCATOR_64.size, _LOCATOR_64.size))
        if signature == b"PK\6\7":
            end_record = read(end_64, _END_64.size) if end_64 <= end - _END_64.size else b""
            if len(end_record) != _END_64.size or not end_record.startswith(b"PK\6\6"):
                raise BadArchive("its end record is damaged")
            *_, count, directory_bytes, start = _END_64.unpack(end_record)
            end = end_64
    if start + directory_bytes > end:
        raise BadArchive("its directory is damaged")
    try:
        records = _records(read, read(start, directory_bytes), count, start)
    except (struct.error, StopIteration) as error:
        raise BadArchive("its directory is damaged") from error
    if len(records) != len({record.offset_bytes for record in records}):
        raise BadArchive("its directory is damaged")
    if repeated := [name for name, count in Counter(record.name for record in records).items() if count > 1]:
        # A wrong bit may do that, and then torch has one in the place of another.
        raise BadArchive(
            f"two of its records have one name, {repeated[0]!r}: another program has added to it, or it is damaged"
        )
    return records


def check_payloads(data: bytes) -> None:
    """Compare each payload of a ZIP file that is in memory with its checksum, where the file has one.

    Raises:
        BadArchive: one differs, or it is no whole ZIP file.
    """
    for record in read_directory(lambda offset, length: data[offset : offset + length], len(data)):
        start = record.offset_bytes + header_bytes(data[record.offset_bytes : record.offset_bytes + _LOCAL.size])
        payload = memoryview(data)[start : start + record.length_bytes]
        if record.crc32 not in (None, zlib.crc32(payload)):
            raise BadArchive(f"the record {record.name!r} does not match its checksum: the file was damaged")


def _records(read: Callable[[int, int], bytes], data: bytes, count: int, stop: int) -> list[ArchiveEntry]:
    records = []
    at = 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(data, at)
        signature, flags, method, crc32 = (fields[i] for i in (0, 3, 4, 7))
        stored, length, attributes, offset = (fields[i] for i in (8, 9, 15, 16))
        name_bytes, extra_bytes, comment_bytes = fields[10:13]
        if signature != b"PK\1\2":
            raise BadArchive("its directory is damaged")
        at += _CENTRAL.size
        name = _name(data[at : at + name_bytes], is_utf8=bool(flags & _UTF8))
        # Values that do not fit into 32 bits follow in the extra field, in this order.
        wide = iter(_zip64_values(data[at + name_bytes : at + name_bytes + extra_bytes]))
        length, stored, offset = [next(wide) if value == _MAX_32 else value for value in (length, stored, offset)]
        at += name_bytes + extra_bytes + comment_bytes
        if at > len(data) or offset + _LOCAL.size + name_bytes + stored > stop:
            raise BadArchive(f"its directory is damaged, or the record {name!r} is cut off")
        # What is compressed is not compared with its checksum, so a wrong bit must not make a record that. And of what
        # torch takes for a folder it reads nothing, and says that it has.
        damaged = stored != length if method == 0 else read(offset, _LOCAL.size)[8:10] != struct.pack("<H", method)
        if damaged or (attributes & _IS_FOLDER and length):
            raise BadArchive(f"its directory is damaged where it has the record {name!r}")
        # torch writes a checksum of 0 where it was told to compute none (`set_crc32_options`).
        known = method == 0 and bool(crc32)
        records.append(ArchiveEntry(name, offset, stored, crc32 if known else None))
    return records


def _name(data: bytes, *, is_utf8: bool) -> str:
    """The name of a record: in UTF-8, as torch says and has it, or in what other packers take if they say nothing."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if is_utf8:
            raise BadArchive("its directory is damaged: a name of its records is not UTF-8") from error
        return data.decode("cp437")


def _zip64_values(extra: bytes) -> Sequence[int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _ZIP64_EXTRA:
            return struct.unpack_from(f"<{length // 8}Q", extra, at + 4)
        at += 4 + length
    return ()
