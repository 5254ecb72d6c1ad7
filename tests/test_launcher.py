"""`launcher.Program`: a program that is forked does what one that is executed does."""

from __future__ import annotations

import os
import subprocess
import sys

import launcher
import pytest
from launcher import Program, run_program

PROGRAMS = {
    "an error": "import warnings; warnings.warn('so')",
    "exit": """
import atexit, sys, threading
class Last:
    def __del__(self): print("deleted")
last = Last()
atexit.register(print, "at exit")
threading.Timer(0.1, print, [input()]).start()
sys.exit(3)
""",
    "Ctrl-C": """
import os, signal, sys
print(sys.argv, sys.path, sys.flags, os.getcwd(), os.getpgrp(), os.getppid())
print([signal.getsignal(n) for n in range(1, 32)], signal.pthread_sigmask(0, []))
print([n for n in range(100) if os.path.exists(f"/proc/self/fd/{n}")])
os.kill(os.getpid(), signal.SIGINT)
""",
    "killed": "import os; os.abort()",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_when_it_is_executed(name: str) -> None:
    words = [sys.executable, "-W", "error", "-c", PROGRAMS[name], "one", "-two"]
    ends = []
    for start in (Program, subprocess.Popen):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with start(words, **pipes, text=True) as process:
            stdout, stderr = process.communicate("in\n", timeout=240)
        ends.append((process.returncode, stdout, (stderr.splitlines() or [""])[-1]))
    assert ends[0] == ends[1]


def test_a_variable_that_a_test_sets_is_the_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "print(hash('a'), __debug__)"]
    expected = run_program(words, env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONOPTIMIZE": "1"}, capture_output=True)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert run_program(words, capture_output=True).stdout == expected.stdout


@pytest.mark.thorough("imports torch once more; by default: starts that nothing cuts off")
def test_after_a_start_that_was_cut_off_programs_are_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    run_program([sys.executable, "-c", ""], check=True)

    def cut_off(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(launcher, "_receive", cut_off)
        Program([sys.executable, "-c", "raise SystemExit(4)"])
    assert run_program([sys.executable, "-c", "raise SystemExit(5)"]).returncode == 5
