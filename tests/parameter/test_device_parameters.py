"""Parameters of a model on an accelerator train to the same bits when they are on the drive. See `accelerators`."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulated
from interrupts import interrupted_at, places_of
from models import CASES, WIDTH, Checkpointed, Mlp, loss_of, vectors
from safetensors.torch import save_file
from sampling import ALL
from torch import nn
from torch.nn.utils import clip_grad_norm_
from training import OPTIMIZERS, same_bits
from twins import Run, adamw, models_on, run_twice, swapper_of

import swapper
from swapper.errors import ConfigError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.parameter import records as parameter_records
from swapper.parameter.swapper import ParameterSwapper
from swapper.process.warnings import warn_once
from swapper.storage.buffers import PoolExhausted
from swapper.storage.growing_pool import GrowingPool
from swapper.tensors.evicted import EvictedParameter


@pytest.fixture
def device(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


# --- To the bit ---


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    ["mlp", "odd shapes", "gpt2 tied", "mixtral", "torch encoder", "used twice", "changing order", "lora",
     "frozen", "bags", "strided", "shared storage", "shared by two modules", "containers", "normed weights, new",
     "methods instead of forward"],
)  # fmt: skip
def test_models_train_and_evaluate_to_the_same_bits(name: str, nvme_path: Path, device: torch.device) -> None:
    """With the least memory on the device that is accepted."""
    case = CASES[name]

    def program(run: Run) -> None:
        loss_of(run, case.inputs).backward()
        run.finish_step()
        run.model.eval()
        with torch.inference_mode():
            run.note("evaluated", run.model(*case.inputs(run.generator)))
        run.model.train()
        for _ in range(2):
            (loss_of(run, case.inputs) / 2).backward()
        run.finish_step("accumulated")

    with models_on(device):
        run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes, watch=False)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("name", ["mlp", "gpt2 tied", "lora"])
def test_activation_checkpointing(name: str, use_reentrant: bool, nvme_path: Path, device: torch.device) -> None:
    case = CASES[name]

    def make() -> nn.Module:
        model: Any = case.make() if name != "mlp" else Mlp(4)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = Checkpointed(block, use_reentrant)
        return model  # type: ignore[no-any-return]

    def program(run: Run) -> None:
        for _ in range(2):
            loss_of(run, case.inputs).backward()
            run.finish_step()

    with models_on(device):
        run_twice(nvme_path, make, program, spare_bytes=case.spare_bytes, watch=False)


def test_autocast(nvme_path: Path, device: torch.device) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(run, vectors)
            loss.backward()
            run.finish_step()

    with models_on(device):
        run_twice(nvme_path, lambda: Mlp(4), program, watch=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["Adafactor", "SGD", "Muon", "in memory"])
def test_optimizers(kind: str, nvme_path: Path, device: torch.device) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            loss_of(run, vectors).backward()
            run.finish_step()

    make = adamw if kind == "in memory" else lambda model: OPTIMIZERS[kind](list(model.parameters()))
    where = "none" if kind == "in memory" else "nvme"
    with models_on(device):
        run_twice(nvme_path, lambda: Mlp(4), program, make, optimizer_device=where, watch=False)


class OnTheHost:
    """The reference for a step on the CPU: it steps copies, and the model gets them back."""

    def __init__(self, model: nn.Module, masters: bool) -> None:
        self.parameters = list(model.parameters())
        host = [p.detach().cpu() for p in self.parameters]
        self.copies = [nn.Parameter(p.float() if masters else p) for p in host]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-3)

    def step(self) -> None:
        for p, mine in zip(self.parameters, self.copies, strict=True):
            mine.grad = None if p.grad is None else p.grad.cpu().to(mine.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for p, mine in zip(self.parameters, self.copies, strict=True):
                p.copy_(mine.to(p.dtype))


WIDE = 128


def layers(device: torch.device, dtype: torch.dtype = torch.float32, depth: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(depth))).to(device, dtype)


@pytest.fixture
def _short_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record for each layer."""
    monkeypatch.setattr(parameter_records, "GROUP_BYTES", 20_000)


