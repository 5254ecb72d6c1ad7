"""Names and locks of files that are being written, and the removal of those whose writer is dead.

[Note: leftovers] A process that is killed may leave a file under a temporary name. While one is written its writer
holds an exclusive flock(2) on it, from before it has the name or at once after; so the next one to write into that
directory knows by the lock whether it is a leftover. The name says on which host it was made: on a network file system,
locks of other hosts need not be seen, and their files are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import socket
import stat

__all__ = ["claim", "new_name", "remove_leftovers"]


def _prefix() -> str:
    return f".swapper-{hashlib.blake2s(os.fsencode(socket.gethostname()), digest_size=4).hexdigest()}-"


def new_name() -> str:
    """A name that nobody has."""
    return f"{_prefix()}{secrets.token_hex(8)}.tmp"


def claim(descriptor: int, name: str | None, directory: int) -> bool:
    """Lock a file that is going to be written, until its descriptor is closed.

    Args:
        descriptor: of the file, opened for writing.
        name: of the file; None if it has none yet.
        directory: descriptor of that which it is in.

    Returns:
        False if another process has just taken it for a leftover: it is gone, or will be.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # There are no locks on this file system: nobody gets one, and nothing is removed.
    try:
        return name is None or os.path.samestat(os.stat(name, dir_fd=directory), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_leftovers(directory: int) -> None:
    """Remove what dead processes of this host left. What cannot be looked at or removed is left; never raises OSError.

    Args:
        directory: descriptor of the directory.
    """
    pattern = re.compile(re.escape(_prefix()) + r"[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):
        for name in filter(pattern.fullmatch, os.listdir(directory)):
            with contextlib.suppress(OSError):
                _remove_if_dead(name, directory)


def _remove_if_dead(name: str, directory: int) -> None:
    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)

    # For writing: on NFS an exclusive lock needs that.
    with open(name, "r+b", buffering=0, opener=opener) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.unlink(name, dir_fd=directory)
