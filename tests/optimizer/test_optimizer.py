"""Wrapping converts the user's own optimizer, and everything around an optimizer goes on working."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import signal
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import forks_at_work
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from training import (
    MasterWeights,
    adamw,
    assert_same,
    assert_same_state,
    backward,
    make_config,
    make_model,
    run,
    same_bits,
    wrapped,
)

import swapper

Scenario = Callable[[nn.Module, Optimizer], None]


def scheduler_attached_after(model: nn.Module, optimizer: Optimizer) -> None:
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
    for seed in range(6):
        backward(model, seed)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def accumulation(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(9):
        backward(model, seed)
        if seed % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def zero_grad_without_a_step(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(6):
        backward(model, seed)
        if seed % 2:
            optimizer.step()
        optimizer.zero_grad()


def gradients_kept_as_zeros(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(4):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def closure(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(4):
        calls = []

        def evaluate(seed: int = seed, calls: list[int] = calls) -> torch.Tensor:
            assert torch.is_grad_enabled()
            calls.append(seed)
            optimizer.zero_grad()
            return backward(model, seed)

        loss = optimizer.step(evaluate)
        assert isinstance(loss, torch.Tensor) and loss.requires_grad
        assert calls == [seed], "the closure is called once a step"


def clipping_by_norm_and_value(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(4):
        backward(model, seed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()


def frozen_then_thawed(model: nn.Module, optimizer: Optimizer) -> None:
    model[0].requires_grad_(False)
    run(model, optimizer, range(2))
    model[0].requires_grad_(True)
    run(model, optimizer, range(2, 4))


def missing_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(5):
        backward(model, seed)
        for i, p in enumerate(model.parameters()):
            if (i + seed) % 3 == 0:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    optimizer.step()  # No gradient at all.


def options_changed_between_steps(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 / (seed + 1)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * seed
        run(model, optimizer, range(seed, seed + 1))


def a_scaler(model: nn.Module, optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        loss = model(torch.randn(4, 40, generator=generator)).square().mean()
        if seed == 2:
            loss = loss * float("inf")  # The scaler skips this step.
        scaler.scale(loss).backward()
        if seed % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


SCENARIOS: list[Scenario] = [
    scheduler_attached_after,
    accumulation,
    zero_grad_without_a_step,
    gradients_kept_as_zeros,
    closure,
    clipping_by_norm_and_value,
    frozen_then_thawed,
    missing_gradients,
    options_changed_between_steps,
    a_scaler,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_same_bits_as_plain_pytorch(nvme_path: Path, scenario: Scenario) -> None:
    plain, swapped = make_model(), make_model()
    plain_optimizer, optimizer = adamw(plain), adamw(swapped)
    scenario(plain, plain_optimizer)
    with wrapped(optimizer, nvme_path):
        scenario(swapped, optimizer)
        assert_same(plain, swapped)
        assert_same_state(plain_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_with_fused_steps(nvme_path: Path, fused: bool) -> None:
    plain, swapped = make_model(), make_model()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=fused)
    optimizer = torch.optim.AdamW(swapped.parameters(), lr=1e-2, fused=fused)
    a_scaler(plain, reference)
    with wrapped(optimizer, nvme_path):
        a_scaler(swapped, optimizer)
        assert_same(plain, swapped)


def test_the_object_stays_what_it_was(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    groups, defaults = optimizer.param_groups, optimizer.defaults
    with wrapped(optimizer, nvme_path):
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.param_groups is groups and optimizer.defaults is defaults
        run(model, optimizer)
        assert optimizer.param_groups is groups
        assert list(optimizer.state) == list(model.parameters()) and isinstance(optimizer.state, defaultdict)
        assert "AdamW" in repr(optimizer)
        assert all(p is q for p, q in zip(groups[0]["params"], model.parameters(), strict=True))


def test_a_scheduler_attached_before_wrapping(nvme_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def train(swap: bool) -> nn.Module:
        model = make_model()
        optimizer = adamw(model)
        schedule = CosineAnnealingLR(optimizer, 6)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for seed in range(4):
            run(model, optimizer, range(seed, seed + 1))
            schedule.step()
        if swap:
            swapper.unwrap_optimizer(optimizer)
            run(model, optimizer, range(4, 5))
            schedule.step()
        else:
            run(model, optimizer, range(4, 5))
        return model

    assert_same(train(False), train(True))
    assert not [str(w.message) for w in recwarn]


def test_a_scheduler_that_steps_first_is_still_warned_about(nvme_path: Path) -> None:
    optimizer = adamw(make_model())
    with wrapped(optimizer, nvme_path):
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        with pytest.warns(UserWarning, match="lr_scheduler.step"):
            schedule.step()


def test_user_hooks_fire_once_a_step(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    with wrapped(optimizer, nvme_path) as swapped:
        assert len(swapped._plan.buckets) > 2
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        run(model, optimizer, range(3))
    assert calls == ["pre", "post"] * 3


def test_several_groups(nvme_path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decay = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        return [{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 5e-3, "betas": (0.5, 0.9)}]

    plain, swapped = make_model(), make_model()
    run(plain, torch.optim.AdamW(groups(plain), lr=1e-2))
    optimizer = torch.optim.AdamW(groups(swapped), lr=1e-2)
    with wrapped(optimizer, nvme_path):
        run(swapped, optimizer)
        assert_same(plain, swapped)


def test_named_parameters(nvme_path: Path) -> None:
    plain, swapped = make_model(), make_model()
    reference = torch.optim.AdamW(plain.named_parameters(), lr=1e-2)
    run(plain, reference)
    optimizer = torch.optim.AdamW(swapped.named_parameters(), lr=1e-2)
    with wrapped(optimizer, nvme_path):
        run(swapped, optimizer)
        assert_same(plain, swapped)
        assert_same_state(reference.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_add_param_group_in_the_middle(nvme_path: Path, masters: bool, device: str) -> None:
    dtype = torch.bfloat16 if masters else torch.float32

    def train(swap: bool) -> nn.Module:
        model = make_model(dtype)
        first, second = list(model[0].parameters()), [p for m in model[1:] for p in m.parameters()]
        optimizer: Any
        if swap:
            optimizer = torch.optim.AdamW(first, lr=1e-2)
            swapper.wrap_optimizer(optimizer, make_config(nvme_path, master_weights=masters, device=device))
        elif masters:
            optimizer = MasterWeights(first, lambda p: torch.optim.AdamW(p, lr=1e-2))
        else:
            optimizer = torch.optim.AdamW(first, lr=1e-2)
        run(model, optimizer, range(2))
        model.zero_grad()
        if isinstance(optimizer, MasterWeights):
            late = [nn.Parameter(p.detach().float()) for p in second]
            optimizer.parameters += second
            optimizer.masters += late
            optimizer.optimizer.add_param_group({"params": late, "lr": 1e-3})
        else:
            optimizer.add_param_group({"params": second, "lr": 1e-3})
        run(model, optimizer, range(2, 4))
        if swap:
            assert all(swapper.of(optimizer).state(p) for p in model.parameters())
            swapper.of(optimizer).close()
        return model

    assert_same(train(False), train(True))


def test_parameters_taken_out_of_a_group(nvme_path: Path) -> None:
    def train(swap: bool) -> nn.Module:
        model = make_model()
        optimizer = adamw(model)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        run(model, optimizer, range(2))
        for p in optimizer.param_groups[0]["params"][:2]:
            optimizer.state.pop(p, None)
        del optimizer.param_groups[0]["params"][:2]
        run(model, optimizer, range(2, 4))
        if swap:
            swapper.of(optimizer).close()
        return model

    assert_same(train(False), train(True))


def test_several_optimizers_share_one_pool(nvme_path: Path) -> None:
    config = make_config(nvme_path)
    plain, swapped = [make_model() for _ in range(2)], [make_model() for _ in range(2)]
    references = [adamw(m) for m in plain]
    optimizers = [swapper.wrap_optimizer(adamw(m), config) for m in swapped]
    assert swapper.of(optimizers[0])._pool is swapper.of(optimizers[1])._pool
    assert len(list(nvme_path.iterdir())) == 1
    for seed in range(4):
        for model in [*plain, *swapped]:
            backward(model, seed)
        for optimizer in [*references, *optimizers]:
            optimizer.step()
            optimizer.zero_grad()
    swapper.of(optimizers[0]).close()
    run(plain[1], references[1], range(4, 6))
    run(swapped[1], optimizers[1], range(4, 6))
    for a, b in zip(plain, swapped, strict=True):
        assert_same(a, b)
    swapper.of(optimizers[1]).close()
    assert not list(nvme_path.iterdir())


def test_two_optimizers_on_two_threads(nvme_path: Path) -> None:
    config = make_config(nvme_path)
    models = [make_model() for _ in range(3)]
    plain = make_model()
    run(plain, adamw(plain), range(8))
    optimizers = [swapper.wrap_optimizer(adamw(m), config) for m in models]
    workers = [threading.Thread(target=run, args=(m, o, range(8))) for m, o in zip(models, optimizers, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for model, optimizer in zip(models, optimizers, strict=True):
        assert_same(plain, model)
        swapper.of(optimizer).close()


# --- State dicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["plain", "swapped"])
@pytest.mark.parametrize("resume", ["plain", "swapped"])
@pytest.mark.parametrize("through", ["memory", "file"])
def test_resume_in_all_four_directions(nvme_path: Path, start: str, resume: str, through: str) -> None:
    reference = make_model()
    run(reference, adamw(reference), range(6))

    first = make_model()
    optimizer = adamw(first)
    if start == "swapped":
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    run(first, optimizer, range(3))
    saved: Any = {"model": first.state_dict(), "optimizer": optimizer.state_dict()}
    if through == "file":
        file = io.BytesIO()
        torch.save(saved, file)
        saved = torch.load(io.BytesIO(file.getvalue()))
    second = make_model()
    later = adamw(second)
    if resume == "swapped":
        swapper.wrap_optimizer(later, make_config(nvme_path))
    later.load_state_dict(saved["optimizer"])
    second.load_state_dict(saved["model"])
    run(second, later, range(3, 6))
    assert_same(reference, second)
    for o in (optimizer, later):
        if hasattr(o, "swapper"):
            swapper.of(o).close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_first", [True, False])
def test_resume_with_masters(nvme_path: Path, dtype: torch.dtype, model_first: bool) -> None:
    reference = make_model(dtype)
    masters = MasterWeights(list(reference.parameters()), lambda p: torch.optim.AdamW(p, lr=1e-2))
    run(reference, masters, range(6))

    first, second = make_model(dtype), make_model(dtype)
    optimizer, later = adamw(first), adamw(second)
    with wrapped(optimizer, nvme_path, master_weights=True):
        run(first, optimizer, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(first.state_dict())
    for i, p in enumerate(first.parameters()):
        master = saved["state"][i]["master_param"]
        assert master.dtype is torch.float32 and master.shape == p.shape
        assert same_bits(master.to(dtype), p)
    with wrapped(later, nvme_path, master_weights=True) as swapped:
        if model_first:
            second.load_state_dict(weights)
        later.load_state_dict(saved)
        if not model_first:
            second.load_state_dict(weights)
        assert_same_state(saved, later.state_dict())
        run(second, later, range(3, 6))
        assert swapped.stats().masters_reset == 0
    assert_same(reference, second)


def test_a_state_dict_is_a_snapshot_that_outlives_the_optimizer(nvme_path: Path) -> None:
    model, plain = make_model(), make_model()
    reference, optimizer = adamw(plain), adamw(model)
    run(plain, reference, range(2))
    expected = copy.deepcopy(reference.state_dict())
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(2))
        saved = optimizer.state_dict()
        run(model, optimizer, range(2, 5))
        assert_same_state(expected, saved)
    del optimizer
    gc.collect()
    assert_same_state(expected, saved)
    saved["state"][0]["exp_avg"].zero_()  # Writable, as plain ones are.


def test_state_that_exists_already_moves_out(nvme_path: Path) -> None:
    reference, model = make_model(), make_model()
    run(reference, adamw(reference), range(6))
    optimizer = adamw(model)
    run(model, optimizer, range(3))
    with wrapped(optimizer, nvme_path) as swapped:
        with pytest.raises(swapper.SwapError, match=r"swapper\.state"):
            optimizer.state[model[0].weight]["exp_avg"]
        assert swapped.stats().bytes_written > 0
        run(model, optimizer, range(3, 6))
        assert_same(reference, model)


def test_unwrap_gives_the_plain_optimizer_back(nvme_path: Path) -> None:
    reference, model = make_model(), make_model()
    run(reference, adamw(reference), range(6))
    optimizer = swapper.wrap_optimizer(adamw(model), make_config(nvme_path))
    run(model, optimizer, range(3))
    assert swapper.unwrap_optimizer(optimizer) is optimizer
    assert "step" not in vars(optimizer) and not hasattr(optimizer, "swapper")
    assert len(optimizer.state) == len(list(model.parameters()))
    run(model, optimizer, range(3, 6))
    assert_same(reference, model)
    copy.deepcopy(optimizer)
    assert not list(nvme_path.iterdir())


def test_unwrapping_does_not_lose_masters_silently(nvme_path: Path) -> None:
    model = make_model(torch.bfloat16)
    optimizer = adamw(model)
    swapper.wrap_optimizer(optimizer, make_config(nvme_path, master_weights=True))
    run(model, optimizer, range(2))
    with pytest.raises(swapper.SwapError, match="drop_masters"):
        swapper.unwrap_optimizer(optimizer)
    swapper.unwrap_optimizer(optimizer, drop_masters=True)
    run(model, optimizer, range(2, 4))


def test_loading_a_state_of_other_shapes_changes_nothing(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(2))
        saved = optimizer.state_dict()
        bad = {**saved, "state": {i: dict(entries) for i, entries in saved["state"].items()}}
        bad["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"exp_avg.*\(160, 40\)"):
            optimizer.load_state_dict(bad)
        assert_same_state(saved, optimizer.state_dict())
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        assert_same_state(saved, optimizer.state_dict())


@pytest.mark.parametrize("name", [7, "head.weight"])
def test_loading_state_of_a_parameter_that_no_group_has_is_refused(name: Any, nvme_path: Path) -> None:
    """Plain PyTorch keeps such state, under the name that it has, and gives it in the next state dict."""
    model = make_model()
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(2))
        saved = optimizer.state_dict()
        stray = {**saved, "state": {**saved["state"], name: {"exp_avg": torch.ones(3)}}}
        with pytest.raises(swapper.ConfigError, match=rf"belongs to no parameter \({name!r}\).*no state was loaded"):
            optimizer.load_state_dict(stray)
        assert_same_state(saved, optimizer.state_dict())
        optimizer.load_state_dict({**saved, "state": {**saved["state"], name: {}}})
        assert_same_state(saved, optimizer.state_dict())
        run(model, optimizer, range(2, 3))


def test_state_with_masters_needs_masters(nvme_path: Path) -> None:
    model = make_model(torch.bfloat16)
    optimizer, other = adamw(model), adamw(model)
    with wrapped(optimizer, nvme_path, master_weights=True):
        run(model, optimizer, range(1))
        with wrapped(other, nvme_path), pytest.raises(swapper.ConfigError, match="master_weights"):
            other.load_state_dict(optimizer.state_dict())


def test_state_of_one_parameter(nvme_path: Path) -> None:
    plain, model = make_model(), make_model()
    reference, optimizer = adamw(plain), adamw(model)
    run(plain, reference)
    with wrapped(optimizer, nvme_path) as swapped:
        assert swapped.state(model[0].weight) == {}
        run(model, optimizer)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            state = swapped.state(q)
            assert state.keys() == reference.state[p].keys()
            assert all(same_bits(reference.state[p][key].reshape(-1), state[key].reshape(-1)) for key in state)
        with pytest.raises(KeyError):
            swapped.state(nn.Parameter(torch.zeros(3)))


# --- Misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copying_is_refused(nvme_path: Path, duplicate: Callable[[object], object]) -> None:
    optimizer = adamw(make_model())
    with wrapped(optimizer, nvme_path), pytest.raises(swapper.SwapError, match="state_dict"):
        duplicate(optimizer)


def test_single_values_of_the_state_cannot_be_changed(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(1))
        with pytest.raises(swapper.SwapError, match=r"swapper\.state"):
            assert optimizer.state[model[0].weight] == {}  # Who looks here would believe that there is no state.
        with pytest.raises(swapper.SwapError, match="assign the whole state"):
            optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(3)


class LoadsItself(torch.optim.AdamW):
    """Has a `load_state_dict` of its own, without torch's hooks, as the optimizers of bitsandbytes have."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        state = defaultdict(dict, {parameters[i]: copy.deepcopy(state) for i, state in state_dict["state"].items()})
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        self.__setstate__({"state": state, "param_groups": [{**new, "params": own["params"]} for own, new in groups]})


