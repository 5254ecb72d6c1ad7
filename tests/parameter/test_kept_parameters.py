"""Parameters that somebody keeps when their model is gone have their values, as those of plain PyTorch have."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import run_program
from models import WIDTH, Mlp
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from twins import bits, config_for, small_records, swapper_of
from weight_files import state_to_save, write_weights

import swapper


def tied() -> nn.Module:
    model = Mlp(3)
    model.blocks[2][0].weight = model.blocks[0][0].weight  # type: ignore[index, union-attr]
    model.register_buffer("table", torch.randn(128, 160))  # Of 64 KiB and more: it is swapped, too.
    return model


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = tied()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        model(torch.randn(3, WIDTH, generator=generator).to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def swapped(nvme_path: Path, how: str) -> nn.Module:
    """The model of `plain`, whose parameters are on the drive."""
    torch.manual_seed(0)
    config = config_for(nvme_path, pool_bytes="4MiB", verify="crc32c")
    with small_records():
        if how == "files":
            path = write_weights(nvme_path.parent / "model.safetensors", state_to_save(plain()))
            return swapper.offload(tied(), config=config_for(nvme_path, pool_bytes="4MiB"), weights=path)[0]
        if how == "built":
            with swapper.init(config):
                model = tied()
        else:
            model = tied() if how == "offload" else tied().to(how)  # A type of device.
        # Not with the model: an optimizer would keep the parameters.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "built":
            train(model, optimizer)
            return model
        swapper.offload(model, config=config)
        train(model, optimizer)
        return model


KEPT: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "one": lambda model: [model.blocks[1][0].weight],  # type: ignore[index, union-attr]
    "tied": lambda model: [model.blocks[2][0].weight],  # type: ignore[index, union-attr]
    "buffer": lambda model: [model.table],  # type: ignore[list-item]
    "all": lambda model: list(model.parameters()),
    "optimizer": lambda model: torch.optim.SGD(model.parameters()).param_groups[0]["params"],  # type: ignore[no-any-return]
}


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is freed that reference counting does not free."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.parametrize("how", ["offload", "built", "files"])
@pytest.mark.parametrize("kept", KEPT)
def test_they_have_their_values(how: str, kept: str, nvme_path: Path, uncollected: None) -> None:
    check(how, kept, nvme_path)


@pytest.mark.parametrize("kept", ["one", "all"])
def test_those_of_a_device_have_their_values(kept: str, nvme_path: Path, device: str, uncollected: None) -> None:
    check(device, kept, nvme_path)


def check(how: str, kept: str, nvme_path: Path) -> None:
    expected = [p.detach() for p in KEPT[kept](plain())]
    model = swapped(nvme_path, how)
    tensors = KEPT[kept](model)
    gone = weakref.ref(model)
    del model
    assert gone() is None and len(tensors) == len(expected)
    for _ in range(2):
        assert [bits(t.detach().cpu()) for t in tensors] == [bits(t) for t in expected]
    for tensor, value in zip(tensors, expected, strict=True):
        if how == "files":
            continue
        with torch.no_grad():
            tensor.mul_(3)
        assert bits(tensor.detach().cpu()) == bits(value * 3)
        with swapper.gathered([tensor]):
            tensor.data[0] = 7
        assert bool((tensor[0] == 7).all())
        if tensor.requires_grad:
            (tensor * 2).sum().backward()  # type: ignore[no-untyped-call]
            assert tensor.grad is not None and bool((tensor.grad == 2).all())
    del tensors, tensor
    gc.collect()  # They and what has their values are a cycle.
    assert list(nvme_path.iterdir()) == []


@pytest.mark.parametrize("how", ["offload", "built", "files"])
@pytest.mark.parametrize("what", ["nothing", "a copy", "the optimizer's state dict"])
def test_without_them_all_is_freed_with_the_model(how: str, what: str, nvme_path: Path, uncollected: None) -> None:
    model = swapped(nvme_path, how)
    if how == "built":
        swapper.offload(model, config=config_for(nvme_path))
    owner, parameter = weakref.ref(swapper_of(model)), weakref.ref(next(model.parameters()))
    kept: Any = None
    if what == "a copy":
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    elif what == "the optimizer's state dict":
        kept = torch.optim.AdamW(model.parameters()).state_dict()
    del model
    assert owner() is None and parameter() is None and list(nvme_path.iterdir()) == []
    del kept


def fails(*_: object) -> None:
    raise RuntimeError("the user's hook")


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "gradient": lambda model: next(model.parameters()).register_hook(fails),
    "last gradient": lambda model: list(model.parameters())[-2].register_hook(fails),  # type: ignore[call-overload]
    "accumulated": lambda model: list(model.parameters())[-2].register_post_accumulate_grad_hook(fails),
    "module": lambda model: model.blocks[1][0].register_full_backward_hook(fails),  # type: ignore[index, union-attr]
}


@pytest.mark.parametrize("how", ["offload", "built"])
@pytest.mark.parametrize("within", ["", "no_grad", "inference_mode", "a dispatch mode", "a function mode"])
@pytest.mark.parametrize("hook", HOOKS)
def test_after_a_backward_that_failed_all_is_freed_with_the_model(
    hook: str, within: str, how: str, nvme_path: Path, uncollected: None
) -> None:
    """torch keeps what it was about to run until the thread's next backward, and with it what autograd has saved."""
    model = swapped(nvme_path, how)
    HOOKS[hook](model)
    with pytest.raises(RuntimeError, match="the user's hook"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gone = weakref.ref(model)
    with mode(within) as seen:
        del model
    assert gone() is None and list(nvme_path.iterdir()) == []
    assert not {torch.zeros, torch.Tensor.backward, torch.ops.aten.zeros.default}.intersection(seen)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@contextlib.contextmanager
def mode(name: str) -> Iterator[list[Any]]:
    """A mode of the user. Yields what it sees of operators."""
    seen: list[Any] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    made: dict[str, Callable[[], Any]] = {
        "a dispatch mode": Dispatch,
        "a function mode": Function,
        "": contextlib.nullcontext,
    }
    with made[name]() if name in made else getattr(torch, name)():
        yield seen


def test_a_model_that_dies_in_a_backward_or_a_transform_leaves_it_alone(nvme_path: Path, uncollected: None) -> None:
    models = [swapped(nvme_path, "offload") for _ in range(2)]
    p = torch.ones(3, requires_grad=True)
    p.register_hook(lambda _: models.pop() and None)
    (p * 2).sum().backward()
    assert bool((p.grad == 2).all()) and len(models) == 1
    assert torch.func.grad(lambda x: (models.clear(), x.square().sum())[1])(torch.ones(2)).tolist() == [2, 2]
    assert not models and list(nvme_path.iterdir()) == []


def test_a_model_is_trained_beside_those_of_another(nvme_path: Path) -> None:
    """With one config, so that they share its pool."""
    config = config_for(nvme_path)
    kept: list[nn.Parameter] = []
    expected: list[torch.Tensor] = []
    for seed in range(3):
        torch.manual_seed(seed)
        with small_records():
            model, optimizer = swapper.offload(model := Mlp(3), torch.optim.SGD(model.parameters(), lr=0.1), config)
        train(model, optimizer)
        kept.append(model.blocks[seed][0].weight)
        expected.append(kept[-1].detach().clone())
        del model, optimizer
        assert [bits(p.detach()) for p in kept] == [bits(p) for p in expected]


def test_a_model_in_a_cycle_takes_the_values_with_it_and_an_error_says_so(nvme_path: Path) -> None:
    model = swapped(nvme_path, "offload")
    model.__dict__["me"] = model
    kept = next(model.parameters())
    del model
    gc.collect()
    for use in (lambda: kept.sum(), lambda: swapper.gathered(kept).__enter__(), lambda: kept + kept):
        with pytest.raises(swapper.SwapError, match=r"values of this parameter are gone.*keep the model"):
            use()
    assert kept.shape == (WIDTH, WIDTH) and list(nvme_path.iterdir()) == []


def test_a_closed_model_takes_the_values_with_it(nvme_path: Path) -> None:
    model = swapped(nvme_path, "offload")
    kept = next(model.parameters())
    swapper_of(model).close()
    del model
    with pytest.raises(swapper.SwapError, match="values of this parameter are gone"):
        kept.sum()


def test_a_forked_child_that_keeps_them_leaves_the_files(nvme_path: Path) -> None:
    model = swapped(nvme_path, "offload")
    kept = next(model.parameters())
    expected = bits(kept.detach())
    if (pid := os.fork()) == 0:
        try:
            del model
            try:
                kept.sum()
                os._exit(1)
            except swapper.SwapError:
                os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    del model
    assert bits(kept.detach()) == expected
    assert bits(copy.deepcopy(kept).detach()) == expected


def test_a_model_that_dies_when_torch_is_gone_says_nothing(nvme_path: Path) -> None:
    program = f"""
import logging, torch, swapper
model = torch.nn.Linear(64, 64, bias=False)
swapper.offload(model, config={{"nvme_path": {str(nvme_path)!r}, "offload_param": {{"device": "nvme"}}}})
logging.kept = model
"""
    run = run_program([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "Exception ignored" not in run.stderr
    assert list(nvme_path.iterdir()) == []
