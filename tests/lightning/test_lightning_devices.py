"""`SwapStrategy` of a Trainer whose accelerator is a device, against the stock strategy there: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning_runs import (
    IGNORED_WARNINGS,
    Net,
    config_of,
    facts,
    fit,
    loader,
    precision_of,
    trained_on,
    trainer_of,
)
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from twins import bits

from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.lightning import SwapStrategy

pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED_WARNINGS]

EVERYTHING = "state-gradients-parameters"
WHAT = ["state", "state-gradients", EVERYTHING, "host"]


@pytest.fixture(autouse=True)
def trained(device: str) -> Iterator[torch.device]:
    """The device. All Trainers of a test train on it."""
    torch.set_num_threads(1)
    with trained_on(torch.device(device, 0)):
        yield torch.device(device, 0)


def strategy_of(nvme_path: Path, what: str, **more: Any) -> SwapStrategy:
    """With `what` on the drive; or with everything in page-locked memory of the host."""
    config = config_of(nvme_path, "" if what == "host" else what)
    if what == "host":
        config.update({f"offload_{name}": {"device": "cpu"} for name in ("optimizer", "gradient", "param")})
    return SwapStrategy(config, **more)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("clip", "accumulate"), [("", 1), ("norm", 2), ("value", 1)])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("what", WHAT)
def test_a_training_ends_in_the_same_bits(
    what: str, precision: str, clip: str, accumulate: int, nvme_path: Path
) -> None:
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, **precision_of(precision)}
    if clip:
        options.update(gradient_clip_val=0.05 if clip == "norm" else 1e-3, gradient_clip_algorithm=clip)

    def run(strategy: Any) -> Any:
        again = precision_of(precision)  # A scaler for each run.
        return facts(
            fit(strategy, data=lambda: loader(dtype=dtype), validation=lambda: loader(dtype=dtype), **(options | again))
        )

    assert run(strategy_of(nvme_path, what)) == run("auto")


class Ema(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda averaged, new, count: averaged * 0.9 + new * 0.1)


def scheduled() -> Net:
    return Net(schedule=lambda optimizer: {"scheduler": OneCycleLR(optimizer, 0.1, total_steps=40), "interval": "step"})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("callback", [Ema, lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
@pytest.mark.parametrize("what", WHAT)
def test_averages_of_weights(what: str, callback: Any, nvme_path: Path) -> None:
    def run(strategy: Any) -> Any:
        return facts(fit(strategy, scheduled if callback is Ema else Net, max_epochs=3, callbacks=[callback()]))

    assert run(strategy_of(nvme_path, what)) == run("auto")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", WHAT)
def test_everything_after_fit(what: str, nvme_path: Path, trained: torch.device) -> None:
    """Parameters stay where they are; in between, next to nothing is on the device."""

    def run(strategy: Any) -> list[Any]:
        trainer = fit(strategy)
        model = trainer.lightning_module
        swapped = vars(model).get("swapper")
        assert (swapped is not None) == (strategy != "auto" and what in (EVERYTHING, "host"))
        found, taken = [facts(trainer)], set()
        for epochs in (4, 6):
            found.append(bits(trainer.validate(model, loader(), verbose=False)))
            found.append(bits(trainer.test(model, loader(4), verbose=False)))
            found.append(bits(trainer.predict(model, loader(4))))
            taken.add(torch.accelerator.memory_allocated(trained))
            assert swapped is None or swapped._tier.used_bytes == 0
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(model, loader(), loader())
            assert vars(model).get("swapper") is swapped
            found.append(facts(trainer))
        assert len(taken) == 1
        return found

    assert run(strategy_of(nvme_path, what)) == run("auto")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", WHAT)
def test_an_optimizer_that_is_given_again_keeps_its_state(what: str, nvme_path: Path) -> None:
    """Though the stock strategy moves the model to the CPU in between."""

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


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", ["directory", "full"])
@pytest.mark.parametrize("what", WHAT)
def test_a_run_is_resumed_here_and_on_the_cpu(
    what: str, format: Any, nvme_path: Path, tmp_path: Path, trained: torch.device
) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "gradient_clip_val": 0.05, "default_root_dir": tmp_path}

    def run(strategy: Any, directory: Path) -> Any:
        keep = ModelCheckpoint(directory, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        trainer = fit(strategy(), scheduled, max_epochs=2, callbacks=[keep], **options)
        trainer.save_checkpoint(directory / "end.ckpt")  # When the strategy is torn down.
        found = [facts(fit(strategy(), scheduled, ckpt_path=directory / "step=6.ckpt", max_epochs=3, **options))]
        found.append(facts(fit(strategy(), scheduled, ckpt_path=directory / "end.ckpt", max_epochs=3, **options)))
        return found

    def ours() -> SwapStrategy:
        return strategy_of(nvme_path, what, checkpoint_format=format)

    assert run(ours, tmp_path / "ours") == run(lambda: "auto", tmp_path / "stock")
    path = tmp_path / "ours" / "end.ckpt"
    assert is_checkpoint(path) == (format == "directory")
    model = scheduled()
    there = bits(trainer_of(ours()).validate(model, loader(), ckpt_path=path, verbose=False))
    with trained_on(torch.device("cpu")):
        assert bits(trainer_of(ours()).validate(scheduled(), loader(), ckpt_path=path, verbose=False)) == there
        on_cpu = fit(ours(), scheduled, ckpt_path=path, max_epochs=3, **options)
        on_cpu.save_checkpoint(tmp_path / "cpu.ckpt")
    back = fit(ours(), scheduled, ckpt_path=tmp_path / "cpu.ckpt", max_epochs=4, **options)
    assert back.global_step == 20 and next(on_cpu.lightning_module.parameters()).device.type == "cpu"


class Large(Net):
    """Built in `configure_model`, on the drive if parameters are to be there."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Sequential(nn.Linear(16, 128), *(nn.Linear(128, 128) for _ in range(5)), nn.Linear(128, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.body is not None
        return super().forward(self.body(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", [EVERYTHING, "host"])
def test_a_model_that_is_built_away_is_never_on_the_device_as_a_whole(
    what: str, nvme_path: Path, trained: torch.device
) -> None:
    def run(strategy: Any) -> tuple[Any, int]:
        before = torch.accelerator.memory_allocated(trained)
        torch.accelerator.reset_peak_memory_stats(trained)
        trainer = fit(strategy, Large, max_epochs=1)
        peak_bytes = torch.accelerator.max_memory_allocated(trained) - before
        return facts(trainer), peak_bytes

    mine, swapped_bytes = run(strategy_of(nvme_path, what))
    stock, plain_bytes = run("auto")
    assert mine == stock
    assert swapped_bytes < plain_bytes / 2
