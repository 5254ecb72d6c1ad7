"""Wrong settings, wrong places, being stopped at any moment: the right error, and nothing is lost or left behind."""

from __future__ import annotations

import _thread
import contextlib
import copy
import errno
import gc
import itertools
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from isolation import alone
from launcher import Program
from small_drives import mounted
from snapshots import STEPS, Snapshot, Training, make_config
from torch import nn
from torch.optim import Optimizer
from training import adamw, assert_same, assert_same_state, backward, make_model, run, same_bits

import swapper
from swapper.optimizer import conversion
from swapper.optimizer.swapper import OptimizerSwapper


def train_plain(steps: int = STEPS) -> nn.Module:
    model = make_model()
    run(model, adamw(model), range(steps))
    return model


@contextmanager
def refused(error: type[Exception], *words: str, number: int | None = None) -> Iterator[None]:
    """Wrapping raises, says these words, and leaves an optimizer with state as it was, usable plainly."""
    model = make_model()
    optimizer = adamw(model)
    run(model, optimizer, range(2))
    attributes, state = dict(vars(optimizer)), {p: dict(entries) for p, entries in optimizer.state.items()}
    with pytest.raises(error) as caught:
        yield optimizer
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in: {caught.value}"
    if number is not None:
        assert caught.value.errno == number  # type: ignore[attr-defined]
    assert type(optimizer) is torch.optim.AdamW
    assert vars(optimizer).keys() == attributes.keys()
    assert all(vars(optimizer)[key] is value for key, value in attributes.items())
    assert optimizer.state.keys() == state.keys()
    assert all(optimizer.state[p][key] is value for p in state for key, value in state[p].items())
    run(model, optimizer, range(2, STEPS))
    assert_same(train_plain(), model)


# --- The path --------------------------------------------------------------------------------------------------------


def test_a_missing_path(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    with refused(swapper.ConfigError, "nvme_path", re.escape(str(path)), "mkdir -p", number=errno.ENOENT) as optimizer:
        swapper.wrap_optimizer(optimizer, make_config(path))
    assert not path.exists()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with refused(swapper.ConfigError, "nvme_path", re.escape(str(path)), number=errno.ENOTDIR) as optimizer:
        swapper.wrap_optimizer(optimizer, make_config(path))
    assert path.read_text() == "mine"


@pytest.mark.root
def test_a_path_that_cannot_be_written(nvme_path: Path, leaves_nothing: None) -> None:
    with (
        mounted(nvme_path, "-t", "tmpfs", "-o", "ro,size=4m", "tmpfs"),
        refused(
            swapper.ConfigError, "nvme_path", "read-only", re.escape(str(nvme_path)), number=errno.EROFS
        ) as optimizer,
    ):
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))


@pytest.mark.root
def test_too_little_free_space(nvme_path: Path) -> None:
    with mounted(nvme_path, "-t", "tmpfs", "-o", "size=300k", "tmpfs"):
        with refused(
            swapper.SwapIOError, "nvme_path", r"records need [\d.]+ KiB, [\d.]+ KiB are free", number=errno.ENOSPC
        ) as optimizer:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        assert not list(nvme_path.iterdir())
        with refused(swapper.ConfigError, "nvme_path") as optimizer:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))


@pytest.mark.root
def test_too_little_free_space_for_a_group_that_is_added(nvme_path: Path, plain: list[Snapshot]) -> None:
    with mounted(nvme_path, "-t", "tmpfs", "-o", "size=1200k", "tmpfs"), Training(nvme_path, 2) as training:
        training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(400, 400))]})
        for _ in range(2):
            backward(training.model, 2)
            with pytest.raises(swapper.SwapIOError, match="are free"):
                training.optimizer.step()
            training.optimizer.zero_grad()
        training.optimizer.param_groups.pop()
        run(training.model, training.optimizer, range(2, STEPS))
        assert all(same_bits(p, plain[STEPS].model[name]) for name, p in training.model.named_parameters())


