"""Transfers between files and device memory by cuFile (GPUDirect Storage), without a copy on the host.

[Note: edges] Only whole pages of the file go by cuFile. It would move the unaligned ends of a transfer too, but by
reading a page, changing a part of it and writing it back, which undoes what another transfer writes to that page
meanwhile. They go through memory of the host, as all device tensors of an `AsyncIOHandle` do: see `swapper.io.bounce`.

[Note: compatibility mode] Where the system lacks a part of GPUDirect Storage, cuFile copies through memory of the host,
by blocking reads and writes, and says nothing. `AsyncIOHandle` does that side by side, so what is known to end there
goes that way, and the log says so. Not all of it can be known: a file system without support looks like one with it.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import logging
import os
import resource
import secrets
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from swapper.errors import SwapError, SwapIOError
from swapper.io import _native, bounce
from swapper.io.devices import is_accelerator
from swapper.io.handle import AsyncIOHandle, File
from swapper.process.warnings import warn_once

__all__ = ["CuFileProbe", "GDSHandle", "probe_cufile"]

LIBRARY_VARIABLE = "SWAPPER_CUFILE_LIBRARY"
"""Environment variable: the file name of the cuFile library. No other is tried."""
COMPATIBILITY_VARIABLE = "SWAPPER_CUFILE_COMPAT"
"""Environment variable: "1" uses cuFile also where it is known to run in its compatibility mode."""

_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
# From cuFile's API reference: `CUFileBoolConfigParameter_t`.
_FORCE_COMPATIBILITY_MODE = 2
_USE_PCI_P2PDMA = 7
_FIRST_VERSION_WITH_P2PDMA = 1130
_PROBED_BYTES = 64 << 10

log = logging.getLogger(__name__)
_lock = threading.RLock()


class CuFileProbe(NamedTuple):
    """The parts of GPUDirect Storage that this machine has.

    Attributes:
        available: whether `GDSHandle` uses it; files and their drives are not asked.
        reason: why not; "" where it does.
        library: file name of the cuFile library; "" if none was found.
        version: of the library, as in "1.15"; "" if it does not say.
        driver_open: whether its driver session could be opened.
        nvidia_fs: version of the kernel module, "?" if it does not say; "" if it is not loaded.
        compatibility_mode: whether cuFile copies through memory of the host here. None: it cannot be told.
        compatibility_reason: what makes it.
    """

    available: bool
    reason: str
    library: str
    version: str
    driver_open: bool
    nvidia_fs: str
    compatibility_mode: bool | None
    compatibility_reason: str


def probe_cufile() -> CuFileProbe:
    """Try to load cuFile and to open its driver. Opened once, it stays so until the process ends."""
    return _find()[1]


def _find() -> tuple[_native.CuFile | None, CuFileProbe]:
    def refused(reason: str, library: str = "", version: str = "") -> CuFileProbe:
        return CuFileProbe(False, reason, library, version, False, nvidia_fs, None, "")

    nvidia_fs = _nvidia_fs()
    named = os.environ.get(LIBRARY_VARIABLE)
    if not named and not torch.cuda.is_available():
        return None, refused("there is no CUDA device")
    try:
        library = _native.load_cufile([named] if named else _library_names())
    except SwapIOError as error:
        return None, refused(f"the cuFile library cannot be loaded: {error.detail}")
    version = f"{library.version // 1000}.{library.version % 1000 // 10}" if library.version else ""
    reason = library.open_driver()
    if reason:
        return None, refused(reason, library.path, version)
    why = _compatibility_mode(library, bool(nvidia_fs))
    allowed = os.environ.get(COMPATIBILITY_VARIABLE) == "1"
    reason = f"cuFile would run in its compatibility mode, because {why}" if why and not allowed else ""
    mode = True if why else False if nvidia_fs else None
    found = CuFileProbe(not reason, reason, library.path, version, True, nvidia_fs, mode, why or "")
    return library if found.available else None, found


def _library_names() -> list[str]:
    """File names in the packages of NVIDIA's that torch depends on, then the system's own."""
    names = []
    found = importlib.util.find_spec("nvidia")
    for directory in found.submodule_search_locations or () if found is not None else ():
        # CUDA 13: nvidia/cu13/lib, CUDA 12: nvidia/cufile/lib. The one for this torch first.
        libraries = [str(path) for path in sorted(Path(directory).glob("*/lib/libcufile.so*"))]
        own = f"/cu{(torch.version.cuda or '').partition('.')[0]}/"
        names += sorted(libraries, key=lambda name: own not in name)
    return [*names, "libcufile.so.0", "libcufile.so"]


def _nvidia_fs() -> str:
    """Version of the kernel module; "" if it is not loaded."""
    if not _NVIDIA_FS.is_dir():
        return ""
    try:
        return (_NVIDIA_FS / "version").read_text().strip().rpartition(" ")[2] or "?"
    except OSError:
        return "?"


def _compatibility_mode(library: _native.CuFile, nvidia_fs: bool) -> str | None:
    """The reason why cuFile is known to run in it. None: it does not, or that cannot be known."""
    if library.parameter(_FORCE_COMPATIBILITY_MODE):
        return "its configuration says so (force_compat_mode)"
    p2pdma = library.parameter(_USE_PCI_P2PDMA)
    if p2pdma is None and 0 < library.version < _FIRST_VERSION_WITH_P2PDMA:
        p2pdma = False
    if not nvidia_fs and p2pdma is False:
        return "the kernel module nvidia-fs is not loaded, and use_pci_p2pdma is not set in its configuration"
    return None


def _warn(reason: str) -> None:
    warn_once(log, f"device tensors go through memory of the host, not by GPUDirect Storage: {reason}")


def _refused(error: SwapIOError) -> bool:
    """Tell if cuFile cannot do this transfer, though another way may; see `cufile_errno` in csrc/cufile.h."""
    if error.errno != errno.EOPNOTSUPP:
        return False
    _warn(error.detail.partition(";")[0])  # Without which part of the transfer it was.
    return True


@dataclass(frozen=True, eq=False)
class _Pin:
    """Device memory that cuFile has mapped, of all handles. It must not be freed before, so its storage is kept."""

    length_bytes: int
    registration: _native.RegisteredMemory
    storage: torch.UntypedStorage


_pinned: weakref.WeakValueDictionary[tuple[int, int], _Pin] = weakref.WeakValueDictionary()
"""By address and length."""
_registered: dict[weakref.ref[File], None] = {}
"""Files that cuFile knows, of all handles, the one used last at the end: it keeps their descriptors open."""
_registrations: weakref.WeakValueDictionary[weakref.ref[File], _native.RegisteredFile] = weakref.WeakValueDictionary()
"""All there are. Transfers in flight hold that of a forgotten file, and cuFile takes no other of it meanwhile."""


def _most_registered() -> int:
    """With two descriptors each, as many files as have a quarter of what the process may open, asked each time."""
    return max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)


def _note_use(file: File) -> None:
    """Have cuFile forget what was used least recently. What is in flight there goes on, and keeps its registration."""
    reference = weakref.ref(file)
    _registered.pop(reference, None)
    _registered[reference] = None
    while len(_registered) > _most_registered():
        oldest = next(iter(_registered))
        del _registered[oldest]
        forgotten = oldest()
        if forgotten is not None:
            forgotten.registration = None


class GDSHandle(AsyncIOHandle):
    """An `AsyncIOHandle` that moves device tensors by cuFile (GPUDirect Storage) where it can.

    The whole pages of a transfer go between the file and the device without a copy on the host, several blocks at a
    time, each on a thread of its own. Everything else is as there: CPU tensors, splitting, failures, order on the
    device. Where there is no cuFile, its driver does not open, or it refuses a file or a kind of memory, device tensors
    go through memory of the host, and so do transfers with checksums; the log gives each reason of cuFile's once.

    cuFile writes a log of its own errors to `cufile.log` in the working directory, unless CUFILE_LOGFILE_PATH names
    another file. After a fork it does not work in the child: handles made there go through memory of the host.

    Args and errors as for `AsyncIOHandle`; `block_bytes`, `queue_depth` and `threads` also hold for cuFile.
    """

    def _set_up(self) -> None:
        super()._set_up()
        self._pins: dict[int, _Pin] = {}
        self._gds: _native.Engine | None = None
        self._library, found = _find()
        self._reason = found.reason
        if self._library is not None:
            if found.compatibility_mode:
                log.warning("cuFile runs in its compatibility mode, because %s", found.compatibility_reason)
            try:
                self._gds = self._new_engine("cufile")
            except SwapIOError as error:
                self._reason = str(error)
        if self._gds is None:
            _warn(self._reason)

    @property
    def gds_available(self) -> bool:
        """True if device tensors go by cuFile. It may still refuse a file, which then goes through the host."""
        return self._gds is not None

    @property
    def gds_reason(self) -> str:
        """The reason why `gds_available` is False; "" where it is True."""
        return self._reason

    def why_not_direct(self, directory: Path, device: torch.device) -> str:
        """Say why files in `directory` and memory of `device` cannot do without memory of the host; "" if they can.

        Found out by writing and reading a file there, which is removed. A later transfer may be refused all the same.

        Raises:
            SwapIOError: the drive failed.
            SwapError: the handle is closed, or this is a forked child.
        """
        if self._gds is None:
            return self._reason
        written, read = (torch.full((_PROBED_BYTES,), value, dtype=torch.uint8, device=device) for value in (0xA5, 0))
        path = directory / f"gds-{secrets.token_hex(4)}.tmp"
        with self.open(path, "rw", exclusive=True) as file:
            os.unlink(path)
            registered = self._try_to_register(file, _ordinal(written))
            if isinstance(registered, str):
                return registered
            for operation, memory in (("write", written), ("read", read)):
                self._bounce.copies(device).reached().synchronize()
                direct = self._direct(operation, file, memory, 0)
                assert direct is not None
                try:
                    direct.start().wait()
                except SwapIOError as error:
                    if error.errno != errno.EOPNOTSUPP:
                        raise
                    return error.detail.partition(";")[0]
        return "" if torch.equal(written, read) else "what cuFile wrote to a file was not what it read from it"

    def pin(self, tensor: torch.Tensor) -> bool:
        """Have cuFile map the memory of a device tensor, so that transfers in it need no copy on the device either.

        Takes milliseconds: for memory that is used again and again. The memory is kept until `unpin` or `close`.
        Nothing happens if it is pinned already.

        Args:
            tensor: contiguous, on a CUDA device. Transfers of parts of it profit too.

        Returns:
            False where it cannot be done: transfers work all the same. The log says why, once.

        Raises:
            ValueError: not such a tensor.
            SwapError: the handle is closed, or this is a forked child.
        """
        address, length_bytes, device = self._memory_of(tensor)
        if self._gds is None or self._library is None or length_bytes == 0:
            return False
        with _lock:
            pin = self._pins.get(address)
            if pin is not None and pin.length_bytes == length_bytes:
                return True
            pin = _pinned.get((address, length_bytes))  # By another handle: cuFile maps memory once for all.
            if pin is None:
                try:
                    registration = self._library.register_memory(address, length_bytes, device)
                except SwapIOError as error:
                    _warn(f"memory cannot be pinned: {error.detail}")
                    return False
                pin = _pinned[address, length_bytes] = _Pin(length_bytes, registration, tensor.untyped_storage())
            self._pins[address] = pin
        return True

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Undo `pin`. Waits for the transfers of device tensors that are in flight.

        Returns:
            False if it is not pinned. Errors as for `pin`.
        """
        address, length_bytes, _ = self._memory_of(tensor)
        with _lock:
            pin = self._pins.get(address)
            if pin is None or pin.length_bytes != length_bytes:
                return False
            del self._pins[address]  # First, so that no transfer uses it from now on.
        self._bounce.wait_quietly()
        return True

    def close(self) -> None:
        """As for `AsyncIOHandle`. Also undoes every `pin`."""
        try:
            super().close()
        except SwapIOError:
            self._close_gds()
            raise
        self._close_gds()

    def _close_gds(self) -> None:
        if os.getpid() != self._ledger.pid or self._ledger.in_flight:
            return
        self._pins.clear()
        if self._gds is not None:
            self._gds.close()

    def _memory_of(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Address, length and ordinal of the device."""
        self._check_process()
        if self.closed:
            raise SwapError("the I/O handle is closed")
        if not is_accelerator(tensor.device) or tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(f"pinning needs a contiguous tensor on a CUDA device, not one on {tensor.device}")
        return tensor.data_ptr(), tensor.nbytes, _ordinal(tensor)

    def _direct(self, operation: str, file: File, tensor: torch.Tensor, offset_bytes: int) -> bounce.Direct | None:
        page = file.alignment_bytes
        start = -offset_bytes % page  # See [Note: edges].
        stop = tensor.nbytes - (offset_bytes + tensor.nbytes) % page
        if self._gds is None or start >= stop:
            return None
        registered = self._try_to_register(file, _ordinal(tensor))
        if isinstance(registered, str):
            _warn(registered)
            return None
        address, length = tensor.data_ptr() + start, stop - start
        pin, base = self._pin_around(address, length)
        arguments = (operation, registered, address, length, offset_bytes + start, base, _ordinal(tensor))
        return bounce.Direct(start, stop, functools.partial(_start, self._gds, arguments, pin), _refused)

    def _pin_around(self, address: int, length_bytes: int) -> tuple[_Pin | None, int]:
        with _lock:
            for base, pin in self._pins.items():
                if base <= address and address + length_bytes <= base + pin.length_bytes:
                    return pin, base
        return None, 0

    def _try_to_register(self, file: File, device: int) -> _native.RegisteredFile | str:
        """Register `file` with cuFile, or say why it cannot be done."""
        assert self._library is not None
        with _lock:
            registered = file.registration
            if not file.direct:  # Also if it was, until the file system refused a transfer.
                registered = f"the file is not open with O_DIRECT: {file.direct_reason}"
            elif registered is None:
                reference = weakref.ref(file)
                try:
                    registered = _registrations.get(reference)
                    if registered is None:
                        registered = _registrations[reference] = self._library.register_file(file.native(), device)
                except SwapIOError as error:
                    if error.errno == errno.EALREADY:  # That passes; what else cuFile says of a file is for good.
                        return error.detail
                    registered = error.detail
                file.registration = registered
            if not isinstance(registered, str):
                _note_use(file)
        return registered


def _ordinal(tensor: torch.Tensor) -> int:
    """Of its CUDA device; -1 for memory of another kind, which needs no context."""
    return tensor.get_device() if tensor.is_cuda else -1


def _start(
    engine: _native.Engine,
    arguments: tuple[str, _native.RegisteredFile, int, int, int, int, int],
    pin: _Pin | None,
) -> _native.Transfer:
    """`pin` is only kept by the caller, for as long as the transfer lasts."""
    return engine.start_on_device(*arguments)
