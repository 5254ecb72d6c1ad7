"""Annexes: directories on drives that not all ranks see, which have what is large of a checkpoint.

[Note: annexes] With `annex=DIR` the directory of a checkpoint has its index and what is small, and all ranks see it.
What a rank links or writes goes to a directory of its own below DIR, which is on its own drive. The index names it by
host, path and a random token that is in the annex too, so that whatever else has its path is told. Names of files are
those that they would have beside the index.

    an annex has           so it is
    MARK                   being written, or removed; locked while its writer lives. It was never complete: a sweep
                           removes it
    UNPUBLISHED            complete and synced, and rank 0 has not said yet that the checkpoint has its name
    neither                part of a checkpoint

The last step of a save is that of rank 0: the checkpoint gets its name. Who dies before it leaves the checkpoint before
whole, and an annex that is not named by any. Who dies between that and the removal of UNPUBLISHED leaves an annex that
looks the same, and is needed. So an annex that was complete is removed only where it is known that nothing names it: by
those that save, when rank 0 says so; with the checkpoint that names it, when that is replaced or removed; with a
leftover of a save that names it, which never got a name, or has lost it to another. A sweep that finds the checkpoint
where it was to be looks there. Where it is not, it may have been moved: then the annex is left, and the log says so.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel

from swapper.checkpoint.index import SavedAnnex, glance, look_at
from swapper.errors import SwapError, SwapIOError, path_given, system_errors
from swapper.process.warnings import warn_once
from swapper.storage.atomic import MARK, MarkedDirectory, all_at_once, locked_directory, remove_tree, sync_path
from swapper.storage.runs import boot_id, run_directory_of

__all__ = [
    "Adopt",
    "AnnexPaths",
    "NewAnnex",
    "OldAnnex",
    "Outcome",
    "annexes_of",
    "host",
    "remove_annexes",
    "remove_files",
    "report_left",
]

log = logging.getLogger(__name__)

ANNEX = "annex.json"
UNPUBLISHED = ".swapper-unpublished"
_NAME = re.compile(r".+\.annex-[0-9a-f]{16}")
_RECORD = re.compile(r".+-[0-9]{5}\.safetensors")
_MANIFEST_BYTES_MAX = 1 << 16
_SHOWN = 4
"""Annexes that an error names."""


class _Manifest(BaseModel):
    """The content of `ANNEX`: the checkpoint that it is of, by the path that its writer was given."""

    format: Literal["swapper annex"]
    token: str
    host: str
    boot: str
    checkpoint: str


def host() -> str:
    """The name of this host."""
    return socket.gethostname()


def _manifest_of(path: Path) -> _Manifest | None:
    """Of an annex; None if there is none that can be read."""
    try:
        with open(path / ANNEX, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return _Manifest.model_validate_json(file.read(_MANIFEST_BYTES_MAX))
    except (OSError, ValueError):
        return None


def _token_of(path: Path) -> str | None:
    """The token of the annex at `path`; None if there is no annex, or only one that is not complete."""
    return None if os.path.lexists(path / MARK) else _manifest_token(path)


class Outcome(enum.Enum):
    """The outcome of a checkpoint whose files were complete."""

    PUBLISHED = "published"
    WITHDRAWN = "withdrawn"
    """It is known that it did not get its name, and never will."""
    UNKNOWN = "unknown"


class NewAnnex:
    """An annex that is being written. `conclude` tells it what became of its checkpoint; `close` ends it.

    Args:
        parent: the directory in which it is made, and which is made if it is not there. Swept first.
        checkpoint: absolute; the directory that is going to name it.

    Attributes:
        saved: what the index says of it.
        path: of the directory.

    Raises:
        SwapError: `parent` is in a checkpoint, or in the directory of a run.
        SwapIOError: nothing can be written there.
    """

    def __init__(self, parent: str | os.PathLike[str], checkpoint: Path) -> None:
        name = path_given("annex", parent)
        with system_errors("find", name):
            above = Path(os.path.abspath(name))
        _check_outside(above, checkpoint)
        with system_errors("create", above):
            above.mkdir(parents=True, exist_ok=True)
        _sweep(above)
        self._new = MarkedDirectory(lambda: above / f"{checkpoint.name}.annex-{secrets.token_hex(8)}")
        self._is_complete = False
        self.path = self._new.path
        self.saved = SavedAnnex(host=host(), path=str(self.path), token=secrets.token_hex(16))
        manifest = _Manifest(
            format="swapper annex",
            token=self.saved.token,
            host=self.saved.host,
            boot=boot_id(),
            checkpoint=str(checkpoint),
        )
        try:
            with system_errors("write", self.path / ANNEX):
                (self.path / ANNEX).write_text(json.dumps(manifest.model_dump(), indent=1))
        except BaseException:
            self._new.close()
            raise

    def complete(self) -> None:
        """Have all of it survive a loss of power, and no sweep remove it from now on. Its files are synced already.

        Raises:
            SwapIOError: the drive failed.
        """
        sync_path(self.path / ANNEX)
        with system_errors("publish", self.path):
            os.rename(self.path / MARK, self.path / UNPUBLISHED)
        all_at_once([partial(sync_path, self.path), partial(sync_path, self.path.parent)])
        # Another rank may be told that all are complete before this one: so from here on only `conclude` removes it.
        self._new.keep()
        self._is_complete = True

    def conclude(self, outcome: Outcome) -> None:
        """Publish, remove or leave the annex, as its checkpoint did. Never raises for what cannot be removed."""
        if not self._is_complete:
            return
        self._is_complete = False
        try:
            if outcome is Outcome.PUBLISHED:
                (self.path / UNPUBLISHED).unlink()
            elif outcome is Outcome.WITHDRAWN:
                remove_tree(self.path, last=ANNEX)
            else:
                log.warning("%s is left: %s", self.path, _IN_DOUBT)
        except OSError as error:
            log.warning(
                "could not mark or remove %s, of a checkpoint that is %s: %s", self.path, outcome.value, str(error)
            )

    def close(self) -> None:
        """Remove it, unless it was complete. Idempotent."""
        self.conclude(Outcome.UNKNOWN)
        self._new.close()


_IN_DOUBT = (
    "the save that made it ended before it was known whether its checkpoint got its name; if no checkpoint names it, "
    "remove it"
)


def _check_outside(above: Path, checkpoint: Path) -> None:
    """Refuse places whose content goes, or is replaced, with something else."""
    real = Path(os.path.realpath(above))
    for each in (real, *real.parents):
        if each == Path(os.path.realpath(checkpoint)) or glance(each) is not None:
            raise SwapError(
                f"annex: {above} is in the checkpoint {each}, which is replaced and removed as a whole; name a "
                "directory outside of it"
            )
    if (run := run_directory_of(above)) is not None:
        raise SwapError(f"annex: {above} is in {run}, which is deleted with its run; name another directory")


# --- Removal ---------------------------------------------------------------------------------------------------------


Adopt = Callable[[Path], bool]
"""Takes the file of a record that would be removed, and returns True, if it is of use."""


class OldAnnex(NamedTuple):
    """An annex of a checkpoint that is gone, or going.

    Attributes:
        number: in that checkpoint.
        saved: what its index says of it.
        files: that are its.
    """

    number: int
    saved: SavedAnnex
    files: frozenset[str]


def annexes_of(directory: Path) -> list[OldAnnex]:
    """Return the annexes of a checkpoint; none if `directory` is no checkpoint.

    Raises:
        OSError: its index cannot be read, so nobody would know of them.
    """
    found = None if directory.is_symlink() else look_at(directory)
    if found is None:
        return []
    return [OldAnnex(number, saved, found.files_in(number)) for number, saved in enumerate(found.annexes)]


def remove_annexes(annexes: Iterable[OldAnnex], adopt: Adopt = lambda _: False) -> list[OldAnnex]:
    """Remove those that this process can reach. Never raises for what cannot be removed.

    Returns:
        Those that are left, for a process that can reach them.
    """
    left = []
    for each in annexes:
        path = Path(each.saved.path)
        try:
            with locked_directory(path) as is_mine:
                if not is_mine or not _NAME.fullmatch(path.name) or _manifest_token(path) != each.saved.token:
                    left.append(each)
                elif others := sorted({*os.listdir(path)} - each.files - {ANNEX, MARK, UNPUBLISHED}):
                    log.warning(
                        "%s is left, though its checkpoint is gone: it has files that are not the checkpoint's: %s",
                        path,
                        ", ".join(others[:5]),
                    )
                else:
                    remove_files(path, adopt, last=ANNEX)
        except (FileNotFoundError, NotADirectoryError):
            left.append(each)
        except OSError as error:
            log.warning("%s is left, though its checkpoint is gone: %s", path, str(error))
    return left


def remove_files(directory: Path, adopt: Adopt, *, last: str) -> None:
    """Remove a directory with files of a checkpoint, of which `adopt` may take the records."""
    remove_tree(directory, lambda file: _RECORD.fullmatch(file.name) is not None and adopt(file), last=last)


def report_left(annexes: Iterable[OldAnnex]) -> None:
    """Log what could not be removed."""
    for each in annexes:
        log.warning(
            "%s of host %s is left, though its checkpoint is gone: it is not reached here; if it is there, remove it",
            each.saved.path,
            each.saved.host,
        )


def _manifest_token(path: Path) -> str | None:
    manifest = _manifest_of(path)
    return None if manifest is None else manifest.token


def _sweep(above: Path) -> None:
    """Remove annexes in a directory that were never complete, whose writers are dead. Never raises for what cannot be.

    Those that were complete are marked as published if their checkpoint names them, and left in any case.
    """
    moved = []
    try:
        paths = [above / name for name in sorted(os.listdir(above)) if _NAME.fullmatch(name)]
    except OSError:
        return
    for path in paths:
        try:
            with contextlib.ExitStack() as stack:
                if not path.is_symlink() and path.is_dir() and stack.enter_context(locked_directory(path)):
                    moved += [path.name] if _judge(path) else []
        except OSError as error:
            log.warning("could not look at %s: %s", path, str(error))
    if moved:
        warn_once(
            log,
            f"{above} has annexes of checkpoints that are not where they were saved, and that are needed if those were "
            f"moved: {', '.join(moved)}; if they were removed, remove these too",
        )


def _judge(path: Path) -> bool:
    """Remove an annex whose writer is dead if it was never complete.

    Returns:
        True if it is part of a checkpoint that is not where it was saved.
    """
    inside = {*os.listdir(path)}
    manifest = _manifest_of(path)
    if not inside:
        path.rmdir()
    elif MARK in inside:
        if manifest is None:
            is_ours = inside <= {MARK, ANNEX}
        else:
            is_ours = manifest.boot == boot_id() != "" or manifest.host == host()
        if not is_ours or (manifest is not None and _is_named(manifest)):
            log.warning("%s is left: it is unfinished, and not known to be of a process of this host that died", path)
            return False
        remove_tree(path, last=ANNEX)
        log.info("removed %s: what a save that was killed had left", path)
    elif manifest is None:
        return False  # Of somebody else.
    elif _is_named(manifest):
        (path / UNPUBLISHED).unlink(missing_ok=True)
    elif UNPUBLISHED in inside:
        log.warning("%s is left: %s. It was to be part of %s", path, _IN_DOUBT, manifest.checkpoint)
    else:
        return True
    return False


def _is_named(manifest: _Manifest) -> bool:
    """True if the checkpoint is where it was saved."""
    found = glance(Path(manifest.checkpoint))
    return found is not None and any(each.token == manifest.token for each in found.annexes)


# --- Where they are now ----------------------------------------------------------------------------------------------


class AnnexPaths:
    """The paths of a checkpoint's annexes, as this process sees them. Looked up once.

    Args:
        directory: of the checkpoint, for messages.
        saved: its annexes.
        given: directories that have annexes now, or are annexes; before the paths at which they were saved.
        unfinished: take those that are being written, too.
    """

    def __init__(
        self, directory: Path, saved: Sequence[SavedAnnex], given: Sequence[Path] = (), *, unfinished: bool = False
    ) -> None:
        self._directory, self._saved, self._given = directory, saved, given
        self._found = dict(_by_token(given)) if saved else {}
        find = _manifest_token if unfinished else _token_of
        for each in saved:
            if each.token not in self._found and find(Path(each.path)) == each.token:
                self._found[each.token] = Path(each.path)

    def path(self, number: int) -> Path | None:
        """The directory of an annex; None if it is not to be found.

        Raises:
            SwapError: there is no such annex.
        """
        if number >= len(self._saved):
            raise SwapError(f"{self._directory} is damaged: its index refers to annex {number}, which it does not have")
        return self._found.get(self._saved[number].token)

    def refuse(self, numbers: Iterable[int]) -> None:
        """Raise if one of some annexes is not to be found.

        Raises:
            SwapIOError: it names each, and what to do.
        """
        lost = [self._saved[number] for number in sorted({*numbers}) if self.path(number) is None]
        if not lost:
            return
        named = "; ".join(f"{each.path} of host {each.host} ({self._why(each)})" for each in lost[:_SHOWN])
        rest = f"; and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        given = f"not in {', '.join(map(str, self._given))} either; " if self._given else ""
        raise SwapIOError(
            errno.ENOENT,
            "open",
            self._directory,
            detail=f"it has files in annexes that {host()} does not reach: {named}{rest}; {given}mount "
            "or copy each of these directories here, whole, and give the directory that it is in as annex=DIR (on the "
            "command line --annex DIR), unless it has the same path here",
        )

    @staticmethod
    def _why(saved: SavedAnnex) -> str:
        path = Path(saved.path)
        if not os.path.lexists(path):
            return "nothing has that path here"
        return "what has that path here is unfinished" if os.path.lexists(path / MARK) else "another one is there"


def _by_token(given: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    for above in given:
        below: list[Path] = []
        with contextlib.suppress(OSError):
            below = [above / name for name in sorted(os.listdir(above))]
        for path in (above, *below):
            if (token := _token_of(path)) is not None:
                yield token, path
