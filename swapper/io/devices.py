"""Accelerators: copies between their memory and the host's, on streams of their own, and the streams themselves.

All that is known of a type of device is here; what has no counterpart elsewhere (cuFile) is in `gds`.

[Note: late copies] A copy that was started may run much later. Until then its tensors belong to it:

    memory of the device    is kept from its allocator by `Copies.keep`, though nobody has the tensor any more
    memory of a pool        is kept by its lease: the `Copy` is the lease's transfer
    values of the device    may be used by work of the current stream only after `join`, by the host after `wait`

`begin` is the other direction: copies that follow see what the current stream has to compute first. So a tensor that is
to be copied is made before `begin`, and `begin` comes before the copy.

[Note: device modules] Streams and events are those of the device's own module (`torch.cuda`, `torch.xpu`), not
`torch.Stream` and `torch.Event`: an event of CUDA that lets the host sleep exists only there, and up to torch 2.9 such
an event takes any stream for one of its own module and reads beyond the end of another.

[Note: page-locking] The pool is memory of our own, because the kernel's rings have it registered too. A driver copies
from and to it side by side with other work only if it is told of it (`page_lock`). Where torch knows no way to tell it,
copies block: what an asynchronous copy of other memory does differs from driver to driver. A pool that grows is
unlocked when no copy is in flight, and locked anew: for so long no thread may start one (`starting_copies`).

[Note: current devices] A thread begins with the first device of a type as its current one. To ask the driver there for
an event, or to go back to that device at the end of a context of torch's that selects a stream of another, makes a
context on the first: half a GB of a GPU, for each process that trains on another one. So whatever a thread of ours may
do has the device that it is about as the current one (`on_device`), which leaves the first without a context.

[Note: current streams] What torch.cuda selects a stream with is Python code: Ctrl-C at its end would leave the thread
on that stream, for good. So it is put off, with `interrupts_deferred` around `allocating` and `on_streams`.

[Note: a device that failed] Some drivers report a failure once, to whoever waits next, for whatever that is. So what is
met by those who cannot raise it (who asks if a copy is over, who wants its memory back) is kept, and every wait for a
copy raises it from then on, in this process: what the device has computed since, and copied, may be made of bytes that
never arrived. (CUDA does the same by itself.)
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from swapper.errors import ConfigError, SwapError, SwapIOError, renewed
from swapper.process.interrupts import interrupts_deferred

__all__ = [
    "DEVICES",
    "Copies",
    "Copy",
    "DeviceCopies",
    "Event",
    "advise_on_memory",
    "among_streams",
    "check_devices",
    "copies_of",
    "current_accelerator",
    "current_streams",
    "failures",
    "free_bytes",
    "has_accelerator",
    "is_accelerator",
    "is_reached",
    "keep_for_current_stream",
    "memory_advice",
    "note_failure",
    "on_device",
    "on_streams",
    "refuse_in_graph",
    "seeded_generators",
    "starting_copies",
    "synchronize",
]

log = logging.getLogger(__name__)

_starting = threading.RLock()


def starting_copies() -> contextlib.AbstractContextManager[object]:
    """Held while copies are started that go on by themselves, and while memory is not locked that they may be of."""
    return _starting


def _after_fork() -> None:
    global _starting
    _starting = threading.RLock()  # The thread that has it is the parent's.


os.register_at_fork(after_in_child=_after_fork)


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Tell if the point is reached."""

    def synchronize(self) -> None:
        """Wait until it is reached."""


