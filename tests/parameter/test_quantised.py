"""Quantised weights on the drive give the bits of memory: tensor subclasses, integers, float8 and large buffers."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH
from quantised import KINDS, Adapted, CodedTensor, QuantisedLinear, make_quantised
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from twins import Run, bits, config_for, models_on, offloaded, run_twice, small_records, swapper_of

import swapper
from swapper.tensors.evicted import is_evicted
from swapper.tensors.hollow import is_hollow
from swapper.tensors.inner import inner_tensors

WIDE = 3 * WIDTH


@pytest.fixture(autouse=True)
def buffers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.parameter.candidates.BUFFER_BYTES", 1024)


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def fine_tune(run: Run) -> None:
    for step in range(2):
        x = torch.randn(7, WIDE, generator=run.generator)
        loss = run.model(x).square().mean()
        run.note(f"loss {step}", loss)
        loss.backward()
        run.finish_step(f"step {step}")
    with torch.no_grad():
        run.note("evaluation", run.model(torch.randn(2, WIDE, generator=run.generator)))
    with torch.inference_mode():
        run.note("inference", run.model(torch.randn(1, WIDE, generator=run.generator)).clone())


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """All that the quantised weights of `model` are made of."""
    layers = [layer.base for layer in model if isinstance(layer, Adapted)]  # type: ignore[attr-defined]
    return [inner.tensor for layer in layers for inner in inner_tensors("weight", layer.weight)]  # type: ignore[arg-type]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_over_a_quantised_model_are_trained_to_the_bit(kind: str, nvme_path: Path) -> None:
    run_twice(nvme_path, lambda: make_quantised(kind, 4, WIDE), fine_tune, trainable)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_quantised_weight_is_made_of_is_let_go_and_comes_back_as_the_same_object(
    kind: str, nvme_path: Path
) -> None:
    torch.manual_seed(0)
    model = make_quantised(kind)
    wholes = [layer.base.weight for layer in model]  # type: ignore[union-attr]
    tensors, before = weights_of(model), bits([t.clone() for t in weights_of(model)])
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    assert not swapper_of(model).stays
    assert all(is_evicted(t) and is_hollow(t) for t in tensors)
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    assert all(a is b for a, b in zip(wholes, (layer.base.weight for layer in model), strict=True))  # type: ignore[union-attr]
    assert all(a is b for a, b in zip(tensors, weights_of(model), strict=True))
    assert all(is_evicted(t) for t in tensors)
    with swapper.gathered(model):
        assert not any(is_evicted(t) for t in tensors)
        assert {type(t) for t in tensors} <= {torch.Tensor, nn.Parameter}
    assert bits(tensors) == before  # Each brought for itself.
    swapper_of(model).close(keep_values=True)
    assert not any(is_evicted(t) for t in tensors) and bits(tensors) == before
    assert {type(t) for t in tensors} <= {torch.Tensor, nn.Parameter}


def test_an_integer_model_reads_its_own_bytes_and_no_more(nvme_path: Path) -> None:
    width = 512
    with torch.no_grad(), small_records():
        models = [make_quantised("int8", 4, width), make_quantised("int32", 4, width)]
        moved = []
        for model in models:
            swapper.offload(model, config=config_for(nvme_path, bucket_bytes=1 << 20, pool_bytes=3 << 20))
            for _ in range(3):
                before = swapper_of(model).metrics.bytes_read
                model(torch.ones(1, width))
                moved.append(swapper_of(model).metrics.bytes_read - before)
            swapper_of(model).close()
    assert moved[2] < moved[5] / 3


@pytest.mark.parametrize("kind", ["coded", "nested", "int8", "buffer"])
def test_a_state_dict_costs_nothing_until_it_is_used(kind: str, nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = make_quantised(kind, 3)
    want = bits(copy.deepcopy(model).state_dict())
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    state = model.state_dict()
    again = {name: value.detach() for name, value in state.items()}
    assert not any(held.has_views() for held in swapper_of(model)._all)
    assert bits(dict(state)) == want and bits(again) == want
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    other = make_quantised(kind, 3)
    loaded = torch.load(file, weights_only=False)
    assert bits(loaded) == want
    other.load_state_dict(loaded)
    assert bits(other.state_dict()) == want
    for value in model.parameters():
        value.data.zero_() if not isinstance(value, CodedTensor) else value.codes.zero_()
    model.load_state_dict(other.state_dict())
    assert bits(dict(state)) == want, "views follow what is loaded"
    swapper_of(model).close()


@pytest.mark.parametrize("kind", ["coded", "int8", "buffer"])
def test_a_model_is_copied_and_not_pickled(kind: str, nvme_path: Path) -> None:
    model = make_quantised(kind, 2)
    want = bits(model.state_dict())
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    twin = copy.deepcopy(model)
    for write in (pickle.dump, torch.save):
        with pytest.raises(swapper.SwapError, match="cannot be pickled"):
            write(model, io.BytesIO())
    swapper_of(model).close()
    del model
    assert bits(twin.state_dict()) == want == bits(pickle.loads(pickle.dumps(twin)).state_dict())


@pytest.mark.parametrize("kind", ["coded", "nested", "buffer"])
def test_a_weight_that_is_no_plain_parameter_can_be_copied(kind: str, nvme_path: Path) -> None:
    model = make_quantised(kind, 2)
    weight: Any = model[0].base.weight  # type: ignore[union-attr]
    want = bits(weight)
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    copies = [torch.load(file, weights_only=False), pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight)]
    swapper_of(model).close()
    assert all(bits(each) == want for each in copies)


@pytest.mark.parametrize("operation", ["clone", "detach", "mm", "sum", "copy_", "decoded", "repr", "item"])
def test_uses_that_no_hook_foresaw_are_right(operation: str, nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = make_quantised("coded", 2)
    twin = copy.deepcopy(model)
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    mine, theirs = (m[0].base.weight for m in (model, twin))  # type: ignore[union-attr]
    x = torch.randn(3, WIDTH)
    uses = {
        "clone": lambda w: w.clone(),
        "detach": lambda w: w.detach(),
        "mm": lambda w: torch.mm(x, w),
        "sum": lambda w: w.sum(),
        "copy_": lambda w: w.data.copy_(CodedTensor.of(torch.ones(WIDTH, WIDTH))),
        "decoded": lambda w: w.decoded(),
        "repr": lambda w: [repr(w), repr(w.codes)],
        "item": lambda w: w.codes[3, 4].item(),
    }
    assert bits(uses[operation](mine)) == bits(uses[operation](theirs))
    assert is_evicted(mine.codes) and bits(mine) == bits(theirs)
    swapper_of(model).close()


def test_small_buffers_stay(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.parameter.candidates.BUFFER_BYTES", 1 << 20)
    model = make_quantised("buffer", 2)
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    assert not any(is_evicted(buffer) for buffer in model.buffers())
    swapper_of(model).close()


def test_a_buffer_that_is_changed_in_forward_keeps_its_changes(nvme_path: Path) -> None:
    class Counting(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(WIDTH, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.detach().abs().sum(0)[:, None]
            y: torch.Tensor = self.linear(x) * self.seen.sum()
            return y

    def program(run: Run) -> None:
        for _ in range(4):
            run.model(torch.randn(3, WIDTH, generator=run.generator)).sum().backward()
            run.finish_step()

    run_twice(nvme_path, lambda: nn.Sequential(*(Counting() for _ in range(4))), program)


def test_a_buffer_that_is_replaced_is_an_ordinary_one(nvme_path: Path) -> None:
    model = make_quantised("buffer", 3)
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    model[1].base.weight = torch.ones(WIDTH, WIDTH, dtype=torch.int8)  # type: ignore[union-attr]
    twin = make_quantised("buffer", 3)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, WIDTH)
    assert bits(model(x)) == bits(twin(x))
    swapper_of(model).close()


def test_the_wrapper_of_a_tied_weight_is_swapped_once(nvme_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_quantised("coded", 3)
        model[2].base.weight = model[0].base.weight  # type: ignore[union-attr]
        return model, trainable(model)

    torch.manual_seed(0)
    plain, _ = make()
    torch.manual_seed(0)
    model, optimizer = offloaded(nvme_path, make)
    names = [location.name for record in swapper_of(model).plan.records for location in record.locations]
    assert len(names) == len(set(names)) and "2.base._weight_codes" not in names
    x = torch.randn(2, WIDTH)
    assert bits(model(x)) == bits(plain(x))
    swapper.unwrap_optimizer(optimizer)
    swapper_of(model).close()


@pytest.mark.long
def test_tensors_inside_that_are_shared_stay(nvme_path: Path) -> None:
    model = make_quantised("coded", 2)
    scale = model[0].base.weight.scale  # type: ignore[union-attr]
    model[1].base.weight.scale = scale  # type: ignore[union-attr]
    kept = model[1].base.weight.codes.view(-1)  # type: ignore[union-attr]
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    assert set(swapper_of(model).stays) == {"1.base._weight_codes"}
    assert is_evicted(scale), "one object in two weights is swapped once"
    assert kept.sum() == model[1].base.weight.codes.sum()  # type: ignore[union-attr]
    swapper_of(model).close()


@pytest.fixture
def on(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["coded", "int8", "float8_e5m2", "buffer", "transient"])
def test_of_a_model_on_an_accelerator_too(kind: str, on: torch.device, nvme_path: Path) -> None:
    with models_on(on):
        run_twice(nvme_path, lambda: make_quantised(kind, 3, WIDE), fine_tune, trainable, watch=False)


def test_integers_stay_where_a_read_could_go_unnoticed(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.tensors.hollow._keys", None)  # As where this torch does not know of them.
    monkeypatch.setattr("swapper.tensors.hollow._refuse_access", None)
    model = make_quantised("int8", 2)
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    stays = swapper_of(model).stays
    assert set(stays) == {"0.base.weight", "1.base.weight"} and "no NaN" in stays["0.base.weight"]
    swapper_of(model).close()


# --- Sparse weights --------------------------------------------------------------------------------------------------


class Pruned(torch.Tensor):
    """A sparse matrix, and a dense one that is added to it."""

    kept: torch.Tensor
    dense: torch.Tensor

    @staticmethod
    def __new__(cls, kept: torch.Tensor, dense: torch.Tensor) -> Pruned:
        made: Pruned = torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=dense.dtype, device=dense.device)
        made.kept, made.dense = kept, dense
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["kept", "dense"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Pruned:
        return Pruned(inner["kept"], inner["dense"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].kept, args[0].dense))
        plain = [each.kept.to_dense() + each.dense if isinstance(each, Pruned) else each for each in args]
        return func(*plain, **(kwargs or {}))


class SparseLayer(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        values = torch.randn(WIDTH, WIDTH)
        options: dict[str, Any] = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
        kept = (values * (values > 1)).to_sparse(layout=layout, **options)
        self.weight = nn.Parameter(Pruned(kept, values / 10), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def train_sparse(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for seed in range(2):
        model(torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    layer: Any = model[1]  # type: ignore[index]
    return bits([model(torch.ones(2, WIDTH)), layer.weight.kept.to_dense(), layer.weight.dense.clone()])


def with_a_sparse_layer(layout: torch.layout) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), SparseLayer(layout), nn.Linear(WIDTH, WIDTH))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
@pytest.mark.parametrize("how", ["offload", "init", "wrap_optimizer", "check"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_bsc], ids=str)
def test_what_is_sparse_inside_of_a_subclass_stays_in_memory(
    layout: torch.layout, how: str, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = with_a_sparse_layer(layout)
    expected = train_sparse(plain, torch.optim.AdamW(plain.parameters()))
    config = config_for(nvme_path)
    with small_records(), swapper.init(config) if how == "init" else contextlib.nullcontext():
        model = with_a_sparse_layer(layout)
    weight: Any = model[1].weight  # type: ignore[index, union-attr]
    kept = weight.kept
    optimizer = torch.optim.AdamW(model.parameters())
    if how == "wrap_optimizer":
        swapper.wrap_optimizer(optimizer, config_for(nvme_path, offload_param={"device": "none"}))
    elif how == "check":
        assert swapper.check(model, optimizer, config).parameter_bytes > 3 * 4 * WIDTH * WIDTH
        assert f"in 1 of 6 parameters (1._weight_kept): its layout is {layout}" in caplog.text
    else:
        with small_records():
            swapper.offload(model, optimizer, config)
        assert swapper_of(model).stays == {"1._weight_kept": f"its layout is {layout}"}
        assert is_evicted(weight.dense)
    assert model[1].weight is weight and weight.kept is kept and kept.layout is layout  # type: ignore[index, union-attr]
    assert type(kept) is torch.Tensor
    assert train_sparse(model, optimizer) == expected
    if how in ("offload", "init"):
        swapper_of(model).close()
    if how != "check":
        swapper.of(optimizer).close()


class SavedTensor(CodedTensor):
    """Puts itself into state dicts, as tensors of optimum-quanto do."""

    def save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for key in self.__tensor_flatten__()[0]:
            inner = getattr(self, key)
            if type(inner) is torch.Tensor:
                destination[prefix + key] = inner if keep_vars else inner.detach()
            else:
                SavedTensor.save_to_state_dict(inner, destination, f"{prefix}{key}.", keep_vars)


class SavingLinear(QuantisedLinear):
    """Has its weight put into state dicts by the weight itself."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        assert isinstance(self.weight, SavedTensor)
        self.weight.save_to_state_dict(destination, prefix + "weight.", keep_vars)
        destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()


def saving(nested: bool) -> nn.Module:
    def make(layer: nn.Module, values: torch.Tensor) -> None:
        coded = CodedTensor.of(values, CodedTensor.of) if nested else CodedTensor.of(values)
        layer.weight = nn.Parameter(SavedTensor(coded.codes, coded.scale), requires_grad=False)

    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(SavingLinear(make, WIDE), WIDE) for _ in range(4)))


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_weights_that_put_themselves_into_a_state_dict(nested: bool, nvme_path: Path) -> None:
    plain = saving(nested)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = saving(nested)
        return model, trainable(model)

    model, _ = offloaded(nvme_path, make)
    assert any(map(is_evicted, weights_of(model)))
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    model(torch.ones(2, WIDE))
    assert bits(dict(state)) == bits(dict(expected))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert bits(dict(torch.load(file))) == bits(dict(expected))
    kept = model.state_dict(keep_vars=True)
    assert {id(each) for each in weights_of(model)} <= set(map(id, kept.values()))
    assert bits(dict(copy.deepcopy(model).state_dict())) == bits(dict(expected))
    swapper_of(model).close(keep_values=True)
    assert bits(dict(model.state_dict())) == bits(dict(expected))
