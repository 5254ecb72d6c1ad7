"""The parameter `device`: tests of device paths run on a simulated one, whose work comes late, and on CUDA too.

`sim-lazy` does nothing before somebody waits for it, `sim-random` does it sooner or later: a wait that is missing is a
wrong result in one of them. `sim-poison`, for a test that asks for it, waits for memory that is freed, and poisons it.
Evicted tensors have dispatch keys of ours, as on CUDA; with `sim-random` none, as on devices that torch does not know.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from repository import ROOT
from sampling import SEED

from swapper.io import devices
from swapper.io.devices import DEVICES, Copies
from swapper.storage.writes import RecordWrites
from swapper.tensors import hollow

SETTINGS: dict[str, dict[str, Any]] = {
    "sim-eager": {"mode": "eager"},
    "sim-lazy": {"mode": "lazy"},
    "sim-random": {"mode": "random", "seed": SEED},
    "sim-poison": {"mode": "random", "seed": SEED, "poison_now": True},
}


# As in `sim_device`, which cannot be asked: whoever imports it makes the simulated device torch's accelerator.
_LIBRARY = Path(os.environ.get("SIM_DEVICE_LIBRARY", ROOT / "build" / "sim_device" / "libsim_device.so"))


def pytest_configure() -> None:
    """Let torch's autograd know of the simulated devices: it counts devices once, at the first backward of a process.

    They are no accelerator yet, so that tests before the first that uses them see a torch without one.
    """
    if _LIBRARY.exists() and not torch.cuda.is_available():
        torch.ops.load_library(str(_LIBRARY))


class SimCopies(Copies):
    """As those of CUDA: the simulated device can be told of memory that is not torch's."""

    non_blocking = True

    def page_lock(self, address: int, length_bytes: int) -> None:
        torch.ops.sim.host_register(address, length_bytes)

    def page_unlock(self, address: int) -> None:
        torch.ops.sim.host_unregister(address)


def simulated() -> ModuleType:
    """The module `sim_device`. Skips the test where there is none."""
    if hasattr(ctypes.CDLL(None), "__asan_init"):
        pytest.skip("not under AddressSanitizer, which knows nothing of the memory of the simulated device")
    if torch.cuda.is_available():
        pytest.skip("torch has one accelerator in a process, and there is CUDA")
    try:
        return importlib.import_module("sim_device")
    except ImportError as error:
        pytest.skip(str(error))


def writes_start_with_calls(patch: pytest.MonkeyPatch) -> None:
    """Have no thread start the writes of what a device has copied: the next call of the cache does it.

    A thread that waits for a simulated device is somebody who waits, so that work would run that no call waited for.
    """
    patch.setattr(RecordWrites, "_watch", lambda self, key, copy: None)


def simulate(settings: str, patch: pytest.MonkeyPatch, *, threads: bool = False) -> ModuleType:
    """Begin a test on the simulated device. Returns the module `sim_device`.

    Args:
        settings: a name in `SETTINGS`.
        threads: writes start without a call. What a device does is then not the same in each run.
    """
    sim_device = simulated()
    if not threads:
        writes_start_with_calls(patch)
    sim_device.configure(**SETTINGS[settings])
    sim_device.set_limit()
    patch.setitem(DEVICES, "sim", SimCopies)
    if settings != "sim-random":  # Then as on a device of another maker: see [Note: what C++ sees] in `hollow`.
        patch.setattr(hollow, "_COMPATIBLE", hollow._COMPATIBLE | {"sim"})
    if hasattr(torch.ops.sim, "refuse_access"):  # A library that was built before has none.
        patch.setattr(hollow, "_refuse_access", torch.ops.sim.refuse_access)  # As where torch was built for CUDA.
    return sim_device


def keep_busy(device: str, us: int) -> None:
    """Let the current stream of `device` do nothing for about that long."""
    if device == "cuda":
        torch.cuda._sleep(us * 1500)  # type: ignore[no-untyped-call]  # Cycles.
    else:
        simulated().sleep(us)


@pytest.fixture(autouse=True)
def _devices_have_not_failed() -> Iterator[None]:
    """A device that failed in one test has not in the next."""
    yield
    forget_failures()


def forget_failures() -> None:
    """Let no device have failed: see the note in `devices`."""
    devices._Failures.count, devices._Failures.first, devices._Failures.last = 0, None, None


@pytest.fixture(params=["sim-lazy", "sim-random", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A type of device. Afterwards nothing may have gone wrong on it that the simulated one sees."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        yield "cuda"
        return
    sim_device = simulate(request.param, monkeypatch)
    sim_device.violations()  # of a test that failed
    yield "sim"
    assert sim_device.violations() == []
