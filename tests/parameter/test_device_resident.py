"""Parameters that stay on an accelerator: copied up once, to the bit, within a sum that is known at construction."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import same_bits
from twins import swapper_of

import swapper
from swapper.errors import ConfigError
from swapper.parameter import records as parameter_records
from swapper.parameter.device_tier import DeviceTier, HeldOnDevice

WIDTH = 64
LAYERS = 6
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of values; on the device each tensor is rounded up to 512 bytes
ON_DEVICE_BYTES = 4 * WIDTH * WIDTH + 512


@pytest.fixture(autouse=True)
def _short_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record for each layer."""
    monkeypatch.setattr(parameter_records, "GROUP_BYTES", LAYER_BYTES)


class Lifts:
    """Numbers of the records that were copied up, and whether what was promised was kept meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: list[int] = []
        lift = DeviceTier._lift

        def lifted(tier: DeviceTier, held: HeldOnDevice, *args: Any) -> None:
            lift(tier, held, *args)
            self.numbers.append(held.number)
            assert tier.used_bytes <= tier.limit_bytes

        monkeypatch.setattr(DeviceTier, "_lift", lifted)

    def take(self) -> list[int]:
        found, self.numbers = sorted(self.numbers), []
        return found


def make_model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(device)


def backward(model: nn.Module, device: str, seed: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
    (model(x) - x).square().mean().backward()


def config(path: Path, resident: int, where: str = "nvme", step_device: str = "device", **extra: Any) -> Any:
    stored = {"nvme_path": path} if where == "nvme" else {}
    return swapper.OffloadConfig(
        **stored,
        pool_bytes="2MiB",
        bucket_bytes="64KiB",
        offload_optimizer={"device": where, "step_device": step_device},
        offload_param={"device": where, "device_resident_bytes": resident * ON_DEVICE_BYTES, **extra},
    )


def least_for(model: nn.Module, path: Path, resident: int) -> int:
    with pytest.raises(ConfigError, match="are needed; set it to at least") as caught:
        swapper.check(model, config=config(path, resident, device_bytes=resident * ON_DEVICE_BYTES))
    assert ("kept resident" in str(caught.value)) == bool(resident)
    found = re.search(r"at least (\d+)", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
@pytest.mark.parametrize("where", ["nvme", "cpu"])
@pytest.mark.parametrize("resident", [1, 3, LAYERS])
def test_to_the_bit_whatever_changes_them(
    device: str, nvme_path: Path, tmp_path: Path, resident: int, where: str, step_device: str
) -> None:
    """With the least memory: steps, changes in place and behind autograd's back, gathered, loads and a checkpoint."""
    plain, model = make_model(device), make_model(device)
    on_cpu = step_device == "cpu"
    copies = [nn.Parameter(p.detach().cpu() if on_cpu else p.detach().clone()) for p in plain.parameters()]
    reference = torch.optim.AdamW(copies, lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    least = least_for(model, nvme_path, resident)
    swapper.offload(model, optimizer, config(nvme_path, resident, where, step_device, device_bytes=least))

    def change(net: nn.Module, step: int) -> None:
        weights = [layer.weight for layer in net if isinstance(layer, nn.Linear)]  # type: ignore[attr-defined]
        with torch.no_grad():
            if step == 1:
                weights[0].mul_(0.5)
                weights[LAYERS - 1].add_(0.25)
            if step == 2:
                with swapper.gathered(net[0]) if net is model else torch.no_grad():  # type: ignore[index]
                    weights[0].data[3:5] = 0.125
            if step == 3:
                state = {name: value * 0.75 for name, value in net.state_dict().items()}
                net.load_state_dict(state)

    for step in range(5):
        change(plain, step)
        change(model, step)
        backward(plain, device, step)
        backward(model, device, step)
        for p, mine in zip(plain.parameters(), copies, strict=True):
            assert p.grad is not None
            with torch.no_grad():
                mine.copy_(p)
            mine.grad, p.grad = p.grad.to(mine.device), None
        reference.step()
        with torch.no_grad():
            for p, mine in zip(plain.parameters(), copies, strict=True):
                p.copy_(mine)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            swapper.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
            saved = copy.deepcopy([p.detach().cpu() for p in plain.parameters()])
        ours = [value.cpu() for value in model.state_dict().values()]
        assert all(map(same_bits, ours, [value.cpu() for value in plain.state_dict().values()])), step
    swapper.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    assert all(map(same_bits, [p.detach().cpu() for p in model.parameters()], saved))
    swapper.of(optimizer).close()
    swapper_of(model).close(keep_values=True)
    assert all(map(same_bits, [p.detach().cpu() for p in model.parameters()], saved))


@pytest.mark.parametrize("resident", [0, 2, LAYERS])
def test_they_are_copied_up_once(device: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    least = least_for(model, nvme_path, resident)
    swapper.offload(model, optimizer, config(nvme_path, resident, device_bytes=least))
    lifts = Lifts(monkeypatch)
    for step in range(4):
        hits = swapper_of(model).metrics.hits
        backward(model, device, step)
        optimizer.step()
        optimizer.zero_grad()
        found = lifts.take()
        staying = [number for number in found if number < resident]
        assert staying == (list(range(resident)) if step == 0 else [])
        assert bool(set(found) - set(range(resident))) == (resident < LAYERS)
        assert swapper_of(model).metrics.hits - hits >= 2 * resident
    swapper.of(optimizer).close()
    swapper_of(model).close(keep_values=True)


def test_their_sum_is_part_of_device_bytes(device: str, nvme_path: Path) -> None:
    model = make_model(device)
    sums = [least_for(model, nvme_path, resident) for resident in (0, 1, 2, 3)]
    assert [after - before for before, after in itertools.pairwise(sums)] == [ON_DEVICE_BYTES] * 3
    wanted = [swapper.check(model, config=config(nvme_path, resident)).device_bytes for resident in (0, 1, 2)]
    assert [after - before for before, after in itertools.pairwise(wanted)] == [ON_DEVICE_BYTES] * 2
    all_of_them = least_for(model, nvme_path, LAYERS)
    with pytest.raises(ConfigError, match=f"at least {all_of_them}"):
        swapper.offload(model, config=config(nvme_path, LAYERS, device_bytes=all_of_them - 1))
    swapper.offload(model, config=config(nvme_path, LAYERS, device_bytes=all_of_them))
    backward(model, device, 0)
    swapper_of(model).close(keep_values=True)


def test_they_go_for_what_would_not_fit(device: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many others as the sum has room for are gathered; then they come back."""
    model = make_model(device)
    least = least_for(model, nvme_path, 3)
    before = [p.detach().cpu() for p in model.parameters()]
    swapper.offload(model, config=config(nvme_path, 3, device_bytes=least))
    backward(model, device, 0)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    lifts = Lifts(monkeypatch)
    with swapper.gathered(nn.ModuleList(layers[1:])):  # 5 records, where 3 stay and 2 come and go.
        assert all(type(p) is nn.Parameter for layer in layers[1:] for p in layer.parameters())
        lifts.take()
    backward(model, device, 1)
    assert 0 in lifts.take()
    lifts.take()
    backward(model, device, 2)
    assert not {0, 1, 2} & set(lifts.take())
    swapper_of(model).close(keep_values=True)
    assert all(map(same_bits, before, [p.detach().cpu() for p in model.parameters()]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "none", "device_resident_bytes": 1}, "has no use with offload_param.device: none"),
        (
            {"device": "cpu", "device_bytes": 1000, "device_resident_bytes": 1001},
            "device_bytes: 1KB is too small for .* set it to at least 1001",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_the_config(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        swapper.OffloadConfig(offload_param=settings)


def test_a_model_on_the_cpu_does_not_care(nvme_path: Path) -> None:
    plain, model = make_model("cpu"), make_model("cpu")
    swapper.offload(model, config=config(nvme_path, 2, step_device="auto"))
    backward(plain, "cpu", 0)
    backward(model, "cpu", 0)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and same_bits(p.grad, q.grad)
    swapper_of(model).close(keep_values=True)
