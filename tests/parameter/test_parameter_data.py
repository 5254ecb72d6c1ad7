"""`p.data = ...` of a parameter that is on the drive: its record gets the values, or it is refused by name."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import bits, small_records
from weight_files import state_to_save, write_weights

import swapper
from swapper.parameter.swapper import ParameterSwapper
from swapper.tensors.attributes import PARTS
from swapper.tensors.evicted import is_evicted

WIDTH = 48


def offloaded(nvme_path: Path) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    config = swapper.OffloadConfig(
        nvme_path=nvme_path, pool_bytes="1MiB", bucket_bytes="64KiB", offload_param={"device": "nvme"}
    )
    swapper.offload(model, config=config)
    return model


def test_data_that_is_kept_while_other_is_given_is_refused(nvme_path: Path) -> None:
    """The usual backup of an EMA, `backup = p.data; p.data = shadow; ...; p.data = backup`: plain restores it."""
    model = offloaded(nvme_path)
    before = bits(list(model.parameters()))
    for name, p in model.named_parameters():
        backup = p.data
        with pytest.raises(swapper.SwapError, match=f"{name} was given other data while views of its former"):
            p.data = torch.zeros_like(p)
        assert bits(backup) == bits(p)
        del backup

    for p in model.parameters():  # With clones it works.
        kept = p.data.clone()
        p.data = torch.zeros_like(p)
        assert not p.any()
        p.data = kept
    assert bits(list(model.parameters())) == before

    def within() -> None:
        with swapper.gathered(model):
            backup = model[0].weight.data
            model[0].weight.data = torch.zeros(WIDTH, WIDTH)
            assert backup.any()

    with pytest.raises(swapper.SwapError, match="views of its former"):
        within()
    assert bits(list(model.parameters())) == before
    model.swapper.close()


@pytest.mark.parametrize("order", ["transposed", "another order"])
@pytest.mark.parametrize("where", ["gathered", "hook", "outside"])
def test_data_in_another_order_are_refused(nvme_path: Path, where: str, order: str) -> None:
    """torch computes other bits with them, and the record keeps the order that it has."""
    model = offloaded(nvme_path)
    layer = model[2]
    before = bits(layer.weight)

    def transpose(*_: Any) -> None:
        data = layer.weight.data
        layer.weight.data = data.t() if order == "transposed" else data.t().contiguous().t()

    with pytest.raises(
        swapper.SwapError, match=r"2\.weight was .* strides \(48, 1\) and .* strides \(1, 48\); convert"
    ):
        if where == "outside":
            transpose()
        elif where == "gathered":
            with swapper.gathered(model):
                transpose()
        else:
            handle = layer.register_forward_pre_hook(transpose)
            model(torch.ones(1, WIDTH))
    if where == "hook":
        handle.remove()
    assert bits(layer.weight) == before
    model(torch.ones(1, WIDTH))
    model.swapper.close()


@pytest.mark.parametrize("made", ["offloaded", "built", "from files"])
def test_channels_last_after_offload_is_refused(nvme_path: Path, made: str) -> None:
    """Before it the conversion is that of plain PyTorch."""
    config = {"nvme_path": nvme_path, "pool_bytes": "4MiB", "offload_param": {"device": "nvme"}}
    x = torch.randn(2, 64, 9, 9, generator=torch.Generator().manual_seed(1))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 1))

    if made == "from files":
        path = write_weights(nvme_path.parent / "model.safetensors", state_to_save(make()))
        model, _ = swapper.offload(make(), config={"pool_bytes": "4MiB"}, weights=path)
    elif made == "built":
        with small_records(), swapper.init(config):
            model = make()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        swapper.offload(model, config=config)
        assert bits(model(x)) == bits(make().to(memory_format=torch.channels_last)(x))  # type: ignore[call-overload]
        with pytest.raises(swapper.SwapError, match=r"0\.weight was"):
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return
    else:
        model, _ = swapper.offload(make(), config=config)
    with pytest.raises(swapper.SwapError, match=r"0\.weight was .* strides \(576, 9, 3, 1\) and .*; convert"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert bits(model(x)) == bits(make()(x))


CONVERSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype and shape": lambda data: data.view(torch.bfloat16)[:, :16],
    "strides": lambda data: data.t(),
    "rows of its own": lambda data: data[:16],
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_data_of_another_order_or_of_its_own_memory_are_refused(nvme_path: Path, conversion: str) -> None:
    model = offloaded(nvme_path)
    before = bits(model[2].weight)
    with pytest.raises(
        swapper.SwapError, match=r"2.weight was \(48, 48\) x torch.float32 on cpu .* given data of .* x"
    ):
        model[2].weight.data = CONVERSIONS[conversion](model[2].weight.data)
    assert bits(model[2].weight) == before
    model.swapper.close()


RESHAPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows fewer": lambda data: data[:16].clone(),
    "columns of others": lambda data: torch.ones(data.shape[0], 50)[:, 8:24],
    "rows more": lambda data: torch.cat([data, torch.ones(5, data.shape[1])]),
    "fresh": lambda data: torch.full((3, data.shape[1]), 0.5),
    "of no element": lambda data: data.new_empty(0, data.shape[1]),
    "another dimension": lambda data: data.clone().view(2, -1, data.shape[1]),
    "another dtype": lambda data: data.to(torch.bfloat16),
    "another dtype in another order": lambda data: data.to(torch.float64).t(),
}


def of_data(model: nn.Module, names: list[str], shape: str) -> list[Any]:
    """Give the parameters other data, in turn, between uses of the model, and train what still fits."""
    seen: list[Any] = []
    for name in names:
        p = model.get_parameter(name)
        p.data = RESHAPED[shape](p.data)
        seen.append([bits(value) for value in model.state_dict().values()])
        model.requires_grad_(True)
        out = torch.cat([q.square().sum().reshape(1) for q in model.parameters()])
        out.sum().backward()
        with torch.no_grad():
            for q in model.parameters():
                q.sub_(q.grad, alpha=0.25)
                q.grad = None
        seen += [bits(out), bits(list(model.parameters()))]
        del out  # It keeps what autograd knows of the shapes.
    return seen


def in_files(path: Path, model: nn.Module) -> nn.Module:
    """The model with its weights in a file, and the rows of its embedding in blocks."""
    twin = copy.deepcopy(model)
    weights = write_weights(path / "model.safetensors", state_to_save(model))
    swapper.offload(twin, config=swapper.OffloadConfig(pool_bytes="32MiB"), weights=weights)
    return twin


@pytest.mark.parametrize("way", ["more rows", "data", "module"])
def test_an_embedding_that_comes_by_rows_is_given_other_data(way: str, tmp_path: Path) -> None:
    """As large ones of models from files are resized, and cast by `prepare_model_for_kbit_training` of PEFT."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(40_000, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    more = torch.randn(3, 64).to(torch.bfloat16)
    model, tokens = in_files(tmp_path, plain), torch.tensor([[1, 39_999]])
    with torch.no_grad():
        assert bits(model(tokens)) == bits(plain(tokens))
        assert PARTS in vars(model[0].weight), "else it does not come by rows"  # type: ignore[index]
        for each in (plain, model):
            embedding: Any = each[0]  # type: ignore[index]
            if way == "more rows":
                embedding.weight.data = torch.cat([embedding.weight.data, more])
                embedding.num_embeddings += 3
                tokens = torch.tensor([[1, 39_999, 40_002]])
            elif way == "data":
                embedding.weight.data = embedding.weight.data.float()
            else:
                embedding.float()
        assert bits(model[0](tokens)) == bits(plain[0](tokens))  # type: ignore[index]
        assert type(model[0].weight) is nn.Parameter and "0.weight" in model.swapper.stays  # type: ignore[index, union-attr, operator]
        assert bits(model[1](more)) == bits(plain[1](more))  # type: ignore[index]
    embedding.weight.requires_grad_(True)
    model[0](tokens).sum().backward()  # type: ignore[index]
    assert embedding.weight.grad.abs().sum() > 0
    model.swapper.close()  # type: ignore[union-attr, operator]


