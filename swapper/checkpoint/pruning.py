"""The removal of old checkpoints after a save: of the one that was replaced, and of those beyond `keep_last`."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swapper.checkpoint.directories import check_replaceable, remove_replaced, set_aside
from swapper.checkpoint.index import glance
from swapper.errors import SwapError, SwapIOError

__all__ = ["After", "siblings"]

log = logging.getLogger(__name__)


def siblings(directory: Path, run: str) -> list[tuple[int, Path]]:
    """The checkpoints of a training beside `directory`, itself among them, in the order in which they were made."""
    found = []
    try:
        beside = list(directory.parent.iterdir())
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "list", directory.parent) from error
    for path in beside:
        whose = None if path.name.startswith(".") else glance(path, len(beside))
        if whose is not None and whose.run == run:
            found.append((whose.sequence, path))
    return sorted(found)


@dataclass
class After:
    """Tidies up when a checkpoint is there."""

    directory: Path
    run: str
    keep_last: int | None
    adopt: Callable[[Path], bool]

    def set_aside(self, replaced: Path | None) -> list[Path]:
        """Give those that are too many temporary names. Never raises for what cannot be.

        Returns:
            What is to be removed, the checkpoint that was replaced too.
        """
        found = [] if replaced is None else [replaced]
        try:
            too_many = siblings(self.directory, self.run)[: -self.keep_last] if self.keep_last else []
        except SwapIOError as error:
            log.warning("old checkpoints are left alone: %s", str(error))
            return found
        for _, path in too_many:
            try:
                check_replaceable(path)
            except SwapError as error:
                log.warning("an old checkpoint is left alone: %s", str(error))
                continue
            if (aside := set_aside(path)) is not None:
                found.append(aside)
        return found

    def tidy(self, replaced: Path | None) -> None:
        """Remove the checkpoint that was replaced, and those that are too many. Never raises for what cannot be."""
        for path in self.set_aside(replaced):
            remove_replaced(path, self.adopt)
