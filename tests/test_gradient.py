"""Gradients that are away: the bits, strides and meaning of `p.grad` are those of plain PyTorch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizer_exact import MasterWeights, same_bits
from torch import nn
from torch.optim import Optimizer

import swapper
from swapper.config import OffloadConfig
from swapper.evicted import AwayGradient, raw_gradient
from swapper.gradient import GradientSwapper
from swapper.optimizer import OptimizerSwapper

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Net(nn.Module):
    """Parameters of every kind: long, odd, tiny, empty, channels_last, frozen, unused, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(96, 1500)
        self.odd = nn.Linear(1500, 61)
        self.conv = nn.Conv2d(16, 40, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.one = nn.Conv2d(16, 300, (1, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.twice = nn.Linear(96, 96)
        self.turned = nn.Parameter(torch.randn(61, 96).t() * 0.1)
        self.sometimes = nn.Parameter(torch.randn(96, 70) * 0.1)
        self.frozen = nn.Parameter(torch.randn(96, 96) * 0.1, requires_grad=False)
        self.unused = nn.Parameter(torch.randn(100, 100))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.tiny = nn.Parameter(torch.randn(()))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = torch.tanh(self.twice(x) @ self.frozen)
        x = torch.tanh(self.twice(x))
        out = self.odd(torch.tanh(self.long(x))).sum() + (x @ self.turned).square().sum() + self.empty.sum()
        if self.count % 3 == 1:
            out = out + (x @ self.sometimes).square().sum()
        image = x[:, :64].reshape(-1, 16, 2, 2)
        image = nn.functional.pad(image, (1, 1, 1, 1)).contiguous(memory_format=torch.channels_last)
        return (out + self.conv(image).square().sum() + self.one(image).sum()) * self.tiny.tanh() * 0.01


MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": adamw,
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "foreach": lambda ps: torch.optim.Adam(ps, lr=1e-3, foreach=True),
    "Adafactor": lambda ps: torch.optim.Adafactor([p for p in ps if p.numel()], lr=1e-2),  # It divides by numel.
}


def make_config(nvme_path: Path, steps: int = 1, **settings: Any) -> OffloadConfig:
    """Buckets so small that long parameters are cut, and a pool of few of them."""
    values: dict[str, Any] = {
        "nvme_path": nvme_path,
        "pool_bytes": "4MiB",
        "bucket_bytes": "256KiB",
        "gradient_accumulation_steps": steps,
        "offload_optimizer": {"device": "nvme"},
        "offload_gradient": {"device": "nvme"},
    }
    return OffloadConfig(**{**values, **settings})


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def batches(dtype: torch.dtype, seed: int = 1) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 96, generator=generator).to(dtype)


def gradients(model: nn.Module) -> list[Any]:
    """Bits and strides of every gradient, without disturbing where it is."""
    found = []
    for p in model.parameters():
        gradient = p.grad
        if gradient is None:
            found.append(None)
        else:
            found.append((tuple(gradient.shape), gradient.stride(), copy.deepcopy(gradient)))
    return found


def assert_same_gradients(model: nn.Module, expected: list[Any]) -> None:
    for (name, _), mine, theirs in zip(model.named_parameters(), gradients(model), expected, strict=True):
        if theirs is None:
            assert mine is None, name
            continue
        assert mine is not None, name
        assert mine[:2] == theirs[:2], name
        assert same_bits(mine[2].contiguous(), theirs[2].contiguous()), name


def assert_same(plain: nn.Module, swapped: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), swapped.parameters(), strict=True):
        assert same_bits(p.detach().contiguous(), q.detach().contiguous()), name


@contextmanager
def wrapped(optimizer: Optimizer, config: OffloadConfig) -> Iterator[OptimizerSwapper]:
    swapper.wrap_optimizer(optimizer, config)
    try:
        yield swapper.of(optimizer)
    finally:
        swapper.of(optimizer).close()


def gradients_of(optimizer: Optimizer) -> GradientSwapper:
    found = swapper.of(optimizer).gradients
    assert isinstance(found, GradientSwapper)
    return found


