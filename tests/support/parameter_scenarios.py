"""As `device_scenarios`, with parameters that are on the drive, or in the pool, and come to the device to be used."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import keep_busy
from torch import nn
from weight_files import hollow, write_weights

import swapper
from swapper.errors import SwapIOError
from swapper.io.devices import on_streams
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.parameter import records as parameter_records
from swapper.parameter.device_sums import DeviceSums
from swapper.parameter.device_tier import DeviceTier
from swapper.parameter.held_on_device import HeldOnDevice

WIDE = 128
DEPTH = 5
STEPS = 3
PER_RECORD_BYTES = 20_000
"""So that each layer is a record."""

values_seed = 0
"""Of the values of all models. With another for each run, none finds right values where an earlier one left them."""


def layers(device: str) -> nn.Sequential:
    torch.manual_seed(values_seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(DEPTH))).to(device)


def loss_of(model: nn.Module, device: str, seed: int) -> torch.Tensor:
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(seed)).to(device)
    return (model(x) - x).square().mean()


def never(model: nn.Module) -> None:
    """Do nothing."""


def change_in_forward(model: nn.Module) -> None:
    """Change weights behind autograd's back, while they are in use, and run forward."""

    def hook(module: nn.Module, args: object) -> None:
        module.weight.data.mul_(0.875)  # type: ignore[operator, union-attr]

    handles = [layer[0].register_forward_pre_hook(hook) for layer in model]  # type: ignore[union-attr, index]
    with torch.no_grad():
        model(torch.ones(4, WIDE, device=next(model.parameters()).device))
    for handle in handles:
        handle.remove()


def use_two_streams(model: nn.Sequential) -> None:
    """What was brought on one stream is used on another; and what one changes leaves while the other works."""
    device = next(model.parameters()).device
    module: Any = torch.get_device_module(device)
    other, first = module.Stream(device), module.current_stream(device)
    with torch.no_grad():
        x = torch.ones(4, WIDE, device=device)
        for _ in range(2):
            model(x)
            other.wait_stream(first)
            with on_streams([other]):
                keep_busy(device.type, 500)
                y = model(x)
            first.wait_stream(other)
            model[0][0].bias.data.add_(0 * y.sum())  # type: ignore[index, union-attr]
        keep_busy(device.type, 500)
        for number in (4, 3):
            handle = model[number][0].register_forward_pre_hook(_double)  # type: ignore[index]
            model[number](x)
            handle.remove()
        with on_streams([other]):  # It does not wait.
            mine = torch.ones(4, WIDE, device=device)
            for number in (0, 1, 2):
                model[number](mine)
        first.wait_stream(other)


def _double(module: nn.Module, args: object) -> None:
    module.bias.data.mul_(2)  # type: ignore[operator, union-attr]


def expected(device: str, step_device: str, change: Callable[[nn.Sequential], None]) -> list[torch.Tensor]:
    """Parameters after the steps of the plain optimizer, on copies on the host where `step_device` is "cpu"."""
    model = layers(device)
    place = device if step_device == "device" else "cpu"
    copies = [nn.Parameter(p.detach().to(place, copy=True)) for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=1e-2)
    for step in range(STEPS):
        loss_of(model, device, step).backward()
        with torch.no_grad():
            for p, mine in zip(model.parameters(), copies, strict=True):
                assert p.grad is not None
                mine.grad, p.grad = p.grad.to(place), None
        optimizer.step()
        with torch.no_grad():
            for p, mine in zip(model.parameters(), copies, strict=True):
                p.copy_(mine)
        change(model)
        with torch.no_grad():
            for p, mine in zip(model.parameters(), copies, strict=True):
                mine.copy_(p)
    return [p.detach().cpu() for p in model.parameters()]


