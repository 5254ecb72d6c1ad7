"""`ExpertOrder`: which experts come next into one memory, and which of them go first. See [Note: experts]."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from swapper.storage.access_order import NEVER, Use

__all__ = ["ExpertOrder"]


class ExpertOrder:
    """An `Order` of records that are used in none: what a router has chosen comes, what was used least goes.

    Args:
        lengths_bytes: of the records, by number.
    """

    def __init__(self, lengths_bytes: Sequence[int]) -> None:
        self._lengths_bytes = lengths_bytes
        self._needed_bytes = 0  # of the record that room is made for
        self._wanted: dict[int, int] = {}  # what the layer that runs will use, in order, each with its place in it
        self._uses: dict[int, tuple[int, int]] = {}  # how often each was used, and when last
        self._time = 0
        self._held: set[int] = set()
        self._ranked: list[tuple[int, int, int]] = []  # uses and number of what is held and may go, the fewest first

    def expect(self, uses: Iterable[Use]) -> None:
        """See `Order`."""
        self._wanted = {use.number: place for place, use in enumerate(uses)}

    def note(self, use: Use) -> None:
        """`use` happens now."""
        self._time += 1
        rank = self._rank_of(use.number)
        is_ranked = self._unrank(rank)
        self._uses[use.number] = (rank[0] + 1, self._time)
        if is_ranked:
            insort(self._ranked, self._rank_of(use.number))
        self._wanted.pop(use.number, None)
        self._needed_bytes = self._lengths_bytes[use.number]

    def distance(self, number: int) -> int:
        """0 of what is wanted, which is not given up for what is wanted after it; `NEVER` of all else."""
        return 0 if number in self._wanted else NEVER

    def hold(self, number: int, *, fixed: bool = False) -> None:
        """See `Order`."""
        self.drop(number)
        self._held.add(number)
        if not fixed:
            insort(self._ranked, self._rank_of(number))

    def drop(self, number: int) -> None:
        """See `Order`."""
        self._held.discard(number)
        self._unrank(self._rank_of(number))

    def missing(self) -> int | None:
        """The first that is wanted and not held."""
        number = next((number for number in self._wanted if number not in self._held), None)
        if number is not None:
            self._needed_bytes = self._lengths_bytes[number]
        return number

    def worth(self) -> int:
        """0: see `distance`."""
        return 0

    def last_needed(self) -> Iterator[int]:
        """Yield what is not wanted, the least used first, and of those used equally often the one used longest ago.

        Before all others those that leave a piece of memory that just fits. Then what is wanted, the last one first.
        """
        for fits in (True, False):
            for _, _, number in self._ranked:
                if number not in self._wanted and (self._lengths_bytes[number] == self._needed_bytes) is fits:
                    yield number
        held = {number for _, _, number in self._ranked if number in self._wanted}
        yield from sorted(held, key=self._wanted.__getitem__, reverse=True)

    def _rank_of(self, number: int) -> tuple[int, int, int]:
        return (*self._uses.get(number, (0, 0)), number)

    def _unrank(self, rank: tuple[int, int, int]) -> bool:
        i = bisect_left(self._ranked, rank)
        if i < len(self._ranked) and self._ranked[i] == rank:
            del self._ranked[i]
            return True
        return False
