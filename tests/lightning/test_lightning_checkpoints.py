"""Checkpoints under Lightning: directories and files, resumed in all directions, to the bit."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from checkpoints import Versioned
from launcher import run_program
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.loggers.utilities import _scan_checkpoints
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning_runs import (
    IGNORED_WARNINGS,
    Net,
    config_of,
    facts,
    fit,
    loader,
    precision_of,
    strategy_of,
    trainer_of,
)
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import OneCycleLR
from twins import bits

import swapper
import swapper.lightning
from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.checkpoint.export import export_checkpoint
from swapper.checkpoint.plain_import import import_checkpoint
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.files import fastsave
from swapper.lightning import SwapCheckpointIO
from swapper.storage import store

pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED_WARNINGS]

ALL = "state-gradients-parameters"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def scheduled() -> Net:
    return Net(schedule=lambda optimizer: {"scheduler": OneCycleLR(optimizer, 0.1, total_steps=40), "interval": "step"})


def strategies(nvme_path: Path) -> dict[str, Any]:
    return {
        "stock": lambda: "auto",
        "full": lambda: strategy_of(nvme_path, "state", format="full"),
        "full-all": lambda: strategy_of(nvme_path, ALL, format="full"),
        "directory": lambda: strategy_of(nvme_path, "state"),
        "directory-all": lambda: strategy_of(nvme_path, ALL),
        "directory-none": lambda: strategy_of(nvme_path, "none"),
    }


SOURCES = ["stock", "full", "full-all", "directory", "directory-all", "directory-none"]


def without_losses(trainer: L.Trainer) -> dict[str, Any]:
    """What a run has in common with one that was resumed, which did not see the first losses."""
    found = dict(facts(trainer))
    del found["losses"]
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_resumed_run_ends_in_the_same_bits(source: str, precision: str, nvme_path: Path, tmp_path: Path) -> None:
    make = strategies(nvme_path)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    stock = without_losses(fit("auto", scheduled, max_epochs=3, **options, **precision_of(precision)))
    path = tmp_path / "it.ckpt"
    trainer = fit(make[source](), scheduled, max_epochs=1, **options, **precision_of(precision))
    trainer.save_checkpoint(path)  # After `fit`, when the strategy is torn down.
    del trainer
    gc.collect()
    assert is_checkpoint(path) == source.startswith("directory")
    for target in ("stock", "full-all", "directory", "directory-all"):
        if target == "stock" and source.startswith("directory"):
            continue
        resumed = fit(make[target](), scheduled, ckpt_path=path, max_epochs=3, **options, **precision_of(precision))
        assert without_losses(resumed) == stock, target


@pytest.mark.parametrize("what", ["state", ALL])
def test_a_run_resumed_within_an_epoch_goes_on_as_the_stock_one(what: str, nvme_path: Path, tmp_path: Path) -> None:
    def run(strategy: Any, directory: Path) -> Any:
        keep = ModelCheckpoint(directory, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        fit(strategy(), scheduled, max_epochs=3, max_steps=8, callbacks=[keep], enable_checkpointing=True)
        path = directory / "step=6.ckpt"
        return facts(fit(strategy(), scheduled, ckpt_path=path, max_epochs=3))

    stock = run(lambda: "auto", tmp_path / "stock")
    assert run(lambda: strategy_of(nvme_path, what), tmp_path / "directory") == stock


@pytest.mark.long
@pytest.mark.parametrize("link", [True, "link"])
@pytest.mark.parametrize("what", ["state", ALL])
def test_model_checkpoint_keeps_the_same_ones(what: str, link: Any, nvme_path: Path, tmp_path: Path) -> None:
    def run(strategy: Any, directory: Path) -> Any:
        keep = ModelCheckpoint(directory, monitor="val", mode="min", save_top_k=2, save_last=link, filename="{epoch}")
        options = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 5}
        trainer = fit(strategy, scheduled, **options)
        names = sorted(os.listdir(directory))
        found = [
            names,
            Path(keep.best_model_path).name,
            bits(keep.best_model_score),
            os.path.islink(directory / "last.ckpt"),
        ]
        for which in ("best", "last", directory / names[0]):
            model = scheduled()
            found.append(bits(trainer.validate(model, loader(), ckpt_path=which, verbose=False)))
            found.append([bits(p) for p in model.parameters()])
            found.append(bits(trainer.test(model, loader(), ckpt_path=which, verbose=False)))
        assert not [name for name in os.listdir(directory) if name.startswith(".")]
        return found

    stock = run("auto", tmp_path / "stock")
    assert run(strategy_of(nvme_path, what), tmp_path / "directory") == stock
    assert all(is_checkpoint(path) for path in (tmp_path / "directory").iterdir())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("link", [True, "link"])
@pytest.mark.parametrize("target", ["full", "directory"])
@pytest.mark.parametrize("source", ["stock", "full", "directory"])
def test_a_run_resumed_in_another_format_replaces_its_last_checkpoint(
    source: str, target: str, link: Any, nvme_path: Path, tmp_path: Path
) -> None:
    make = strategies(nvme_path)

    def run(first: str, second: str, directory: Path) -> Any:
        keep: dict[str, Any] = {"monitor": "val", "save_top_k": 1, "filename": "{epoch}"}
        options: dict[str, Any] = {"enable_checkpointing": True}
        fit(make[first](), max_epochs=2, callbacks=[ModelCheckpoint(directory, save_last=link, **keep)], **options)
        callback = ModelCheckpoint(directory, save_last=True, **keep)
        trainer = fit(make[second](), max_epochs=4, ckpt_path="last", callbacks=[callback], **options)
        best = bits(trainer.validate(Net(), loader(), ckpt_path="best", verbose=False))
        assert not list(directory.glob(".*"))
        return without_losses(trainer), sorted(os.listdir(directory)), best

    stock = run("stock", "stock", tmp_path / "stock")
    assert run(source, target, tmp_path / "ours") == stock
    last = tmp_path / "ours" / "last.ckpt"
    assert is_checkpoint(last) == (target == "directory") and not last.is_symlink()


@pytest.mark.parametrize("io", [TorchCheckpointIO, SwapCheckpointIO, lambda: SwapCheckpointIO(background=True)])
def test_a_file_replaces_a_directory(io: Any, nvme_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    fit(strategy_of(nvme_path)).save_checkpoint(path)
    assert is_checkpoint(path)
    trainer = fit(strategy_of(nvme_path, format="full"), plugins=[io()])
    trainer.save_checkpoint(path)
    trainer.strategy.checkpoint_io.teardown()
    assert torch.load(path)["global_step"] == 10
    assert os.listdir(tmp_path) == [path.name] or sorted(os.listdir(tmp_path)) == [path.name, nvme_path.name]


def test_a_save_that_fails_leaves_what_it_was_to_replace(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fit(strategy_of(nvme_path))
    file, directory = tmp_path / "file.ckpt", tmp_path / "directory.ckpt"
    file.write_bytes(b"an earlier one")
    trainer.save_checkpoint(directory)

    def fail(*_: Any) -> None:
        raise SwapIOError(errno.EIO, "exchange", tmp_path)

    monkeypatch.setattr("swapper.storage.atomic.exchange", fail)
    with pytest.raises(SwapIOError, match="exchange"):
        trainer.save_checkpoint(file)
    with pytest.raises(SwapIOError, match="exchange"):
        SwapCheckpointIO().save_checkpoint({"a": 1}, directory)
    assert file.read_bytes() == b"an earlier one"
    assert is_checkpoint(directory)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.long
def test_model_checkpoint_decides_what_is_kept(
    nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(**options: Any) -> L.Trainer:
        return fit(strategy_of(nvme_path, checkpoint={"keep_last": 1}), max_epochs=4, **options)

    keep = ModelCheckpoint(tmp_path / "kept", monitor="epoch", mode="min", save_top_k=2, filename="{epoch}")
    with caplog.at_level("WARNING", "swapper"):
        trainer = run(callbacks=[keep], enable_checkpointing=True)
    assert "checkpoint.keep_last: 1 has no effect" in caplog.text
    trainer.save_checkpoint(tmp_path / "kept" / "more.ckpt")
    assert sorted(os.listdir(tmp_path / "kept")) == ["epoch=0.ckpt", "epoch=1.ckpt", "more.ckpt"]
    trainer = run()
    for name in ("a.ckpt", "b.ckpt"):
        trainer.save_checkpoint(tmp_path / "pruned" / name)
    assert os.listdir(tmp_path / "pruned") == ["b.ckpt"]


class Uploading(Logger):
    """Takes checkpoints as those loggers of Lightning do that upload them."""

    name, version = "uploading", "0"

    def __init__(self) -> None:
        super().__init__()
        self._log_model = True
        self.uploaded: list[str] = []

    def log_metrics(self, *_: Any, **__: Any) -> None: ...

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.uploaded += [Path(path).name for _, path, *_ in _scan_checkpoints(checkpoint_callback, {})]


@pytest.mark.parametrize("format", ["directory", "full"])
def test_loggers_upload_files_and_it_is_said_of_directories(
    format: str, nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep, logger = ModelCheckpoint(tmp_path / "kept", filename="one"), Uploading()
    with caplog.at_level("WARNING", "swapper"):
        fit(
            strategy_of(nvme_path, format=format),
            logger=logger,
            max_epochs=1,
            callbacks=[keep],
            enable_checkpointing=True,
        )
    assert os.listdir(tmp_path / "kept") == ["one.ckpt"]
    assert logger.uploaded == (["one.ckpt"] if format == "full" else [])
    assert ("log_model of Uploading has no effect" in caplog.text) == (format == "directory")


def test_a_checkpoint_with_files_of_others_is_not_removed(
    nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Noting(Callback):
        def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            for path in tmp_path.glob("*.ckpt"):
                (path / "notes.txt").write_text("mine")

    keep = ModelCheckpoint(tmp_path, filename="{epoch}")
    fit(strategy_of(nvme_path), callbacks=[keep, Noting()], enable_checkpointing=True)
    assert "a checkpoint is left alone" in caplog.text and "notes.txt" in caplog.text
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"epoch=0.ckpt", "epoch=1.ckpt"}


def test_what_is_on_the_drive_is_linked(nvme_path: Path, tmp_path: Path) -> None:
    trainer = fit(strategy_of(nvme_path, ALL))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    linked = [path for path in (tmp_path / "it.ckpt").iterdir() if path.stat().st_nlink > 1]
    assert {path.name.partition("-")[0] for path in linked} == {"model", "optimizer"}


def test_a_checkpoint_with_weights_only_has_no_optimizer(nvme_path: Path, tmp_path: Path) -> None:
    trainer = fit(strategy_of(nvme_path, ALL))
    trainer.save_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    model = Net()
    found = trainer_of(strategy_of(nvme_path)).validate(model, loader(), ckpt_path=tmp_path / "it.ckpt", verbose=False)
    assert bits(found) == bits(trainer.validate(trainer.lightning_module, loader(), verbose=False))
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        fit(strategy_of(nvme_path), ckpt_path=tmp_path / "it.ckpt")


class Hooked(Net):
    """Adds to a checkpoint, and changes the weights in it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["mine"] = {"nested": [state["first.weight"], torch.arange(3)], "tuple": (1, "two")}
        state["last.bias"] = torch.full_like(state["last.bias"], 7)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = (
            bits([checkpoint["mine"]["nested"][0] + 0, checkpoint["mine"]["nested"][1]]),
            checkpoint["mine"]["tuple"],
        )
        checkpoint["state_dict"]["second.bias"] = checkpoint["state_dict"]["second.bias"] + 1


