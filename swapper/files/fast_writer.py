"""`FastWriter`: a file object that writes through the engine, for `torch.save`."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from swapper.errors import SwapError
from swapper.files.file_buffers import POOL_BYTES
from swapper.files.output_file import OutputFile
from swapper.io.handle import AsyncIOHandle

__all__ = ["FastWriter"]

_END_BYTES = 22
"""Length of the end record of a ZIP file without a comment."""

log = logging.getLogger(__name__)


class FastWriter:
    """Write a file once, from start to end, through the engine: `torch.save(obj, FastWriter(path))`.

    The file appears under its name only when it is complete and synced. It is complete:

    - In a `with` block: at its end, unless by an exception.
    - `torch.save(obj, FastWriter(path))`: before `torch.save` returns; what it raises, a full drive included, leaves
      nothing. So for the ZIP format, which is torch's default, nothing else is to be called.
    - Otherwise at `close()`, unless an exception is being handled that was not when this object was made.

    An object that is dropped before is discarded, with a `ResourceWarning` and an error in the log. Not thread-safe.

    A failure of `write` is raised later, because C++ code that calls it cannot handle exceptions: by `flush()`, which
    `torch.save` ends with, and by `close()`.

    Args:
        path: of the file. One that exists is replaced and keeps its mode; a symbolic link is followed.
        pool_bytes: page-locked memory to write from, at least 256 KiB.
        handle: engine to write with, left open; None for one of its own.

    Raises:
        ConfigError: `pool_bytes` is too small, or `path` is no path.
        SwapIOError: the directory is not there or cannot be written, or `path` is not a regular file.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, pool_bytes: int = POOL_BYTES, handle: AsyncIOHandle | None = None
    ) -> None:
        self._output: OutputFile | None = None
        self._output = OutputFile(path, pool_bytes=pool_bytes, handle=handle)
        self.name = self._output.path
        self._pid = os.getpid()
        self._handled = sys.exc_info()[1]
        self._in_block = False
        self._tail = b""
        self._failure: BaseException | None = None
        self._spoiled = False

    def __repr__(self) -> str:
        return f"FastWriter({self.name!r}{', closed' if self.closed else ''})"

    @property
    def closed(self) -> bool:
        """True if it takes no more bytes: it is complete, or was discarded."""
        return self._output is None

    def writable(self) -> bool:
        """True if it takes more bytes."""
        return not self.closed

    def tell(self) -> int:
        """Bytes written so far.

        Raises:
            ValueError: it is closed.
        """
        return self._opened().tell()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write bytes behind those before. `flush` and `close` raise its failure.

        Returns:
            The length of `data`.

        Raises:
            ValueError: it is closed.
            TypeError: `data` has no bytes, as a str. At once, as by any file of Python; nothing is written.
        """
        output = self._opened()
        length_bytes = memoryview(data).nbytes
        if self._failure is None:
            try:
                output.append(data)
                end = memoryview(data).cast("B")[-_END_BYTES:] if length_bytes else b""
                self._tail = (self._tail + bytes(end))[-_END_BYTES:]
            except BaseException as error:  # Ctrl-C too.
                self._failure = error
        return length_bytes

    def flush(self) -> None:
        """Outside of a `with` block: publish the file if what was written is a whole ZIP file, as by `torch.save`.

        Raises:
            SwapIOError: a write has failed; nothing is left of the file.
        """
        if self._output is None:
            return
        if self._failure is not None:
            self._fail()
        if self._is_raising():
            self._spoiled = True
        elif not self._in_block and self._tail.startswith(b"PK\5\6"):
            self._commit()

    def close(self) -> None:
        """Publish the file, complete and synced; or discard it, if an exception is on its way. Idempotent.

        Raises:
            SwapIOError: a write has failed; nothing is left of the file.
            SwapError: an exception had come while it was written, so it is not published.
        """
        if self._output is None:
            return
        if self._failure is not None:
            self._fail()
        if self._is_raising():
            self.discard()
        elif self._spoiled:
            self.discard()
            raise SwapError(f"{self.name}: what wrote it had failed, so it was not published")
        else:
            self._commit()

    def discard(self) -> None:
        """Remove the unfinished file. Idempotent."""
        output, self._output = self._output, None
        self._handled = None
        if output is not None:
            output.discard()

    def __enter__(self) -> FastWriter:
        self._in_block = True
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        if exc_type is not None:
            self.discard()
        else:
            self.close()

    def __del__(self) -> None:
        if self._output is None or os.getpid() != self._pid:
            return
        quiet = self._spoiled
        self.discard()
        if not quiet:
            why = f": {self._failure}" if self._failure is not None else "; it was never closed"
            log.error("%s was not written%s", self.name, why)
            warnings.warn(f"{self.name} was not written{why}", ResourceWarning, stacklevel=2, source=self)

    def _opened(self) -> OutputFile:
        if self._output is None:
            raise ValueError(f"the file is closed: {self.name}")
        return self._output

    def _is_raising(self) -> bool:
        """True if an exception is being handled that was not when this object was made."""
        handled = sys.exc_info()[1]
        return handled is not None and handled is not self._handled

    def _commit(self) -> None:
        try:
            self._opened().commit()
        finally:
            self.discard()

    def _fail(self) -> None:
        failure = self._failure
        assert failure is not None
        self._spoiled = True
        self.discard()
        raise failure