def train(
    device: str,
    path: Path,
    where: str = "nvme",
    gradients: str = "nvme",
    step_device: str = "cpu",
    change: Callable[[nn.Sequential], None] = never,
    pool: str = "1MiB",
    uses: Callable[[nn.Sequential], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Train, with as little memory on the device as is accepted.

    Args:
        change: is called after each step.
        uses: is in effect during steps.
    """
    model = layers(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_records, "GROUP_BYTES", PER_RECORD_BYTES)
        config = swapper.OffloadConfig(
            nvme_path=path,
            pool_bytes=pool,
            bucket_bytes="96KiB",
            offload_optimizer={"device": "nvme", "step_device": step_device},
            offload_gradient={"device": gradients},
            offload_param={"device": where},
        )
        swapper.offload(model, optimizer, config)
        for step in range(STEPS):
            loss_of(model, device, step).backward()
            with uses(model):
                optimizer.step()
            optimizer.zero_grad()
            change(model)
    with contextlib.ExitStack() as stack:
        stack.callback(swapper.of(optimizer).close)
        stack.callback(model.swapper.close)  # type: ignore[union-attr, operator]
        found = [p.detach().cpu() for p in model.parameters()]
    assert all(map(torch.equal, found, expected(device, step_device, change)))


ORDERS = [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (0, 1, 4), (3, 1), (0, 1, 2, 3, 4), (2,), (4, 0, 3), (0, 1, 2, 3, 4)]


def run_in_orders(model: nn.Sequential, device: str) -> list[torch.Tensor]:
    """Gradients of passes through some layers, of which some are changed behind autograd's back."""

    def hook(module: nn.Module, args: object) -> None:
        module.bias.data.add_(0.125)  # type: ignore[operator, union-attr]

    for number in (1, 3):
        model[number][0].register_forward_pre_hook(hook)  # type: ignore[index, union-attr]
    gradients: list[torch.Tensor] = []
    for order in ORDERS:
        x = torch.ones(4, WIDE, device=device)
        y = x
        for number in order:
            y = model[number](y)
        (y - x).square().mean().backward()
        for p in model.parameters():
            if p.grad is not None:
                gradients.append(p.grad)
                p.grad = None
    return gradients


def expected_in_orders(device: str) -> list[torch.Tensor]:
    model = layers(device)
    return [each.detach().cpu() for each in (*run_in_orders(model, device), *model.parameters())]


def orders(device: str, path: Path, where: str, delay_us: int = 0) -> None:
    """Passes in changing order, where neither the pool nor the device has room for all. The drive may be slow.

    Memory of the device that a record leaves is others' at once.
    """
    others: list[torch.Tensor] = []
    free = DeviceTier._free

    def free_and_use(self: DeviceTier, held: HeldOnDevice) -> None:
        lengths = [len(values) for values in held.on_device]
        free(self, held)
        others.extend(torch.full((length,), 7.0, device=device) for length in lengths)

    plan = FaultPlan(delay_us=delay_us)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_records, "GROUP_BYTES", PER_RECORD_BYTES)
        patch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
        patch.setattr(DeviceTier, "_free", free_and_use)
        model = layers(device)
        pool = {"pool_bytes": "224KiB", "bucket_bytes": "64KiB"} if where == "nvme" else {}
        swapper.offload(model, config=swapper.OffloadConfig(nvme_path=path, offload_param={"device": where}, **pool))
        with contextlib.closing(model.swapper):  # type: ignore[arg-type]
            found = [each.detach().cpu() for each in run_in_orders(model, device)]
            for name, values in model.state_dict().items():
                assert torch.equal(values.cpu(), dict(model.named_parameters())[name].cpu())
            found += [p.detach().cpu() for p in model.parameters()]
            assert all(map(torch.equal, found, expected_in_orders(device)))
            assert all(bool((values == 7).all()) for values in others)


@contextlib.contextmanager
def read_in_the_step(model: nn.Sequential) -> Iterator[None]:
    """The last layer is in use during a step on the CPU; it is read on the device while it is stepped, and after."""
    read: list[torch.Tensor] = []
    step = DeviceTier.use_on_host

    def use_on_host(self: DeviceTier, records: Sequence[HeldOnDevice], *args: Any) -> None:
        step(self, records, *args)
        if any(held.in_use for held in records):
            keep_busy(self.device.type, 5000)
            read.append(views[0] * 1)

    with swapper.gathered(model[4]), pytest.MonkeyPatch.context() as patch:
        views = [model[4][0].weight.data]  # type: ignore[index, union-attr]
        before = views[0].cpu()
        patch.setattr(DeviceTier, "use_on_host", use_on_host)
        yield
        after = views[0] * 1
        assert torch.equal(read[0].cpu(), before)
        assert torch.equal(after.cpu(), views[0].cpu()) and not torch.equal(after.cpu(), before)
        views.clear()


def sums(device: str, path: Path) -> None:
    """Values are summed on one stream while longer ones come on another."""
    on = torch.device(device, 0)
    summed, values = DeviceSums(on, 4000), torch.arange(1000, dtype=torch.int32, device=on)
    other = torch.get_device_module(on).Stream(on)
    torch.accelerator.synchronize()
    with on_streams([other]):
        first = summed.of([values])
        torch.accelerator.synchronize()
    keep_busy(device, 500)
    second = summed.of([values])
    summed.fit(8000)
    with on_streams([other]):
        summed.of([values])
        other.synchronize()
    assert torch.equal(first.cpu(), second.cpu())


@contextlib.contextmanager
def offloaded(device: str, path: Path, delay_us: int = 0) -> Iterator[tuple[Any, FaultPlan]]:
    """Layers on the drive, each a record; and what the drive does."""
    plan = FaultPlan(delay_us=delay_us)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_records, "GROUP_BYTES", PER_RECORD_BYTES)
        patch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
        model: Any = layers(device)
        config = swapper.OffloadConfig(nvme_path=path, pool_bytes="1MiB", offload_param={"device": "nvme"})
        swapper.offload(model, config=config)
        with contextlib.closing(model.swapper):
            yield model, plan