class HookedInPlace(Hooked):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = tuple(checkpoint["mine"])
        checkpoint["state_dict"]["second.weight"].mul_(0.5)
        checkpoint["state_dict"]["second.bias"][:3] += 1


@pytest.mark.parametrize("module", [Hooked, HookedInPlace])
@pytest.mark.parametrize("what", ["state", ALL])
def test_hooks_see_and_change_what_they_always_do(what: str, module: Any, nvme_path: Path, tmp_path: Path) -> None:
    def run(strategy: Any, path: Path) -> Any:
        fit(strategy(), module).save_checkpoint(path)
        trainer = fit(strategy(), module, ckpt_path=path, max_epochs=3)
        return facts(trainer), trainer.lightning_module.seen

    stock = run(lambda: "auto", tmp_path / "stock.ckpt")
    assert run(lambda: strategy_of(nvme_path, what), tmp_path / "directory.ckpt") == stock


class Keeping(Net):
    """Saves a part of a tensor, and keeps tensors that it is given; has its own way with names."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {f"my.{name}": value for name, value in super().state_dict().items()}

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({name[3:]: value for name, value in state.items()}, strict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["part"] = checkpoint["state_dict"]["my.first.weight"][1:3]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = [checkpoint["part"], *checkpoint["state_dict"].values()]

    def on_train_start(self) -> None:
        self.seen = [bits(value + 0) for value in getattr(self, "kept", [])]


@pytest.mark.parametrize("what", ["state", ALL])
def test_a_hook_may_keep_tensors_and_save_parts_of_them(what: str, nvme_path: Path, tmp_path: Path) -> None:
    def run(strategy: Any, path: Path) -> Any:
        fit(strategy(), Keeping).save_checkpoint(path)
        model = fit(strategy(), Keeping, ckpt_path=path, max_epochs=3).lightning_module
        loaded = swapper.lightning.load_from_checkpoint(Keeping, path)
        values = [{name: bits(value + 0) for name, value in each.state_dict().items()} for each in (model, loaded)]
        assert len(model.seen) == 12
        return values, model.seen, [bits(value + 0) for value in loaded.kept]

    stock = run(lambda: "auto", tmp_path / "stock.ckpt")
    assert run(lambda: strategy_of(nvme_path, what), tmp_path / "directory.ckpt") == stock


def test_a_tensor_that_was_kept_is_not_that_of_a_later_checkpoint(nvme_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    fit(strategy_of(nvme_path), Keeping).save_checkpoint(path)
    trainer = fit(strategy_of(nvme_path), Keeping, ckpt_path=path, max_epochs=3)
    trainer.save_checkpoint(path)
    with pytest.raises(SwapError, match=r"my\.first\.weight.*clone what is to be kept"):
        trainer.lightning_module.kept[1] + 0


class Ema(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda averaged, new, count: averaged * 0.9 + new * 0.1)


@pytest.mark.parametrize("what", ["state", ALL])
def test_averaged_weights_are_resumed(what: str, nvme_path: Path, tmp_path: Path) -> None:
    def run(strategy: Any, directory: Path) -> Any:
        keep = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
        stopping = EarlyStopping("val", patience=9)
        options: dict[str, Any] = {"enable_checkpointing": True}
        fit(strategy(), max_epochs=2, callbacks=[Ema(), keep, stopping], **options)
        again = ModelCheckpoint(directory, filename="again-{epoch}", save_top_k=-1)
        path = directory / "epoch=0.ckpt"
        callbacks = [Ema(), again, EarlyStopping("val", patience=9)]
        return facts(fit(strategy(), ckpt_path=path, max_epochs=3, callbacks=callbacks, **options))

    stock = run(lambda: "auto", tmp_path / "stock")
    assert run(lambda: strategy_of(nvme_path, what), tmp_path / "directory") == stock


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states.__setitem__(0, {"state": {}}),
        lambda states: states[0]["param_groups"][0].update(lr=7.0),
        lambda states: states[0]["state"].update({0: {}}),
        lambda states: states.clear(),
    ],
    ids=["replaced", "group", "state", "none"],
)
def test_a_hook_that_changes_optimizer_states_is_refused(change: Any, nvme_path: Path, tmp_path: Path) -> None:
    class Changing(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            change(checkpoint["optimizer_states"])

    trainer = fit(strategy_of(nvme_path), callbacks=[Changing()])
    with pytest.raises(ConfigError, match="checkpoint_format='full'"):
        trainer.save_checkpoint(tmp_path / "it.ckpt")
    assert not (tmp_path / "it.ckpt").exists()


def test_what_cannot_be_saved_without_pickle_is_named(nvme_path: Path, tmp_path: Path) -> None:
    class Strange(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"here": nn.Linear(1, 1)}

    trainer = fit(strategy_of(nvme_path), Strange)
    with pytest.raises(SwapError, match=r"\['mine'\]\['here'\].*Linear"):
        trainer.save_checkpoint(tmp_path / "it.ckpt")


def test_hyper_parameters_that_cannot_be_saved_are_refused_at_the_start(nvme_path: Path, tmp_path: Path) -> None:
    class WithCode(Net):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"size": 3, "layer": nn.ReLU})

    keep = {"callbacks": [ModelCheckpoint(tmp_path)], "enable_checkpointing": True}
    with pytest.raises(ConfigError, match=r"hparams of WithCode\['layer'\].*ignore=.*checkpoint_format='full'"):
        fit(strategy_of(nvme_path), WithCode, **keep)
    fit(strategy_of(nvme_path), WithCode)
    fit(strategy_of(nvme_path, format="full"), WithCode, **keep)
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


class Kind(Enum):
    SMALL = "small"


class Described(Net):
    def __init__(self, kind: Kind, where: Path, options: Namespace, rate: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyper_parameters_of_many_kinds_are_saved_and_loaded(nvme_path: Path, tmp_path: Path) -> None:
    given = (Kind.SMALL, tmp_path, Namespace(a=1, b=Namespace(c=(2,))), np.float32(0.5), torch.bfloat16)
    keep = ModelCheckpoint(tmp_path, save_last=True)
    fit(strategy_of(nvme_path), lambda: Described(*given), callbacks=[keep], enable_checkpointing=True)
    fit(strategy_of(nvme_path), lambda: Described(*given), ckpt_path=keep.last_model_path, max_epochs=3)
    loaded = swapper.lightning.load_from_checkpoint(Described, keep.last_model_path).hparams
    assert tuple(loaded.values()) == given
    assert [type(value) for value in loaded.values()] == [type(value) for value in given]


def test_a_member_of_an_enum_is_exported_where_its_class_is_there(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (Kind.SMALL, tmp_path, Namespace(), np.arange(3), torch.bfloat16)
    fit(strategy_of(nvme_path), lambda: Described(*given)).save_checkpoint(tmp_path / "it.ckpt")
    export_checkpoint(tmp_path / "it.ckpt", "lightning", tmp_path / "file.ckpt")
    exported = torch.load(tmp_path / "file.ckpt", weights_only=False)
    assert exported["hyper_parameters"]["kind"] is Kind.SMALL
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(SwapError, match=f"hyper_parameters.*import {__name__} before loading"):
        export_checkpoint(tmp_path / "it.ckpt", "lightning", tmp_path / "2.ckpt")
    export_checkpoint(tmp_path / "it.ckpt", "lightning", tmp_path / "model.ckpt", model_only=True)
    assert bits(torch.load(tmp_path / "model.ckpt")["state_dict"]) == bits(exported["state_dict"])
    export_checkpoint(tmp_path / "it.ckpt", "safetensors", tmp_path / "safetensors")
    extra = (tmp_path / "safetensors" / "extra.safetensors").read_bytes()
    assert np.arange(3).tobytes() in extra


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("what", ["state", ALL])
def test_a_run_of_a_true_precision_is_resumed_as_the_stock_one(
    what: str, precision: str, nvme_path: Path, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float64

    def run(strategy: Any, path: Path) -> Any:
        options = {"data": lambda: loader(dtype=dtype), "validation": None, "precision": precision}
        fit(strategy(), **options).save_checkpoint(path)
        return facts(fit(strategy(), ckpt_path=path, max_epochs=3, **options))

    stock = run(lambda: "auto", tmp_path / "stock.ckpt")
    assert run(lambda: strategy_of(nvme_path, what), tmp_path / "directory.ckpt") == stock


def test_a_model_of_other_names_is_refused_unless_loading_is_not_strict(nvme_path: Path, tmp_path: Path) -> None:
    class Other(Net):
        def __init__(self, strict: bool) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)
            self.strict_loading = strict

    trainer = fit(strategy_of(nvme_path, ALL))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    with pytest.raises(ConfigError, match=r"the checkpoint lacks more\.weight"):
        trainer_of(strategy_of(nvme_path)).validate(Other(True), loader(), ckpt_path=tmp_path / "it.ckpt")
    model = Other(False)
    trainer_of(strategy_of(nvme_path)).validate(model, loader(), ckpt_path=tmp_path / "it.ckpt", verbose=False)
    assert bits(model.first.weight) == facts(trainer)["parameters"]["first.weight"]


def test_a_directory_of_another_program_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    swapper.save_checkpoint(tmp_path / "it.ckpt", Net())
    with pytest.raises(ConfigError, match="was not saved by Lightning; load it with"):
        fit(strategy_of(nvme_path), ckpt_path=tmp_path / "it.ckpt")


def test_a_stock_strategy_is_told_what_a_directory_is(nvme_path: Path, tmp_path: Path) -> None:
    fit(strategy_of(nvme_path)).save_checkpoint(tmp_path / "it.ckpt")
    with pytest.raises(SwapError, match="a directory that SwapStrategy saved"):
        fit("auto", plugins=[SwapCheckpointIO()], ckpt_path=tmp_path / "it.ckpt")


def test_a_remote_path_is_refused_for_a_directory(nvme_path: Path) -> None:
    trainer = fit(strategy_of(nvme_path))
    with pytest.raises(ConfigError, match="use checkpoint_format='full'"):
        trainer.save_checkpoint("memory://it.ckpt")


def test_with_a_checkpoint_io_files_are_written(nvme_path: Path, tmp_path: Path) -> None:
    trainer = fit(strategy_of(nvme_path), plugins=[TorchCheckpointIO()])
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    assert (tmp_path / "it.ckpt").is_file()
    with pytest.raises(ConfigError, match="a directory is not written by TorchCheckpointIO"):
        fit(strategy_of(nvme_path, format="directory"), plugins=[TorchCheckpointIO()])


def no_save_goes_on() -> bool:
    """What was written was waited for; its thread may be about to end."""
    for thread in threading.enumerate():
        if "save" in thread.name:
            thread.join(240)
    return not any("save" in thread.name for thread in threading.enumerate())


@pytest.mark.long
def test_where_nothing_can_be_linked_the_rest_is_copied_while_training_goes_on(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = without_losses(fit(max_epochs=3))
    monkeypatch.setattr(store, "link", lambda *_: False)
    keep = ModelCheckpoint(tmp_path, monitor="val", save_top_k=1, save_last=True, filename="{epoch}")
    fit(strategy_of(nvme_path, ALL), max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    assert no_save_goes_on()
    resumed = fit(strategy_of(nvme_path, ALL), ckpt_path=tmp_path / "last.ckpt", max_epochs=3)
    assert without_losses(resumed) == stock
    resumed.save_checkpoint(tmp_path / "after.ckpt")
    assert is_checkpoint(tmp_path / "after.ckpt")


def test_a_checkpoint_that_is_still_being_copied_is_waited_for(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, go_on = NewCheckpoint._copy, threading.Event()

    def late(self: NewCheckpoint, *arguments: Any) -> None:
        assert go_on.wait(240)
        copy(self, *arguments)

    class Loading(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "it.ckpt")
            assert not (tmp_path / "it.ckpt").exists()
            threading.Timer(0.1, go_on.set).start()
            self.step = trainer.strategy.load_checkpoint(tmp_path / "it.ckpt")["global_step"]

    monkeypatch.setattr(store, "link", lambda *_: False)
    monkeypatch.setattr(NewCheckpoint, "_copy", late)
    loading = Loading()
    fit(strategy_of(nvme_path), max_epochs=1, callbacks=[loading])
    assert loading.step == 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["state", ALL])
def test_an_exported_directory_is_the_file_of_the_stock_strategy(what: str, nvme_path: Path, tmp_path: Path) -> None:
    fit("auto", Hooked, max_epochs=1).save_checkpoint(tmp_path / "stock.ckpt")
    fit(strategy_of(nvme_path, what), Hooked, max_epochs=1).save_checkpoint(tmp_path / "directory.ckpt")
    command = ["checkpoint", "export", str(tmp_path / "directory.ckpt"), str(tmp_path / "it.ckpt"), "--to", "lightning"]
    run_program([sys.executable, "-m", "swapper", *command], check=True, timeout=300)
    stock, exported = torch.load(tmp_path / "stock.ckpt"), torch.load(tmp_path / "it.ckpt")
    assert bits(exported) == bits(stock)
    results = [facts(fit("auto", Hooked, ckpt_path=tmp_path / name)) for name in ("stock.ckpt", "it.ckpt")]
    assert results[0] == results[1]


def test_a_directory_exported_for_torch_has_tensors_and_no_references(nvme_path: Path, tmp_path: Path) -> None:
    fit(strategy_of(nvme_path, ALL), Hooked, max_epochs=1).save_checkpoint(tmp_path / "it.ckpt")
    export_checkpoint(tmp_path / "it.ckpt", "torch", tmp_path / "it.pt")
    exported = torch.load(tmp_path / "it.pt")
    first = exported["extra"]["mine"]["nested"][0]
    assert bits(first) == bits(exported["model"]["first.weight"])
    assert first.data_ptr() == exported["model"]["first.weight"].data_ptr()


def test_a_directory_exported_for_others_has_tensors_or_says_where_they_are(nvme_path: Path, tmp_path: Path) -> None:
    trainer = fit(strategy_of(nvme_path, ALL), Hooked, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    export_checkpoint(tmp_path / "it.ckpt", "dcp", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "dcp.pt")
    extra = torch.load(tmp_path / "dcp.pt", weights_only=False)["extra"]
    assert bits(extra["mine"]["nested"][0]) == facts(trainer)["parameters"]["first.weight"]
    assert bits(extra["state_dict"]["last.bias"]) == bits(torch.full((3,), 7.0))
    exported = export_checkpoint(tmp_path / "it.ckpt", "safetensors", tmp_path / "safetensors")
    assert any('{"swapper.model": NAME}' in note for note in exported.notes)
    fit(strategy_of(nvme_path), max_epochs=1).save_checkpoint(tmp_path / "plain.ckpt")
    export_checkpoint(tmp_path / "plain.ckpt", "dcp", tmp_path / "plain")
    dcp_to_torch_save(tmp_path / "plain", tmp_path / "plain.pt")
    assert "state_dict" not in torch.load(tmp_path / "plain.pt", weights_only=False)["extra"]


def test_a_checkpoint_of_an_evaluation_begins_a_training(nvme_path: Path, tmp_path: Path) -> None:
    def run(strategy: Any, path: Path) -> Any:
        torch.manual_seed(1)
        trainer = trainer_of(strategy())
        trainer.validate(Net(), loader(), verbose=False)
        trainer.save_checkpoint(path)
        return facts(fit(strategy(), ckpt_path=path))

    stock = run(lambda: "auto", tmp_path / "stock.ckpt")
    assert run(lambda: strategy_of(nvme_path), tmp_path / "directory.ckpt") == stock


def test_an_imported_file_of_the_stock_strategy_is_resumed(nvme_path: Path, tmp_path: Path) -> None:
    stock = without_losses(fit("auto", scheduled, max_epochs=3))
    fit("auto", scheduled, max_epochs=1).save_checkpoint(tmp_path / "stock.ckpt")
    import_checkpoint(tmp_path / "stock.ckpt", tmp_path / "it.ckpt")
    assert is_checkpoint(tmp_path / "it.ckpt")
    resumed = fit(strategy_of(nvme_path, ALL), scheduled, ckpt_path=tmp_path / "it.ckpt", max_epochs=3)
    assert without_losses(resumed) == stock


def test_what_lightning_has_not_saved_is_not_exported_for_it(tmp_path: Path) -> None:
    swapper.save_checkpoint(tmp_path / "it", Net())
    with pytest.raises(SwapError, match="was not saved by Lightning; export it to torch"):
        export_checkpoint(tmp_path / "it", "lightning", tmp_path / "it.ckpt")


class Sized(Net):
    def __init__(self, size: int, extra: str = "default") -> None:
        super().__init__(width=size)
        self.save_hyperparameters()


class OfVersionTwo(Net):
    """A layer of it converts state dicts without its version."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Versioned(96, 3)


