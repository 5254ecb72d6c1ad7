"""`import sim_device` makes `torch.device("sim")`: an accelerator made of host memory, whose work comes late.

`torch.sim` is its device module. What it promises is in `test_sim_device.py`; how it is made, in the headers beside.
Do not mix it with CUDA in one process: torch knows one accelerator.

Raises:
    ImportError: the library was not built; says how.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "Speeds",
    "Times",
    "configure",
    "contexts",
    "dma_window",
    "fail_at",
    "forget_contexts",
    "host_register",
    "host_unregister",
    "keep_time",
    "refuse_at",
    "set_limit",
    "sleep",
    "times",
    "violations",
    "waiting_operators",
]

LIBRARY = Path(
    os.environ.get("SIM_DEVICE_LIBRARY", Path(__file__).parents[2] / "build" / "sim_device" / "libsim_device.so")
)


def configure(
    mode: str = "random",
    seed: int = 0,
    max_delay_us: float = 300,
    poison_now: bool = False,
    poison_reused: bool = False,
) -> None:
    """Set when work on streams runs, from now on. What was started before is waited for.

    Args:
        mode: "eager": as soon as it can; "random": half of it, the other half late; "lazy": only when somebody waits
            for it, so that a wait that is missing is a wrong result.
        seed: of "random": the same calls run the same work at the same time.
        max_delay_us: of "random", by the device's own clock, of which each call takes 10 us.
        poison_now: memory is waited for, and poisoned, when it is freed. So what uses it later without `record_stream`
            sees that, though the memory was not given to anybody else.
        poison_reused: memory is poisoned when somebody is given it, and not when it is freed. For programs as FSDP2,
            which let other streams use memory that is freed, until the stream that it is of waits for them.
    """
    torch.ops.sim.configure(mode, seed, max_delay_us, poison_now, poison_reused)


@dataclass(frozen=True)
class Speeds:
    """Of a device that keeps time, and of the host that drives it. See [Note: the clock] in `streams.h`.

    Attributes:
        call_us: what each call of the device takes the host. To ask if something is over takes a tenth.
        kernel_us: what each kernel takes, besides the longer of what its bytes and its operations take.
        memory_bps: bytes per second of kernels: of all their arguments and results.
        operations_per_s: of products of matrices.
        up_bps, down_bps: bytes per second of copies from and to the host.
    """

    call_us: float = 5
    kernel_us: float = 2
    memory_bps: float = 1e12
    operations_per_s: float = 100e12
    up_bps: float = 25e9
    down_bps: float = 25e9


@dataclass(frozen=True)
class Times:
    """Seconds by the clock of a device that keeps time.

    Attributes:
        now_s: of the host.
        waited_s: how long of it the host has waited.
        kernels_s, up_s, down_s, drive_s: how long kernels ran, copies from and to the host, and the drive. Of what has
            begun, all of it.
    """

    now_s: float
    waited_s: float
    kernels_s: float
    up_s: float
    down_s: float
    drive_s: float

    def since(self, former: Times) -> Times:
        """The differences."""
        return Times(*(mine - other for mine, other in zip(astuple(self), astuple(former), strict=True)))


def keep_time(speeds: Speeds) -> None:
    """Let work take a set time from now on, until `configure`: what a program takes is the same on any machine.

    Raises:
        ValueError: a time is negative, or a speed is not positive.
    """
    per_us = (speeds.memory_bps, speeds.operations_per_s, speeds.up_bps, speeds.down_bps)
    torch.ops.sim.keep_time([speeds.call_us, speeds.kernel_us, *(each / 1e6 for each in per_us)])


def times() -> Times:
    """The times since `keep_time`; `now_s` is since the process began."""
    return Times(*(us / 1e6 for us in torch.ops.sim.times_us()))


def violations() -> list[str]:
    """Wait for all devices, and return what was found to be wrong since the last call: writes to memory that was freed.

    Kernels that failed, and host memory that was unlocked or unmapped too early, are among it.
    """
    return torch.ops.sim.violations()


def waiting_operators() -> list[str]:
    """Names of operators that waited for their stream so far, as torch cannot tell the shapes of their results."""
    return torch.ops.sim.waiting_operators()


def set_limit(length_bytes: int = 16 << 30, device: int | str | torch.device | None = None) -> None:
    """Set how much memory a device has. An allocation beyond it raises `torch.OutOfMemoryError`."""
    torch.ops.sim.set_limit(_index(device), length_bytes)


def fail_at(n: int) -> int:
    """Let the n-th kernel or copy that runs from now on, counted from 1, do nothing but fail. 0: none does.

    Whatever waits for the device next, or polls, raises it, once. Returns how many have run since the last call.
    """
    return int(torch.ops.sim.fail_at(n))


def refuse_at(n: int) -> int:
    """Let the n-th allocation of device memory from now on, counted from 1, raise `torch.OutOfMemoryError`. 0: none.

    Returns how many there were since the last call.
    """
    return int(torch.ops.sim.refuse_at(n))


def host_register(address: int, length_bytes: int) -> None:
    """Page-lock memory of the host that is not torch's, as cudaHostRegister does: copies from and to it come late."""
    torch.ops.sim.host_register(address, length_bytes)


