"""`step_in_backward` and GradScaler: refused before a parameter changes if it scales this loss, and only then."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapper
from swapper import ConfigError, OffloadConfig
from swapper.optimizer.loss_scaling import may_be_scaled

WIDTH = 96
Loss = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, reentrant: bool | None = None) -> torch.Tensor:
        x = self.first(x) * 0.5
        hidden = self.second(x) if reentrant is None else checkpoint(self.second, x, use_reentrant=reentrant)
        out: torch.Tensor = self.last(torch.nn.functional.dropout(torch.tanh(hidden), 0.5))
        return out


def all_in(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A pass whose first complete bucket is one of a nested pass: the parameters are used nowhere else."""
    out: torch.Tensor = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    return out


LOSSES: dict[str, Loss] = {
    "mean": lambda net, x: net(x).mean(),
    "cross entropy": lambda net, x: nn.functional.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.long)),
    "two terms": lambda net, x: net(x).square().mean() + 0.1 * net.last.weight.square().sum(),
    "a product": lambda net, x: (net(x) * net.last.bias).sum(),
    "divided": lambda net, x: net(x).sum() / 4,
    "checkpointed": lambda net, x: net(x, False).mean(),
    "checkpointed, reentrant": lambda net, x: net(x, True).mean(),
    "nested": lambda net, x: all_in(net, x).mean(),
    "nested twice": lambda net, x: checkpoint(lambda y: all_in(net, y), x.requires_grad_(), use_reentrant=True).mean(),  # type: ignore[no-any-return]
    "autocast": lambda net, x: under_autocast(net, x),
}
MULTIPLIED: dict[str, Loss] = {
    "by a number": lambda net, x: net(x).mean() * 0.5,
    "nested, outside": lambda net, x: all_in(net, x).mean() * 0.5,
    "nested, inside": lambda net, x: checkpoint(lambda y: net(y) * 0.5, x.requires_grad_(), use_reentrant=True).mean(),  # type: ignore[no-any-return]
}


def under_autocast(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x).float().mean()


SCALED: dict[str, Callable[[torch.amp.GradScaler, torch.Tensor], None]] = {
    "the loss": lambda scaler, loss: scaler.scale(loss).backward(),
    "then divided": lambda scaler, loss: (scaler.scale(loss) / 2).backward(),
    "then added": lambda scaler, loss: (scaler.scale(loss) + scaler.scale(loss)).backward(),
    "in a list": lambda scaler, loss: torch.autograd.backward(scaler.scale([loss, loss * 2])),
    "by an edge": lambda scaler, loss: torch.autograd.backward(
        torch.autograd.graph.get_gradient_edge(scaler.scale(loss)),
        torch.ones(()),  # type: ignore[arg-type]
    ),
    "retained": lambda scaler, loss: scaler.scale(loss).backward(retain_graph=True),
    "as a vector": lambda scaler, loss: scaler.scale(loss.expand(3)).sum().backward(),
}


class MyScaler(torch.amp.GradScaler):
    pass


@pytest.fixture(autouse=True)
def _no_other_scaler() -> Iterator[None]:
    gc.collect()
    yield


def scaler_in_use() -> torch.amp.GradScaler:
    scaler = MyScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    return scaler


