"""Gradients that are away: the bits, strides and meaning of `p.grad` are those of plain PyTorch."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_twins import (
    MakeOptimizer,
    Twin,
    adamw,
    assert_same,
    assert_same_gradients,
    batches,
    gradients,
    gradients_of,
    make_config,
    make_net,
    trained,
    wrapped,
)
from still_drive import go_on_when_waited_for, still
from torch import nn
from torch.optim import Optimizer
from training import MasterWeights, same_bits

import swapper
from swapper.errors import SwapError
from swapper.gradient.records import needs_of
from swapper.gradient.swapper import GradientSwapper
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.optimizer.swapper import Moves
from swapper.process.warnings import warn_once
from swapper.storage.buffers import BufferPool, Lease
from swapper.storage.cache import RecordCache
from swapper.storage.store import RecordKey, TensorStore
from swapper.storage.transfers import AnyTransfer
from swapper.tensors.evicted_gradients import EvictedGradient, raw_gradient

pytestmark = pytest.mark.usefixtures("leaves_nothing")


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": adamw,
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "foreach": lambda ps: torch.optim.Adam(ps, lr=1e-3, foreach=True),
    "Adafactor": lambda ps: torch.optim.Adafactor([p for p in ps if p.numel()], lr=1e-2),  # It divides by numel.
}


# --- Exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.packs_too
@pytest.mark.sampled(10)
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


def test_a_backward_waits_for_no_write_while_the_pool_has_room(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    go_on_when_waited_for(monkeypatch, plan)
    for pool_bytes, waits in (("8MiB", False), ("1MiB", True)):
        with Twin(nvme_path, pool_bytes=pool_bytes) as twin:
            with still(plan):
                twin.backward()
            moves = twin.swapper.stats().gradients
            assert moves.writes > 0 and (moves.wait_write_s > 0) == waits
            twin.finish()


def test_earlier_sums_are_read_ahead_in_the_order_of_arrival(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, RecordKey]] = []
    read, take = TensorStore.read, RecordCache.take

    def log_read(store: TensorStore, key: RecordKey, lease: Lease) -> AnyTransfer:
        events.append(("read", key))
        return read(store, key, lease)

    def log_take(cache: RecordCache, key: RecordKey, length_bytes: int, **how: bool) -> tuple[Lease, bool]:
        events.append(("take", key))
        return take(cache, key, length_bytes, **how)

    with Twin(nvme_path, 2, pool_bytes="8MiB") as twin:
        twin.backward()
        twin.swapper.flush()
        monkeypatch.setattr(TensorStore, "read", log_read)
        monkeypatch.setattr(RecordCache, "take", log_take)
        twin.backward()
        taken = [key for event, key in events if event == "take"]
        assert len(taken) > 8
        for before, key in itertools.pairwise(taken):
            assert events.index(("read", key)) < events.index(("take", before))
        monkeypatch.undo()
        twin.finish()


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


@pytest.mark.parametrize("zero", [torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default])
def test_an_operator_that_zeroes_reads_nothing(nvme_path: Path, zero: Any) -> None:
    """DTensors of torch 2.8 call it on their local tensors, where newer ones call it past Python's protocols."""
    with Twin(nvme_path) as twin:
        twin.backward()
        twin.swapper.flush()
        before = twin.moves
        for net in twin.nets:
            gradient: Any = net.long.weight.grad
            zero([gradient] if zero is torch.ops.aten._foreach_zero_.default else gradient)
        assert twin.moves == before
        assert_same_gradients(twin.swapped, gradients(twin.plain))
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
        assert all(isinstance(gradient, EvictedGradient) for gradient in held[1])
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


