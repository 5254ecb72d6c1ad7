"""Trainings whose checkpoints are saved, loaded and damaged."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import torch
from torch import nn
from torch.optim import Optimizer
from twins import bits, small_records

import swapper
from swapper.checkpoint.index import glance
from swapper.checkpoint.reader import Checkpoint


def whole(directory: Path) -> bool:
    with Checkpoint(directory) as checkpoint:
        for name in checkpoint.index.files:
            checkpoint.verify(name)
    return True


def annexes_in(directory: Path) -> set[str]:
    """The names of the annexes that a checkpoint has."""
    found = glance(directory)
    assert found is not None
    return {Path(annex.path).name for annex in found.annexes}


class Versioned(nn.Linear):
    """A layer of which state dicts of before version 2 have the logarithm, and are converted when they are loaded."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def _set(weight: torch.Tensor) -> None:
    weight[0] = 7


def _subtract(weight: torch.Tensor) -> None:
    weight -= 1


def _move_within(weight: torch.Tensor) -> None:
    weight[0].copy_(weight[1])


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda weight: weight.div_(2),
    "subtracted": _subtract,
    "set": _set,
    "copied": lambda weight: weight.copy_(torch.ones_like(weight)),
    "within": _move_within,
    "of data": lambda weight: weight.data.mul_(3),
    "of a view": lambda weight: weight.view(-1)[3:9].zero_(),
    "of a view of a view": lambda weight: weight.t().narrow(0, 1, 2)[:, 1].neg_(),
    "initialised": lambda weight: nn.init.constant_(weight, 0.5),
    "out": lambda weight: torch.add(weight, 1, out=weight),
    "several": lambda weight: torch._foreach_mul_([weight, weight[1]], 2),  # type: ignore[func-returns-value]
    "twice": lambda weight: (weight.add_(1), weight.mul_(2)),
    "only read": lambda weight: (weight * 2, weight.sum(), weight.clone().zero_()),
}
"""What a module, or a hook, may do to a tensor of a state dict while it is loaded."""


class Changing(nn.Linear):
    """Does one of `CHANGES` to its weight in a state dict."""

    def __init__(self, change: str, width: int) -> None:
        super().__init__(width, width)
        self.change = CHANGES[change]

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.change(state[f"{prefix}weight"])
        super()._load_from_state_dict(state, prefix, *rest)


