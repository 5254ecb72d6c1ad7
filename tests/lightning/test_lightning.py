"""`SwapStrategy` against the stock strategy: the same program, the same bits."""

from __future__ import annotations

import cProfile
import errno
import functools
import gc
import os
import pstats
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from launcher import run_program
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import grad_norm
from lightning_runs import IGNORED_WARNINGS, Net, config_of, facts, fit, loader, precision_of, strategy_of, trainer_of
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader
from twins import bits

import swapper
import swapper.lightning
from swapper.errors import ConfigError, SwapIOError
from swapper.lightning.strategy import Swapping
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.tensors.evicted import EvictedParameter

pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED_WARNINGS]

WHAT = ["state", "state-gradients", "state-gradients-parameters"]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def batches_of(precision: str) -> Callable[[], Any]:
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    return lambda: loader(dtype=dtype)


@pytest.mark.long
@pytest.mark.sampled(7)
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_ends_in_the_same_bits(optimizer: str, precision: str, nvme_path: Path) -> None:
    def program(strategy: Any, options: dict[str, Any]) -> Any:
        data = batches_of(precision)
        return facts(
            fit(
                strategy,
                lambda: Net(OPTIMIZERS[optimizer]),
                data=data,
                validation=data,
                **options,
                **precision_of(precision),
            )
        )

    for accumulate in (1, 2):  # Of five batches: the last window is short.
        for clip in ({}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}):
            if clip and optimizer == "fused" and "mixed" in precision:
                continue  # Lightning refuses it; see the test of that.
            options: dict[str, Any] = {"accumulate_grad_batches": accumulate, **clip}
            stock = program("auto", options)
            for what in WHAT if optimizer in ("adamw", "fused") else WHAT[1:2]:
                assert program(strategy_of(nvme_path, what), options) == stock, (what, options)


# --- What a Trainer does ----------------------------------------------------------------------------------------------


class Gan(L.LightningModule):
    """Manual optimization with two optimizers, accumulation and clipping of its own, and schedulers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 16))
        self.critic = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        self.manual_backward(self.critic(self.generator(batch)).square().mean())
        if number % 2:
            self.clip_gradients(first, 0.05, "norm")
            first.step()
            first.zero_grad()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            second.zero_grad()
            self.manual_backward(self.critic(batch).square().mean() - self.critic(self.generator(batch)).mean())
            self.clip_gradients(second, 1e-3, "value")
            second.step()
        if number % 2:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.generator.parameters(), lr=1e-2)
        second = torch.optim.RMSprop(self.critic.parameters(), lr=1e-2)
        return [first, second], [StepLR(first, 3, 0.5), StepLR(second, 2, 0.9)]


class Doubting(Net):
    """Some of its steps give no loss."""

    def training_step(self, batch: torch.Tensor, number: int) -> Any:
        return None if number in (0, 3) else super().training_step(batch, number)


class Watching(Net):
    """Looks at gradients and parameters where Lightning lets it."""

    def on_after_backward(self) -> None:
        self.losses.append([bits(p.grad) for p in self.parameters()])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.losses.append({name: bits(norm) for name, norm in grad_norm(self, 2).items()})

    def on_train_epoch_end(self) -> None:
        self.losses.append([bits(p.sum()) for p in self.parameters()])


def scheduled(interval: str) -> Callable[[torch.optim.Optimizer], Any]:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        by_step = OneCycleLR(optimizer, 0.1, total_steps=10)
        return {"scheduler": by_step if interval == "step" else StepLR(optimizer, 1, 0.1), "interval": interval}

    return schedule


class Ema(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda averaged, new, count: averaged * 0.9 + new * 0.1)


class Thawing(BackboneFinetuning):
    """As its base, of the first two layers."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, verbose=False)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None: ...


