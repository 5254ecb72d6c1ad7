"""Classes that are registered as elementwise and look at whole parameters, or at all of them, have the plain bits.

They are stepped on whole parameters, or refused, whatever they look for: also where it is of no effect on most tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from training import make_config

import swapper
from swapper.optimizer import probe

Change = Callable[[Tensor, Tensor], Tensor]


class Momentum(Optimizer):
    """Gathers what `change` makes of the gradient of each parameter, times what `factor` makes of all gradients."""

    def __init__(
        self, params: Any, change: Change, factor: Callable[[Sequence[Tensor]], Any] = lambda all_: 1.0
    ) -> None:
        super().__init__(params, {"lr": 0.01})
        self.change, self.factor = change, factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            factor = self.factor([p.grad for p in stepped]) if stepped else 1.0
            for p in stepped:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(momentum.mul_(0.9).add_(self.change(p, p.grad * factor)), alpha=-group["lr"])


def of_matrices(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda p, g: change(g) if g.dim() > 1 else g


def scaled_to(norm: float) -> Change:
    return lambda p, g: g * (norm / (g.norm() + 1e-30)).clamp(max=1)


def in_order(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda p, g: change(g.flatten()).view_as(g)


def is_orthogonal(p: Tensor, g: Tensor) -> Tensor:
    """As AdamP asks it, which projects updates of weights before a norm layer."""
    similarity = torch.nn.functional.cosine_similarity(p.flatten(), g.flatten(), dim=0)
    return similarity.abs() < 0.1 / p.numel() ** 0.5


WHOLE: dict[str, Change] = {
    "norm": lambda p, g: g / (g.norm() + 1e-6),
    "trust ratio": lambda p, g: g * (p.norm() / (g.norm() + 1e-6)),
    "mean": lambda p, g: g - g.mean(),
    "max": lambda p, g: g / g.abs().max(),
    "RMS": lambda p, g: g / g.square().mean().sqrt(),
    "standard deviation": lambda p, g: g / g.std(),
    "quantile": lambda p, g: g.clamp(max=g.flatten().sort().values[int(g.numel() * 0.9)].item()),
    "largest": lambda p, g: g * (g.abs() >= g.abs().flatten().topk(max(1, g.numel() // 2)).values[-1]),
    "cumsum": in_order(lambda g: g.cumsum(0)),
    "softmax": in_order(lambda g: g.softmax(0)),
    "neighbour": in_order(lambda g: g.roll(1)),
    "numel": lambda p, g: g / g.numel() ** 0.5,
    "clipped to 1": scaled_to(1),
    "clipped to 1e5": scaled_to(1e5),
    "norm that is small": lambda p, g: g * (1e-3 / (g.norm() + 1e-30)).clamp(min=1),
    "zeros": lambda p, g: g if g.any() else torch.ones_like(g),
    "one sign": lambda p, g: g if (g < 0).any() else -g,
    "not finite": lambda p, g: g if g.isfinite().all() else torch.zeros_like(g),
    "weights of a large norm": lambda p, g: g + p * (p.norm() > 1e4),
    "orthogonal": lambda p, g: torch.where(is_orthogonal(p, g), 2 * g, g),
}
OF_MATRICES: dict[str, Change] = {
    "mean of rows": of_matrices(lambda g: g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)),
    "norm of rows": of_matrices(lambda g: g / g.norm(dim=-1, keepdim=True)),
    "norm of columns": of_matrices(lambda g: g / g.norm(dim=0, keepdim=True)),
    "order of rows": of_matrices(lambda g: g.flip(0)),
    "decay": lambda p, g: g + 0.1 * p if p.dim() > 1 else g,
    "orthogonal matrix": lambda p, g: torch.where(is_orthogonal(p, g), 2 * g, g) if p.dim() > 1 else g,
}
ELEMENTWISE: dict[str, Change] = {
    "root": lambda p, g: g.sign() * g.abs().sqrt(),
    "ratio": lambda p, g: g.clamp(-1, 1) / (p.abs() + 1),
    "finite": lambda p, g: g.nan_to_num(),
    "where": lambda p, g: torch.where(g * p > 0, g, torch.zeros_like(g)),
}
COUPLED: dict[str, Callable[[Sequence[Tensor]], Any]] = {
    "norm": lambda all_: 1 / (torch.stack([g.norm() for g in all_]).norm() + 1e-6),
    "clipped to 1": lambda all_: (1 / (torch.stack([g.norm() for g in all_]).norm() + 1e-6)).clamp(max=1),
    "clipped to 1e5": lambda all_: (1e5 / (torch.stack([g.norm() for g in all_]).norm() + 1e-6)).clamp(max=1),
    "max": lambda all_: 1 / max(g.abs().max() for g in all_),
    "mean": lambda all_: 1 / (1 + torch.stack([g.mean() for g in all_]).mean().abs()),
    "not finite": lambda all_: float(all(g.isfinite().all() for g in all_)),
    "count": lambda all_: 1 / len(all_),
}


@pytest.fixture(params=[True, False], ids=["registered", "unknown"])
def registered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, Momentum})
    return bool(request.param)


def parameters(shape: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(each, generator=generator)) for each in (shape, (64, 33), (7,))]


def gradient(like: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    g = torch.randn(like.shape, generator=generator)
    first = g.view(-1)[: g.numel() // 2]
    if kind == "zeros":
        first.zero_()
    elif kind == "one sign":
        first.abs_()
    elif kind == "NaN":
        first[:1].fill_(torch.nan)
    elif kind == "orthogonal":
        g -= like * ((like * g).sum(-1, keepdim=True) / (like * like).sum(-1, keepdim=True))
    else:
        g *= float(kind)
    return g


def bits_after(optimizer: Optimizer, kind: str) -> list[bytes]:
    generator = torch.Generator().manual_seed(1)
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(3):
        for p in mine:
            p.grad = gradient(p.detach(), kind, generator)
        optimizer.step()
    return [p.detach().numpy().tobytes() for p in mine]


def has_plain_bits(change: Change, shape: tuple[int, ...], kind: str, nvme_path: Path) -> bool:
    """Assert that, and return True if the first parameter was cut."""
    plain, optimizer = (Momentum(parameters(shape), change) for _ in range(2))
    swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    assert bits_after(optimizer, kind) == bits_after(plain, kind)
    swapped = swapper.of(optimizer)
    first = swapped.segments_of(optimizer.param_groups[0]["params"][0])
    swapped.close()
    return len(first) > 1


KINDS = ["1", "1e4", "1e-6", "zeros", "one sign", "NaN", "orthogonal"]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(300, 400), (120_000,)], ids=["matrix", "vector"])
@pytest.mark.parametrize("name", [*WHOLE, *OF_MATRICES])
def test_what_looks_at_a_whole_parameter_is_not_cut(
    name: str, shape: tuple[int, ...], kind: str, registered: bool, nvme_path: Path
) -> None:
    is_cut = has_plain_bits((WHOLE | OF_MATRICES)[name], shape, kind, nvme_path)
    assert is_cut == (registered and name in OF_MATRICES and len(shape) == 1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(300, 400), (120_000,), (30, 40, 100), (2, 3, 4, 50, 100)], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_elementwise_is_cut(
    name: str, shape: tuple[int, ...], kind: str, registered: bool, nvme_path: Path
) -> None:
    assert has_plain_bits(ELEMENTWISE[name], shape, kind, nvme_path) == registered


class Anchored(Optimizer):
    """Draws each element back to what it was when the optimizer was made, as state that is there then says."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"anchor": p.detach().clone(), "steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["steps"] += 1
                p.add_(p.grad + p - self.state[p]["anchor"], alpha=-self.param_groups[0]["lr"])


