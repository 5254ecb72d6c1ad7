"""What people do with a Trainer beyond one `fit`: several Trainers, modules that share parameters, other models."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from launcher import run_program
from lightning_runs import IGNORED_WARNINGS, Net, config_of, facts, fit, loader, strategy_of, trainer_of
from torch import nn

from swapper.errors import SwapError
from swapper.lightning import SwapStrategy
from swapper.tensors.evicted import EvictedParameter
from swapper.tensors.evicted_gradients import EvictedGradient, GradientEvictedParameter

pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED_WARNINGS]

WHAT = ["state", "state-gradients", "state-gradients-parameters"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


# --- Several Trainers for one module ----------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("second", ["stock", *WHAT])
@pytest.mark.parametrize("first", WHAT)
def test_another_trainer_trains_the_same_module(first: str, second: str, nvme_path: Path) -> None:
    def run(*strategies: Any) -> list[Any]:
        torch.manual_seed(11)
        model, trainers, found = Net(), [], []
        for strategy in strategies:
            trainers.append(trainer_of(strategy))  # The first is alive while the second trains.
            trainers[-1].fit(model, loader(), loader())
            found.append(facts(trainers[-1]))
        return [*found, facts(trainers[0])["optimizers"]]

    then = "auto" if second == "stock" else strategy_of(nvme_path, second)
    assert run(strategy_of(nvme_path, first), then) == run("auto", "auto")


def test_another_trainer_takes_parameters_whose_gradients_are_away(nvme_path: Path) -> None:
    model, first = Net(), trainer_of(strategy_of(nvme_path, "state-gradients"))
    first.fit(model, loader())  # A validation would be the end of gradients.
    assert type(model.second.weight) is GradientEvictedParameter
    trainer_of(strategy_of(nvme_path, "state-gradients-parameters")).fit(model, loader())
    assert type(model.second.weight) is EvictedParameter and not model.swapper.stays
    model.swapper.close(keep_values=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("second", WHAT)
@pytest.mark.parametrize("first", WHAT)
def test_an_optimizer_that_the_module_keeps_is_swapped_as_the_next_trainer_says(
    first: str, second: str, nvme_path: Path
) -> None:
    class Keeping(Net):
        def configure_optimizers(self) -> Any:
            self.kept = getattr(self, "kept", None) or torch.optim.AdamW(self.parameters(), lr=0.05)
            return self.kept

    def run(*strategies: Any) -> list[Any]:
        torch.manual_seed(11)
        model, found = Keeping(), []
        for strategy in strategies:
            trainer = trainer_of(strategy)
            trainer.fit(model, loader(), loader())
            found.append(facts(trainer))
        if not isinstance(strategies[-1], str):
            on_drive = type(model.second.weight) is EvictedParameter
            assert on_drive == (second == "state-gradients-parameters")
            assert (model.kept.swapper.gradients is not None) == (second != "state")
        return found

    assert run(strategy_of(nvme_path, first), strategy_of(nvme_path, second)) == run("auto", "auto")


@pytest.mark.parametrize("precisions", [("32-true", "bf16-true"), ("bf16-true", "bf16-true")])
def test_another_trainer_converts_a_module_that_is_on_the_drive(precisions: tuple[str, str], nvme_path: Path) -> None:
    def run(*strategies: Any) -> list[Any]:
        torch.manual_seed(11)
        model, found = Net(), []
        for strategy, precision in zip(strategies, precisions, strict=True):
            trainer = trainer_of(strategy, precision=precision)
            trainer.fit(model, loader(), loader())
            found.append(facts(trainer))
        return found

    both = [strategy_of(nvme_path, "state-gradients-parameters") for _ in range(2)]
    assert run(*both) == run("auto", "auto")


def test_another_trainer_finds_the_parameters_on_the_drive_if_its_config_is_equal(nvme_path: Path) -> None:
    what = "state-gradients-parameters"
    first = fit(strategy_of(nvme_path, what))
    model = first.lightning_module
    there = model.swapper
    trainer_of(strategy_of(nvme_path, what), accumulate_grad_batches=2).fit(model, loader())
    assert model.swapper is there
    trainer_of(strategy_of(nvme_path, what, pool_bytes="2MiB")).fit(model, loader())
    assert model.swapper is not there


def test_another_trainer_trains_a_module_that_is_stepped_in_backward(nvme_path: Path) -> None:
    def strategy() -> Any:
        config = config_of(nvme_path, "state-gradients")
        config["offload_optimizer"]["step_in_backward"] = True
        return SwapStrategy(config)

    def run(*strategies: Any) -> Any:
        torch.manual_seed(11)
        model, trainers = Net(), [trainer_of(strategy) for strategy in strategies]
        for trainer in trainers:
            trainer.fit(model, loader(), loader())
        return facts(trainers[-1])

    assert run(strategy(), strategy()) == run("auto", "auto")


# --- Optimizers that share parameters ---------------------------------------------------------------------------------


class TwoTasks(L.LightningModule):
    """Two optimizers, both of the trunk."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.together = together
        self.trunk = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96))
        self.first, self.second = nn.Linear(96, 3), nn.Linear(96, 96)

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        optimizers, heads = self.optimizers(), [self.first, self.second]
        for optimizer, head in zip(optimizers, heads, strict=True):
            self.manual_backward(head(self.trunk(batch)).square().mean())
            if not self.together:
                self.step(optimizer)
        if self.together:
            for optimizer in optimizers:
                self.step(optimizer, clear=optimizer is optimizers[1])

    def step(self, optimizer: Any, clear: bool = True) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        if clear:
            self.zero_grad()

    def configure_optimizers(self) -> Any:
        trunk = list(self.trunk.parameters())
        return [
            torch.optim.AdamW([*trunk, *self.first.parameters()], lr=1e-2),
            torch.optim.SGD([*trunk, *self.second.parameters()], lr=1e-2, momentum=0.9),
        ]


