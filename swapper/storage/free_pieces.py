"""The free parts of a pool's addresses, and which of them a lease has taken.

[Note: pools in pieces] A lease that no free piece is long enough for has several. `GatheredPages` give their pages
addresses side by side until it is given back. So the sum of what is used alone decides whether there is room, in
whatever places and order leases come and go: all lengths are whole pages; beside leases of `used` bytes the free pieces
are `capacity_bytes - used` together, and a lease of so many bytes takes them all. Who registered the pages need not
know, as they stay the same. Nobody may register memory while pages of it are elsewhere, so all of the pool is made
ready before, and `trim` and `lock_for` wait.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["AddressRange", "FreePieces", "Taker"]


@dataclass(eq=False, slots=True)
class AddressRange:
    """A range of addresses that one lease has.

    Attributes:
        start, stop: its bounds.
        taken: True while it is missing in the free pieces.
    """

    start: int
    stop: int
    taken: bool = True


class Taker(Protocol):
    """An object to which `FreePieces` assigns the ranges that it takes."""

    parts: Sequence[AddressRange]


class FreePieces:
    """The free parts of a range of addresses, in order, never touching each other. Not thread-safe.

    First fit: long-lived leases settle at the low end, and the high end stays in one piece for the large ones. What
    changes the pieces changes them in assignments without a call in between: see [Note: giving back] in `buffers`.

    Attributes:
        total_bytes: length of all free pieces.
    """

    def __init__(self, length_bytes: int) -> None:
        self.total_bytes = length_bytes
        self._pieces = [(0, length_bytes)]

    def take(self, taker: Taker, length_bytes: int, *, high: bool = False, above: int = 0) -> bool:
        """Let `taker` have the first `length_bytes` free in one piece from `above` on, or the last.

        Returns:
            False if no piece is so long.
        """
        for i in range(len(self._pieces) - 1, -1, -1) if high else range(len(self._pieces)):
            start, stop = self._pieces[i]
            lowest = max(start, above)
            if stop - lowest < length_bytes:
                continue
            first, last = (stop - length_bytes, stop) if high else (lowest, lowest + length_bytes)
            rest = [piece for piece in ((start, first), (last, stop)) if piece[0] < piece[1]]
            parts = (AddressRange(first, last),)
            taker.parts = parts
            self._pieces[i : i + 1] = rest
            self.total_bytes -= length_bytes
            return True
        return False

    def take_apart(self, taker: Taker, length_bytes: int) -> None:
        """As `take`, in as few pieces as it takes: the longest. At most `total_bytes`."""
        parts, left_bytes = [], length_bytes
        for start, stop in sorted(self._pieces, key=lambda piece: piece[0] - piece[1]):
            parts.append(AddressRange(start, min(stop, start + left_bytes)))
            left_bytes -= parts[-1].stop - start
            if not left_bytes:
                break
        taken = {part.start: part.stop for part in parts}
        pieces = [(taken.get(start, start), stop) for start, stop in self._pieces]
        pieces = [piece for piece in pieces if piece[0] < piece[1]]
        taker.parts = parts
        self._pieces = pieces
        self.total_bytes -= length_bytes

    def put(self, part: AddressRange) -> None:
        """Add what was taken, joined with its free neighbours. Nothing happens if it is here already."""
        if not part.taken:
            return
        start, stop = part.start, part.stop
        i = j = bisect.bisect_left(self._pieces, (start, stop))
        if i > 0 and self._pieces[i - 1][1] == start:
            i -= 1
            start = self._pieces[i][0]
        if j < len(self._pieces) and self._pieces[j][0] == stop:
            stop = self._pieces[j][1]
            j += 1
        joined = [(start, stop)]
        part.taken = False
        self._pieces[i:j] = joined
        self.total_bytes += part.stop - part.start

    def last_taken(self, length_bytes: int) -> int:
        """Return the stop of the last part that is taken, of a range that is `length_bytes` long."""
        return self._pieces[-1][0] if self._pieces and self._pieces[-1][1] == length_bytes else length_bytes
