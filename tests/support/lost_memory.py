"""What the native core allocated and lost fails a run under AddressSanitizer.

Others lose memory too, so that of all leaks only those count that have the core in their stack.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from swapper.io import _native

RUNTIME = ctypes.CDLL(None)
CORE = Path(_native.__file__).name
SECONDS = 300


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Looks for it while all that Python keeps can still be reached.

    LeakSanitizer stops the threads of the process by ptrace and ends the process where it cannot. It did so once in
    many runs. So it looks in a forked child, which has one thread, and what it finds there decides if nothing is lost:
    without the stacks of other threads it can but find more. Else it looks here.
    """
    if not hasattr(RUNTIME, "__asan_init") or "detect_leaks=1" not in os.environ.get("ASAN_OPTIONS", ""):
        return
    gc.collect()
    print("\nlooking for lost memory", flush=True)
    leaks = _found(_look_in_child)
    if leaks is None or _by_the_core(leaks):
        print("looking again (a run that ends here may not ptrace its own threads)", flush=True)
        leaks = _found(_look)
    assert leaks is not None
    ours = _by_the_core(leaks)
    print(f"memory lost: {len(ours)} times by the core, {len(leaks) - len(ours)} times by others", *ours, sep="\n")
    if ours:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _by_the_core(leaks: list[str]) -> list[str]:
    return [leak for leak in leaks if CORE in leak]


def _found(look: Callable[[IO[bytes]], bool]) -> list[str] | None:
    """What `look` wrote into a file; None, and that it is printed, if it could not look."""
    with tempfile.TemporaryFile() as report:
        whole = look(report)
        report.seek(0)
        text = report.read().decode(errors="replace")
    if not whole:
        print("it could not be looked for:", text, sep="\n", flush=True)
        return None
    return [part for part in text.split("\n\n") if " leak of " in part]


def _look(report: IO[bytes]) -> bool:
    RUNTIME.__sanitizer_set_report_fd(ctypes.c_void_p(report.fileno()))
    RUNTIME.__lsan_do_recoverable_leak_check()
    RUNTIME.__sanitizer_set_report_fd(ctypes.c_void_p(2))
    return True


def _look_in_child(report: IO[bytes]) -> bool:
    """Whether it ended by itself. It may not: a thread may have held the allocator's lock when the process forked."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        _look(report)
        os._exit(0)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
