"""Ctrl-C at every place where the interpreter can raise it."""

from __future__ import annotations

import dis
import functools
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


@functools.cache
def _names(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


def interrupted_at(n: int, function: Callable[[], object], *files: str, number: int = signal.SIGINT) -> bool:
    """Call `function` and send SIGINT to the process at the n-th place, from 0, in the code of `files`.

    A place is where the interpreter runs handlers of signals: on entry to a function, after a call, and where a loop
    goes back. The handler is that of the moment, so that what defers interrupts does so here.

    Args:
        number: send this signal instead.
        files: each the name of a file in `swapper`, or a part of the path of files anywhere that begins with "/".

    Returns:
        False if `function` has returned: there are fewer places.
    """
    left = n
    parts = tuple(name if name.startswith("/") else f"swapper/{name}" for name in files)
    before: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not any(part in frame.f_code.co_filename for part in parts):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            before.pop(frame, None)  # It would keep what the frame has.
        if event != "opcode":
            return trace
        name = _names(frame.f_code)[frame.f_lasti]
        last, before[frame] = before.get(frame, "RESUME"), name
        # Tracing would raise it after the return, in the caller; the interpreter still does before.
        # And it raises nothing where a call has raised already. (SWAP: a `with` returns the value of a call. The
        # interpreter raises within the `with`, and tracing after it, where nobody leaves it.)
        elsewhere = name in ("RETURN_VALUE", "PUSH_EXC_INFO", "SWAP")
        if last.startswith(("RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")) and not elsewhere:
            left -= 1
            if left == -1:
                signal.raise_signal(number)
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
        before.clear()
    return False
