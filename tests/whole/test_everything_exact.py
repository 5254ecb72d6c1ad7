"""Parameters, gradients and optimizer state all on disk, 20 steps: the bits of plain PyTorch, and its strides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from training import MasterWeights

import swapper
from swapper import OffloadConfig
from swapper.parameter import records as parameter_records

pytestmark = pytest.mark.packs_too

STEPS = 20


class Convolutions(nn.Module):
    """channels_last, normalisation with buffers, odd sizes, an empty parameter, a table of embeddings, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 37, 3)
        self.norm = nn.BatchNorm2d(37)
        self.second = nn.Conv2d(37, 64, 3)
        self.inner = nn.Linear(64, 301)
        self.table = nn.Embedding(301, 64)
        self.head = nn.Linear(64, 301, bias=False)
        self.head.weight = self.table.weight
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(images)))
        x = self.second(x).mean((2, 3)) * self.scalar
        x = x + self.table(tokens).mean(1) + torch.tanh(self.inner(x)).sum(-1, keepdim=True)
        logits: torch.Tensor = self.head(x)
        return logits + self.empty.sum()


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Convolutions().to(dtype)


def make_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def run(
    model: nn.Module, step: Callable[[], None], zero: Callable[[], None], passes: int, look: bool
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Losses, and strides of gradients (if `look`) before every step."""
    generator = torch.Generator().manual_seed(5)
    dtype = next(model.parameters()).dtype
    losses, strides = [], []
    for _ in range(STEPS):
        for _ in range(passes):
            images = torch.randn(2, 3, 9, 9, generator=generator).to(dtype)
            tokens = torch.randint(0, 301, (2, 5), generator=generator)
            loss = model(images, tokens).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        if look:
            strides += [p.grad.stride() for p in model.parameters() if p.grad is not None]
        step()
        zero()
    return losses, strides


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("in_backward", [False, True], ids=["at the end", "in backward"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["fp32", "bf16 with masters"])
@pytest.mark.parametrize("native", ["on", "off"])
def test_losses_parameters_and_strides(
    native: str,
    kind: str,
    threads: int,
    passes: int,
    in_backward: bool,
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameter_records, "GROUP_BYTES", 100_000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        plain = make_model(dtype)
        if kind == "fp32":
            optimizer = make_adamw(list(plain.parameters()))
            expected = run(plain, optimizer.step, optimizer.zero_grad, passes, look=not in_backward)
        else:
            reference = MasterWeights(list(plain.parameters()), make_adamw)
            expected = run(plain, reference.step, plain.zero_grad, passes, look=not in_backward)

        model = make_model(dtype)
        config = OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="3MiB",
            bucket_bytes="256KiB",
            gradient_accumulation_steps=passes,
            offload_optimizer={
                "device": "nvme",
                "master_weights": True,
                "step_in_backward": in_backward,
                "native_step": native,
            },
            offload_gradient={"device": "nvme"},
            offload_param={"device": "nvme"},
        )
        model, swapped = swapper.offload(model, make_adamw(list(model.parameters())), config)
        result = run(model, swapped.step, swapped.zero_grad, passes, look=not in_backward)
        assert result == expected
        assert (swapper.of(swapped).stats().segments_native > 0) == (native == "on")
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q), name
            assert p.stride() == q.stride(), name
        for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs), name
        assert swapper.of(swapped).stats().bytes_read > 0
        swapper.of(swapped).close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at inputs that are no leaves.
@pytest.mark.parametrize("compiled", ["step", "loop"])
@pytest.mark.parametrize("moves", ["state", "all", "all in backward"])
def test_what_torch_compiles_around_a_step_is_not_the_step(compiled: str, moves: str, nvme_path: Path) -> None:
    """Compiled, the plain step of torch itself has other bits; that of a swapped optimizer has those of its class."""
    torch.compiler.reset()

    def train(swapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 100), nn.LayerNorm(100), nn.Linear(100, 64))
        optimizer = make_adamw(list(model.parameters()))

        def step() -> None:
            optimizer.step()

        def loop(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            step()
            optimizer.zero_grad()
            return loss

        if swapped:
            device = "none" if moves == "state" else "nvme"
            config = OffloadConfig(
                nvme_path=nvme_path,
                pool_bytes="3MiB",
                bucket_bytes="32KiB",
                offload_optimizer={"device": "nvme", "step_in_backward": moves == "all in backward"},
                offload_gradient={"device": device},
                offload_param={"device": device},
            )
            swapper.offload(model, optimizer, config)
            if compiled == "step":
                step = torch.compile(step, backend="eager")
            else:
                loop = torch.compile(loop, backend="eager")
        found = [loop(torch.full((2, 64), 0.5 + i)).detach() for i in range(3)]
        found += [p.detach().clone() for p in model.parameters()]
        if swapped:
            swapper.of(optimizer).close()
        return found

    assert all(map(torch.equal, train(True), train(False)))
