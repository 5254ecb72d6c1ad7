"""Memory behind addresses: what the rest of a process takes or gives back meanwhile is not in it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(start: int, length_bytes: int) -> int:
    """Memory of the mappings that have one of these addresses: a little more where pages are huge."""
    found, overlaps = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(text, 16) for text in first.split("-"))
            overlaps = low < start + length_bytes and high > start
        elif first == "Rss:" and overlaps:
            found += int(line.split()[1]) * 1024
    return found
