"""Small Lightning programs, run with the stock strategy and with ours, and all that both must agree on to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader
from twins import bits

import swapper.lightning

__all__ = [
    "IGNORED_WARNINGS",
    "Net",
    "accelerator_of",
    "config_of",
    "facts",
    "fit",
    "loader",
    "optimizer_facts",
    "precision_of",
    "strategy_of",
    "trained_on",
    "trainer_of",
]

IGNORED_WARNINGS = [
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:.*LeafSpec.*:DeprecationWarning",
    "ignore:.*does not have many workers",
    "ignore:.*is smaller than the logging interval",
    "ignore:.*GPU available but not used",
    "ignore:.*Checkpoint directory .* exists and is not empty",
    "ignore:`training_step` returned `None`",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:You requested to overfit",
    "ignore:`.fit.ckpt_path=None.` was called without a model",
    "ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:Be aware that when using `ckpt_path`",
]


_device = [torch.device("cpu")]
"""What Trainers train on is the last."""


@contextmanager
def trained_on(device: torch.device) -> Iterator[None]:
    """Within it Trainers train on `device`, those with the stock strategy too."""
    _device.append(device)
    try:
        yield
    finally:
        _device.pop()


class SimAccelerator(Accelerator):
    """Lightning's view of the simulated devices."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"allocated_bytes": torch.accelerator.memory_allocated(device)}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("sim", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.accelerator.current_accelerator() == torch.device("sim")

    @staticmethod
    def name() -> str:
        return "sim"


def accelerator_of(device: torch.device) -> Any:
    """What a Trainer, or Fabric, is given as its accelerator."""
    return {"cpu": "cpu", "cuda": "cuda"}.get(device.type) or SimAccelerator()


class Net(L.LightningModule):
    """A net whose tensors are of all sizes: swapped in segments, whole, and so small that they stay."""

    def __init__(
        self,
        make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        width: int = 96,
    ) -> None:
        super().__init__()
        self.make, self.schedule = make, schedule
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)
        self.losses: list[Any] = []
        self.dtype_of_inputs = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))
        return out

    def training_step(self, batch: torch.Tensor, number: int) -> Any:
        loss = self(batch).float().square().mean()
        self.losses.append(bits(loss))
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int, dataloader_idx: int = 0) -> None:
        self.log("val", self(batch).float().square().mean())

    def test_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("test", self(batch).float().square().mean())

    def predict_step(self, batch: torch.Tensor, number: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        make = self.make or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        optimizer = make(self.parameters())
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


def loader(count: int = 10, seed: int = 3, dtype: torch.dtype = torch.float32) -> DataLoader[torch.Tensor]:
    """`count` rows in batches of two."""
    rows = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def config_of(nvme_path: Path, what: str = "state", **more: Any) -> dict[str, Any]:
    """A config with those of state, gradients and parameters on the drive that `what` names."""

    def device(name: str) -> dict[str, str]:
        return {"device": "nvme" if name in what else "none"}

    return {
        "nvme_path": str(nvme_path),
        "pool_bytes": "1MiB",
        "bucket_bytes": "32KiB",
        "offload_optimizer": device("state"),
        "offload_gradient": device("gradients"),
        "offload_param": device("parameters"),
        **more,
    }


def strategy_of(nvme_path: Path, what: str = "state", *, format: str | None = None, **more: Any) -> Any:
    """A `SwapStrategy`."""
    return swapper.lightning.SwapStrategy(config_of(nvme_path, what, **more), checkpoint_format=format)


def precision_of(precision: str) -> dict[str, Any]:
    """The Trainer's arguments for a precision. Lightning knows mixed ones, and scalers, of some devices only."""
    kind = _device[-1].type
    if precision == "16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", kind, torch.amp.GradScaler(kind, init_scale=256.0))]}
    if precision == "bf16-mixed":
        return {"plugins": [MixedPrecision("bf16-mixed", kind)]}
    return {"precision": precision}


def trainer_of(strategy: Any = "auto", **options: Any) -> L.Trainer:
    """A Trainer that prints nothing and makes no files unless asked to."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    if _device[-1].type != "cpu":
        quiet["accelerator"] = accelerator_of(_device[-1])
        if strategy == "auto":
            strategy = SingleDeviceStrategy(_device[-1])
    return L.Trainer(strategy=strategy, **(quiet | options))


def fit(
    strategy: Any = "auto",
    module: Callable[[], L.LightningModule] = Net,
    ckpt_path: Any = None,
    data: Callable[[], Any] = loader,
    validation: Callable[[], Any] | None = loader,
    **options: Any,
) -> L.Trainer:
    """Train a new module from a fixed seed."""
    torch.manual_seed(11)
    model = module()
    trainer = trainer_of(strategy, **options)
    trainer.fit(model, data(), validation() if validation is not None else None, ckpt_path=ckpt_path)
    return trainer


def optimizer_facts(optimizer: torch.optim.Optimizer) -> Any:
    """The state dict of an optimizer, comparable."""
    return bits(optimizer.state_dict())


def facts(trainer: L.Trainer) -> Mapping[str, Any]:
    """All that two trainings must have in common, comparable."""
    model = trainer.lightning_module
    parameters = {name: bits(value) for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with swapper.gathered(parameter):  # One at a time: they need not fit the pool together.
            parameters[name] = bits(parameter)
    return {
        "parameters": parameters,
        "optimizers": [optimizer_facts(optimizer) for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": {name: bits(value) for name, value in trainer.callback_metrics.items()},
        "losses": getattr(model, "losses", None),
        "steps": (trainer.global_step, trainer.current_epoch),
        "scaler": precision_state(trainer.precision_plugin),
    }


def precision_state(plugin: Precision) -> Any:
    return bits(plugin.state_dict())
