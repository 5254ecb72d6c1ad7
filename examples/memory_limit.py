"""Run a command with a hard limit of memory: in a cgroup where that is allowed, else under a resource limit.

A cgroup counts all memory of the command: its own, shared, and the page cache that it fills. Beyond the limit the
kernel ends it. Where no cgroup can be made, `RLIMIT_DATA` bounds the private writable memory of each process of the
command, and what asks for more is refused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

__all__ = ["Limit", "Outcome", "limit_memory"]

_PREFIX = "swapper-example-"
_END_WITHIN_S = 60
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        returncode: negative for a signal.
        peak_bytes: the most that the cgroup held, page cache included; 0 where that is not known.
        over_limit: the kernel ended it, because it wanted more.
    """

    returncode: int
    peak_bytes: int
    over_limit: bool


@dataclass(frozen=True)
class _Group:
    """A memory cgroup of either version."""

    directory: Path
    peak_file: str
    kills_file: str

    def read(self, name: str) -> str:
        try:
            return (self.directory / name).read_text()
        except OSError:  # An older kernel does not have it.
            return ""

    def peak_bytes(self) -> int:
        return int(self.read(self.peak_file) or 0)

    def kills(self) -> int:
        fields = dict(line.split() for line in self.read(self.kills_file).splitlines())
        return int(fields.get("oom_kill", 0))


class Limit:
    """A hard limit of memory, from `limit_memory`.

    Attributes:
        limit_bytes: the limit.
        how: by what, for people.
        why_not: why it is not a cgroup; "" if it is.
    """

    def __init__(self, limit_bytes: int, group: _Group | None, why_not: str) -> None:
        self.limit_bytes = limit_bytes
        self.how = f"cgroup {group.directory}" if group else "RLIMIT_DATA"
        self.why_not = why_not
        self._group = group

    def run(self, command: Sequence[str]) -> Outcome:
        """Run `command` under the limit, and wait for its end. SIGINT, SIGTERM and SIGHUP end it first, as SIGTERM."""
        if self._group is not None:
            inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._group.directory / "cgroup.procs")]
        else:
            inside = ["sh", "-c", 'ulimit -d "$0" && exec "$@"', str(self.limit_bytes // 1024)]
        # In a session of its own a Ctrl-C reaches only this process, which then ends the other.
        with subprocess.Popen([*inside, *command], start_new_session=True) as process:
            try:
                process.wait()
            except BaseException:
                process.terminate()
                try:
                    process.wait(_END_WITHIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise
        if self._group is None:
            return Outcome(process.returncode, 0, False)
        return Outcome(process.returncode, self._group.peak_bytes(), self._group.kills() > 0)


@contextlib.contextmanager
def limit_memory(limit_bytes: int, *, by: str = "auto") -> Iterator[Limit]:
    """Within it commands can be run under the limit. The cgroup goes on every way out of it.

    A signal that ends programs is raised as SystemExit meanwhile, so that there is a way out.

    Args:
        limit_bytes: more than 0.
        by: "cgroup", "rlimit", or "auto" for the first that can be had.

    Raises:
        OSError: `by` is "cgroup", and none can be made.
    """
    former = {number: signal.signal(number, _stop) for number in _SIGNALS}
    group, why_not = None, "asked for"
    try:
        if by != "rlimit":
            try:
                with _signals_later():
                    group = _make_group(limit_bytes)
            except OSError as error:
                if by == "cgroup":
                    raise
                why_not = f"no memory cgroup can be made here: {error}"
        yield Limit(limit_bytes, group, "" if group else why_not)
    finally:
        with _signals_later():
            if group is not None:
                _remove(group.directory)
            for number, handler in former.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Signals that come within it are handled after it."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _make_group(limit_bytes: int) -> _Group:
    """Make a memory cgroup inside that of this process, or as near to it as is allowed."""
    refused: OSError | None = None
    for parent, version in _parents():
        directory = parent / f"{_PREFIX}{os.getpid()}"
        try:
            _remove_stale(parent)
            directory.mkdir()
        except OSError as error:
            refused = refused or error
            continue
        try:
            if version == 1:
                (directory / "memory.limit_in_bytes").write_text(str(limit_bytes))
                _write_if_there(directory / "memory.memsw.limit_in_bytes", str(limit_bytes))
                group = _Group(directory, "memory.max_usage_in_bytes", "memory.oom_control")
            else:
                (directory / "memory.max").write_text(str(limit_bytes))
                _write_if_there(directory / "memory.swap.max", "0")
                group = _Group(directory, "memory.peak", "memory.events")
            join = ["sh", "-c", 'echo $$ > "$0"', str(directory / "cgroup.procs")]
            tried = subprocess.run(join, stderr=subprocess.PIPE, text=True)
            if tried.returncode != 0:
                raise OSError(tried.stderr.strip())
            return group
        except BaseException as error:
            _remove(directory)
            if not isinstance(error, OSError):
                raise
            refused = refused or error
    raise refused or OSError("the memory controller is not mounted")


def _parents() -> Iterator[tuple[Path, int]]:
    """Where a memory cgroup may be made, the nearest first, and the version of its interface."""
    mounts: dict[int, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2":
            mounts.setdefault(2, Path(fields.split()[4]))
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts.setdefault(1, Path(fields.split()[4]))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" else 1 if "memory" in controllers.split(",") else 0
        if version in mounts:
            own = mounts[version] / path.lstrip("/")
            inside = [parent for parent in own.parents if parent.is_relative_to(mounts[version])]
            for parent in (own, *inside):
                if parent.is_dir() and (version == 1 or "memory" in _controllers(parent)):
                    yield parent, version


def _controllers(group: Path) -> list[str]:
    """What a group of version 2 gives to those inside it; one with processes of its own gives nothing."""
    return (group / "cgroup.subtree_control").read_text().split()


def _write_if_there(file: Path, text: str) -> None:
    if file.exists():  # The kernel may have been built, or started, without limits of swap.
        file.write_text(text)


def _remove(group: Path) -> None:
    """Remove an empty cgroup: those in it have ended, though the kernel may still be at it."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
    print(f"could not remove {group}: processes are left in it", file=sys.stderr)


def _remove_stale(parent: Path) -> None:
    """Remove what is left of programs that were ended by SIGKILL."""
    for group in parent.glob(f"{_PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(_PREFIX)).exists():
            with contextlib.suppress(OSError):  # Somebody is still in it.
                group.rmdir()