@pytest.mark.parametrize("how", ["half", "double and back", "data of another shape"])
def test_a_parameter_that_has_another_dtype_or_shape_meanwhile(nvme_path: Path, how: str) -> None:
    """`module.half()` converts the parameter first, then asks for its gradient."""
    with Twin(nvme_path) as twin:
        twin.backward()
        for net in twin.nets:
            if how == "data of another shape":
                net.long.weight.data = net.long.weight.data[1:].clone()
                assert net.long.weight.grad is not None
            else:
                net.half() if how == "half" else net.double().float()
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        with pytest.raises(RuntimeError, match="assign"):
            twin.swapped.long.weight.grad = torch.ones(1, dtype=torch.float64)
        if how == "double and back":
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


# --- Clipping --------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of several dtypes; some gradients stay in memory."""

    def __init__(self) -> None:
        super().__init__()
        single, half, brain, double = torch.float32, torch.float16, torch.bfloat16, torch.float64
        shapes = ((70, single), (501, brain), (64, double), (333, half), (2, brain), (1, single))
        self.values = nn.ParameterList(nn.Parameter(torch.randn(rows, 300).to(dtype)) for rows, dtype in shapes)

    def forward(self, factor: float) -> torch.Tensor:
        terms = [(p * factor).tanh().to(torch.float64).square().sum() for p in self.values]
        return torch.stack(terms).sum()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0, 0.0])
