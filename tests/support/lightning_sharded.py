"""What each of two ranks runs, with `ModelParallelStrategy` and with ours: tests/lightning/test_model_parallel.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.fsdp import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning_ddp import collect_garbage
from lightning_runs import Net, config_of, loader, trainer_of
from ranks import TIMEOUT_S
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from twins import bits

import swapper.fabric
import swapper.lightning
from swapper.checkpoint import annexes
from swapper.tensors.evicted import is_evicted
from swapper.tensors.sharded import reshard

__all__ = ["CASES", "convert", "fit_and_resume", "load_others", "named", "train_on", "with_annexes", "with_fabric"]

PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}


class Sharded(Net):
    """Sharded by FSDP2 over the data-parallel dimension, unevenly and with empty shards."""

    policy: MixedPrecisionPolicy | None = None

    def __init__(self) -> None:
        super().__init__(width=97)
        self.norm = nn.Identity()  # Running means would differ between ranks.
        self.is_sharded = False

    def configure_model(self) -> None:
        if self.is_sharded:
            return
        self.is_sharded = True
        assert self.device_mesh is not None
        options: dict[str, Any] = {"mp_policy": self.policy} if self.policy else {}
        for module in (self.second, self):
            fully_shard(module, mesh=self.device_mesh["data_parallel"], **options)


class Mixed(Sharded):
    """Computes in bfloat16, with gradients in float32."""

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Manual(Sharded):
    """Optimizes in its own way, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        body = [*self.first.parameters(), *self.second.parameters()]
        return torch.optim.AdamW(body, lr=1e-2), torch.optim.SGD(self.last.parameters(), lr=1e-2, momentum=0.9)

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        self.clip_gradients(optimizers[0], gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        for optimizer in optimizers:
            optimizer.step()


class Flattened(Net):
    """Sharded by FSDP1 as `configure_model` likes, because Lightning's own call needs an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(self.first, nn.Tanh(), self.second, nn.Tanh(), self.last)
        del self.first, self.norm, self.second, self.last
        self.is_sharded = False

    def configure_model(self) -> None:
        if not self.is_sharded:
            self.is_sharded = True
            self.body[2] = flattened(self.body[2])  # type: ignore[index, operator]
            self.body = flattened(self.body)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


class Parallel(Net):
    """Tensor parallelism, without FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def configure_model(self) -> None:
        if not isinstance(self.first.weight, DTensor):
            assert self.device_mesh is not None
            parallelize_module(self, self.device_mesh["tensor_parallel"], dict(PLAN))


def flattened(module: nn.Module) -> nn.Module:
    """The module in FSDP1."""
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


class StockFSDP(FSDPStrategy):
    """That of Lightning, which refuses itself on a CPU."""


class StockFabricFSDP(FabricFSDPStrategy):
    """The same of Fabric."""


Module = Callable[[], Net]
CASES: dict[str, tuple[Module, dict[str, Any], dict[str, Any]]] = {
    "clipping": (Sharded, {}, {"gradient_clip_val": 0.05}),
    "accumulation": (Mixed, {}, {"accumulate_grad_batches": 2}),
    "one-file": (Sharded, {"save_distributed_checkpoint": False}, {"precision": "bf16-mixed"}),
    "bf16-true": (
        Sharded,
        {},
        {"precision": "bf16-true", "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "manual-gradients": (Manual, {}, {}),
    "fsdp-shards": (
        Flattened,
        {"state_dict_type": "sharded"},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "tensor": (Parallel, {"data_parallel_size": 1, "tensor_parallel_size": 2}, {}),
    "parameters-gradients": (Sharded, {}, {"gradient_clip_val": 0.05}),
    "parameters-gradients-one-file": (Mixed, {"save_distributed_checkpoint": False}, {"accumulate_grad_batches": 2}),
    "parameters-bf16-true": (Sharded, {}, {"precision": "bf16-true"}),
    "directory": (Manual, {}, {}),
    "directory-parameters": (Sharded, {}, {"precision": "bf16-true", "accumulate_grad_batches": 2}),
}
"""A module, the arguments of the strategy and those of the Trainer. The name says what is on the drive beside state."""


def strategy_of(config: Any, options: dict[str, Any], format: str | None = None) -> Any:
    """The stock strategy, or ours with a config."""
    if "state_dict_type" in options:
        return StockFSDP(**options) if config is None else swapper.lightning.SwapFSDPStrategy(config, **options)
    options = {"data_parallel_size": 2, "tensor_parallel_size": 1, "timeout": timedelta(seconds=TIMEOUT_S), **options}
    if config is None:
        return ModelParallelStrategy(**options)
    return swapper.lightning.SwapModelParallelStrategy(config, checkpoint_format=format, **options)


def local(value: Any) -> Any:
    return value._local_tensor.detach().clone() if isinstance(value, DTensor) else value


def facts(trainer: Any) -> Any:
    """All that two trainings must have in common on this rank, comparable."""
    model = trainer.lightning_module
    reshard(model)
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return {
        "parameters": {name: bits(local(p)) for name, p in model.named_parameters()},
        "states": bits([[{key: local(v) for key, v in e.items()} for e in s["state"].values()] for s in states]),
        "groups": [state["param_groups"] for state in states],
        "metrics": {name: bits(value) for name, value in trainer.callback_metrics.items()},
        "losses": model.losses,
        "steps": (trainer.global_step, trainer.current_epoch),
    }


def fit_and_resume(rank: int, name: str, nvme_path: Path, directory: Path) -> None:
    """All that a Trainer does; and each checkpoint resumed by the other strategy."""
    module, options, more = CASES[name]
    what = " ".join(["state", *(each for each in ("parameters", "gradients") if each in name)])
    format = "directory" if "directory" in name else None

    def trainer(config: Any, **given: Any) -> Any:
        torch.manual_seed(5)
        strategy = strategy_of(config, options, format)
        return trainer_of(strategy, devices=2, use_distributed_sampler=True, **more | given)

    def run(config: Any, checkpoints: Path) -> Any:
        keep = ModelCheckpoint(checkpoints, monitor="val", save_top_k=1, save_last=True, filename="{epoch}")
        found = []
        each, model = trainer(config, callbacks=[keep], enable_checkpointing=True), module()
        found.append(bits(each.validate(model, loader(8), verbose=False)))
        each.fit(model, loader(12), loader(8))
        found.append(facts(each))
        found.append(bits(each.test(model, loader(8), ckpt_path="best", weights_only=False, verbose=False)))
        found.append(bits(each.predict(model, loader(8))))
        each.fit_loop.max_epochs = 3
        each.fit(model, loader(12), loader(8), ckpt_path="last", weights_only=False)
        each.save_checkpoint(checkpoints / "after.ckpt")
        check_drive(each, checkpoints / "after.ckpt", what if config is not None else "", format)
        swapped = [getattr(optimizer, "swapper", None) is not None for optimizer in each.optimizers]
        assert all(swapped) if config is not None else not any(swapped)
        return [*found, facts(each)]

    def resume(config: Any, checkpoint: Path) -> Any:
        each, model = trainer(config, max_epochs=5), module()
        each.fit(model, loader(12), loader(8), ckpt_path=checkpoint, weights_only=False)
        return facts(each)

    config = config_of(nvme_path, what)
    stock = run(None, directory / "stock")
    assert run(config, directory / "ours") == stock, rank
    collect_garbage()
    resumed = resume(None, directory / "stock" / "after.ckpt")
    assert resumed["steps"] > stock[-1]["steps"]
    for settings, source in ((config, "stock"), (None, "ours"), (config, "ours")):
        if settings is None and format:  # The stock strategy does not know it.
            continue
        assert resume(settings, directory / source / "after.ckpt") == resumed, (rank, source)
        collect_garbage()
    torch.distributed.barrier()
    assert not os.listdir(nvme_path)


def check_drive(trainer: Any, checkpoint: Path, what: str, format: str | None) -> None:
    """Parameters are on the drive, gradients were, and a directory has links to records, if that was asked for."""
    assert "gradients" not in what or evicts_gradients(trainer.optimizers[0])
    parameters = [p._local_tensor for p in trainer.lightning_module.parameters() if isinstance(p, DTensor)]
    if "parameters" in what:
        assert all(is_evicted(p) or not p.numel() for p in parameters)
    elif what:
        assert not any(map(is_evicted, parameters))
    if what and format:
        linked = [each for each in checkpoint.glob("model-*.safetensors") if each.stat().st_nlink == 2]
        assert bool(linked) == ("parameters" in what), linked


def evicts_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return swapper.of(optimizer).stats().gradients.bytes_written > 0


def train_on(rank: int, count: int, source: str, nvme_path: Path, directory: Path) -> None:
    """Train, or go on, on so many ranks: with the stock strategy, and with everything on the drive and directories."""
    for name, config in (("stock", None), ("ours", config_of(nvme_path, "state parameters"))):
        torch.manual_seed(5)
        strategy = strategy_of(config, {"data_parallel_size": count}, "directory")
        each = trainer_of(strategy, devices=count, use_distributed_sampler=True, max_epochs=4 if source else 2)
        model = Sharded()
        given = {"ckpt_path": directory / f"{name}-{source}", "weights_only": False} if source else {}
        each.fit(model, loader(12), loader(8), **given)
        each.save_checkpoint(directory / f"{name}-{source}{count}")
        found = facts(each)
        if name == "stock":
            expected = found
        else:
            check_drive(each, directory / f"{name}-{source}{count}", "state parameters", "directory")
    assert found == expected, [key for key in expected if found[key] != expected[key]]
    del each, model
    collect_garbage()


def with_annexes(rank: int, nvme_path: Path, directory: Path) -> None:
    """What is large is on a drive that only its rank sees; it resumes, and goes with its checkpoint on all ranks."""
    config = config_of(nvme_path, "state parameters")
    mine = directory / f"drive-{rank}"

    def run(name: str, epochs: int, source: str | None = None, **options: Any) -> Any:
        torch.manual_seed(5)
        keep = ModelCheckpoint(directory / name, save_top_k=1, filename="{epoch}")  # The newest: others are removed.
        strategy, more = strategy_of(config, options, "directory"), {"callbacks": [keep], "enable_checkpointing": True}
        each = trainer_of(strategy, devices=2, use_distributed_sampler=True, max_epochs=epochs, **more)
        model = Sharded()
        given = {"ckpt_path": directory / source, "weights_only": False} if source else {}
        each.fit(model, loader(12), **given)
        return facts(each)

    def fabric(name: str, **options: Any) -> Any:
        sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1, "checkpoint_format": "directory", **options}
        given = swapper.fabric.SwapModelParallelStrategy(config, parallelize_fn=shard, **sizes)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=given)
        fabric.launch()
        torch.manual_seed(5)
        model: Any = fabric.setup_module(nn.Sequential(nn.Linear(16, 97), nn.Tanh(), nn.Linear(97, 1)))
        optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        found = []
        for _ in range(2):
            fabric.backward(model(torch.ones(2, 16)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if not found:
                fabric.save(directory / name, {"model": model, "optimizer": optimizer})
            found.append([bits(local(p)) for p in model.parameters()])
        fabric.load(directory / name, {"model": model, "optimizer": optimizer}, weights_only=False)
        assert [bits(local(p)) for p in model.parameters()] == found[0]
        return found

    find = annexes._manifest_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(annexes, "_manifest_of", lambda path: find(path) if path.is_relative_to(mine) else None)
        expected = run("plain", 4)
        assert run("kept", 4, annex=mine) == expected
        assert os.listdir(directory / "kept") == ["epoch=3.ckpt"]
        assert not list((directory / "kept" / "epoch=3.ckpt").glob("model-*"))
        (annex,) = os.listdir(mine)
        assert annex.startswith("epoch=3.ckpt.annex-")
        longer = run("longer", 6, "plain/epoch=3.ckpt")
        collect_garbage()
        torch.distributed.barrier()
        mine.rename(directory / f"moved-{rank}")
        moved = directory / f"moved-{rank}"
        patch.setattr(annexes, "_manifest_of", lambda path: find(path) if path.is_relative_to(moved) else None)
        torch.distributed.barrier()
        assert run("resumed", 6, "kept/epoch=3.ckpt", annex=moved) == longer
        assert fabric("fabric", annex=moved) == fabric("plain-fabric")
        assert not list((directory / "fabric").glob("model-*"))
    collect_garbage()


def load_others(rank: int, nvme_path: Path, directory: Path) -> None:
    """Directories of other strategies, weights of another dtype, hooks that change what was saved, a damaged one."""
    options: dict[str, Any] = {"devices": 2, "use_distributed_sampler": True}
    config = config_of(nvme_path, "state parameters")

    def trainer(**more: Any) -> Any:
        return trainer_of(strategy_of(config, {}, "directory"), **options | more)

    first, model = trainer(), Sharded()
    first.fit(model, loader(12))
    path = directory / "saved"
    first.save_checkpoint(path)

    def shards_of(module: nn.Module, change: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
        reshard(module)  # An evaluation leaves what is whole.
        return {name: bits(change(local(p))) for name, p in module.named_parameters()}

    saved = shards_of(model)
    with pytest.raises(swapper.SwapError, match="FSDP1"):
        swapper.lightning.SwapFSDPStrategy.load_checkpoint(first.strategy, path)
    # Weights alone, and weights that a hook gives.
    first.save_checkpoint(directory / "weights", weights_only=True)

    class Doubles(Sharded):
        def on_load_checkpoint(self, checkpoint: Any) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value * 2 for name, value in state.items()}

    second, other = trainer(), Doubles()
    second.validate(other, loader(8), ckpt_path=directory / "weights", weights_only=False, verbose=False)
    assert shards_of(other) == shards_of(model, lambda value: value * 2)
    third, other = trainer(precision="bf16-true"), Sharded()
    third.validate(other, loader(8), ckpt_path=directory / "weights", weights_only=False, verbose=False)
    assert shards_of(other) == shards_of(model, torch.Tensor.bfloat16)
    # A damaged one, on all ranks.
    torch.distributed.barrier()
    if rank == 0:
        file = next(path.glob("model-r1-0*.safetensors"))
        data = file.read_bytes()
        file.unlink()  # Training goes on in it.
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    torch.distributed.barrier()
    with pytest.raises(swapper.SwapError, match="damaged"):
        trainer().fit(Sharded(), loader(12), ckpt_path=path, weights_only=False)
    assert shards_of(model) == saved
    torch.distributed.barrier()


def named(rank: int, nvme_path: Path) -> None:
    """By their names the strategies have the defaults of the stock one, or all ranks along the first dimension.

    With DeepSpeed's arguments, of which those of state and parameters together mean gradients, too.
    """
    os.environ["SWAPPER_NVME_PATH"] = str(nvme_path)

    def run(strategy: Any, module: Module) -> Any:
        torch.manual_seed(5)
        each, model = trainer_of(strategy, devices=2, use_distributed_sampler=True), module()
        each.fit(model, loader(12), loader(8))
        kind = type(each.strategy)
        assert kind is ModelParallelStrategy or evicts_gradients(each.optimizers[0]) == (strategy is everything)
        return facts(each), [kind, each.strategy.device_mesh.shape]

    everything = swapper.lightning.SwapModelParallelStrategy(
        offload_optimizer=True,
        offload_optimizer_device="nvme",
        offload_parameters=True,
        offload_params_device="nvme",
        data_parallel_size=2,
        tensor_parallel_size=1,
    )
    for strategy, options, module in (
        ("swapper_fsdp2_nvme", {}, Sharded),
        (everything, {}, Sharded),
        ("swapper_model_parallel_nvme", {"data_parallel_size": "auto", "tensor_parallel_size": "auto"}, Parallel),
    ):
        found, (kind, shape) = run(strategy, module)
        assert kind is swapper.lightning.SwapModelParallelStrategy
        stock, (_, expected) = run(strategy_of(None, options), module)
        assert (found, shape) == (stock, expected)
        collect_garbage()
    torch.distributed.barrier()


def convert(rank: int, nvme_path: Path) -> None:
    """The second Trainer wants another dtype, and the optimizer of the first is still swapped."""
    model, options = Sharded(), {"devices": 2, "use_distributed_sampler": True}
    first = trainer_of(strategy_of(config_of(nvme_path), {}), **options)
    first.fit(model, loader(12))
    second = trainer_of(strategy_of(config_of(nvme_path), {}), precision="bf16-true", **options)
    with pytest.raises(swapper.ConfigError, match="an earlier fit has its parameters swapped"):
        second.fit(model, loader(12))
    first.fit_loop.max_epochs = 3
    first.fit(model, loader(12))
    assert first.current_epoch == 3
    torch.distributed.barrier()


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    """Shards a module for Fabric."""
    for each in (module[0], module):  # type: ignore[index]
        fully_shard(each, mesh=mesh["data_parallel"])
    return module


def with_fabric(rank: int, nvme_path: Path, directory: Path) -> None:
    """A loop with Fabric, accumulation and clipping; each checkpoint loaded by the other strategy; by name."""
    os.environ["SWAPPER_NVME_PATH"] = str(nvme_path)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    config = config_of(nvme_path)

    def run(strategy: Any, source: Path | None, target: Path) -> Any:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(16, 97), nn.Tanh(), nn.Linear(97, 1))
        if isinstance(strategy, str):
            shard(module, fabric.strategy.device_mesh)  # type: ignore[attr-defined]
        elif isinstance(strategy, FabricFSDPStrategy):  # Lightning's own call needs an accelerator.
            module = flattened(module)
        model: Any = fabric.setup_module(module)
        optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "steps": 0}
        if source is not None:
            rest = fabric.load(source, state, weights_only=False)
            assert state["steps"] == 3 and not rest
        norms = []
        for number in range(3):
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * number + 10 * micro + rank)
                with fabric.no_backward_sync(model, enabled=micro == 0):
                    fabric.backward(model(torch.randn(2, 16, generator=generator)).square().mean())
            norms.append(bits(local(fabric.clip_gradients(model, optimizer, max_norm=0.1))))
            optimizer.step()
            optimizer.zero_grad()
            state["steps"] += 1
        fabric.save(target, state)
        entries = optimizer.state_dict()["state"].values()
        found = [{name: bits(local(value)) for name, value in each.items()} for each in entries]
        return norms, [bits(local(p)) for p in model.parameters()], found

    for save_distributed in (True, False):
        options: dict[str, Any] = {**sizes, "save_distributed_checkpoint": save_distributed}
        files = directory / str(save_distributed)
        files.mkdir(exist_ok=True)
        ours = partial(swapper.fabric.SwapModelParallelStrategy, config, parallelize_fn=shard, **options)
        plain = partial(FabricStrategy, shard, **options)
        stock = run(plain(), None, files / "stock")
        assert run(ours(), None, files / "ours") == stock
        assert run("swapper_fsdp2_nvme", None, files / "named") == stock
        resumed = run(plain(), files / "stock", files / "after")
        assert resumed != stock
        if save_distributed:
            given = {**sizes, "parallelize_fn": shard, "checkpoint_format": "directory"}
            everything = partial(swapper.fabric.SwapModelParallelStrategy, config_of(nvme_path, "state parameters"))
            assert run(everything(**given), None, files / "directory") == stock
            assert run(everything(**given), files / "directory", files / "after-directory") == resumed
            assert run(ours(), files / "directory", files / "after") == resumed
            assert run(everything(**given), files / "stock", files / "after-directory") == resumed
            collect_garbage()
        assert run(plain(), files / "ours", files / "after") == resumed
        assert run(ours(), files / "stock", files / "after") == resumed
        collect_garbage()
    stock = run(StockFabricFSDP(state_dict_type="sharded"), None, directory / "stock")
    assert run(swapper.fabric.SwapFSDPStrategy(config, state_dict_type="sharded"), None, directory / "ours") == stock
    resumed = run(StockFabricFSDP(state_dict_type="sharded"), directory / "ours", directory / "after")
    mine = swapper.fabric.SwapFSDPStrategy(config, state_dict_type="sharded")
    assert run(mine, directory / "stock", directory / "after") == resumed != stock
    collect_garbage()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="swapper_fsdp2_nvme")
    fabric.launch()
    with pytest.raises(swapper.ConfigError, match="not sharded"):
        fabric.setup_module(nn.Linear(2, 2))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ours())
    fabric.launch()
    module = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(swapper.ConfigError, match="parallelize_fn replaces parameters"):
        fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    torch.distributed.barrier()  # The store of all is rank 0's.
