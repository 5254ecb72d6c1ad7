"""Classes of optimizers whose `step` is not as torch's are: arguments, decorators, mocks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from training import Assigning, assert_same, backward, make_config, make_model, run, wrapped

import swapper
from swapper.optimizer import probe

pytestmark = pytest.mark.packs_too


class Required(torch.optim.AdamW):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class ByName(torch.optim.AdamW):
    def step(self, *, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class OfItsOwn(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(state["sum"], alpha=group["lr"])
        return loss


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("cls", [Required, ByName, OfItsOwn])
def test_a_step_that_requires_a_closure(
    nvme_path: Path, cls: Any, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if registered:
        monkeypatch.setattr("swapper.optimizer.probe._elementwise", {*swapper.optimizer.probe._elementwise, cls})

    def train(model: nn.Module, optimizer: Optimizer) -> list[float]:
        losses = []
        for seed in range(3):

            def closure(seed: int = seed) -> torch.Tensor:
                optimizer.zero_grad()
                return backward(model, seed)

            losses.append(optimizer.step(closure=closure).item())
        return losses

    plain, model = make_model(), make_model()
    expected = train(plain, cls(plain.parameters(), lr=1e-2))
    optimizer = cls(model.parameters(), lr=1e-2)
    with wrapped(optimizer, nvme_path):
        assert train(model, optimizer) == expected
        assert_same(plain, model)


class PolyakSteps(OfItsOwn):
    """Has a step size of the loss, where there is one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    size = group["lr"] if loss is None else min(group["lr"], float(loss) * 1e-3)
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(self.state[p]["sum"], alpha=size)
        return loss


class EvaluatesLater(OfItsOwn):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(None)
        with torch.enable_grad():
            return None if closure is None else closure()


class LooksAhead(OfItsOwn):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        return super().step(closure)


