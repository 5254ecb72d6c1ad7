"""Steps on an accelerator, with state that comes bucket by bucket: the bits of the plain run on it, and no wait there.

See `accelerators` for the devices.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulated
from torch import nn
from torch.optim import Optimizer
from training import Assigning, MasterWeights, assert_same_state, muon, same_bits

import swapper
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.io.devices import Copy
from swapper.optimizer.device_slots import DeviceSlots

CLASSES: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=1e-3, **how),
    "Adam-amsgrad": lambda p, **how: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1, **how),
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, **how),
    "SGD-plain": lambda p, **how: torch.optim.SGD(p, lr=1e-2, **how),
    "Adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=1e-2, **how),
    "RMSprop": lambda p, **how: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, **how),
    "NAdam": lambda p, **how: torch.optim.NAdam(p, **how),
    "ASGD": lambda p, **how: torch.optim.ASGD(p, **how),
    "Rprop": lambda p, **how: torch.optim.Rprop(p, **how),
    "Adafactor": lambda p, **how: torch.optim.Adafactor(p, lr=1e-2, **how),
    "Muon": lambda p, **how: muon(p),
    "Assigning": lambda p, **how: Assigning(p, lr=1e-2),
}
HOW: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}
FUSED = ("AdamW", "Adam-amsgrad", "SGD", "SGD-plain", "Adagrad")
CAPTURABLE = ("AdamW", "Adam-amsgrad", "RMSprop", "NAdam", "Rprop")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-masters": torch.bfloat16, "fp16-masters": torch.float16}


SHAPES = [(128, 640), (640,), (48, 8, 3, 3), (3,), (20_000,), (64, 64), ()]


class Model(nn.Module):
    """Parameters of many shapes, and a loss whose gradients are given. No kernel but the optimizer's matters."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = (torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES)
        self.weights = nn.ParameterList(map(nn.Parameter, values))
        with torch.no_grad():
            self.weights[2].data = self.weights[2].data.contiguous(memory_format=torch.channels_last)

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        terms = [(p - torch.randn(p.shape, generator=generator).to(p)).square().sum() for p in self.weights]
        return torch.stack(terms).sum()


def make_model(device: str, dtype: torch.dtype = torch.float32) -> Model:
    return Model(device, dtype)


def config(path: Path, **settings: Any) -> OffloadConfig:
    """Buckets so small that the larger parameters are cut; a pool that holds whole ones for Adafactor and Muon."""
    state = {"device": "nvme", "step_device": "device", **settings.pop("state", {})}
    return OffloadConfig(
        nvme_path=path, **{"pool_bytes": "24MiB", "bucket_bytes": "128KiB", "offload_optimizer": state, **settings}
    )


@contextlib.contextmanager
def wrapped(optimizer: Optimizer, path: Path, **settings: Any) -> Iterator[swapper.OptimizerSwapper]:
    swapper.wrap_optimizer(optimizer, config(path, **settings))
    try:
        yield swapper.of(optimizer)
    finally:
        swapper.of(optimizer).close()


def backward(model: Model, seed: int) -> None:
    model(seed).backward()