@pytest.mark.parametrize("factor", [0.01, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_clipping_has_the_bits_of_torch(nvme_path: Path, norm_type: float, factor: float, micro_batches: int) -> None:
    torch.manual_seed(0)
    plain, swapped = Mixed(), Mixed()
    swapped.load_state_dict(plain.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(swapped.parameters(), lr=0.1, momentum=0.9)
    with wrapped(optimizer, make_config(nvme_path, micro_batches)) as handle:
        for step in range(3):
            for i in range(micro_batches):
                for net in (plain, swapped):
                    net(factor * (i + 1)).backward()
            for max_norm in (0.5, 0.3) if step else (0.5,):
                expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
                found = handle.clip_grad_norm_(max_norm, norm_type)
                assert found.dtype == expected.dtype and same_bits(found.reshape(1), expected.reshape(1))
            assert raw_gradient(swapped.values[1]) is None
            if step == 1:
                assert_same_gradients(swapped, gradients(plain))
            for net, each in ((plain, reference), (swapped, optimizer)):
                each.step()
                each.zero_grad()
                assert all(p.isfinite().all() for p in net.parameters())
            assert_same(plain, swapped)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_clipping_by_value_has_the_bits_of_torch_and_moves_nothing(nvme_path: Path, micro_batches: int) -> None:
    with Twin(nvme_path, micro_batches) as twin:
        for step in range(3):
            for _ in range(micro_batches):
                twin.backward()
            twin.swapper.flush()
            before = twin.moves
            torch.nn.utils.clip_grad_value_(trained(twin.plain), 1e-3)
            twin.swapper.clip_grad_value_(1e-3)
            if step:  # What was put off is done in order, whatever comes after it.
                for net, clip in ((twin.plain, None), (twin.swapped, twin.swapper)):
                    for value in (5e-4, 4e-4):
                        if clip is None:
                            torch.nn.utils.clip_grad_norm_(trained(net), 1e-2)
                            torch.nn.utils.clip_grad_value_(trained(net), value)
                        else:
                            clip.clip_grad_norm_(1e-2)
                            clip.clip_grad_value_(value)
            else:
                assert twin.moves == before
            assert raw_gradient(twin.swapped.long.weight) is None
            twin.step()
            assert_same(twin.plain, twin.swapped)
            twin.reference.zero_grad()
            twin.optimizer.zero_grad()


def test_clipping_by_value_keeps_what_is_no_number(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        weights = [net.long.weight for net in twin.nets]
        hooks = [p.register_hook(lambda grad: torch.where(grad > 0, grad / 0, grad - grad / 0)) for p in weights]
        twin.backward()
        assert raw_gradient(weights[1]) is None
        for hook in hooks:
            hook.remove()
        torch.nn.utils.clip_grad_value_(trained(twin.plain), 1.0)
        twin.swapper.clip_grad_value_(1.0)
        assert weights[0].grad is not None and {float(v) for v in weights[0].grad.nan_to_num(7).unique()} <= {-1, 1, 7}
        assert_same_gradients(twin.swapped, gradients(twin.plain))


def test_clipping_by_value_refuses_what_has_no_order_at_once(nvme_path: Path) -> None:
    values = nn.Parameter(torch.randn(9000, dtype=torch.complex64))
    with wrapped(torch.optim.SGD([values], lr=0.1), make_config(nvme_path)) as handle:
        values.abs().sum().backward()
        assert raw_gradient(values) is None
        with pytest.raises((RuntimeError, NotImplementedError)) as found:
            handle.clip_grad_value_(1.0)
        with pytest.raises(type(found.value), match=str(found.value)[:20]):
            torch.nn.utils.clip_grad_value_([values], 1.0)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_reads_nothing_where_norms_were_taken_in_passing(nvme_path: Path, norm_type: float) -> None:
    with Twin(nvme_path, 2) as twin:
        for step in range(3):
            for _ in range(2):
                for net in twin.nets:
                    net.count = 0  # All parameters are used: the norm is taken in the last of two micro-batches.
                twin.backward()
            for net in twin.nets:
                net.empty.grad = None  # It has no infinity norm.
            twin.swapper.flush()
            before = twin.moves
            expected = torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.1, norm_type)
            assert same_bits(twin.swapper.clip_grad_norm_(0.1, norm_type), expected)
            # Which norm is wanted is known from the first time on; until then it is taken to be 2.
            assert (twin.moves == before) == (step > 0 or norm_type == 2)
            twin.step()
            assert_same(twin.plain, twin.swapped)
            twin.reference.zero_grad()
            twin.optimizer.zero_grad()


def test_norms_depend_on_threads_and_are_taken_again(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        torch.set_num_threads(2)
        twin.backward()
        torch.set_num_threads(1)
        expected = torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.1, 1.0)
        assert same_bits(twin.swapper.clip_grad_norm_(0.1, 1.0), expected)
        twin.reference.zero_grad()
        twin.optimizer.zero_grad()
        torch.set_num_threads(2)
        twin.backward()
        torch.set_num_threads(1)
        expected = torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.1, 1.0)
        assert same_bits(twin.swapper.clip_grad_norm_(0.1, 1.0), expected)
        twin.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
def test_a_norm_does_not_depend_on_where_the_gradient_lies(dtype: torch.dtype, norm_type: float) -> None:
    """What is relied on where a norm is taken of a copy."""
    values = torch.randn(300_007, generator=torch.Generator().manual_seed(5)).to(dtype)
    expected = torch.linalg.vector_norm(values, norm_type)
    buffer = torch.empty(300_100, dtype=dtype)
    for offset in range(40):
        moved = buffer[offset : offset + len(values)].copy_(values)
        assert same_bits(torch.linalg.vector_norm(moved, norm_type).reshape(1), expected.reshape(1)), offset


def test_gradients_that_are_not_finite(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        for net in twin.nets:
            net.tiny.grad.fill_(float("inf"))  # type: ignore[union-attr]
        for clip in (
            lambda error: torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.1, error_if_nonfinite=error),
            lambda error: twin.swapper.clip_grad_norm_(0.1, error_if_nonfinite=error),
        ):
            with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 for gradients from .* is non-finite"):
                clip(True)
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        twin.reference.zero_grad()
        twin.optimizer.zero_grad()
        twin.backward()
        for net in twin.nets:
            net.tiny.grad.fill_(float("inf"))  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.1)
        twin.swapper.clip_grad_norm_(0.1)
        assert_same_gradients(twin.swapped, gradients(twin.plain))


def test_clipping_without_gradients(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        assert twin.swapper.clip_grad_norm_(1.0) == torch.nn.utils.clip_grad_norm_(trained(twin.plain), 1.0)


def test_what_was_clipped_is_added_to_and_cleared_by_itself(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.1)
        twin.swapper.clip_grad_norm_(0.1)
        for net in twin.nets:
            net.long.zero_grad()
            net.conv.zero_grad(set_to_none=False)
        twin.backward()
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.05)
        twin.swapper.clip_grad_norm_(0.05)
        twin.finish()


def test_clipping_of_some_parameters_by_torch_itself(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        for _ in range(2):
            twin.backward()
            norms = [torch.nn.utils.clip_grad_norm_(net.long.parameters(), 0.1) for net in twin.nets]
            norms += [
                torch.nn.utils.get_total_norm([p.grad for p in trained(net) if p.grad is not None]) for net in twin.nets
            ]
            assert same_bits(norms[0], norms[1]) and same_bits(norms[2], norms[3])
            for net in twin.nets:
                torch.nn.utils.clip_grad_value_(net.parameters(), 1e-3)
            twin.step()
            twin.reference.zero_grad()
            twin.optimizer.zero_grad()
        twin.backward()
        assert raw_gradient(twin.swapped.long.weight) is None
        twin.finish()


# --- Plans that change -----------------------------------------------------------------------------------------------


def test_parameters_that_are_added_later(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        twin.step()
        for net, optimizer in zip(twin.nets, (twin.reference, twin.optimizer), strict=True):
            net.frozen.requires_grad_(True)
            optimizer.add_param_group({"params": [net.frozen], "lr": 1e-2})
        twin.backward()
        assert raw_gradient(twin.swapped.frozen) is not None  # The next step takes notice of it.
        twin.step()
        assert_same(twin.plain, twin.swapped)
        twin.backward()  # Added to what is there, which stays.
        twin.reference.zero_grad()
        twin.optimizer.zero_grad()
        twin.backward()
        assert raw_gradient(twin.swapped.frozen) is None
        twin.finish()


def test_parameters_that_the_pool_has_no_room_for_keep_their_gradients(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = nn.Parameter(torch.ones(64, 128))
    # Stepped whole, so that a gradient is in one piece, and with little state.
    optimizer = torch.optim.Adafactor([small])
    with wrapped(optimizer, make_config(nvme_path, pool_bytes="1MiB")):
        long = nn.Parameter(torch.ones(400, 400))
        optimizer.add_param_group({"params": [long]})
        ((small * 2).sum() + (long * 3).sum()).backward()
        optimizer.step()
        assert "no room for the gradient" in caplog.text
        optimizer.zero_grad()
        ((small * 2).sum() + (long * 3).sum()).backward()
        assert raw_gradient(small) is None and raw_gradient(long) is not None
        optimizer.step()


def test_parameters_that_leave(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        for net, optimizer in zip(twin.nets, (twin.reference, twin.optimizer), strict=True):
            optimizer.param_groups[0]["params"] = [
                p for p in optimizer.param_groups[0]["params"] if p is not net.long.weight
            ]
        twin.step()
        assert raw_gradient(twin.swapped.long.weight) is not None
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        for net in twin.nets:
            net.zero_grad()
        twin.backward()
        assert raw_gradient(twin.swapped.long.weight) is not None
        twin.finish()


@pytest.mark.parametrize("clipped", [False, True])
def test_cuts_that_change_while_gradients_are_away(nvme_path: Path, clipped: bool) -> None:
    """The cuts of a step in bf16 depend on the number of threads."""
    plain, swapped = (make_net(torch.bfloat16) for _ in range(2))
    reference, optimizer = adamw(trained(plain)), adamw(trained(swapped))
    torch.set_num_threads(2)
    with wrapped(optimizer, make_config(nvme_path, bucket_bytes="64KiB")) as handle:
        data = batches(torch.bfloat16)
        for threads in (1, 2, 1):
            x = next(data)
            for net in (plain, swapped):
                net(x).backward()
            for part in gradients_of(optimizer)._gradients.values():
                assert len(part.parts) >= 1
            cuts = [gradient.cuts for gradient in gradients_of(optimizer)._gradients.values()]
            if clipped:
                torch.nn.utils.clip_grad_norm_(trained(plain), 0.1)
                handle.clip_grad_norm_(0.1)
            torch.set_num_threads(threads)
            reference.step()
            optimizer.step()
            assert_same(plain, swapped)
            assert_same_gradients(swapped, gradients(plain))
            for each in (reference, optimizer):
                each.zero_grad()
        assert [gradient.cuts for gradient in gradients_of(optimizer)._gradients.values()] != cuts


# --- The ends --------------------------------------------------------------------------------------------------------


def test_unwrapping_brings_gradients_back(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.1)
        twin.swapper.clip_grad_norm_(0.1)
        swapper.unwrap_optimizer(twin.optimizer)
        assert all(type(p) is nn.Parameter for p in twin.swapped.parameters())
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        twin.finish()


def test_closing_drops_gradients_and_says_so(nvme_path: Path) -> None:
    twin = Twin(nvme_path)
    twin.backward()
    held = twin.swapped.conv.weight.grad
    unused = twin.swapped.long.weight.grad
    del unused
    twin.swapper.close()
    gradient = twin.swapped.long.weight.grad
    assert gradient is not None and gradient.shape == twin.swapped.long.weight.shape
    with pytest.raises(SwapError, match="was closed or is gone"):
        gradient.sum()
    assert held is not None and twin.plain.conv.weight.grad is not None
    assert same_bits(held.contiguous(), twin.plain.conv.weight.grad.contiguous())
    del gradient, held
    for net in twin.nets:
        net.zero_grad()
    twin.backward()
    assert_same_gradients(twin.swapped, gradients(twin.plain))
    assert all(type(p) is nn.Parameter for p in twin.swapped.parameters())


def test_an_optimizer_that_dies_takes_its_gradients_with_it(nvme_path: Path) -> None:
    twin = Twin(nvme_path)
    twin.backward()
    del twin.optimizer, twin.swapper
    with pytest.raises(SwapError, match="was closed or is gone"):
        twin.swapped.long.weight.grad + 1  # type: ignore[operator]
    assert not list(nvme_path.iterdir())
    twin.swapped.zero_grad()
    assert twin.swapped.long.weight.grad is None and type(twin.swapped.long.weight) is nn.Parameter


def test_copying_the_optimizer_is_refused(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        with pytest.raises(SwapError, match="cannot be copied"):
            copy.deepcopy(twin.optimizer)
        twin.finish()


# --- What is needed, and what is said --------------------------------------------------------------------------------


def test_a_pool_that_is_too_small_is_refused_with_the_sum(nvme_path: Path) -> None:
    net = make_net()
    optimizer = adamw(trained(net))
    config = make_config(nvme_path, pool_bytes="896KiB")
    for use in (
        lambda: swapper.wrap_optimizer(optimizer, config),
        lambda: swapper.check(net, optimizer, config),
    ):
        with pytest.raises(swapper.ConfigError, match=r"left for gradients, and .*\(2 x .*at least (\d+)") as refused:
            use()
    assert not hasattr(optimizer, "swapper") and not list(nvme_path.iterdir())
    least = int(str(refused.value).rsplit(" ", 1)[1])
    with wrapped(optimizer, make_config(nvme_path, pool_bytes=least)):
        for _ in range(3):
            net(next(batches(torch.float32))).backward()
            optimizer.step()


@pytest.mark.parametrize("state", ["none", "cpu"])
def test_gradients_alone_on_disk(nvme_path: Path, state: str) -> None:
    with Twin(nvme_path, offload_optimizer={"device": state}) as twin:
        twin.backward()
        assert raw_gradient(twin.swapped.long.weight) is None
        twin.finish()
        assert twin.swapper.stats().bytes_written == 0 < twin.swapper.stats().gradients.bytes_written


def test_the_host_is_said_to_be_the_host_once(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        with Twin(nvme_path, offload_gradient={"device": "cpu"}) as twin:
            assert swapper.of(twin.optimizer).gradients is None
            twin.backward()
            assert raw_gradient(twin.swapped.long.weight) is not None
            twin.finish()
    assert caplog.text.count("offload_gradient.device: cpu is the same as none") == 1


def test_check_counts_gradients(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = make_net()
    optimizer = adamw(trained(net))
    without = swapper.check(net, optimizer, make_config(nvme_path, 3, offload_gradient={"device": "none"}))
    report = swapper.check(net, optimizer, make_config(nvme_path, 3))
    assert "gradients that are moved away" in capsys.readouterr().out
    with Twin(nvme_path, 3) as twin:
        for net_gradient in gradients_of(twin.optimizer)._gradients.values():
            assert net_gradient.parts
        parts = [part for known in gradients_of(twin.optimizer)._gradients.values() for part in known.parts]
        moved = sum(part.length_bytes for part in parts)
        files = sum(file.stat().st_size for file in nvme_path.rglob("*.safetensors"))
    assert report.gradient_bytes == moved > 0 == without.gradient_bytes
    assert report.disk_bytes - without.disk_bytes == moved
    assert report.disk_bytes == files
    assert report.step_read_bytes - without.step_read_bytes == 3 * moved
    assert report.step_written_bytes - without.step_written_bytes == 3 * moved
    in_memory = sum(p.nbytes for p in trained(net) if p.nbytes >= 16 << 10)
    assert without.model_bytes - report.model_bytes == in_memory
    assert report.pool_needed_bytes > without.pool_needed_bytes


def test_stats_without_gradients_on_disk(nvme_path: Path) -> None:
    with Twin(nvme_path, offload_gradient={"device": "none"}) as twin:
        twin.finish()
        assert twin.swapper.stats().gradients == Moves()


# --- In the pool, as for a model on a GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_that_are_kept_in_the_pool(nvme_path: Path, micro_batches: int) -> None:
    with Twin(nvme_path, micro_batches, offload_gradient={"device": "none"}) as twin:
        parts = twin.swapper._plan.gradient_parts()
        total = needs_of(parts, stored=False).total_bytes
        with BufferPool(total) as pool:
            kept = GradientSwapper(None, parts, 99, micro_batches, pool, total, None, lambda: None)
            twin.swapper.attach(gradients=kept)
            for step in range(4):
                for _ in range(micro_batches):
                    twin.backward()
                assert raw_gradient(twin.swapped.long.weight) is None
                if step % 2:
                    for _ in range(2):
                        expected = torch.nn.utils.clip_grad_norm_(trained(twin.plain), 0.1)
                        assert same_bits(twin.swapper.clip_grad_norm_(0.1), expected)
                    torch.nn.utils.clip_grad_value_(trained(twin.plain), 1e-3)
                    twin.swapper.clip_grad_value_(1e-3)
                if step == 3:
                    assert_same_gradients(twin.swapped, gradients(twin.plain))
                twin.step()
                assert_same(twin.plain, twin.swapped)
                for optimizer in (twin.reference, twin.optimizer):
                    optimizer.zero_grad(set_to_none=step != 2)
            assert kept.metrics.bytes_read == kept.metrics.bytes_written == 0
            assert 0 < pool.peak_used_bytes <= total
            twin.swapper.close()
            assert pool.used_bytes == 0


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-masters"])
def test_the_way_of_gradients_of_a_gpu_on_the_host(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    """Parameters are copied for a step, the next bucket's while one is stepped; gradients are in the pool."""
    monkeypatch.setattr("swapper.optimizer.plan.is_accelerator", lambda device: True)
    test_same_bits_as_plain(nvme_path, precision, name, 2, 0.5)