class OfSteps(OfItsOwn):
    """Is evaluated in another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(None if closure is None else closure.evaluate)


class OnlyByName(OfItsOwn):
    @torch.no_grad()
    def step(self, *, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class OfAnyArguments(OfItsOwn):
    @torch.no_grad()
    def step(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        return super().step(*args, **(named or ({} if args else {"closure": None})))


def trained(cls: Any, config: swapper.OffloadConfig | None, **given: Any) -> tuple[nn.Module, Any, list[Any]]:
    model = make_model()
    optimizer = cls(model.parameters(), lr=1e-2)
    if config is not None:
        swapper.wrap_optimizer(optimizer, config)
    results = []
    for seed in range(4):

        def closure(seed: int = seed) -> torch.Tensor:
            optimizer.zero_grad()
            backward(model, seed)
            return torch.tensor(2.0 + seed)

        results.append(optimizer.step(closure=closure, **given))
    return model, optimizer, results


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (PolyakSteps, "uses its closure for something else than the gradients"),
        (EvaluatesLater, "has changed parameters before it calls its closure"),
        (LooksAhead, "called its closure 2 times"),
        (OfSteps, "failed in a probe with a closure .*evaluate"),
    ],
)
def test_a_class_that_does_more_with_a_closure_is_refused_when_it_is_given_one(
    cls: Any, words: str, nvme_path: Path
) -> None:
    with pytest.raises(swapper.ConfigError, match=f"{cls.__name__}.step {words}"):
        trained(cls, make_config(nvme_path))


@pytest.mark.parametrize("cls", [OfItsOwn, OnlyByName, OfAnyArguments, torch.optim.AdamW])
def test_a_class_that_calls_a_closure_first_is_given_what_it_returns(cls: Any, nvme_path: Path) -> None:
    plain, _, expected = trained(cls, None)
    model, optimizer, results = trained(cls, make_config(nvme_path))
    assert results == expected
    assert_same(model, plain)
    swapper.of(optimizer).close()


class Scaled(OfItsOwn):
    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0, *, more: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None else p.grad * scale
        super().step(closure)
        return {"scale": scale}


def test_other_arguments_of_a_step_are_refused_unless_they_are_the_defaults(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = swapper.wrap_optimizer(Scaled(model.parameters(), lr=1e-2), make_config(nvme_path))
    assert "Scaled.step returns a dict; swapped it is called for each bucket" in caplog.text
    backward(model, 0)
    optimizer.step(scale=1.0, more=None)
    before = [p.detach().clone() for p in model.parameters()]
    for args, given, words in [((), {"scale": 0.5}, "scale"), ((None, 0.5), {"more": 1}, "scale, more")]:
        with pytest.raises(swapper.SwapError, match=f"Scaled.step was given {words}, and swapped it is called once"):
            optimizer.step(*args, **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        optimizer.step(other=1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.step()
    swapper.of(optimizer).close()


def test_a_step_that_requires_something_else_is_refused_by_name(nvme_path: Path) -> None:
    class WithLoss(torch.optim.SGD):
        def step(self, loss: Any, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    optimizer = WithLoss(make_model().parameters(), lr=1e-2)
    with pytest.raises(swapper.ConfigError, match="requires loss"), wrapped(optimizer, nvme_path):
        pass
    assert "step" not in vars(optimizer)


def test_a_step_that_a_user_has_decorated_is_stepped_with_its_decorator(nvme_path: Path) -> None:
    class Decorated(torch.optim.SGD):
        pass

    def halved(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def decorated(self: Optimizer, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
            return step(self, closure)

        return decorated

    torch.optim.SGD(make_model().parameters(), lr=1e-2)  # From here on torch's wrapper is around its step.
    Decorated.step = halved(torch.optim.SGD.step)  # type: ignore[method-assign]
    plain, model = make_model(), make_model()
    run(plain, Decorated(plain.parameters(), lr=1e-2, momentum=0.9), range(3))
    optimizer = Decorated(model.parameters(), lr=1e-2, momentum=0.9)
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(3))
        assert_same(plain, model)


def test_a_mocked_step_of_the_class_is_refused_and_the_reason_given(nvme_path: Path) -> None:
    model = make_model()
    with mock.patch.object(torch.optim.AdamW, "step"):
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(swapper.ConfigError, match=r"AdamW\.step is a MagicMock"), wrapped(optimizer, nvme_path):
            pass


def test_a_mock_with_the_signature_of_the_step_is_called(nvme_path: Path) -> None:
    model = make_model()
    with mock.patch.object(torch.optim.AdamW, "step", autospec=True) as step:
        optimizer = torch.optim.AdamW(model.parameters())
        with wrapped(optimizer, nvme_path):
            run(model, optimizer, range(1))
        assert step.called and all(call.args[0] is optimizer for call in step.call_args_list[-1:])


def test_the_step_of_a_wrapped_optimizer_can_be_mocked(nvme_path: Path) -> None:
    plain, model = make_model(), make_model()
    run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with wrapped(optimizer, nvme_path):
        with mock.patch.object(optimizer, "step") as step:
            run(model, optimizer, range(3))
        assert step.call_count == 3
        run(model, optimizer, range(2))
        assert_same(plain, model)


def user_step(optimizer: Optimizer) -> Callable[..., Any]:
    def step(closure: Any = None) -> None:
        type(optimizer).step(optimizer)

    return step


@pytest.mark.parametrize("replace", [mock.MagicMock, user_step])
def test_a_step_that_was_replaced_on_the_object_is_refused(nvme_path: Path, replace: Callable[..., Any]) -> None:
    optimizer = torch.optim.AdamW(make_model().parameters())
    optimizer.step = step = replace(optimizer)  # type: ignore[method-assign]
    with pytest.raises(swapper.ConfigError, match="replaced on the object"), wrapped(optimizer, nvme_path):
        pass
    assert optimizer.step is step


class Around(Optimizer):
    """Keeps entries of its own in the state of the optimizer that it wraps, as Lookahead of timm does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


def test_a_class_around_another_optimizer_is_told_both_ways_out(nvme_path: Path) -> None:
    outer = Around(torch.optim.AdamW(make_model().parameters()))
    with pytest.raises(swapper.ConfigError, match=r"wrap_optimizer the inner one, or, .*device to none"):
        swapper.wrap_optimizer(outer, {"nvme_path": nvme_path, "offload_optimizer": {"device": "nvme"}})


