"""Files on a drive, and what is measured on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper.bench.measure import Contestant, Figure, Timing, alternate, drop_from_cache, time_here
from swapper.bench.site import Site
from swapper.bench.witness import Operation

SIZE = 8 << 20


class Scripted(Contestant):
    """Whatever a test wants to be timed."""

    def __init__(
        self,
        path: Path,
        operation: Operation,
        move: Callable[[], bool],
        warm: bool = False,
        name: str = "scripted",
        length_bytes: int = SIZE,
    ) -> None:
        super().__init__(name, operation, [path], length_bytes)
        self.move = move
        self.warm = warm
        self.finished = 0

    def prepare(self) -> None:
        if self.warm:
            self.files[0].read_bytes()
        else:
            super().prepare()

    def run(self) -> Timing:
        return time_here(self.operation, self.move)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def data(drive: Path) -> Path:
    """A file of `SIZE` random bytes."""
    path = drive / "data"
    path.write_bytes(os.urandom(SIZE))
    drop_from_cache(path)
    return path


@pytest.fixture
def site(drive: Path) -> Site:
    directory = drive / "site"
    directory.mkdir()
    return Site(directory, SIZE, "cpu")


def figure_of(contestant: Contestant, rounds: int = 1) -> Figure:
    (figure,) = alternate([contestant], rounds)
    return figure