def config_for(nvme_path: Path, *, device_bytes: int | None = None, **settings: Any) -> swapper.OffloadConfig:
    values: dict[str, Any] = {
        "nvme_path": nvme_path, "pool_bytes": "1MiB", "bucket_bytes": "96KiB",
        "offload_optimizer": {"device": "nvme", "step_device": "cpu"},
        "offload_param": {"device": "nvme", "device_bytes": device_bytes},
    }  # fmt: skip
    return swapper.OffloadConfig(**(values | settings))


def train(
    model: nn.Module, step: Callable[[], object], passes: int, clip: Callable[[], object] | None, steps: int = 3
) -> list[Any]:
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(1)
    noted: list[Any] = []
    for _ in range(steps):
        for _ in range(passes):
            loss = model(torch.randn(4, WIDE, generator=generator).to(parameter)).float().square().mean()
            loss.backward()
            noted.append(loss.item())
        if clip is not None:
            noted.append(clip())
        step()
        for p in model.parameters():
            p.grad = None
    return noted


@pytest.mark.long
@pytest.mark.sampled(6)
@pytest.mark.parametrize("parameters", ["nvme", "cpu"])
@pytest.mark.parametrize("extra", ["", "clipped", "stepped in backward"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "masters"])
@pytest.mark.parametrize("gradient", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("state", ["nvme", "cpu", "none"])
@pytest.mark.usefixtures("_short_records")
def test_with_parameters_state_and_gradients_anywhere(
    state: str,
    gradient: str,
    precision: str,
    passes: int,
    extra: str,
    parameters: str,
    nvme_path: Path,
    device: torch.device,
) -> None:
    masters, dtype = precision == "masters", torch.float32 if precision == "fp32" else torch.bfloat16
    plain, swapped = layers(device, dtype), layers(device, dtype)
    clip = (lambda: float(clip_grad_norm_(plain.parameters(), 0.1))) if extra == "clipped" else None
    expected = train(plain, OnTheHost(plain, masters).step, passes, clip)
    optimizer = torch.optim.AdamW(swapped.parameters(), lr=1e-3)
    config = config_for(
        nvme_path,
        gradient_accumulation_steps=passes,
        offload_optimizer={
            "device": state,
            "step_device": "cpu",
            "master_weights": masters,
            "step_in_backward": extra.startswith("step"),
        },
        offload_gradient={"device": gradient},
        offload_param={"device": parameters},
    )
    swapper.offload(swapped, optimizer, config)
    if clip is not None:
        own = swapper.of(optimizer).clip_grad_norm_ if gradient != "none" else None
        clip = lambda: float(own(0.1) if own else clip_grad_norm_(swapped.parameters(), 0.1))  # noqa: E731
    assert train(swapped, optimizer.step, passes, clip) == expected
    for p, q in zip(plain.parameters(), swapped.parameters(), strict=True):
        assert q.device == device and same_bits(p.cpu(), q.cpu())
    swapper_of(swapped).close(keep_values=True)
    swapper.of(optimizer).close()
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(plain.parameters(), swapped.parameters(), strict=True))


def test_a_transposed_weight_of_several_buckets_is_stepped_in_backward(nvme_path: Path, device: torch.device) -> None:
    """It is attached while its gradient is accumulated, and the step of its next bucket begins before that is over."""

    def make() -> nn.Sequential:
        model = layers(device, depth=2)
        for layer in model:
            weight = layer[0].weight  # type: ignore[index]
            weight.data = weight.data.t().contiguous().t()
        return model

    plain, swapped = make(), make()
    expected = train(plain, OnTheHost(plain, False).step, 1, None)
    optimizer = torch.optim.AdamW(swapped.parameters(), lr=1e-3)
    state = {"device": "nvme", "step_in_backward": True}
    config = config_for(nvme_path, bucket_bytes="48KiB", gradient_accumulation_steps=1, offload_optimizer=state)
    swapper.offload(swapped, optimizer, config)  # The state of a weight is 128 KiB.
    assert train(swapped, optimizer.step, 1, None) == expected
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(plain.parameters(), swapped.parameters(), strict=True))
    swapper_of(swapped).close()
    swapper.of(optimizer).close()


