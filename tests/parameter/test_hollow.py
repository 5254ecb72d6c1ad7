"""What C++ code reads of evicted parameters and gradients, of which no Python code is told: their values, or an error.

`torch._C.DisableTorchFunctionSubclass` stands for C++ in most tests: within it operators get tensors as they are.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerators import simulated
from gradient_twins import make_config
from models import CASES, loss_of
from torch import nn
from torch.nn import functional as F
from torch.utils.dlpack import to_dlpack
from twins import Run, adamw, bits, close, models_on, offloaded, run_twice, swapper_of

import swapper
from swapper.errors import SwapError
from swapper.parameter import owner as parameter
from swapper.tensors import evicted
from swapper.tensors import hollow as hollow_tensors
from swapper.tensors.evicted import EvictedParameter
from swapper.tensors.evicted_gradients import EvictedGradient
from swapper.tensors.hollow import answer_operators, hollow_of, is_hollow, operators_unanswered
from swapper.tensors.homes import LAYOUT, METADATA

in_cpp = torch._C.DisableTorchFunctionSubclass

WIDTH = 8


class Parameters(nn.Module):
    """None of it is used by a module's forward."""

    def __init__(self) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {
            "square": (WIDTH, WIDTH), "other": (WIDTH, WIDTH), "vector": (WIDTH,), "long": (4 * WIDTH,),
            "tall": (4 * WIDTH, WIDTH), "kernel": (4, 3, 3, 3), "kernel1d": (4, 3, 3), "scalar": (),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.turned = nn.Parameter(torch.randn(5, WIDTH).t())


def make(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Parameters().to(device)
    return model, adamw(model)


@pytest.fixture
def model(nvme_path: Path) -> Iterator[Any]:
    """Offloaded, everything evicted."""
    made, optimizer = offloaded(nvme_path, make)
    yield made
    close(made, optimizer)


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parameters that got their values."""
    count: list[str] = []
    restore = parameter.restore

    def counted(p: nn.Parameter, values: torch.Tensor) -> None:
        count.append(str(tuple(values.shape)))
        restore(p, values)

    monkeypatch.setattr(parameter, "restore", counted)
    return count


Use = Callable[[Any, torch.Tensor], Any]

UNARY = (
    "abs neg exp sin sqrt sigmoid tanh relu erf floor log1p sum mean max min prod std norm argmax sort t clone flatten "
    "isnan tril double half bfloat16 square"
)
BINARY = "add mul sub div maximum eq matmul mm atan2 dist fmod minimum hypot"


def uses() -> Iterator[tuple[str, Use]]:
    """What may be done with the parameters of `Parameters` and an input of WIDTH x WIDTH."""
    for name in UNARY.split():
        yield name, lambda m, x, name=name: getattr(m.square, name)()
    for name in BINARY.split():
        yield name, lambda m, x, name=name: getattr(torch, name)(x, m.square)
    yield "cumsum", lambda m, x: m.square.cumsum(0)
    yield "softmax", lambda m, x: m.turned.softmax(1)
    yield "topk", lambda m, x: m.square.topk(2)
    yield "where", lambda m, x: torch.where(x > 0, m.square, x)
    yield "outer", lambda m, x: torch.outer(m.vector, m.vector)
    yield "bmm", lambda m, x: torch.bmm(m.square[None], m.other[None])
    yield "addmm", lambda m, x: torch.addmm(m.vector, x, m.square)
    yield "einsum", lambda m, x: torch.einsum("ij,jk->ik", x, m.turned)
    yield "linear", lambda m, x: F.linear(x, m.square, m.vector)
    yield "bilinear", lambda m, x: F.bilinear(x, x, m.square[None])
    yield "embedding", lambda m, x: F.embedding(torch.arange(4, device=x.device), m.tall)
    yield "layer_norm", lambda m, x: F.layer_norm(x, (WIDTH,), m.vector, m.vector)
    yield "rms_norm", lambda m, x: F.rms_norm(x, (WIDTH,), m.vector)
    yield "group_norm", lambda m, x: F.group_norm(x, 2, m.vector, m.vector)
    yield "batch_norm", lambda m, x: F.batch_norm(x, x[0] * 0, x[0] * 0 + 1, m.vector, m.vector)
    yield "prelu", lambda m, x: F.prelu(x, m.vector)
    yield "conv2d", lambda m, x: F.conv2d(x.flatten()[:48].view(1, 3, 4, 4), m.kernel)
    yield "conv1d", lambda m, x: F.conv1d(x.flatten()[:24].view(1, 3, 8), m.kernel1d)
    yield "attention", lambda m, x: F.scaled_dot_product_attention(x[None], m.square[None], m.other[None])
    yield "LSTM cell", lambda m, x: torch._VF.lstm_cell(x, (x, x), m.tall, m.tall, m.long, m.long)[0]  # type: ignore[attr-defined]
    yield "GRU cell", lambda m, x: torch._VF.gru_cell(x, x, m.tall[:24], m.tall[:24])  # type: ignore[attr-defined]
    yield "cat", lambda m, x: torch.cat([x, m.square])
    yield "stack", lambda m, x: torch.stack([x, m.square])
    yield "index", lambda m, x: m.square[[0, 1]]
    yield "slice", lambda m, x: m.square[1:3] + 0
    yield "as_strided", lambda m, x: m.square.as_strided((4,), (1,)) * 1
    yield "contiguous", lambda m, x: m.turned.contiguous()
    yield "reshape", lambda m, x: m.turned.reshape(-1)
    yield "copy_ from", lambda m, x: torch.zeros_like(x).copy_(m.square)
    yield "add_ from", lambda m, x: torch.zeros_like(x).add_(m.square)
    yield "equal", lambda m, x: torch.equal(m.square, m.square)
    yield "item", lambda m, x: m.scalar.item()
    yield "flatten_dense_tensors", lambda m, x: torch._C._nn.flatten_dense_tensors([m.square, m.other])  # type: ignore[attr-defined]
    yield "foreach_add", lambda m, x: torch._foreach_add([m.square, m.other], 1)
    yield "foreach_norm", lambda m, x: torch._foreach_norm([m.square, m.other])
    yield "zero_ of a view", lambda m, x: m.other.detach()[2:].zero_()
    yield "add_ to it", lambda m, x: m.square.detach().add_(1)
    yield "copy_ to it", lambda m, x: m.turned.detach().copy_(x[:, :5])
    yield "foreach_mul_ of it", lambda m, x: torch._foreach_mul_([m.square.detach(), m.other.detach()], 2)
    yield "SGD of it", _sgd
    yield "AdamW of it", _adamw


def _sgd(m: Any, x: torch.Tensor) -> None:
    options = {"weight_decay": 0.1, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([m.square.detach()], [x], [], **options, **flags)  # type: ignore[call-overload]


def _adamw(m: Any, x: torch.Tensor) -> None:
    state = [[x * 0], [x * 0], [], [torch.ones((), device=x.device)]]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-3}
    flags = {"amsgrad": False, "maximize": False}
    torch._fused_adamw_([m.other.detach()], [x], *state, **options, **flags)  # type: ignore[call-overload]


def _in_bits(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_in_bits(item) for item in value]
    return bits(value)


def check_all_uses(nvme_path: Path, device: str, *, refused: bool) -> None:
    """With `refused` all raise, and else all do what they do without swapping."""
    plain, _ = make(device)
    model, optimizer = offloaded(nvme_path, partial(make, device))
    wrong = []
    names = [name for name, _ in uses()]
    assert len(names) > 75
    assert len(set(names)) == len(names)
    for name, use in uses():
        x = torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)).to(device)
        assert all(type(p) is EvictedParameter for p in model.parameters())
        expected = None if refused else _in_bits(use(plain, x))
        seen = None
        with in_cpp(), suppress(RuntimeError) if refused else nullcontext():
            seen = _in_bits(use(model, x))
        if seen != expected:
            wrong.append(name)
    assert wrong == []
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert bits(p) == bits(q), name
    close(model, optimizer)


def test_operators_that_cpp_code_calls_work_on_the_values(nvme_path: Path) -> None:
    check_all_uses(nvme_path, "cpu", refused=False)


@pytest.mark.sampled(1)
def test_operators_that_cpp_code_calls_on_a_device(nvme_path: Path, device: str) -> None:
    """Torch lets devices of other makers have no key, as the simulated one may: there they raise."""
    with models_on(torch.device(device, 0)):
        check_all_uses(nvme_path, device, refused=device not in hollow_tensors._COMPATIBLE)


def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) + weight[0]


def in_torch_script(m: Any, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        run: Callable[..., torch.Tensor] = torch.jit.script(scripted)
    return run(x, m.square)


class Careless(torch.Tensor):
    """Runs what it is asked for without a look at the classes of the other tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with in_cpp():
            return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # It says so and goes on without.
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(in_torch_script, id="TorchScript"),
        pytest.param(lambda m, x: torch.compile(torch.matmul, backend="aot_eager")(x, m.square), id="compiled"),
        pytest.param(lambda m, x: torch.compile(lambda: x @ m.square, backend="eager")(), id="compiled with it"),
        pytest.param(lambda m, x: F.linear(x.as_subclass(Careless), m.square), id="subclass of a tensor"),
        pytest.param(lambda m, x: torch.from_dlpack(m.vector.detach()), id="from_dlpack"),
        pytest.param(lambda m, x: torch.from_dlpack(m.vector.requires_grad_(False)), id="from_dlpack of itself"),
        pytest.param(lambda m, x: torch.tensor(np.from_dlpack(m.vector.requires_grad_(False))), id="NumPy, DLPack"),
    ],
)  # fmt: skip
def test_cpp_code_works_on_the_values(model: Any, use: Use) -> None:
    x = torch.ones(2, WIDTH)
    assert _in_bits(torch.Tensor(use(model, x))) == _in_bits(torch.Tensor(use(make()[0], x)))