@pytest.mark.parametrize("source", ["directory", "imported", "exported", "module"])
def test_versions_of_modules_are_kept(source: str, nvme_path: Path, tmp_path: Path) -> None:
    stock = facts(fit("auto", OfVersionTwo, max_epochs=2))["parameters"]
    saved = fit("auto" if source == "imported" else strategy_of(nvme_path, ALL), OfVersionTwo, max_epochs=1)
    saved.save_checkpoint(path := tmp_path / "it.ckpt")
    if source == "imported":
        import_checkpoint(path, path := tmp_path / "imported.ckpt")
    elif source == "exported":
        export_checkpoint(path, "lightning", path := tmp_path / "exported.ckpt")
    elif source == "module":
        module = swapper.lightning.load_from_checkpoint(OfVersionTwo, path)
        assert {name: bits(value) for name, value in module.state_dict().items()} == facts(saved)["parameters"]
    strategy = "auto" if source == "exported" else strategy_of(nvme_path, ALL)
    resumed = fit(strategy, OfVersionTwo, ckpt_path=path, max_epochs=2)
    assert facts(resumed)["parameters"] == stock


@pytest.mark.parametrize("what", ["state", ALL])
def test_a_module_is_made_of_a_directory(what: str, nvme_path: Path, tmp_path: Path) -> None:
    trainer = fit(strategy_of(nvme_path, what), lambda: Sized(80))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    fit("auto", lambda: Sized(80)).save_checkpoint(tmp_path / "file.ckpt")
    for path in (tmp_path / "it.ckpt", tmp_path / "file.ckpt"):
        module = swapper.lightning.load_from_checkpoint(Sized, path, extra="mine")
        assert (module.hparams.size, module.hparams.extra) == (80, "mine")
        assert {name: bits(value) for name, value in module.state_dict().items()} == facts(trainer)["parameters"]
        (tmp_path / "hparams.yaml").write_text("size: 80\nextra: written")
        device = "meta" if path.is_dir() else None
        module = swapper.lightning.load_from_checkpoint(Sized, path, device, tmp_path / "hparams.yaml", True, False)
        assert module.hparams.extra == "written" and module.first.weight.is_meta == path.is_dir()
    with pytest.raises(ConfigError, match="map_location: a dict is no device"):
        swapper.lightning.load_from_checkpoint(Sized, tmp_path / "it.ckpt", {"cpu": "cpu"})
    with pytest.raises(ConfigError, match="module: Linear is no class of LightningModules"):
        swapper.lightning.load_from_checkpoint(nn.Linear, tmp_path / "it.ckpt")