class Copies:
    """Copies between one accelerator and the host, in order, on a stream of their own.

    For any type of device whose module has streams. A type whose driver can be told of memory that is not torch's has a
    subclass in `DEVICES`. See [Note: device modules] and [Note: page-locking].

    Attributes:
        non_blocking: copies go on while the host does other work. It may be set to False where memory is not locked.
    """

    non_blocking = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    @functools.cached_property
    def _stream(self) -> Any:
        return self._module.Stream(self._device)

    def _event(self) -> Any:
        return self._module.Event()

    def _mark(self, stream: Any) -> Event:
        event = self._event()
        event.record(stream)
        return event  # type: ignore[no-any-return]

    def reached(self) -> Event:
        """An event after all that the caller's current stream has to do by now."""
        return self._mark(self._module.current_stream(self._device))

    def follow(self, event: Event) -> None:
        """Let the copies that come wait for `event`."""
        self._stream.wait_event(event)

    def join(self, event: Event) -> None:
        """Let what the caller's current stream has to do from now on wait for `event`."""
        self._module.current_stream(self._device).wait_event(event)

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Start a copy; the event says when it is done. Neither tensor may be freed before."""
        # The host memory is not torch's, so it takes no part in its tracking of streams.
        return self.run(lambda: destination.copy_(source, non_blocking=self.non_blocking))

    def run(self, work: Callable[[], object]) -> Event:
        """Call `work`, which starts several operations on tensors; the event says when they are done."""
        starting: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.non_blocking:
            starting = _starting
        with interrupts_deferred(), starting, self.allocating():
            work()
        return self._mark(self._stream)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Within it memory is allocated on the stream of the copies. See [Note: current streams]."""
        with on_device(self._device), self._module.stream(self._stream):
            yield

    def keep(self, tensor: torch.Tensor) -> None:
        """Let nobody else have the memory of a device tensor before the copies so far are done."""
        tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Let the host wait for all copies."""
        self._stream.synchronize()

    def wait_all(self) -> None:
        """Wait for all that devices of this type have to do, copies from and to the host among it."""
        for number in range(self._module.device_count()):
            self._module.synchronize(number)

    def page_lock(self, address: int, length_bytes: int) -> None:
        """Let all devices of this type copy from and to this memory of the host without help.

        Here nothing is done, and copies block.

        Raises:
            SwapError: the driver refused.
        """

    def page_unlock(self, address: int) -> None:
        """Undo `page_lock`."""


class _CudaCopies(Copies):
    """`Copies` of NVIDIA's devices, and of AMD's, which torch calls CUDA devices as well."""

    non_blocking = True

    def _event(self) -> Any:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # Others spin while the host waits.

    def wait_all(self) -> None:
        for number in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(number):  # type: ignore[attr-defined]  # Else it would be made.
                torch.cuda.synchronize(number)

    def page_lock(self, address: int, length_bytes: int) -> None:
        portable = 1  # For all devices.
        with torch.cuda.device(self._device):  # Not the default one, which would make a context there.
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(cudart.cudaHostRegister(address, length_bytes, portable))
            if status != 0:
                self._forget_error()
                raise SwapError(
                    f"cudaHostRegister of {length_bytes} bytes failed: CUDA error {status}; where the driver can lock "
                    "no more of the host's memory, as in some virtual machines, a smaller pool_bytes helps"
                )

    def page_unlock(self, address: int) -> None:
        with torch.cuda.device(self._device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:  # type: ignore[no-untyped-call]
                self._forget_error()

    def _forget_error(self) -> None:
        """Have this thread's next kernel not raise what a call of the runtime has returned: torch leaves it there."""
        with contextlib.suppress(Exception):
            torch.zeros(1, device=self._device)  # It is the next kernel.


DEVICES: dict[str, Callable[[torch.device], Copies]] = {"cuda": _CudaCopies}
"""Types of devices whose drivers lock memory that is not torch's, and what copies for them."""


def current_accelerator() -> str | None:
    """Return the type of accelerator that torch was built for or extended with, or None; there may be no device."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 says so in this way if there is none.
        return None
    return None if found is None else found.type


def has_accelerator() -> bool:
    """Tell if a device of that type is there. Does not initialise it, as what torch 2.6 has for the question does."""
    kind = current_accelerator()
    return kind is not None and bool(torch.get_device_module(kind).is_available())


def is_accelerator(device: torch.device) -> bool:
    """Tell if memory of the device is reached by copies only."""
    return device.type in DEVICES or (device.type != "cpu" and device.type == current_accelerator())


def copies_of(device: torch.device) -> Copies:
    """Make copies for an accelerator. If they block, the log says so once."""
    make = DEVICES.get(device.type)
    if make is None:
        _warn_that_copies_block(device.type)
        return Copies(device)
    return make(device)


@functools.cache
def _warn_that_copies_block(device_type: str) -> None:
    log.warning("copies from and to %s devices block: torch cannot page-lock memory of others for them", device_type)


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory of an accelerator torch could give out now; None if that is not known."""
    module = torch.get_device_module(device)
    try:
        free: int
        free, total = module.mem_get_info(device)
        if hasattr(module, "memory_reserved"):  # torch has taken it, and nobody has it.
            reserved = module.memory_reserved(device)
            free = min(free, _allowed_bytes(device, total) - reserved) + reserved - module.memory_allocated(device)
    except (AttributeError, RuntimeError):
        return None
    return max(free, 0)


def _allowed_bytes(device: torch.device, total_bytes: int) -> int:
    """The most that torch may take of a device: see `set_per_process_memory_fraction` of its module."""
    try:
        return int(torch.get_device_module(device).get_per_process_memory_fraction(device) * total_bytes)
    except (AttributeError, RuntimeError):  # It knows none, or its allocator does not tell.
        return total_bytes


