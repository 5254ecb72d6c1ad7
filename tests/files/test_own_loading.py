"""`weights=` of models that load a state dict in their own way: with the values that it gives, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import swapper

SIZE = 200
"""So that weights are moved."""


class Hooked(nn.Module):
    """Has a linear layer, and a hook, which gets the state dict and the name of the weight in it."""

    def __init__(self, hook: Callable[[dict[str, Any], str], object], private: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        if private:
            self._register_load_state_dict_pre_hook(lambda state, prefix, *rest: hook(state, prefix + "linear.weight"))
        else:
            self.register_load_state_dict_pre_hook(
                lambda module, state, prefix, *rest: hook(state, prefix + "linear.weight")
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


class Doubling(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, *rest)


class DoublingLater(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        super()._load_from_state_dict(state, prefix, *rest)
        self.weight.data.mul_(2)


class LooksAtValues(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        if state[prefix + "weight"].abs().max() > 1:
            state[prefix + "weight"] = state[prefix + "weight"] / 127
        super()._load_from_state_dict(state, prefix, *rest)


class CopiesOther(nn.Linear):
    """Copies something else than it was given."""

    def __init__(self, how: str) -> None:
        super().__init__(SIZE, SIZE)
        self.how = how

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        weight, bias = state[prefix + "weight"], state[prefix + "bias"]
        with torch.no_grad():
            if self.how == "foreach":
                torch._foreach_copy_([self.weight, self.bias], [weight * 2, bias])
            elif self.how == "assigned":
                self.weight, self.bias = nn.Parameter(weight.neg()), nn.Parameter(bias)
            elif self.how == "by rows":
                self.weight[:50].copy_(weight[-50:])
                self.weight[50:].copy_(weight[:-50])
                self.bias.copy_(bias)
            else:
                self.weight.copy_(weight.flip(0))
                self.bias.copy_(bias)
                if self.how == "data":
                    self.weight.data = self.weight.data * 2


class Migrates(nn.Linear):
    """Takes the name that the weight had before."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel").t()
        super()._load_from_state_dict(state, prefix, *rest)


def doubled(state: dict[str, Any], name: str) -> None:
    state[name] = state[name] * 2


def turned(state: dict[str, Any], name: str) -> None:
    state[name] = state[name].t()


def in_place(state: dict[str, Any], name: str) -> None:
    state[name].mul_(2)


def behind_autograd(state: dict[str, Any], name: str) -> None:
    state[name].data += 1


def renamed(state: dict[str, Any], name: str) -> None:
    old = name.replace("linear", "fc")
    if old in state:
        state[name] = state.pop(old)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "hook": lambda: Hooked(doubled),
    "private hook": lambda: Hooked(turned, private=True),
    "in place": lambda: Hooked(in_place),
    "behind autograd's back": lambda: Hooked(behind_autograd),
    "inside": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), Hooked(doubled)),
    "own": lambda: nn.Sequential(Doubling(SIZE, SIZE)),
    "own, when it is loaded": lambda: DoublingLater(SIZE, SIZE),
    **{
        f"own, {how}": lambda how=how: CopiesOther(how)  # type: ignore[misc]
        for how in ("foreach", "assigned", "by rows", "flipped", "data")
    },
    "own, by values": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), LooksAtValues(SIZE, SIZE)),
}
"""Models that get other values than those in the files, or may."""

KEEPING: dict[str, Callable[[], nn.Module]] = {
    "hook": lambda: Hooked(renamed),
    "own": lambda: nn.Sequential(Migrates(SIZE, SIZE)),
    "normalised": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)),
    "spectral": lambda: spectral_norm(nn.Linear(SIZE, SIZE)),
    "parametrized": lambda: nn.Sequential(weight_norm(nn.Linear(SIZE, SIZE)), orthogonal(nn.Linear(SIZE, SIZE))),
}


def saved(make: Callable[[], nn.Module], tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save_file({name: value.clone().contiguous() for name, value in make().state_dict().items()}, path)
    return path


@pytest.mark.parametrize("kind", CHANGING)
def test_what_changes_values_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = saved(CHANGING[kind], tmp_path)
    model = CHANGING[kind]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    name = {"inside": "1, a Hooked", "own": "0, a Doubling", "own, by values": "1, a LooksAtValues"}.get(
        kind, "the model"
    )
    with pytest.raises(
        swapper.SwapError, match=f"weights: {name}.* loads a state dict in its own way, which (chan|cann)"
    ):
        swapper.offload(model, config={"pool_bytes": "4MiB"}, weights=path)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    if kind in ("behind autograd's back", "own, assigned"):  # They are refused there, too.
        return
    # The way that the error names.
    plain, loaded = CHANGING[kind](), CHANGING[kind]()
    plain.load_state_dict(load_file(path))
    swapper.load_safetensors(loaded, path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("kind", KEEPING)
def test_what_keeps_them_is_taken(kind: str, tmp_path: Path) -> None:
    path = saved(KEEPING[kind], tmp_path)
    plain, model = KEEPING[kind]().eval(), KEEPING[kind]().eval()
    plain.load_state_dict(load_file(path))
    swapper.offload(model, config={"pool_bytes": "4MiB"}, weights=path)
    x = torch.randn(3, SIZE)
    with torch.no_grad():
        assert torch.equal(plain(x), model(x))
    model.swapper.close()  # type: ignore[operator, union-attr]


class LoadsDoubled(nn.Sequential):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({name: value * 2 for name, value in state_dict.items()}, *args, **kwargs)


def test_a_load_state_dict_of_the_models_own_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, model = saved(lambda: LoadsDoubled(nn.Linear(SIZE, SIZE)), tmp_path), LoadsDoubled(nn.Linear(SIZE, SIZE))
    with caplog.at_level(logging.WARNING):
        swapper.offload(model, config={"pool_bytes": "4MiB"}, weights=path)
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("weights: the load_state_dict of LoadsDoubled is its own, and is not called")
    model.swapper.close()  # type: ignore[operator, union-attr]


def test_hooks_that_are_called_after_loading_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(SIZE, SIZE))
        model[0].register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
        return model

    path, model = saved(make, tmp_path), make()
    with caplog.at_level(logging.WARNING):
        swapper.offload(model, config={"pool_bytes": "4MiB"}, weights=path)
    [message] = [record.getMessage() for record in caplog.records]
    assert "register_load_state_dict_post_hook are not called" in message and message.endswith("those of 0")
    model.swapper.close()  # type: ignore[operator, union-attr]