# --- Changes that autograd does not know of ---


def change_in_forward(run: Run) -> None:
    def hook(module: nn.Module, args: object) -> None:
        module.weight.data.mul_(0.9)  # type: ignore[operator, union-attr]

    handles = [block[0].register_forward_pre_hook(hook) for block in run.model.blocks]  # type: ignore[union-attr, index]
    run.note("changed in forward", run.model(*vectors(run.generator)))
    for handle in handles:
        handle.remove()


def change_a_view_later(run: Run) -> None:
    view = next(run.model.parameters()).data.view(-1)[3:7]
    run.note("before", run.model(*vectors(run.generator)))
    view.add_(1.0)


def change_what_was_saved(run: Run) -> None:
    """In backward, where the weight is a view of what was found by its location."""

    def hook(gradient: torch.Tensor) -> None:
        run.model.blocks[1][0].weight.data.neg_()  # type: ignore[index, union-attr, operator]

    x = vectors(run.generator)[0].requires_grad_()
    out = run.model(x)
    out.register_hook(hook)
    out.sum().backward()
    for p in run.model.parameters():
        p.grad = None


@pytest.mark.parametrize("change", [change_in_forward, change_a_view_later, change_what_was_saved])
def test_what_is_changed_behind_autograds_back_is_kept(
    change: Callable[[Run], None], nvme_path: Path, device: torch.device
) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            change(run)
            run.note_model("changed")
            loss_of(run, vectors).backward()
            run.finish_step()

    with models_on(device):
        run_twice(nvme_path, lambda: Mlp(5), program, watch=False)


# --- Memory ---


@pytest.mark.long
@pytest.mark.usefixtures("_short_records")
def test_memory_of_the_device_is_what_was_said(nvme_path: Path, device: torch.device) -> None:
    """Beside what the pass itself takes: activations, and the gradients of a layer. It does not grow with the model."""
    taken = []
    for depth in (3, 12):
        model = layers(device, depth=depth)
        layer_bytes = sum(p.nbytes for p in model[0].parameters())
        x = torch.randn(4, WIDE).to(device)
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        loss = model(x).sum()
        own_bytes = torch.accelerator.max_memory_allocated(device) - before
        del loss
        optimizer = torch.optim.AdamW(model.parameters())
        swapper.offload(model, optimizer, config_for(nvme_path, offload_gradient={"device": "nvme"}))
        needs = swapper_of(model).plan.device_needs
        assert needs is not None
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        taken.append(torch.accelerator.max_memory_allocated(device) - before - own_bytes)
        # Gradients are those of a layer, and those that are on their way to the pool.
        assert taken[-1] <= needs.wanted_bytes + 3 * layer_bytes
        swapper_of(model).close()
        swapper.of(optimizer).close()
    assert taken[1] - taken[0] < 20_000


@pytest.mark.usefixtures("_short_records")
def test_too_little_memory_is_refused_with_the_number_that_does(nvme_path: Path, device: torch.device) -> None:
    model = layers(device)
    with pytest.raises(ConfigError, match=r"offload_param\.device_bytes: 1 bytes are too few") as caught:
        swapper.offload(model, config=config_for(nvme_path, device_bytes=1))
    found = re.search(r"at least (\d+)", str(caught.value))
    assert found is not None
    least = int(found[1])
    with pytest.raises(ConfigError):
        swapper.offload(model, config=config_for(nvme_path, device_bytes=least - 1))
    assert type(next(model.parameters())) is nn.Parameter
    swapper.offload(model, config=config_for(nvme_path, device_bytes=least))
    model(torch.randn(4, WIDE).to(device)).sum().backward()
    with pytest.raises(PoolExhausted, match="device_bytes") as exhausted, swapper.gathered(model):
        pass
    swapper_of(model).close(keep_values=True)
    found = re.search(r"at least (\d+)", str(exhausted.value))
    assert found is not None
    swapper.offload(model, config=config_for(nvme_path, device_bytes=int(found[1])))
    with swapper.gathered(model):
        assert all(type(p) is nn.Parameter for p in model.parameters())
    swapper_of(model).close(keep_values=True)