# --- Exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-masters"])
def test_same_bits_as_plain(nvme_path: Path, precision: str, name: str, micro_batches: int, clip: float | None) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    masters = precision == "bf16-masters"
    plain, swapped = make_net(dtype), make_net(dtype)
    make = OPTIMIZERS[name]
    reference: Any = MasterWeights(trained(plain), make) if masters else make(trained(plain))
    optimizer = make(trained(swapped))
    config = make_config(nvme_path, micro_batches, offload_optimizer={"device": "nvme", "master_weights": masters})
    with wrapped(optimizer, config) as handle:
        plain_data, swapped_data = batches(dtype), batches(dtype)
        for step in range(5):
            for _ in range(micro_batches):
                loss = plain(next(plain_data))
                loss.backward()
                mine = swapped(next(swapped_data))
                mine.backward()
                assert same_bits(mine.detach(), loss.detach())
            assert raw_gradient(swapped.long.weight) is None and swapped.long.weight.grad is not None
            if clip is not None:
                expected = torch.nn.utils.clip_grad_norm_(trained(plain), clip)
                assert same_bits(handle.clip_grad_norm_(clip), expected)
            if step == 3:
                assert_same_gradients(swapped, gradients(plain))
            reference.step()
            optimizer.step()
            if masters:
                plain.zero_grad()
            else:
                reference.zero_grad()
            optimizer.zero_grad()
            assert_same(plain, swapped)
        assert handle.stats().gradients.bytes_written > 0


# --- `p.grad` --------------------------------------------------------------------------------------------------------


class Twin:
    """A plain and a swapped net that are given the same."""

    def __init__(self, nvme_path: Path, steps: int = 1, **settings: Any) -> None:
        self.plain, self.swapped = make_net(), make_net()
        self.reference, self.optimizer = adamw(trained(self.plain)), adamw(trained(self.swapped))
        swapper.wrap_optimizer(self.optimizer, make_config(nvme_path, steps, **settings))
        self.swapper = swapper.of(self.optimizer)
        self.data = batches(torch.float32)

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.swapper.close()

    @property
    def nets(self) -> tuple[Net, Net]:
        return self.plain, self.swapped

    def backward(self, **options: Any) -> None:
        x = next(self.data)
        for net in self.nets:
            net(x).backward(**options)

    def step(self) -> None:
        self.reference.step()
        self.optimizer.step()

    def finish(self) -> None:
        """The state that both are in leads to the same, here and in two more steps."""
        assert_same_gradients(self.swapped, gradients(self.plain))
        self.step()
        assert_same(self.plain, self.swapped)
        for _ in range(2):
            self.reference.zero_grad()
            self.optimizer.zero_grad()
            self.backward()
            self.step()
        assert_same(self.plain, self.swapped)

    @property
    def moves(self) -> tuple[int, int]:
        moves = self.swapper.stats().gradients
        return moves.reads, moves.writes