def stepped_on_the_host(device: str, path: Path) -> None:
    """A layer in use is stepped on the CPU while the device has yet to read it, and its buffer becomes another's."""
    with offloaded(device, path) as (model, _), swapper.gathered(model[4]):
        weight = model[4][0].weight
        before = weight.detach().cpu()
        with model.swapper.stepping([weight], torch.device("cpu")) as values:
            values[weight].mul_(2)
            keep_busy(device, 5000)
            read = weight.detach() * 1
        pool = model.swapper._pool
        while pool.reclaim():
            pass
        leases = []
        while (lease := pool.try_acquire(32 << 10)) is not None:
            lease.tensor.fill_(7)
            leases.append(lease)
        assert leases
        after = weight.detach() * 1
        assert torch.equal(read.cpu(), before) and torch.equal(after.cpu(), before * 2)
        for lease in leases:
            lease.release()


def changed_while_written(device: str, path: Path) -> None:
    """What is changed is changed again while the drive still writes it."""
    with offloaded(device, path, delay_us=20_000) as (model, _):
        weight = model[4][0].weight
        with swapper.gathered(model[4]):
            expected = weight.detach().cpu() * 8
        for _ in range(3):
            with swapper.gathered(model[4]), torch.no_grad():
                weight.mul_(2)
            with model.swapper._lock:
                model.swapper._tier.poll()
        model.swapper.rest()
        with swapper.gathered(model[4]):
            assert torch.equal(weight.detach().cpu(), expected)


def written_in_vain(device: str, path: Path) -> None:
    """A write fails: the next step on the CPU says so before anything is changed, and can be made again."""
    with offloaded(device, path, delay_us=20_000) as (model, plan):
        weight = model[4][0].weight
        with swapper.gathered(model[4]):
            expected = weight.detach().cpu() * 4
        model.swapper.flush()  # Else what fails may be a write of another layer, by `offload`.
        plan.fail_errno, plan.fail_write_at = errno.EIO, 1
        stepped = 0
        for _ in range(3):
            with contextlib.suppress(SwapIOError), model.swapper.stepping([weight], torch.device("cpu")) as values:
                values[weight].mul_(2)
                stepped += 1
        model.swapper.rest()
        with swapper.gathered(model[4]):
            assert stepped == 2 and torch.equal(weight.detach().cpu(), expected)


@contextlib.contextmanager
def scaling(layer: Any, factor: float) -> Iterator[None]:
    """Each forward multiplies the bias, behind autograd's back."""

    def hook(module: Any, args: object) -> None:
        module.bias.data.mul_(factor)

    with layer[0].register_forward_pre_hook(hook):
        yield