_ADVICE = "\nswapper: "


def advise_on_memory(error: BaseException, advice: str) -> None:
    """If `error` is that of torch for a device without memory, have it say what to do, unless it does so already.

    It stays the same object. The advice is in its text: Python 3.10 does not show notes.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) and _ADVICE not in text:
        error.args = (f"{text}{_ADVICE}{advice}",)


@contextlib.contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """`advise_on_memory` of what is raised within it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        advise_on_memory(error, advice)
        raise


def synchronize(device: torch.device) -> None:
    """Wait for all that an accelerator has to do. Nothing happens for another device."""
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)


def refuse_in_graph(device: torch.device) -> None:
    """Refuse what the caller is about to do if its work is being captured in a CUDA graph, before anything has changed.

    A replay has the addresses of the capture, and runs nothing of ours. CUDA lets nobody ask for an event meanwhile,
    which would look as if the device had failed.

    Raises:
        SwapError: it is.
    """
    is_capturing = None
    if is_accelerator(device):
        is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if is_capturing is not None and is_capturing():
        raise SwapError(
            "a CUDA graph is being captured, and what is swapped is at other addresses when it is replayed; capture "
            "only modules and steps that are not swapped"
        )


def current_streams(devices: Iterable[torch.device]) -> list[Any]:
    """Return the caller's current stream of each of `devices`, which are accelerators."""
    return [torch.get_device_module(device).current_stream(device) for device in devices]


@contextlib.contextmanager
def among_streams(device: torch.device, streams: Iterable[Any]) -> Iterator[None]:
    """Let work given to the current stream of `device`, an accelerator, within it be as if given to `streams`, too.

    It comes after all that they have to do by now, and before all that they are given afterwards.
    """
    (current,) = current_streams([device])
    others = [stream for stream in streams if stream != current]
    for other in others:
        current.wait_stream(other)
    try:
        yield
    finally:
        for other in others:
            other.wait_stream(current)


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Let nobody else have the memory of `tensor` before the caller's current stream has done what it has to do by now.

    For a tensor that was made on another stream, perhaps, and that is let go of when its user does not choose. Nothing
    happens where it is not on an accelerator.
    """
    if is_accelerator(tensor.device):
        (stream,) = current_streams([tensor.device])
        tensor.record_stream(stream)


@contextlib.contextmanager
def on_streams(streams: Iterable[Any]) -> Iterator[None]:
    """Within it `streams`, each of another device, are those that this thread's work goes to.

    See [Note: current streams].
    """
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(on_device(stream.device))
            stack.enter_context(torch.get_device_module(stream.device).stream(stream))
        yield


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Within it `device` is the current one of its type in this thread, if the type has such a thing.

    See [Note: current devices].
    """
    module: Any = torch.get_device_module(device)
    is_it = not hasattr(module, "device") or device.index is None or module.current_device() == device.index
    with contextlib.nullcontext() if is_it else module.device(device):
        yield


@contextlib.contextmanager
def seeded_generators(device: torch.device) -> Iterator[None]:
    """Within it the default generators of the host and of `device` are seeded with 0; afterwards they are as they were.

    `torch.manual_seed` seeds all devices of all types, also those that are only initialized later. A device whose
    module does not give its generator's state is not seeded.
    """
    module = torch.get_device_module(device)
    is_seeded = is_accelerator(device) and hasattr(module, "get_rng_state")
    with torch.random.fork_rng([device] if is_seeded else [], device_type=device.type if is_seeded else "cuda"):
        torch.default_generator.manual_seed(0)
        if is_seeded:
            with on_device(device):
                module.manual_seed(0)
        yield


class _Failures:
    """The failures that devices have reported in this process. See [Note: a device that failed]."""

    count = 0
    first: SwapIOError | None = None
    last: SwapIOError | None = None


def note_failure(error: Exception) -> None:
    """A device has reported `error`, to somebody who cannot raise it."""
    _Failures.last = SwapIOError(errno.EIO, "copy", detail=f"between the device and the host: {error}")
    _Failures.first = _Failures.first or _Failures.last
    _Failures.count += 1


def is_reached(event: Event, device: torch.device) -> bool:
    """Tell if a stream of `device` has reached `event`, or never will: then the failure of the device is noted."""
    try:
        with on_device(device):
            return event.query()
    except Exception as error:  # Whoever is reported to may be the only one: see [Note: a device that failed].
        note_failure(error)
        return True


def failures() -> int:
    """Return how many failures were noted so far."""
    return _Failures.count