def forget_all(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def go_back(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, range(10, 12))
    saved = copy.deepcopy(optimizer.state_dict())
    run(model, optimizer, range(12, 14))
    optimizer.load_state_dict(saved)


def keep_one(model: nn.Module, optimizer: Optimizer) -> None:
    state = optimizer.swapper.state if hasattr(optimizer, "swapper") else optimizer.state.__getitem__
    kept = {"step": torch.tensor(7.0), **{key: 2 * state(model[0].weight)[key] for key in ("exp_avg", "exp_avg_sq")}}
    optimizer.state = defaultdict(dict, {model[0].weight: kept, model[0].bias: {}})


@pytest.mark.parametrize("replace", [forget_all, go_back, keep_one])
def test_what_optimizer_state_is_replaced_by_is_all_the_state(nvme_path: Path, replace: Scenario) -> None:
    models = make_model(), make_model()
    optimizers = [LoadsItself(model.parameters(), lr=1e-2) for model in models]
    with wrapped(optimizers[1], nvme_path) as swapped:
        for model, optimizer in zip(models, optimizers, strict=True):
            run(model, optimizer, range(3))
            replace(model, optimizer)
        plain = optimizers[0].state.get(models[0][0].weight, {})
        state = swapped.state(models[1][0].weight)  # Not the former one.
        assert state.keys() == plain.keys() and all(same_bits(state[key], plain[key]) for key in plain)
        for model, optimizer in zip(models, optimizers, strict=True):
            run(model, optimizer, range(3, 6))
        assert_same(*models)
        assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_what_cannot_be_all_the_state_is_refused_until_there_is_some(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path) as swapped:
        run(model, optimizer, range(1))
        for wrong in ({nn.Parameter(torch.ones(2)): {}}, {model[0].weight: 3}, optimizer.state.copy(), None):
            optimizer.state = wrong
            for _ in range(2):
                with pytest.raises(swapper.SwapError, match=r"was replaced by .*swapper.reset"):
                    optimizer.step()
        swapped.reset()
        assert swapped.state(model[0].weight) == {}
        run(model, optimizer, range(3, 4))
        assert swapped.state(model[0].weight)["step"] == 1


def test_state_that_a_load_did_not_fill_is_not_taken(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path) as swapped:
        run(model, optimizer, range(2))
        saved = optimizer.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(swapped._follower, "load", lambda *args, **named: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(saved)
        for _ in range(2):
            with pytest.raises(swapper.SwapError, match="load_state_dict was cut off"):
                optimizer.step()
        optimizer.load_state_dict(saved)
        run(model, optimizer, range(2, 3))
        assert swapped.state(model[0].weight)["step"] == 3


def test_state_is_replaced_after_a_load_that_torch_has_refused(nvme_path: Path) -> None:
    models = make_model(), make_model()
    optimizers = [adamw(model) for model in models]
    with wrapped(optimizers[1], nvme_path):
        for model, optimizer in zip(models, optimizers, strict=True):
            run(model, optimizer, range(2))
            with pytest.raises(ValueError, match="different number of parameter groups"):
                optimizer.load_state_dict({"state": {}, "param_groups": []})
            forget_all(model, optimizer)
            run(model, optimizer, range(2, 4))
        assert_same(*models)
        assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_failed_step_is_made_good_by_a_class_that_loads_itself(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    optimizer = LoadsItself(model.parameters(), lr=1e-2)
    with wrapped(optimizer, nvme_path) as swapped:
        run(model, optimizer, range(2))
        saved, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(swapped._stepper, "finish", lambda optimizer: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                run(model, optimizer, range(2, 3))
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
        with pytest.raises(swapper.SwapError, match=r"the parameters were not: load them"):
            optimizer.step()
        model.load_state_dict(values)
        run(model, optimizer, range(2, 4))
        plain = make_model()
        run(plain, adamw(plain), range(4))
        assert_same(plain, model)


def test_a_gradient_that_cannot_be_cut_is_refused_before_anything_is_stepped(nvme_path: Path) -> None:
    bits = []
    for swaps in (False, True):
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(900, 700, generator=generator).bfloat16()) for _ in range(2)]
        optimizer = torch.optim.AdamW(weights, lr=1e-2)
        with wrapped(optimizer, nvme_path, master_weights=False) if swaps else contextlib.nullcontext():
            for _ in range(2):
                for p in weights:
                    p.grad = torch.randn(p.shape, generator=generator).bfloat16()
                given = weights[-1].grad
                assert given is not None
                if swaps:
                    weights[-1].grad = given.t().contiguous().t()
                    with pytest.raises(swapper.SwapError, match=r"a gradient has strides \(1, 900\)"):
                        optimizer.step()
                    weights[-1].grad = given
                optimizer.step()
        bits.append(weights)
    assert all(map(same_bits, *bits))


def test_reset_starts_over(nvme_path: Path) -> None:
    plain, model = make_model(), make_model()
    run(plain, adamw(plain), range(2))
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path) as swapped:
        run(model, optimizer, range(2))
        run(plain, adamw(plain), range(2, 4))
        swapped.reset()
        run(model, optimizer, range(2, 4))
        assert_same(plain, model)


def test_a_changed_parameter_makes_its_master_anew(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, model = make_model(torch.bfloat16), make_model(torch.bfloat16)
    reference = MasterWeights(list(plain.parameters()), lambda p: torch.optim.AdamW(p, lr=1e-2))
    run(plain, reference, range(3))
    with torch.no_grad():
        plain[0].weight.clamp_(-0.05, 0.05)
        reference.masters[0].copy_(plain[0].weight)
    run(plain, reference, range(3, 6))
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path, master_weights=True) as swapped:
        run(model, optimizer, range(3))
        with torch.no_grad():
            model[0].weight.clamp_(-0.05, 0.05)
        run(model, optimizer, range(3, 6))
        assert swapped.stats().masters_reset == 1
        assert_same(plain, model)
    assert sum("changed outside" in record.message for record in caplog.records) == 1


def test_a_converted_model_is_refused(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(1))
        model.to(torch.float64)
        backward(model, 1)
        with pytest.raises(swapper.SwapError, match="float64"):
            optimizer.step()


def test_closed_unwrapped_and_wrapped_twice(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    with pytest.raises(swapper.SwapError, match="not wrapped"):
        swapper.of(optimizer)
    with wrapped(optimizer, nvme_path) as swapped, pytest.raises(swapper.ConfigError, match="already"):
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    swapped.close()
    backward(model, 0)
    for use in (optimizer.step, optimizer.state_dict, swapped.flush, swapped.reset):
        with pytest.raises(swapper.SwapError, match="closed"):
            use()
    assert swapped.stats().steps == 0


def test_files_go_when_the_optimizer_dies(nvme_path: Path) -> None:
    model = make_model()
    optimizer = swapper.wrap_optimizer(adamw(model), make_config(nvme_path))
    run(model, optimizer, range(2))
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None, "no reference cycle keeps a wrapped optimizer alive"
    assert not list(nvme_path.iterdir())
    backward(model, 3)  # The hooks are gone too.
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_forked_child_cannot_step_and_leaves_the_files_alone(nvme_path: Path) -> None:
    model, plain = make_model(), make_model()
    run(plain, adamw(plain))
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(2))
        backward(model, 2)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                optimizer.step()
            except swapper.SwapError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                del optimizer
                gc.collect()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        optimizer.step()
        optimizer.zero_grad()
        run(model, optimizer, range(3, 4))
        assert_same(plain, model)


@forks_at_work
def test_forked_data_loader_workers(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    with wrapped(optimizer, nvme_path):
        data = torch.utils.data.DataLoader(
            torch.randn(12, 40), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for _ in range(2):
            for batch in data:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(list(nvme_path.iterdir())) == 1


def test_another_number_of_threads_cuts_low_precision_state_anew(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = (90001,)

    def train(swap: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16))
        optimizer = torch.optim.AdamW([p], lr=1e-2)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for threads in (2, 2, 1, 3):
            torch.set_num_threads(threads)
            p.grad = torch.randn(shape, generator=generator).to(torch.bfloat16)
            optimizer.step()
        if swap:
            swapper.of(optimizer).close()
        return p.detach()

    before = torch.get_num_threads()
    try:
        assert same_bits(train(False), train(True))
    finally:
        torch.set_num_threads(before)
    assert any("cut anew" in record.message for record in caplog.records)


# --- Classes -----------------------------------------------------------------------------------------------------


class Coupled(Optimizer):
    """Scales every update by the norm of all gradients: not per parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum(p.grad.square().sum() for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / norm


class Odd(Optimizer):
    """State of other sizes and dtypes than the parameter's, a counter in the group, and state that comes late."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["half"] = torch.zeros(p.numel() // 2, dtype=torch.bfloat16)
                    state["signs"] = torch.zeros(p.shape, dtype=torch.int8)
                    state["mean"] = torch.zeros((), dtype=torch.float64)
                    state["history"] = []
                state["half"] += p.grad.reshape(-1)[: p.numel() // 2].to(torch.bfloat16)
                state["signs"] = p.grad.sign().to(torch.int8)
                state["mean"] += p.grad.double().mean()
                state["history"].append(group["count"])
                if group["count"] == 5:
                    state["late"] = p.grad.clone()
                p -= group["lr"] * state["signs"]
                p.reshape(-1)[: p.numel() // 2] -= group["lr"] * state["half"]


def test_an_optimizer_that_couples_parameters_is_refused(nvme_path: Path) -> None:
    with pytest.raises(swapper.ConfigError, match="Coupled"):
        swapper.wrap_optimizer(Coupled(make_model().parameters()), make_config(nvme_path))
    assert not list(nvme_path.iterdir())


class Bounded(Optimizer):
    """Looks at the norm of all gradients only where it is not between two bounds, as those that clip do."""

    def __init__(self, params: Any, least: float, most: float) -> None:
        super().__init__(params, {"lr": 1e-2, "least": least, "most": most})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.float().norm() for p in parameters if p.grad is not None]).norm()
            scale = (norm.clamp(group["least"], group["most"]) / norm).item()
            for p in parameters:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad, alpha=scale)
                p.sub_(mean, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("least", "most"), [(0.0, 1.0), (0.0, 100.0), (0.0, 5000.0), (1e-3, 1e9), (1.0, 1e9)])
def test_one_that_couples_them_from_some_norm_on_is_refused(
    least: float, most: float, dtype: torch.dtype, nvme_path: Path
) -> None:
    optimizer = Bounded(make_model().to(dtype).parameters(), least, most)
    with pytest.raises(swapper.ConfigError, match="Bounded computes something else"):
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))


