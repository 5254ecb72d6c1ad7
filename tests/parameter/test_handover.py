"""A model goes from hand to hand (`init` or `materialize`, `offload`, `close`, `offload`) with the bits of plain."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH, Mlp
from torch import nn
from twins import config_for, evaluate, on_meta, small_records, swapper_of, train, values_of

import swapper
from swapper.tensors.homes import home_of

MakeModel = Callable[[], nn.Module]


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, dropout=0.0)


def user_forward(module: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    y: torch.Tensor = type(module).forward(module, x, **options)
    return y * 2


def with_own_forward() -> nn.Module:
    """The user replaced `forward` on the instance before anything was swapped."""
    model = nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH), layer())
    for index in (0, 2):
        model[index].forward = types.MethodType(user_forward, model[index])  # type: ignore[method-assign]
    return model


class Padded(nn.Module):
    """In evaluation `TransformerEncoder` leaves out what is padded, and gives zeros there."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 2)
        self.own = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[1])[None] >= torch.tensor([[x.shape[1]], [x.shape[1] - 2]])
        y: torch.Tensor = self.encoder(x + self.own, src_key_padding_mask=mask)
        return y


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.rest = Mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rest(self.attention(x, x, x, need_weights=False)[0])
        return y


class Nested(nn.TransformerEncoderLayer):
    """A layer with a layer in it, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 64, batch_first=True, dropout=0.0)
        self.inner = nn.Sequential(layer(), nn.MultiheadAttention(WIDTH, 2, batch_first=True))
        self.scale = nn.Parameter(torch.ones(WIDTH, 8))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x) * self.scale.mean(1)
        x = self.inner[0](x)
        y: torch.Tensor = self.inner[1](x, x, x)[0]
        return y


class EncoderAndDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 4, 2, 1, 64, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x, x.flip(1))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.gru(x)[0])
        return y


KINDS: dict[str, MakeModel] = {
    "linear": lambda: Mlp(3),
    "a layer": layer,
    "layers in a row": lambda: nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH), layer()),
    "encoder with padding": Padded,
    "encoder and decoder": EncoderAndDecoder,
    "attention": Attending,
    "nested layers": Nested,
    "a forward of the user's": with_own_forward,
    "recurrent": Recurrent,
}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def fill(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.detach().zero_()


def built(way: str, make: MakeModel, config: swapper.OffloadConfig, state: dict[str, torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    if way == "init":
        with swapper.init(config):
            return make()
    if way == "materialize":
        model = swapper.materialize(on_meta(make), config, fill)
        model.load_state_dict(state)
        return model
    return make()


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("way", ["plain", "init", "materialize"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_module_in_every_hand(kind: str, way: str, nvme_path: Path) -> None:
    make = KINDS[kind]
    torch.manual_seed(0)
    plain = make()
    reference = adamw(plain)
    config = config_for(nvme_path)
    with small_records():
        model = built(way, make, config, plain.state_dict())
        forwards = {name: vars(module).get("forward") for name, module in plain.named_modules()}
        assert values_of(model) == values_of(plain)
        if way != "plain":
            assert evaluate(model) == evaluate(plain)
        optimizer = adamw(model)
        swapper.offload(model, optimizer, config)
        assert evaluate(model) == evaluate(plain)
        for seed in (3, 4):
            assert train(model, optimizer, seed) == train(plain, reference, seed)
        # A new optimizer for a model that stays where it is.
        optimizer.swapper.close()  # type: ignore[attr-defined]
        optimizer, reference = adamw(model), adamw(plain)
        swapper.offload(model, optimizer, config)
        assert train(model, optimizer, 5) == train(plain, reference, 5)
        assert evaluate(model) == evaluate(plain)
        # And back into memory.
        swapper_of(model).close(keep_values=True)
        assert evaluate(model) == evaluate(plain)
        assert train(model, optimizer, 6) == train(plain, reference, 6)
        for name, module in model.named_modules():
            assert (vars(module).get("forward") is None) == (forwards[name] is None), name
            assert not module._forward_hooks and not module._forward_pre_hooks
        swapper.unwrap_optimizer(optimizer)
        swapper.offload(model, optimizer, config)
        assert evaluate(model) == evaluate(plain)
        assert train(model, optimizer, 7) == train(plain, reference, 7)
    swapper_of(model).close()
    optimizer.swapper.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("calls_old", [True, False], ids=["around the old one", "in its place"])
@pytest.mark.parametrize("way", ["plain", "init"])
def test_a_forward_that_is_replaced_afterwards(way: str, calls_old: bool, nvme_path: Path) -> None:
    make = KINDS["layers in a row"]
    torch.manual_seed(0)
    plain = make()
    config = config_for(nvme_path)

    def replace(model: nn.Module) -> None:
        for module in (model[0], model[2]):  # type: ignore[index]
            old = module.forward if calls_old else functools.partial(type(module).forward, module)
            module.forward = lambda *args, old=old, **kwargs: old(*args, **kwargs) * 3  # type: ignore[method-assign]

    with small_records():
        model = built(way, make, config, {})
        if way == "init":
            for one in (model, plain):
                replace(one)
            assert evaluate(model) == evaluate(plain)
        optimizer, reference = adamw(model), adamw(plain)
        swapper.offload(model, optimizer, config)
        assert evaluate(model) == evaluate(plain)
        for one in (model, plain):
            replace(one)
        for seed in (1, 2):
            assert evaluate(model) == evaluate(plain)
            assert train(model, optimizer, seed) == train(plain, reference, seed)
        swapper_of(model).close(keep_values=True)
        assert evaluate(model) == evaluate(plain)
        assert train(model, optimizer, 3) == train(plain, reference, 3)
        optimizer.swapper.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_forwards_over_one_another_are_removed_in_any_order(order: tuple[int, ...]) -> None:
    from swapper.parameter.forward_hooks import Forward

    class Noting:
        def __init__(self, name: int) -> None:
            self.name = name

        def before(self, module: nn.Module, args: Any) -> None:
            noted.append(self.name)

        def after(self, module: nn.Module, args: Any, output: Any) -> None:
            noted.append(-self.name)

    noted: list[int] = []
    module = nn.Identity()
    forwards = [Forward(module, Noting(i + 1)) for i in range(3)]  # type: ignore[arg-type]
    present = [1, 2, 3]
    for number in order:
        assert module(7) == 7
        assert noted == [*reversed(present), *(-i for i in present)]
        noted.clear()
        forwards[number].remove()
        forwards[number].remove()
        present.remove(number + 1)
    assert "forward" not in vars(module)
    assert module(7) == 7 and not noted


def test_a_layer_that_stays_with_the_builder_works_beside_one_that_was_taken_over(nvme_path: Path) -> None:
    make = KINDS["layers in a row"]
    torch.manual_seed(0)
    plain = make()
    config = config_for(nvme_path)
    with small_records():
        model = built("init", make, config, {})
        part = model[0]  # type: ignore[index]
        swapper.offload(part, torch.optim.SGD(part.parameters(), lr=0.1), config)
        assert evaluate(model) == evaluate(plain)
        swapper_of(part).close(keep_values=True)
        assert evaluate(model) == evaluate(plain)
        optimizer, reference = adamw(model), adamw(plain)
        swapper.offload(model, optimizer, config)
        assert evaluate(model) == evaluate(plain)
        assert train(model, optimizer, 1) == train(plain, reference, 1)
    swapper_of(model).close()
    optimizer.swapper.close()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["layers in a row", "encoder with padding", "attention"])
def test_a_hand_over_that_fails_leaves_the_builder_its_modules(
    kind: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("not today")

    make = KINDS[kind]
    torch.manual_seed(0)
    plain = make()
    config = config_for(nvme_path)
    with small_records():
        model = built("init", make, config, {})
        with monkeypatch.context() as patch:
            patch.setattr("swapper.parameter.owner.finalizer", fail)  # After all modules have their new hooks.
            with pytest.raises(RuntimeError, match="not today"):
                swapper.offload(model, adamw(model), config)
        homes = [home for p in model.parameters() if (home := home_of(p)) is not None]
        assert homes and all(home.temporary is not None for home in homes)
        assert evaluate(model) == evaluate(plain)
        optimizer, reference = adamw(model), adamw(plain)
        swapper.offload(model, optimizer, config)
        assert evaluate(model) == evaluate(plain)
        assert train(model, optimizer, 1) == train(plain, reference, 1)
    swapper_of(model).close()
    optimizer.swapper.close()  # type: ignore[attr-defined]
