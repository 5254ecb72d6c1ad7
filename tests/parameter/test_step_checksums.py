"""Checksums that the optimizer knows of what it has rounded are those of the parameters that are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import swapper
from swapper.io.checksums import checksum
from swapper.parameter import cache
from swapper.parameter.swapper import ParameterSwapper


class Model(nn.Module):
    """Parameters that are cut into many buckets, into a few, and not; in the order of channels last, and 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(257, 301)
        self.small = nn.Linear(301, 5, bias=False)
        self.conv = nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.conv(x[:, :128].view(-1, 8, 4, 4))
        return self.norm(self.small(self.wide(x))) * self.scale + image.mean()


@pytest.fixture
def model_and_optimizer(nvme_path: Path) -> Iterator[tuple[Model, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = Model().bfloat16()
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="1MiB",
        bucket_bytes="64KiB",
        offload_param={"device": "nvme"},
        offload_optimizer={"device": "nvme", "master_weights": True},
    )
    yield swapper.offload(model, torch.optim.AdamW(model.parameters(), lr=0.1), config)
    swapper_of(model).close()


def swapper_of(model: nn.Module) -> ParameterSwapper:
    found = model.swapper
    assert isinstance(found, ParameterSwapper)
    return found


def backward(model: nn.Module) -> None:
    model(torch.randn(3, 257, dtype=torch.bfloat16)).square().mean().backward()


def test_they_are_those_of_what_is_written(
    model_and_optimizer: tuple[Model, torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_and_optimizer
    summed: list[int] = []

    def counted(values: torch.Tensor) -> int:
        summed.append(values.numel())
        return checksum(values)

    for _ in range(4):
        backward(model)
        with monkeypatch.context() as patched:
            patched.setattr(cache, "checksum", counted)
            optimizer.step()
        records = swapper_of(model).flushed_records()
        assert sum(len(held.plan.locations) for held in records) == len(list(model.parameters()))
        for held in records:
            with swapper_of(model).present([held]):
                assert [checksum(values) for values in held.opened] == held.checksums
        optimizer.zero_grad()
    assert 257 * 301 not in summed and 64 * 8 * 9 in summed, "the first is contiguous, the second is not"


def test_what_is_changed_around_a_step_is_kept(model_and_optimizer: tuple[Model, torch.optim.Optimizer]) -> None:
    """Then the record is not written when the step is over, but later."""
    model, optimizer = model_and_optimizer
    backward(model)
    with swapper.gathered(model.wide.weight):
        optimizer.step()
        model.wide.weight.data[3] = 0.25  # Behind autograd's back.
        now = model.wide.weight.detach().clone()
    (held,) = swapper_of(model).records_of([model.wide.weight])
    swapper_of(model).flush()
    for _ in range(3):  # Others need the pool.
        model(torch.randn(3, 257, dtype=torch.bfloat16))
    with swapper.gathered(model.wide.weight):
        assert torch.equal(model.wide.weight, now)
        assert [checksum(values) for values in held.opened] == held.checksums