@pytest.mark.usefixtures("_short_records")
def test_views_that_are_kept_are_an_error_that_says_so(nvme_path: Path, device: torch.device) -> None:
    model = layers(device)
    swapper.offload(model, config=config_for(nvme_path))
    kept = []
    message = r"of which user code keeps views; .* at least \d+, plus the length of each further record"
    with pytest.raises(PoolExhausted, match=message):
        for layer in model:
            kept.append(layer[0].weight.data)  # type: ignore[index]
            layer(torch.zeros(1, WIDE).to(device))
    del kept
    model(torch.randn(4, WIDE).to(device)).sum().backward()
    swapper_of(model).close(keep_values=True)


@pytest.mark.usefixtures("_short_records")
def test_what_a_graph_of_gradients_needs_is_said(nvme_path: Path, device: torch.device) -> None:
    def penalty() -> None:
        loss = model(torch.randn(4, WIDE).to(device)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(each.square().sum() for each in gradients).backward()  # type: ignore[union-attr]

    model = layers(device)
    swapper.offload(model, config=config_for(nvme_path))
    with pytest.raises(PoolExhausted, match=r"create_graph=True keeps all parameters") as caught:
        penalty()
    swapper_of(model).close(keep_values=True)
    found = re.search(r"needs offload_param\.device_bytes of up to (\d+)", str(caught.value))
    assert found is not None
    del caught  # Its frames have the graph.
    swapper.offload(model, config=config_for(nvme_path, device_bytes=int(found[1])))
    penalty()
    swapper_of(model).close(keep_values=True)


@pytest.mark.usefixtures("_short_records")
def test_a_step_of_all_parameters_in_one_call_says_what_to_do(nvme_path: Path, device: torch.device) -> None:
    """By default torch steps parameters that are evicted one by one, as it does none of a plain model there."""

    def run(mine: bool, device_bytes: int | None = None, **how: bool) -> list[torch.Tensor]:
        model = layers(device)
        optimizer = torch.optim.AdamW(model.parameters(), **how)
        if mine:
            more = {} if device_bytes is None else {"device_bytes": device_bytes}
            swapper.offload(model, config=config_for(nvme_path, **more))
        try:
            for seed in range(3):
                x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(seed)).to(device)
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().cpu() for p in model.parameters()]
        finally:
            if mine:
                swapper_of(model).close()

    with pytest.raises(PoolExhausted, match=r"one call uses \d+ records .* on \w+:0.*foreach=False") as caught:
        run(True, foreach=True)
    found = re.search(r"device_bytes to at least (\d+)", str(caught.value))
    assert found is not None
    expected = run(False)
    for got in (run(True), run(True, foreach=False), run(True, int(found[1]), foreach=True)):
        assert all(same_bits(p, q) for p, q in zip(got, expected, strict=True))


def test_the_default_of_foreach_is_said_to_be_another(
    nvme_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """With foreach=False both runs are the same, and nothing is said."""

    def run(mine: bool, **how: Any) -> list[torch.Tensor]:
        model = layers(device).bfloat16()
        optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, **how)
        if mine:
            swapper.offload(model, optimizer, config_for(nvme_path, offload_optimizer={"device": "none"}))
        for seed in range(3):
            x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = [optimizer.state[p]["ax"].cpu() for p in model.parameters()]
        if mine:
            swapper_of(model).close()
        return found

    warn_once.cache_clear()
    assert all(same_bits(p, q) for p, q in zip(run(True, foreach=False), run(False, foreach=False), strict=True))
    assert "foreach" not in caplog.text
    different = [not same_bits(p, q) for p, q in zip(run(True), run(False), strict=True)]
    assert any(different) and "ASGD steps parameters that are evicted one by one" in caplog.text


# --- device: cpu ---