@pytest.mark.parametrize("what", WHAT[1:])
@pytest.mark.parametrize("together", [True, False], ids=["together", "in turn"])
def test_two_optimizers_step_the_same_parameters(together: bool, what: str, nvme_path: Path) -> None:
    def module() -> L.LightningModule:
        return TwoTasks(together)

    stock = facts(fit("auto", module, validation=None))
    assert facts(fit(strategy_of(nvme_path, what), module, validation=None)) == stock


def test_what_was_used_and_freed_in_backward_is_not_skipped_by_another_optimizer(nvme_path: Path) -> None:
    class Unclipped(TwoTasks):
        def step(self, optimizer: Any, clear: bool = True) -> None:
            optimizer.step()
            self.zero_grad()

    config = config_of(nvme_path, "state")
    config["offload_optimizer"]["step_in_backward"] = True
    with pytest.raises(SwapError, match="the gradient of this parameter is gone"):
        fit(SwapStrategy(config), lambda: Unclipped(together=False), validation=None)


# --- configure_model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("the user's"), KeyboardInterrupt()])
def test_an_exception_in_configure_model_is_the_users(error: BaseException, nvme_path: Path) -> None:
    class Failing(Net):
        def configure_model(self) -> None:
            self.more = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96))
            raise error

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError if isinstance(error, RuntimeError) else SystemExit) as caught:
        fit(strategy_of(nvme_path, "state-gradients-parameters"), Failing)
    signal.signal(signal.SIGINT, handler)
    assert error in (caught.value, caught.value.__context__)


# --- What is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_progress_bar_starts_no_thread() -> None:
    program = (
        "import threading\n"
        "from swapper.progress import progress_bar\n"
        "with progress_bar('saving', 10) as update:\n"
        "    update(10)\n"
        "assert threading.enumerate() == [threading.main_thread()], threading.enumerate()\n"
    )
    run_program([sys.executable, "-c", program], check=True)


def test_gradients_stay_away_when_a_trainer_is_done(nvme_path: Path) -> None:
    trainer = fit(strategy_of(nvme_path, "state-gradients-parameters"), validation=None)
    model = trainer.lightning_module
    assert type(model.second.weight) is EvictedParameter
    assert type(model.second.weight.grad) is EvictedGradient
    assert "cpu" not in vars(model)