@pytest.mark.root
def test_a_path_in_memory(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWAPPER_ALLOW_TMPFS")
    with mounted(nvme_path, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        with refused(swapper.ConfigError, "nvme_path", "tmpfs", "SWAPPER_ALLOW_TMPFS=1") as optimizer:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        assert not list(nvme_path.iterdir())


# --- Settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pool_bytes": "700KiB", "bucket_bytes": "256KiB"}, ["pool_bytes", "3 x bucket_bytes 256KiB", "= 768KiB"]),
        ({"pool_bytes": "32KiB"}, ["pool_bytes: 32KiB", "3 x .* = 48KiB"]),
        ({"pol_bytes": "1GiB"}, ["pol_bytes", "pool_bytes"]),
        ({"offload_optimizer": {"device": "nvme", "mastr_weights": True}}, ["mastr_weights", "master_weights"]),
        ({"offload_optimizer": {"device": "ssd"}}, [r"offload_optimizer\.device", "ssd", "nvme"]),
        ({"offload_optimizer": {"device": "NVMe "}}, [r"offload_optimizer\.device", "nvme"]),
        ({"nvme_path": None}, ["nvme_path", "null"]),
        ({"nvme_path": 3}, ["nvme_path", "3"]),
        ({"pool_bytes": "1 gigabyte"}, ["pool_bytes"]),
        ({"pool_bytes": -5}, ["pool_bytes", "negative"]),
        ({"aio": {"backend": "libaio"}}, [r"aio\.backend"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else "-".join(value),
)
def test_wrong_settings(nvme_path: Path, leaves_nothing: None, settings: dict[str, Any], words: list[str]) -> None:
    config = {"nvme_path": nvme_path, "offload_optimizer": {"device": "nvme"}, **settings}
    with refused(swapper.ConfigError, *words) as optimizer:
        swapper.wrap_optimizer(optimizer, config)


def test_a_pool_too_small_for_an_optimizer_that_is_stepped_whole(nvme_path: Path, leaves_nothing: None) -> None:
    model = nn.Linear(400, 400)
    optimizer = torch.optim.Muon([model.weight])
    attributes = set(vars(optimizer))
    config = swapper.OffloadConfig(
        nvme_path=nvme_path, pool_bytes="1MiB", bucket_bytes="64KiB", offload_optimizer={"device": "nvme"}
    )
    with pytest.raises(swapper.ConfigError, match=r"pool_bytes: .*3 x .*largest.* = .*at least (\d+)") as caught:
        swapper.wrap_optimizer(optimizer, config)
    assert set(vars(optimizer)) == attributes
    match = re.search(r"at least (\d+)", str(caught.value))
    assert match is not None
    # What the message asks for is enough.
    config = config.model_copy(update={"pool_bytes": int(match[1])})
    swapper.wrap_optimizer(optimizer, config)
    for _ in range(2):
        model(torch.ones(2, 400)).sum().backward()
        optimizer.step()
    swapper.of(optimizer).close()


def test_a_pool_larger_than_the_memory(nvme_path: Path, leaves_nothing: None) -> None:
    with refused(swapper.SwapIOError, "pinned memory", number=errno.ENOMEM) as optimizer:
        swapper.wrap_optimizer(
            optimizer, {"nvme_path": nvme_path, "pool_bytes": "64TiB", "offload_optimizer": {"device": "nvme"}}
        )


def with_few_descriptors(nvme_path: Path) -> None:
    with Training(nvme_path, 0):  # What a process opens once is open.
        pass
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.open("/dev/null", os.O_RDONLY)]
    while taken[-1] < highest:  # So that no lower number is free.
        taken.append(os.open("/dev/null", os.O_RDONLY))
    try:
        with refused(swapper.SwapIOError, "ulimit -n", "bucket_bytes", number=errno.EMFILE) as optimizer:
            # One for the lock of the run, and one: a file needs two, and there is no other that could be closed for it.
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 3, hard))
            try:
                swapper.wrap_optimizer(optimizer, make_config(nvme_path))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    finally:
        for descriptor in taken:
            os.close(descriptor)


def test_too_many_open_files(nvme_path: Path, leaves_nothing: None) -> None:
    alone(with_few_descriptors, nvme_path)  # Where no other test's files could be closed for one.


def test_lbfgs(nvme_path: Path, leaves_nothing: None) -> None:
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    attributes = set(vars(optimizer))
    for device in ("nvme", "cpu"):
        with pytest.raises(swapper.ConfigError, match="LBFGS keeps one history"):
            swapper.wrap_optimizer(optimizer, make_config(nvme_path, device=device))
    assert set(vars(optimizer)) == attributes
    optimizer.step(lambda: backward(model, 0))


