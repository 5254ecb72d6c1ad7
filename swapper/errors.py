"""The errors swapper raises.

A user's mistake is a `ConfigError`, the environment's failure a `SwapIOError`; both are `SwapError`s.
A bug in swapper itself is an `AssertionError`.
"""

from __future__ import annotations

import contextlib
import copy
import errno as _errno
import os
from collections.abc import Iterator

__all__ = ["ConfigError", "SwapError", "SwapIOError", "is_memory_shortage", "path_given", "system_errors"]

_CAUSES = {
    _errno.ENOSPC: "the drive is full: free some space or name another `nvme_path`",
    _errno.EDQUOT: "the disk quota is used up: raise it or name another `nvme_path`",
    _errno.EFBIG: "the file would be larger than the file system or `ulimit -f` allows",
    _errno.EIO: "the drive reported a failure: look at `dmesg` and the drive's SMART log",
    _errno.EROFS: "the file system is mounted read-only",
    _errno.EACCES: "this user may not do that there: check owner and mode of the file and its directory",
    _errno.EPERM: "the operation is not permitted here",
    _errno.ENOENT: "the path does not exist, or was removed while in use",
    _errno.EISDIR: "the path is a directory, a file was expected",
    _errno.EMFILE: "too many open files: raise `ulimit -n` or make `bucket_bytes` larger",
    _errno.EINVAL: "the file system refused the request: O_DIRECT may be unsupported there",
    _errno.ENODATA: "the file ended before the bytes asked for: it was truncated or never written",
    _errno.EFAULT: "the memory may not be used so: nothing can be read into a read-only mapping; give a clone of it",
    _errno.ENOMEM: "the kernel had no memory for the request",
}
_CAUSE_OF_COPY = "the accelerator reported a failure: load a checkpoint in a new process, and look at the driver's log"


class SwapError(Exception):
    """Base of every error that swapper raises on purpose."""


class ConfigError(SwapError, ValueError):
    """A setting, or a combination of settings, that cannot work. The message names the field and the fix."""


class SwapIOError(SwapError, OSError):
    """A transfer or file operation failed.

    Args:
        errno: the system's error number; `ENODATA` where a file ended too early.
        operation: what was tried: "read", "write", "open", "preallocate", ...
        path: the file it was tried on.
        offset_bytes: where in the file, -1 where that has no meaning.
        length_bytes: how many bytes, -1 where that has no meaning.
        detail: one more sentence for the message; "" for none.

    Attributes:
        step: the optimizer step it struck in, counted from 0; None outside a step.
        buckets_stepped: how many buckets of that step were complete.
    """

    operation: str
    path: str
    offset_bytes: int
    length_bytes: int
    detail: str
    step: int | None = None
    buckets_stepped: int | None = None

    def __init__(
        self,
        errno: int,
        operation: str,
        path: str | os.PathLike[str] = "",
        offset_bytes: int = -1,
        length_bytes: int = -1,
        detail: str = "",
    ) -> None:
        self.operation = operation
        self.path = os.fspath(path)
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.detail = detail
        super().__init__(errno, self._message(errno), self.path or None)

    def _message(self, errno: int) -> str:
        where = "" if self.offset_bytes < 0 else f" at byte {self.offset_bytes}"
        size = "" if self.length_bytes < 0 else f" of {self.length_bytes} bytes"
        text = f"{self.operation}{size}{where} failed: {os.strerror(errno)}"
        for more in (_CAUSE_OF_COPY if self.operation == "copy" else _CAUSES.get(errno, ""), self.detail):
            if more:
                text += f"; {more}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.errno, self.operation, self.path, self.offset_bytes, self.length_bytes, self.detail)
        return (type(self), arguments)


def renewed(
    error: SwapIOError, *, operation: str = "", path: str | os.PathLike[str] = "", detail: str = ""
) -> SwapIOError:
    """The same failure as a new exception: one that was raised keeps the traceback of where that was.

    Args:
        operation, path, detail: replace those of `error` where they are not empty.
    """
    new = copy.copy(error)  # Of the same class, and without what the first one got since it was made.
    new.operation = operation or error.operation
    new.path = os.fspath(path or error.path)
    new.detail = detail or error.detail
    number = error.errno or _errno.EIO
    OSError.__init__(new, number, new._message(number), new.path or None)
    return new


def is_memory_shortage(error: BaseException) -> bool:
    """True if `error` is of an allocation that failed, on the host or on a device: a failure of nothing else.

    Python has a class for it, torch one for devices; its allocator on the host raises a `RuntimeError`.
    """
    texts = ("allocate memory", "out of memory", "bad_alloc")
    if isinstance(error, OSError):
        return error.errno == _errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def show(value: object) -> str:
    """`value` as the user may have written it: one line, and not a page long."""
    text = repr(str(value)) if isinstance(value, os.PathLike) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def path_given(name: str, path: object) -> str:
    """`path`, which the user gave as `name`, as a string.

    Raises:
        ConfigError: it is neither a string nor path-like.
    """
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name}: a {type(path).__name__} is not a path; give a string or a pathlib.Path") from None


@contextlib.contextmanager
def system_errors(
    operation: str, path: str | os.PathLike[str], offset_bytes: int = -1, length_bytes: int = -1
) -> Iterator[None]:
    """Let what the system refuses be a `SwapIOError` with these arguments."""
    try:
        yield
    except SwapError:
        raise
    except OSError as error:
        raise SwapIOError(error.errno or _errno.EIO, operation, path, offset_bytes, length_bytes) from error
