"""Checkpoints of quantised models: the tensors inside are saved by names, and loaded into the same objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH
from quantised import KINDS, make_quantised
from safetensors import safe_open
from torch import nn
from twins import bits, config_for, small_records, swapper_of

import swapper


@pytest.fixture(autouse=True)
def buffers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.parameter.candidates.BUFFER_BYTES", 1024)


def made(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = make_quantised(kind, 3)
    if kind == "coded":
        model[2].base.weight = model[0].base.weight  # type: ignore[union-attr]
    return model


@pytest.mark.sampled(10)
@pytest.mark.parametrize("saved_swapped", [True, False], ids=["swapped", "plain"])
@pytest.mark.parametrize("loaded_swapped", [True, False], ids=["into swapped", "into plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_what_is_inside(
    kind: str, saved_swapped: bool, loaded_swapped: bool, nvme_path: Path, tmp_path: Path
) -> None:
    one, other = made(kind, 1), made(kind, 2)
    want: Any = bits(one.state_dict())
    objects = [id(p) for p in other.parameters()]
    with small_records():
        for model, swapped in ((one, saved_swapped), (other, loaded_swapped)):
            if swapped:
                swapper.offload(model, config=config_for(nvme_path))
    swapper.save_checkpoint(tmp_path / "checkpoint", one)
    swapper.load_checkpoint(tmp_path / "checkpoint", other)
    assert bits(dict(other.state_dict())) == want == bits(dict(one.state_dict()))
    assert objects == [id(p) for p in other.parameters()]
    with torch.no_grad():
        x = torch.randn(2, WIDTH)
        if kind == "transient":
            for mine, theirs in zip(other, one, strict=True):  # type: ignore[call-overload]
                mine.base.weight.copy_(theirs.base.weight)
        assert bits(one(x)) == bits(other(x))
    if saved_swapped:
        linked = list((tmp_path / "checkpoint").glob("model-0*.safetensors"))
        assert linked, "records become files by a second name"
        names: set[str] = set()
        for path in linked:
            with safe_open(path, "pt") as file:
                names.update(file.keys())
        inside = {"coded": "0.base._weight_codes", "nested": "0.base._weight_scale_codes"}
        assert inside.get(kind, "0.base.bias") in names
    for model in (one, other):
        if "swapper" in vars(model):
            swapper_of(model).close()


def test_a_model_of_another_kind_is_refused_by_name(nvme_path: Path, tmp_path: Path) -> None:
    swapper.save_checkpoint(tmp_path / "checkpoint", made("coded", 1))
    before = made("nested", 2)
    with pytest.raises(swapper.SwapError, match=r"0\.base\._weight_scale"):
        swapper.load_checkpoint(tmp_path / "checkpoint", before)
    with pytest.raises(swapper.SwapError, match=r"0\.base\.weight is a tensor in the model and none in the checkpoint"):
        swapper.load_checkpoint(tmp_path / "checkpoint", made("int8", 2))