class CountsInItsGroups(Optimizer):
    """Counts steps in its groups before it looks for gradients, and passes by a group that is empty."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "n": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["n"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.add_(momentum, alpha=-group["lr"] / group["n"])


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"step_in_backward": True}], ids=str)
def test_a_group_without_any_gradient_is_counted_as_ever(options: dict[str, Any], nvme_path: Path) -> None:
    def train(swapped: bool) -> tuple[list[int], list[nn.Parameter]]:
        parameters = [nn.Parameter(torch.linspace(-1, 1, 50 + i)) for i in range(4)]
        optimizer = CountsInItsGroups([{"params": parameters[:1]}, {"params": parameters[1:3]}])
        optimizer.add_param_group({"params": parameters[3:]})
        optimizer.param_groups.append({"params": [], "lr": 0.1, "n": 0})
        if swapped:
            config = swapper.OffloadConfig(
                nvme_path=nvme_path,
                pool_bytes="8MiB",
                bucket_bytes="16KiB",
                offload_optimizer={"device": "nvme", **options},
            )
            swapper.wrap_optimizer(optimizer, config)
        for used in ([1], [0, 1], [], [2], [0, 1, 2], [0]):
            for i in used:
                parameters[i].pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        counted = [group["n"] for group in optimizer.param_groups]
        if swapped:
            optimizer.swapper.close()  # type: ignore[attr-defined]
        return counted, parameters

    (counted, parameters), (expected, plain) = train(True), train(False)
    assert counted == expected == [6, 6, 6, 0]
    assert all(torch.equal(p, q) for p, q in zip(parameters, plain, strict=True))


class Box:
    def __init__(self, start: Any) -> None:
        self.number = start


class CountsInAnAttribute(torch.optim.AdamW):
    """Every so many steps it averages, as Lookahead does. It counts them in attributes of its own."""

    def __init__(self, params: Any, every: int, kind: str) -> None:
        super().__init__(params, lr=0.01)
        self.every, self.kind = every, kind
        self.best = float("nan")
        self.count = itertools.count(1)
        start = {"array": np.int64(0), "scalar": torch.tensor(0), "tensor": torch.zeros(1)}.get(kind, 0)
        self.calls = {"dict": {"a": start}, "list": [start], "box": Box(start), "deep": {"a": [Box(start)]}}.get(
            kind, start
        )

    def counted(self) -> Any:
        if self.kind == "count":
            return next(self.count)
        if self.kind == "dict":
            self.calls["a"] += 1
            return self.calls["a"]
        if self.kind == "list":
            self.calls[0] += 1
            return self.calls[0]
        if self.kind in ("box", "deep"):
            box = self.calls if self.kind == "box" else self.calls["a"][0]
            box.number += 1
            return box.number
        if self.kind != "none":
            self.calls += 1
        return self.calls

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        number = self.counted()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if number % self.every == self.every - 1:
                p.copy_(slow.lerp_(p, 0.5))
        return loss


class Registered(CountsInAnAttribute):
    """Somebody says that it is elementwise."""


COUNTERS = ["int", "array", "scalar", "tensor", "dict", "list", "box", "deep", "count"]


@pytest.mark.parametrize("made", [CountsInAnAttribute, Registered])
@pytest.mark.parametrize("kind", COUNTERS)
@pytest.mark.parametrize("every", [2, 7, 1000])
def test_a_class_that_counts_its_steps_in_an_attribute_is_refused(
    every: int, kind: str, made: type[CountsInAnAttribute], nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count buckets. However seldom that changes what it computes: trials make a few steps only."""
    monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, Registered})
    optimizer = made(make_model().parameters(), every, kind)
    with pytest.raises(swapper.ConfigError, match=r"changes its attribute (calls|count)"):
        swapper.wrap_optimizer(optimizer, {"nvme_path": nvme_path, "offload_optimizer": {"device": "nvme"}})
    assert optimizer.counted() == 1  # Trials have counted in copies.


@pytest.mark.parametrize("made", [CountsInAnAttribute, Registered])
def test_attributes_that_stay_are_no_counters(
    made: type[CountsInAnAttribute], nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, Registered})
    plain, model = make_model(), make_model()
    run(plain, made(plain.parameters(), 1000, "none"), range(3))
    optimizer = made(model.parameters(), 1000, "none")
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(3))
        assert_same(plain, model)