def test_conversions_of_a_module_are_followed_and_of_the_whole_refused(nvme_path: Path) -> None:
    model, plain = offloaded(nvme_path), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    plain.load_state_dict(dict(zip(plain.state_dict(), offloaded_values(), strict=True)))
    for convert in (model.bfloat16, nn.Sequential(model).double):
        with pytest.raises(
            swapper.SwapError, match=r"0\.weight was \(48, 48\) x torch.float32 on cpu .* and was given"
        ):
            convert()
    assert bits(list(model.parameters())) == bits(list(plain.parameters()))
    for each in (model, plain):
        each[2].double()
        each[0].register_forward_hook(lambda module, inputs, output: output.double())
    for _ in range(2):
        assert bits(model(torch.ones(2, WIDTH))) == bits(plain(torch.ones(2, WIDTH)))
        assert bits(list(model.parameters())) == bits(list(plain.parameters()))
    model.swapper.close()


@pytest.mark.parametrize("made", ["offloaded", "from files", "built"])
@pytest.mark.parametrize("shape", RESHAPED)
def test_data_of_another_shape_are_in_memory_from_then_on(nvme_path: Path, shape: str, made: str) -> None:
    """As `resize_token_embeddings` of transformers gives them."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, 20 * WIDTH), nn.Linear(WIDTH, 20 * WIDTH))

    names = ["1.weight", "2.weight"]
    want = of_data(make(), names, shape)
    config = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="2MiB", offload_param={"device": "nvme"})
    model = make()
    if made == "from files":
        copied = {"device": "nvme", "copy_on_write": True}
        config = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="2MiB", offload_param=copied)
        path = write_weights(nvme_path.parent / "model.safetensors", state_to_save(model))
        swapper.offload(model, config=config, weights=path)
    elif made == "built":
        with small_records(), swapper.init(config):
            model = make()
        swapper.offload(model, config=config)
    else:
        swapper.offload(model, config=config)
    assert of_data(model, names, shape) == want
    for name in names:
        assert type(model.get_parameter(name)) is nn.Parameter
        assert model.swapper.stays[name].startswith("it was given other data, ")
    model.swapper.close(keep_values=True)
    assert [bits(p) for p in model.parameters()] == want[-1]


def test_data_of_another_shape_of_memory_that_is_viewed_are_refused(nvme_path: Path) -> None:
    """Plain would let the view and the parameter share memory."""
    model = offloaded(nvme_path)
    kept = model[0].weight.data
    with pytest.raises(swapper.SwapError, match=r"0.weight was \(48, 48\)"):
        model[0].weight.data = kept[:4]
    model[0].weight.data = torch.ones(4, WIDTH)  # It shares nothing, and the view has what it had.
    assert bits(kept) == bits(offloaded_values()[0]) and model[0].weight.shape == (4, WIDTH)
    del kept
    model.swapper.close()


def offloaded_values() -> list[torch.Tensor]:
    """Those of the model that `offloaded` makes, before."""
    torch.manual_seed(0)
    return [p.detach() for p in nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).parameters()]


def test_a_checkpoint_has_the_shape_that_a_parameter_was_given(nvme_path: Path) -> None:
    model = offloaded(nvme_path)
    model(torch.ones(1, WIDTH))
    model[2].weight.data, model[2].bias.data = torch.randn(5, WIDTH), torch.randn(5)
    want = bits(list(model.parameters()))
    swapper.save_checkpoint(nvme_path.parent / "saved", model)
    assert bits(model(torch.ones(1, WIDTH))) == bits(model(torch.ones(1, WIDTH)))
    loaded = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))
    swapper.load_checkpoint(nvme_path.parent / "saved", loaded)
    assert bits(list(loaded.parameters())) == want
    model.swapper.close()


def test_a_state_dict_from_before_another_shape_is_refused_and_its_clones_are_not(nvme_path: Path) -> None:
    """It shares the memory of the parameter, which plain leaves to it: here the drive had the values."""
    model = offloaded(nvme_path)
    before = model.state_dict()
    kept = {key: value.clone() for key, value in before.items()}
    model[2].weight.data = torch.ones(5, WIDTH)
    for use in (torch.clone, torch.Tensor.zero_, lambda value: torch.save(value, io.BytesIO()), lambda v: v[0].clone()):
        with pytest.raises(swapper.SwapError, match=r"\(48, 48\) x .* that was given other data since, \(5, 48\) x"):
            use(before["2.weight"])
    assert bits(before["0.weight"].clone()) == bits(kept["0.weight"]) == bits(offloaded_values()[0])
    assert bits(kept["2.weight"]) == bits(offloaded_values()[2])
    assert bits(model.state_dict()["2.weight"].clone()) == bits(torch.ones(5, WIDTH))
    model.swapper.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_parameter_of_another_shape_is_that_of_whom_it_is_offloaded_with_next(nvme_path: Path, whole: bool) -> None:
    """The hooks and records of the first are still there, with the values that it had."""
    first, x = offloaded(nvme_path), torch.ones(1, WIDTH)
    first(x)
    first[2].weight.data, first[2].bias.data = torch.randn(5, WIDTH), torch.randn(5)
    want, want_out = bits(list(first.parameters())), bits(first(x))
    config = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="1MiB", offload_param={"device": "nvme"})
    second: nn.Module = nn.Sequential(first) if whole else first[2]
    swapper.offload(second, config=config)
    assert is_evicted(first[2].weight)
    assert bits(first(x)) == want_out
    first(x).sum().backward()
    assert first[2].weight.grad is not None and first[2].weight.grad.shape == (5, WIDTH)
    assert bits(list(first.parameters())) == want
    first.swapper.close(keep_values=True)
    assert is_evicted(first[2].weight) and bits(list(first.parameters())) == want
    second.swapper.close(keep_values=True)  # type: ignore[union-attr, operator]
    assert bits(list(first.parameters())) == want


class Scaled(nn.Module):
    """Autograd saves `scale` itself, and of `weight` a view."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(20 * WIDTH))
        self.weight = nn.Parameter(torch.randn(20 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale) @ self.weight


@pytest.mark.parametrize("name", ["scale", "weight"])
@pytest.mark.parametrize("shape", ["the same", "another"])
def test_data_that_are_given_between_forward_and_backward_are_never_used_for_the_former(
    nvme_path: Path, name: str, shape: str
) -> None:
    """Plain would use the new ones where autograd saved the parameter itself, and the former ones where a view."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20 * WIDTH), Scaled())
    swapper.offload(model, config={"nvme_path": nvme_path, "pool_bytes": "2MiB", "offload_param": {"device": "nvme"}})
    out = model(torch.ones(2, 4))
    p = model[1].get_parameter(name)
    p.data = torch.ones(1, *p.shape[1:]) if shape == "another" else torch.ones(p.shape)
    with pytest.raises(swapper.SwapError, match=f"1.{name} was given other data .* between a forward and its backward"):
        out.sum().backward()
    model.zero_grad()
    if shape == "the same":
        model(torch.ones(2, 4)).sum().backward()
        assert all(q.grad is not None for q in model.parameters())
    model.swapper.close()  # type: ignore[union-attr, operator]


def test_on_a_device_data_of_another_shape_stay_there(device: str, nvme_path: Path) -> None:
    on = torch.device(device, 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 20 * WIDTH), nn.Tanh(), nn.Linear(20 * WIDTH, WIDTH)).to(on)
    data = torch.randn(5, 20 * WIDTH).to(on), torch.randn(5).to(on)
    inputs = torch.randn(3, WIDTH).to(on)
    swapper.offload(model, config={"nvme_path": nvme_path, "pool_bytes": "2MiB", "offload_param": {"device": "nvme"}})
    for _ in range(2):
        first = model[1](model[0](inputs))
        model[2].weight.data, model[2].bias.data = data
        assert bits(model(inputs).cpu()) == bits(nn.functional.linear(first, *data).cpu())
        assert model[2].weight.device == on and type(model[2].weight) is nn.Parameter
    model.swapper.close()  # type: ignore[union-attr, operator]


def test_a_step_of_a_parameter_of_another_shape_is_refused(nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    config = swapper.OffloadConfig(
        nvme_path=nvme_path, pool_bytes="1MiB", offload_param={"device": "nvme"}, offload_optimizer={"device": "nvme"}
    )
    _, optimizer = swapper.offload(model, torch.optim.AdamW(model.parameters()), config)
    model.weight.data = torch.ones(WIDTH + 1, WIDTH)
    model.weight.grad = torch.ones(WIDTH + 1, WIDTH)
    with pytest.raises(
        swapper.SwapError, match=r"was 2304 x torch.float32 on cpu when its optimizer was wrapped and is"
    ):
        optimizer.step()
    model.swapper.close()  # type: ignore[union-attr, operator]


def test_a_use_that_the_collector_ends_while_another_is_let_go(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-C, whose traceback keeps the frame of a use in a cycle."""
    model = offloaded(nvme_path)
    release_part = ParameterSwapper._release_part
    monkeypatch.setattr(ParameterSwapper, "_release_part", lambda *args: (gc.collect(), release_part(*args))[1])
    gc.disable()
    try:
        gathered = swapper.gathered(model[2])
        gathered.__enter__()
        cycle: list[object] = [gathered]
        cycle.append(cycle)
        del gathered, cycle
        model(torch.ones(1, WIDTH))
    finally:
        gc.enable()
    model(torch.ones(1, WIDTH))
    assert not any(held.holds for held in model.swapper._all)
    model.swapper.close()


@pytest.mark.parametrize("whole", [True, False])
def test_shared_memory_is_refused_at_once_and_training_goes_on(nvme_path: Path, whole: bool) -> None:
    """Torch would move the values out of the pool, where what is written to them would be lost."""
    models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="1MiB", offload_param={"device": "nvme"})
    swapper.offload(models[0], config=config)
    with pytest.raises(swapper.SwapError, match="is swapped, so its values cannot be moved to shared memory"):
        models[0].share_memory() if whole else models[0][1].weight.share_memory_()
    for model in models:
        torch.manual_seed(0)
        model(torch.randn(2, WIDTH)).square().sum().backward()
    assert bits([p.grad for p in models[0].parameters()]) == bits([p.grad for p in models[1].parameters()])
    models[0].swapper.close()


def test_a_pool_dies_with_its_last_user_though_a_view_outlives_the_model(nvme_path: Path) -> None:
    gc.disable()
    try:
        model = offloaded(nvme_path)
        pool = weakref.ref(model.swapper._pool)
        with swapper.gathered(model):
            view = model[0].weight.data[:1]
        del model
        assert view.numel() == WIDTH
        del view
        assert pool() is None
    finally:
        gc.enable()
