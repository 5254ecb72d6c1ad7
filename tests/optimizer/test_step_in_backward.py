"""`step_in_backward`: the bits of stepping at the end, gradients freed, and what it cannot go with refused by name."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import same_bits

import swapper
from swapper import ConfigError, OffloadConfig, OptimizerSwapper, SwapError, SwapIOError
from swapper.tensors.evicted_gradients import raw_gradient

pytestmark = pytest.mark.packs_too

WIDTH = 192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 7)
        self.down = nn.Linear(3 * WIDTH + 7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Model(nn.Module):
    """Tied weights, a block that is used twice, one that is used in every other pass, one that is frozen."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(501, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.twice, self.sometimes, self.frozen = Block(), Block(), Block()
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 501, bias=False)
        self.head.weight = self.tokens.weight
        self.reentrant = reentrant
        self.passes = itertools.count()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        x = self.twice(self.twice(x))
        if next(self.passes) % 2:
            x = self.sometimes(x)
        logits: torch.Tensor = self.head(self.frozen(x))
        return logits


Make = Callable[[], nn.Module]


def conv() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 64, 3), nn.Flatten())
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def tokens_of(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 501, (2, 9), generator=generator)


def images_of(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 3, 10, 10, generator=generator)


def config(nvme_path: Path, *, devices: str = "nvme nvme nvme", passes: int = 1, **more: Any) -> OffloadConfig:
    optimizer, gradient, parameter = devices.split()
    return OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="24MiB",
        bucket_bytes="1MiB",
        gradient_accumulation_steps=passes,
        offload_optimizer={"device": optimizer, "step_in_backward": True, **more},
        offload_gradient={"device": gradient},
        offload_param={"device": parameter},
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Training:
    """A swapped model and its optimizer."""

    def __init__(self, settings: OffloadConfig, make: Make = Model) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = make(), torch.optim.Optimizer([torch.zeros(1)], {})
        self.model, self.optimizer = swapper.offload(self.model, adamw(self.model), settings)
        self.generator = torch.Generator().manual_seed(3)

    @property
    def swapper(self) -> OptimizerSwapper:
        return swapper.of(self.optimizer)

    def backward(self) -> None:
        self.model(tokens_of(self.generator)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def bits(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.fixture
def training(nvme_path: Path) -> Iterator[Training]:
    made = Training(config(nvme_path))
    yield made
    made.optimizer.swapper.close()  # type: ignore[attr-defined]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


DEVICES = [" ".join(names) for names in itertools.product(["none", "cpu", "nvme"], ["none", "nvme"], ["none", "nvme"])]


def losses_and_bits(
    make: Make,
    inputs: Callable[[torch.Generator], torch.Tensor],
    passes: int,
    dtype: torch.dtype,
    settings: OffloadConfig | None,
    zero_first: bool = False,
) -> tuple[list[float], list[torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make().to(dtype)
    optimizer = adamw(model)
    if settings is not None:
        swapper.offload(model, optimizer, settings)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(5):
        if zero_first:
            optimizer.zero_grad()
        for _ in range(passes):
            x = inputs(generator)
            loss = model(x.to(dtype) if x.is_floating_point() else x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if not zero_first:
            model.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()], optimizer


@functools.cache
def plain_run(passes: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Once for all devices."""
    return losses_and_bits(Model, tokens_of, passes, dtype, None)


@pytest.mark.long
@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("devices", DEVICES)
def test_bits_are_those_of_plain_pytorch(devices: str, passes: int, dtype: torch.dtype, nvme_path: Path) -> None:
    plain = plain_run(passes, dtype)
    settings = config(nvme_path, devices=devices, passes=passes)
    losses, bits, optimizer = losses_and_bits(Model, tokens_of, passes, dtype, settings)
    assert losses == plain[0]
    assert same(bits, plain[1])
    swapper.of(optimizer).close()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_bits_with_activation_checkpointing(reentrant: bool, passes: int, nvme_path: Path) -> None:
    plain = losses_and_bits(lambda: Model(reentrant), tokens_of, passes, torch.float32, None)
    settings = config(nvme_path, passes=passes)
    losses, bits, optimizer = losses_and_bits(lambda: Model(reentrant), tokens_of, passes, torch.float32, settings)
    assert losses == plain[0]
    assert same(bits, plain[1])
    swapper.of(optimizer).close()


@pytest.mark.parametrize("zero_first", [False, True])
def test_bits_of_convolutions_in_channels_last(zero_first: bool, nvme_path: Path) -> None:
    plain = losses_and_bits(conv, images_of, 1, torch.float32, None, zero_first)
    losses, bits, optimizer = losses_and_bits(conv, images_of, 1, torch.float32, config(nvme_path), zero_first)
    assert losses == plain[0]
    assert same(bits, plain[1])
    swapper.of(optimizer).close()


@pytest.mark.long
def test_masters_are_those_of_stepping_at_the_end(nvme_path: Path) -> None:
    results = []
    for in_backward in (False, True):
        settings = config(nvme_path, master_weights=True, step_in_backward=in_backward)
        losses, bits, optimizer = losses_and_bits(Model, tokens_of, 1, torch.bfloat16, settings)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        masters = [swapper.of(optimizer).state(p).get("master_param") for p in parameters]
        results.append((losses, bits, masters))
        swapper.of(optimizer).close()
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])
    assert any(master is not None for master in results[0][2])
    for first, second in zip(results[0][2], results[1][2], strict=True):
        assert (first is None) == (second is None)
        assert first is None or second is None or torch.equal(first, second)


def test_gradients_are_gone_after_backward_and_parameters_have_changed(training: Training) -> None:
    before = training.bits()
    training.backward()
    assert all(raw_gradient(p) is None for p in training.model.blocks.parameters())  # type: ignore[union-attr]
    changed = [not torch.equal(a, b) for a, b in zip(before, training.bits(), strict=True)]
    assert any(changed)
    training.optimizer.step()


def test_fewer_passes_than_the_window_are_stepped_at_the_end(nvme_path: Path) -> None:
    made = Training(config(nvme_path, passes=3))
    before = made.bits()
    made.backward()
    assert same(before, made.bits())
    made.optimizer.step()
    assert not same(before, made.bits())
    made.swapper.close()


def test_a_pass_beyond_the_window_raises_before_it_touches_a_parameter(training: Training) -> None:
    training.backward()
    before = training.bits()
    with pytest.raises(SwapError, match="gradient_accumulation_steps: 1"):
        training.backward()
    assert same(before, training.bits())


def test_a_pass_beyond_the_window_that_begins_with_a_parameter_with_few_gradients_raises(nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(600, 600), nn.Linear(600, 600)])
    optimizer = adamw(model)
    swapper.offload(model, optimizer, config(nvme_path, devices="nvme none none", passes=2))
    x = torch.randn(3, 600)
    (model[0](x) + model[1](x)).sum().backward()
    model[0](x).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(SwapError, match=r"a backward pass came after .* gradient_accumulation_steps: 2"):
        model[1](x).sum().backward()  # Its second gradient, but in the third pass.
    assert same(before, [p.detach().clone() for p in model.parameters()])
    swapper.of(optimizer).close()


def test_gradients_that_were_not_zeroed_raise(training: Training) -> None:
    training.step()
    before = training.bits()
    with pytest.raises(SwapError, match=re.escape("call optimizer.zero_grad() after step()")):
        training.backward()
    assert same(before, training.bits())


def test_a_step_cannot_be_skipped(training: Training) -> None:
    training.backward()
    with pytest.raises(SwapError, match="a step cannot be skipped"):
        training.optimizer.zero_grad()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step()


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_backward_that_passes_through_says_what_to_do(nvme_path: Path, zeroed: bool) -> None:
    """A generator's through its discriminator, which a plain run does not step; and what the message says works."""
    ends = []
    for swapped in (False, True):
        torch.manual_seed(0)
        generator, critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        optimizers = [torch.optim.Adam(each.parameters()) for each in (generator, critic)]
        if swapped:
            settings = {"device": "nvme", "step_in_backward": True}
            config = OffloadConfig(nvme_path=nvme_path, pool_bytes="8MiB", offload_optimizer=settings)
            for each in optimizers:
                swapper.wrap_optimizer(each, config)
        for _ in range(3):
            for network, optimizer in zip((critic, generator), reversed(optimizers), strict=True):
                critic.requires_grad_(network is critic)
                x = torch.randn(4, WIDTH)
                critic(generator(x) if network is generator else x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append([p.detach().clone() for p in (*generator.parameters(), *critic.parameters())])
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))
    critic.requires_grad_(True)
    critic(torch.randn(4, WIDTH)).sum().backward()
    optimizers[1].step()
    if zeroed:
        optimizers[1].zero_grad()
    with pytest.raises(SwapError, match=re.escape("call requires_grad_(False) on them")):
        critic(generator(torch.randn(4, WIDTH))).sum().backward()
        optimizers[1].zero_grad()
    for each in optimizers:
        swapper.of(each).close()


@pytest.mark.parametrize("use", ["values", "clip", "set_to_zero"])
def test_using_a_gradient_that_is_gone_raises(use: str, training: Training) -> None:
    training.backward()
    gradient = training.model.head.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, torch.Tensor) and gradient.shape == (501, WIDTH)
    with pytest.raises(SwapError, match="step_in_backward"):
        if use == "values":
            gradient.sum()
        elif use == "clip":
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        else:
            training.optimizer.zero_grad(set_to_none=False)
    training.optimizer.step()


def test_our_clipping_is_refused(training: Training) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with clipping by a global norm"):
        training.swapper.clip_grad_norm_(1.0)
    with pytest.raises(ConfigError, match="cannot be combined with clipping, for which"):
        training.swapper.clip_grad_value_(1.0)


def test_grad_scaler_is_refused_before_a_parameter_is_touched(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    before = training.bits()
    loss = training.model(tokens_of(training.generator)).square().mean()
    with pytest.raises(ConfigError, match="cannot be combined with GradScaler"):
        scaler.scale(loss).backward()
    assert same(before, training.bits())
    del scaler


def test_step_pre_hooks_are_refused_at_construction_and_later(nvme_path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="cannot be combined with step pre-hooks"):
        swapper.offload(model, optimizer, config(nvme_path))
    hook.remove()
    assert type(model.head.weight) is nn.Parameter
    made = Training(config(nvme_path))
    made.step()
    before = made.bits()
    made.optimizer.register_step_pre_hook(lambda *_: None)
    made.optimizer.zero_grad()
    with pytest.raises(ConfigError, match="cannot be combined with step pre-hooks"):
        made.backward()
    assert same(before, made.bits())
    made.swapper.close()


def test_an_option_that_changes_between_backward_and_step_raises(training: Training) -> None:
    training.backward()
    training.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(SwapError, match="changed between backward"):
        training.optimizer.step()
    training.optimizer.param_groups[0]["lr"] = 1e-2
    training.optimizer.step()


def test_schedulers_change_options_between_steps(nvme_path: Path) -> None:
    results = []
    for settings in (None, config(nvme_path)):
        torch.manual_seed(0)
        model = Model()
        optimizer = adamw(model)
        if settings is not None:
            swapper.offload(model, optimizer, settings)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        generator = torch.Generator().manual_seed(3)
        for _ in range(4):
            model(tokens_of(generator)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        if settings is not None:
            swapper.of(optimizer).close()
    assert same(*results)


def test_state_is_refused_in_the_middle_of_a_window(training: Training) -> None:
    training.backward()
    with pytest.raises(SwapError, match="call step"):
        training.optimizer.state_dict()
    training.optimizer.step()
    assert training.optimizer.state_dict()["state"]


def test_state_that_is_replaced_in_the_middle_of_a_window_is_refused(training: Training) -> None:
    training.step()
    training.optimizer.zero_grad()
    training.optimizer.state = defaultdict(dict)  # Before backward: all of it is stepped without state.
    training.backward()
    training.optimizer.step()
    assert training.swapper.state(training.model.tokens.weight)["step"] == 1
    training.optimizer.zero_grad()
    training.backward()
    training.optimizer.state = defaultdict(dict)
    for _ in range(2):
        with pytest.raises(SwapError, match=r"state was replaced between backward\(\) and step\(\)"):
            training.optimizer.step()
    training.swapper.reset()
    training.step()
    assert training.swapper.state(training.model.tokens.weight)["step"] == 1


class Counting(torch.optim.Optimizer):
    """Counts its steps in each group, whether or not there are gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.add_(momentum, alpha=-group["lr"] / group["steps"])


swapper.register_elementwise(Counting)


@pytest.mark.parametrize("native", ["off", "on"])
def test_what_a_window_that_is_given_up_for_a_load_has_counted(native: str, nvme_path: Path) -> None:
    """Is forgotten, also of a group that has no gradient in the next one."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    optimizer = Counting([{"params": list(layer.parameters())} for layer in layers])
    swapper.offload(layers, optimizer, config(nvme_path, native_step=native))
    saved = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
    for steps in (True, False):
        sum(layer(torch.ones(WIDTH)).sum() for layer in layers).backward()  # type: ignore[union-attr]
        if steps:
            optimizer.step()
            optimizer.zero_grad()
    layers.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [group["steps"] for group in optimizer.param_groups] == [0, 0]
    layers[0](torch.ones(WIDTH)).sum().backward()
    optimizer.step()
    assert [group["steps"] for group in optimizer.param_groups] == [1, 1]
    swapper.of(optimizer).close()


def test_a_failed_write_in_backward_is_a_failed_step(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Training(config(nvme_path, devices="nvme none none"))
    made.step()
    made.optimizer.zero_grad()
    saved = made.optimizer.state_dict()
    saved_bits = {name: value.clone() for name, value in made.model.state_dict().items()}
    cache = made.swapper._cache
    put = cache.put
    calls = itertools.count()

    def failing_put(key: Any, length_bytes: int) -> None:
        if next(calls) == 2:
            raise SwapIOError(5, "write", Path("record"), 0, length_bytes)
        put(key, length_bytes)

    monkeypatch.setattr(cache, "put", failing_put)
    with pytest.raises(SwapIOError) as raised:
        made.backward()
    monkeypatch.undo()
    assert raised.value.buckets_stepped == 2
    made.optimizer.zero_grad()
    with pytest.raises(SwapError, match="load both from a checkpoint"):
        made.optimizer.step()
    made.model.load_state_dict(saved_bits)
    made.optimizer.load_state_dict(saved)
    made.step()
    made.swapper.close()


def test_everything_is_freed_with_the_optimizer(nvme_path: Path) -> None:
    made = Training(config(nvme_path, devices="nvme none none"))
    made.step()
    parameter = next(made.model.parameters())
    gone = weakref.ref(made.swapper)
    del made.optimizer
    assert parameter.grad is None
    made.model = nn.Module()
    del made
    import gc

    gc.collect()
    assert gone() is None


class Parts(nn.Module):
    """Uses those of its layers that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for i in used:
            x = self.layers[i](x)
        return x


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("devices", ["nvme none none", "nvme nvme none", "cpu none none"])
def test_a_batch_is_given_up_before_a_bucket_is_complete(devices: str, passes: int, nvme_path: Path) -> None:
    def train(settings: OffloadConfig | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Parts()
        optimizer = adamw(model)
        if settings is not None:
            swapper.offload(model, optimizer, settings)
        for given_up, used in [((0, 1), (0, 1)), ((0, 1), (0, 1, 2)), ((0, 1), (2, 0)), ((2,), (2, 1, 0))]:
            model(torch.randn(3, WIDTH), given_up).square().mean().backward()
            optimizer.zero_grad()
            for _ in range(passes):
                model(torch.randn(3, WIDTH), used).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        bits = [p.detach().clone() for p in model.parameters()]
        if settings is not None:
            swapper.of(optimizer).close()
        return bits

    settings = config(nvme_path, devices=devices, passes=passes).model_copy(update={"bucket_bytes": 4 << 20})
    assert same(train(settings), train(None))


def threads_in_backward(device: str) -> int:
    """How many threads autograd's own thread for `device` computes with."""
    found: list[int] = []
    leaf = torch.ones(1, device=device, requires_grad=True)
    leaf.register_hook(lambda _: found.append(torch.get_num_threads()))
    leaf.sum().backward()
    return found[0]


def bits_of_training_on(device: str, path: Path, in_backward: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 401), nn.Tanh(), nn.Linear(401, 300)).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    config = swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="32MiB",
        bucket_bytes="64KiB",
        offload_optimizer={
            "device": "nvme",
            "step_device": "cpu",
            "native_step": "off",
            "step_in_backward": in_backward,
        },
    )
    swapper.wrap_optimizer(optimizer, config)
    for seed in range(3):
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [p.detach().cpu() for p in model.parameters()]
    swapper.of(optimizer).close()
    return values


def test_a_thread_of_autograd_steps_with_as_many_threads_as_the_program(
    device: str, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the cuts, which are made for the program's number, are wrong in it, and made anew in each thread in turn."""
    wanted = 2 if threads_in_backward(device) == 1 else 1
    torch.set_num_threads(wanted)
    expected = bits_of_training_on(device, nvme_path, in_backward=False)
    assert threads_in_backward(device) != wanted, "torch has it follow by itself"
    found = bits_of_training_on(device, nvme_path, in_backward=True)
    assert threads_in_backward(device) == torch.get_num_threads() == wanted
    assert all(map(same_bits, found, expected))
    assert "cut anew" not in caplog.text


class OfItsOwn(nn.Parameter):
    pass


def test_a_parameter_of_a_class_of_its_own_is_refused(nvme_path: Path) -> None:
    """Its gradient is not seen to be given back; so a second backward was said to come too soon."""
    optimizer = torch.optim.AdamW([OfItsOwn(torch.ones(8))])
    with pytest.raises(swapper.ConfigError, match=r"a parameter is a OfItsOwn.*taken in backward; set it to false"):
        swapper.wrap_optimizer(
            optimizer,
            swapper.OffloadConfig(nvme_path=nvme_path, offload_optimizer={"device": "nvme", "step_in_backward": True}),
        )


class Drawing(torch.optim.Optimizer):
    """Draws random numbers for large parameters: the trial has small ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).add_(p.grad)
                p.sub_(mean if p.numel() < 4096 else mean * torch.rand_like(p), alpha=0.01)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_class_that_draws_random_numbers_is_stepped_in_order_or_refused(in_backward: bool, nvme_path: Path) -> None:
    def train(swapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 80))
        optimizer = Drawing(model.parameters())
        if swapped:
            offload = {"device": "nvme", "step_in_backward": in_backward}
            settings: dict[str, Any] = {"nvme_path": nvme_path, "pool_bytes": "8MiB", "bucket_bytes": "16KiB"}
            swapper.wrap_optimizer(optimizer, swapper.OffloadConfig(**settings, offload_optimizer=offload))
        for _ in range(3):
            model(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    expected = train(False)
    if in_backward:
        with pytest.raises(
            swapper.ConfigError, match="Drawing draws random numbers in its step, and with step_in_back"
        ):
            train(True)
        return
    assert all(torch.equal(p, q) for p, q in zip(train(True), expected, strict=True))
