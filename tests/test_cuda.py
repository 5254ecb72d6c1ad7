"""Parameters on a GPU: gradients come to the pool on a stream of their own, parameters go back the same way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpt import GPT, SIZES
from test_optimizer_exact import OPTIMIZERS, make_config, same_bits
from torch import nn

import swapper

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class OnTheHost:
    """The reference, written out: the optimizer steps copies on the host, the model gets them back."""

    def __init__(self, parameters: list[nn.Parameter], name: str, masters: bool) -> None:
        self.parameters = parameters
        self.copies = [nn.Parameter(p.detach().cpu().float() if masters else p.detach().cpu()) for p in parameters]
        self.optimizer = OPTIMIZERS[name](self.copies)

    def step(self) -> None:
        for p, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None if p.grad is None else p.grad.cpu().to(copy.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for p, copy in zip(self.parameters, self.copies, strict=True):
                p.copy_(copy.to(p.dtype))


def train(model: GPT, step: object, steps: int = 20) -> list[float]:
    assert callable(step)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(256, (2, 33), generator=generator).cuda()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def make_model(dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    return GPT(SIZES["tiny"]).to("cuda", dtype)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.mark.parametrize("device", ["nvme", "cpu"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "Muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-masters"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_same_bits_as_stepping_on_the_host(nvme_path: Path, name: str, precision: str, device: str) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    masters = precision == "bf16-masters"
    plain, swapped = make_model(dtype), make_model(dtype)
    expected = train(plain, OnTheHost(list(plain.parameters()), name, masters).step)
    optimizer = OPTIMIZERS[name](list(swapped.parameters()))
    swapper.wrap_optimizer(optimizer, make_config(nvme_path, device=device, master_weights=masters))
    assert train(swapped, optimizer.step) == expected
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(plain.parameters(), swapped.parameters(), strict=True))
    assert all(p.is_cuda for p in swapped.parameters())
    swapper.of(optimizer).close()


def test_state_never_visits_the_device(nvme_path: Path) -> None:
    model = nn.Linear(2000, 2000, device="cuda")
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), make_config(nvme_path))
    model(torch.randn(2, 2000, device="cuda")).square().sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.max_memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    state = optimizer.state_dict()["state"][0]
    assert not state["exp_avg"].is_cuda
    swapper.of(optimizer).close()


def test_a_scaler_on_the_gpu(nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 300, device="cuda")
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters(), fused=True), make_config(nvme_path))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    before = model.weight.detach().clone()
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(torch.randn(4, 300, device="cuda")).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert model.weight.isfinite().all() and not torch.equal(model.weight, before)
    assert swapper.of(optimizer).state(model.weight)["step"] == 2
    swapper.of(optimizer).close()


def test_unwrap_puts_the_state_on_the_device(nvme_path: Path) -> None:
    model = nn.Linear(300, 300, device="cuda")
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), make_config(nvme_path))
    for _ in range(2):
        model(torch.randn(2, 300, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(optimizer, "swapper"):
            swapper.unwrap_optimizer(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].is_cuda