class Velocity(Optimizer):
    """Momentum, which a subclass reaches otherwise than by the name of its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.views: dict[Any, Any] = {}

    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.view(-1).sub_(self.velocity(p).view(-1).mul_(0.9).add_(p.grad.view(-1)), alpha=group["lr"])


class InAnAttribute(Velocity):
    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        if not self.state[p]:
            self.state[p]["velocity"] = torch.zeros_like(p)
            self.views[p] = self.state[p]["velocity"].view(-1)
        return self.views[p]


class OnTheParameter(Velocity):
    def velocity(self, p: Any) -> torch.Tensor:
        if not self.state[p]:
            self.state[p]["velocity"] = torch.zeros_like(p)
            p.view_of_velocity = self.state[p]["velocity"].view(-1)
        return p.view_of_velocity


class Twice(Velocity):
    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        if not self.state[p]:
            both = torch.zeros(2, *p.shape)
            self.state[p].update(both=both, velocity=[both[0]])
        self.state[p]["velocity"][0].add_(1e-3)
        return self.state[p]["both"][0]


class OfTheParameter(Velocity):
    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        self.state[p].setdefault("now", p.data)
        return self.state[p].setdefault("velocity", torch.zeros_like(p))


@pytest.mark.parametrize("made", [InAnAttribute, OnTheParameter, Twice, OfTheParameter])
def test_state_whose_memory_something_else_has_is_refused(made: type[Velocity], nvme_path: Path) -> None:
    """A record has a copy of each tensor: what was written through the other one was not in the state that is saved."""
    model = make_model()
    optimizer = made(model.parameters())
    with pytest.raises(swapper.ConfigError, match=r"memory of its state\['|and state\['velocity'\]\[0\] in the same"):
        swapper.wrap_optimizer(optimizer, {"nvme_path": nvme_path, "offload_optimizer": {"device": "nvme"}})
    run(model, optimizer, range(2))


class Parts(Velocity):
    """Two halves of one tensor, which nothing else has, are as good as two tensors."""

    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        if not self.state[p]:
            both = torch.zeros(2, *p.shape)
            self.state[p].update(velocity=both[0], squares=both[1])
        self.state[p]["squares"].addcmul_(p.grad, p.grad)
        return self.state[p]["velocity"]


class FlatParameter(Velocity):
    """A view of each parameter that a step has made without gradients, as heavyball's classes have."""

    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        self.views.setdefault(p, [p.view(-1)])[0].mul_(0.99)
        return self.state[p].setdefault("velocity", torch.zeros_like(p))


class Exchanges(Velocity):
    """Two buffers in turn: what is written now is the other one in the next step."""

    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state.update(velocity=torch.zeros_like(p), former=torch.zeros_like(p))
        state["velocity"], state["former"] = state["former"], state["velocity"]
        return state["velocity"].copy_(state["former"])


@pytest.mark.parametrize("made", [Parts, FlatParameter, Exchanges])
def test_views_that_do_no_harm_are_not_refused(made: type[Velocity], nvme_path: Path) -> None:
    plain, model = make_model(), make_model()
    expected, optimizer = made(plain.parameters()), made(model.parameters())
    run(plain, expected, range(3))
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(3))
        assert_same(plain, model)
        for state, other in zip(optimizer.state_dict()["state"].values(), expected.state.values(), strict=True):
            assert all(torch.equal(value, other[key]) for key, value in state.items())


class TwoPasses(Velocity):
    """Sharpness-aware: `closure` has a default, and it does not work without."""

    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        return self.views[p]  # What a call of the closure would have put there.


def test_a_class_that_fails_in_the_trial_is_told_what_to_do(nvme_path: Path) -> None:
    optimizer = TwoPasses(make_model().parameters())
    with pytest.raises(swapper.ConfigError, match=r"(?s)failed in a trial step .*KeyError.*set offload_optim"):
        swapper.wrap_optimizer(optimizer, {"nvme_path": nvme_path, "offload_optimizer": {"device": "nvme"}})


class NeedsMuch(Velocity):
    """Has memory for its first steps only, as others take it meanwhile."""

    takes: Any = None
    works = 0
    wants_closure = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        NeedsMuch.works -= closure is not None or not self.wants_closure
        if NeedsMuch.works < 0:
            NeedsMuch.takes()
        super().step()

    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        return self.state[p].setdefault("velocity", torch.zeros_like(p))


def of_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