class Numbered(L.LightningDataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.number = 0

    def train_dataloader(self) -> Any:
        self.number += 1
        return loader()

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_a_data_module_is_resumed_and_made_of_a_directory(nvme_path: Path, tmp_path: Path) -> None:
    trainer = trainer_of(strategy_of(nvme_path), reload_dataloaders_every_n_epochs=1)
    trainer.fit(Net(), datamodule=Numbered(5))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    resumed = Numbered(5)
    trainer_of(strategy_of(nvme_path), max_epochs=3).fit(Net(), datamodule=resumed, ckpt_path=tmp_path / "it.ckpt")
    assert resumed.number == trainer.datamodule.number + 1
    made = swapper.lightning.load_from_checkpoint(Numbered, tmp_path / "it.ckpt")
    assert (made.number, made.hparams.size) == (trainer.datamodule.number, 5)


MEMORY = """
import sys, time, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [{benchmarks!r}, {tests!r}]
import torch
from torch import nn
from peak import Peak
from lightning_runs import Net, loader, trainer_of
import swapper.lightning

torch.set_num_threads(1)

class Large(Net):
    def __init__(self):
        super().__init__()
        wide = [nn.Linear(2048, 2048) for _ in range(4)]
        self.body = nn.Sequential(nn.Linear(16, 2048), *wide, nn.Linear(2048, 16))

    def forward(self, x):
        return super().forward(self.body(x))

def make(epochs):
    config = {config!r}
    return trainer_of(swapper.lightning.SwapStrategy(config), max_epochs=epochs)

trainer = make(1)
trainer.fit(Large(), loader(4))
swapped_bytes = swapper.of(trainer.optimizers[0]).stats().state_bytes
trainer.optimizers[0].zero_grad()
with Peak() as before:
    time.sleep(0.05)
with Peak() as peak:
    trainer.save_checkpoint({path!r})
print(swapped_bytes, peak.bytes - before.bytes)
again, model = make(1), Large()
with Peak() as before:
    time.sleep(0.05)
with Peak() as peak:
    again.fit(model, loader(4), ckpt_path={path!r})
assert again.optimizers[0].swapper.stats().steps == 0
print(again.optimizers[0].swapper.stats().state_bytes, peak.bytes - before.bytes)
"""


@pytest.mark.long
def test_saving_and_resuming_hold_no_copy_of_the_state(nvme_path: Path, tmp_path: Path) -> None:
    config = config_of(nvme_path, "state", pool_bytes="8MiB", bucket_bytes="1MiB")
    tests = Path(__file__).resolve().parents[1]
    parts = {
        "benchmarks": str(tests.parent / "benchmarks"),
        "tests": str(tests / "support"),
        "path": str(tmp_path / "it.ckpt"),
    }
    script = MEMORY.format(config=config, **parts)
    done = run_program([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        state_bytes, grown_bytes = map(int, line.split())
        assert state_bytes > 128 << 20
        assert grown_bytes < 48 << 20, "a pool of 8 MiB, pieces of 16 MiB"


# --- SwapCheckpointIO -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_files_of_swap_checkpoint_io_are_lightnings(background: bool, tmp_path: Path) -> None:
    def run(plugin: Any, directory: Path) -> Any:
        keep = ModelCheckpoint(directory, monitor="val", save_top_k=2, save_last=True, filename="{epoch}")
        fit("auto", scheduled, max_epochs=3, callbacks=[keep], enable_checkpointing=True, plugins=[plugin])
        return sorted(os.listdir(directory))

    stock, ours = tmp_path / "stock", tmp_path / "ours"
    assert run(SwapCheckpointIO(background=background), ours) == run(TorchCheckpointIO(), stock)
    assert no_save_goes_on()
    resumed = []
    for directory, plugins in ((stock, []), (ours, []), (stock, [SwapCheckpointIO()]), (ours, [SwapCheckpointIO()])):
        path = directory / "last.ckpt"
        resumed.append(without_losses(fit("auto", scheduled, ckpt_path=path, max_epochs=4, plugins=plugins)))
        assert path.is_file()
    assert all(each == resumed[0] for each in resumed)


def test_a_file_that_is_written_in_the_background_has_the_values_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write = fastsave.Prepared.write

    def late(self: fastsave.Prepared, output: Any) -> None:
        assert go_on.wait(240)
        write(self, output)

    monkeypatch.setattr(fastsave.Prepared, "write", late)
    weight = nn.Parameter(torch.zeros(4))
    plugin = SwapCheckpointIO(background=True)
    complexes = torch.tensor([1 + 2j])
    checkpoint = {"a": weight, "tied": weight.detach(), "z": complexes, "conj": complexes.conj()}
    plugin.save_checkpoint(checkpoint, tmp_path / "it.ckpt")
    weight.data.fill_(1)
    assert not (tmp_path / "it.ckpt").exists()
    go_on.set()
    found = plugin.load_checkpoint(tmp_path / "it.ckpt")
    assert bits(found["a"]) == bits(found["tied"]) == bits(torch.zeros(4))
    assert found["a"].data_ptr() == found["tied"].data_ptr()
    assert (found["z"].item(), found["conj"].item()) == (1 + 2j, 1 - 2j)


def test_a_failure_in_the_background_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: fastsave.Prepared, output: Any) -> None:
        raise SwapIOError(errno.ENOSPC, "write", "the drive")

    plugin = SwapCheckpointIO(background=True)
    monkeypatch.setattr(fastsave.Prepared, "write", fail)
    keep = ModelCheckpoint(tmp_path)
    with pytest.raises(SwapIOError, match="the drive"):
        fit("auto", max_epochs=1, callbacks=[keep], enable_checkpointing=True, plugins=[plugin])


def test_a_failure_in_the_background_does_not_replace_the_users_exception(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Net):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "it.ckpt")
            raise ZeroDivisionError("the user's")

    def fail(self: fastsave.Prepared, output: Any) -> None:
        raise SwapIOError(errno.ENOSPC, "write", "the drive")

    monkeypatch.setattr(fastsave.Prepared, "write", fail)
    with pytest.raises(ZeroDivisionError):
        fit(strategy_of(nvme_path), Failing, plugins=[SwapCheckpointIO(background=True)])
    assert "after another exception" in caplog.text and "the drive" in caplog.text


def test_what_wraps_a_checkpoint_io_wraps_ours(nvme_path: Path, tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO()
    keep = ModelCheckpoint(tmp_path, save_last=True)
    fit(strategy_of(nvme_path), callbacks=[keep], enable_checkpointing=True, plugins=[plugin])
    assert type(plugin.checkpoint_io) is SwapCheckpointIO
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 10
    own = AsyncCheckpointIO(TorchCheckpointIO())
    fit(strategy_of(nvme_path), plugins=[own])
    assert type(own.checkpoint_io) is TorchCheckpointIO
