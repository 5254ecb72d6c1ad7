"""Sizes in bytes: the constants that several packages share, and sizes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from swapper.errors import ConfigError, show

__all__ = [
    "ALIGNMENT_BYTES",
    "PAGE_BYTES",
    "SMALL_BYTES",
    "format_bytes",
    "format_size",
    "parse_size",
    "round_up",
]

ALIGNMENT_BYTES = 64
"""Every tensor in a pool buffer starts at a multiple of this, as torch's own allocator does it."""

PAGE_BYTES = 4096
"""Leases start at multiples of this; they and files are multiples of it long. So O_DIRECT takes transfers whole."""

SMALL_BYTES = 16 << 10
"""State, gradients and parameters of less stay in memory: a transfer would cost more than the memory."""

_BINARY_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50}
_DECIMAL_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_UNITS = {"": 1, "b": 1, **_BINARY_UNITS, **_DECIMAL_UNITS}
_SIZE_PATTERN = r"^\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*$"
_SIZE_EXAMPLES = "4096, '64MiB', '1.5 GiB' or '2GB'"
_LARGEST_SIZE = 2**63 - 1


def parse_size(value: object) -> int:
    """The number of bytes that `value` says.

    Args:
        value: a whole number of bytes, or a string of a number and a unit. KiB, MiB, GiB, TiB and PiB are powers of
            1024, KB, MB, GB, TB and PB powers of 1000, in upper or lower case; no unit and B are bytes. "1.5 GiB" is
            fine, half a byte is not.

    Returns:
        Bytes, 0 <= bytes < 2**63.

    Raises:
        ConfigError: `value` is none of these. The message names the value and the fix, not the field.
    """
    if isinstance(value, (bool, float)) or value is None:
        raise ConfigError(f"{show(value)} is not a size; write a whole number of bytes or a unit: {_SIZE_EXAMPLES}")
    if isinstance(value, str):
        size = _parse_size_text(value)
    else:
        try:
            size = value.__index__()  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            raise ConfigError(
                f"{show(value)} is not a size; write a whole number of bytes or a unit: {_SIZE_EXAMPLES}"
            ) from None
    assert isinstance(size, int)
    if size < 0:
        raise ConfigError(f"{show(value)} is negative; a size is 0 bytes or more")
    if size > _LARGEST_SIZE:
        raise ConfigError(f"{show(value)} is larger than any machine's memory; write at most {_LARGEST_SIZE} bytes")
    return size


def _parse_size_text(text: str) -> int:
    if text.strip().startswith("-"):
        raise ConfigError(f"{show(text)} is negative; a size is 0 bytes or more")
    match = re.match(_SIZE_PATTERN, text)
    if match is None:
        raise ConfigError(f"{show(text)} is not a size; write bytes or a number with a unit: {_SIZE_EXAMPLES}")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None and f"{unit.lower()}ib" in _BINARY_UNITS:
        raise ConfigError(
            f"{show(text)} can mean two sizes; write '{number}{unit.upper()}iB' (powers of 1024) "
            f"or '{number}{unit.upper()}B' (powers of 1000)"
        )
    if factor is None:
        raise ConfigError(f"{show(text)} has the unknown unit {unit!r}; use B, KiB, MiB, GiB, TiB, or KB, MB, GB, TB")
    size = Fraction(number) * factor
    if size.denominator != 1:
        raise ConfigError(f"{show(text)} is not a whole number of bytes; the nearest is {round(size)}")
    return size.numerator


def format_size(size_bytes: int) -> str:
    """The shortest exact text for `size_bytes`, which `parse_size` reads back: "64MiB", "2GB", "4097B"."""
    best = f"{size_bytes}B"
    if size_bytes > 0:
        for unit, factor in sorted({**_BINARY_UNITS, **_DECIMAL_UNITS}.items(), key=lambda item: item[1]):
            text = f"{size_bytes // factor}{unit[0].upper()}{unit[1:].replace('b', 'B')}"
            if size_bytes % factor == 0 and len(text) <= len(best):
                best = text
    return best


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than `value`.

    Args:
        value: >= 0.
        multiple: >= 1; need not be a power of two.
    """
    return -(-value // multiple) * multiple


def format_bytes(count: int) -> str:
    """`count` bytes for people: "1.5 GiB"."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