TAKES: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "torch": (lambda: torch.empty(1 << 60, dtype=torch.uint8), MemoryError),
    "Python": (lambda: bytearray(1 << 60), MemoryError),
    "device": (of_a_device, torch.OutOfMemoryError),
}


@pytest.mark.parametrize(
    ("works", "wants_closure"), [(0, False), (7, False), (40, False), (0, True)], ids=["0", "7", "40", "closure"]
)
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("takes", TAKES)
def test_memory_that_is_short_in_a_trial_says_nothing_of_the_class(
    takes: str, works: int, registered: bool, wants_closure: bool, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if registered:
        monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, NeedsMuch})
    take, expected = TAKES[takes]
    for name, value in {"takes": take, "works": works, "wants_closure": wants_closure}.items():
        monkeypatch.setattr(NeedsMuch, name, value)
    model = make_model()
    optimizer = NeedsMuch(model.parameters())
    config = {"nvme_path": nvme_path, "offload_optimizer": {"device": "nvme"}}
    with pytest.raises(expected, match="memory is short for a trial step of NeedsMuch"):
        swapper.wrap_optimizer(optimizer, config)
    assert not hasattr(optimizer, "swapper") and not list(nvme_path.iterdir())
    monkeypatch.setattr(NeedsMuch, "works", 1 << 60)
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(2))


class HasModes(Velocity):
    """As those of schedulefree, which fail in a step until they are told that it trains."""

    training = False

    def train(self) -> None:
        self.training = True

    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise RuntimeError("not in train mode")
        return self.state[p].setdefault("velocity", torch.zeros_like(p))


def test_a_class_with_modes_that_fails_in_the_trial_is_to_be_set_to_train(nvme_path: Path) -> None:
    optimizer = HasModes(make_model().parameters())
    with pytest.raises(swapper.ConfigError, match=r"(?s)not in train mode.*Call its train\(\) first"):
        swapper.wrap_optimizer(optimizer, {"nvme_path": nvme_path, "offload_optimizer": {"device": "nvme"}})
    optimizer.train()
    with wrapped(optimizer, nvme_path):
        pass


class FindsByAddress(Velocity):
    """As heavyball's classes find the parameter of a view."""

    def velocity(self, p: torch.Tensor) -> torch.Tensor:
        self.views[p] = [p.data_ptr()]
        return self.state[p].setdefault("velocity", torch.zeros_like(p))


def test_an_attribute_with_tensors_as_keys_is_named_in_one_line(nvme_path: Path) -> None:
    optimizer = FindsByAddress(make_model().parameters())
    with pytest.raises(swapper.ConfigError, match=r"changes its attribute views in a step"):
        swapper.wrap_optimizer(optimizer, {"nvme_path": nvme_path, "offload_optimizer": {"device": "nvme"}})


@pytest.mark.parametrize("native", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 with masters"])
@pytest.mark.parametrize("registered", [False, True])
def test_a_class_that_assigns_the_data_of_a_parameter(
    registered: bool, dtype: torch.dtype, native: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be shown a piece of it, or its master: what it assigns is the parameter's."""
    if registered:
        monkeypatch.setattr("swapper.optimizer.probe._elementwise", {*swapper.optimizer.probe._elementwise, Assigning})
    masters = dtype is torch.bfloat16

    def parameters(of: torch.dtype) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(300, 401), (70,), (257, 129)]
        return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(of)) for shape in shapes]

    plain, mine = parameters(torch.float32), parameters(dtype)
    optimizer = swapper.wrap_optimizer(
        Assigning(mine, lr=0.1),
        swapper.OffloadConfig(
            nvme_path=str(nvme_path),
            pool_bytes="16MiB",
            bucket_bytes="256KiB",
            offload_optimizer={"device": "nvme", "master_weights": masters, "native_step": native},
        ),
    )
    reference = Assigning(plain, lr=0.1)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for p, q in zip(plain, mine, strict=True):
            q.grad = torch.randn(q.shape, generator=generator).to(dtype)
            p.grad = q.grad.float()
        reference.step()
        optimizer.step()
        for p, q in zip(plain, mine, strict=True):
            assert torch.equal(p.detach().to(dtype), q.detach())
            assert torch.equal(reference.state[p]["sum"], swapper.of(optimizer).state(q)["sum"])
    assert swapper.of(optimizer).stats().masters_reset == 0
    swapper.of(optimizer).close()