@pytest.mark.usefixtures("_short_records")
def test_without_a_drive(tmp_path: Path, device: torch.device) -> None:
    """All is in memory, and a checkpoint of it is loaded into another run."""
    settings: dict[str, Any] = {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "gradient", "param")}
    settings["offload_optimizer"]["step_device"] = "cpu"
    plain, model, other = layers(device), layers(device), layers(device, depth=5)
    expected = train(plain, OnTheHost(plain, masters=False).step, 1, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    swapper.offload(model, optimizer, swapper.OffloadConfig(**settings))
    assert train(model, optimizer.step, 1, None) == expected
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    address = model.state_dict()["0.0.weight"].data_ptr()
    assert address and address == model.state_dict()["0.0.weight"].data_ptr()
    following = train(model, optimizer.step, 2, None)
    again = torch.optim.AdamW(other.parameters(), lr=1e-3)
    swapper.offload(other, again, swapper.OffloadConfig(**settings))
    swapper.load_checkpoint(tmp_path / "saved", other, again)
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(plain.parameters(), other.parameters(), strict=True))
    assert train(other, again.step, 2, None) == following
    for each in (model, other):
        swapper_of(each).close(keep_values=True)
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_device_cpu_needs_the_model(device: torch.device) -> None:
    optimizer = torch.optim.AdamW(layers(device).parameters())
    with pytest.raises(ConfigError, match="needs the model too"):
        swapper.wrap_optimizer(optimizer, {"offload_param": {"device": "cpu"}})


@pytest.mark.usefixtures("_short_records")
def test_check_says_what_parameters_take(nvme_path: Path, device: torch.device) -> None:
    model = layers(device)
    report = swapper.check(model, config=config_for(nvme_path))
    swapper.offload(model, config=config_for(nvme_path))
    needs = swapper_of(model).plan.device_needs
    assert needs is not None and report.device_bytes == needs.wanted_bytes
    assert "device memory that they come to" in str(report)
    swapper_of(model).close(keep_values=True)
    kept = swapper.check(model, config={"offload_param": {"device": "cpu"}})
    assert (kept.disk_bytes, kept.device_bytes) == (0, report.device_bytes)
    assert kept.host_bytes > kept.pool_bytes >= sum(p.nbytes for p in model.parameters())


# --- Checkpoints ---


@pytest.mark.long
@pytest.mark.usefixtures("_short_records")
def test_saved_and_loaded_across_devices(nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    def run(on: torch.device) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = layers(on)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        swapper.offload(model, optimizer, config_for(nvme_path))
        return model, optimizer

    model, optimizer = run(device)
    train(model, optimizer.step, 1, None)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert model.state_dict()["0.0.weight"].device == device
    saved = [p.cpu() for p in model.parameters()]
    following = train(model, optimizer.step, 1, None)
    for on in (device, torch.device("cpu")):
        other, again = run(on)
        swapper.load_checkpoint(tmp_path / "saved", other, again)
        assert all(same_bits(p, q.cpu()) for p, q in zip(saved, other.parameters(), strict=True))
        assert train(other, again.step, 1, None) == following
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert all(same_bits(p, q.cpu()) for p, q in zip(saved, other.parameters(), strict=True))
        swapper_of(other).close()
    swapper_of(model).close()


# --- What is refused ---


def test_a_model_on_several_devices_is_refused(nvme_path: Path, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).to(device))
    with pytest.raises(ConfigError, match="on several devices"):
        swapper.offload(model, config=config_for(nvme_path))


# --- Faults ---


