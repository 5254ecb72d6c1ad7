"""`swapper.fabric.SwapStrategy`: the same Fabric program, the same bits."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning_sharded
import pytest
import torch
from checkpoints import Versioned
from launcher import run_program
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning_runs import accelerator_of
from ranks import in_processes
from torch import nn
from torch.optim.lr_scheduler import StepLR
from twins import bits

import swapper
from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.fabric import SwapDDPStrategy, SwapStrategy
from swapper.storage import store
from swapper.tensors.evicted import EvictedParameter

WHAT = ["state", "state-gradients", "state-gradients-parameters"]
IGNORED = [
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:.*LeafSpec.*:DeprecationWarning",
    "ignore:The FabricModule wraps a module",
]
pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def config_of(nvme_path: Path, what: str) -> dict[str, Any]:
    def device(name: str) -> dict[str, str]:
        return {"device": "nvme" if name in what else "none"}

    return {
        "nvme_path": str(nvme_path),
        "pool_bytes": "1MiB",
        "bucket_bytes": "32KiB",
        "offload_optimizer": device("state"),
        "offload_gradient": device("gradients"),
        "offload_param": device("parameters"),
    }


class Program:
    """A model with two optimizers and a scheduler, set up by Fabric."""

    def __init__(
        self,
        strategy: Any,
        precision: str = "32-true",
        *,
        separately: bool = False,
        devices: int = 1,
        rank: int = 0,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        options: dict[str, Any] = {"accelerator": accelerator_of(device), "precision": precision}
        if precision.endswith("mixed"):
            scaler = torch.amp.GradScaler(device.type, init_scale=256.0) if precision == "16-mixed" else None
            plugin: Any = MixedPrecision(precision, device.type, scaler)  # type: ignore[arg-type]
            options = {"accelerator": accelerator_of(device), "plugins": [plugin]}
        if strategy == "auto" and device.type != "cpu":
            strategy = SingleDeviceStrategy(device)
        self.fabric = Fabric(devices=devices, strategy=strategy, **options)
        self.fabric.launch()
        torch.manual_seed(3 + rank)
        with self.fabric.init_module():
            self.plain = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 80))
        self.first_class = type(self.plain[2].weight)
        first = torch.optim.AdamW(self.plain[:3].parameters(), lr=1e-2)
        second = torch.optim.SGD(self.plain[3:].parameters(), lr=1e-2, momentum=0.9)
        self.scheduler = StepLR(first, 2, 0.5)
        if separately:
            self.model = self.fabric.setup_module(self.plain)
            self.optimizers = list(self.fabric.setup_optimizers(first, second))
        else:
            self.model, *self.optimizers = self.fabric.setup(self.plain, first, second)
        self.found: list[Any] = []
        self.dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)

    def run(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            seed = step + 100 * self.fabric.global_rank
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
            batch = batch.to(self.fabric.device, self.dtype)
            loss = self.model(batch).square().mean()
            self.fabric.backward(loss)
            norm = self.fabric.clip_gradients(self.model, self.optimizers[0], max_norm=0.05, error_if_nonfinite=False)
            self.fabric.clip_gradients(self.model, self.optimizers[1], clip_val=1e-3)
            self.found.append((bits(loss), bits(norm)))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        first, second = self.optimizers
        return {"model": self.model, "first": first, "second": second, "scheduler": self.scheduler, "step": 3}

    def facts(self) -> Any:
        with swapper.gathered(self.plain):
            parameters = bits(dict(self.plain.state_dict()))
        return parameters, [bits(o.state_dict()) for o in self.optimizers], bits(self.scheduler.state_dict())


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("what", WHAT)
def test_a_program_ends_in_the_same_bits(what: str, precision: str, nvme_path: Path) -> None:
    programs = [
        Program("auto", precision),
        Program(SwapStrategy(config_of(nvme_path, what)), precision),
        Program(SwapStrategy(config_of(nvme_path, what)), precision, separately=True),
    ]
    for program in programs:
        program.run(0, 5)
        assert program.found == programs[0].found
        assert program.facts() == programs[0].facts()
    assert programs[1].first_class is (EvictedParameter if "parameters" in what else nn.Parameter)
    assert swapper.of(programs[1].optimizers[0].optimizer).stats().bytes_written > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("what", [*WHAT, "host"])
def test_a_program_on_a_device(what: str, precision: str, nvme_path: Path, tmp_path: Path, device: str) -> None:
    """Resumed from a checkpoint, too, there and on the CPU."""
    on = torch.device(device, 0)
    config = config_of(nvme_path, "" if what == "host" else what)
    if what == "host":
        config.update({f"offload_{name}": {"device": "cpu"} for name in ("optimizer", "gradient", "param")})
    programs = [Program("auto", precision, device=on), Program(SwapStrategy(config), precision, device=on)]
    resumed = [Program(SwapStrategy(config), precision, device=where) for where in (on, torch.device("cpu"))]
    for program in programs:
        program.run(0, 3)
    programs[1].fabric.save(tmp_path / "it.ckpt", programs[1].state())
    for program in programs:
        program.run(3, 6)
    for program in resumed:
        program.fabric.load(tmp_path / "it.ckpt", program.state())
        program.run(3, 6)
    assert programs[1].found == programs[0].found and resumed[0].found == programs[0].found[3:]
    assert programs[1].facts() == resumed[0].facts() == programs[0].facts()
    assert programs[1].first_class is (EvictedParameter if what in (WHAT[2], "host") else nn.Parameter)
    assert {p.device for p in programs[1].plain.parameters()} == {on}


@pytest.mark.parametrize("source", ["stock", "full", "directory", "directory-all"])
def test_a_resumed_program_ends_in_the_same_bits(source: str, nvme_path: Path, tmp_path: Path) -> None:
    make = {
        "stock": lambda: Program("auto"),
        "full": lambda: Program(SwapStrategy(config_of(nvme_path, WHAT[2]), checkpoint_format="full")),
        "directory": lambda: Program(SwapStrategy(config_of(nvme_path, "state"))),
        "directory-all": lambda: Program(SwapStrategy(config_of(nvme_path, WHAT[2]))),
    }
    stock = Program("auto")
    stock.run(0, 6)
    program = make[source]()
    program.run(0, 3)
    path = tmp_path / "it.ckpt"
    program.fabric.save(path, program.state())
    assert is_checkpoint(path) == source.startswith("directory")
    for target in make if not source.startswith("directory") else ("directory", "directory-all"):
        resumed = make[target]()
        state = {**resumed.state(), "step": 0}
        assert resumed.fabric.load(path, state) == {}
        assert state["step"] == 3
        resumed.run(3, 6)
        assert resumed.facts() == stock.facts(), target


def test_a_module_alone_is_loaded_and_what_is_left_is_returned(nvme_path: Path, tmp_path: Path) -> None:
    program = Program(SwapStrategy(config_of(nvme_path, "state")))
    program.run(0, 2)
    path = tmp_path / "it.ckpt"
    program.fabric.save(path, program.state())
    other = Program(SwapStrategy(config_of(nvme_path, "state")))
    left = other.fabric.load(path, {"model": other.model})
    assert left["step"] == 3 and set(left) == {"scheduler", "step"}
    assert other.facts()[0] == program.facts()[0]


def test_what_cannot_be_a_directory_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    program = Program(SwapStrategy(config_of(nvme_path, "state")))
    program.run(0, 2)
    for path, options in (
        (tmp_path / "it.ckpt", {"filter": {"model": lambda name, value: True}}),
        ("memory://it.ckpt", {}),
    ):
        with pytest.raises(ConfigError, match=r"a directory cannot be made: .*; use checkpoint_format='full'"):
            program.fabric.save(path, program.state(), **options)
    assert not list(tmp_path.glob("*.ckpt"))
    program.fabric.save(tmp_path / "it.ckpt", program.state())
    with pytest.raises(ConfigError, match="the modules, and all else, in `state`"):
        program.fabric.load(tmp_path / "it.ckpt")
    other = Program(SwapStrategy(config_of(nvme_path, "state")))
    before = other.facts()
    first, second = other.optimizers
    for names in (("a", "b"), ("first", "b")):
        state = {"model": other.model, names[0]: first, names[1]: second}
        with pytest.raises(ConfigError, match="and the optimizers"):
            other.fabric.load(tmp_path / "it.ckpt", state)
    with pytest.raises(ConfigError, match="and the optimizers"):
        other.fabric.load(tmp_path / "it.ckpt", {"first": first, "second": second})
    with pytest.raises(KeyError, match="no 'more'"):
        other.fabric.load(tmp_path / "it.ckpt", {"model": other.model, "more": 1})
    assert other.facts() == before


class Pair:
    """Two modules, each with an optimizer, set up one after the other."""

    def __init__(self, strategy: Any, dtype: torch.dtype = torch.float32) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        torch.manual_seed(3)
        plain = [nn.Sequential(Versioned(16, 96), nn.Tanh(), nn.Linear(96, 16)).to(dtype) for _ in range(2)]
        modules = [self.fabric.setup_module(each) for each in plain]
        makers = (torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9))
        optimizers = [
            self.fabric.setup_optimizers(make(module.parameters(), lr=1e-2))
            for make, module in zip(makers, modules, strict=True)
        ]
        names = ("generator", "judge", "g", "j")
        self.state: dict[str, Any] = dict(zip(names, [*modules, *optimizers], strict=True))

    def run(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            self.fabric.backward(self.state["judge"](self.state["generator"](batch)).square().mean())
            for name in "gj":
                self.state[name].step()
                self.state[name].zero_grad()

    def facts(self) -> Any:
        parameters = [{n: bits(v + 0) for n, v in self.state[m].state_dict().items()} for m in ("generator", "judge")]
        return parameters, [bits(self.state[name].state_dict()) for name in "gj"]


@pytest.mark.parametrize("what", WHAT)
def test_several_modules_are_one_directory(what: str, nvme_path: Path, tmp_path: Path) -> None:
    def make() -> Pair:
        return Pair(SwapStrategy(config_of(nvme_path, what)))

    stock, path = Pair("auto"), tmp_path / "it.ckpt"
    stock.run(0, 5)
    program = make()
    program.run(0, 3)
    path.write_text("a file that was there")
    program.fabric.save(path, {**program.state, "step": 3})
    assert is_checkpoint(path) and not list(tmp_path.glob(".*"))
    resumed = make()
    state = {"step": 0, **dict(reversed(resumed.state.items()))}
    assert resumed.fabric.load(path, state) == {} and state["step"] == 3
    resumed.run(3, 5)
    assert resumed.facts() == stock.facts()
    other = make()
    left = other.fabric.load(path, {"judge": other.state["judge"]})
    assert left["step"] == 3 and set(left) == {"generator", "step"}
    found = [{name: bits(value + 0) for name, value in left["generator"].items()}, other.facts()[0][1]]
    assert found == program.facts()[0]
    with pytest.raises(KeyError, match="no 'more'"):
        other.fabric.load(path, {"more": 1})
    state = {"more": 1, "step": 0}
    other.fabric.load(path, state, strict=False)
    assert state == {"more": 1, "step": 3}


def test_modules_are_saved_by_any_names_and_not_kept(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    program = Pair(SwapStrategy(config_of(nvme_path, WHAT[2])))
    program.run(0, 1)
    keys = ["net", "keys", "", "j"]
    state = dict(zip(keys, program.state.values(), strict=True))
    program.fabric.save(tmp_path / "1.ckpt", state)
    program.fabric.save(tmp_path / "2.ckpt", state)
    indices = [json.loads((tmp_path / f"{n}.ckpt" / "index.json").read_text()) for n in (1, 2)]
    assert indices[0]["run"] == indices[1]["run"] and indices[0]["sequence"] + 1 == indices[1]["sequence"]
    facts = program.facts()
    program.run(1, 2)
    assert program.facts() != facts
    program.fabric.load(tmp_path / "2.ckpt", state)
    assert program.facts() == facts
    with pytest.raises(ConfigError, match=r"a module named 'net\.g' cannot be in a directory with others"):
        program.fabric.save(tmp_path / "3.ckpt", {"net.g": state["net"], "net": state["keys"]})
    module, strategy = weakref.ref(program.state["generator"].module), program.fabric.strategy
    del program, state
    gc.collect()
    assert module() is None and strategy is not None


def test_a_module_of_another_dtype_or_of_other_names_is_loaded_as_by_the_stock_strategy(
    nvme_path: Path, tmp_path: Path
) -> None:
    def load_into(make: Any, path: Path) -> Any:
        program = Pair(make())
        program.run(0, 2)
        program.fabric.save(path, program.state)
        other = Pair(make(), torch.float64)
        more = nn.ModuleDict({"0": nn.Linear(16, 96), "more": nn.Linear(1, 1)})
        program.fabric.load(path, {name: other.state[name] for name in ("generator", "judge")})
        program.fabric.load(path, {"judge": more}, strict=False)
        with pytest.raises(RuntimeError, match="Missing key"):
            program.fabric.load(path, {"judge": more})
        return other.facts()[0], bits(more["0"].weight)

    stock = load_into(lambda: "auto", tmp_path / "file.ckpt")
    ours = load_into(lambda: SwapStrategy(config_of(nvme_path, "state")), tmp_path / "directory.ckpt")
    assert ours == stock


def test_a_state_without_a_module_is_saved(nvme_path: Path, tmp_path: Path) -> None:
    program = Program(SwapStrategy(config_of(nvme_path, WHAT[2])))
    program.run(0, 1)
    program.fabric.save(tmp_path / "it.ckpt", {"step": 1, "weights": program.plain.state_dict()})
    state = {"step": 0, "weights": {}}
    assert program.fabric.load(tmp_path / "it.ckpt", state) == {}
    assert state["step"] == 1
    assert {name: bits(value) for name, value in state["weights"].items()} == program.facts()[0]
    other = Program(SwapStrategy(config_of(nvme_path, WHAT[2])))
    assert other.facts()[0] != program.facts()[0]
    assert other.fabric.load(tmp_path / "it.ckpt", {"weights": other.model}) == {"step": 1}
    assert other.facts()[0] == program.facts()[0]


def test_the_state_of_an_optimizer_is_for_an_optimizer(nvme_path: Path, tmp_path: Path) -> None:
    program = Program(SwapStrategy(config_of(nvme_path, "state")))
    program.fabric.save(tmp_path / "it.ckpt", program.state())
    other = Program(SwapStrategy(config_of(nvme_path, "state")))
    before = other.facts()
    with pytest.raises(ConfigError, match="has an optimizer 'first', and in `state` that is none"):
        other.fabric.load(tmp_path / "it.ckpt", {"model": other.model, "first": {}})
    assert other.facts() == before


def test_what_cannot_be_linked_is_copied_while_the_program_goes_on(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    copy = NewCheckpoint._copy

    def late(self: NewCheckpoint, *arguments: Any) -> None:
        assert go_on.wait(240)
        copy(self, *arguments)

    def fail(self: NewCheckpoint, *_: Any) -> None:
        raise SwapIOError(errno.ENOSPC, "write", tmp_path)

    monkeypatch.setattr(store, "link", lambda *_: False)
    monkeypatch.setattr(NewCheckpoint, "_copy", late)
    program = Program(SwapStrategy(config_of(nvme_path, WHAT[2])))
    program.run(0, 3)
    then = program.facts()
    program.fabric.save(tmp_path / "it.ckpt", program.state())
    program.run(3, 4)
    assert not (tmp_path / "it.ckpt").exists()
    go_on.set()
    program.fabric.load(tmp_path / "it.ckpt", program.state())
    assert program.facts() == then
    monkeypatch.setattr(NewCheckpoint, "_copy", fail)
    with pytest.raises(SwapIOError, match="No space"):
        for name in ("2.ckpt", "3.ckpt"):  # The thread may fail before `save` looks, or after.
            program.fabric.save(tmp_path / name, program.state())


def test_with_a_checkpoint_io_files_are_written(nvme_path: Path, tmp_path: Path) -> None:
    fabric = Fabric(
        accelerator="cpu",
        devices=1,
        strategy=SwapStrategy(config_of(nvme_path, "state")),
        plugins=[TorchCheckpointIO()],
    )
    fabric.save(tmp_path / "it.ckpt", {"step": 3})
    assert torch.load(tmp_path / "it.ckpt") == {"step": 3}


def test_parameters_need_the_module_first(nvme_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SwapStrategy(config_of(nvme_path, WHAT[2])))
    with pytest.raises(ConfigError, match="set up the module first"):
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(96, 96).parameters()))


def test_names_and_devices(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAPPER_NVME_PATH", str(nvme_path))
    fabric = Fabric(accelerator="cpu", devices=1, strategy="swapper_nvme_all")
    assert type(fabric.strategy) is SwapStrategy
    assert fabric.strategy.offload_config.offload_param.device == "nvme"
    with pytest.raises(ConfigError, match="set devices=1"):
        Fabric(accelerator="cpu", devices=2, strategy="swapper_cpu")
    with pytest.warns(UserWarning, match="no meaning for SwapStrategy"):
        SwapStrategy(offload_optimizer=True, stage=3)


SCRIPT = """
import {package} as pl, torch, swapper.fabric
fabric = pl.Fabric(accelerator="cpu", devices=1, strategy="swapper_nvme")
model = torch.nn.Linear(96, 96)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
fabric.backward(model(torch.ones(2, 96)).sum())
optimizer.step()
assert optimizer.optimizer.swapper.stats().bytes_written
"""


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_both_packages_are_served_and_files_go_at_exit(package: str, nvme_path: Path) -> None:
    environment = {**os.environ, "SWAPPER_NVME_PATH": str(nvme_path), "PYTHONWARNINGS": "ignore"}
    script = SCRIPT.format(package=package)
    done = run_program([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not list(nvme_path.iterdir())


# --- Two processes ----------------------------------------------------------------------------------------------------


def damaged(*_: object, **named: object) -> None:
    raise SwapIOError(errno.EBADMSG, "read", Path("weights"))


def refused_on_all(program: Program, path: Path, rank: int) -> None:
    """What only rank 0 can load is an error on both; of a directory nothing is loaded."""
    before, directory = program.facts(), is_checkpoint(path)
    missing = path.with_name("missing.ckpt") if rank else path
    message = r"is no checkpoint on ranks \[1\]" if directory else "on rank 1: FileNotFoundError"
    with pytest.raises(
        SwapError if directory or not rank else FileNotFoundError,
        match="missing" if rank and not directory else message,
    ):
        program.fabric.load(missing, program.state())
    if directory:
        with pytest.raises(KeyError if rank else SwapError, match="more" if rank else "on rank 1: KeyError.*more"):
            program.fabric.load(path, {**program.state(), **({"more": 0} if rank else {})})
        assert program.facts() == before
    with pytest.MonkeyPatch.context() as patch:
        if rank:  # As of a tensor that is damaged: without `strict` each is read when it is copied.
            patch.setattr(program.fabric.strategy, "load_module_state_dict", damaged)
        with pytest.raises(SwapIOError, match="weights" if rank else "on rank 1"):
            program.fabric.load(path, program.state(), strict=False)


def two_ranks(rank: int, nvme_path: Path, directory: Path) -> None:
    def resumed(make: Callable[[], Any], path: Path) -> Any:
        program = Program(make(), devices=2, rank=rank)
        program.run(0, 3)
        program.fabric.save(path, program.state())
        again = Program(make(), devices=2, rank=rank)
        again.fabric.load(path, again.state())
        again.run(3, 6)
        return program.found, again.found, again.facts()

    stock = resumed(DDPStrategy, directory / "stock.ckpt")
    for what in ("state", WHAT[2]):
        savings: list[dict[str, Any]] = [{"checkpoint_format": "directory"}, {"checkpoint_format": "full"}]
        for saving in [*savings, {"together": True}]:
            path = directory / f"{what}-{'-'.join(map(str, saving.values()))}.ckpt"
            config = config_of(nvme_path, what)
            ours = resumed(lambda: SwapDDPStrategy(config, **saving), path)  # noqa: B023
            assert ours == stock, (what, saving, rank)
            assert is_checkpoint(path) == (saving.get("checkpoint_format") != "full")
            refused_on_all(Program(SwapDDPStrategy(config, **saving), devices=2, rank=rank), path, rank)
    os.environ["SWAPPER_NVME_PATH"] = str(nvme_path)
    assert type(Fabric(accelerator="cpu", devices=2, strategy="swapper_ddp_nvme").strategy) is SwapDDPStrategy


@pytest.mark.long
def test_two_processes_end_in_the_bits_of_stock_ddp(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    in_processes(two_ranks, nvme_path, tmp_path)


@pytest.mark.long
def test_two_processes_end_in_the_bits_of_the_stock_model_parallel_strategy(
    nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    in_processes(lightning_sharded.with_fabric, nvme_path, tmp_path)