@dataclasses.dataclass
class Mean:
    value: torch.Tensor
    steps: int = 0


class OddState(Optimizer):
    """Its state has a tensor in an object, and one that is expanded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["mean"] = Mean(torch.zeros_like(p))
                state["weight"] = torch.full((1,), 0.5).expand(p.shape)
            mean = state["mean"]
            mean.steps += 1
            mean.value.mul_(0.9).add_(p.grad)
            p.sub_(0.1 * mean.value * state["weight"] / mean.steps)


@pytest.mark.parametrize("registered", [False, True])
def test_state_in_an_object_and_state_that_is_expanded(
    nvme_path: Path, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if registered:
        monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, OddState})
    plain, model = make_model(), make_model()
    run(plain, OddState(plain.parameters()), range(3))
    optimizer = OddState(model.parameters())
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(3))
        assert_same(plain, model)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_adafactor_that_takes_its_eps_from_another_dtype_of_the_group_is_refused(
    dtypes: tuple[torch.dtype, torch.dtype], foreach: bool, nvme_path: Path
) -> None:
    """Torch takes that of the first parameter for all of a group; their buckets may be others."""
    model = nn.Sequential(*(nn.LayerNorm(60000, dtype=dtype) for dtype in dtypes))
    optimizer = torch.optim.Adafactor(model.parameters(), foreach=foreach)
    with pytest.raises(swapper.ConfigError, match=r"group for each dtype.*eps"):
        swapper.wrap_optimizer(optimizer, _mixed_config(nvme_path))
    assert not list(nvme_path.iterdir())


def _mixed_config(nvme_path: Path) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=nvme_path, pool_bytes="4MiB", bucket_bytes="64KiB", offload_optimizer={"device": "nvme"}
    )


@pytest.mark.parametrize("how", ["groups", "eps"])
def test_adafactor_with_an_eps_of_its_own_steps_several_dtypes(how: str, nvme_path: Path) -> None:
    def train(swap: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [nn.LayerNorm(60000, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
        if how == "groups":
            optimizer = torch.optim.Adafactor([{"params": list(layer.parameters())} for layer in layers])
        else:
            optimizer = torch.optim.Adafactor(nn.Sequential(*layers).parameters(), eps=(1e-30, 1e-3))
        if swap:
            optimizer = swapper.wrap_optimizer(optimizer, _mixed_config(nvme_path))
        for _ in range(3):
            for layer in layers:
                for p in layer.parameters():
                    p.grad = torch.randn_like(p) * 1e-4
            optimizer.step()
        return [p.detach() for layer in layers for p in layer.parameters()]

    for plain, swapped in zip(train(swap=False), train(swap=True), strict=True):
        assert torch.equal(plain, swapped)


def test_adafactor_whose_other_dtype_comes_later_is_refused(nvme_path: Path) -> None:
    first, second = nn.LayerNorm(60000), nn.LayerNorm(60000, dtype=torch.bfloat16)
    optimizer = swapper.wrap_optimizer(torch.optim.Adafactor(first.parameters()), _mixed_config(nvme_path))
    optimizer.param_groups[0]["params"].extend(second.parameters())
    for p in (*first.parameters(), *second.parameters()):
        p.grad = torch.ones_like(p)
    with pytest.raises(swapper.ConfigError, match="group for each dtype"):
        optimizer.step()


class CountsInATensor(Optimizer):
    """As those of torch-optimi: a tensor of the group, which it makes in its first step, is counted up in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "step": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["step"] is None:
                group["step"] = torch.tensor(0, dtype=torch.int32)
            group["step"].add_(1)
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    p.sub_(mean, alpha=group["lr"] / (1 - 0.9 ** group["step"].item()))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_class_that_counts_its_steps_in_a_tensor_of_the_group_is_swapped(groups: int, nvme_path: Path) -> None:
    def made(model: nn.Module) -> Optimizer:
        parameters = [*model.parameters()]
        return CountsInATensor([{"params": parameters[number::groups]} for number in range(groups)])

    plain, model = make_model(), make_model()
    run(plain, made(plain))
    optimizer = made(model)
    with wrapped(optimizer, nvme_path):
        run(model, optimizer)
        assert_same(plain, model)
        assert [int(group["step"]) for group in optimizer.param_groups] == [4] * groups
