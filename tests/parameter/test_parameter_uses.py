"""What users do with parameters, between steps and in the middle of them, gives the same bits when they are on disk."""

from __future__ import annotations

import copy
import io
import pickle
import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    CASES,
    VOCABULARY,
    WIDTH,
    Checkpointed,
    Lora,
    Mlp,
    images_channels_last,
    loss_of,
    resnet_channels_last,
    tokens,
    vectors,
)
from sampling import EVERY
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from twins import (
    Run,
    adamw,
    bits,
    close,
    config_for,
    facts_of,
    offloaded,
    run_twice,
    small_records,
    swapper_of,
)

from swapper.api import offload
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError
from swapper.parameter.swapper import ParameterSwapper
from swapper.storage.buffers import PoolExhausted
from swapper.storage.cache_policies import CyclicPolicy


def step(run: Run, label: str = "step") -> None:
    loss_of(run, vectors).backward()
    run.finish_step(label)


def weight(run: Run, block: int) -> nn.Parameter:
    linear = run.model.blocks[block][0]  # type: ignore[index, union-attr]
    assert isinstance(linear, nn.Linear)
    return linear.weight


def evaluate(run: Run, label: str = "evaluated") -> None:
    with torch.no_grad():
        run.note(label, run.model(*vectors(run.generator)))


# --- Changes between steps --------------------------------------------------------------------------------------------


def scale_data(run: Run) -> None:
    for p in run.model.parameters():
        p.data.mul_(0.9)


