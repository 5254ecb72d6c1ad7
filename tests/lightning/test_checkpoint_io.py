"""A `CheckpointIO` of the user's is called as the stock strategies call it: same methods, arguments and keywords."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning_runs import IGNORED_WARNINGS, Net, config_of, fit, loader
from ranks import in_processes
from torch import nn

import swapper.fabric
import swapper.lightning

IGNORED = [*IGNORED_WARNINGS, "ignore:The FabricModule wraps a module"]
pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED]

Call = tuple[str, list[tuple[type, str]], dict[str, tuple[type, str]]]


class Recording(TorchCheckpointIO):
    """Notes what it is called with: of a checkpoint only the class."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = str(directory)
        self.calls: list[Call] = []

    def note(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.calls.append((name, [self.shown(a) for a in args], {k: self.shown(v) for k, v in keywords.items()}))

    def shown(self, value: Any) -> tuple[type, str]:
        text = "" if isinstance(value, dict) and "options" not in value else str(value).replace(self.directory, "...")
        return type(value), text

    def save_checkpoint(self, *args: Any, **keywords: Any) -> None:
        self.note("save", args, keywords)
        keywords["storage_options"] = None  # torch's file has no options.
        super().save_checkpoint(*args, **keywords)

    def load_checkpoint(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        self.note("load", args, keywords)
        return super().load_checkpoint(*args, **keywords)  # type: ignore[no-any-return]

    def remove_checkpoint(self, *args: Any, **keywords: Any) -> None:
        self.note("remove", args, keywords)
        super().remove_checkpoint(*args, **keywords)

    def teardown(self) -> None:
        self.note("teardown", (), {})
        super().teardown()


def train(strategy: Any, directory: Path, wrap: Callable[[Any], Any]) -> list[Call]:
    """Every way by which a Trainer saves, loads and removes."""
    io = Recording(directory)
    keep = ModelCheckpoint(directory / "kept", monitor="loss", save_top_k=2, every_n_train_steps=3, save_last=True)
    plugin = wrap(io)
    options = {"plugins": [plugin], "max_epochs": 3}
    trainer = fit(strategy(), callbacks=[keep], enable_checkpointing=True, **options)
    trainer.save_checkpoint(str(directory / "text.ckpt"))
    trainer.save_checkpoint(directory / "path.ckpt")
    trainer.save_checkpoint(directory / "weights.ckpt", weights_only=True)
    trainer.save_checkpoint(directory / "options.ckpt", storage_options={"options": 1})
    plugin.teardown()
    for path in (str(directory / "text.ckpt"), directory / "path.ckpt"):
        again = fit(strategy(), ckpt_path=path, **(options | {"max_epochs": 4}))
        again.validate(Net(), loader(), ckpt_path=path, verbose=False)
        again.strategy.remove_checkpoint(path)
    return io.calls


def with_fabric(strategy: Any, directory: Path) -> list[Call]:
    """Every way by which Fabric saves and loads."""
    io = Recording(directory)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy(), plugins=[io])
    fabric.launch()
    torch.manual_seed(0)
    made = nn.Linear(96, 96)
    module, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters()))
    fabric.backward(module(torch.ones(2, 96)).sum())
    optimizer.step()
    state = {"module": module, "optimizer": optimizer, "step": 1}
    for path in (str(directory / "text.ckpt"), directory / "path.ckpt"):
        fabric.save(path, state)
        fabric.save(path, state, filter={"module": lambda name, value: True})
        fabric.load(path, state)
        fabric.load(path, state, strict=False, weights_only=True)
        fabric.load(path)
        fabric.strategy.save_checkpoint(path, {"module": made.state_dict()}, storage_options={"options": 1})
        fabric.strategy.save_checkpoint(path, made.state_dict())
        fabric.load_raw(path, made)
    return io.calls


def in_directory(path: Path) -> Path:
    path.mkdir()
    return path


WAYS: dict[str, Callable[[Any], Any]] = {"its own": lambda io: io, "in the background": AsyncCheckpointIO}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_calls_it_as_stock_does(way: str, nvme_path: Path, tmp_path: Path) -> None:
    wanted = train(lambda: "auto", in_directory(tmp_path / "stock"), WAYS[way])
    assert {call[0] for call in wanted} >= {"save", "load", "remove"}
    assert any("options" in call[2].get("storage_options", (None, ""))[1] for call in wanted)
    ours = lambda: swapper.lightning.SwapStrategy(config_of(nvme_path))  # noqa: E731
    assert by_method(train(ours, in_directory(tmp_path / "ours"), WAYS[way])) == by_method(wanted)


def by_method(calls: list[Call]) -> dict[str, list[Call]]:
    """A thread saves while the other removes: only the order among calls of one kind is certain."""
    return {name: [call for call in calls if call[0] == name] for name in sorted({call[0] for call in calls})}


def test_fabric_calls_it_as_stock_does(nvme_path: Path, tmp_path: Path) -> None:
    wanted = with_fabric(lambda: "auto", in_directory(tmp_path / "stock"))
    ours = lambda: swapper.fabric.SwapStrategy(config_of(nvme_path))  # noqa: E731
    assert with_fabric(ours, in_directory(tmp_path / "ours")) == wanted


def distributed(rank: int, nvme_path: Path, tmp_path: Path) -> None:
    wanted = train(lambda: "ddp", in_directory(tmp_path / "stock"), WAYS["its own"])
    ours = lambda: swapper.lightning.SwapDDPStrategy(config_of(nvme_path))  # noqa: E731
    assert train(ours, in_directory(tmp_path / "ours"), WAYS["its own"]) == wanted
    wanted = with_fabric(lambda: "ddp", in_directory(tmp_path / "stock of Fabric"))
    ours = lambda: swapper.fabric.SwapDDPStrategy(config_of(nvme_path))  # noqa: E731
    assert with_fabric(ours, in_directory(tmp_path / "ours of Fabric")) == wanted


@pytest.mark.long
def test_strategies_of_several_processes_call_it_as_stock_does(nvme_path: Path, tmp_path: Path) -> None:
    in_processes(distributed, nvme_path, tmp_path, ranks=1)