def test_a_gradient_does_not_stay_in_memory(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        large = [p for p in trained(twin.swapped) if p.nbytes >= 16 << 10 and p is not twin.swapped.unused]
        small = [p for p in trained(twin.swapped) if p.nbytes < 16 << 10]
        assert len(large) >= 6
        assert all(raw_gradient(p) is None for p in large)
        assert all(raw_gradient(p) is not None for p in small)
        twin.finish()


def test_a_micro_batch_is_one_read_and_one_write_and_the_first_is_none_read(nvme_path: Path) -> None:
    with Twin(nvme_path, 3) as twin:
        parts = sum(len(gradient.parts) for gradient in gradients_of(twin.optimizer)._gradients.values())
        parts -= 1  # `unused`
        for _ in range(3):
            twin.backward()
            twin.swapper.flush()  # Else what is still being written need not be read.
        reads, writes = twin.moves
        # `sometimes` comes in the first only. It is expected, and read, in the second too.
        assert (reads, writes) == (2 * (parts - 1) + 1, 3 * parts - 2)
        twin.step()
        assert twin.moves == (reads + parts, writes)
        assert_same(twin.plain, twin.swapped)
        twin.swapper.flush()
        twin.optimizer.zero_grad()
        twin.backward()
        assert twin.moves == (reads + parts, writes + parts)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model", "foreach"])
def test_zero_grad_reads_nothing(nvme_path: Path, whose: str, set_to_none: bool) -> None:
    with Twin(nvme_path) as twin:
        if whose == "foreach":
            for optimizer in (twin.reference, twin.optimizer):
                optimizer.defaults["foreach"] = True
        for _ in range(3):
            twin.backward()
            twin.swapper.flush()
            before = twin.moves
            for net, optimizer in zip(twin.nets, (twin.reference, twin.optimizer), strict=True):
                (net if whose == "model" else optimizer).zero_grad(set_to_none)
            assert twin.moves == before
            assert (twin.swapped.long.weight.grad is None) == set_to_none
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        twin.step()  # With zeros, where `set_to_none` is False.
        twin.backward()
        twin.finish()


def negative_zero(x: torch.Tensor) -> bool:
    return bool((torch.signbit(x) & (x == 0)).any())


def test_zeros_are_added_to_as_in_memory(nvme_path: Path) -> None:
    p, q = nn.Parameter(torch.ones(8192)), nn.Parameter(torch.ones(8192))
    reference, optimizer = torch.optim.SGD([p], lr=1), torch.optim.SGD([q], lr=1)
    with wrapped(optimizer, make_config(nvme_path)):
        for parameter, each in ((p, reference), (q, optimizer)):
            (parameter * -0.0).sum().backward()
            each.zero_grad(set_to_none=False)
            (parameter * -0.0).sum().backward()
        assert raw_gradient(q) is None
        assert p.grad is not None and q.grad is not None
        assert same_bits(q.grad.clone(), p.grad) and not negative_zero(p.grad)


def test_metadata_is_answered_without_the_values(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        twin.swapper.flush()
        before = twin.moves
        for p, q in zip(trained(twin.plain), trained(twin.swapped), strict=True):
            mine, theirs = q.grad, p.grad
            if theirs is None:
                assert mine is None
                continue
            assert mine is not None and q.grad is mine
            assert isinstance(mine, torch.Tensor)
            for ask in (
                lambda g: (g.shape, g.dtype, g.device, g.layout, g.stride(), g.numel(), g.nbytes, g.size(), g.dim()),
                lambda g: (g.requires_grad, g.grad_fn, g.is_leaf, g.is_sparse, g.is_contiguous(), g.is_cuda, g.grad),
                lambda g: (len(g) if g.dim() else 0, g.element_size(), g.is_floating_point(), g._base),
                lambda g: g.is_contiguous(memory_format=torch.channels_last) if g.dim() == 4 else None,
                lambda g: (g.requires_grad_(False) is g, hash(g) == id(g)),
            ):
                assert ask(mine) == ask(theirs)
        assert twin.moves == before
        twin.finish()


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.grad.sum(),  # type: ignore[union-attr]
    "index": lambda p: p.grad.reshape(-1)[3],  # type: ignore[union-attr]
    "numpy": lambda p: torch.from_numpy(p.grad.numpy().copy()),  # type: ignore[union-attr]
    "with its parameter": lambda p: p.detach() + p.grad,
    "in a list": lambda p: torch.cat([p.grad.reshape(-1), p.detach().reshape(-1)]),  # type: ignore[union-attr]
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "save": lambda p: saved_and_loaded(p.grad),
    "foreach": lambda p: torch._foreach_norm([p.grad], 2)[0],  # type: ignore[list-item]
    "add": lambda p: p.grad.add_(1),  # type: ignore[union-attr]
    "data": lambda p: p.grad.data.mul_(2),  # type: ignore[union-attr]
    "fill": lambda p: p.grad.fill_(0.5),  # type: ignore[union-attr]
    "out": lambda p: torch.mul(p.detach(), 2, out=p.grad),
    "setitem": lambda p: p.grad.__setitem__(0, 7.0),  # type: ignore[union-attr]
    "repr": lambda p: torch.tensor(hash(repr(p.grad))),
    "requires_grad": lambda p: p.grad.requires_grad_(True).detach(),  # type: ignore[union-attr]
    "zero": lambda p: p.grad.zero_(),  # type: ignore[union-attr]
    "set_grad": lambda p: setattr(p, "grad", p.grad * 2),  # type: ignore[operator]
    "itself": lambda p: setattr(p, "grad", p.grad),
    "delete": lambda p: delattr(p, "grad"),
    "none": lambda p: setattr(p, "grad", None),
}


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("use", USES)
def test_any_use_of_a_gradient(nvme_path: Path, use: str) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        for name in ("long.weight", "conv.weight", "turned"):
            mine, theirs = (USES[use](net.get_parameter(name)) for net in reversed(twin.nets))
            if isinstance(theirs, torch.Tensor):
                assert type(mine) is torch.Tensor or use == "zero"
                assert mine.stride() == theirs.stride()
                assert same_bits(mine.contiguous(), theirs.contiguous())
            assert type(twin.swapped.odd.bias) is nn.Parameter
        twin.backward()
        twin.finish()


def test_who_holds_a_gradient_sees_what_happens_to_it(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        names = ("long.weight", "conv.weight", "twice.weight")
        held = [[net.get_parameter(name).grad for name in names] for net in twin.nets]
        assert all(isinstance(gradient, AwayGradient) for gradient in held[1])
        twin.backward()
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        for theirs, mine in zip(*held, strict=True):
            assert theirs is not None and mine is not None
            assert same_bits(mine.contiguous(), theirs.contiguous())
        twin.backward()
        torch.nn.utils.clip_grad_norm_(trained(twin.plain), 1e-3)
        twin.swapper.clip_grad_norm_(1e-3)
        held += [[net.get_parameter(name).grad for name in ("one.weight", "turned")] for net in twin.nets]
        twin.step()
        twin.reference.zero_grad()
        twin.optimizer.zero_grad()
        for theirs, mine in (*zip(*held[:2], strict=True), *zip(*held[2:], strict=True)):
            assert theirs is not None and mine is not None
            assert same_bits(mine.contiguous(), theirs.contiguous())
        twin.backward()
        twin.finish()


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_what_is_in_memory_before_a_backward_stays_there_and_is_added_to_in_place(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        assigned = []
        for net in twin.nets:
            net.long.weight.grad = torch.ones_like(net.long.weight)
            net.odd.weight.grad = torch.ones(1500, 61).t()  # Of other strides than the parameter.
            assigned.append((net.long.weight.grad, net.odd.weight.grad))
        twin.backward()
        for theirs, mine in zip(*assigned, strict=True):
            assert same_bits(mine.contiguous(), theirs.contiguous())
        assert twin.swapped.long.weight.grad is assigned[1][0]
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        twin.step()
        assert_same(twin.plain, twin.swapped)
        twin.reference.zero_grad()
        twin.optimizer.zero_grad()
        twin.backward()
        assert raw_gradient(twin.swapped.long.weight) is None
        twin.finish()


def test_a_gradient_assigned_from_another_parameter(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        for net in twin.nets:
            net.unused.grad = net.unused.detach() * 2
            net.frozen.grad = net.twice.weight.grad  # One tensor, of two parameters.
            net.twice.weight.grad.mul_(3)  # type: ignore[union-attr]
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        twin.finish()


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}], ids=lambda o: next(iter(o)))
@pytest.mark.filterwarnings("ignore:Using backward")
def test_two_backwards_of_one_graph(nvme_path: Path, options: dict[str, bool]) -> None:
    with Twin(nvme_path) as twin:
        x = next(twin.data)
        for net in twin.nets:
            loss = net(x)
            loss.backward(**options)
            loss.backward()
        kept = [p.grad is not None and p.grad.grad_fn is not None for p in trained(twin.plain)]
        assert kept == [p.grad is not None and p.grad.grad_fn is not None for p in trained(twin.swapped)]
        for net in twin.nets:
            for p in net.parameters():
                if p.grad is not None:
                    p.grad = p.grad.detach()
        twin.finish()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_is_differentiated_again(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()  # Then those with a graph are added to what is away.
        x = next(twin.data)
        for net in twin.nets:
            net(x).backward(create_graph=True)
            penalty = net.long.weight.grad.square().sum() + net.turned.grad.square().sum()  # type: ignore[union-attr]
            penalty.backward()
        for net in twin.nets:
            for p in net.parameters():
                if p.grad is not None:
                    p.grad = p.grad.detach()
        twin.finish()


def test_hooks_of_the_user(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        seen: list[list[torch.Tensor]] = []
        for net in twin.nets:
            arrived: list[torch.Tensor] = []
            seen.append(arrived)
            net.long.weight.register_hook(lambda g: g * 2)
            net.twice.weight.register_hook(lambda g, arrived=arrived: arrived.append(g))

            def after(p: torch.Tensor, arrived: list[torch.Tensor] = arrived) -> None:
                assert p.grad is not None
                arrived.append(p.grad.clone())
                p.grad.add_(1)

            net.conv.weight.register_post_accumulate_grad_hook(after)
            net.long.weight.register_post_accumulate_grad_hook(after)
        for _ in range(2):
            twin.backward()
        for theirs, mine in zip(*seen, strict=True):
            assert same_bits(mine.contiguous(), theirs.contiguous())
        twin.finish()


def test_autograd_grad_leaves_gradients_alone(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        x = next(twin.data)
        found = [torch.autograd.grad(net(x), [net.long.weight, net.conv.weight]) for net in twin.nets]
        for theirs, mine in zip(*found, strict=True):
            assert same_bits(mine.contiguous(), theirs.contiguous())
        twin.finish()


def test_sparse_gradients(nvme_path: Path) -> None:
    def make() -> tuple[nn.Embedding, Optimizer]:
        torch.manual_seed(0)
        table = nn.Embedding(3000, 20)
        return table, torch.optim.SGD(table.parameters(), lr=0.1)

    def train(table: nn.Embedding, optimizer: Optimizer) -> None:
        x = torch.randn(20, generator=torch.Generator().manual_seed(3))
        for sparse in (False, True, True, False):
            for _ in range(2):
                table.sparse = sparse
                (table(torch.tensor([1, 2, 2, 7])) @ x).sum().backward()
                table.sparse = not sparse
                (table(torch.tensor([2999, 2])) @ x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, reference = make()
    train(plain, reference)
    swapped, optimizer = make()
    with wrapped(optimizer, make_config(nvme_path)):
        train(swapped, optimizer)
        assert_same(plain, swapped)


def test_a_scaler(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2) for _ in range(2)]
        for factor in (1.0, 1.0, float("inf"), 1.0):
            x = next(twin.data)
            optimizers = (twin.reference, twin.optimizer)
            for net, optimizer, scaler in zip(twin.nets, optimizers, scalers, strict=True):
                scaler.scale(net(x) * factor).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(trained(net), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            assert_same(twin.plain, twin.swapped)
        twin.backward()
        twin.finish()


def test_a_model_with_gradients_that_are_away_is_copied_and_saved(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        for copied in (copy.deepcopy(twin.swapped), saved_model(twin.swapped)):
            assert_same(copied, twin.plain)
            assert all(type(p) is nn.Parameter and p.grad is None for p in copied.parameters())
            copied(next(twin.data)).backward()
        twin.nets[0].count = twin.nets[1].count
        twin.finish()


def saved_model(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_parameters_that_are_no_plain_parameters_keep_their_gradients(nvme_path: Path) -> None:
    class Special(nn.Parameter):
        pass

    parameters = [Special(torch.ones(8192)), torch.ones(8192, requires_grad=True), nn.Parameter(torch.ones(8192))]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    with wrapped(optimizer, make_config(nvme_path)):
        sum((p * 2).sum() for p in parameters).backward()  # type: ignore[union-attr]
        assert [raw_gradient(p) is None for p in parameters] == [False, False, True]  # type: ignore[arg-type]
        assert all(torch.equal(p.grad, torch.full((8192,), 2.0)) for p in parameters)  # type: ignore[arg-type]
        optimizer.step()
        assert all(torch.equal(p.detach(), torch.zeros(8192)) for p in parameters)


def test_compiled_models(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        x = next(twin.data)
        for net in twin.nets:
            layers = torch.compile(nn.Sequential(net.twice, nn.Tanh(), net.long), backend="eager")
            for _ in range(2):
                layers(x).sum().backward()
        twin.finish()