def test_autograd_goes_through_what_cpp_code_calls(model: Any, brought: list[str]) -> None:
    plain: Any = make()[0]
    gradients = []
    for each in (plain, model):
        x = torch.ones(3, WIDTH, requires_grad=True)
        with in_cpp():
            loss = F.linear(torch.tanh(x @ each.square), each.other, each.vector).square().sum()
            loss = loss + (x @ each.turned).sum()
        loss.backward()
        gradients.append([bits(t.grad) for t in (x, each.square, each.other, each.vector, each.turned)])
    assert gradients[0] == gradients[1]
    assert brought


def test_what_autograd_saved_unseen_is_read_right(model: Any) -> None:
    """A parameter that is saved without hooks is saved itself, and evicted when backward comes."""
    gradients = []
    for each in (make()[0], model):
        x = torch.ones(3, WIDTH, requires_grad=True)
        with swapper.gathered([each.square]):
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if hooks is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            y = x @ each.square
            if hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        gradients.append(bits(torch.autograd.grad(y.sum(), x)[0]))
    assert gradients[0] == gradients[1]


@pytest.mark.long
def test_ordinary_training_calls_no_operator_on_what_is_evicted(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[object] = []
    monkeypatch.setattr(evicted, "is_hollow", lambda tensor: answered.append(tensor) or is_hollow(tensor))

    def program(run: Run) -> None:
        case = CASES["gpt2 tied"]
        loss_of(run, case.inputs).backward()
        run.finish_step()
        run.model.eval()
        with torch.inference_mode():
            run.note("evaluated", run.model(*case.inputs(run.generator)))

    run_twice(nvme_path, CASES["gpt2 tied"].make, program)
    assert answered == []
    model, optimizer = offloaded(nvme_path, make)
    with in_cpp():
        model.square + 1  # type: ignore[operator]
    assert answered
    close(model, optimizer)


@pytest.mark.parametrize("named", [False, True], ids=["any torch", "built for CUDA"])
def test_an_address_is_refused(nvme_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    if named:  # The simulated device has the function that torch has where it is built for CUDA.
        simulated()
        monkeypatch.setattr(hollow_tensors, "_refuse_access", torch.ops.sim.refuse_access)
    model: Any
    model, optimizer = offloaded(nvme_path, make)
    model.vector.requires_grad_(False)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "data_ptr": lambda p: p.data_ptr(),
        "storage": lambda p: p.untyped_storage().data_ptr(),
        "bytes of the storage": lambda p: p.untyped_storage().tolist(),
        "copy of the storage": lambda p: p.untyped_storage().clone(),
        "to be written": lambda p: p.untyped_storage().fill_(0),
    }
    for name, way in ways.items():
        with in_cpp(), pytest.raises(RuntimeError) as info:
            print(name, way(model.vector))
        if named:
            assert re.search("^vector is evicted.*swapper.gathered", str(info.value)), name
    with in_cpp(), suppress(RuntimeError):  # Some versions of torch make a view first, which they are given.
        assert bits(torch.from_dlpack(to_dlpack(model.vector))) == bits(make()[0].vector)
    assert bits(model.vector) == bits(make()[0].vector)
    close(model, optimizer)


def test_a_view_of_nothing_is_refused(model: Any) -> None:
    with in_cpp(), operators_unanswered():
        view = model.square.view(-1)
    for use in (view.sum, lambda: view + 1, lambda: torch.ones(64) @ view, lambda: view.zero_(), lambda: str(view)):
        with pytest.raises(SwapError, match=r"\(64,\) x torch.float32.*swapper.gathered"):
            use()
    with swapper.gathered([model.square]):
        assert model.square.view(-1).sum() == make()[0].square.sum()
        with pytest.raises(SwapError):
            view.sum()


def test_closed_parameters_raise_in_cpp_code_too(nvme_path: Path) -> None:
    made, _ = offloaded(nvme_path, make)
    swapper_of(made).close()
    with in_cpp(), pytest.raises(SwapError, match="closed"):
        made.square + 1  # type: ignore[operator]


def test_metadata_need_no_values(model: Any, brought: list[str]) -> None:
    """Whoever asks, and however."""
    for how in ("python", "cpp"):
        for p in (model.square, model.turned):
            for name in sorted(METADATA | LAYOUT):
                kind, _, attribute = name.rpartition(" ")
                arguments: tuple[Any, ...] = ()
                if kind in ("__set__", "__delete__") or "hook" in name or attribute == "volatile":
                    continue
                if name == "is_same_size":
                    arguments = (model.other,)
                with torch._C.DisableTorchFunctionSubclass() if how == "cpp" else torch.enable_grad():
                    value = getattr(p, attribute, None)
                    if not kind and callable(value):
                        value(*arguments)
            assert p.stride() == p.stride()
            with in_cpp():
                assert (p.shape, p.stride()) == (getattr(make()[0], "turned" if p is model.turned else "square").shape,
                                                 (WIDTH, 1) if p is model.square else (1, WIDTH))  # fmt: skip
    assert brought == []
    assert type(model.square) is EvictedParameter


def test_gradients_of_evicted_parameters_need_no_values(model: Any, brought: list[str]) -> None:
    """Nor does a walk through the graph, as `torch.autograd.grad` with parameters for inputs makes it."""
    x = torch.ones(2, WIDTH)
    loss = (x @ model.square).sum()
    brought.clear()
    torch.autograd.grad(loss, [model.square], allow_unused=True, retain_graph=True)
    loss.backward(inputs=[model.square])
    assert len(brought) <= 2, brought


def test_cpp_code_reads_evicted_gradients(nvme_path: Path) -> None:
    shapes = [(300, 100), (64, 64), (7000,)]
    plain = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    torch.manual_seed(0)
    wanted = [torch.randn(shape) for shape in shapes]
    swapped = copy.deepcopy(plain)
    optimizer = swapper.wrap_optimizer(torch.optim.SGD(swapped, lr=0.1), make_config(nvme_path))
    ways: dict[str, Callable[[list[torch.Tensor]], Any]] = {
        "flatten": lambda g: torch._C._nn.flatten_dense_tensors(g),  # type: ignore[attr-defined]
        "norms": torch._foreach_norm,
        "sum": lambda g: g[0].sum() + g[2].sum(),
        "scaled": lambda g: torch._foreach_mul_(g, 2),
        "written": lambda g: g[1].fill_(3),
    }
    for name, way in ways.items():
        for p, w in zip(swapped, wanted, strict=True):
            (p * w).sum().backward()
        gradients = [p.grad for p in swapped]
        assert all(type(g) is EvictedGradient for g in gradients), name
        with in_cpp():
            seen = way(gradients)  # type: ignore[arg-type]
        own = [w.clone() for w in wanted]
        assert _in_bits(seen) == _in_bits(way(own)), name
        assert [bits(p.grad) for p in swapped] == [bits(g) for g in own], name
        optimizer.zero_grad()
    for p, w in zip(swapped, wanted, strict=True):
        (p * w).sum().backward()
    for g in [p.grad for p in swapped]:
        with in_cpp(), pytest.raises(RuntimeError):
            g.data_ptr()
        assert type(g) is EvictedGradient
    optimizer.step()


def test_where_torch_cannot_tell_it_is_logged_and_all_else_works(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hollow_tensors, "_keys", None)
    monkeypatch.setattr(hollow_tensors, "_refuse_access", None)
    with caplog.at_level(logging.WARNING, "swapper"):
        answer_operators(lambda *_: None)  # The fallback is taken: by us.
    assert "without an error" in caplog.text
    nothing = hollow_of(torch.Tensor, torch.ones(2, 3), (3, 1))
    assert nothing.isnan().all()
    assert not is_hollow(nothing)
    made, optimizer = offloaded(nvme_path, make)
    plain: Any = make()[0]
    assert bits(made.square) == bits(plain.square)
    x = torch.ones(2, WIDTH)
    assert bits(x @ made.turned) == bits(x @ plain.turned)
    close(made, optimizer)
