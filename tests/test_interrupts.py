"""`interrupts_deferred`: Ctrl-C within it takes effect at its end, wherever it strikes; the handler stays."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from interrupts import interrupted_at

from swapper.process.interrupts import interrupts_deferred


@pytest.fixture(autouse=True)
def _the_handler_stays() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def strike() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_signal_within_is_raised_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_deferred():
            strike()
            done.append(1)
        done.append(2)
    assert done == [1]


def test_without_a_signal_nothing_happens() -> None:
    with interrupts_deferred():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_several_signals_are_one_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        strike()
        strike()


def test_nested_sections_end_with_the_outermost() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        with interrupts_deferred():
            strike()
        done.append("inner")
        strike()
        done.append("outer")
    assert done == ["inner", "outer"]


def test_an_exception_of_the_body_is_the_context_of_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_deferred():
        strike()
        raise OSError("disk")
    assert isinstance(caught.value.__context__, OSError)


def test_an_exception_of_the_body_passes() -> None:
    with pytest.raises(OSError, match="disk"), interrupts_deferred():
        raise OSError("disk")


def test_a_handler_of_the_users_is_called_once_at_the_end() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: calls.append(signum))
    try:
        with interrupts_deferred():
            strike()
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL], ids=["ignored", "default"])
def test_what_is_no_handler_of_python_is_left_alone(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_deferred():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_no_handler() -> None:
    seen = []

    def run() -> None:
        with interrupts_deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_no_place_leaves_the_handler_replaced_or_loses_a_hand_over() -> None:
    """Ctrl-C at every place in the code of `interrupts_deferred` itself, and of what it protects."""
    struck = 0
    for n in range(200):
        pool, held = ["buffer"], []

        def take(pool: list[str] = pool, held: list[str] = held) -> None:
            with interrupts_deferred():
                held.append(pool.pop())

        interrupted = interrupted_at(n, take, "process/interrupts.py", "/test_interrupts.py")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert len(pool) + len(held) == 1
        if not interrupted:
            break
        struck += 1
    assert struck > 8


def test_a_handler_of_another_signal_that_raises_anywhere_leaves_ctrl_c_working() -> None:
    """A timeout by SIGALRM, say: if it strikes within `__enter__` or `__exit__`, nobody restores SIGINT's handler."""

    class Timeout(Exception):
        pass

    def time_out(signum: int, frame: object) -> None:
        raise Timeout

    def section() -> None:
        with interrupts_deferred():
            pass

    before = signal.signal(signal.SIGUSR1, time_out)
    struck = 0
    try:
        for n in range(100):
            try:
                interrupted_at(n, section, "process/interrupts.py", "/test_interrupts.py", number=signal.SIGUSR1)
                break
            except Timeout:
                struck += 1
            with pytest.raises(KeyboardInterrupt):
                strike()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            with pytest.raises(KeyboardInterrupt), interrupts_deferred():
                strike()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert struck > 8


SIGNALS = [signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture
def raising() -> Iterator[type[Exception]]:
    """The exception that handlers of `SIGNALS` raise."""

    class Struck(Exception):
        pass

    def handle(signum: int, frame: object) -> None:
        raise Struck(signum)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    yield Struck
    for number, handler in before.items():
        assert signal.getsignal(number) is handle
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_of_the_users_that_raises_does_so_at_the_end(number: int, raising: type[Exception]) -> None:
    done = []
    with pytest.raises(raising) as caught:
        with interrupts_deferred():
            with interrupts_deferred():
                signal.raise_signal(number)
            done.append(1)
        done.append(2)
    assert done == [1]
    assert caught.value.args == (number,)


def test_all_signals_that_came_are_raised(raising: type[Exception]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_deferred():
        for number in (*SIGNALS, signal.SIGINT):
            signal.raise_signal(number)
    others = []
    error = caught.value.__context__
    while error is not None:
        assert isinstance(error, raising)
        others += error.args
        error = error.__context__
    assert sorted(others) == sorted(SIGNALS)


def test_no_place_loses_a_hand_over_to_another_signal(raising: type[Exception]) -> None:
    struck = 0
    for n in range(300):
        pool, held = ["buffer"], []

        def take(pool: list[str] = pool, held: list[str] = held) -> None:
            with interrupts_deferred():
                held.append(pool.pop())

        try:
            interrupted_at(n, take, "process/interrupts.py", "/test_interrupts.py", number=signal.SIGUSR2)
            break
        except raising:
            struck += 1
        assert len(pool) + len(held) == 1
        with interrupts_deferred():
            pass
    assert struck > 8


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_in_a_forked_child_the_thread_that_forked_is_the_main_thread() -> None:
    statuses = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            before = signal.getsignal(signal.SIGINT)
            with interrupts_deferred():
                os._exit(0 if signal.getsignal(signal.SIGINT) is not before else 1)
        statuses.append(os.waitpid(pid, 0)[1])

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert statuses == [0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_another_thread_forks_within_a_section_can_be_interrupted() -> None:
    begun = threading.Event()
    statuses = []

    def fork() -> None:
        begun.wait()
        pid = os.fork()
        if pid == 0:
            try:
                strike()
            except KeyboardInterrupt:
                os._exit(0)
            os._exit(1)
        statuses.append(os.waitpid(pid, 0)[1])

    thread = threading.Thread(target=fork)
    thread.start()
    with interrupts_deferred():
        begun.set()
        thread.join()
    assert statuses == [0]
