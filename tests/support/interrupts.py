"""Ctrl-C at every place where the interpreter can raise it."""

from __future__ import annotations

import dis
import functools
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from sampling import EVERY, SEED


@functools.cache
def _names(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


class Place(NamedTuple):
    """Where the interpreter can raise Ctrl-C: an instruction, when it is reached for the `time`-th time, from 1."""

    code: CodeType
    offset: int
    time: int


def places_of(function: Callable[[], object], *files: str, sample: int | None = None) -> Iterator[Place]:
    """Run `function` once, and give the places that it has in the code of `files`, for `interrupted_at`.

    Each instruction once: when it is reached for the first time, the last, or in between, as is drawn for this test and
    its parameters. With `sample` only so many of them. Of two tests that differ in the order of the simulated device's
    work each has one half of them, but with SWAPPER_TESTS=every.
    """
    times: Counter[tuple[CodeType, int]] = Counter()
    interrupted_at(times, function, *files)
    test = os.environ["PYTEST_CURRENT_TEST"]
    chance = random.Random(f"{SEED} {test}")
    places = [Place(*at, chance.choice([1, chance.randint(1, last), last])) for at, last in times.items()]
    if not EVERY and ("sim-lazy" in test or "sim-random" in test):
        places = [place for place in places if _is_for_random_order(place) == ("sim-random" in test)]
    yield from places if sample is None else chance.sample(places, min(sample, len(places)))


def _is_for_random_order(place: Place) -> bool:
    """True for a half of all places, which is the same in each process."""
    at = place.code.co_filename.rpartition("/")[2], place.code.co_firstlineno, place.offset
    return random.Random(f"{SEED} {at}").random() < 0.5


def interrupted_at(
    n: int | Place | Counter[tuple[CodeType, int]],
    function: Callable[[], object],
    *files: str,
    number: int = signal.SIGINT,
) -> bool:
    """Call `function` and send SIGINT to the process at the n-th place, from 0, in the code of `files`.

    A place is where the interpreter runs handlers of signals: on entry to a function, after a call, and where a loop
    goes back. The handler is that of the moment, so that what defers interrupts does so here.

    Args:
        n: the n-th place in the run; or one of `places_of`; or what counts them, without a signal.
        number: send this signal instead.
        files: each the name of a file in `swapper`, or a part of the path of files anywhere that begins with "/".

    Returns:
        False if `function` has returned: there are fewer places.
    """
    left = n if isinstance(n, int) else -2
    place = n if isinstance(n, Place) else None
    parts = tuple(name if name.startswith("/") else f"swapper/{name}" for name in files)
    before: dict[FrameType, str] = {}
    reached: dict[tuple[int, int], int] = {}
    # By the code's number: its hash is of all that is in it, and millions of instructions run.
    tracers: dict[int, tuple[CodeType, Callable[..., Any] | None]] = {}

    def tracer(code: CodeType) -> Callable[..., Any] | None:
        """What is called at each instruction of `code`; None where no place in it is asked for."""
        if not any(part in code.co_filename for part in parts) or (place is not None and code != place.code):
            return None
        names, number_of_code = _names(code), id(code if place is None else place.code)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if event == "return":
                before.pop(frame, None)  # It would keep what the frame has.
            if event != "opcode":
                return trace
            at = frame.f_lasti
            name = names[at]
            last, before[frame] = before.get(frame, "RESUME"), name
            # Tracing would raise it after the return, in the caller; the interpreter still does before.
            # And it raises nothing where a call has raised already. (SWAP: a `with` returns the value of a call. The
            # interpreter raises within the `with`, and tracing after it, where nobody leaves it.)
            elsewhere = name in ("RETURN_VALUE", "PUSH_EXC_INFO", "SWAP")
            if last.startswith(("RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")) and not elsewhere:
                left -= 1
                time = reached[number_of_code, at] = reached.get((number_of_code, at), 0) + 1
                if left == -1 or (place is not None and at == place.offset and time == place.time):
                    signal.raise_signal(number)
            return trace

        return trace

    def begin(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if id(code) not in tracers:
            tracers[id(code)] = code, tracer(code)
        found = tracers[id(code)][1]
        if found is not None:
            frame.f_trace = found  # Python 3.13 begins with instructions where a frame has a tracer already.
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return found

    former = sys.gettrace()
    sys.settrace(begin)
    try:
        function()
        sys.settrace(former)  # After this call, at the latest, the interpreter raises what is pending.
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
        before.clear()
        if isinstance(n, Counter):
            for (code, at), times in reached.items():
                n[tracers[code][0], at] += times
    return False