class Trained:
    """A model whose parameters change a little in each pass, behind autograd's back, and what it must come to.

    Args:
        pool_bytes: so few that records are read and written all the time.
        short: the device has the least memory for parameters.
    """

    def __init__(
        self, nvme_path: Path, device: torch.device, pool_bytes: str = "224KiB", *, short: bool = False
    ) -> None:
        self.device = device
        self.plain, self.model = layers(device, depth=4), layers(device, depth=4)
        settings: dict[str, Any] = {"pool_bytes": pool_bytes, "bucket_bytes": "64KiB"}
        if short:
            with pytest.raises(swapper.ConfigError) as refused:
                swapper.offload(self.model, config=config_for(nvme_path, device_bytes=1, **settings))
            found = re.search(r"set it to at least (\d+)", str(refused.value))
            assert found
            settings["device_bytes"] = int(found[1])
        swapper.offload(self.model, config=config_for(nvme_path, **settings))
        self.swapper = swapper_of(self.model)

    def run(self, model: nn.Module) -> list[torch.Tensor]:
        """Gradients of a pass."""
        for p in model.parameters():
            p.grad = None
        generator = torch.Generator().manual_seed(2)
        model(torch.randn(4, WIDE, generator=generator).to(self.device)).square().mean().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    def change(self, model: nn.Module) -> None:
        """Each bias, in place."""
        for p in model.parameters():
            if p.dim() == 1:
                p.data.add_(0.125)

    def check(self) -> None:
        """The values are those of the plain model, and so is what is computed with them."""
        for mine, theirs in zip(self.run(self.model), self.run(self.plain), strict=True):
            assert torch.equal(mine, theirs)
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert same_bits(p.cpu(), q.cpu())

    def close(self) -> None:
        """Nothing is left in use."""
        self.swapper.flush()
        assert not any(held.pinned or held.holds or held.attached for held in self.swapper._all)
        self.swapper.close(keep_values=True)
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert same_bits(p.cpu(), q.cpu())


FILES = "parameter/device_", "parameter/held_on_device.py"
"""What Ctrl-C strikes in below."""


@pytest.mark.long
@pytest.mark.usefixtures("_short_records")
def test_ctrl_c_in_a_pass(nvme_path: Path, device: torch.device) -> None:
    trained = Trained(nvme_path, device)
    trained.check()
    before = torch.accelerator.memory_allocated(device)
    struck = 0
    for place in places_of(lambda: trained.run(trained.model), *FILES, sample=None if ALL else 15):
        struck += interrupted_at(place, lambda: trained.run(trained.model), *FILES)
        gc.collect()
        trained.check()
        assert torch.accelerator.memory_allocated(device) <= before + 2000, place
    assert struck >= (50 if ALL else 10)
    trained.close()


@pytest.mark.long
@pytest.mark.usefixtures("_short_records")
def test_ctrl_c_while_what_changed_goes_down(nvme_path: Path, device: torch.device) -> None:
    """A flush brings all of it down."""
    trained = Trained(nvme_path, device)
    for model in (trained.model, trained.plain):
        trained.change(model)
    for place in places_of(trained.swapper.flush, *FILES, sample=None if ALL else 15):
        for model in (trained.model, trained.plain):
            trained.change(model)
        interrupted_at(place, trained.swapper.flush, *FILES)
        trained.check()
    trained.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.usefixtures("_short_records")