def test_lbfgs_whose_state_stays_is_plain(nvme_path: Path, leaves_nothing: None) -> None:
    plain, model = make_model(), make_model()
    model.load_state_dict(plain.state_dict())
    expected = torch.optim.LBFGS(plain.parameters())
    config = make_config(nvme_path, device="none", master_weights=False)
    optimizer = swapper.wrap_optimizer(torch.optim.LBFGS(model.parameters()), config)
    before = [p.detach().clone() for p in plain.parameters()]

    def step(net: nn.Module, of_net: torch.optim.Optimizer) -> None:
        def closure() -> float:
            of_net.zero_grad()
            return backward(net, 0).item()

        of_net.step(closure)

    for _ in range(2):
        step(plain, expected)
        step(model, optimizer)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert not any(map(torch.equal, plain.parameters(), before))
    swapper.unwrap_optimizer(optimizer)


@pytest.mark.parametrize("thing", [None, "adamw", nn.Linear(2, 2), torch.optim.AdamW, [nn.Parameter(torch.ones(2))]])
def test_not_an_optimizer(nvme_path: Path, leaves_nothing: None, thing: Any) -> None:
    with pytest.raises(swapper.ConfigError, match=r"torch\.optim\.Optimizer"):
        swapper.wrap_optimizer(thing, make_config(nvme_path))
    if thing is not None:  # No optimizer at all is fine.
        with pytest.raises(swapper.ConfigError, match=r"torch\.optim\.Optimizer|not an optimizer"):
            swapper.check(make_model(), thing, make_config(nvme_path))
    for function in (swapper.of, swapper.unwrap_optimizer):
        with pytest.raises(swapper.SwapError, match="not wrapped"):
            function(thing)
    with pytest.raises(swapper.SwapError, match=r"model\.swapper"):
        swapper.of(make_model())  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["dict", "path", "str", "json"])
def test_a_config_in_each_form(nvme_path: Path, form: str, tmp_path: Path) -> None:
    config: Any = {"nvme_path": str(nvme_path), "pool_bytes": "24MiB", "offload_optimizer": {"device": "nvme"}}
    if form != "dict":
        file = tmp_path / ("config.json" if form == "json" else "config.yaml")
        file.write_text(
            swapper.OffloadConfig(**config).to_yaml() if form != "json" else __import__("json").dumps(config)
        )
        config = str(file) if form == "str" else file
    model = make_model()
    optimizer = swapper.wrap_optimizer(adamw(model), config)
    run(model, optimizer, range(STEPS))
    assert_same(train_plain(), model)
    swapper.of(optimizer).close()


@pytest.mark.parametrize(
    "config", [None, 3, ["nvme"], b"config.yaml", object(), ""], ids=lambda config: type(config).__name__
)
def test_a_config_of_the_wrong_type(config: Any) -> None:
    with refused(swapper.ConfigError, "config") as optimizer:
        swapper.wrap_optimizer(optimizer, config)


def test_a_config_file_that_is_missing(tmp_path: Path) -> None:
    with refused(swapper.ConfigError, "no such file") as optimizer:
        swapper.wrap_optimizer(optimizer, tmp_path / "config.yaml")


# --- Other processes -------------------------------------------------------------------------------------------------

CHILD = """
    import logging, os, sys
    from pathlib import Path
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
    import torch
    import swapper
    from training import adamw, make_model, run
    from snapshots import make_config
    path = Path(sys.argv[1])
    model = make_model()
    optimizer = swapper.wrap_optimizer(adamw(model), make_config(path))
"""


