"""What each of two ranks runs, with stock DDP and with ours: see tests/test_lightning_ddp.py.

As a program it starts its second rank itself, and is interrupted when both have trained.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning_runs import Net, config_of, facts, loader, trainer_of
from ranks import TIMEOUT_S
from torch import nn
from twins import bits

import swapper.lightning
from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import SwapError, SwapIOError
from swapper.storage import store

__all__ = ["CASES", "Large", "evaluate_and_resume", "save_copies", "save_together", "train"]


class Sometimes(Net):
    """Has a layer that each rank uses in other steps, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        if (len(self.losses) + self.global_rank) % 3 == 1:
            x = torch.tanh(self.sometimes(x))
        out: torch.Tensor = self.last(torch.tanh(self.second(x)))
        return out


class Away(Net):
    """Sees whether gradients that are to be on the drive are there."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = getattr(getattr(optimizer, "swapper", None), "gradients", None)
        assert gradients is None or gradients.is_evicted(self.second.weight)


class Manual(Net):
    """Optimizes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        optimizer.step()


class Large(Net):
    """Larger than the pool, built in `configure_model`, with other values on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Sequential(nn.Linear(16, 128), *(nn.Linear(128, 128) for _ in range(16)), nn.Linear(128, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.body is not None
        return super().forward(self.body(x))


CASES: dict[str, tuple[Callable[[], Net], dict[str, Any], dict[str, Any]]] = {
    "accumulation": (Net, {"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 2}),
    "clipping": (Net, {}, {"gradient_clip_val": 0.05, "precision": "bf16-mixed"}),
    "unused": (Sometimes, {"find_unused_parameters": True}, {}),
    "static": (Away, {"static_graph": True}, {}),
    "manual-static": (Manual, {"static_graph": True}, {}),
    "twice": (Large, {}, {"max_epochs": 1}),
}
"""A module, the arguments of DDP and those of the Trainer."""


def strategy_of(config: Any, ddp: dict[str, Any], format: Any = None) -> DDPStrategy:
    """Stock DDP, or ours with a config."""
    timeout = timedelta(seconds=TIMEOUT_S)
    if config is None:
        return DDPStrategy(timeout=timeout, **ddp)
    strategy: DDPStrategy = swapper.lightning.SwapDDPStrategy(config, checkpoint_format=format, timeout=timeout, **ddp)
    return strategy


def collect_garbage() -> None:
    while gc.collect():
        pass


def train(rank: int, name: str, nvme_path: Path) -> None:
    """A case of `CASES`, twice with the same Trainer."""
    module, ddp, options = CASES[name]

    def run(config: Any) -> Any:
        torch.manual_seed(5 + rank)
        trainer = trainer_of(strategy_of(config, ddp), devices=2, use_distributed_sampler=True, **options)
        model = module()
        found = []
        for _ in range(2):
            trainer.fit(model, loader(12), loader(8))
            found.append(facts(trainer))
            trainer.fit_loop.max_epochs += 1
        if config is not None:
            names = sorted(os.listdir(nvme_path))
            trainer.strategy.barrier()
            assert names == [f"{names[0][:-2]}-0", f"{names[0][:-2]}-1"]
        return found

    stock = run(None)
    for what in ("state", "state-gradients-parameters"):
        assert run(config_of(nvme_path, what)) == stock, (what, rank)
        collect_garbage()
    torch.distributed.barrier()
    assert not os.listdir(nvme_path)


def evaluate_and_resume(rank: int, directory: Path, nvme_path: Path) -> None:
    """All that a Trainer does, of a model on the drive, and with checkpoints of either format."""

    def run(config: Any, format: str | None, checkpoints: Path) -> list[Any]:
        keep = ModelCheckpoint(checkpoints, monitor="val", save_top_k=2, save_last=True, filename="{epoch}")
        torch.manual_seed(5 + rank)
        options: dict[str, Any] = {"devices": 2, "use_distributed_sampler": True}
        trainer = trainer_of(strategy_of(config, {}, format), callbacks=[keep], enable_checkpointing=True, **options)
        model = Large()
        found = [bits(trainer.validate(model, loader(8), verbose=False))]
        trainer.fit(model, loader(12), loader(8))
        found.append(facts(trainer))
        found.append(bits(trainer.test(model, loader(8), ckpt_path="best", verbose=False)))
        found.append(bits(trainer.predict(model, loader(8), ckpt_path="last")))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, loader(12), loader(8), ckpt_path="last")
        trainer.save_checkpoint(checkpoints / "after.ckpt")
        del trainer, model
        collect_garbage()
        trainer = trainer_of(strategy_of(config, {}, format), max_epochs=4, **options)
        trainer.fit(Large(), loader(12), loader(8), ckpt_path=checkpoints / "after.ckpt")
        return [*found, facts(trainer)]

    stock = run(None, None, directory / "stock")
    config = config_of(nvme_path, "state-gradients-parameters", pool_bytes="768KiB")
    for format in ("directory", "full"):
        assert run(config, format, directory / format) == stock, (format, rank)


def save_copies(rank: int, directory: Path, nvme_path: Path) -> None:
    """What cannot be linked is copied, by one rank, in the background."""

    def finish_slowly(self: NewCheckpoint, index: Any, *rest: Any) -> Path | None:
        time.sleep(1)
        return finish(self, index, *rest)

    finish = NewCheckpoint.finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "link", lambda *_: False)
        patch.setattr(NewCheckpoint, "finish", finish_slowly)
        trainer = trainer_of(strategy_of(config_of(nvme_path), {}), devices=2)
        trainer.fit(Net(), loader(12))
        trainer.save_checkpoint(directory / "copied.ckpt")
        assert is_checkpoint(directory / "copied.ckpt"), rank


def save_together(rank: int, directory: Path, nvme_path: Path) -> None:
    """What each rank writes a part of is what rank 0 writes alone, and a rank that fails, or dies, ends the others."""

    def strategy(together: bool, annex: Path | None = None) -> DDPStrategy:
        given = {"together": together, "annex": annex, "timeout": timedelta(seconds=TIMEOUT_S)}
        made: DDPStrategy = swapper.lightning.SwapDDPStrategy(config_of(nvme_path), **given)
        return made

    def resumed(together: bool, name: str = "") -> Any:
        torch.manual_seed(5 + rank)
        trainer = trainer_of(strategy(together), devices=2, use_distributed_sampler=True, max_epochs=3)
        trainer.fit(Net(), loader(12), loader(8), ckpt_path=directory / f"{name or together}.ckpt")
        return facts(trainer)

    def save_to_annexes() -> None:
        torch.manual_seed(5 + rank)
        trainer = trainer_of(strategy(True, directory / f"drive-{rank}"), devices=2, use_distributed_sampler=True)
        trainer.fit(Net(), loader(12), loader(8))
        trainer.save_checkpoint(directory / "annexed.ckpt")
        assert not list((directory / "annexed.ckpt").glob("model-*"))
        assert list(directory.glob("drive-*/annexed*/model-*"))
        assert resumed(True, "annexed") == resumed(True)
        trainer.strategy.barrier()
        trainer.strategy.remove_checkpoint(directory / "annexed.ckpt")
        assert not os.listdir(directory / f"drive-{rank}")

    for together in (False, True):
        torch.manual_seed(5 + rank)
        trainer = trainer_of(strategy(together), devices=2, use_distributed_sampler=True)
        trainer.fit(Net(), loader(12), loader(8))
        # Rank 0's path counts, as with the stock strategy.
        trainer.save_checkpoint(directory / (f"other-{together}.ckpt" if rank else f"{together}.ckpt"))
        writers = {name for name in os.listdir(directory / f"{together}.ckpt") if "-r1-" in name}
        assert bool(writers) == together
    assert resumed(True) == resumed(False)
    for name in ("missing", "file"):  # Only rank 0 has the directory.
        (directory / "file.ckpt").write_bytes(b"")
        with pytest.raises(SwapError, match=r"is no checkpoint on ranks \[1\], and a directory on the others"):
            resumed(True, name if rank else "False")
    (directory / "file.ckpt").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Net, "strict_loading", False)  # Then each tensor is read when it is copied.
        if rank == 1:
            patch.setattr(Net, "load_state_dict", _full_drive)
        with pytest.raises(SwapIOError, match="a file" if rank else "on rank 1"):
            resumed(True)
    save_to_annexes()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(NewCheckpoint, "complete", _full_drive)
        with pytest.raises(SwapIOError, match="a file" if rank else "on rank 1: .a file"):
            trainer.save_checkpoint(directory / "True.ckpt")
        trainer.strategy.barrier()
        assert sorted(name for name in os.listdir(directory) if "ckpt" in name) == ["False.ckpt", "True.ckpt"]
        trainer.strategy.barrier()
        if rank == 1:
            patch.setattr(NewCheckpoint, "complete", _die)
        with pytest.raises(RuntimeError) as caught:
            trainer.save_checkpoint(directory / "True.ckpt")
    (directory / "raised").write_text(str(caught.value))
    os._exit(0)


def _full_drive(*_: object, **named: object) -> None:
    raise SwapIOError(errno.ENOSPC, "write", Path("a file"))


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(Net):
    """Ctrl-C strikes rank 0."""

    armed = False

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        if self.armed and self.global_rank == 0 and number == 1:
            signal.raise_signal(signal.SIGINT)


def main() -> None:
    torch.set_num_threads(1)
    trained = []
    for strategy in ("swapper_ddp_nvme", "ddp"):
        torch.manual_seed(5)
        model, trainer = Interrupted(), trainer_of(strategy, devices=2)
        trainer.fit(model, loader(12))
        trained.append((facts(trainer), model, trainer))
    (ours, model, trainer), (stock, _, _) = trained
    assert ours == stock
    print("the same bits", flush=True)
    for thread in threading.enumerate():
        # Lightning kills rank 1 when rank 0 is interrupted. What looks every five seconds whether a rank has died kills
        # rank 0 then, where it looks before rank 0 has ended: with plain DDP, too.
        if isinstance(thread, _ChildProcessObserver):
            thread._run = lambda: True  # type: ignore[method-assign]
    model.armed = True
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader(12))


if __name__ == "__main__":
    main()