class Spine(Net):
    """Has a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 96), nn.Linear(96, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "gan": lambda: {"module": Gan, "validation": None},
    "scheduler-per-step": lambda: {"module": lambda: Net(schedule=scheduled("step"))},
    "scheduler-per-epoch": lambda: {"module": lambda: Net(schedule=scheduled("epoch"))},
    "no-loss": lambda: {"module": Doubting},
    "no-loss-16-mixed": lambda: {"module": Doubting, **precision_of("16-mixed")},
    "hooks": lambda: {"module": Watching, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "several-validation-loaders": lambda: {"validation": lambda: [loader(), loader(6, seed=5)]},
    "validation-within-an-epoch": lambda: {"val_check_interval": 2, "accumulate_grad_batches": 3},
    "overfit": lambda: {"overfit_batches": 2, "validation": None},
    "fast-dev-run": lambda: {"fast_dev_run": 2},
    "swa": lambda: {"max_epochs": 4, "callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]},
    "ema": lambda: {"callbacks": [Ema()]},
    "finetuning": lambda: {"module": Spine, "callbacks": [Thawing()]},
    "accumulation-that-changes": lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]},
    "early-stopping": lambda: {"max_epochs": 6, "callbacks": [EarlyStopping("val", patience=1, mode="max")]},
}


@functools.cache
def stock_facts(program: str) -> object:
    """Of the stock strategy; once for all that is swapped."""
    return facts(fit(**PROGRAMS[program]()))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends_in_the_same_bits(program: str, what: str, nvme_path: Path) -> None:
    assert facts(fit(strategy_of(nvme_path, what), **PROGRAMS[program]())) == stock_facts(program)


@pytest.mark.parametrize("what", WHAT)
def test_everything_after_fit_ends_in_the_same_bits(what: str, nvme_path: Path) -> None:
    def run(strategy: Any) -> list[Any]:
        trainer = fit(strategy)
        model = trainer.lightning_module
        found = [facts(trainer), bits(trainer.validate(model, loader(), verbose=False))]
        found.append(bits(trainer.test(model, loader(4), verbose=False)))
        found.append(bits(trainer.predict(model, loader(4))))
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model, loader(), loader())  # With new optimizers.
        return [*found, facts(trainer), bits(trainer.validate(model, loader(), verbose=False))]

    assert run(strategy_of(nvme_path, what)) == run("auto")


@pytest.mark.parametrize("what", WHAT)
def test_the_learning_rate_finder_finds_the_same(what: str, nvme_path: Path, tmp_path: Path) -> None:
    def run(strategy: Any) -> Any:
        def module() -> Net:
            net = Net(lambda parameters: torch.optim.AdamW(parameters, lr=net.lr))
            net.lr = 1e-2
            return net

        finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None)
        trainer = fit(strategy, module, callbacks=[finder], default_root_dir=tmp_path)
        assert finder.optimal_lr is not None
        return facts(trainer), finder.optimal_lr.results

    assert run(strategy_of(nvme_path, what)) == run("auto")


@pytest.mark.parametrize("by", ["norm", "value"])
def test_the_state_moves_and_the_gradients_stay_away_when_they_are_clipped(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(torch.nn.utils, f"clip_grad_{by}_", None)
    strategy = strategy_of(nvme_path, "state-gradients-parameters")
    trainer = fit(strategy, gradient_clip_val=0.05, gradient_clip_algorithm=by)
    stats = swapper.of(trainer.optimizers[0]).stats()
    assert stats.bytes_written > 0
    assert stats.gradients.bytes_written > 0
    assert stats.steps == 10


def test_a_precision_plugin_that_clips_in_its_own_way_goes_on_doing_so(nvme_path: Path) -> None:
    class Own(Precision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
            calls.append(clip_val)

    calls: list[int | float] = []
    fit(strategy_of(nvme_path), plugins=[Own()], gradient_clip_val=0.5)
    assert calls == [0.5] * 10


def test_a_fused_optimizer_with_mixed_precision_is_not_clipped_as_in_the_stock_strategy(nvme_path: Path) -> None:
    for strategy in ("auto", strategy_of(nvme_path)):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(strategy, lambda: Net(OPTIMIZERS["fused"]), precision="bf16-mixed", gradient_clip_val=0.5)


class Failing(Net):
    def __init__(self, hook: str, error: BaseException) -> None:
        super().__init__()
        self.hook, self.error = hook, error
        setattr(self, hook, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise self.error


HOOKS = [
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "validation_step",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("what", ["state", "state-gradients-parameters"])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_hook_is_the_users_and_leaves_nothing(
    hook: str, what: str, nvme_path: Path, leaves_nothing: None
) -> None:
    threads, environment = set(threading.enumerate()), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for error, raised in ((RuntimeError("the user's"), RuntimeError), (KeyboardInterrupt(), SystemExit)):
        with pytest.raises(raised, match="the user's" if raised is RuntimeError else None) as caught:
            fit(strategy_of(nvme_path, what), lambda error=error: Failing(hook, error))  # type: ignore[misc]
        if raised is SystemExit:  # From here on Lightning itself has Ctrl-C ignored.
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])
        assert caught.value.__context__ is None or raised is SystemExit
        error.__traceback__ = None
        caught = None  # type: ignore[assignment]
        collect_garbage()
        assert not list(nvme_path.iterdir()), "files are left"
    until_ended(threads)
    assert dict(os.environ) == environment
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def until_ended(threads: set[threading.Thread]) -> None:
    """Wait until there are no threads but these, which are of earlier tests, and may have ended too."""
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert set(threading.enumerate()) <= threads


def collect_garbage() -> None:
    while gc.collect():  # What torch's objects in C++ held is garbage only when those have gone.
        pass


def test_files_stay_after_fit_and_go_with_the_trainer(nvme_path: Path, leaves_nothing: None) -> None:
    threads = set(threading.enumerate())
    trainer = fit(strategy_of(nvme_path, "state-gradients-parameters"))
    assert list(nvme_path.iterdir())
    trainer.fit(trainer.lightning_module, loader())
    assert len(list(nvme_path.iterdir())) == 1
    del trainer
    collect_garbage()
    assert not list(nvme_path.iterdir())
    until_ended(threads)


def test_a_write_that_failed_is_raised_at_the_end_but_never_instead_of_the_users_exception(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: OptimizerSwapper) -> None:
        raise SwapIOError(errno.ENOSPC, "write", "the drive")

    with monkeypatch.context() as patch:
        patch.setattr(OptimizerSwapper, "flush", fail)
        with pytest.raises(SwapIOError, match="the drive"):
            fit(strategy_of(nvme_path))
        with pytest.raises(RuntimeError, match="the user's"):
            fit(strategy_of(nvme_path), lambda: Failing("on_train_epoch_end", RuntimeError("the user's")))
    assert "after another exception" in caplog.text


class Large(Net):
    """Built in `configure_model`, and so that what is initialised afterwards is initialised anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 16))
            nn.init.zeros_(self.body[3].bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.body is not None
        return super().forward(self.body(x))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_model_is_built_on_the_drive(precision: str, nvme_path: Path) -> None:
    data = batches_of(precision)
    seen: list[Any] = []

    class Seen(Large):
        def configure_model(self) -> None:
            super().configure_model()
            seen.append(type(self.body[2].weight))  # type: ignore[index]

    stock = facts(fit("auto", Large, data=data, validation=data, precision=precision))
    strategy = strategy_of(nvme_path, "state-gradients-parameters")
    assert facts(fit(strategy, Seen, data=data, validation=data, precision=precision)) == stock
    assert seen == [EvictedParameter]


MEMORY = """
import gc, sys, time, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [{benchmarks!r}, {tests!r}]
import torch
from torch import nn
from lightning_runs import Net, loader, trainer_of
from peak import Peak
import swapper.lightning

torch.set_num_threads(1)

class Large(Net):
    def __init__(self, layers):
        super().__init__()
        self.layers, self.body = layers, None

    def configure_model(self):
        if self.body is None:
            wide = [nn.Linear(1024, 1024) for _ in range(self.layers)]
            self.body = nn.Sequential(nn.Linear(16, 1024), *wide, nn.Linear(1024, 16))

    def forward(self, x):
        return super().forward(self.body(x))

def run(layers):
    model, again = Large(layers), Large(layers)
    trainer, resuming = (trainer_of(swapper.lightning.SwapStrategy({config!r}), max_epochs=n, gradient_clip_val=0.1)
                         for n in (1, 2))
    trainer.validate(model, loader(4), verbose=False)
    trainer.fit(model, loader(4), loader(4))
    trainer.save_checkpoint({path!r})
    trainer.test(model, loader(4), verbose=False)
    resuming.fit(again, loader(4), loader(4), ckpt_path={path!r})
    assert resuming.global_step == 2 * trainer.global_step > 0
    return sum(parameter.nbytes for parameter in model.parameters())

run(2)  # Imports a lot.
for _ in range(3):
    gc.collect()
with Peak() as before:
    time.sleep(0.05)
with Peak() as peak:
    model_bytes = run({layers})
print(model_bytes, peak.bytes - before.bytes)
"""


@pytest.mark.thorough("by default: the same without Lightning, and checkpoints under it that hold no copy of the state")
def test_training_and_resuming_take_the_pools_and_not_the_model(nvme_path: Path, tmp_path: Path) -> None:
    config = config_of(nvme_path, "state-gradients-parameters", pool_bytes="32MiB", bucket_bytes="4MiB")
    tests = Path(__file__).resolve().parents[1]
    parts = {
        "benchmarks": str(tests.parent / "benchmarks"),
        "tests": str(tests / "support"),
        "path": str(tmp_path / "it.ckpt"),
    }
    script = MEMORY.format(config=config, layers=48, **parts)
    done = run_program([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    model_bytes, grown_bytes = map(int, done.stdout.splitlines()[-1].split())
    # Those of two trainers, each with two buckets for torch's own scratch, and the 100 MB that the formula allows.
    assert model_bytes > 190 << 20 > 2 * (32 + 2 * 4 << 20) + 100_000_000
    assert grown_bytes < 2 * (32 + 2 * 4 << 20) + 100_000_000


def test_the_accumulation_is_the_trainers(nvme_path: Path) -> None:
    trainer = fit(strategy_of(nvme_path), accumulate_grad_batches=3)
    assert trainer.strategy._settings.gradient_accumulation_steps == 3
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps: 4 .*accumulate_grad_batches=2"):
        fit(strategy_of(nvme_path, gradient_accumulation_steps=4), accumulate_grad_batches=2)
    fit(strategy_of(nvme_path, gradient_accumulation_steps=4), Gan, validation=None)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_in_backward_end_in_the_same_bits(accumulate: int, nvme_path: Path) -> None:
    config = config_of(nvme_path, "state-gradients-parameters")
    config["offload_optimizer"]["step_in_backward"] = True
    stock = facts(fit(accumulate_grad_batches=accumulate))
    assert facts(fit(swapper.lightning.SwapStrategy(config), accumulate_grad_batches=accumulate)) == stock


# --- One Trainer, called again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["state", "state-gradients-parameters"])
def test_a_trainer_trains_one_model_after_another(what: str, nvme_path: Path) -> None:
    def run(strategy: Any) -> list[Any]:
        trainer = trainer_of(strategy)
        models = []
        for seed in range(3):
            torch.manual_seed(seed)
            models.append(Net())
            trainer.fit_loop.max_epochs = 2 * (seed + 1)
            trainer.fit(models[-1], loader(), loader())
        return [bits(trainer.validate(model, loader(), verbose=False)) for model in models]

    assert run(strategy_of(nvme_path, what)) == run("auto")


@pytest.mark.parametrize("what", ["state", "state-gradients-parameters"])
def test_an_optimizer_that_is_given_again_keeps_its_state(what: str, nvme_path: Path) -> None:
    class Keeping(Net):
        kept: torch.optim.Optimizer | None = None

        def configure_optimizers(self) -> Any:
            self.kept = self.kept or torch.optim.AdamW(self.parameters(), lr=1e-2)
            return self.kept

    def run(strategy: Any) -> Any:
        trainer = fit(strategy, Keeping)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(trainer.lightning_module, loader(), loader())
        return facts(trainer)

    assert run(strategy_of(nvme_path, what)) == run("auto")


@pytest.mark.parametrize("what", ["state", "state-gradients-parameters"])
def test_evaluation_needs_no_fit(what: str, nvme_path: Path) -> None:
    def run(strategy: Any) -> list[Any]:
        torch.manual_seed(11)
        model, trainer = Large(), trainer_of(strategy)
        found = [bits(trainer.validate(model, loader(), verbose=False)), bits(trainer.predict(model, loader(4)))]
        trainer.fit(model, loader(), loader())
        return [*found, bits(trainer.test(model, loader(4), verbose=False)), facts(trainer)]

    assert run(strategy_of(nvme_path, what)) == run("auto")


@pytest.mark.parametrize("what", ["state", "state-gradients-parameters"])
def test_the_batch_size_finder_finds_the_same(what: str, nvme_path: Path, tmp_path: Path) -> None:
    rows_64 = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))

    class Rows(L.LightningDataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(rows_64, batch_size=self.batch_size)  # type: ignore[arg-type]

        def val_dataloader(self) -> Any:
            return loader()

    def run(strategy: Any) -> Any:
        torch.manual_seed(11)
        model, rows, finder = Net(), Rows(), BatchSizeFinder(max_trials=3, steps_per_trial=2)
        trainer = trainer_of(strategy, callbacks=[finder], default_root_dir=tmp_path)
        trainer.fit(model, datamodule=rows)
        return facts(trainer), finder.optimal_batch_size, rows.batch_size

    assert run(strategy_of(nvme_path, what)) == run("auto")
    assert not list(tmp_path.glob(".scale_batch_size*"))


@pytest.mark.parametrize("what", ["state", "state-gradients-parameters"])
@pytest.mark.parametrize("error", [RuntimeError("the user's"), KeyboardInterrupt()])
def test_a_checkpoint_is_made_when_a_run_is_cut_off(
    error: BaseException, what: str, nvme_path: Path, tmp_path: Path
) -> None:
    class CutOff(Net):
        def on_train_batch_start(self, batch: Any, number: int) -> None:
            if self.trainer.global_step == 7 and self.error is not None:
                raise self.error

        error: BaseException | None = None

    def run(strategy: Callable[[], Any], directory: Path) -> Any:
        def cut_off() -> Net:
            module = CutOff()
            module.error = error
            return module

        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises((RuntimeError, SystemExit)):
            fit(strategy(), cut_off, callbacks=[OnExceptionCheckpoint(directory)], enable_checkpointing=True)
        signal.signal(signal.SIGINT, handler)
        return facts(fit(strategy(), CutOff, ckpt_path=directory / "on_exception.ckpt", max_epochs=3))

    stock = run(lambda: "auto", tmp_path / "stock")
    assert run(lambda: strategy_of(nvme_path, what), tmp_path / "ours") == stock


def test_state_in_page_locked_memory_ends_in_the_same_bits() -> None:
    assert facts(fit("swapper_cpu")) == facts(fit())


def test_nothing_swapped_is_the_stock_strategy(nvme_path: Path) -> None:
    trainer = fit(swapper.lightning.SwapStrategy({}), gradient_clip_val=0.05)
    assert facts(trainer) == facts(fit(gradient_clip_val=0.05))
    assert not list(nvme_path.iterdir())


@pytest.mark.long
def test_with_nothing_swapped_little_is_called_beyond_the_stock_strategy() -> None:
    def calls(strategy: Callable[[], Any], epochs: int) -> int:
        profile = cProfile.Profile()
        given = strategy()
        profile.enable()
        fit(given, validation=None, gradient_clip_val=0.05, max_epochs=epochs, data=lambda: loader(100))
        profile.disable()
        found = pstats.Stats(profile)
        return int(found.total_calls)  # type: ignore[attr-defined]

    def of_steps(strategy: Callable[[], Any]) -> int:
        calls(strategy, 1)
        return calls(strategy, 3) - calls(strategy, 1)

    assert of_steps(lambda: swapper.lightning.SwapStrategy({})) < 1.05 * of_steps(lambda: "auto")


@pytest.mark.parametrize("swapped", [True, False])
def test_a_model_whose_parameters_are_on_the_drive_stays_on_its_device(
    monkeypatch: pytest.MonkeyPatch, swapped: bool
) -> None:
    """Moving it, even to where it is, would read all of it: a device is never left, and never gone to again."""
    moved = []

    class Noted(Net):
        def to(self, *args: Any, **kwargs: Any) -> Noted:
            moved.append(args[0])
            return self

        def cpu(self) -> Noted:
            return self.to(torch.device("cpu"))

    device = torch.device("meta")
    with device:
        module = Noted()
    trainer = trainer_of(swapper.lightning.SwapStrategy({}))
    strategy = trainer.strategy
    monkeypatch.setattr(type(strategy), "root_device", device)
    swappers = [SimpleNamespace(rest=lambda: None)] if swapped else []
    monkeypatch.setattr(sys.modules[Swapping.__module__], "_parameter_swappers", lambda module: swappers)
    strategy.connect(module)
    strategy.model_to_device()
    strategy.teardown()
    assert moved == ([] if swapped else [device, torch.device("cpu")])