def test_what_has_made_state_of_values_is_cut(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, Anchored})
    plain, optimizer = (Anchored(parameters((300, 400))) for _ in range(2))
    swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    assert len(swapper.of(optimizer).segments_of(optimizer.param_groups[0]["params"][0])) > 1
    assert bits_after(optimizer, "1") == bits_after(plain, "1")
    swapper.of(optimizer).close()


@pytest.mark.parametrize("name", COUPLED)
def test_what_looks_at_all_parameters_is_refused(name: str, registered: bool, nvme_path: Path) -> None:
    optimizer = Momentum(parameters((300, 400)), lambda p, g: g, COUPLED[name])
    with pytest.raises(swapper.ConfigError, match="computes something else when it steps one parameter at a time"):
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))


def test_a_class_that_refuses_gradients_is_stepped_whole(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts it would have stepped some before it comes to those."""

    def finite(p: Tensor, g: Tensor) -> Tensor:
        if not g.isfinite().all():
            raise ValueError("not finite")
        return g

    monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, Momentum})
    assert not has_plain_bits(finite, (300, 400), "1", nvme_path)


class Sign(Optimizer):
    """Has no state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


def test_what_changes_nothing_yet_is_taken_if_it_is_registered(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rate of a warm-up may be too small for any bit to change, and no state says more of the class."""
    optimizer, plain = (Sign(parameters((300, 400))) for _ in range(2))
    optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 1e-20
    with pytest.raises(swapper.ConfigError, match="changed nothing in 8 trial steps"):
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, Sign})
    swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.01
    assert bits_after(optimizer, "1") == bits_after(plain, "1")
    swapper.of(optimizer).close()


class OtherStateOfMatrices(Optimizer):
    """Has `of_matrices` as the state of matrices alone, and `of_vectors` as that of vectors: an element is stepped."""

    def __init__(self, params: Any, of_matrices: dict[str, Any], of_vectors: dict[str, Any]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.kinds = of_vectors, of_matrices

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    for key, make in self.kinds[p.dim() > 1].items():
                        self.state[p].setdefault(key, make(p))
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("of_matrices", "of_vectors"),
    [
        ({"row": lambda p: p[0].clone(), "column": lambda p: p[:, 0].clone()}, {"square": torch.zeros_like}),
        ({"row": lambda p: p[0].clone()}, {}),
        ({}, {"square": torch.zeros_like}),
        ({"square": torch.zeros_like}, {"square": lambda p: None}),
        ({"square": torch.zeros_like}, {"square": lambda p: torch.zeros(())}),
    ],
    ids=["other", "more", "fewer", "None", "scalar"],
)
def test_what_has_other_state_of_matrices_is_not_cut(
    of_matrices: dict[str, Any], of_vectors: dict[str, Any], nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, OtherStateOfMatrices})
    plain, optimizer = (OtherStateOfMatrices(parameters((300, 400)), of_matrices, of_vectors) for _ in range(2))
    swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    assert len(swapper.of(optimizer).segments_of(optimizer.param_groups[0]["params"][0])) == 1
    assert bits_after(optimizer, "1") == bits_after(plain, "1")
    swapper.of(optimizer).close()