def copy_without_gradients(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.copy_(torch.randn(p.shape))


def operate_in_place(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.clamp_(-0.1, 0.1).add_(0.01)
            p -= 0.02
            p[0] = 0.3
            p.data[..., -1] = 0.25
            p.view(-1)[1] = 0.5
        torch._foreach_mul_([weight(run, 1), weight(run, 4)], 1.25)


def one_of_many(run: Run) -> None:
    with torch.no_grad():
        weight(run, 2)[3:5, ::2].zero_()


def initialise(run: Run) -> None:
    for i, p in enumerate(run.model.parameters()):
        if p.dim() == 1:
            nn.init.uniform_(p)
        else:
            (nn.init.xavier_uniform_, nn.init.orthogonal_, nn.init.kaiming_normal_)[i % 3](p)


def reset(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def assign_data(run: Run) -> None:
    for p in run.model.parameters():
        p.data = torch.randn(p.shape)


def assign_data_of_another(run: Run) -> None:
    weight(run, 0).data = weight(run, 1).data.clone()
    weight(run, 3).data = weight(run, 3).data + 1


def exchange(run: Run) -> None:
    """As an EMA swap does: the values go out, others come in, and back again."""
    backup = [p.detach().clone() for p in run.model.parameters()]
    for p in run.model.parameters():
        p.data.copy_(torch.randn(p.shape))
    evaluate(run, "with other values")
    for p, values in zip(run.model.parameters(), backup, strict=True):
        p.data.copy_(values)


def from_a_vector(run: Run) -> None:
    vector = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
    vector_to_parameters(vector * 0.5, run.model.parameters())


def load(run: Run) -> None:
    state = {name: torch.randn(p.shape) for name, p in run.model.named_parameters()}
    assert run.model.load_state_dict(state).missing_keys == []


def load_a_part(run: Run) -> None:
    state = {"blocks.2.0.bias": torch.randn(WIDTH), "unknown": torch.zeros(1)}
    result = run.model.load_state_dict(state, strict=False)
    assert result.unexpected_keys == ["unknown"]
    assert len(result.missing_keys) == 11


def load_what_was_saved(run: Run) -> None:
    file = io.BytesIO()
    torch.save({name: p.detach().clone() for name, p in run.model.named_parameters()}, file)
    step(run, "between saving and loading")
    file.seek(0)
    run.model.load_state_dict(torch.load(file))


def apply_to_all(run: Run) -> None:
    def change(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.02)

    run.model.apply(change)


def freeze_and_thaw(run: Run) -> None:
    run.model.blocks[1].requires_grad_(False)  # type: ignore[index, union-attr]
    loss_of(run, vectors).backward()
    assert weight(run, 1).grad is None
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.model.blocks[1].requires_grad_(True)  # type: ignore[index, union-attr]


CHANGES = [
    scale_data, copy_without_gradients, operate_in_place, one_of_many, initialise, reset, assign_data,
    assign_data_of_another, exchange, from_a_vector, load, load_a_part, load_what_was_saved, apply_to_all,
    freeze_and_thaw,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps(change: Callable[[Run], None], nvme_path: Path) -> None:
    def program(run: Run) -> None:
        change(run)
        evaluate(run, "changed before the first step")
        for _ in range(2):
            step(run)
            change(run)
            evaluate(run)
            change(run)
        step(run, "last")

    run_twice(nvme_path, Mlp, program, watch=change is not freeze_and_thaw)


def test_more_parameters_at_once_than_the_pool_holds_are_an_error_and_training_goes_on(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        if run.swapped:
            # The pool, and one more record.
            message = (
                rf"do not keep views .* pool_bytes to at least {(48 + 16) << 10}, plus the length of each .* kept; "
                rf"the graph .* create_graph=True keeps all parameters .* pool_bytes of up to {(48 + 3 * 16) << 10}$"
            )
            with pytest.raises(PoolExhausted, match=message):
                parameters_to_vector(run.model.parameters())
            with pytest.raises(PoolExhausted, match="one call uses 6 records of parameters at once, which take"):
                torch.block_diag(*run.model.parameters())
        step(run)

    run_twice(nvme_path, Mlp, program)


@pytest.mark.long
@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("given", [False, True], ids=["not given", "device none"])
def test_a_step_of_all_parameters_in_one_call_says_what_to_do(
    nvme_path: Path, way: dict[str, bool], given: bool
) -> None:
    """Each of the things that the error names then has the bits of plain PyTorch, and so has the default."""

    def train(mine: bool, pool_bytes: int = 128 << 10, state: str = "none", **how: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Mlp(12)
        optimizer = torch.optim.AdamW(model.parameters(), **how)
        if mine:
            config = config_for(nvme_path, pool_bytes=pool_bytes, offload_optimizer={"device": state})
            offload(model, optimizer if given or state != "none" else None, config)
        try:
            for _ in range(3):
                model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()]
        finally:
            if mine:
                swapper_of(model).close()

    with small_records():
        with pytest.raises(PoolExhausted, match=r"one call uses 12 records .*foreach=False.*offload") as caught:
            train(True, **way)
        found = re.search(r"pool_bytes to at least (\d+)", str(caught.value))
        assert found is not None
        expected = train(False, **way)
        assert bits(train(True, int(found[1]), **way)) == bits(expected)
        with pytest.raises(PoolExhausted):
            train(True, int(found[1]) - 4096, **way)
        assert bits(train(True, state="nvme", **way)) == bits(expected)
        for how in ({"foreach": False}, {}):
            assert bits(train(True, **how)) == bits(train(False, **how))


def test_moving_average_of_the_parameters(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        average = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        for _ in range(3):
            step(run)
            with torch.no_grad():
                for name, p in run.model.named_parameters():
                    average[name].lerp_(p, 0.1)
            run.note("average", average)

    run_twice(nvme_path, Mlp, program)


# --- Reading ----------------------------------------------------------------------------------------------------------


View = Callable[[nn.Parameter], torch.Tensor]


def transposed(p: nn.Parameter) -> torch.Tensor:
    return p.t()


def detached(p: nn.Parameter) -> torch.Tensor:
    return p.detach()


def data(p: nn.Parameter) -> torch.Tensor:
    return p.data


def row(p: nn.Parameter) -> torch.Tensor:
    return p[3]


def from_numpy(p: nn.Parameter) -> torch.Tensor:
    array = p.detach().numpy()
    assert not array.flags.owndata
    return torch.from_numpy(array)


@pytest.mark.parametrize("view", [transposed, detached, data, row, from_numpy])
def test_a_view_that_is_kept_follows_its_parameter(view: View, nvme_path: Path) -> None:
    def program(run: Run) -> None:
        kept = view(weight(run, 2))
        for _ in range(3):
            run.note("view", kept)
            step(run)
        run.note("view", kept)
        kept.data.mul_(2)  # And the parameter follows its view.
        evaluate(run)
        run.note("viewed", weight(run, 2))
        step(run)
        del kept
        step(run)

    run_twice(nvme_path, partial(Mlp, 8), program, spare_bytes=16384)


@pytest.mark.long
def test_a_view_from_before_offload_follows_its_parameter(nvme_path: Path) -> None:
    views: list[torch.Tensor] = []

    def make() -> nn.Module:
        model = Mlp(8)
        views[:] = [model.get_parameter("blocks.2.0.weight").detach()]
        return model

    def program(run: Run) -> None:
        step(run)
        run.note("view", views[0])

    run_twice(nvme_path, make, program)


def test_reading_in_all_sorts_of_ways(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        w, v = weight(run, 0), weight(run, 4)
        run.note("sum", w.sum())
        run.note("norms", [p.detach().norm() for p in run.model.parameters()])
        run.note("item", w[0, 0].item())
        run.note("list", w.tolist())
        run.note("array", torch.from_numpy(w.detach().numpy().copy()))
        run.note("text", repr(w))
        run.note("product", w @ v)
        run.note("reversed operands", torch.ones(WIDTH, WIDTH) @ w + (2 - v) + 3 * w)
        run.note("equal", [torch.equal(w, w), torch.equal(w, v), bool((w == v).any())])
        run.note("iterated", [row.sum() for row in w])
        run.note("stacked", torch.stack([w, v]))
        run.note("cloned", w.clone())
        run.note("converted", [w.double(), w.half(), w.to(torch.bfloat16), w.to("cpu"), w.float()])
        run.note("like", [torch.zeros_like(w), w.new_zeros(3), torch.empty_like(w).shape])
        run.note("out", torch.mul(w, v, out=torch.empty(0)) if not w.requires_grad else None)
        run.note("written to", torch.zeros(WIDTH, WIDTH).copy_(w.detach()))
        run.note("finite", bool(torch.isfinite(w).all()))
        run.note("contiguous", w.contiguous())
        run.note("is itself", [w.contiguous() is w, w.requires_grad_() is w, w.to(torch.float32) is w])
        run.note("type", [w.type(), str(w.dtype), w.is_contiguous(), w.is_floating_point(), w.T.shape])
        run.note("hash", [hash(w) == id(w), w in {w}, w in {v}])
        step(run)

    run_twice(nvme_path, Mlp, program)


def test_gradients_of_an_expression_outside_of_any_module(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            loss = loss_of(run, vectors)
            for p in run.model.parameters():
                loss = loss + p.square().sum() * 1e-3
            loss = loss + (weight(run, 0) @ weight(run, 1)).abs().mean()
            loss.backward()
            run.finish_step()

    run_twice(nvme_path, Mlp, program)


# --- Saving and copying -----------------------------------------------------------------------------------------------


def test_state_dict_has_the_values(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            step(run)
            for block in run.model.blocks:  # type: ignore[union-attr]
                state = block.state_dict()  # type: ignore[operator, union-attr]
                run.note("state", dict(state))
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                run.note("saved", torch.load(file))
                other = nn.Sequential(nn.Linear(WIDTH, WIDTH))
                other.load_state_dict(state)
                run.note("other", dict(other.named_parameters()))
                with torch.no_grad():
                    for value in state.values():  # Some moving averages are written like this.
                        value.mul_(0.99)

    run_twice(nvme_path, Mlp, program)


def test_state_dict_of_a_model_that_the_pool_does_not_hold(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        run.note("state", dict(run.model.state_dict()))

    run_twice(nvme_path, Mlp, program)


@pytest.mark.parametrize("way", ["pickle", "save", "swapper"])
def test_the_model_is_not_pickled_and_its_swapper_not_copied(way: str, nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp()), adamw(m)))
    try:
        with pytest.raises(SwapError, match="model whose parameters are swapped cannot be pickled"):
            if way == "pickle":
                pickle.dumps(model)
            elif way == "save":
                torch.save(model, io.BytesIO())
            else:
                copy.deepcopy(model.swapper)
    finally:
        close(model, optimizer)


def test_parameters_that_load_state_dict_replaces_are_ordinary_ones(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        state = {name: torch.full(p.shape, 0.01) for name, p in run.model.named_parameters() if "blocks.2" in name}
        run.model.load_state_dict(state, assign=True, strict=False)
        run.facts[:] = facts_of(run.model)
        assert type(weight(run, 2)) is nn.Parameter
        for _ in range(2):
            step(run)

    run_twice(nvme_path, Mlp, program, watch=False)


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to dtype": lambda model: model.to(torch.float16),
    "one parameter": lambda model: setattr(next(model.parameters()), "data", torch.zeros(WIDTH, WIDTH).t()),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_are_refused_and_change_nothing(name: str, nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        if run.swapped:
            with pytest.raises(SwapError, match=r"before swapper\.offload"):
                CONVERSIONS[name](run.model)
        evaluate(run)
        step(run)

    run_twice(nvme_path, Mlp, program)


def test_conversions_that_change_nothing_are_not_refused(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for convert in (nn.Module.float, nn.Module.cpu, partial(nn.Module.to, device="cpu")):
            assert convert(run.model) is run.model
            step(run)

    run_twice(nvme_path, Mlp, program)


# --- Gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["nvme", "none"])
@pytest.mark.parametrize("clip", ["norm", "foreach norm", "value"])
def test_clipping(clip: str, device: str, nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(3):
            loss_of(run, vectors).backward()
            if clip == "value":
                clip_grad_value_(run.model.parameters(), 1e-4)
            else:
                norm = clip_grad_norm_(run.model.parameters(), 1e-3, foreach=clip == "foreach norm")
                run.note("norm", norm)
            run.finish_step()

    run_twice(nvme_path, Mlp, program, optimizer_device=device)


@pytest.mark.parametrize("device", ["nvme", "none"])
def test_grad_scaler(device: str, nvme_path: Path) -> None:
    def program(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        for i in range(4):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(run, vectors)
            scaler.scale(loss if i != 1 else loss * float("inf")).backward()
            scaler.unscale_(run.optimizer)
            run.note("norm", clip_grad_norm_(run.model.parameters(), 1.0))
            scaler.step(run.optimizer)
            scaler.update()
            run.note("scale", scaler.get_scale())
            run.note_model(f"step {i}")
            run.optimizer.zero_grad()

    run_twice(nvme_path, Mlp, program, optimizer_device=device)


def test_gradients_that_are_set_to_zero_and_accumulated_in_place(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(3):
            for _ in range(3):
                loss_of(run, vectors).backward()
                for p in run.model.parameters():
                    assert p.grad is not None
                    p.grad.mul_(0.5)
            run.note_model("accumulated")
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)
        weight(run, 0).grad = torch.ones(WIDTH, WIDTH)
        run.optimizer.step()
        for p in run.model.parameters():
            del p.grad

    run_twice(nvme_path, Mlp, program)


def test_autograd_grad(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            parameters = list(run.model.parameters())
            gradients = torch.autograd.grad(loss_of(run, vectors), parameters)
            run.note("gradients", list(gradients))
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            run.finish_step()
            (x,) = vectors(run.generator)
            x.requires_grad_()
            run.note("of the input", list(torch.autograd.grad(run.model(x).sum(), x)))

    run_twice(nvme_path, Mlp, program)


class _LateWeights(nn.Module):
    """Recomputes, in backward, with parameters that no module's forward of their own brings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.late = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def block(h: torch.Tensor) -> torch.Tensor:
            return torch.relu(h @ self.late[0]) @ self.late[1]

        h: torch.Tensor = checkpoint(block, self.first(x), use_reentrant=False)
        out: torch.Tensor = self.last(h)
        return out


class _CheckpointsItself(nn.Module):
    """Its own parameters are attached before the hooks of checkpointing are there, and away when it recomputes."""

    def __init__(self, use_reentrant: bool, frozen: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=not frozen)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x * self.scale)) @ self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.part, x, use_reentrant=self.use_reentrant)
        return x + out


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
def test_modules_that_checkpoint_a_part_of_themselves(use_reentrant: bool, frozen: bool, nvme_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(_CheckpointsItself(use_reentrant, frozen) for _ in range(4)))

    def program(run: Run) -> None:
        for _ in range(2):
            loss = loss_of(run, vectors)
            loss.backward(retain_graph=True)
            loss.backward()
            run.finish_step()

    run_twice(nvme_path, make, program)


def test_backward_into_some_of_the_parameters(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        model = run.model
        assert isinstance(model, _LateWeights)
        for _ in range(2):
            loss = loss_of(run, vectors)
            loss.backward(inputs=[model.first.weight], retain_graph=True)
            assert model.late[0].grad is None
            loss.backward(inputs=list(model.parameters()))  # More than the pool has, if all came at once.
            run.finish_step()
        with pytest.raises(RuntimeError, match="empty"):
            loss_of(run, vectors).backward(inputs=[])

    run_twice(nvme_path, _LateWeights, program)


@pytest.mark.long
def test_double_backward(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(3):
            blocks = list(run.model.blocks)  # type: ignore[arg-type, union-attr]
            (x,) = vectors(run.generator)
            x.requires_grad_()
            h = blocks[1](blocks[0](x))
            (g,) = torch.autograd.grad(h.square().mean(), x, create_graph=True)
            penalty = (g.norm(dim=1) - 1).square().mean()
            for block in blocks[2:]:
                h = block(h)
            (h.mean() + penalty).backward()
            run.note("penalty", penalty)
            run.finish_step()
            h = blocks[3](blocks[2](x)).square().mean()
            parameters = [*blocks[2].parameters(), *blocks[3].parameters()]
            first = torch.autograd.grad(h, parameters, create_graph=True)
            (loss_of(run, vectors) + sum(g.square().sum() for g in first)).backward()
            run.finish_step("of gradients of parameters")

    # What a backward with create_graph uses stays in the pool until its graph is gone.
    run_twice(nvme_path, partial(Mlp, 12), program, spare_bytes=4 * 16384)


def test_backward_twice_through_a_graph_that_is_kept(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            loss = loss_of(run, vectors)
            loss.backward(retain_graph=True)
            loss.backward()
            run.finish_step()

    run_twice(nvme_path, Mlp, program)


def test_a_step_between_forward_and_backward_is_the_error_it_is_without_swapping(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        late = loss_of(run, vectors)
        loss_of(run, vectors).backward()
        run.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
        run.optimizer.zero_grad()
        step(run)

    run_twice(nvme_path, Mlp, program)


@pytest.mark.parametrize("kind", ["SparseAdam", "SGD"])
def test_sparse_gradients(kind: str, nvme_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, WIDTH, sparse=True) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for embedding in self.embeddings:
                total = total + embedding(x).square()
            return total

    def optimizer(model: nn.Module) -> Optimizer:
        if kind == "SGD":
            return torch.optim.SGD(model.parameters(), lr=0.1)
        return torch.optim.SparseAdam(list(model.parameters()))

    def program(run: Run) -> None:
        for _ in range(3):
            loss_of(run, tokens).backward()
            run.finish_step()

    run_twice(nvme_path, Sparse, program, optimizer, optimizer_device="none")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("torch encoder", "_transformer_encoder_layer_fwd"),
        ("torch encoder norm_first", "_transformer_encoder_layer_fwd"),
        ("multi-head attention", "_native_multi_head_attention"),
    ],
)
def test_fast_paths_of_evaluation_are_taken(
    name: str, kernel: str, mode: type, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module with hooks takes another one, so nothing is watched here."""
    case = CASES[name]
    calls = [0]
    fast = getattr(torch, kernel)

    def counted(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        return fast(*args, **kwargs)

    monkeypatch.setattr(torch, kernel, counted)

    def program(run: Run) -> None:
        loss_of(run, case.inputs).backward()
        run.finish_step()
        run.model.eval()
        calls[0] = 0
        for _ in range(2):
            with mode():
                run.note("evaluated", run.model(*case.inputs(run.generator)))
        assert calls[0] > 0
        run.note("calls", calls[0])

    run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes, watch=False)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40 if EVERY else 12))
@pytest.mark.parametrize("name", ["torch encoder", "multi-head attention"])
def test_a_pool_in_pieces_has_room_for_what_is_used_at_once(
    name: str, seed: int, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where records lie depends on which transfers were over first: here it is drawn."""
    case, rng = CASES[name], random.Random(seed)
    monkeypatch.setattr(CyclicPolicy, "place_for", lambda *_: (rng.random() < 0.5, 0))

    def program(run: Run) -> None:
        loss_of(run, case.inputs).backward()
        run.finish_step()
        run.model.eval()
        for _ in range(3):
            with torch.inference_mode():
                run.note("evaluated", run.model(*case.inputs(run.generator)))

    run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes, watch=False)


# --- Hooks ------------------------------------------------------------------------------------------------------------


def hooked(model: nn.Module, seen: list[tuple[str, torch.Tensor]]) -> nn.Module:
    """Give `model` hooks of all kinds, which read, and some of which change what passes."""

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(("before", module.weight.detach().sum()))  # type: ignore[operator, union-attr]
        return (args[0] * 1.01,)

    def after(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        seen.append(("after", module.weight.detach().clone()))  # type: ignore[operator, union-attr]
        return output + module.bias * 0.1  # type: ignore[operator]

    def backward_before(module: nn.Module, gradients: tuple[torch.Tensor, ...]) -> None:
        seen.append(("backward before", module.weight.detach().clone()))  # type: ignore[operator, union-attr]

    def backward(module: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(("backward", module.weight.detach().clone()))  # type: ignore[operator, union-attr]
        seen.append(("backward gradient", outputs[0].detach().clone()))

    def tensor_hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(("tensor", gradient.clone()))
        return gradient * 0.9

    def accumulated(p: torch.Tensor) -> None:
        assert p.grad is not None
        seen.append(("accumulated", (p * p.grad).detach().sum()))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
            module.register_full_backward_pre_hook(backward_before)
            module.register_full_backward_hook(backward)
            module.weight.register_hook(tensor_hook)
            module.weight.register_post_accumulate_grad_hook(accumulated)
    return model


@pytest.mark.parametrize("when", ["before offload", "after offload"])
def test_hooks_of_the_user(when: str, nvme_path: Path) -> None:
    seen: list[tuple[str, torch.Tensor]] = []

    def make() -> nn.Module:
        model = Mlp()
        return hooked(model, seen) if when == "before offload" else model

    def program(run: Run) -> None:
        if when == "after offload":
            hooked(run.model, seen)
        for _ in range(2):
            seen.clear()
            run.model(vectors(run.generator)[0].requires_grad_()).square().mean().backward()
            run.finish_step()
            for label, value in seen:
                run.note(label, value)

    run_twice(nvme_path, make, program)


def test_hooks_on_parameters_that_are_not_contiguous(nvme_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def make() -> nn.Module:
        model = resnet_channels_last()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append((p * p.grad).detach().clone()))
        return model

    def program(run: Run) -> None:
        for _ in range(2):
            loss_of(run, images_channels_last).backward()
            run.note("seen", list(seen))
            seen.clear()
            run.finish_step()

    run_twice(nvme_path, make, program)


def test_a_step_in_a_hook_of_each_parameter(nvme_path: Path) -> None:
    """The usual recipe for an optimizer inside backward, with optimizers left in memory."""

    def program(run: Run) -> None:
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in run.model.parameters()}

        def hook(p: torch.Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in run.model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        for _ in range(3):
            loss_of(run, vectors).backward()
            run.note_model("after backward")

    run_twice(nvme_path, Mlp, program, optimizer_device="none")


SAVED: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "save_on_cpu": lambda: save_on_cpu(pin_memory=False),
    "as they are": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "copied": lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_tensors_hooks_of_the_user(name: str, nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            blocks = list(run.model.blocks)  # type: ignore[arg-type, union-attr]
            h = vectors(run.generator)[0]
            for i, block in enumerate(blocks):
                # On the CPU, save_on_cpu keeps tensors as they are too: those of this part stay in the pool.
                with SAVED[name]() if 2 <= i < 5 else nullcontext():
                    h = h + block(h)
            h.square().mean().backward()
            run.finish_step()

    run_twice(nvme_path, partial(Mlp, 10), program, spare_bytes=16384 * 3)


def test_checkpointing_finds_hooks_of_the_user_behind_ours(nvme_path: Path) -> None:
    """As torch does from 2.15 on: what it finds it applies to what its policy keeps, or warns of."""
    seen: list[Any] = []

    def user_hooks() -> Any:
        hooks = top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
            hooks = hooks[0]._user_hooks
        seen.append((top, hooks))
        return hooks

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            user_hooks()
            return y

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    user = (lambda tensor: tensor, lambda saved: saved)
    vars(pack).update(_checkpoint_internal=True, _user_hooks=user)
    pack.__module__ = "torch.utils.checkpoint"
    model = Watched()
    settings = {"nvme_path": str(nvme_path), "pool_bytes": "4MiB", "offload_param": {"device": "nvme"}}
    offload(model, config=OffloadConfig(**settings))
    x = torch.randn(3, WIDTH)
    model(x)
    with saved_tensors_hooks(*user):
        model(x)
    with saved_tensors_hooks(pack, lambda saved: saved):
        model(x)
    (_, alone), (_, users), (ours, behind) = seen
    assert alone is None and users is not None
    assert ours[0] is not pack and behind is user and not hasattr(ours[0], "_user_hooks")
    model.swapper.close()


# --- Failures ---------------------------------------------------------------------------------------------------------


class Fails(Exception):
    pass


@pytest.mark.parametrize("error", [Fails, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward", "recomputation", "step", "evaluation"])
def test_after_an_exception_training_goes_on(where: str, error: type[BaseException], nvme_path: Path) -> None:
    armed = [False]

    def fire(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise error()

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if where in ("forward", "evaluation") or (where == "recomputation" and in_backward()):
                fire()
            if where == "backward" and y.requires_grad:
                y.register_hook(fire)
            return torch.tanh(y)

    def make() -> nn.Module:
        model = Mlp()
        model.blocks[3] = Checkpointed(Fragile(), False) if where == "recomputation" else Fragile()
        return model

    def attempt(run: Run) -> None:
        if where == "evaluation":
            with torch.no_grad():
                run.model(*vectors(run.generator))
            return
        loss_of(run, vectors).backward()
        run.optimizer.step()

    def program(run: Run) -> None:
        hook = run.optimizer.register_step_pre_hook(fire) if where == "step" else None
        for _ in range(2):
            step(run)
            armed[0] = True
            with pytest.raises(error):
                attempt(run)
            assert not armed[0]
            run.note_model("after the exception")
            run.optimizer.zero_grad()
            evaluate(run)
        for _ in range(2):
            step(run)
        if hook is not None:
            hook.remove()

    run_twice(nvme_path, make, program)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# --- Other structure --------------------------------------------------------------------------------------------------


def test_frozen_parameters_are_never_written(nvme_path: Path) -> None:
    times: dict[bool, dict[str, int]] = {}

    def files() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in nvme_path.glob("*/*") if "param" in file.name}

    def program(run: Run) -> None:
        if run.swapped:
            swapper_of(run.model).flush()
            times[False] = files()
        for _ in range(3):
            loss_of(run, tokens).backward()
            run.finish_step()
        if run.swapped:
            swapper = swapper_of(run.model)
            swapper.flush()
            times[True] = files()
            trained = {
                held.number
                for held in swapper._all
                if any(each.parameter.requires_grad for each in held.plan.locations)
            }
            written = {name for name in times[True] if times[True][name] != times[False][name]}
            assert len(times[True]) == len(swapper._all) > len(trained)
            assert len(written) == len(trained)

    run_twice(nvme_path, Lora, program)


def test_modules_that_are_added_after_offload(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        new = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        run.model.blocks.append(new)  # type: ignore[union-attr, arg-type]
        run.optimizer.add_param_group({"params": new.parameters(), "lr": 1e-3})
        run.facts[:] = facts_of(run.model)
        for _ in range(2):
            step(run)

    run_twice(nvme_path, Mlp, program, watch=False)


def test_a_module_that_is_taken_out_after_offload(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        alone = run.model.blocks[2]  # type: ignore[index, union-attr]
        for _ in range(2):
            run.note("alone", alone(*vectors(run.generator)))  # type: ignore[operator]
            step(run)

    run_twice(nvme_path, Mlp, program)


def test_functional_call(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        names = [name for name, _ in run.model.named_parameters()]
        for _ in range(2):
            others = {name: torch.randn(p.shape) * 0.1 for name, p in run.model.named_parameters()}
            run.note("with others", torch.func.functional_call(run.model, others, vectors(run.generator)))
            scaled = {name: p * 0.5 for name, p in run.model.named_parameters()}
            torch.func.functional_call(run.model, scaled, vectors(run.generator)).square().mean().backward()
            run.note_model("scaled")

            def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = torch.func.functional_call(run.model, values, (x,))
                return out.square().mean()

            x = vectors(run.generator)[0]
            gradients = torch.func.grad(loss)({name: p.detach().clone() for name, p in run.model.named_parameters()}, x)
            run.note("gradients", gradients)
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))(others, x[:, None])
            run.note("gradients of each sample", each)
            assert list(each) == names
            run.finish_step()

    run_twice(nvme_path, partial(Mlp, 12), program, spare_bytes=8 * 16384, watch=False)


class LearnsWithin(nn.Module):
    """As models with a memory that they train in their forward: gradients of torch.func by copies of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def loss(weights: dict[str, torch.Tensor], each: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.func.functional_call(self.memory, weights, (each,))
            return out.square().mean()

        weights = {name: p.clone() for name, p in self.memory.named_parameters()}
        surprise = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
        out: torch.Tensor = self.head(x - surprise["bias"])
        return out


def test_torch_func_in_a_forward_raises_and_harms_nothing(nvme_path: Path) -> None:
    """The error is torch's own: hooks of saved tensors are in force there. Without gradients none are."""

    def program(run: Run) -> None:
        for _ in range(3):
            x = torch.randn(5, WIDTH, generator=run.generator)
            if run.swapped:
                with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
                    run.model(x)
            with torch.no_grad():
                run.note("without gradients", run.model(x))
            run.model.head(x).square().mean().backward()  # type: ignore[operator, union-attr]
            run.finish_step()

    run_twice(nvme_path, LearnsWithin, program, watch=False)


def test_transforms_of_a_model_with_its_own_parameters_are_refused(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        if run.swapped:
            x = vectors(run.generator)[0]
            for transform in (torch.func.grad, torch.func.jacrev):
                with pytest.raises(SwapError, match=r"torch\.func"):
                    transform(lambda x: run.model(x).sum())(x)
            with pytest.raises(SwapError, match=r"torch\.func"):
                torch.func.grad(lambda x: (x @ weight(run, 2)).sum())(x)
            with pytest.raises(SwapError, match=r"torch\.func"):
                torch.func.grad(lambda values: torch.func.functional_call(run.model, values, (x,)).sum())(
                    dict(run.model.named_parameters())
                )
            with (
                torch.autograd.graph.disable_saved_tensors_hooks("not here"),
                pytest.raises(SwapError, match="saved tensors hooks are disabled"),
            ):
                run.model(x)
        else:
            vectors(run.generator)
        step(run)

    run_twice(nvme_path, Mlp, program, watch=False)


def test_a_parameter_longer_than_half_of_the_pool_is_refused_with_the_sum(nvme_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = OffloadConfig(
        nvme_path=nvme_path, pool_bytes="300KiB", bucket_bytes="16KiB", offload_param={"device": "nvme"},
        offload_optimizer={"device": "none"},
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match=r"300 KiB are left for parameters, and 2 x 2\d\d KiB .*at least \d+"):
        offload(model, optimizer, config)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    model[0](torch.randn(2, 256)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].bias, before[1])


def test_modules_that_use_more_at_once_than_the_pool_has_are_refused_by_name(nvme_path: Path) -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 64, batch_first=True) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = OffloadConfig(
        nvme_path=nvme_path, pool_bytes="144KiB", bucket_bytes="16KiB", offload_param={"device": "nvme"},
        offload_optimizer={"device": "nvme"},
    )  # fmt: skip
    with (
        small_records(),
        pytest.raises(ConfigError, match=r"what 0\S* uses itself, and .* at least \d+"),
    ):
        offload(model, optimizer, config)
    assert not hasattr(optimizer, "swapper")
    assert not list(nvme_path.iterdir())
    model(torch.randn(2, 5, 64)).sum().backward()
    optimizer.step()


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at inputs that are no leaves.
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["model", "model in place", "block"])
def test_compiled_models_have_the_bits_of_compiled_plain_ones(what: str, backend: str, nvme_path: Path) -> None:
    def program(run: Run) -> None:
        torch.compiler.reset()
        model: Callable[..., torch.Tensor] = run.model
        if what == "model":
            model = torch.compile(run.model, backend=backend)
        elif what == "model in place":
            run.model.compile(backend=backend)
        else:
            run.model.blocks[2].compile(backend=backend)  # type: ignore[index, union-attr]
        for _ in range(2):
            loss = model(*vectors(run.generator)).square().mean()
            run.note("loss", loss)
            loss.backward()
            run.finish_step()

    run_twice(nvme_path, Mlp, program, watch=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_script_is_refused_until_the_model_is_closed(nvme_path: Path, leaves_nothing: None) -> None:
    made = nn.Sequential(nn.Linear(64, 100), nn.Sequential(nn.Linear(100, 64)))
    expected = made(torch.ones(2, 64))
    model, optimizer = offloaded(nvme_path, lambda: with_adamw(made))
    for scripted in (model, nn.Sequential(model), made[1]):
        with pytest.raises(SwapError, match=r"torch\.jit\.script of a model whose parameters are swapped"):
            torch.jit.script(scripted)
    swapper_of(model).close(keep_values=True)
    assert torch.equal(torch.jit.script(model)(torch.ones(2, 64)), expected)
    optimizer.swapper.close()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_tracing_is_refused_by_name(nvme_path: Path) -> None:
    torch.manual_seed(0)
    model, optimizer = offloaded(nvme_path, lambda: with_adamw(Mlp()))
    with pytest.raises(SwapError, match=r"torch\.jit\.trace"):
        torch.jit.trace(model, vectors(torch.Generator()))
    close(model, optimizer)


def through_export(model: nn.Module, x: torch.Tensor) -> object:
    return torch.export.export(model, (x,))


def through_strict_export(model: nn.Module, x: torch.Tensor) -> object:
    return torch.export.export(model, (x,), strict=True)


def through_fake_tensors(model: nn.Module, x: torch.Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(torch.ones(x.shape))


def through_a_use(model: nn.Module, x: torch.Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return next(model.parameters()) + 1


def through_fx(model: nn.Module, x: torch.Tensor) -> object:
    return make_fx(model, tracing_mode="fake")(x)


@pytest.mark.parametrize(
    "way", [through_export, through_strict_export, through_fake_tensors, through_a_use, through_fx]
)
def test_after_fake_tensors_the_model_is_what_it_was(way: Callable[..., object], nvme_path: Path) -> None:
    """Values that came within their mode would be none, and stay."""

    def program(run: Run) -> None:
        step(run)
        if isinstance(getattr(run.model, "swapper", None), ParameterSwapper):
            with pytest.raises(Exception, match=r"FakeTensorMode|ForwardHooks"):
                way(run.model, vectors(torch.Generator())[0])
        evaluate(run)
        step(run)

    run_twice(nvme_path, Mlp, program)


def with_adamw(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return model, adamw(model)


@pytest.mark.parametrize("name", ["as they are", "in a tuple", "save_on_cpu", "copied"])
def test_hooks_of_the_user_that_keep_parameters_themselves(name: str, nvme_path: Path) -> None:
    """Normalisation saves its weight as it is, not a view of it."""
    hooks = {**SAVED, "in a tuple": lambda: saved_tensors_hooks(lambda t: (t, 1), lambda saved: saved[0])}

    def program(run: Run) -> None:
        for _ in range(3):
            h = vectors(run.generator)[0]
            with hooks[name]():
                loss = run.model(h).square().mean()
            loss.backward()
            run.finish_step()

    run_twice(
        nvme_path,
        lambda: nn.Sequential(*(nn.LayerNorm(WIDTH) if i % 2 else nn.Linear(WIDTH, WIDTH) for i in range(8))),
        program,
    )


class ScaleWithin(nn.Module):
    """Enters hooks of the user in its own forward, where its weight is attached already."""

    def __init__(self, hooks: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.hooks = hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.hooks():
            return x * self.weight


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("name", ["as they are", "in a tuple", "save_on_cpu", "copied"])
def test_hooks_of_the_user_within_the_forward_of_a_module(name: str, around: bool, nvme_path: Path) -> None:
    """With `around` there are others of the user around the whole model, too."""
    hooks = {**SAVED, "in a tuple": lambda: saved_tensors_hooks(lambda t: (t, 1), lambda saved: saved[0])}

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = (ScaleWithin(hooks[name]) if i % 2 else nn.Linear(WIDTH, WIDTH) for i in range(12))
        return nn.Sequential(*layers)

    def program(run: Run) -> None:
        for _ in range(3):
            h = vectors(run.generator)[0]
            with hooks["as they are"]() if around else nullcontext():
                loss = run.model(h).square().mean()
            loss.backward()
            run.finish_step()

    run_twice(nvme_path, make, program)