def assert_same(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert same_bits(p.cpu(), q.cpu()), f"{name} differs"


def as_on_the_host(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with its tensors on the host."""
    state = {
        i: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in entries.items()}
        for i, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@pytest.mark.parametrize("step_device", ["cpu", "device"])
def test_the_trial_leaves_the_random_state_of_devices_alone(nvme_path: Path, device: str, step_device: str) -> None:
    """A run with dropout goes on with the numbers that plain draws, on all devices of the type."""
    devices = [torch.device(device, i) for i in range(torch.get_device_module(device).device_count())]

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(50, device=each).cpu() for each in devices]

    torch.manual_seed(5)
    expected = drawn()
    torch.manual_seed(5)
    with wrapped(torch.optim.AdamW(make_model(device).parameters()), nvme_path, state={"step_device": step_device}):
        assert all(map(torch.equal, expected, drawn()))


def skip_what_is_not_there(name: str, how: str) -> None:
    if (how == "fused" and name not in FUSED) or (how == "capturable" and name not in CAPTURABLE):
        pytest.skip(f"torch has no such {name}")
    if name in ("Adafactor", "Muon") and how not in ("default", "foreach"):
        pytest.skip(f"torch has no such {name}")
    if name in ("Muon", "Assigning") and how != "default":
        pytest.skip(f"{name} has no foreach")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)  # It also fills what `torch.empty` makes, of other tests too.


@pytest.mark.sampled(10)
@pytest.mark.parametrize("state", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_same_bits_as_the_plain_run_on_the_device(
    device: str, nvme_path: Path, name: str, precision: str, how: str, state: str
) -> None:
    skip_what_is_not_there(name, how)
    if device != "cuda" and (name, how) == ("SGD", "fused") and precision in ("bf16", "fp16"):
        pytest.skip("torch's fused SGD for the CPU, which the simulated device runs, is undefined in low precision")
    masters = precision.endswith("masters")
    plain, mine = make_model(device, DTYPES[precision]), make_model(device, DTYPES[precision])

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return CLASSES[name](parameters, **HOW[how])

    reference = MasterWeights(list(plain.parameters()), make) if masters else make(list(plain.parameters()))
    optimizer = make(list(mine.parameters()))
    with wrapped(optimizer, nvme_path, state={"device": state, "master_weights": masters}):
        for seed in range(4):
            for model, step in ((plain, reference.step), (mine, optimizer.step)):
                backward(model, seed)
                step()
                model.zero_grad()
        assert_same(plain, mine)
        if not masters:
            assert isinstance(reference, Optimizer)
            assert_same_state(as_on_the_host(optimizer.state_dict()), as_on_the_host(reference.state_dict()))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("what", ["", "clip-norm", "clip-value", "scaler", "in-backward"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("gradients", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("state", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("how", ["default", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-masters"])
def test_gradients_that_are_evicted_are_uploaded_with_their_bucket(
    device: str,
    nvme_path: Path,
    precision: str,
    how: str,
    state: str,
    gradients: str,
    micro_batches: int,
    what: str,
) -> None:
    masters = precision.endswith("masters")
    if masters and what == "scaler":
        pytest.skip("bf16 needs no scaling")
    plain, mine = make_model(device, DTYPES[precision]), make_model(device, DTYPES[precision])

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, **HOW[how])

    reference = MasterWeights(list(plain.parameters()), make) if masters else make(list(plain.parameters()))
    optimizer = make(list(mine.parameters()))
    settings = {"device": state, "master_weights": masters, "step_in_backward": what == "in-backward"}
    others = {"gradient_accumulation_steps": micro_batches, "offload_gradient": {"device": gradients}}
    with wrapped(optimizer, nvme_path, state=settings, **others) as found:
        for model, stepped in ((plain, reference), (mine, optimizer)):
            scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=what == "scaler")
            for step in range(4):
                overflows = what == "scaler" and step == 2
                for batch in range(micro_batches):
                    loss = model(10 * step + batch)
                    if what == "scaler":
                        loss = scaler.scale(loss) * (1e38 if overflows else 1)
                    loss.backward()
                if what.startswith("clip"):
                    norm = what == "clip-norm"
                    if model is mine:
                        found.clip_grad_norm_(0.1) if norm else found.clip_grad_value_(1e-3)
                    elif norm:
                        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                    else:
                        torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
                scaler.step(stepped)
                scaler.update()
                (optimizer if model is mine else plain).zero_grad()
        assert_same(plain, mine)


def test_groups_schedulers_and_closures_are_as_on_the_device(device: str, nvme_path: Path) -> None:
    """Two groups, a learning rate that is a tensor there, one parameter that joins later, and steps by a closure."""
    models = make_model(device), make_model(device)
    results = []
    for model in models:
        parameters = list(model.parameters())
        rate = torch.tensor(1e-3, device=device)
        groups = [{"params": parameters[:3], "lr": rate}, {"params": parameters[3:-1], "weight_decay": 0.3}]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(2e-3, device=device), capturable=True)
        with contextlib.ExitStack() as stack:
            if model is models[1]:
                stack.enter_context(wrapped(optimizer, nvme_path))
            for step in range(5):

                def closure() -> float:
                    model.zero_grad()  # noqa: B023
                    backward(model, step)  # noqa: B023
                    return 1.0

                assert optimizer.step(closure) == 1.0
                rate.mul_(0.7)
                if step == 2:
                    optimizer.add_param_group({"params": parameters[-1:], "lr": torch.tensor(0.1, device=device)})
            results.append(as_on_the_host(optimizer.state_dict()))
    assert_same(*models)
    for group in [group for result in results for group in result["param_groups"]]:
        group["lr"] = float(group["lr"])
    assert_same_state(*results)


@pytest.mark.parametrize("precision", ["bf16-masters", "fp16-masters"])
def test_a_parameter_that_is_edited_gets_new_masters(device: str, nvme_path: Path, precision: str) -> None:
    plain, mine = make_model(device, DTYPES[precision]), make_model(device, DTYPES[precision])
    reference = MasterWeights(list(plain.parameters()), lambda p: torch.optim.AdamW(p, lr=1e-3))
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)
    with wrapped(optimizer, nvme_path, state={"master_weights": True}) as found:
        for seed in range(6):
            for model, step in ((plain, reference.step), (mine, optimizer.step)):
                backward(model, seed)
                step()
                model.zero_grad()
                if seed % 2:
                    with torch.no_grad():  # The last element of a parameter that is cut, and a small one.
                        for p in (max(model.parameters(), key=torch.numel), list(model.parameters())[1]):
                            p.view(-1)[-1] += 1
            if seed % 2:
                with torch.no_grad():
                    for p, master in zip(reference.parameters, reference.masters, strict=True):
                        if p is max(plain.parameters(), key=torch.numel) or p is reference.parameters[1]:
                            master.copy_(p)
            if seed == 2:
                assert found.stats().masters_reset == 2
                found.flushed_records()  # From here on the host knows the checksums, and not the device.
        assert found.stats().masters_reset == 4
        assert_same(plain, mine)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("way", ["cpu to device", "device to cpu", "device to plain", "plain to device"])
def test_state_goes_between_steps_on_the_device_and_others(
    device: str, nvme_path: Path, tmp_path: Path, way: str, masters: bool
) -> None:
    """By `state_dict`, and by a checkpoint: training goes on with the bits that it would have had."""
    if masters and "plain" in way:
        pytest.skip("a plain optimizer has no masters")
    start, end = way.split(" to ")
    dtype = torch.bfloat16 if masters else torch.float32
    finals = []
    for how in ("state_dict", "checkpoint"):
        results = []
        model = make_model(device, dtype)
        for part, where in enumerate((start, end)):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            with contextlib.ExitStack() as stack:
                if where != "plain":
                    settings = {"step_device": where, "master_weights": masters}
                    stack.enter_context(wrapped(optimizer, nvme_path, state=settings))
                if part and how == "state_dict":
                    optimizer.load_state_dict(results[0])
                elif part:
                    swapper.load_checkpoint(tmp_path / way.replace(" ", "-"), model, optimizer)
                for seed in range(2):
                    backward(model, 2 * part + seed)
                    optimizer.step()
                    optimizer.zero_grad()
                if not part and how == "state_dict":
                    results.append(optimizer.state_dict())
                elif not part:
                    swapper.save_checkpoint(tmp_path / way.replace(" ", "-"), model, optimizer)
        finals.append(model)
    assert_same(*finals)
    if start != "cpu" and end != "cpu":
        plain = make_model(device, dtype)
        parameters = list(plain.parameters())
        make = lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)  # noqa: E731
        reference = MasterWeights(parameters, make) if masters else make(parameters)
        for seed in range(4):
            backward(plain, seed)
            reference.step()
            plain.zero_grad()
        assert_same(plain, finals[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "Rprop", "ASGD"])
def test_loaded_scalars_are_where_the_class_makes_them(
    name: str, dtype: torch.dtype, device: str, nvme_path: Path
) -> None:
    """Those of a parameter without dimensions, and factors such as those of ASGD."""

    def train(path: Path | None) -> Model:
        model = make_model(device, dtype)
        optimizer = CLASSES[name](model.parameters())
        with contextlib.nullcontext() if path is None else wrapped(optimizer, path):
            for seed in range(2):
                backward(model, seed)
                optimizer.step()
                optimizer.zero_grad()
                optimizer.load_state_dict(optimizer.state_dict())
        return model

    assert_same(train(nvme_path), train(None))


@pytest.mark.parametrize("end", ["unwrapped", "loaded by a plain one"])
@pytest.mark.parametrize("how", ["fused", "capturable"])
def test_an_optimizer_that_is_not_swapped_any_more_has_its_scalars_on_the_device(
    how: str, end: str, device: str, nvme_path: Path, tmp_path: Path
) -> None:
    def train(model: Model, optimizer: Optimizer, seed: int) -> None:
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()

    plain, model = make_model(device), make_model(device)
    reference, optimizer = (CLASSES["AdamW"](each.parameters(), **HOW[how]) for each in (plain, model))
    with contextlib.ExitStack() as stack:
        swapper.wrap_optimizer(optimizer, config(nvme_path))
        if end != "unwrapped":
            stack.callback(swapper.of(optimizer).close)
        for each in (plain, reference), (model, optimizer):
            train(*each, seed=0)
        if end == "unwrapped":
            optimizer.load_state_dict(reference.state_dict())
            swapper.unwrap_optimizer(optimizer)
        else:
            swapper.save_checkpoint(tmp_path / "saved", model, optimizer).wait()
    if end != "unwrapped":
        model = make_model(device)
        optimizer = CLASSES["AdamW"](model.parameters(), **HOW[how])
        swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    for each in (plain, reference), (model, optimizer):
        train(*each, seed=1)
    assert_same(model, plain)


def test_a_step_waits_for_nothing_on_the_device(device: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pool has room for all: neither for copies, nor for values that only the device knows."""
    model = make_model(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with wrapped(optimizer, nvme_path, state={"master_weights": True, "device": "cpu"}):
        for seed in range(2):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        swapper.of(optimizer).flush()
        backward(model, 2)
        waits: list[str] = []

        def spy(owner: Any, name: str) -> None:
            former = getattr(owner, name)

            def called(*args: Any, **kwargs: Any) -> Any:
                if isinstance(args[0], Copy) and not args[0].done():
                    waits.append("copy")
                elif isinstance(args[0], torch.Tensor) and args[0].device.type == device:
                    waits.append(name)
                return former(*args, **kwargs)

            monkeypatch.setattr(owner, name, called)

        spy(Copy, "wait")
        for name in ("item", "cpu", "tolist", "__bool__", "__int__", "__float__", "numpy"):
            spy(torch.Tensor, name)
        optimizer.step()
        assert waits == []
        monkeypatch.undo()


def test_memory_on_the_device_is_three_slots_and_is_given_back(
    device: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    former = DeviceSlots.hold

    def hold(self: DeviceSlots, length_bytes: int) -> None:
        former(self, length_bytes)
        held.append(length_bytes)

    monkeypatch.setattr(DeviceSlots, "hold", hold)
    module = torch.get_device_module(device)
    beyond = []
    for layers in (2, 8):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(layers)]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with wrapped(optimizer, nvme_path):
            for seed in range(3):
                for p in model.parameters():
                    p.grad = torch.full_like(p, seed + 1.0)
                module.synchronize()
                before = module.memory_allocated()
                module.reset_peak_memory_stats()
                optimizer.step()
                module.synchronize()
                peak = module.max_memory_allocated() - before
                assert module.memory_allocated() <= before + 4096 * layers, "state stays on the device"
            beyond.append(peak)
            # What foreach computes in between is of at most one bucket: a few tensors of its parameters' size.
            assert 3 * held[-1] <= peak <= 3 * held[-1] + 4 * (256 << 10)
    assert abs(beyond[1] - beyond[0]) <= 64 << 10, "it grows with the number of layers"


def test_a_step_for_which_the_device_has_no_memory_fails_and_can_be_made_good(device: str, nvme_path: Path) -> None:
    if device != "sim":
        pytest.skip("the memory of a real device is not limited")
    sim_device = simulated()
    plain, mine = make_model(device), make_model(device)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)
    with wrapped(optimizer, nvme_path):
        for seed in range(2):
            for model, stepped in ((plain, reference), (mine, optimizer)):
                backward(model, seed)
                stepped.step()
                model.zero_grad()
        saved = {name: value.clone() for name, value in mine.state_dict().items()}, optimizer.state_dict()
        backward(mine, 7)
        failed = 0
        for room in (1 << 10, 1 << 20, 3 << 20):
            torch.sim.synchronize()  # type: ignore[attr-defined]
            sim_device.set_limit(torch.sim.memory_allocated() + room)  # type: ignore[attr-defined]
            try:
                optimizer.step()
            except torch.OutOfMemoryError as error:
                assert re.search(r"(?s)sim out of memory.*\nswapper: .*bucket_bytes.*step_device: cpu$", str(error))
                failed += 1
                sim_device.set_limit()
                if room > 1 << 10:
                    with pytest.raises(SwapError, match="refused"):
                        optimizer.step()
            sim_device.set_limit()
            mine.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        assert failed
        mine.zero_grad()
        for model, stepped in ((plain, reference), (mine, optimizer)):
            backward(model, 3)
            stepped.step()
            model.zero_grad()
        assert_same(plain, mine)


def test_a_model_on_the_cpu_cannot_be_stepped_on_a_device(nvme_path: Path) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(8, 8).parameters())
    with pytest.raises(ConfigError, match=r"step_device: device steps parameters on the accelerator"):
        swapper.wrap_optimizer(optimizer, config(nvme_path))


@pytest.mark.parametrize("room", ["there", "not there", "unknown", "none for a trial"])
def test_auto_takes_the_device_if_it_has_room(
    device: str, nvme_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """And says what it takes. What the memory was when the optimizer was wrapped decides for good."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    if room in ("not there", "unknown"):
        free_bytes = 400 << 10 if room == "not there" else None
        monkeypatch.setattr("swapper.optimizer.step_device.free_bytes", lambda device: free_bytes)
    elif room == "none for a trial":
        if device != "sim":
            pytest.skip("the memory of a real device is not limited")
        torch.sim.synchronize()  # type: ignore[attr-defined]
        simulated().set_limit(torch.sim.memory_allocated() + (100 << 10))  # type: ignore[attr-defined]
    with caplog.at_level("INFO", "swapper"), wrapped(optimizer, nvme_path, state={"step_device": "auto"}) as found:
        if device == "sim":
            simulated().set_limit()
        assert found._plan.on_device == (room == "there")
        backward(model, 0)
        optimizer.step()
    (said,) = (text for record in caplog.records if "steps are made" in (text := record.getMessage()))
    wanted = {
        "there": "on sim:0, with",
        "not there": "400 KiB are free",
        "unknown": "unknown",
        "none for a trial": "trial",
    }
    assert wanted[room].replace("sim", device) in said


def test_a_gradient_in_another_layout_is_stepped_if_that_keeps_the_bits(device: str, nvme_path: Path) -> None:
    results = []
    for how in ("plain", "swapped"):
        p = nn.Parameter(torch.ones(300, 200, device=device))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        with contextlib.ExitStack() as stack:
            if how == "swapped":
                found = stack.enter_context(wrapped(optimizer, nvme_path))
                assert len(found._plan.segments_of(p)) > 1, "it is not cut"
            for seed in range(3):
                gradient = torch.randn(200, 300, generator=torch.Generator().manual_seed(seed))
                p.grad = gradient.to(device).t()
                optimizer.step()
        results.append(p.detach().cpu())
    assert same_bits(*results)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", ["", "in-backward", "micro-batches"])
@pytest.mark.parametrize("gradients", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("state", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("how", ["default", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-masters"])
def test_parameters_that_are_swapped_too_are_stepped_on_the_device(
    device: str, nvme_path: Path, precision: str, how: str, state: str, gradients: str, what: str
) -> None:
    masters = precision.endswith("masters")
    micro_batches = 3 if what == "micro-batches" else 1

    def make_layers() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(128, 384), nn.GELU(), nn.Linear(384, 256), nn.GELU(), nn.Linear(256, 128))
        return layers.to(device, DTYPES[precision])

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, **HOW[how])

    plain, mine = make_layers(), make_layers()
    reference = MasterWeights(list(plain.parameters()), make) if masters else make(list(plain.parameters()))
    optimizer = make(list(mine.parameters()))
    settings = config(
        nvme_path,
        state={"device": state, "master_weights": masters, "step_in_backward": what == "in-backward"},
        offload_gradient={"device": gradients},
        offload_param={"device": "nvme"},
        gradient_accumulation_steps=micro_batches,
    )
    swapper.offload(mine, optimizer, settings)
    for step in range(3):
        for model, stepped in ((plain, reference), (mine, optimizer)):
            for batch in range(micro_batches):
                x = torch.randn(4, 128, generator=torch.Generator().manual_seed(10 * step + batch))
                x = x.to(device, DTYPES[precision])
                (model(x) - x).square().mean().backward()
            stepped.step()
            (plain if model is plain else optimizer).zero_grad()
    theirs = as_on_the_host((reference.optimizer if masters else reference).state_dict())  # type: ignore[union-attr]
    ours = as_on_the_host(optimizer.state_dict())
    for entries in ours["state"].values():
        entries.pop("master_param", None)
    assert_same_state(ours, theirs)
    assert_same(plain, mine)
    swapper.of(optimizer).close()
    mine.swapper.close()  # type: ignore[operator, union-attr]


def test_a_stored_master_that_is_damaged_is_found_on_the_device(device: str, nvme_path: Path) -> None:
    model = make_model(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with wrapped(optimizer, nvme_path, state={"device": "cpu", "master_weights": True}) as found:
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        records = found._records.bucket_records
        segment = found._plan.segments_of(model.weights[0])[0]
        (bucket,) = (bucket for bucket in found._plan.buckets if segment in bucket.segments)
        opened = records.take(bucket)
        low = opened.stored(segment, "master_param")
        places = (low != -(1 << 15)).nonzero()[:3]
        low[places] = -(1 << 15)  # More ties than there were.
        records.release(opened)
        backward(model, 1)
        with pytest.raises(SwapIOError, match="a stored master is damaged"):
            optimizer.step()
            found.flush()
        with pytest.raises(SwapIOError, match="a stored master is damaged"):
            found.flush()
        with pytest.raises(SwapError, match="a stored master is damaged"):
            optimizer.state_dict()
        found.reset()


def test_evicted_gradients_leave_torch_its_choice_of_foreach(device: str, nvme_path: Path) -> None:
    """Of the classes of torch, ASGD has other bits without it."""
    plain, mine = make_model(device), make_model(device)
    reference, optimizer = torch.optim.ASGD(plain.parameters()), torch.optim.ASGD(mine.parameters())
    with wrapped(optimizer, nvme_path, offload_gradient={"device": "nvme"}):
        for seed in range(2):
            backward(plain, seed)
            backward(mine, seed)
            reference.step()
            optimizer.step()
            reference.zero_grad()
            optimizer.zero_grad()
    assert_same(mine, plain)


@pytest.mark.parametrize("foreach", [None, False], ids=["default", "single"])
def test_parameters_in_one_memory_have_plain_bits_or_are_refused(
    device: str, foreach: bool | None, nvme_path: Path
) -> None:
    """By default torch steps all of a group at once there, reading all before it writes the first."""

    def made() -> torch.optim.Optimizer:
        memory = torch.linspace(-1, 1, 64 * 64).to(device)
        several = [nn.Parameter(memory), nn.Parameter(memory.view(64, 64))]
        for p in several:
            p.grad = torch.linspace(1, 3, 64 * 64).reshape(p.shape).to(device)
        return torch.optim.AdamW(several, lr=0.1, weight_decay=0.5, foreach=foreach)

    reference, optimizer = made(), made()
    if foreach is None:
        with pytest.raises(ConfigError, match=r"as None is on an accelerator: parameter 0 .* and parameter 1 .* are"):
            swapper.wrap_optimizer(optimizer, config(nvme_path))
        return
    with wrapped(optimizer, nvme_path, bucket_bytes="48KiB"):
        reference.step()
        optimizer.step()
        for p, q in zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
            assert torch.equal(p.cpu(), q.cpu())


@pytest.mark.parametrize("foreach", [None, False])
def test_parameters_that_come_to_be_in_one_memory_are_refused_at_the_step(
    device: str, foreach: bool | None, nvme_path: Path
) -> None:
    """After the optimizer was wrapped: by another memory of a parameter, or by another setting."""
    memory = torch.linspace(-1, 1, 64 * 64).to(device)
    several = [nn.Parameter(memory[: 48 * 64]), nn.Parameter(torch.zeros(48 * 64, device=device))]
    optimizer = torch.optim.AdamW(several, lr=0.1, weight_decay=0.5, foreach=foreach)
    with wrapped(optimizer, nvme_path, bucket_bytes="32KiB"):
        several[1].data = memory[16 * 64 :]
        optimizer.param_groups[0]["foreach"] = None
        for p in several:
            p.grad = torch.ones_like(p)
        before = memory.cpu()
        with pytest.raises(ConfigError, match=r"as None is on an accelerator: parameter 0 .* and parameter 1 .* are"):
            optimizer.step()
        assert torch.equal(memory.cpu(), before)