class Adaptive(Optimizer):
    """Like Prodigy: one step size for all parameters, which it learns slowly."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            numerator = denominator = 0.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["start"], state["sum"] = p.clone(), torch.zeros_like(p)
                numerator += torch.dot(p.grad.flatten(), (state["start"] - p).flatten()).item()
                denominator += state["sum"].add_(p.grad).abs().sum().item()
            group["d"] = max(group["d"], numerator / (denominator + 1e-12))
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["d"])


class Around(Optimizer):
    """Like Lookahead: another optimizer does the work."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


def test_what_adapts_to_all_parameters_slowly_is_refused(nvme_path: Path) -> None:
    with pytest.raises(swapper.ConfigError, match="Adaptive"):
        swapper.wrap_optimizer(Adaptive(make_model().parameters()), make_config(nvme_path))


def test_an_optimizer_around_another_is_refused(nvme_path: Path) -> None:
    model = make_model()
    with pytest.raises(swapper.ConfigError, match="inner"):
        swapper.wrap_optimizer(Around(adamw(model)), make_config(nvme_path))


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.ASGD])
def test_wrapping_in_the_middle_of_a_run(nvme_path: Path, make: Callable[..., Optimizer]) -> None:
    plain, model = make_model(), make_model()
    run(plain, make(plain.parameters()), range(6))
    optimizer = make(model.parameters())
    run(model, optimizer, range(3))
    with wrapped(optimizer, nvme_path):
        run(model, optimizer, range(3, 6))
        assert_same(plain, model)