def changed_while_leaving(device: str, path: Path, by_view: bool) -> None:
    """What is copied down is changed, and changed back when that is over: the pool has what was to be copied."""
    with offloaded(device, path) as (model, _), torch.no_grad():
        layer, tier = model[4], model.swapper._tier
        x, views = torch.ones(4, WIDE, device=device), []

        def scale(factor: float) -> None:
            if views:
                views[0].mul_(factor)
            else:
                with scaling(layer, factor):
                    layer(x)

        with swapper.gathered(layer):
            expected = layer[0].bias.cpu() * 2
        if by_view:
            with model.swapper.stepping([layer[0].bias], x.device):
                layer[0].bias.mul_(2)
                views.append(layer[0].bias.data)
        else:
            scale(2)
            with model.swapper._lock:
                tier.rest()
        scale(2)
        torch.accelerator.current_stream().synchronize()
        with model.swapper._lock:
            for held in list(tier._going_down):
                tier._land(held)
        scale(0.5)
        views.clear()
        model.swapper.rest()
        with swapper.gathered(layer):
            assert torch.equal(layer[0].bias.cpu(), expected)


def left_on_another_stream(device: str, path: Path) -> None:
    """What one stream has compared goes down on another, and is not written again as long as it stays as it is.

    Memory of the first stream is others' meanwhile.
    """
    with offloaded(device, path) as (model, _), torch.no_grad():
        layer, tier, swapped = model[4], model.swapper._tier, model.swapper
        x = torch.ones(4, WIDE, device=device)
        module: Any = torch.get_device_module(x.device)
        first, other = module.current_stream(x.device), module.Stream(x.device)
        with scaling(layer, 2):
            layer(x)
        with swapped._lock:
            tier.uses.sum_early()
            with on_streams([other]):
                keep_busy(device, 500)
                tier.rest()
        others = [torch.full((2,), 7, dtype=torch.int64, device=device) for _ in range(8)]
        first.synchronize()
        del others
        swapped.rest()
        written_bytes = swapped.stats().bytes_written
        layer(x)
        swapped.rest()
        assert swapped.stats().bytes_written == written_bytes


def cut_off_arrival(device: str, path: Path) -> None:
    """Ctrl-C comes when values are on their way to the device, and nobody waits for them: they leave as they came."""
    lift = DeviceTier._lift

    def cut_off(self: DeviceTier, held: HeldOnDevice) -> None:
        lift(self, held)
        raise KeyboardInterrupt

    with offloaded(device, path) as (model, _), pytest.MonkeyPatch.context() as patch:
        with swapper.gathered(model[4]):
            expected = model[4][0].weight.detach().cpu()
        model.swapper.rest()
        with model.swapper._tier._up.allocating():  # What is there before they come.
            others = [torch.full((length,), 7.0, device=device) for length in (WIDE, WIDE * WIDE) * DEPTH]
        torch.accelerator.synchronize()
        others.clear()
        with contextlib.suppress(KeyboardInterrupt), patch.context() as during:
            during.setattr(DeviceTier, "_lift", cut_off)
            model[4](torch.ones(4, WIDE, device=device))
            raise AssertionError("it was not cut off")
        model.swapper.rest()
        with swapper.gathered(model[4]):
            assert torch.equal(model[4][0].weight.detach().cpu(), expected)


def memory_of_others(device: str, path: Path) -> None:
    """Parameters come to memory that others leave, and leave it to others, while the device has yet to read it."""
    torch.accelerator.synchronize()
    model, x = layers(device), torch.ones(4, WIDE, device=device)
    with torch.no_grad():
        expected = [each(x).cpu() for each in model]
    config = swapper.OffloadConfig(nvme_path=path, offload_param={"device": "nvme"}, pool_bytes="1MiB")
    swapper.offload(model, config=config)
    keeps_the_pool, _ = swapper.offload(layers(device), config=config)
    others = [torch.full((length,), 7.0, device=device) for length in (4, WIDE, WIDE * WIDE) for _ in range(9)]
    torch.accelerator.synchronize()
    keep_busy(device, 500)
    read = [each * 1 for each in others]
    others.clear()
    with torch.no_grad():
        found = [each(x) for each in model]
        keep_busy(device, 5000)
        found[-1] = model[-1](x)
    model.swapper.close()  # type: ignore[operator, union-attr]
    others.append(torch.full((4,), 7.0, device=device))
    torch.accelerator.synchronize()
    keeps_the_pool.swapper.close()  # type: ignore[operator, union-attr]
    assert all(map(torch.equal, [each.cpu() for each in found], expected))
    assert all(bool((each == 7).all()) for each in read)


