"""`Program`: a `subprocess.Popen` of this Python whose process has imported torch and swapper before it starts.

To import them takes seconds of processor time, which most tests that start a program do not look at. So the process is
forked from a server that has imported them and has no threads. It then does what the interpreter does with the command:
runs it as `__main__`, unwinds, and ends as any program, by the interpreter's own end. It is a child of this process.

What differs from a program that was executed: `/proc/self/cmdline` and `sys.orig_argv` are the server's; tracebacks
have frames of this module; hashes of strings and NumPy's own random numbers are the same in all programs, and warnings
of the import of torch and swapper are over. What the interpreter reads before its first line (switches but -W, PYTHON
variables but PYTHONPATH and PYTHONWARNINGS) would be the server's: a command or an environment with others is executed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Program", "run_program"]

_PRELOADED = ["torch", "torch._dynamo", "swapper"]
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, see prctl(2)
_AS_SERVER = {"PYTHONPATH", "PYTHONWARNINGS"}
_ENVIRONMENT = dict(os.environ)
"""The server's, whatever test is the first to need it."""

_lock = threading.Lock()
_server: tuple[int, socket.socket, subprocess.Popen[bytes]] | None = None


def _connection() -> socket.socket:
    global _server
    if _server is None or _server[0] != os.getpid() or _server[1].fileno() < 0:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), *_PRELOADED]
        _server = os.getpid(), ours, subprocess.Popen(command, env=_ENVIRONMENT, pass_fds=[theirs.fileno()])
        theirs.close()
        atexit.register(_end, *_server)
    return _server[1]


def _end(pid: int, connection: socket.socket, server: subprocess.Popen[bytes]) -> None:
    if pid == os.getpid():
        connection.close()
        server.wait()


class Program(subprocess.Popen[Any]):
    """See the module. `args` begins with `sys.executable`."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell, reads, ours_in, ours_out, writes, ours_err, errors, *others = rest
        environment = dict(os.environ if env is None else env)
        session = bool(others[5])
        unusual = any(other is not None and other not in (False, -1) for other in (*others[1:5], *others[6:]))
        if shell or preexec_fn or pass_fds or executable or unusual or not _can_be_forked(args, environment):
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        files = [own if given == -1 else given for own, given in enumerate((reads, writes, errors))]
        asked = {"args": args[1:], "env": environment, "cwd": os.fspath(cwd or os.getcwd()), "session": session}
        request = json.dumps({**asked, "parent": os.getpid()}).encode()
        length = len(request).to_bytes(4, "little")
        with _lock, _adopting():
            connection = _connection()
            try:
                connection.sendmsg([length], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
                connection.sendall(request)
                self.pid = int.from_bytes(_receive(connection, 4), "little")
            except BaseException:  # As of a test that took too long. The next answer would be to this request.
                connection.close()
                raise
        status = Path(f"/proc/{self.pid}/stat").read_text()
        assert int(status.rpartition(")")[2].split()[1]) == os.getpid(), "Popen takes the end of another's child for 0"
        self._child_created = True
        for ours, theirs in ((ours_in, reads), (ours_out, writes), (ours_err, errors)):
            if ours != -1:
                os.close(theirs)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Within it the server's grandchildren become children of this process: their parents end at once."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def run_program(args: list[str], *, check: bool = False, timeout: float | None = None, **options: Any) -> Any:
    """As `subprocess.run`, by `Program`."""
    if options.pop("capture_output", False):
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Program(args, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def _can_be_forked(args: Any, environment: dict[str, str]) -> bool:
    """True if nothing in them is for the interpreter before its first line; else it is executed."""
    if args[0] != sys.executable or hasattr(ctypes.CDLL(None), "__asan_init"):
        return False
    words = iter(args[1:])
    for word in words:
        if word == "-W":
            next(words)
        elif word in ("-c", "-m") or not word.startswith("-"):
            break
        else:
            return False
    differing = {name for name, _ in environment.items() ^ _ENVIRONMENT.items()} - _AS_SERVER
    return not any(name.startswith(("PYTHON", "OMP_", "MKL_", "LD_")) for name in differing)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError("the server of programs has ended")
        data += more
    return data


# --- The server -------------------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork at every request. Returns in each program, with its request."""
    while True:
        head, files, *_ = socket.recv_fds(connection, 4, 3)
        if not head:
            os._exit(0)
        request: dict[str, Any] = json.loads(_receive(connection, int.from_bytes(head, "little")))
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            if program := os.fork():
                os.write(writing, program.to_bytes(4, "little"))
                os._exit(0)
            while os.getppid() != request["parent"]:
                time.sleep(0.001)
            connection.close()
            if request["session"]:
                os.setsid()
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(*files, reading, writing) + 1)
            return request
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, 4))
        for file in (*files, reading, writing):
            os.close(file)


def _start(words: list[str]) -> None:
    """Do as the interpreter does with the words after its name."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    options = [text for text in os.environ.get("PYTHONWARNINGS", "").split(",") if text]
    while words[0] == "-W":
        options.append(words[1])
        del words[:2]
    added = [each for each in warnings.filters if each not in FILTERS]
    warnings.resetwarnings()
    warnings.filters[:] = FILTERS
    warnings._processoptions(options)  # type: ignore[attr-defined]
    warnings.filters[:0] = added
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))


if __name__ == "__main__":
    FILTERS = list(warnings.filters)
    PATH = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # What is imported stays: to look through it takes a quarter of the time.
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # Else a collection in a program, and the one at its end, writes to, and so copies, all of this.
    gc.collect()
    gc.freeze()
    gc.enable()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    _start(request["args"])
