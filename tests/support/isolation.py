"""A function in a process of its own, for what a process cannot take back: limits, filters, a lost capability.

The processes are forked from a server (`fork_server`), so that one costs milliseconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from fork_server import ensure_server

# For tests that fork while another thread is at work. One in about a hundred children of test_writes had the lock.
forks_at_work = pytest.mark.unsanitized(
    "a forked child may inherit a lock of AddressSanitizer's allocator, and waits for it for ever"
)

_context = multiprocessing.get_context("forkserver")


def _run(sender: Connection, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    # Here, not above: the server shall not try any backend before limits are set.
    from swapper.io.handle import probe

    probe.cache_clear()
    try:
        outcome: tuple[str, object] = ("returned", function(*arguments))
    except pytest.skip.Exception as reason:
        outcome = ("skipped", str(reason))
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    sender.send(outcome)


def alone(function: Callable[..., object], *arguments: object, timeout_s: float = 240) -> Any:
    """Call `function`, of a test module, with `arguments` in a process of its own. Returns what it returns."""
    ensure_server()
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_run, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            pytest.fail(f"{function.__name__} is still running after {timeout_s} s")
        try:
            how, value = receiver.recv()
        except EOFError:
            process.join(240)
            pytest.fail(f"{function.__name__} ended without a word: exit code {process.exitcode}")
        process.join(240)
        if process.is_alive():
            pytest.fail(f"the process of {function.__name__} does not end")
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        receiver.close()
    if how == "skipped":
        pytest.skip(str(value))
    assert how == "returned", f"{function.__name__} in its own process:\n{value}"
    assert process.exitcode == 0
    return value


def drop_capability_to_lock_memory() -> None:
    """Root ignores RLIMIT_MEMLOCK by CAP_IPC_LOCK. Of this thread, and of those that it makes."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the same for capabilities 32 and up
    assert libc.capget(header, sets) == 0
    for i in range(3):
        sets[i] &= ~(1 << 14)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def in_forked_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child that ends without clean-up, and fail if it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