def check_devices(since: int = 0) -> None:
    """Raise what a device has reported. See [Note: a device that failed].

    Args:
        since: `failures` at some time: those before it do not count.

    Raises:
        SwapIOError: a device has failed.
    """
    if _Failures.count > since:
        error = _Failures.last if since else _Failures.first
        assert error is not None
        raise renewed(error)


class Copy:
    """Work of a `DeviceCopies` that was started: what a lease has in flight while it is copied from or to.

    Args:
        event: reached when it is over.
        device: of the copies.
    """

    __slots__ = ("_device", "event")

    def __init__(self, event: Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def done(self) -> bool:
        """Tell if it is over, well or not. `wait` says how."""
        return is_reached(self.event, self._device)

    def wait(self) -> int:
        """Wait until it is over. Returns 0: nothing was read or written.

        Raises:
            SwapIOError: the device failed, in this copy or before.
        """
        self.wait_quietly()
        check_devices()
        return 0

    def wait_quietly(self) -> None:
        """Wait until it is over, and leave a failure to others. See [Note: a device that failed]."""
        try:
            with on_device(self._device):
                self.event.synchronize()
        except Exception as error:
            note_failure(error)


def _check_allocator(device: torch.device) -> None:
    """Raise ConfigError if it is not known that `Copies.keep` keeps memory of `device` from others."""
    # What its maker has not given to such an allocator, `record_stream` does not do, and nobody can ask if it is there.
    backend = getattr(torch._C, "_cuda_getAllocatorBackend", lambda: "")
    if device.type == "cuda" and backend() == "pluggable":
        raise ConfigError(
            "torch gives out the GPU's memory by a pluggable allocator, which may give memory to others that a stream "
            "of swapper's still copies from or to: the bytes could be wrong. Leave out "
            "torch.cuda.memory.change_current_allocator, or use that allocator in a torch.cuda.MemPool"
        )


class DeviceCopies:
    """Copies between an accelerator and the pool on a stream of their own, so that they overlap its other work.

    Copies of one object are made one after another. For copies in both directions at once there are two of them.

    On a device that is no accelerator every call does its work at once, and returns None. See [Note: late copies].

    Raises:
        ConfigError: the device's memory is not torch's to keep.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = copies_of(device) if is_accelerator(device) else None
        _check_allocator(device)
        self._last: Event | None = None

    @property
    def non_blocking(self) -> bool:
        """The value of `non_blocking` for torch's copies in work that is given to `run`. See [Note: page-locking]."""
        return self._copies is not None and self._copies.non_blocking

    def begin(self) -> None:
        """Let the copies that follow see what the current stream has computed so far."""
        if self._copies is not None:
            self._copies.follow(self._copies.reached())

    def reached(self) -> Copy | None:
        """Return what is over when the current stream has done all that it has to do by now."""
        return None if self._copies is None else Copy(self._copies.reached(), self._device)

    def follow(self, copy: Copy | None) -> None:
        """Let the copies that follow wait for `copy`, which others of this device have started, or `reached`."""
        if self._copies is not None and copy is not None:
            self._copies.follow(copy.event)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Copy | None:
        """Start copying. Until it is done neither tensor may be changed, nor the one on the host freed."""
        return self.run(lambda: destination.copy_(source, non_blocking=self.non_blocking), destination, source)

    def run(self, work: Callable[[], object], *tensors: torch.Tensor) -> Copy | None:
        """Start `work` on `tensors`, where it comes after the copies before it. See `copy`."""
        if self._copies is None:
            work()
            return None
        try:
            self._last = last = self._copies.run(work)
        except BaseException:
            self._wait(self._copies)  # Some of it may have been started, and nobody has its event.
            raise
        for tensor in tensors:
            if tensor.device.type == self._device.type:
                self._copies.keep(tensor)
        return Copy(last, self._device)  # Not another thread's.

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """Within it memory is allocated on the stream of the copies: where it was used before, they were.

        Before such a tensor is freed the copies must `follow` its last use, or the streams that use it are recorded.
        """
        return contextlib.nullcontext() if self._copies is None else self._copies.allocating()

    def join(self, copy: Copy | None = None) -> None:
        """Let the current stream wait for `copy`, and so for those before it; None: for all so far."""
        event = self._last if copy is None else copy.event
        if self._copies is not None and event is not None:
            self._copies.join(event)

    def wait(self) -> None:
        """Wait for the copies so far. Raises SwapIOError if the device failed, in one of them or before."""
        if self._copies is not None and self._last is not None:
            self._wait(self._copies)
            check_devices()

    @staticmethod
    def _wait(copies: Copies) -> None:
        try:
            copies.wait()
        except Exception as error:
            note_failure(error)