def child(program: str, *arguments: object, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    text = textwrap.dedent(CHILD) + textwrap.dedent(program)
    return Program(
        [sys.executable, "-W", "error", *flags, "-c", text, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SWAPPER_ALLOW_TMPFS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 and not err, (process.returncode, out, err)
    return out


PRINT = """
    print("weights", [p.detach().view(torch.int32).sum().item() for p in model.parameters()], flush=True)
"""


def weights(model: nn.Module) -> str:
    return f"weights {[p.detach().view(torch.int32).sum().item() for p in model.parameters()]}\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [(), pytest.param(("-O",), marks=pytest.mark.thorough("torch is compiled anew: ten seconds"))], ids=str
)
def test_runs_beside_each_other_and_without_asserts(
    nvme_path: Path, leaves_nothing: None, flags: tuple[str, ...]
) -> None:
    """Two runs on one path; one of them with `python -O`."""
    program = """
    run(model, optimizer, range(3))
    print(len(list(path.iterdir())), flush=True)
    run(model, optimizer, range(3, 5))
    """
    both = [child(program + PRINT, nvme_path, flags=flags) for flags in ((), flags)]
    for process in both:
        assert finish(process).endswith(weights(train_plain()))


STOP = """
    run(model, optimizer, range(2))
    print("training", flush=True)
    for seed in range(2, 10**9):
        run(model, optimizer, range(seed, seed + 1))
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_leaves_nothing_for_long(
    nvme_path: Path, leaves_nothing: None, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    process = child(STOP, nvme_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    time.sleep(random.Random(number).random() / 10)
    process.send_signal(number)
    _, err = process.communicate(timeout=240)
    assert process.returncode == -number
    left = list(nvme_path.iterdir())
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in err and not left
        return
    assert len(left) == 1 and not err
    with Training(nvme_path, 1):
        assert not left[0].exists()
    (message,) = [r.getMessage() for r in caplog.records if "left by a run" in r.getMessage()]
    assert str(left[0]) in message and "freed" in message


@pytest.mark.sampled(1)
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_sigterm_while_starting(nvme_path: Path, leaves_nothing: None, delay_s: float) -> None:
    program = """
    swapper.of(optimizer).close()
    print("starting", flush=True)
    while True:
        swapper.of(swapper.wrap_optimizer(adamw(model), make_config(path))).close()
    """
    process = child(program, nvme_path)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay_s)
    process.terminate()
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGTERM
    for name in nvme_path.glob(".swapper-new-*"):  # Killed before it was locked: it might be another run just starting.
        os.utime(name, (0, 0))
    with Training(nvme_path, 1):
        assert len(list(nvme_path.iterdir())) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["", "sys.exit()", "del optimizer"])
def test_the_interpreter_ends_with_transfers_in_flight(nvme_path: Path, leaves_nothing: None, how: str) -> None:
    program = """
    import functools, swapper.session
    from swapper.io.handle import AsyncIOHandle, FaultPlan
    from training import backward
    logging.getLogger("swapper").setLevel(logging.ERROR)  # That steps wait for such a drive is said in warnings.
    swapper.of(optimizer).close()
    swapper.session.AsyncIOHandle = functools.partial(AsyncIOHandle, faults=FaultPlan(delay_us=50000))
    model = make_model()
    optimizer = swapper.wrap_optimizer(adamw(model), make_config(path))
    run(model, optimizer, range(2))
    state = optimizer.state_dict()
    run(model, optimizer, range(2, 5))
    """
    out = finish(child(program + PRINT + "    backward(model, 5)\n    " + how, nvme_path))
    assert out == weights(train_plain())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_workers_leave_everything_alone(nvme_path: Path, leaves_nothing: None, plain: list[Snapshot]) -> None:
    with Training(nvme_path, 2) as training:
        loader = torch.utils.data.DataLoader(
            torch.arange(8), batch_size=2, num_workers=2, multiprocessing_context="fork", persistent_workers=True
        )
        for batch in loader:
            assert len(batch) == 2
            backward(training.model, 2)  # Reads are in flight when the loader's workers end.
            training.optimizer.zero_grad()
        del loader
        training.ends_in(plain[STEPS], range(2, STEPS))


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


# Where Ctrl-C strikes in a finalizer of torch's or Python's own, Python drops it with a word.
unraisable = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class CtrlC:
    """Ctrl-C at the `at`-th place where the interpreter looks for signals, and once more `again` places later.

    Such places are where a Python function begins and where a call of C ends. In finalizers, where Python itself drops
    exceptions, it waits, and in `shutil.rmtree`, which may close a descriptor twice then and raise EBADF instead.
    """

    def __init__(self, at: int, again: int = 0) -> None:
        self.at = at
        self.again = again
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return"):
            return
        self.count += 1
        if not self.at or self.count < self.at:
            return
        inner: FrameType | None = frame
        while inner is not None:
            if inner.f_code.co_name in ("__del__", "_finalize", "_rmtree_safe_fd"):
                return
            inner = inner.f_back
        self.at, self.again = (self.count + self.again if self.again else 0), 0
        _thread.interrupt_main()

    def __enter__(self) -> CtrlC:
        sys.setprofile(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)


def places(seed: int, act: Callable[[], object], count: int = 12) -> list[tuple[int, int]]:
    """Where to strike in `act`, and after how much more once again; 0 for not again."""
    with CtrlC(0) as counting:
        act()
    draw = random.Random(seed)
    return [(draw.randrange(1, counting.count + 1), draw.choice([0, 0, draw.randrange(1, 40)])) for _ in range(count)]


def continues(training: Training, plain: list[Snapshot], possible: range) -> None:
    """What was cut off was not begun, or complete, or is refused until both are loaded. Then training goes on."""
    training.optimizer.zero_grad()
    try:
        state = training.optimizer.state_dict()
    except swapper.SwapError as error:
        assert "load" in str(error)
        backward(training.model, 0)
        with pytest.raises(swapper.SwapError, match="load"):
            training.optimizer.step()
        training.optimizer.zero_grad()
        done = possible[0]
        training.load(plain[done])
    else:
        matches = [
            i
            for i in possible
            if all(same_bits(p, plain[i].model[name]) for name, p in training.model.named_parameters())
        ]
        assert matches, "the parameters are those of no step"
        done = matches[0]
        assert_same_state(plain[done].optimizer, state)
    training.ends_in(plain[STEPS], range(done, STEPS))


@pytest.mark.long
@unraisable
@pytest.mark.parametrize("native", ["on", "off"])
def test_ctrl_c_in_a_step(native: str, nvme_path: Path, leaves_nothing: None, plain: list[Snapshot]) -> None:
    def act(training: Training) -> None:
        run(training.model, training.optimizer, range(2, 3))

    with Training(nvme_path, 2, native_step=native) as training:
        where = places(1, lambda: act(training), 16)
    for at, again in where:
        with Training(nvme_path, 2, native_step=native) as training:
            try:
                with CtrlC(at, again):
                    act(training)
            except KeyboardInterrupt:
                pass
            continues(training, plain, range(2, 4))


@unraisable
def test_ctrl_c_in_state_dict(nvme_path: Path, leaves_nothing: None, plain: list[Snapshot]) -> None:
    with Training(nvme_path, 2) as training:
        for at, again in places(2, training.optimizer.state_dict):
            try:
                with CtrlC(at, again):
                    training.optimizer.state_dict()
            except KeyboardInterrupt:
                pass
            training.equals(plain[2])
        training.ends_in(plain[STEPS], range(2, STEPS))


@pytest.mark.long
@unraisable
def test_ctrl_c_in_load_state_dict(nvme_path: Path, leaves_nothing: None, plain: list[Snapshot]) -> None:
    with Training(nvme_path, 2) as training:
        where = places(3, lambda: training.optimizer.load_state_dict(plain[3].optimizer), 16)
    for at, again in where:
        with Training(nvme_path, 2) as training:
            loaded = {**plain[3].optimizer, "param_groups": [{**plain[3].optimizer["param_groups"][0], "lr": 0.5}]}
            try:
                with CtrlC(at, again):
                    training.optimizer.load_state_dict(loaded)
            except KeyboardInterrupt:
                pass
            try:
                state = training.optimizer.state_dict()
            except swapper.SwapError:
                backward(training.model, 0)
                with pytest.raises(swapper.SwapError):
                    training.optimizer.step()
            else:
                assert_same_state(plain[2].optimizer if state["param_groups"][0]["lr"] != 0.5 else loaded, state)
            training.optimizer.zero_grad()
            training.load(plain[3])
            training.ends_in(plain[STEPS], range(3, STEPS))


@pytest.mark.long
@unraisable
@pytest.mark.parametrize("native", ["on", "off"])
def test_ctrl_c_in_wrap_and_close(native: str, nvme_path: Path, leaves_nothing: None, plain: list[Snapshot]) -> None:
    def act(optimizer: Optimizer) -> None:
        swapper.of(swapper.wrap_optimizer(optimizer, make_config(nvme_path, native_step=native))).close()

    def make() -> tuple[nn.Module, Optimizer]:
        model = make_model()
        optimizer = adamw(model)
        run(model, optimizer, range(2))
        return model, optimizer

    for at, again in places(4, lambda: act(make()[1]), 48 if native == "on" else 24):
        model, optimizer = make()
        attributes = dict(vars(optimizer))
        try:
            with CtrlC(at, again):
                act(optimizer)
        except KeyboardInterrupt:
            pass
        swapped = getattr(optimizer, "swapper", None)
        if swapped is not None and not swapped.closed:  # It was complete.
            run(model, optimizer, range(2, STEPS))
            assert all(same_bits(p, plain[STEPS].model[name]) for name, p in model.named_parameters())
        elif swapped is None:
            assert vars(optimizer).keys() == attributes.keys()
            assert_same_state(plain[2].optimizer, optimizer.state_dict())
            run(model, optimizer, range(2, STEPS))
            assert all(same_bits(p, plain[STEPS].model[name]) for name, p in model.named_parameters())
        if swapped is not None:
            swapped.close()
        gc.collect()
        assert not list(nvme_path.iterdir()), (at, again)


def test_ctrl_c_twice_in_wrap_loses_no_state(
    nvme_path: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once when all is done, and once more while it is undone: the state was in neither place then."""
    model = make_model()
    optimizer = adamw(model)
    run(model, optimizer, range(2))
    optimizer.param_groups[0]["initial_lr"] = 0.01  # As a scheduler has it, for the sake of the last that is undone.
    before = copy.deepcopy(optimizer.state_dict())
    make = conversion._as_of_a_scheduler
    struck: list[str] = []

    def take_over(*_: object) -> None:
        struck.append("once")
        raise KeyboardInterrupt

    def interrupted(of: Optimizer, step: Any) -> Any:
        if struck:  # It is undone.
            struck.append("again")
        if len(struck) == 2:
            signal.raise_signal(signal.SIGINT)
        return make(of, step)

    monkeypatch.setattr(OptimizerSwapper, "_take_over", take_over)
    monkeypatch.setattr(conversion, "_as_of_a_scheduler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    assert struck[:2] == ["once", "again"]
    assert not hasattr(optimizer, "swapper")
    assert_same_state(before, optimizer.state_dict())
    run(model, optimizer, range(2, 3))


@pytest.mark.long
@unraisable
def test_ctrl_c_in_unwrap(nvme_path: Path, leaves_nothing: None, plain: list[Snapshot]) -> None:
    with Training(nvme_path, 2) as training:
        where = places(5, lambda: swapper.unwrap_optimizer(training.optimizer), 16)
    for at, again in where:
        with Training(nvme_path, 2) as training:
            try:
                with CtrlC(at, again):
                    swapper.unwrap_optimizer(training.optimizer)
            except KeyboardInterrupt:
                pass
            training.ends_in(plain[STEPS], range(2, STEPS))


@pytest.mark.parametrize("then", ["step", "state_dict", "load_state_dict", "assign"])
def test_ctrl_c_twice_in_reading_leaves_nothing_taken(
    then: str, nvme_path: Path, leaves_nothing: None, plain: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once when a record was taken, and once more before it is given back: the next use found it in use."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Training(nvme_path, 2) as training:
        with monkeypatch.context() as patch:
            patch.setattr("swapper.optimizer.state_dicts._Gathered.add", interrupted)
            patch.setattr("swapper.optimizer.records.BucketRecords.recover", interrupted)
            with pytest.raises(KeyboardInterrupt):
                training.optimizer.state_dict()
        if then == "state_dict":
            assert_same_state(plain[2].optimizer, training.optimizer.state_dict())
        elif then == "load_state_dict":
            training.load(plain[2])
        elif then == "assign":
            first = training.model[0].weight
            training.optimizer.state[first] = training.optimizer.state[first]
        training.ends_in(plain[STEPS], range(2, STEPS))


def test_ctrl_c_before_the_end_of_unwrap_keeps_the_state(
    nvme_path: Path, leaves_nothing: None, plain: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all was read, and nothing undone: the records are the only state."""

    class Interrupted(contextlib.AbstractContextManager[None]):
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    with Training(nvme_path, 2) as training:
        with monkeypatch.context() as patch:
            patch.setattr("swapper.optimizer.swapper.interrupts_deferred", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                swapper.unwrap_optimizer(training.optimizer)
        training.ends_in(plain[STEPS], range(2, STEPS))


@pytest.mark.sampled(1)
@unraisable
@pytest.mark.parametrize("seed", range(2))
def test_real_signals_at_random_times(
    nvme_path: Path, leaves_nothing: None, plain: list[Snapshot], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT to the main thread, with transfers that take long enough to be interrupted in the wait for them."""
    import functools

    from swapper.io.handle import AsyncIOHandle, FaultPlan

    faults = FaultPlan(seed=seed, delay_us=2000, reorder=True)
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=faults))
    draw = random.Random(seed)
    main = threading.main_thread().ident
    assert main is not None
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    struck = 0
    in_finalizers: list[str] = []  # There Python raises nothing to anybody.
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: in_finalizers.append(repr(raised.exc_value)))
    try:
        with Training(nvme_path, 0) as training:
            done = 0
            for _ in range(20):
                worker = threading.Thread(
                    target=lambda: (time.sleep(draw.random() * 0.05), signal.pthread_kill(main, signal.SIGINT))
                )
                try:
                    try:
                        worker.start()
                        run(training.model, training.optimizer, range(done, done + 1))
                        training.optimizer.state_dict()
                        training.optimizer.load_state_dict(plain[done + 1].optimizer)
                        time.sleep(1)
                    finally:
                        while worker.is_alive():
                            worker.join()
                except KeyboardInterrupt:
                    struck += 1
                training.optimizer.zero_grad()
                try:
                    state = training.optimizer.state_dict()
                except swapper.SwapError:
                    training.load(plain[done])
                else:
                    same = [
                        i for i in (done, done + 1) if same_bits(training.model[0].weight, plain[i].model["0.weight"])
                    ]
                    done = same[0]
                    assert_same_state(plain[done].optimizer, state)
                done = min(done, STEPS - 1)
                training.load(plain[done])
            training.ends_in(plain[STEPS], range(done, STEPS))
    finally:
        sys.setswitchinterval(before_s)
    assert set(in_finalizers) <= {"KeyboardInterrupt()"}
    assert struck + len(in_finalizers) == 20


# --- Nothing is left behind ------------------------------------------------------------------------------------------


def test_twenty_runs_in_one_process_leak_nothing(nvme_path: Path, leaves_nothing: None) -> None:
    def count() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()

    model = make_model()
    for cycle in range(20):
        optimizer = swapper.wrap_optimizer(adamw(model), make_config(nvme_path))
        run(model, optimizer, range(1))
        if cycle % 3 == 0:
            swapper.of(optimizer).close()
        elif cycle % 3 == 1:
            swapper.unwrap_optimizer(optimizer)
        del optimizer
        if cycle == 3:
            most = count()
        deadline_s = time.monotonic() + 240  # A thread that was joined may still be listed for a moment.
        while cycle > 3 and any(now > then for now, then in zip(count(), most, strict=True)):
            assert time.monotonic() < deadline_s, (cycle, count(), most)
            time.sleep(0.01)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_parameters_in_one_memory_are_refused_with_foreach(nvme_path: Path, device: str) -> None:
    """With foreach all are read before the first is written; a loop, the default, does as buckets do."""
    same = torch.randn(64, 64)
    config = make_config(nvme_path, device=device)
    together = torch.optim.SGD([nn.Parameter(same), nn.Parameter(same.view(-1))], foreach=True)
    with pytest.raises(swapper.ConfigError, match=r"foreach=True: parameter 0 .* and parameter 1 .* are in the same"):
        swapper.wrap_optimizer(together, config)
    assert not hasattr(together, "swapper")
    apart = torch.optim.SGD([nn.Parameter(same[:32]), nn.Parameter(same[32:])], foreach=True)
    swapper.of(swapper.wrap_optimizer(apart, config)).close()
    loop = torch.optim.SGD([nn.Parameter(same), nn.Parameter(same.view(-1))])
    swapper.of(swapper.wrap_optimizer(loop, config)).close()


@pytest.mark.parametrize("change", ["option", "data", "added"])
def test_parameters_in_one_memory_are_refused_with_foreach_that_comes_later(nvme_path: Path, change: str) -> None:
    """By the step, before anything is stepped. Without one of the gradients, or foreach, its bits are plain ones."""

    def run(swapped: bool) -> torch.Tensor:
        torch.manual_seed(0)
        first, second = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))
        if change != "data":
            second.data = first.data
        optimizer = torch.optim.AdamW([first, second][: 1 + (change != "added")], foreach=change != "option")
        if swapped:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        if change == "data":
            second.data = first.data
        elif change == "added":
            optimizer.param_groups[0]["params"].append(second)
        for group in optimizer.param_groups:
            group["foreach"] = True
        if swapped:
            first.grad, second.grad = torch.ones(64, 64), torch.ones(64, 64)
            before = first.detach().clone()
            with pytest.raises(swapper.ConfigError, match=r"foreach=True: .* are in the same memory"):
                optimizer.step()
            assert torch.equal(first, before)
            second.grad = None
        for group, with_second in itertools.product(optimizer.param_groups, [False, True]):
            first.grad = torch.randn(64, 64)
            group["foreach"], second.grad = not with_second, torch.randn(64, 64) if with_second else None
            optimizer.step()
        if swapped:
            swapper.of(optimizer).close()
        return first.detach()

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("change", ["wrapped", "option", "load"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_of_low_precision_is_refused_whenever_it_comes(
    nvme_path: Path, dtype: torch.dtype, change: str
) -> None:
    """It leaves such parameters as they are. Not with masters, which are fp32, and not by other classes."""

    def made(cls: Any = torch.optim.SGD, masters: bool = False, **options: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = cls([nn.Parameter(torch.ones(64, 64, dtype=dtype))], lr=0.5, **options)
        if change == "wrapped":
            optimizer.param_groups[0]["fused"] = True
        swapper.wrap_optimizer(optimizer, make_config(nvme_path, master_weights=masters))
        if change == "option":
            optimizer.param_groups[0]["fused"] = True
        elif change == "load":
            state = optimizer.state_dict()
            state["param_groups"][0]["fused"] = True
            optimizer.load_state_dict(state)
        [p] = optimizer.param_groups[0]["params"]
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert bool((p != 1).all())
        return optimizer

    with pytest.raises(swapper.ConfigError, match=r"SGD\(fused=True\) leaves torch\..* parameters on the CPU"):
        made(momentum=0.9)
    for optimizer in (made(momentum=0.9, masters=True), made(torch.optim.AdamW)):
        swapper.of(optimizer).close()


# --- Arguments of another kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: swapper.OffloadConfig.load(wrong),
        lambda wrong: swapper.OffloadConfig.from_deepspeed(wrong),
        lambda wrong: swapper.save_checkpoint(wrong, nn.Linear(2, 2)),
        lambda wrong: swapper.load_checkpoint(wrong, nn.Linear(2, 2)),
        lambda wrong: swapper.save({}, wrong),
        lambda wrong: swapper.load(wrong),
        lambda wrong: swapper.FastWriter(wrong),
        lambda wrong: swapper.load_safetensors(nn.Linear(2, 2), wrong),
        lambda wrong: swapper.offload(nn.Linear(2, 2), config={"pool_bytes": "1MiB"}, weights=[wrong]),
        lambda wrong: swapper.check(nn.Linear(2, 2), config={"pool_bytes": "1MiB"}, weights=[wrong]),
        lambda wrong: swapper.from_pretrained(wrong, {"pool_bytes": "1MiB"}),
    ],
    ids=lambda value: "",
)
@pytest.mark.parametrize("wrong", [None, 5, object()], ids=["none", "number", "object"])
def test_what_is_no_path_is_refused(call: Callable[[Any], object], wrong: Any, leaves_nothing: None) -> None:
    with pytest.raises(swapper.ConfigError, match=r"is not a path; give a string or a pathlib\.Path"):
        call(wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: swapper.materialize(wrong, {"nvme_path": ".", "offload_param": {"device": "nvme"}}),
        lambda wrong: swapper.load_safetensors(wrong, "weights.safetensors"),
    ],
    ids=["materialize", "load_safetensors"],
)
def test_what_is_no_model_is_refused(call: Callable[[Any], object]) -> None:
    for wrong in (None, [nn.Linear(2, 2)], nn.Linear):
        with pytest.raises(swapper.ConfigError, match=r"is not a torch\.nn\.Module"):
            call(wrong)