def host_unregister(address: int) -> None:
    """Undo `host_register`. No copy may be in flight, and the memory must be mapped yet."""
    torch.ops.sim.host_unregister(address)


def contexts() -> list[int]:
    """Devices on which the process has a context, as CUDA would have made it. See [Note: contexts] in `world.h`."""
    return list(torch.ops.sim.contexts())


def forget_contexts() -> None:
    """Let the process have no context yet."""
    torch.ops.sim.forget_contexts()


def dma_window() -> tuple[int, int, int]:
    """Start and length of the addresses of all devices, and the distance from an address to its byte on the host.

    For what stands for a driver that moves bytes to and from devices without a kernel. No stream waits for it.
    """
    return torch.ops.sim.dma_window()


def sleep(us: float, device: int | str | torch.device | None = None) -> None:
    """Keep the current stream busy for that long, by the device's own clock: it takes the host no time."""
    torch.ops.sim.sleep(_index(device), us)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _StreamContext:
    """As that of `torch.cuda`, which is Python code: Ctrl-C may strike at its end, and the stream is never left."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._former = torch.accelerator.current_stream()
        self._former_there = torch.accelerator.current_stream(self._stream.device_index)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._former_there)
        torch.accelerator.set_stream(self._former)


class _DeviceModule(ModuleType):
    """`torch.sim`: what torch, and programs, ask of a device module."""

    Event = torch.Event
    _initialized = True  # `torch.utils.checkpoint` keeps the random state of devices that are.

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: torch.ops.sim.device_count())
    _is_in_bad_fork = staticmethod(lambda: torch.ops.sim.is_forked())
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    is_bf16_supported = staticmethod(lambda including_emulation=True: True)

    current_device = staticmethod(lambda: torch.accelerator.current_device_index())
    set_device = staticmethod(lambda device: torch.accelerator.set_device_index(_index(device)))
    device = staticmethod(lambda device: torch.accelerator.device_index(_index(device)))
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize(_index(device)))

    current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream(_index(device)))
    default_stream = staticmethod(
        lambda device=None: torch.Stream(stream_id=_index(device), device_index=_index(device), device_type=20)
    )
    set_stream = staticmethod(lambda stream: torch.accelerator.set_stream(stream))
    stream = staticmethod(lambda stream: _StreamContext(stream))

    memory_allocated = staticmethod(lambda device=None: torch.accelerator.memory_allocated(_index(device)))
    max_memory_allocated = staticmethod(lambda device=None: torch.accelerator.max_memory_allocated(_index(device)))
    reset_peak_memory_stats = staticmethod(
        lambda device=None: torch.accelerator.reset_peak_memory_stats(_index(device))
    )
    mem_get_info = staticmethod(lambda device=None: torch.accelerator.get_memory_info(_index(device)))
    empty_cache = staticmethod(lambda: None)

    manual_seed = staticmethod(lambda seed: torch.ops.sim.manual_seed(_index(None), seed))
    get_rng_state = staticmethod(lambda device="sim": torch.ops.sim.rng_state(_index(device)))
    set_rng_state = staticmethod(lambda state, device="sim": torch.ops.sim.set_rng_state(_index(device), state))

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for index in range(torch.ops.sim.device_count()):
            torch.ops.sim.manual_seed(index, seed)

    @staticmethod
    def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device("sim", _index(device)), priority=priority)

    _sleep = staticmethod(lambda us: sleep(us))


def _reason() -> str:
    note = LIBRARY.with_name("not-built")
    return note.read_text().strip() if note.exists() else f"{LIBRARY} is missing"


def _load() -> None:
    if not LIBRARY.exists():
        raise ImportError(
            f"the simulated device was not built: make {LIBRARY.parent.name} (or make -C {Path(__file__).parent})"
        )
    torch.ops.load_library(str(LIBRARY))
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _DeviceModule("torch.sim"))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True, for_packed_sequence=False)
    torch.ops.sim.initialize()  # Else torch takes no memory for page-locked until it has made some itself.


_load()
