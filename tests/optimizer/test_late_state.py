"""State that a class first shares with something else after many steps, when its trial is long over; and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from training import assert_same, backward, make_model, run, wrapped

import swapper

pytestmark = pytest.mark.packs_too

LATE = 11
"""The step at which it does: the trial has eight."""


class Momentum(Optimizer):
    """Calls `more` with the state of each parameter, before the parameter is changed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, momentum=torch.zeros_like(p), other=torch.zeros_like(p))
                state["step"] += 1
                self.more(p, state, state["step"])
                state["momentum"].mul_(0.9).add_(p.grad)
                p.add_(state["momentum"], alpha=-group["lr"])


class ViewOfState(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step >= LATE:
            state.setdefault("flat", state["momentum"].view(-1)).add_(1e-3)


class SameTensor(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step >= LATE:
            state.setdefault("same", state["momentum"]).add_(1e-3)


class InAList(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step >= LATE:
            state.setdefault("list", [state["momentum"]])[0].add_(1e-3)


class KnownName(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step == LATE:
            state["other"] = state["momentum"]
        state["other"].add_(1e-3)


class BothNew(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step == LATE:
            state["momentum"] = state["other"] = torch.zeros_like(p)
        state["other"].add_(1e-3)


@pytest.mark.parametrize("native_step", ["auto", "on"])
@pytest.mark.parametrize("made", [ViewOfState, SameTensor, InAList, KnownName, BothNew])
def test_two_names_that_a_late_step_puts_on_one_memory_are_an_error(
    made: type[Momentum], native_step: str, nvme_path: Path
) -> None:
    model = make_model()
    optimizer = made(model.parameters())
    with wrapped(optimizer, nvme_path, native_step=native_step):
        run(model, optimizer, range(LATE - 1))
        with pytest.raises(swapper.ConfigError, match=rf"{made.__name__} has its state\['momentum'\] and state\['"):
            run(model, optimizer, range(LATE, LATE + 1))


class OfTheParameter(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step >= LATE:
            state["momentum"].add_(state.setdefault("now", p.data), alpha=1e-3)


def test_the_data_of_a_parameter_that_moves_is_no_state(nvme_path: Path) -> None:
    plain, model = make_model(), make_model()
    expected, optimizer = OfTheParameter(plain.parameters()), OfTheParameter(model.parameters())
    settings = {"nvme_path": nvme_path, "pool_bytes": "16MiB", "offload_optimizer": {"device": "nvme"}}
    swapper.offload(model, optimizer, {**settings, "offload_param": {"device": "nvme"}})
    run(plain, expected, range(LATE - 1))
    run(model, optimizer, range(LATE - 1))
    assert_same(plain, model)
    with pytest.raises(swapper.ConfigError, match=r"has put the data of a parameter into its state\['now'\]"):
        run(model, optimizer, range(LATE, LATE + 1))


class Exchanges(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step >= LATE:
            state["momentum"], state["other"] = state["other"], state["momentum"]


class Replaces(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step >= LATE:
            state["momentum"], state["late"] = state["momentum"] * 0.5, state["momentum"].clone()


class FormerOne(Momentum):
    """Two names for one tensor, from the first step on, of which none is written to."""

    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        state["average"] = state["former"] = state.get("average", torch.zeros_like(p)) * 0.9 + p.grad
        state["momentum"].add_(state["former"], alpha=0.1)


@pytest.mark.parametrize("made", [Exchanges, Replaces, FormerOne])
def test_what_does_no_harm_is_not_refused(made: type[Momentum], nvme_path: Path) -> None:
    plain, model = make_model(), make_model()
    expected, optimizer = made(plain.parameters()), made(model.parameters())
    run(plain, expected, range(LATE + 4))
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(LATE + 4))
        assert_same(plain, model)


class KeepsGradient(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if "gradient" in state:
            state["momentum"].add_(state["gradient"], alpha=0.5)
        state["gradient"] = p.grad


class KeepsGradientLate(Momentum):
    def more(self, p: torch.Tensor, state: dict[str, Any], step: int) -> None:
        if step >= LATE:
            KeepsGradient.more(self, p, state, step)  # type: ignore[arg-type]


def cleared(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def zeroed(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def zeroed_by_model(model: torch.nn.Module, optimizer: Any) -> None:
    model.zero_grad(set_to_none=False)


def left(model: torch.nn.Module, optimizer: Any) -> None: ...


@pytest.mark.parametrize("gradients", ["nvme", "none"])
@pytest.mark.parametrize("clear", [cleared, zeroed, zeroed_by_model, left])
@pytest.mark.parametrize("made", [KeepsGradient, KeepsGradientLate])
def test_a_gradient_that_the_state_has_is_exact_or_refused(
    made: type[Momentum],
    clear: Callable[[torch.nn.Module, Any], None],
    gradients: str,
    nvme_path: Path,
) -> None:
    """Where the next gradient comes in the same tensor, plain PyTorch has it in the state at once."""
    plain, model = make_model(), make_model()
    expected, optimizer = made(plain.parameters()), made(model.parameters())
    settings = {"nvme_path": nvme_path, "pool_bytes": "16MiB", "offload_optimizer": {"device": "nvme"}}
    swapper.wrap_optimizer(optimizer, {**settings, "offload_gradient": {"device": gradients}})
    try:
        for seed in range(LATE + 3):
            for net, each in ((plain, expected), (model, optimizer)):
                backward(net, seed)
                each.step()
                clear(net, each)
    except swapper.ConfigError as error:
        assert "has kept a gradient itself in its state['gradient']" in str(error)
        assert clear is not cleared
    else:
        assert_same(plain, model)
    finally:
        swapper.of(optimizer).close()