def config(nvme_path: Path, parameters: str = "none", gradients: str = "none") -> OffloadConfig:
    return OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="4MiB",
        bucket_bytes="64KiB",
        offload_optimizer={"device": "nvme", "step_in_backward": True},
        offload_gradient={"device": gradients},
        offload_param={"device": parameters},
    )


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def values(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", [*LOSSES, *MULTIPLIED])
@pytest.mark.parametrize("gradients", ["none", "nvme"])
@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_a_scaler_of_this_loss_is_refused_and_nothing_changes(
    parameters: str, gradients: str, name: str, nvme_path: Path
) -> None:
    net, optimizer = made()
    swapper.offload(net, optimizer, config(nvme_path, parameters, gradients))
    before = values(net)
    loss = (LOSSES | MULTIPLIED)[name]
    scaler = MyScaler("cpu", init_scale=2.0)
    with pytest.raises(ConfigError, match="cannot be combined with GradScaler"):
        scaler.scale(loss(net, torch.ones(2, WIDTH))).backward()
    assert same(before, values(net))
    swapper.of(optimizer).close()


@pytest.mark.parametrize("way", SCALED)
def test_however_the_loss_is_scaled_it_is_refused(way: str, nvme_path: Path) -> None:
    net, optimizer = made()
    swapper.offload(net, optimizer, config(nvme_path))
    before = values(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.raises(ConfigError, match="cannot be combined with GradScaler"):
        SCALED[way](scaler, net(torch.ones(2, WIDTH)).mean())
    assert same(before, values(net))
    swapper.of(optimizer).close()


def test_a_scaler_that_comes_later_is_refused_before_its_first_step(nvme_path: Path) -> None:
    net, optimizer = made()
    swapper.offload(net, optimizer, config(nvme_path))
    for _ in range(2):
        net(torch.ones(2, WIDTH)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = values(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.raises(ConfigError, match="cannot be combined with GradScaler"):
        scaler.scale(net(torch.ones(2, WIDTH)).mean()).backward()
    assert same(before, values(net))
    swapper.of(optimizer).close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_a_scaler_of_another_loss_is_no_hindrance(parameters: str, name: str, nvme_path: Path) -> None:
    results = []
    for swapped in (False, True):
        net, optimizer = made()
        other = nn.Linear(8, 8)
        of_other = torch.optim.SGD(other.parameters(), lr=0.1)
        scaler = MyScaler("cpu", init_scale=4.0)
        if swapped:
            swapper.offload(net, optimizer, config(nvme_path, parameters))
        for step in range(3):
            scaler.scale(other(torch.ones(2, 8)).square().mean()).backward()
            torch.manual_seed(step)
            LOSSES[name](net, torch.ones(2, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scaler.step(of_other)
            scaler.update()
            of_other.zero_grad()
        results.append([*values(net), *values(other)])
        if swapped:
            swapper.of(optimizer).close()
    assert same(*results)


@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_loss_that_looks_scaled_is_refused_only_while_there_is_a_scaler(name: str, nvme_path: Path) -> None:
    net, optimizer = made()
    swapper.offload(net, optimizer, config(nvme_path))
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    unused = torch.amp.GradScaler("cpu")
    MULTIPLIED[name](net, torch.ones(2, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = values(net)
    scaler = scaler_in_use()
    with pytest.raises(ConfigError, match="divide it instead"):
        MULTIPLIED[name](net, torch.ones(2, WIDTH)).backward()
    assert same(before, values(net))
    del scaler, disabled, unused
    swapper.of(optimizer).close()


def test_what_a_compiled_function_does_cannot_be_seen(nvme_path: Path) -> None:
    net, optimizer = made()
    swapper.offload(net, optimizer, config(nvme_path))
    scaler = scaler_in_use()
    scaled = torch.compile(lambda x: scaler.scale(net(x).mean()), backend="aot_eager")
    before = values(net)
    with pytest.raises(ConfigError, match="cannot be combined with GradScaler"):
        scaled(torch.ones(2, WIDTH)).backward()
    assert same(before, values(net))
    swapper.of(optimizer).close()


def asked_in_backward(loss: torch.Tensor, p: nn.Parameter) -> bool:
    answers: list[bool] = []
    hook = p.register_post_accumulate_grad_hook(lambda _: answers.append(may_be_scaled(lambda leaf: leaf is p)))
    loss.backward()
    hook.remove()
    p.grad = None
    return answers[0]


def test_backward_on_a_thread_of_autograd_asks_the_thread_that_waits() -> None:
    """As on a device: the hook runs where no Python frame of the pass is."""
    scaler = scaler_in_use()
    for scaled, busy in itertools.product([False, True], [False, True]):
        p = nn.Parameter(torch.ones(3))
        answers: list[bool] = []

        def ask(_: Any, p: nn.Parameter = p, answers: list[bool] = answers) -> None:
            thread = threading.Thread(target=lambda: answers.append(may_be_scaled(lambda leaf: leaf is p)))
            thread.start()
            thread.join()

        p.register_post_accumulate_grad_hook(ask)
        loss = p.square().sum()
        loss = scaler.scale(loss) if scaled else loss
        if not busy:
            loss.backward()
        else:  # Another thread is in a backward pass too: which of them it is cannot be known.
            started, go_on = threading.Event(), threading.Event()
            q = nn.Parameter(torch.ones(3))

            def wait(_: Any, started: threading.Event = started, go_on: threading.Event = go_on) -> None:
                started.set()
                go_on.wait()

            q.register_post_accumulate_grad_hook(wait)
            other = threading.Thread(target=q.sum().backward)
            other.start()
            started.wait()
            loss.backward()
            go_on.set()
            other.join()
        assert answers == [scaled or busy]


def test_a_leaf_that_is_the_loss_itself() -> None:
    scaler = scaler_in_use()
    p = nn.Parameter(torch.ones(()))
    assert asked_in_backward(p, p) is False
    assert asked_in_backward(scaler.scale(p), p) is True
    assert asked_in_backward(p / 3, p) is False
    assert asked_in_backward(p * p, p) is False


def test_outside_of_a_backward_only_the_scalers_count() -> None:
    assert may_be_scaled(lambda leaf: True) is False
    scaler = scaler_in_use()
    assert may_be_scaled(lambda leaf: True) is True
    del scaler