def test_gathered_refuses_what_is_no_tensor() -> None:
    model = nn.Linear(2, 2)
    for wrong in (5, None, "weight", model.named_parameters(), model.state_dict(), [model]):
        with pytest.raises(swapper.ConfigError, match="is not a tensor; give a module, a parameter or an iterable"):
            swapper.gathered(wrong)  # type: ignore[arg-type]
    with swapper.gathered(parameter for parameter in model.parameters()):
        pass


def test_files_refuse_a_pool_that_is_no_number_of_bytes(tmp_path: Path) -> None:
    for wrong in ("4MiB", None, 1):
        with pytest.raises(swapper.ConfigError, match=r"pool_bytes: .* is no number of bytes of at least 262144"):
            swapper.save({}, tmp_path / "a.pt", pool_bytes=wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    swapper.save({}, tmp_path / "a.pt", pool_bytes=np.int64(1 << 20))


def test_load_maps_no_file(tmp_path: Path) -> None:
    swapper.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(swapper.ConfigError, match="mmap=True"):
        swapper.load(tmp_path / "a.pt", mmap=True)
    assert same_bits(swapper.load(tmp_path / "a.pt", mmap=False)["a"], torch.ones(3))


def test_only_classes_of_optimizers_are_elementwise() -> None:
    for wrong in (None, 5, [torch.optim.SGD], nn.Linear, torch.optim.SGD([torch.zeros(1)])):
        with pytest.raises(swapper.ConfigError, match="is not a class of optimizers"):
            swapper.register_elementwise(wrong)  # type: ignore[arg-type]