def converted(device: str, path: Path) -> None:
    """Parameters are converted while the model is built: the record of each goes when the device has yet to read it."""
    with torch.device(device):
        expected = [p.detach().double().cpu() for p in layers(device).parameters()]
    config = swapper.OffloadConfig(nvme_path=path, offload_param={"device": "nvme"})
    with swapper.init(config, device=device):
        model = layers(device)
        keep_busy(device, 5000)
        model.double()
    found = [p.detach().cpu() for p in model.parameters()]
    assert all(map(torch.equal, found, expected))


class Fused(nn.Module):
    """Experts of a class that takes them one at a time, of which two are used, never the same ones twice in a row."""

    num_experts, has_bias, is_transposed = 6, False, True

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(self.num_experts, WIDE, WIDE) / WIDE)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        for expert in chosen:
            x = (x @ self.proj[expert]).sin()
        return x


def experts_from_files(device: str, path: Path) -> None:
    """Experts come one by one, from files, with the least room on the device; with a gradient beside them, too."""
    torch.manual_seed(values_seed)
    layers = nn.ModuleList([nn.Linear(WIDE, WIDE), *(Fused() for _ in range(3))])
    weights = write_weights(path / "weights.safetensors", layers.state_dict(), 24)
    made = hollow(nn.ModuleList([nn.Linear(WIDE, WIDE), *(Fused() for _ in range(3))]))
    with pytest.raises(swapper.ConfigError) as error:
        few = swapper.OffloadConfig(pool_bytes="1MiB", offload_param={"device_bytes": 1})
        swapper.offload(made, config=few, weights=weights, device=device)
    param = {"device_bytes": int(str(error.value).rpartition(" ")[2])}
    config = swapper.OffloadConfig(pool_bytes="1MiB", offload_param=param)
    swapper.offload(made, config=config, weights=weights, device=device)
    layers.to(device)
    for module in (layers, made):
        for p in module.parameters():
            p.requires_grad_(p.dim() < 3)
    for round_ in range(6):
        chosen = torch.tensor([round_ % 6, (3 * round_ + 1) % 6]).to(device)
        found = []
        for module in (layers, made):
            x = module[0](torch.ones(4, WIDE, device=device))
            for layer in list(module)[1:]:
                x = layer(x, chosen)
            if round_ % 2:
                x.sum().backward()
            found.append(x.detach())
        assert torch.equal(*(each.cpu() for each in found))
    for p, q in zip(layers.parameters(), made.parameters(), strict=True):
        assert p.grad is None or torch.equal(p.grad.cpu(), q.grad.cpu())  # type: ignore[union-attr]
    made.swapper.close()  # type: ignore[operator, union-attr]


PARAMETER_SCENARIOS: dict[str, Callable[[str, Path], None]] = {
    "parameters on the drive": train,
    "parameters in the pool": functools.partial(train, where="cpu", gradients="cpu"),
    "parameters changed in the pool": functools.partial(train, where="cpu", gradients="cpu", change=change_in_forward),
    "parameters stepped on the device": functools.partial(train, step_device="device"),
    "parameters changed in forward": functools.partial(train, change=change_in_forward),
    "parameters used on another stream": functools.partial(train, change=use_two_streams, step_device="device"),
    "parameters in use in the step": functools.partial(train, uses=read_in_the_step),
    "parameters in use in the pool": functools.partial(train, where="cpu", gradients="cpu", uses=read_in_the_step),
    "parameters in a short pool": functools.partial(orders, where="nvme"),
    "parameters on a slow drive": functools.partial(orders, where="nvme", delay_us=2000),
    "parameters stepped while they are read": stepped_on_the_host,
    "parameters changed while they are written": changed_while_written,
    "parameters whose write fails": written_in_vain,
    "parameters changed while they leave": functools.partial(changed_while_leaving, by_view=False),
    "views changed while parameters leave": functools.partial(changed_while_leaving, by_view=True),
    "parameters that leave on another stream": left_on_another_stream,
    "parameters whose arrival is cut off": cut_off_arrival,
    "sums of parameters": sums,
    "parameters in memory of others": memory_of_others,
    "parameters converted": converted,
    "parameters in changing order": functools.partial(orders, where="cpu"),
    "experts from files": experts_from_files,
}
