"""`step_in_backward` with tensors that share memory: the bits of plain PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import swapper
from swapper import ConfigError, OffloadConfig

WIDTH = 128
NUMEL = WIDTH * WIDTH


class Net(nn.Module):
    """Two layers; the weight of the second is what `share` makes of that of the first."""

    def __init__(self, share: Callable[[Net], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        share(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.tanh(self.first(x)))
        used = [value for value in self.buffers() if value.numel() == NUMEL]
        for value in used:
            hidden = torch.nn.functional.linear(torch.tanh(hidden), value.view(WIDTH, WIDTH))
        return hidden


def flat_of(net: Net) -> torch.Tensor:
    return torch.cat([net.first.weight.detach().flatten(), net.second.weight.detach().flatten(), torch.randn(NUMEL)])


def part(flat: torch.Tensor, start: int, step: int = 1) -> torch.Tensor:
    return flat.as_strided((WIDTH, WIDTH), (WIDTH * step, step), start)


def by_data(first: int, second: int, step: int = 1) -> Callable[[Net], None]:
    """Parameters that stay what they are, in the memory of one flat tensor."""

    def share(net: Net) -> None:
        flat = flat_of(net)
        net.first.weight.data, net.second.weight.data = part(flat, first, step), part(flat, second, step)

    return share


def by_view(first: int, second: int) -> Callable[[Net], None]:
    """Parameters that are made of views of one flat tensor, and have its version counter."""

    def share(net: Net) -> None:
        flat = flat_of(net)
        net.first.weight, net.second.weight = nn.Parameter(part(flat, first)), nn.Parameter(part(flat, second))

    return share


def tied(net: Net) -> None:
    net.second.weight = net.first.weight


def made_of_each_other(net: Net) -> None:
    net.second.weight = nn.Parameter(net.first.weight.data)


def tied_by_data(net: Net) -> None:
    net.second.weight.data = net.first.weight.data


def tied_to_frozen(net: Net) -> None:
    tied_by_data(net)
    net.second.weight.requires_grad_(False)


def frozen_together(net: Net) -> None:
    by_data(0, NUMEL // 2)(net)
    net.requires_grad_(False)
    net.first.bias.requires_grad_()


def a_buffer(net: Net) -> None:
    net.register_buffer("seen", net.first.weight.data)


def a_buffer_beside(net: Net) -> None:
    flat = flat_of(net)
    net.first.weight = nn.Parameter(part(flat, 0))
    net.register_buffer("seen", part(flat, 2 * NUMEL))


def a_buffer_apart(net: Net) -> None:
    flat = flat_of(net)
    net.first.weight.data = part(flat, 0)
    net.register_buffer("seen", part(flat, 2 * NUMEL).data)


def buffers_alone(net: Net) -> None:
    flat = torch.randn(NUMEL)
    net.register_buffer("seen", flat)
    net.register_buffer("again", flat.view(WIDTH, WIDTH))


def in_inference_mode(net: Net) -> None:
    with torch.inference_mode():
        unused = torch.randn(10)
        net.register_buffer("seen", unused)
        net.register_buffer("again", unused[2:])


ACCEPTED = {
    "tied as one object": tied,
    "parts of one storage": by_data(0, NUMEL),
    "parts with a hole": by_data(7, NUMEL + 64),
    "frozen together": frozen_together,
    "a buffer apart": a_buffer_apart,
    "buffers alone": buffers_alone,
    "in inference mode": in_inference_mode,
}
REFUSED = {
    "the same memory": tied_by_data,
    "one made of the other": made_of_each_other,
    "overlapping by one": by_data(0, NUMEL - 1),
    "overlapping, the other way round": by_data(NUMEL - 1, 0),
    "interleaved": by_data(0, 1, 2),
    "frozen, in the same memory": tied_to_frozen,
    "views of one tensor": by_view(0, NUMEL),
    "overlapping views": by_view(0, 3),
    "a buffer in the same memory": a_buffer,
    "a buffer that is a view of the same": a_buffer_beside,
}
DEVICES = ["nvme none none", "cpu none none", "none none none", "nvme nvme none", "nvme nvme nvme", "none none nvme"]


def config(nvme_path: Path, devices: str, in_backward: bool = True) -> OffloadConfig:
    optimizer, gradient, parameter = devices.split()
    return OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="4MiB",
        bucket_bytes="64KiB",
        offload_optimizer={"device": optimizer, "step_in_backward": in_backward},
        offload_gradient={"device": gradient},
        offload_param={"device": parameter},
    )


def train(net: Net, settings: OffloadConfig | None) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if settings is not None:
        swapper.offload(net, optimizer, settings)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [p.detach().clone() for p in net.parameters()]
    if settings is not None:
        swapper.of(optimizer).close()
    return found


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("way", ACCEPTED)
def test_what_can_be_stepped_in_backward_has_the_bits_of_plain(way: str, devices: str, nvme_path: Path) -> None:
    plain = train(Net(ACCEPTED[way]), None)
    swapped = train(Net(ACCEPTED[way]), config(nvme_path, devices))
    assert all(torch.equal(a, b) for a, b in zip(plain, swapped, strict=True))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_is_refused_by_name_and_nothing_is_changed(way: str, devices: str, nvme_path: Path) -> None:
    net = Net(REFUSED[way])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step, versions = optimizer.step, [p._version for p in net.parameters()]
    with pytest.raises(
        ConfigError, match=r"cannot be combined with (tensors in the same memory|views of one)"
    ) as found:
        swapper.offload(net, optimizer, config(nvme_path, devices))
    assert "first.weight" in str(found.value) and ("second.weight" in str(found.value) or "seen" in str(found.value))
    assert optimizer.step == step and versions == [p._version for p in net.parameters()]
    assert not hasattr(optimizer, "swapper")


@pytest.mark.parametrize("way", [way for way in REFUSED if "buffer" not in way])
def test_an_optimizer_alone_names_its_parameters(way: str, nvme_path: Path) -> None:
    net = Net(REFUSED[way])
    settings = config(nvme_path, "nvme none none")
    with pytest.raises(ConfigError, match=r"parameter \d of group \d, of shape \(128, 128\), in backward"):
        swapper.wrap_optimizer(torch.optim.AdamW(net.parameters()), settings)
    with pytest.raises(ConfigError, match=r"parameter first\.weight, of shape"):
        swapper.wrap_optimizer(torch.optim.AdamW(net.named_parameters()), settings)


@pytest.mark.parametrize("way", [way for way in REFUSED if way != "interleaved"])
def test_without_step_in_backward_it_works(way: str, nvme_path: Path) -> None:
    plain = train(Net(REFUSED[way]), None)
    swapped = train(Net(REFUSED[way]), config(nvme_path, "nvme none none", in_backward=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, swapped, strict=True))


@pytest.mark.parametrize("way", ["the same memory", "overlapping by one", "views of one tensor"])
def test_a_parameter_that_comes_later_is_refused_before_it_is_stepped(way: str, nvme_path: Path) -> None:
    net = Net(REFUSED[way])
    optimizer = torch.optim.AdamW([net.first.weight, net.first.bias], lr=1e-2)
    swapper.wrap_optimizer(optimizer, config(nvme_path, "nvme none none"))
    optimizer.add_param_group({"params": [net.second.weight, net.second.bias]})
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ConfigError, match="cannot be combined with"):
        net(torch.ones(2, WIDTH)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    swapper.of(optimizer).close()
