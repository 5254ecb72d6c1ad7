"""Models with experts on an accelerator: of fused ones those come there that the router has chosen, and no others."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import SEED
from torch import nn
from twins import bits, config_for, small_records, swapper_of
from weight_files import hollow, write_shards, write_weights

import swapper
from swapper.metrics import Timeline
from swapper.parameter import from_files
from swapper.parameter.cache import BY_ADDRESS
from swapper.parameter.records import device_bytes_of
from swapper.tensors import evicted_parts

transformers = pytest.importorskip("transformers")

from expert_models import EXPERTS, Routed, config_of, generate, made, one_by_one, tokens  # noqa: E402

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of tests are small: so are the records, and what stays."""
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    with small_records():
        yield


@pytest.fixture
def device(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


def offloaded(
    reference: Any, nvme_path: Path, directory: Path, device: torch.device, experts: str = "eager", **settings: Any
) -> nn.Module:
    """A model on `device` of the weights of `reference`, from files that have its experts one by one."""
    if not directory.exists():
        write_shards(directory, one_by_one(reference), random.Random(1), [40, 3])
    model = hollow(made(reference.config, next(reference.parameters()).dtype, experts))
    param = {"device": "nvme", "device_bytes": settings.pop("device_bytes", None)}
    config = config_for(nvme_path, offload_param=param, offload_optimizer={"device": "none"}, **settings)
    weights = directory / "model.safetensors.index.json"
    return swapper.offload(model, config=config, weights=weights, device=device)[0]


def least_device_bytes(*args: Any, **more: Any) -> int:
    """The least that will do, as the error of less says."""
    with pytest.raises(swapper.ConfigError) as caught:
        offloaded(*args, **more, device_bytes=1)
    found = re.search(r"set it to at least (\d+)", str(caught.value))
    assert found is not None and "experts: the largest part twice" in str(caught.value), caught.value
    return int(found[1])


def tier_of(model: nn.Module) -> Any:
    experts = swapper_of(model)._experts
    assert experts is not None and experts.tier is not None
    return experts.tier


@pytest.mark.parametrize("room", ["least", "default", "all"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"])
@pytest.mark.sampled(6)
def test_a_token_brings_the_experts_that_are_routed_to_and_no_others(
    kind: str, experts: str, room: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    chance = random.Random(f"{kind} {experts} {room} {SEED}")
    reference = made(config_of(kind), chance.choice([torch.float32, torch.bfloat16]), experts)
    which: Any = (reference, nvme_path, tmp_path / "weights", device, experts)
    device_bytes: Any = {"least": None, "default": None, "all": "16MiB"}[room]
    if room == "least":
        device_bytes = least_device_bytes(*which)
    model = offloaded(*which, device_bytes=device_bytes)
    reference.to(device)
    routed = Routed(model)
    with Timeline() as timeline:
        for batch in (1, 3):
            assert generate(model, batch, do_sample=True) == generate(reference, batch, do_sample=True)
    parts = len(swapper_of(model).plan.experts.parts)
    reads = [e.record for e in timeline.events() if e.name == "read" and e.record is not None]
    brought = {number for _, kind, number in reads if kind == "expert"}
    if device.type == "sim" or experts != "grouped_mm":
        wanted = {(layer, expert) for layer, those in routed.calls for expert in those}
        assert all(number < parts for number in brought), "no parameter came whole"
        assert {(number // EXPERTS // 2, number % EXPERTS) for number in brought} == wanted
    assert swapper_of(model).metrics.bytes_written == 0
    swapper_of(model).close()


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_gradients_have_the_bits_of_the_model_on_the_device(
    frozen: bool, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights", device)
    found = []
    for each in (model, reference.to(device)):
        for name, p in each.named_parameters():
            p.requires_grad_(not (frozen and "experts" in name))
        for seed in range(2):
            each(tokens(seed, batch=2).to(device)).logits.square().mean().backward()
        found.append([None if p.grad is None else bits(p.grad) for p in each.parameters()])
    assert found[0] == found[1]
    assert generate(model) == generate(reference), "after uses of the whole"
    assert swapper_of(model).metrics.bytes_written == 0
    swapper_of(model).close()


def test_the_parameter_stays_one(nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights", device)
    reference.to(device)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.device == device and bits(one) == bits(other)
        if one.dim() == 3:
            with torch.no_grad():
                for index in (0, -1, torch.tensor(2), torch.tensor(4).to(device), torch.tensor([3, 3, 0]).to(device)):
                    assert bits(one[index]) == bits(other[index])
                assert bits(one.sum()) == bits(other.sum())
            with swapper.gathered(one):
                assert bits(one) == bits(other)
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    assert bits(torch.load(tmp_path / "saved.pt")) == bits(dict(reference.state_dict()))
    assert bits(dict(model.state_dict())) == bits(dict(reference.state_dict()))
    generated = generate(reference)
    assert generate(model) == generated
    swapper_of(model).close(keep_values=True)
    assert generate(model) == generated
    assert bits(dict(model.state_dict())) == bits(dict(reference.state_dict()))


def test_an_expert_that_is_changed_is_named(nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights", device)
    changed = re.escape("model.layers.1.mlp.experts.down_proj[2]")
    with torch.no_grad():
        proj = model.model.layers[1].mlp.experts.down_proj
        proj[2].add_(1)
        with pytest.raises(swapper.SwapError, match=changed):
            swapper_of(model).flush()
        with pytest.raises(swapper.SwapError, match=changed):
            for layer in model.model.layers:  # Before it leaves the device.
                for parameter in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                    for expert in (5, 4, 3, 1, 0):
                        parameter[expert].sum()
    swapper_of(model).close()


class Fused(nn.Module):
    """Experts whose class says that it takes them one at a time; the input names them."""

    num_experts, has_bias, is_transposed = EXPERTS, False, True

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(EXPERTS, 64, 64))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        for expert in chosen:
            x = x @ self.proj[expert]
        return x


class ManyFused(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.layers = nn.ModuleList(Fused() for _ in range(layers))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, chosen).sin()
        return x


def allocated(device: torch.device) -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(device)


PART_BYTES = 4 * 64 * 64


@pytest.mark.parametrize("room", ["least", "default"])
def test_device_memory_is_what_check_says_for_any_number_of_layers(
    room: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    config = config_for(nvme_path, pool_bytes="512KiB", offload_optimizer={"device": "none"})
    for layers in (2, 12):
        path = write_weights(tmp_path / f"{layers}.safetensors", ManyFused(layers).state_dict(), 40)
        device_bytes = None
        if room == "least":
            with pytest.raises(swapper.ConfigError) as error:
                few = config_for(nvme_path, pool_bytes="512KiB", offload_param={"device": "nvme", "device_bytes": 1})
                swapper.check(hollow(ManyFused(layers)), config=few, weights=path, device=device)
            found = re.search(r"set it to at least (\d+)", str(error.value))
            assert found is not None
            device_bytes = int(found[1])
        config = config_for(
            nvme_path,
            pool_bytes="512KiB",
            offload_param={"device": "nvme", "device_bytes": device_bytes},
            offload_optimizer={"device": "none"},
        )
        report = swapper.check(hollow(ManyFused(layers)), config=config, weights=path, device=device)
        if room == "least":  # Beside sums: the linear layer, and two experts.
            sums_bytes = (
                3 * 8 * (EXPERTS * PART_BYTES // 4) + 3 * 512 * (layers * (EXPERTS + 1) + 1) + 3 * PART_BYTES * 2
            )
            assert report.device_bytes == device_bytes <= sums_bytes + 3 * PART_BYTES
        x, before = torch.ones(1, 64).to(device), allocated(device)
        model = swapper.offload(hollow(ManyFused(layers)), config=config, weights=path, device=device)[0]
        torch.accelerator.reset_peak_memory_stats(device)
        with torch.no_grad():
            for seed in range(4):
                model(x, tokens(seed, 3)[0].remainder(EXPERTS).to(device))
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated(device) - before <= report.device_bytes + 8192, (layers, report)
        swapper_of(model).close()
        del model, x
        assert allocated(device) <= before + 1024  # The value that evicted parameters share is kept.


def test_experts_that_are_used_most_often_stay_on_the_device(
    nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    path = write_weights(tmp_path / "weights.safetensors", ManyFused(1).state_dict(), 8)
    config = config_for(nvme_path, pool_bytes="96KiB", offload_optimizer={"device": "none"})
    least = swapper.check(hollow(ManyFused(1)), config=config, weights=path, device=device)
    param = {"device": "nvme", "device_bytes": least.device_bytes - 2 * PART_BYTES}
    config = config_for(nvme_path, pool_bytes="96KiB", offload_optimizer={"device": "none"}, offload_param=param)
    model = swapper.offload(hollow(ManyFused(1)), config=config, weights=path, device=device)[0]
    proj, tier = model.layers[0].proj, tier_of(model)

    def lifts(expert: int) -> bool:
        held = tier._records[expert]
        was_there = bool(held.on_device)
        with torch.no_grad():
            proj[expert].sum()
        return not was_there

    for _ in range(3):
        lifts(0)
    for expert in (1, 2, 3, 4, 5, 1):
        lifts(expert)
        assert not lifts(0)
    assert tier.used_bytes <= tier.limit_bytes < device_bytes_of(swapper_of(model).plan.experts.fused[0].whole)
    swapper_of(model).close()


def test_a_kernel_for_all_experts_has_them_whole(
    nvme_path: Path, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evicted_parts, "multiplies_by_parts", lambda device: False)
    monkeypatch.setattr("swapper.parameter.experts.multiplies_by_parts", lambda device: False)
    reference = made(config_of("mixtral"), torch.float32, "grouped_mm")
    model = offloaded(reference, nvme_path, tmp_path / "weights", device, "grouped_mm")
    reference.to(device)
    plan = swapper_of(model).plan.experts
    with torch.no_grad(), Timeline() as timeline:  # `generate` would take them one by one after the prompt.
        for seed in range(2):
            ids = tokens(seed).to(device)
            assert bits(model(ids).logits) == bits(reference(ids).logits)
    reads = {e.record for e in timeline.events() if e.name == "read" and e.record is not None}
    numbers = {number for _, kind, number in reads if kind == "expert"}
    assert numbers == set(range(len(plan.parts), len(plan.records)))
    swapper_of(model).close()


def test_a_model_is_freed_with_its_experts(nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    path = write_weights(tmp_path / "weights.safetensors", ManyFused(2).state_dict(), 8)
    model = swapper.offload(hollow(ManyFused(2)), config=config_for(nvme_path), weights=path, device=device)[0]
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            model(torch.ones(1, 64).to(device), torch.tensor([2, 0]).to(device))
        kept = [key for key in BY_ADDRESS if key[0] == device]
        assert kept
        gone = [weakref.ref(model.layers[0].proj), weakref.ref(swapper_of(model)), weakref.ref(model)]
        del model
        assert [each() for each in gone] == [None] * len(gone)
        assert not set(kept) & set(BY_ADDRESS)
    finally:
        gc.enable()


class ListOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 64)) for _ in range(8))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        for expert in chosen.tolist():
            x = x + self.experts[expert](x)
        return x


def test_an_expert_that_is_not_called_is_not_read(nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    torch.manual_seed(2)
    reference = ListOfExperts()
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 8)
    config = config_for(nvme_path, offload_optimizer={"device": "none"})
    model = swapper.offload(hollow(ListOfExperts()), config=config, weights=path, device=device)[0]
    reference.to(device)
    x = torch.randn(1, 64).to(device)
    with torch.no_grad(), Timeline() as timeline:
        for chosen in ([1, 6], [6, 3], [1, 3]):
            ids = torch.tensor(chosen).to(device)
            assert bits(model(x, ids)) == bits(reference(x, ids))
    records = swapper_of(model).plan.experts.modules
    read = [e.record for e in timeline.events() if e.name == "read" and e.record is not None]
    found = [location.name for _, kind, i in read if kind == "expert" for location in records[i].locations]
    assert {name.split(".")[1] for name in found} == {"1", "3", "6"}
    grads = []
    for each in (model, reference):
        each(x, torch.tensor([7, 2])).sum().backward()
        grads.append([None if p.grad is None else bits(p.grad) for p in each.parameters()])
    assert grads[0] == grads[1]
    swapper_of(model).flush()
    with torch.no_grad(), pytest.raises(swapper.SwapError, match=re.escape("experts.1.0.weight")):
        model.experts[1][0].weight.add_(1)
    swapper_of(model).close()