def test_lbfgs_is_refused_by_name(nvme_path: Path) -> None:
    with pytest.raises(swapper.ConfigError, match="LBFGS"):
        swapper.wrap_optimizer(torch.optim.LBFGS(make_model().parameters()), make_config(nvme_path))


def test_an_unknown_class_with_odd_state(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, model = make_model(), make_model()
    reference, optimizer = Odd(plain.parameters()), Odd(model.parameters())
    run(plain, reference, range(7))
    with wrapped(optimizer, nvme_path) as swapped:
        run(model, optimizer, range(7))
        assert_same(plain, model)
        assert_same_state(reference.state_dict(), optimizer.state_dict())
        assert swapped.stats().bytes_written > 0
    assert sum("'late'" in record.message for record in caplog.records) == 1


def test_a_subclass_with_its_own_step_is_stepped_whole(nvme_path: Path) -> None:
    class Warm(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.clamp_(-1e-2, 1e-2)
            return super().step(closure)

    plain, model = make_model(), make_model()
    run(plain, Warm(plain.parameters(), lr=1e-2))
    optimizer = Warm(model.parameters(), lr=1e-2)
    with wrapped(optimizer, nvme_path) as swapped:
        run(model, optimizer)
        assert_same(plain, model)
        assert all(segment.whole for bucket in swapped._plan.buckets for segment in bucket.segments)


def test_a_registered_class_is_cut(nvme_path: Path) -> None:
    class Sign(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                        p -= group["lr"] * state["average"].sign()

    plain, model = nn.Linear(40, 4000), nn.Linear(40, 4000)
    model.load_state_dict(plain.state_dict())
    run(plain, Sign(plain.parameters()))
    swapper.register_elementwise(Sign)
    optimizer = Sign(model.parameters())
    with wrapped(optimizer, nvme_path) as swapped:
        run(model, optimizer)
        assert_same(plain, model)
        assert len(swapped._plan.segments_of(model.weight)) > 1


def test_sparse_gradients(nvme_path: Path) -> None:
    def train(swap: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Embedding(1000, 40, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for seed in range(3):
            tokens = torch.randint(1000, (16,), generator=torch.Generator().manual_seed(seed))
            model(tokens).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    assert_same(train(False), train(True))


@pytest.mark.parametrize("make", [torch.optim.Adagrad, partial(torch.optim.SGD, lr=0.1)], ids=["Adagrad", "SGD"])
def test_sparse_gradients_of_a_class_that_is_cut(nvme_path: Path, make: Callable[..., Optimizer]) -> None:
    def train(swap: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Embedding(20000, 40, sparse=True)
        optimizer = make(model.parameters())
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        with torch.sparse.check_sparse_tensor_invariants(False):
            for seed in range(3):
                tokens = torch.randint(20000, (16,), generator=torch.Generator().manual_seed(seed))
                model(tokens).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model

    assert_same(train(False), train(True))


def test_fused_sgd_in_half_precision_is_refused(nvme_path: Path) -> None:
    model = make_model(torch.bfloat16)
    with pytest.raises(swapper.ConfigError, match="fused=False"):
        swapper.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=True), make_config(nvme_path))


def test_the_trial_leaves_the_random_state_alone(nvme_path: Path) -> None:
    model = make_model()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with wrapped(adamw(model), nvme_path):
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("parameters", [False, True])
def test_the_trial_seeds_no_accelerator(nvme_path: Path, parameters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the model's, and those that are initialized later, have the user's seed."""
    model = make_model()
    optimizer = adamw(model)
    for module in (torch.cuda, torch.xpu, torch.mtia):
        monkeypatch.setattr(module, "manual_seed_all", lambda seed: pytest.fail("all devices were seeded"))
        monkeypatch.setattr(module, "manual_seed", lambda seed: pytest.fail("a device was seeded"))
    if parameters:
        swapper.offload(model, optimizer, swapper.OffloadConfig(nvme_path=nvme_path, offload_param={"device": "nvme"}))
    else:
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    swapper.of(optimizer).close()


def test_clip_grad_norm_is_torchs(nvme_path: Path) -> None:
    plain, model = make_model(), make_model()
    backward(plain, 0)
    backward(model, 0)
    with wrapped(optimizer := adamw(model), nvme_path) as swapped:
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert same_bits(expected, swapped.clip_grad_norm_(0.01))
        assert all(same_bits(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        optimizer.step()


def test_check_says_what_a_run_needs(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(torch.bfloat16)
    optimizer = adamw(model)
    report = swapper.check(model, optimizer, make_config(nvme_path, master_weights=True))
    assert "step writes" in capsys.readouterr().out
    assert not list(nvme_path.iterdir()) and not hasattr(optimizer, "swapper")
    with wrapped(optimizer, nvme_path, master_weights=True) as swapped:
        run(model, optimizer, range(2))
        stats = swapped.stats()
        assert report.step_written_bytes >= stats.bytes_written // 2
        assert report.disk_bytes == sum(b.length_bytes for b in swapped._plan.buckets)


def test_check_takes_a_model_without_memory(nvme_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
    optimizer = adamw(model)
    report = swapper.check(
        model, optimizer, swapper.OffloadConfig(nvme_path=nvme_path, offload_optimizer={"device": "nvme"})
    )
    assert report.parameter_numel == 8 * (4096 * 4096 + 4096)
    assert 8 <= report.step_written_bytes / report.parameter_numel < 8.1
    with pytest.raises(swapper.ConfigError, match="meta"):
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))


def test_reading_ahead_starts_with_the_last_micro_batch(nvme_path: Path) -> None:
    model = make_model()
    config = make_config(nvme_path).model_copy(update={"gradient_accumulation_steps": 3})
    optimizer = swapper.wrap_optimizer(adamw(model), config)
    run(model, optimizer, range(1))
    swapped = swapper.of(optimizer)
    swapped.flush()
    reads = []
    for seed in range(3):
        backward(model, seed)
        reads.append(swapped.stats().reads)
    assert reads[0] == reads[1] < reads[2]
    optimizer.step()
    swapped.close()


class Counting(Optimizer):
    """Makes a counter in the group in its first step, and keeps its state in a list, a dict and a flat tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["flat"] = torch.zeros(p.numel())
                    state["list"] = [torch.zeros_like(p), torch.zeros(3)]
                    state["dict"] = {"average": torch.zeros_like(p)}
                state["flat"].add_(p.grad.flatten())
                state["list"][0].add_(p.grad)
                state["dict"]["average"].lerp_(p.grad, 0.1)
                update = state["flat"].view_as(p) + state["list"][0] + state["dict"]["average"]
                p.sub_(update, alpha=group["lr"] / group["step"])


def test_counters_made_in_the_first_step_and_state_in_containers(nvme_path: Path) -> None:
    plain, model = make_model(), make_model()
    run(plain, Counting(plain.parameters()))
    optimizer = Counting(model.parameters())
    with wrapped(optimizer, nvme_path) as swapped:
        run(model, optimizer)
        assert_same(plain, model)
        assert optimizer.param_groups[0]["step"] == 4
        assert swapped.stats().bytes_written > 0


def test_state_that_belongs_to_no_parameter_is_refused(nvme_path: Path) -> None:
    class Global(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index,call-overload]
            return super().step(closure)

    model = make_model()
    with pytest.raises(swapper.ConfigError, match="count"):
        swapper.wrap_optimizer(Global(model.parameters(), lr=0.1), make_config(nvme_path))


def test_a_custom_class_with_a_small_step_in_bf16(nvme_path: Path) -> None:
    class Sign(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-5})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=self.param_groups[0]["lr"])

    model = make_model(torch.bfloat16)
    with wrapped(Sign(model.parameters()), nvme_path):
        pass


def test_complex_parameters(nvme_path: Path) -> None:
    def train(swap: bool) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(90, 70, dtype=torch.cfloat, generator=generator))
        optimizer = torch.optim.AdamW([p], lr=1e-2)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for _ in range(3):
            p.grad = torch.randn(90, 70, dtype=torch.cfloat, generator=generator)
            optimizer.step()
        written = 0
        if swap:
            written = swapper.of(optimizer).stats().bytes_written
            swapper.of(optimizer).close()
        return torch.view_as_real(p.detach()), written

    plain, swapped = train(False), train(True)
    assert same_bits(plain[0], swapped[0])
    assert swapped[1] >= 3 * 2 * 90 * 70 * 8


def test_a_trial_that_fails_says_nothing_of_the_class(nvme_path: Path) -> None:
    def train(swap: bool) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        p, q = (nn.Parameter(torch.randn(90, 70, dtype=d, generator=generator)) for d in (torch.cfloat, torch.float))
        optimizer = torch.optim.RAdam([p, q], lr=1e-2)
        for step in range(3):
            if swap and step == 1:
                optimizer.param_groups[0]["lr"] = "0.01"  # Fails in any step of the class, with and without state.
                with pytest.raises(swapper.ConfigError, match="failed in a trial step"):
                    swapper.wrap_optimizer(optimizer, make_config(nvme_path))
                optimizer.param_groups[0]["lr"] = 1e-2
                swapper.wrap_optimizer(optimizer, make_config(nvme_path))
            p.grad = torch.randn(90, 70, dtype=torch.cfloat, generator=generator)
            q.grad = torch.randn(90, 70, generator=generator)
            optimizer.step()
        return torch.view_as_real(p.detach()), q.detach()

    assert all(same_bits(*each) for each in zip(train(False), train(True), strict=True))


def test_state_made_by_the_constructor_in_several_dtypes(nvme_path: Path) -> None:
    class Early(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-2})
            for p in self.param_groups[0]["params"]:
                self.state[p]["mean"] = torch.full_like(p, 0.1j if p.is_complex() else 0.1)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                mean = self.state[p]["mean"].mul_(0.9).add_(p.grad)
                p.add_(mean, alpha=-self.param_groups[0]["lr"])

    def train(swap: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        dtypes = torch.cfloat, torch.float
        parameters = [nn.Parameter(torch.randn(90, 70, generator=generator).to(dtype)) for dtype in dtypes]
        optimizer = Early(parameters)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for _ in range(2):
            for p in parameters:
                p.grad = torch.randn(90, 70, generator=generator).to(p.dtype)
            optimizer.step()
        return [p.detach() for p in parameters]

    for plain, swapped in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, swapped)
