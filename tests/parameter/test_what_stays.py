"""What cannot be moved to the drive is summed up in one message, and refused where nothing could be moved."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from isolation import alone
from models import WIDTH, Mlp
from torch import nn
from twins import bits, config_for, small_records, swapper_of, values_of

import swapper

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")

MakeModel = Callable[[], nn.Module]


class Int8Tensor(torch.Tensor):
    """A class that holds other tensors, and does not say how it is made of them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Int8Tensor:
        made: Int8Tensor = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = [a.codes.to(a.scale.dtype) * a.scale if isinstance(a, Int8Tensor) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Quantised(nn.Module):
    """Linear layers whose weights are what `make` makes of them, and norms that are trained."""

    def __init__(self, make: Callable[[nn.Module, torch.Tensor], None], depth: int = 5, norm: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(depth))
        for layer in self.layers:
            make(layer, torch.randn(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight.to(x.dtype)))  # type: ignore[operator, arg-type]
        y: torch.Tensor = self.norm(x)
        return y


def subclass(layer: nn.Module, w: torch.Tensor) -> None:
    codes = (w * 20).to(torch.int8)
    layer.weight = nn.Parameter(Int8Tensor(codes, torch.tensor(0.05)), requires_grad=False)


def float8(dtype: torch.dtype, layer: nn.Module, w: torch.Tensor) -> None:
    layer.weight = nn.Parameter(w.to(dtype), requires_grad=False)


def buffers(layer: nn.Module, w: torch.Tensor) -> None:
    layer.register_buffer("weight", w)


def of_inference(layer: nn.Module, w: torch.Tensor) -> None:
    with torch.inference_mode():
        layer.weight = nn.Parameter(w.clone())


def sparse(layout: torch.layout, layer: nn.Module, w: torch.Tensor) -> None:
    options: dict[str, Any] = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    layer.weight = nn.Parameter(w.to_sparse(layout=layout, **options), requires_grad=False)


WEIGHT_BYTES = 5 * WIDTH * WIDTH
SPARSE_BY_LINES = {torch.sparse_csr: 1, torch.sparse_csc: 1, torch.sparse_bsr: 2, torch.sparse_bsc: 2}
"""Layouts that have an index for each block of a row or column, and the sizes of these blocks."""

STAYING: dict[str, tuple[Callable[[nn.Module, torch.Tensor], None], str, int]] = {
    "a class": (subclass, "its class is Int8Tensor; of tensor subclasses only those", WEIGHT_BYTES + 5 * 4),
    "fnuz": (lambda m, w: float8(torch.float8_e4m3fnuz, m, w), r"its dtype is torch\.float8_e4m3fnuz", WEIGHT_BYTES),
    "inference": (of_inference, r"made in inference mode; make the model outside of", 4 * WEIGHT_BYTES),
    # Each element has two indices and four bytes; or one index, as have beginning and end of each row; or one for four.
    "coo": (partial(sparse, torch.sparse_coo), r"its layout is torch\.sparse_coo; only dense", 20 * WEIGHT_BYTES),
    **{
        str(layout): (
            partial(sparse, layout),
            rf"its layout is {re.escape(str(layout))}; only dense tensors are moved",
            (4 + 8 // size**2) * WEIGHT_BYTES + 5 * 8 * (WIDTH // size + 1),
        )
        for layout, size in SPARSE_BY_LINES.items()
    },
}


@pytest.mark.parametrize("kind", STAYING)
def test_most_of_a_model_stays(kind: str, nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, reason, length_bytes = STAYING[kind]
    model = Quantised(make)
    with caplog.at_level(logging.WARNING), small_records():
        swapper.offload(model, config=config_for(nvme_path))
    [message] = [record.getMessage() for record in caplog.records]
    total = length_bytes + 2 * 4 * WIDTH
    shown = swapper.sizes.format_bytes
    assert message.startswith(f"{shown(length_bytes)} of the {shown(total)} of this model stay in memory:\n")
    assert (
        f"{shown(length_bytes)} in 5 of 7 parameters (layers.0.weight, layers.1.weight, layers.2.weight and 2 more)"
        in message
    )
    assert re.search(reason, message) and "model.swapper.stays" in message
    assert set(swapper_of(model).stays) == {f"layers.{i}.weight" for i in range(5)}
    swapper_of(model).close()


@pytest.mark.parametrize("function", [swapper.offload, swapper.check])
@pytest.mark.parametrize("kind", STAYING)
def test_a_model_of_which_nothing_can_be_moved_is_refused(
    kind: str, function: Callable[..., object], nvme_path: Path
) -> None:
    make, reason, _ = STAYING[kind]
    model = Quantised(make, norm=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    with pytest.raises(swapper.ConfigError, match=f"(?s)offload_param.device: nvme cannot move a byte.*{reason}"):
        function(model, optimizer, config_for(nvme_path))
    assert not hasattr(optimizer, "swapper") and "swapper" not in vars(model)
    assert not list(nvme_path.iterdir())
    swapper.offload(model, config=config_for(nvme_path, offload_param={"device": "none"}))


def test_weights_in_buffers_are_said(
    nvme_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapper.parameter.records.GROUP_BYTES", 4096)
    model = Quantised(buffers)  # Each is a small one.
    with caplog.at_level(logging.WARNING):
        swapper.offload(model, config=config_for(nvme_path))
    [message] = [record.getMessage() for record in caplog.records]
    assert (
        "45 KiB in 5 buffers (layers.0.weight, layers.1.weight, layers.2.weight and 2 more): buffers of less than 64 "
        in message
    )
    swapper_of(model).close()


def test_thousands_of_parameters_that_stay_are_one_line(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Mlp(3)
    model.small = nn.ParameterList([nn.Parameter(torch.ones(4, 2)[:, :1], False) for _ in range(2000)])
    shared = torch.ones(100)
    model.sharing = nn.ParameterList([nn.Parameter(shared[i:]) for i in range(50)])
    with caplog.at_level(logging.WARNING):
        swapper.offload(model, config=config_for(nvme_path))
    [message] = [record.getMessage() for record in caplog.records]
    assert len(message) < 1000
    assert "2000 of 2056 parameters" in message and "50 of 2056 parameters" in message
    assert "it shares memory with another tensor; give each memory of its own" in message
    assert len(swapper_of(model).stays) == 2050
    assert swapper_of(model).stays["sharing.1"].startswith("it shares memory with sharing.0, sharing.2")
    swapper_of(model).close()


QUIET: dict[str, MakeModel] = {
    "no parameters": nn.ReLU,
    "a buffer": lambda: nn.BatchNorm1d(3, affine=False),
    "empty parameters": lambda: nn.ParameterList([nn.Parameter(torch.ones(0))]),
    "tiny parameters": lambda: nn.Linear(1, 1),
    "tiny, and a larger buffer": lambda: nn.BatchNorm1d(3),
    "ordinary": Mlp,
}


@pytest.mark.parametrize("kind", QUIET)
def test_what_is_in_order_says_nothing(kind: str, nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = QUIET[kind]()
    config = config_for(nvme_path)
    with caplog.at_level(logging.INFO):
        swapper.offload(model, config=config)
        swapper.offload(model, config=config)  # It is on the drive already.
    assert not [record for record in caplog.records if "memory" in record.getMessage()]
    swapper_of(model).close()


def test_a_part_of_a_model_that_is_on_the_drive_is_not_said_to_stay(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Mlp(3)
    config = config_for(nvme_path)
    with caplog.at_level(logging.WARNING):
        swapper.offload(model, config=config)
        swapper.offload(model.blocks, config=config)
    assert not caplog.records
    swapper_of(model).close()


def test_lazy_parameters_are_refused_with_the_fix(nvme_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(swapper.ConfigError, match="lazy and has no values yet; run the model once"):
        swapper.offload(model, config=config_for(nvme_path))
    model(torch.ones(1, 4))
    swapper.offload(model, config=config_for(nvme_path))
    swapper_of(model).close()


# --- float8 -----------------------------------------------------------------------------------------------------------


class Float8(nn.Module):
    """Frozen weights of all bit patterns in float8, some of odd lengths and other strides, and trained ones beside."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        patterns = torch.arange(WIDTH * WIDTH, dtype=torch.int32).to(torch.uint8).view(dtype).view(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.all_patterns = nn.Parameter(patterns.clone(), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype).t(), requires_grad=False)
        self.odd = nn.Parameter(torch.randn(37).to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.transposed.to(x.dtype) + self.odd.to(x.dtype).sum()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.all_patterns.to(x.dtype).nan_to_num(0).clamp(-1, 1).mean(0)


@pytest.mark.parametrize("way", ["plain", "init"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu], ids=str)
def test_float8_is_swapped_to_the_bit(
    dtype: torch.dtype, way: str, nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    torch.manual_seed(0)
    plain = Float8(dtype)
    config = config_for(nvme_path, pool_bytes="128KiB")
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING), small_records():
        if way == "init":
            with swapper.init(config):
                model = Float8(dtype)
        else:
            model = Float8(dtype)
        optimizer, reference = make_optimizer(model), make_optimizer(plain)
        swapper.offload(model, optimizer, config)
    assert not caplog.records and not swapper_of(model).stays
    x = torch.randn(3, WIDTH)
    for _ in range(3):
        outputs = []
        for one, its in ((model, optimizer), (plain, reference)):
            output = one(x)
            output.square().mean().backward()
            its.step()
            its.zero_grad()
            outputs.append(bits(output))
        assert outputs[0] == outputs[1]
    assert values_of(model) == values_of(plain)
    swapper.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    swapper.save(model.state_dict(), tmp_path / "model.pt")
    for kind in ("plain", "swapped"):
        other = Float8(dtype)
        its = make_optimizer(other)
        if kind == "swapped":
            swapper.offload(other, its, config)
        with torch.no_grad():
            for p in other.parameters():
                p.copy_(torch.ones_like(p))
        swapper.load_checkpoint(tmp_path / "checkpoint", other, its)
        assert values_of(other) == values_of(plain)
        other.load_state_dict(torch.load(tmp_path / "model.pt"))
        assert values_of(other) == values_of(plain)
        if kind == "swapped":
            swapper_of(other).close()
            its.swapper.close()  # type: ignore[attr-defined]
    swapper_of(model).close(keep_values=True)
    assert values_of(model) == values_of(plain)
    optimizer.swapper.close()  # type: ignore[attr-defined]


# --- DTensor ----------------------------------------------------------------------------------------------------------


def _offload_sharded(nvme_path: Path, tmp_path: Path, all_of_it: bool) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer in model if all_of_it else model[1:]:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh))  # type: ignore[arg-type]
    messages = []
    for function in (swapper.offload, swapper.check):
        try:
            function(model, None, config_for(nvme_path))
            messages.append("accepted")
        except swapper.ConfigError as error:
            messages.append(str(error))
    assert not list(nvme_path.iterdir()) and "swapper" not in vars(model)
    return messages


@pytest.mark.parametrize("all_of_it", [True, False])
def test_sharded_parameters_are_refused_by_name(all_of_it: bool, nvme_path: Path, tmp_path: Path) -> None:
    for message in alone(_offload_sharded, nvme_path, tmp_path, all_of_it):
        assert f"parameter {0 if all_of_it else 1}.weight, a DTensor" in message
        assert message.startswith("offload_param.device: nvme cannot work")