class SmallNet(nn.Module):
    """Parameters that are swapped and that are not, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 72)
        self.two = Versioned(72, 64)
        self.norm = nn.BatchNorm1d(64)

    def loss(self, turn: int) -> torch.Tensor:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(turn))
        x = x.to(self.one.weight.dtype)
        return self.norm(self.two(torch.tanh(self.one(x)))).square().mean()


class SmallTraining:
    """Some steps, plain or swapped."""

    def __init__(self, path: Path | None, *, masters: bool = False, **more: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = SmallNet().to(torch.bfloat16 if masters else torch.float32)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.turn = 0
        if path is not None:
            settings: dict[str, Any] = {
                "nvme_path": path,
                "pool_bytes": "2MiB",
                "bucket_bytes": "128KiB",
                "offload_optimizer": {"device": "nvme", "master_weights": masters},
                "offload_param": {"device": "nvme"},
            }
            with small_records():
                swapper.offload(self.model, self.optimizer, swapper.OffloadConfig(**{**settings, **more}))

    def steps(self, count: int = 1) -> SmallTraining:
        for _ in range(count):
            self.model.loss(self.turn).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.turn += 1
        return self

    def save(self, directory: Path, annex: Path | None = None) -> swapper.SaveHandle:
        extra = {"turn": self.turn, "t": torch.ones(3)}
        return swapper.save_checkpoint(directory, self.model, self.optimizer, extra, annex=annex)

    def load(self, directory: Path, annex: Any = ()) -> SmallTraining:
        self.turn = swapper.load_checkpoint(directory, self.model, self.optimizer, annex=annex)["turn"]
        return self

    def everything(self) -> Any:
        return bits([dict(self.model.state_dict()), self.optimizer.state_dict()["state"]])


Make = Callable[[list[nn.Parameter]], Optimizer]


class Odd(nn.Module):
    """Shapes of all kinds: odd, empty, scalar, channels_last, tied, frozen; buffers; a dtype that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(401, 96)
        self.first = nn.Linear(96, 77)
        self.conv = nn.Conv2d(3, 64, 5).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(50, 100), requires_grad=False)
        self.last = nn.Linear(96, 401, bias=False)
        self.last.weight = self.embedding.weight
        self.back = nn.Linear(77, 96)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def loss(self, turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(turn)
        tokens = torch.randint(401, (4, 9), generator=generator)
        image = torch.randn(2, 3, 9, 9, generator=generator).to(self.scale.dtype)
        self.calls += 1
        hidden = self.back(torch.tanh(self.first(self.embedding(tokens)))) * self.scale
        pictures = self.norm(self.conv(image)).square().mean() + self.nothing.sum() + self.frozen.mean()
        return nn.functional.cross_entropy(self.last(hidden).flatten(0, 1), tokens.flatten()) + pictures


class Words(gpt.GPT):
    """The examples' model, on data of its own."""

    def __init__(self) -> None:
        super().__init__(gpt.SIZES["tiny"])

    def loss(self, turn: int) -> torch.Tensor:  # type: ignore[override]
        generator = torch.Generator().manual_seed(turn)
        tokens = torch.randint(256, (2, 33), generator=generator)
        return super().loss(tokens[:, :-1], tokens[:, 1:])


def make_model(kind: type[nn.Module] = Odd, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return kind().to(dtype)


def settings_of(way: str, path: Path, masters: bool = False) -> dict[str, Any] | None:
    """The config of a way to keep state; None is no wrapper at all."""
    state = {"device": "nvme", "master_weights": masters}
    common: dict[str, Any] = {"nvme_path": path, "pool_bytes": "24MiB", "bucket_bytes": "256KiB"}
    match way:
        case "nvme":
            return {**common, "offload_optimizer": state}
        case "cut otherwise":
            return {**common, "pool_bytes": "31MiB", "bucket_bytes": "100KiB", "offload_optimizer": state}
        case "drives":
            paths = [path / "one", path / "two"]
            for each in paths:
                each.mkdir(exist_ok=True)
            return {**common, "nvme_path": paths, "offload_optimizer": state}
        case "cpu":
            return {**common, "offload_optimizer": {**state, "device": "cpu"}}
        case "resident":
            return {**common, "offload_optimizer": {**state, "resident_bytes": "1MiB"}}
        case "everything":
            devices = {"offload_param": {"device": "nvme"}, "offload_gradient": {"device": "nvme"}}
            return {**common, **devices, "offload_optimizer": state}
        case "parameters":
            return {**common, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "none"}}
        case "none":
            return {**common, "offload_optimizer": {"device": "none"}}
    assert way == "plain"
    return None


ALL = ["nvme", "cut otherwise", "drives", "cpu", "resident", "everything", "parameters", "none", "plain"]


class Training:
    """A model and its optimizer, kept in one of the ways."""

    def __init__(
        self,
        way: str,
        path: Path,
        make: Make,
        kind: type[nn.Module] = Odd,
        dtype: torch.dtype = torch.float32,
        masters: bool = False,
        **more: Any,
    ) -> None:
        self.model = make_model(kind, dtype)
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        settings = settings_of(way, path, masters)
        if settings is not None:
            config = swapper.OffloadConfig(**{**settings, **more})
            if config.offload_param.device == "nvme":
                with small_records():
                    swapper.offload(self.model, self.optimizer, config)
            else:
                swapper.wrap_optimizer(self.optimizer, config)
        self.turn = 0
        self.losses: list[Any] = []

    def steps(self, count: int) -> Training:
        for _ in range(count):
            loss = self.model.loss(self.turn)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(bits(loss))
            self.turn += 1
        return self

    def save(self, directory: Path) -> swapper.SaveHandle:
        extra = {"turn": self.turn, "scheduler": self.scheduler.state_dict(), "losses": len(self.losses)}
        return swapper.save_checkpoint(directory, self.model, self.optimizer, extra)

    def load(self, directory: Path) -> Training:
        extra = swapper.load_checkpoint(directory, self.model, self.optimizer)
        self.turn = extra["turn"]
        self.scheduler.load_state_dict(extra["scheduler"])
        return self

    def everything(self) -> Any:
        """All bits of it."""
        return bits([dict(self.model.state_dict()), self.optimizer.state_dict()["state"], self.losses])

    def close(self) -> None:
        self.model = self.optimizer = self.scheduler = None
        gc.collect()


def options_of(training: Training) -> Any:
    return [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
