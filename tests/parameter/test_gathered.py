"""`swapper.gathered`: plain access to parameters that are on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import WIDTH, Mlp, loss_of, vectors
from torch import nn
from torch.nn import functional as F
from twins import Run, adamw, bits, close, config_for, offloaded, run_twice, small_records

import swapper
from swapper.storage.buffers import PoolExhausted
from swapper.tensors.evicted import EvictedParameter

RECORD_BYTES = 16384


def layer(run: Run, block: int) -> nn.Linear:
    found = run.model.blocks[block][0]  # type: ignore[index, union-attr]
    assert isinstance(found, nn.Linear)
    return found


def step(run: Run) -> None:
    loss_of(run, vectors).backward()
    run.finish_step()


def test_parameters_are_ordinary_ones_within_it(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        linear = layer(run, 2)
        with swapper.gathered(linear):
            for p in linear.parameters():
                assert type(p) is nn.Parameter
                assert type(p.data) is torch.Tensor
                assert p.data_ptr() % 64 == 0 or not run.swapped
            array = linear.weight.detach().numpy()
            array[3, :] = 0.25
            linear.bias.data[1] = 2
            run.note("seen through the array", linear.weight)
            del array
        if run.swapped:
            assert all(type(p) is EvictedParameter for p in linear.parameters())
        run.note_model("changed")
        step(run)

    run_twice(nvme_path, Mlp, program)


def test_what_is_changed_is_kept_when_others_need_the_pool(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for i in range(12):
            with swapper.gathered(layer(run, i)), torch.no_grad():
                layer(run, i).weight.data.normal_()
                layer(run, i).bias.data = torch.full((WIDTH,), float(i))
        run.note_model("all changed")
        for p in run.model.parameters():
            with swapper.gathered(p):
                p.data.mul_(0.5)
        run.note_model("halved")
        step(run)

    run_twice(nvme_path, lambda: Mlp(12), program)


def test_nested(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        one, other = layer(run, 0), layer(run, 1)
        with swapper.gathered(one):
            with swapper.gathered([one.weight, other.weight]), swapper.gathered(one):
                one.weight.data.copy_(other.weight.data)
            assert type(one.weight) is nn.Parameter
            one.weight.data.add_(1)
        run.note_model("nested")
        step(run)

    run_twice(nvme_path, Mlp, program, spare_bytes=2 * RECORD_BYTES)


def test_exceptions_inside_keep_what_was_changed(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        linear = layer(run, 3)
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error), swapper.gathered(linear):
                linear.weight.data.mul_(2)
                raise error
        run.note_model("after exceptions")
        step(run)

    run_twice(nvme_path, Mlp, program)


def test_forward_and_backward_inside_and_across(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            linear = layer(run, 1)
            x = vectors(run.generator)[0]
            with swapper.gathered(linear):
                inside = F.linear(x, linear.weight, linear.bias).exp().sum() + loss_of(run, vectors)
            inside.backward()  # When the parameters are away again.
            with swapper.gathered(linear):
                F.linear(x, linear.weight).square().sum().backward()
                run.note("gradient", linear.weight.grad)
            run.finish_step()

    run_twice(nvme_path, Mlp, program, spare_bytes=RECORD_BYTES)


def test_a_step_inside(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        loss_of(run, vectors).backward()
        with swapper.gathered(layer(run, 2)):
            run.optimizer.step()
            run.note("stepped", layer(run, 2).weight)
            run.optimizer.zero_grad()
        step(run)

    run_twice(nvme_path, Mlp, program, spare_bytes=2 * RECORD_BYTES)


def test_more_than_the_pool_holds_is_an_error_with_the_sum(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        if run.swapped:
            message = r"are \d+\S* KiB together, and the pool has .* for parameters; .* pool_bytes to at least \d+"
            with pytest.raises(PoolExhausted, match=message), swapper.gathered(run.model):
                pass
            assert all(isinstance(p, EvictedParameter) for p in run.model.parameters())
            with (
                swapper.gathered(layer(run, 0)),
                pytest.raises(PoolExhausted, match=message),
                swapper.gathered(run.model.blocks[1:]),  # type: ignore[arg-type, index, union-attr]
            ):
                pass
        step(run)

    run_twice(nvme_path, lambda: Mlp(12), program)


def test_a_read_that_fails_leaves_nothing_gathered(nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(12)), adamw(m)))
    block = model.blocks[0]  # type: ignore[index, union-attr]
    [p.sum() for p in model.parameters()]
    file = sorted(nvme_path.glob("*/*-param-000000*"))[0]
    length = file.stat().st_size
    with open(file, "r+b") as stored:
        content = stored.read()
        stored.truncate(0)
        with pytest.raises(swapper.SwapIOError), swapper.gathered(block):  # type: ignore[arg-type]
            pass
        assert all(isinstance(p, EvictedParameter) for p in block.parameters())  # type: ignore[operator, union-attr]
        stored.seek(0)
        stored.write(content)
        assert len(content) == length
    with swapper.gathered(block):  # type: ignore[arg-type]
        assert all(type(p) is nn.Parameter for p in block.parameters())  # type: ignore[operator, union-attr]
    close(model, optimizer)


def test_of_an_ordinary_model_it_does_nothing() -> None:
    model = Mlp()
    with swapper.gathered(model), swapper.gathered([]), swapper.gathered(next(model.parameters())):
        assert all(type(p) is nn.Parameter for p in model.parameters())


def test_of_two_models_at_once(nvme_path: Path) -> None:
    models = []
    for i in range(2):
        torch.manual_seed(i)
        model = Mlp(2)
        with small_records():
            swapper.offload(model, adamw(model), config_for(nvme_path))
        models.append(model)
    torch.manual_seed(0)
    first = Mlp(2)
    torch.manual_seed(1)
    second = Mlp(2)
    with swapper.gathered([*models[0].parameters(), *models[1].parameters()]):
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            p.data.add_(q.data)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        p.data.add_(q.data)
    assert [bits(p) for p in models[0].parameters()] == [bits(p) for p in first.parameters()]
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert bits(p + q) == bits(p.detach() + q.detach())
        assert torch.equal(torch.stack([p, q]), torch.stack([p.detach().clone(), q.detach().clone()]))
    products = []
    for one, other in ((models[0], models[1]), (first, second)):
        product = (one.blocks[0][0].weight @ other.blocks[1][0].weight).square().sum()  # type: ignore[index, union-attr]
        [p.sum() for model in models for p in model.parameters()]
        product.backward()
        products.append([bits(p.grad) for p in (*one.parameters(), *other.parameters()) if p.grad is not None])
    assert len(products[0]) == len(products[1]) == 2
    assert products[0] == products[1]
    for model in models:
        model.swapper.close()  # type: ignore[operator, union-attr]


def test_of_a_model_that_is_being_built(nvme_path: Path) -> None:
    class Gathering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            with swapper.gathered(self.linear):
                self.linear.weight.data.numpy()[:] = 3

    with small_records(), swapper.init(config_for(nvme_path)):
        model = nn.Sequential(Gathering())
    assert isinstance(model[0].linear.weight, EvictedParameter)
    assert bool((model[0].linear.weight == 3).all())  # type: ignore[operator, union-attr]
