"""After any call of a Trainer, the process is as it was before."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from interrupts import interrupted_at
from lightning_runs import IGNORED_WARNINGS, Net, loader, strategy_of, trainer_of
from ranks import in_processes
from sampling import places

pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED_WARNINGS]

ALL = "state-gradients-parameters"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def collect_garbage() -> None:
    while gc.collect():  # What torch's objects in C++ held is garbage only when those have gone.
        pass


def of_process() -> dict[str, Any]:
    """What a Trainer must not change."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
    }


def of_system() -> dict[str, Any]:
    """What goes with the optimizers: threads of the engine, open files, locks."""
    names, files, locks = [], [], 0
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
            names.append((Path("/proc/self/task") / each / "comm").read_text())
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}"))
            locks += Path(f"/proc/self/fdinfo/{number}").read_text().count("\nlock:")
        except FileNotFoundError:  # That of the listing itself.
            continue
    return {"threads": sorted(names), "files": sorted(files), "locks": locks}


def until_as_before(now: Callable[[], dict[str, Any]], before: dict[str, Any], where: object) -> None:
    """Nothing was added, once what is ending has ended: a thread is listed for a moment after it was joined.

    It ends by itself: no garbage is collected meanwhile. Threads and files of earlier tests may end, too.
    """
    deadline_s = time.monotonic() + 60
    gc.disable()
    try:
        while added := more(now(), before):
            assert time.monotonic() < deadline_s, (where, added)
            time.sleep(0.01)
    finally:
        gc.enable()


def more(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What there is now and was not before; or is another, if it is no list."""
    found = {}
    for name, value in now.items():
        if isinstance(value, list):
            found[name] = list((Counter(value) - Counter(before[name])).elements())
        else:
            found[name] = [] if value == before[name] else [value, before[name]]
    return {name: values for name, values in found.items() if values}


class Struck(Net):
    """Raises in one of its hooks."""

    def __init__(self, hook: str, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.error = error
        setattr(self, hook, self.strike)

    def strike(self, *_: Any, **__: Any) -> None:
        raise self.error()


def evaluate(what: str) -> Callable[[L.Trainer], object]:
    return lambda trainer: getattr(trainer, what)(Net(), loader())


def fit(trainer: L.Trainer) -> None:
    trainer.fit(Net(), loader(), loader())


def fit_twice(trainer: L.Trainer) -> None:
    fit(trainer)
    fit(trainer)


def struck(hook: str, error: Callable[[], BaseException]) -> Callable[[L.Trainer], object]:
    def call(trainer: L.Trainer) -> None:
        with pytest.raises((RuntimeError, SystemExit)):
            trainer.fit(Struck(hook, error), loader(), loader())

    return call


CALLS: dict[str, Callable[[L.Trainer], object]] = {
    "fit": fit,
    "fit-twice": fit_twice,
    "validate": evaluate("validate"),
    "test": evaluate("test"),
    "predict": evaluate("predict"),
    **{
        f"{name}-{hook}": struck(hook, error)
        for name, error in (("exception", lambda: RuntimeError("the user's")), ("ctrl-c", KeyboardInterrupt))
        for hook in ("training_step", "validation_step", "on_save_checkpoint")  # See test_lightning.py for others.
    },
}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["state", ALL])
def test_a_trainer_changes_nothing_of_the_process_and_its_files_go_with_it(
    what: str, nvme_path: Path, tmp_path: Path
) -> None:
    def call(name: str, strategy: Any) -> list[Path]:
        """The files that were left when the call had returned."""
        trainer = trainer_of(
            strategy, enable_checkpointing=name.endswith("on_save_checkpoint"), default_root_dir=tmp_path / "root"
        )
        before, handler = of_process(), signal.getsignal(signal.SIGINT)
        CALLS[name](trainer)
        if name.startswith("ctrl-c"):  # From here on Lightning itself has it ignored.
            signal.signal(signal.SIGINT, handler)
        until_as_before(of_process, before, name)
        return list(nvme_path.iterdir())

    for name in CALLS:
        call(name, "auto")  # What Lightning and torch start and open once, and keep.
        collect_garbage()
        before = of_system()
        left = call(name, strategy_of(nvme_path, what))
        assert len(left) == (1 if name.startswith("fit") else len(left)), name
        collect_garbage()
        until_as_before(of_system, before, name)
        assert not list(nvme_path.iterdir()), name


def test_two_trainers_have_a_directory_each_and_either_may_go_first(nvme_path: Path, tmp_path: Path) -> None:
    before = of_system()
    first, second = (trainer_of(strategy_of(nvme_path, ALL)) for _ in range(2))
    fit(first)
    fit(second)
    assert len(list(nvme_path.iterdir())) == 2
    del first
    collect_garbage()
    assert len(list(nvme_path.iterdir())) == 1
    second.save_checkpoint(tmp_path / "after.ckpt")
    del second
    collect_garbage()
    until_as_before(of_system, before, "two trainers")
    assert not list(nvme_path.iterdir())


@pytest.mark.long
def test_ctrl_c_within_the_strategy_leaves_nothing(nvme_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def interrupted(place: int) -> bool:
        trainer = trainer_of(strategy_of(nvme_path, ALL), max_epochs=1)

        def run() -> None:
            try:
                trainer.fit(Net(), loader(4), loader(4))
            except SystemExit:  # What Lightning makes of it.
                raise KeyboardInterrupt from None

        before = of_process()
        struck = interrupted_at(place, run, "lightning/strategy.py")
        signal.signal(signal.SIGINT, handler)
        until_as_before(of_process, before, place)
        return struck

    fit(trainer_of())
    collect_garbage()
    before = of_system()
    for place in places(7, sample=25):  # There are about a hundred, and each takes a fit.
        if not interrupted(place):
            break
        collect_garbage()
        until_as_before(of_system, before, place)
        assert not list(nvme_path.iterdir()), place
    collect_garbage()
    assert place > 50


def end_by_sigterm(rank: int, nvme_path: Path) -> None:
    class Ended(Net):
        def on_after_backward(self) -> None:
            assert os.listdir(nvme_path)
            os.kill(os.getpid(), signal.SIGTERM)

    trainer_of(strategy_of(nvme_path, ALL)).fit(Ended(), loader())
    raise AssertionError("Lightning has ended the program")


def test_sigterm_in_fit_leaves_nothing(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(end_by_sigterm, nvme_path, ranks=1)