def test_a_read_that_fails_is_an_error_and_the_next_pass_is_right(
    short: bool, nvme_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan(fail_errno=errno.EIO)
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    trained = Trained(nvme_path, device, short=short)
    for n in range(1, 8):  # One read: if it was ahead of use, it is done again and nothing is raised.
        plan.fail_read_at = n
        raised = 0
        for attempt in (lambda: trained.run(trained.model), trained.check):  # It may be a read ahead of the next pass.
            try:
                attempt()
            except SwapIOError as error:
                assert error.errno == errno.EIO
                raised += 1
            plan.fail_read_at = 0
        assert raised <= 1
        if raised:
            trained.check()
        if raised and not ALL:
            break
    with pytest.raises(SwapIOError) as failed:
        for layer in [*trained.model] * 4:  # Some are on the device, and what fails ahead of its use is read again.
            plan.fail_read_at = 1
            with swapper.gathered(layer):
                pass
    plan.fail_read_at = 0
    assert failed.value.errno == errno.EIO
    trained.check()
    trained.swapper.flush()
    contents = {file: file.read_bytes() for file in nvme_path.glob("swapper-*/*-param-*")}
    for file in contents:
        os.truncate(file, 4096)
    with pytest.raises(SwapIOError):  # However often it is read.
        for _ in range(3):  # What a pass uses may have been read before.
            trained.run(trained.model)
    for file, content in contents.items():
        file.write_bytes(content)
    trained.check()
    trained.close()


@pytest.mark.usefixtures("_short_records")
def test_a_write_that_fails_is_an_error_and_nothing_is_lost(
    nvme_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan(fail_errno=errno.ENOSPC)
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    trained = Trained(nvme_path, device)
    trained.swapper.flush()
    for _ in range(3):
        trained.change(trained.model)
        trained.change(trained.plain)
        plan.fail_write_at = 1
        with pytest.raises(SwapIOError) as caught:
            trained.swapper.flush()
        assert caught.value.errno == errno.ENOSPC
        plan.fail_write_at = 0
        trained.check()
    trained.close()


@pytest.mark.usefixtures("_short_records")
def test_a_device_without_memory_is_an_error_and_the_next_pass_is_right(
    nvme_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(nvme_path, device)
    empty = torch.empty
    failed = 0
    for n in range(6):
        left = n

        def allocate(*args: Any, **options: Any) -> torch.Tensor:
            nonlocal left
            if "device" in options:
                left -= 1
                if left == -1:
                    raise torch.OutOfMemoryError("no memory")
            return empty(*args, **options)

        monkeypatch.setattr(torch, "empty", allocate)
        try:
            trained.run(trained.model)
        except torch.OutOfMemoryError as error:
            assert re.search(r"^no memory\nswapper: .*offload_param\.device_bytes", str(error))
            failed += 1
        monkeypatch.setattr(torch, "empty", empty)
        trained.check()
    assert failed
    trained.close()


@pytest.mark.usefixtures("_short_records")
def test_a_load_for_which_the_device_has_no_memory_says_so_and_may_be_repeated(
    nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    if device.type != "sim":
        pytest.skip("the memory of a real device is not limited")
    trained = Trained(nvme_path, device)
    swapper.save_checkpoint(tmp_path / "checkpoint", trained.model).wait()
    with torch.no_grad():
        for p in trained.model.parameters():
            p.zero_()
    trained.swapper.rest()
    simulated().refuse_at(1)
    with pytest.raises(torch.OutOfMemoryError, match=r"\nswapper: .*offload_param\.device_bytes"):
        swapper.load_checkpoint(tmp_path / "checkpoint", trained.model)
    simulated().refuse_at(0)
    swapper.load_checkpoint(tmp_path / "checkpoint", trained.model)
    trained.check()
    trained.close()


# --- Models that are built on the drive ---


class Tied(nn.Module):
    """Initialised again after it is built, with a tied weight, a copied layer and a converted one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.layers = nn.ModuleList([copy.deepcopy(self.first) for _ in range(3)])
        self.last = nn.Linear(WIDE, WIDE).double().float()
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((WIDE,), 0.5))
        self.apply(self._initialise)
        with torch.no_grad():
            self.second.weight.mul_(0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, *self.layers, self.last):
            x = x + torch.tanh(layer(x)) * self.scale
        return x


@pytest.mark.long
@pytest.mark.parametrize("where", ["nvme", "cpu"])
@pytest.mark.parametrize("how", ["argument", "default device"])
@pytest.mark.usefixtures("_short_records")
def test_a_model_is_built_elsewhere(how: str, where: str, nvme_path: Path, device: torch.device) -> None:
    config = config_for(nvme_path, offload_param={"device": where})
    torch.manual_seed(0)
    with device:
        plain = Tied()
    torch.manual_seed(0)
    if how == "argument":
        with swapper.init(config, device=device):
            model = Tied()
    else:
        with device, swapper.init(config):
            model = Tied()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert q.device == device and same_bits(p.cpu(), q.cpu())
    assert type(model.first.weight) is EvictedParameter and model.scale.device == device
    assert model.last.weight is model.first.weight
    expected = train(plain, OnTheHost(plain, masters=False).step, 1, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    swapper.offload(model, optimizer, config)
    assert train(model, optimizer.step, 1, None) == expected
    swapper_of(model).close()


@pytest.mark.usefixtures("_short_records")
def test_a_write_of_what_another_has_taken_over_may_fail(
    nvme_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody wants what it was to write."""
    plan = FaultPlan(fail_errno=errno.EIO, fail_write_at=1, delay_us=20_000)
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    config = config_for(nvme_path)
    torch.manual_seed(0)
    with device:
        plain = layers(device)
    torch.manual_seed(0)
    with swapper.init(config, device=device):
        model = layers(device)
    swapper.offload(model, config=config)
    while plan.fail_write_at:
        time.sleep(0.001)
    swapper_of(model).rest()
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    swapper_of(model).close()


@pytest.mark.usefixtures("_short_records")
def test_what_is_built_in_memory_of_the_host_is_there_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the records are made of it; and nothing of it is left in the end."""
    pools: list[GrowingPool] = []
    made = GrowingPool.__init__

    def noted(self: GrowingPool, *args: Any, **settings: Any) -> None:
        made(self, *args, **settings)
        pools.append(self)

    monkeypatch.setattr(GrowingPool, "__init__", noted)
    config = swapper.OffloadConfig(bucket_bytes="96KiB", offload_param={"device": "cpu"})
    with swapper.init(config, device=device):
        model = layers(device, depth=30)
    values = [p.cpu() for p in model.parameters()]
    model_bytes = sum(p.nbytes for p in values)
    (first,) = pools
    before = torch.accelerator.memory_allocated(device)
    taken: list[int] = []
    adopt = ParameterSwapper._adopt

    def adopting(self: ParameterSwapper, held: Any) -> None:
        adopt(self, held)
        taken.append(first.used_bytes + self._cache.records.length_bytes)

    monkeypatch.setattr(ParameterSwapper, "_adopt", adopting)
    swapper.offload(model, config=config)
    assert len(taken) == 30 and max(taken) < 1.25 * model_bytes
    assert first.capacity_bytes == 0
    assert torch.accelerator.memory_allocated(device) - before < model_bytes // 2
    assert all(same_bits(p.cpu(), value) for p, value in zip(model.parameters(), values, strict=True))
    swapper_of(model).close()


@pytest.mark.parametrize("where", ["nvme", "cpu"])
@pytest.mark.usefixtures("_short_records")
def test_a_model_on_the_meta_device_gets_memory_elsewhere(
    where: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    config = config_for(nvme_path, offload_param={"device": where})
    with torch.device("meta"):
        model = layers(torch.device("meta"), depth=3)
    torch.manual_seed(0)
    plain = layers(device, depth=3)
    save_file({name: p.detach().cpu() for name, p in plain.named_parameters()}, tmp_path / "model.safetensors")
    swapper.materialize(model, config, lambda module: None, device=device)
    with pytest.raises(swapper.SwapError, match="nothing has filled it"):
        model(torch.zeros(1, WIDE).to(device))
    swapper.load_safetensors(model, tmp_path)
    assert all(p.device == device for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    swapper.offload(model, optimizer, config)
    expected = train(plain, OnTheHost(plain, masters=False).step, 1, None)
    assert train(model, optimizer.step, 1, None) == expected
    swapper_of(model).close()


@pytest.mark.long
@pytest.mark.usefixtures("_short_records")
def test_a_step_on_the_device(nvme_path: Path, device: torch.device) -> None:
    """With the bits of the plain run on it."""
    plain, model = layers(device), layers(device)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3).step, 1, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"device": "nvme", "step_device": "device"}
    swapper.offload(model, optimizer, config_for(nvme_path, offload_optimizer=settings))
    assert train(model, optimizer.step, 1, None) == expected
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    swapper_of(model).close()


@pytest.mark.usefixtures("_short_records")
def test_a_step_on_the_cpu_changes_what_is_in_use(nvme_path: Path, device: torch.device) -> None:
    """Though the step has several buckets of one record, each of which finds it in use on the device."""
    plain, model = layers(device), layers(device)
    expected = train(plain, OnTheHost(plain, masters=False).step, 1, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    swapper.offload(model, optimizer, config_for(nvme_path, bucket_bytes="64KiB"))
    views = []

    def step() -> None:
        with swapper.gathered(model[1]):
            optimizer.step()
        views[:] = [model[2][0].weight.data]  # type: ignore[index, union-attr]

    assert train(model, step, 1, None) == expected
    assert same_bits(views[0].cpu(), plain[2][0].weight.cpu())  # type: ignore[index, union-attr]
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    views.clear()
    swapper_of(model).close()
