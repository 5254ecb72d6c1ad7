"""`offload_optimizer.encoding`: a run has the bits of plain PyTorch whose state is rounded after each step."""

from __future__ import annotations

import copy
import dataclasses
import errno
import functools
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import swapper as run_command
from configs import error_of
from encoded_state import LARGE_NUMEL, Reference, philox, rounded
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from training import MORE, OPTIMIZERS, WIDTH, Make, assert_same, assert_same_state, backward, make_model, run, same_bits

import swapper
from swapper.checkpoint.export import export_checkpoint
from swapper.checkpoint.index import with_checksum
from swapper.checkpoint.plain_import import import_checkpoint
from swapper.io.bf16_codec import RoundingKey, decode_bf16, encode_bf16
from swapper.io.checksums import checksum
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.optimizer import state_codec
from swapper.optimizer.int8_codec import decode_int8
from swapper.optimizer.native_parts import TOKEN_NUMEL
from swapper.optimizer.probe import StateSpec
from swapper.optimizer.segments import Bucket, OptimizerParameter, Segment, plan_buckets, plan_segments
from swapper.storage.store import RecordKey

# --- Runs ------------------------------------------------------------------------------------------------------------


def config_of(nvme_path: Path | list[Path], **settings: Any) -> swapper.OffloadConfig:
    state = {"device": "nvme", "encoding": "bf16"} | settings.pop("state", {})
    defaults = {"pool_bytes": "24MiB", "bucket_bytes": "256KiB"}
    return swapper.OffloadConfig(nvme_path=nvme_path, offload_optimizer=state, **(defaults | settings))


def wrap(make: Make, nvme_path: Any, model: nn.Module | None = None, **settings: Any) -> tuple[nn.Module, Optimizer]:
    model = make_model() if model is None else model
    optimizer = make(list(model.parameters()))
    swapper.wrap_optimizer(optimizer, config_of(nvme_path, **settings))
    return model, optimizer


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.fixture(autouse=True)
def _close_all(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def close(optimizer: Optimizer) -> None:
    swapper.of(optimizer).close()


# --- The codec -------------------------------------------------------------------------------------------------------


KEY = RoundingKey("exp_avg", 1, 0)


def encoded(values: torch.Tensor, first: int = 0, key: RoundingKey = KEY) -> torch.Tensor:
    stored = torch.empty(values.numel(), dtype=torch.bfloat16)
    encode_bf16(values, stored, first, key)
    return stored


def decoded(stored: torch.Tensor) -> torch.Tensor:
    values = torch.empty(stored.numel(), dtype=torch.float32)
    decode_bf16(stored, values)
    return values


def test_random_bits_are_those_of_the_paper() -> None:
    """The first known answer of Philox4x32-10, of a counter and a key of zeros; and the others by the reference."""
    zeros = np.zeros(1, dtype=np.uint64)
    name = next(name for name in ["plumless", ""] if not zlib.crc32(name.encode()))
    words = philox(zeros, RoundingKey(name, 0, 0, 0))
    assert [int(word[0]) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("first", [0, 1, 64, 511, 512, 1000, (1 << 40) + 17])
@pytest.mark.parametrize("numel", [1, 63, 64, 511, 512, 513, 100_003])
def test_the_core_rounds_as_the_reference(first: int, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    key = RoundingKey("exp_avg_sq", 7, 3, seed=5)
    assert same_bits(decoded(encoded(values, first, key)), rounded(values, first, key))


def test_bits_depend_on_each_part_of_the_key() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    keys = [("a", 1, 2, 3), ("b", 1, 2, 3), ("a", 2, 2, 3), ("a", 1, 3, 3), ("a", 1, 2, 4)]
    found = [encoded(values, 0, RoundingKey(*key)) for key in keys] + [encoded(values, 4096, RoundingKey(*keys[0]))]
    for i, one in enumerate(found):
        assert not any(same_bits(one, other) for other in found[i + 1 :])


@pytest.mark.parametrize("cut", [1, 64, 1000, 65_536])
def test_bits_depend_neither_on_cuts_nor_on_threads(cut: int) -> None:
    values = torch.randn(200_000 if cut > 1 else 2000, generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(1)
    whole = encoded(values)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert same_bits(encoded(values), whole)
        parts = [encoded(part, i * cut) for i, part in enumerate(values.split(cut))]
        assert same_bits(torch.cat(parts), whole)


def test_what_bf16_can_hold_stays() -> None:
    """All 65,536 of its values, NaNs and denormals too, at each place in a group of elements."""
    stored = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for first in range(0, 512, 73):
        assert same_bits(encoded(decoded(stored), first), stored)


def test_special_values() -> None:
    largest = torch.finfo(torch.float32).max
    smallest = 2.0**-149
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, largest, -largest, smallest, -smallest])
    ways = torch.stack([decoded(encoded(values, first)) for first in range(0, 64 * 9, 9)])
    assert same_bits(ways[:, :4].contiguous(), values[:4].expand(64, 4).contiguous())
    assert ways[:, 4].isnan().all()
    held = torch.finfo(torch.bfloat16).max
    assert (ways[:, 5] == held).all() and (ways[:, 6] == -held).all(), "a finite value became infinite"
    assert ((ways[:, 7] == 0) | (ways[:, 7] == 2.0**-133)).all() and not ways[:, 7].signbit().any()
    assert ((ways[:, 8] == 0) | (ways[:, 8] == -(2.0**-133))).all() and ways[:, 8].signbit().all()
    low_payload = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert decoded(encoded(low_payload)).isnan().all(), "a NaN became infinite"


@pytest.mark.parametrize("value", [1.0 + 2.0**-9, -3.14159, 1e-20, 3.3 * 2.0**-135, 1.0 + 3 * 2.0**-23])
def test_the_mean_is_the_value(value: float) -> None:
    """To 4 standard errors, over 10^7 draws of each."""
    numel, draws = 1 << 20, 10
    exact = torch.full((numel,), value)
    total, ones = 0.0, 0
    for step in range(draws):
        found = decoded(encoded(exact, 0, RoundingKey("exp_avg", step, 1))).double()
        total += float((found - exact.double()).sum())
        ones += int((found != found[0]).sum())
    bits = int(exact[:1].view(torch.int32)) & 0xFFFFFFFF
    below = (
        torch.tensor([bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000]).to(torch.int32).view(torch.float32).double()
    )
    share = (bits & 0xFFFF) / 0x10000
    sigma = float((below[1] - below[0]).abs()) * math.sqrt(share * (1 - share) / (numel * draws))
    assert ones and abs(total / (numel * draws)) < 4 * sigma


def test_neighbours_are_independent() -> None:
    """Of two elements beside each other, of two steps, and of two tensors, a quarter is rounded up together."""
    values = torch.full((1 << 20,), 1.0 + 2.0**-8)
    up = [
        (decoded(encoded(values, 0, key)) > values).double()
        for key in (RoundingKey("a", 1, 0), RoundingKey("a", 2, 0), RoundingKey("b", 1, 0), RoundingKey("a", 1, 1))
    ]
    pairs = [(up[0][:-1], up[0][1:]), (up[0][:-64], up[0][64:]), *((up[0], other) for other in up[1:])]
    for one, other in pairs:
        assert abs(float((one * other).mean()) - 0.25) < 4 * math.sqrt(3 / 16 / one.numel())


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        (torch.zeros(4), torch.zeros(5, dtype=torch.bfloat16)),
        (torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float16)),
        (torch.zeros(2, 2), torch.zeros(4, dtype=torch.bfloat16)),
    ],
    ids=["lengths", "values", "stored", "dimensions"],
)
def test_other_tensors_are_refused(values: torch.Tensor, stored: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="it must be"):
        encode_bf16(values, stored, 0, RoundingKey("a", 0, 0))


# --- A run is that of the reference ----------------------------------------------------------------------------------

LOSSY = ("bf16", "int8")
ALL = (*LOSSY, "packed")
"""The reference rounds nothing of what is packed: it is plain PyTorch."""
CLASSES = {name: make for name, make in (OPTIMIZERS | MORE).items() if name not in ("Muon", "Adafactor")}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("native", ["on", "off"])
@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_the_bits_of_the_reference(nvme_path: Path, name: str, native: str, encoding: str) -> None:
    plain = make_model()
    reference = Reference(CLASSES[name](list(plain.parameters())), encoding)
    run(plain, reference)
    model, optimizer = wrap(CLASSES[name], nvme_path, state={"native_step": native, "encoding": encoding})
    run(model, optimizer)
    assert_same(plain, model)
    state_dict = optimizer.state_dict()
    assert_same_state(state_dict, reference.optimizer.state_dict())
    p = model[2].weight
    for key, value in swapper.of(optimizer).state(p).items():
        assert not torch.is_tensor(value) or same_bits(value.float(), state_dict["state"][2][key].float())
    close(optimizer)


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("fused", [True, False])
def test_a_native_step_decodes_and_encodes_tile_by_tile(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool, encoding: str
) -> None:
    """Nothing but the elements of tokens is decoded beside it, and nothing is encoded: with roots between two passes,
    too."""
    model = nn.Linear(192, 192, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    plain = copy.deepcopy(model)
    reference = Reference(torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=fused), encoding)
    swapper.wrap_optimizer(optimizer, config_of(nvme_path, state={"encoding": encoding, "native_step": "on"}))
    decoded, encoded = [], []
    for codec in ("bf16", "int8"):
        decode, encode = (getattr(state_codec, f"{verb}_{codec}") for verb in ("decode", "encode"))

        def noting_decode(*tensors: torch.Tensor, decode: Any = decode) -> None:
            decoded.append(tensors[-1].numel())
            decode(*tensors)

        def noting_encode(values: torch.Tensor, *rest: Any, encode: Any = encode) -> None:
            encoded.append(values.numel())
            encode(values, *rest)

        monkeypatch.setattr(state_codec, f"decode_{codec}", noting_decode)
        monkeypatch.setattr(state_codec, f"encode_{codec}", noting_encode)
    for number in range(4):
        for each, its_model in ((optimizer, model), (reference, plain)):
            its_model.weight.grad = torch.randn(192, 192, generator=torch.Generator().manual_seed(number))
            each.step()
        assert same_bits(plain.weight.detach(), model.weight.detach())
        if number == 0:  # The class, which makes the state.
            assert encoded and max(encoded) > 10_000
            encoded.clear()
    assert not encoded
    assert decoded and max(decoded) <= TOKEN_NUMEL
    assert swapper.of(optimizer).stats().segments_native > 0
    close(optimizer)


class Lion(Optimizer):
    """A user's own, after Chen et al. 2023, which leaves a new tensor as its state."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("momentum", torch.zeros_like(p))
                    p.sub_((0.9 * old + 0.1 * p.grad).sign_(), alpha=group["lr"])
                    self.state[p]["momentum"] = 0.99 * old + 0.01 * p.grad


swapper.register_elementwise(Lion)


@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("make", [Lion, OPTIMIZERS["Muon"]], ids=["registered", "stepped-whole"])
def test_other_classes(nvme_path: Path, make: Make, encoding: str) -> None:
    plain = make_model()
    reference = Reference(make(list(plain.parameters())), encoding)
    run(plain, reference)
    model, optimizer = wrap(make, nvme_path, state={"encoding": encoding})
    run(model, optimizer)
    assert_same(plain, model)
    assert_same_state(optimizer.state_dict(), reference.optimizer.state_dict())
    close(optimizer)


def test_rows_and_columns_of_adafactor_stay_exact(nvme_path: Path) -> None:
    plain, (model, optimizer) = make_model(), wrap(OPTIMIZERS["Adafactor"], nvme_path)
    run(plain, OPTIMIZERS["Adafactor"](list(plain.parameters())))
    run(model, optimizer)
    assert_same(plain, model)
    close(optimizer)


VARIANTS: dict[str, dict[str, Any]] = {
    "1-thread": {"threads": 1},
    "4-threads": {"threads": 4},
    "buckets-of-16KiB": {"bucket_bytes": "16KiB"},
    "buckets-of-1MiB": {"bucket_bytes": "1MiB"},
    "least-pool": {"pool_bytes": "1MiB"},
    "large-pool": {"pool_bytes": "64MiB"},
    "resident": {"state": {"resident_bytes": "1MiB"}},
    "in-memory": {"state": {"device": "cpu"}},
    "two-drives": {"drives": 2},
    "checksums": {"verify": "crc32c"},
    "native": {"state": {"native_step": "on"}},
    "gradients": {"offload_gradient": {"device": "nvme"}},
    "backward": {"state": {"step_in_backward": True}},
    "backward-gradients": {"state": {"step_in_backward": True}, "offload_gradient": {"device": "nvme"}},
}


def reference_run(encoding: str = "bf16") -> tuple[nn.Module, dict[str, Any]]:
    """Of as many threads as now: the model's own bits depend on that."""
    return _reference_run(encoding, torch.get_num_threads())


@functools.cache
def _reference_run(encoding: str, _threads: int) -> tuple[nn.Module, dict[str, Any]]:
    plain = make_model()
    reference = Reference(adamw(list(plain.parameters())), encoding)
    run(plain, reference)
    return plain, reference.optimizer.state_dict()


@pytest.mark.sampled(15)
@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_do_not_depend_on_how_it_is_done(nvme_path: Path, name: str, encoding: str) -> None:
    settings = copy.deepcopy(VARIANTS[name])
    settings["state"] = settings.get("state", {}) | {"encoding": encoding}
    torch.set_num_threads(settings.pop("threads", 2))
    paths = [nvme_path / f"drive{i}" for i in range(settings.pop("drives", 1))]
    for path in paths:
        path.mkdir()
    model, optimizer = wrap(adamw, paths, **settings)
    run(model, optimizer)
    plain, state = reference_run(encoding)
    assert_same(plain, model)
    assert_same_state(optimizer.state_dict(), state)
    close(optimizer)


@pytest.mark.parametrize("encoding", ALL)
def test_accumulated_gradients(nvme_path: Path, encoding: str) -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        for seed in range(6):
            backward(model, seed)
            if seed % 2:
                optimizer.step()
                optimizer.zero_grad()

    plain = make_model()
    train(plain, Reference(adamw(list(plain.parameters())), encoding))
    model, optimizer = wrap(
        adamw,
        nvme_path,
        gradient_accumulation_steps=2,
        offload_gradient={"device": "nvme"},
        state={"native_step": "on", "encoding": encoding},
    )
    train(model, optimizer)
    assert_same(plain, model)
    close(optimizer)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("native", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_with_masters(nvme_path: Path, dtype: torch.dtype, native: str, encoding: str) -> None:
    """State is rounded, and the masters are not."""
    plain = make_model(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    reference = Reference(adamw(masters), encoding)
    settings = {"master_weights": True, "native_step": native, "encoding": encoding}
    model, optimizer = wrap(adamw, nvme_path, make_model(dtype), state=settings)
    for seed in range(4):
        backward(plain, seed)
        for p, master in zip(plain.parameters(), masters, strict=True):
            master.grad = p.grad.float()
            p.grad = None
        reference.step()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), masters, strict=True):
                p.copy_(master)
        run(model, optimizer, range(seed, seed + 1))
    assert_same(plain, model)
    for p, master in zip(model.parameters(), masters, strict=True):
        assert same_bits(swapper.of(optimizer).state(p)["master_param"], master)
    close(optimizer)


def test_state_in_the_dtype_of_bf16_parameters_is_as_it_was(nvme_path: Path) -> None:
    """It is bf16 by itself, so there is nothing to encode."""
    exact, optimizer = wrap(adamw, nvme_path, make_model(torch.bfloat16), state={"encoding": "exact"})
    run(exact, optimizer)
    close(optimizer)
    model, optimizer = wrap(adamw, nvme_path, make_model(torch.bfloat16))
    run(model, optimizer)
    assert_same(exact, model)
    close(optimizer)


@pytest.mark.parametrize(
    "encoding",
    [
        {"exp_avg_sq": "bf16", "exp_avg": "exact"},
        {"exp_avg_sq": "int8"},
        {"exp_avg": "int8", "exp_avg_sq": "bf16"},
        {"exp_avg": "packed"},
        {"exp_avg": "packed", "exp_avg_sq": "bf16"},
    ],
    ids=["bf16", "int8", "both", "packed", "packed-bf16"],
)
def test_by_key(nvme_path: Path, encoding: dict[str, str]) -> None:
    plain = make_model()
    reference = Reference(adamw(list(plain.parameters())), encoding)
    run(plain, reference)
    model, optimizer = wrap(adamw, nvme_path, state={"encoding": encoding})
    run(model, optimizer)
    assert_same(plain, model)
    assert_same_state(optimizer.state_dict(), reference.optimizer.state_dict())
    close(optimizer)


def test_exact_is_what_it_was(nvme_path: Path) -> None:
    plain = make_model()
    optimizer = adamw(list(plain.parameters()))
    run(plain, optimizer)
    model, swapped = wrap(adamw, nvme_path, state={"encoding": {"exp_avg": "exact"}})
    run(model, swapped)
    assert_same(plain, model)
    found = swapped.state_dict()
    assert found.keys() == {"state", "param_groups"}
    assert_same_state(found, optimizer.state_dict())
    close(swapped)


def test_a_parameter_that_comes_later(nvme_path: Path) -> None:
    """Its number is that of its place in the groups, and those of the others stay."""

    def train(model: nn.Sequential, optimizer: Any, add: Callable[[dict[str, Any]], None]) -> None:
        run(model, optimizer, range(2))
        add({"params": list(model[2].parameters()), "lr": 1e-3})
        optimizer.zero_grad()
        model[2].zero_grad()
        run(model, optimizer, range(2, 5))

    plain, model = make_model(), make_model()
    reference = Reference(adamw(list(plain[0].parameters())))
    train(plain, reference, reference.optimizer.add_param_group)
    optimizer = adamw(list(model[0].parameters()))
    swapper.wrap_optimizer(optimizer, config_of(nvme_path))
    train(model, optimizer, optimizer.add_param_group)
    assert_same(plain, model)
    assert_same_state(optimizer.state_dict(), reference.optimizer.state_dict())
    close(optimizer)


# --- Resumed ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(7)
@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("way", ["state_dict", "checkpoint"])
@pytest.mark.parametrize("at", range(1, 4))
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    nvme_path: Path, tmp_path: Path, at: int, way: str, encoding: str
) -> None:
    state: dict[str, Any] = {"encoding": encoding}
    model, optimizer = wrap(adamw, nvme_path, state=state)
    run(model, optimizer, range(at))
    if way == "checkpoint":
        swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    close(optimizer)
    # Cut otherwise, so that nothing goes by records alone.
    model, optimizer = wrap(adamw, nvme_path, bucket_bytes="64KiB" if at == 2 else "256KiB", state=state)
    run(model, optimizer, range(at % 2))
    if way == "checkpoint":
        swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    else:
        saved = torch.load(tmp_path / "saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    run(model, optimizer, range(at, 4))
    plain, expected = reference_run(encoding)
    assert_same(plain, model)
    assert_same_state(optimizer.state_dict(), expected)
    close(optimizer)


def test_reset_begins_anew(nvme_path: Path) -> None:
    model, optimizer = wrap(adamw, nvme_path)
    start = copy.deepcopy(model.state_dict())
    run(model, optimizer, range(2))
    swapper.of(optimizer).reset()
    model.load_state_dict(start)
    run(model, optimizer)
    plain, _ = reference_run()
    assert_same(plain, model)
    close(optimizer)


def test_plain_torch_loads_the_state_dict(nvme_path: Path) -> None:
    model, optimizer = wrap(adamw, nvme_path)
    run(model, optimizer)
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    loaded = adamw(list(plain.parameters()))
    loaded.load_state_dict(optimizer.state_dict())
    assert_same_state(loaded.state_dict(), optimizer.state_dict())
    run(plain, loaded, range(4, 5))
    close(optimizer)


def test_unwrapping_keeps_the_state(nvme_path: Path) -> None:
    model, optimizer = wrap(adamw, nvme_path)
    run(model, optimizer)
    swapper.unwrap_optimizer(optimizer)
    assert_same_state(optimizer.state_dict(), reference_run()[1])


def test_state_dicts_of_distributed_checkpoints(nvme_path: Path) -> None:
    """They leave out the number of the step: values are kept, and random bits begin anew."""
    model, optimizer = wrap(adamw, nvme_path)
    run(model, optimizer)
    was = copy.deepcopy(optimizer.state_dict())
    saved = get_optimizer_state_dict(model, optimizer)
    other, loaded = wrap(adamw, nvme_path)
    set_optimizer_state_dict(other, loaded, saved)
    now = loaded.state_dict()
    assert (was["swapper_encoded_steps"], now["swapper_encoded_steps"]) == (4, 0)
    assert_same_state(now, was)
    close(optimizer)
    close(loaded)


def test_a_load_that_is_refused_changes_nothing(nvme_path: Path) -> None:
    model, optimizer = wrap(adamw, nvme_path)
    run(model, optimizer, range(2))
    broken = optimizer.state_dict()
    broken["swapper_encoded_steps"] = 99
    broken["state"][2] = {**broken["state"][2], "exp_avg": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match="no state was loaded"):
        optimizer.load_state_dict(broken)
    run(model, optimizer, range(2, 4))
    assert_same(reference_run()[0], model)
    close(optimizer)


@pytest.mark.parametrize("step_device", ["cpu", "auto"])
def test_a_model_on_an_accelerator_is_stepped_on_the_cpu(
    nvme_path: Path, device: str, step_device: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.device)
            optimizer.step()

    plain = make_model()
    reference = Reference(adamw(list(plain.parameters())))
    train(plain, reference)
    model, optimizer = wrap(adamw, nvme_path, make_model().to(device), state={"step_device": step_device})
    train(model, optimizer)
    assert_same(plain, model.cpu())
    assert ("encoding is for those only" in caplog.text) == (step_device == "auto")
    close(optimizer)


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_an_exported_checkpoint_has_fp32(nvme_path: Path, tmp_path: Path, to: Any, encoding: str) -> None:
    model, optimizer = wrap(adamw, nvme_path, state={"encoding": encoding})
    run(model, optimizer)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    target = tmp_path / ("exported.pt" if to == "torch" else "exported")
    export_checkpoint(tmp_path / "saved", to, target)
    state = optimizer.state_dict()["state"]
    if to == "torch":
        exported = torch.load(target)["optimizer"]
        assert same_bits(exported["state"][2]["exp_avg_sq"], state[2]["exp_avg_sq"])
        # And back, with the number of the step.
        steps = optimizer.state_dict()["swapper_encoded_steps"]
        swapper.of(optimizer).reset()
        import_checkpoint(target, tmp_path / "imported", optimizer="AdamW")
        swapper.load_checkpoint(tmp_path / "imported", model, optimizer)
        assert_same_state(optimizer.state_dict(), exported)
        assert optimizer.state_dict()["swapper_encoded_steps"] == exported["swapper_encoded_steps"] == steps > 0
    else:
        found = {}
        for path in target.glob("optimizer*.safetensors"):
            found |= load_file(path)
        assert any(
            value.dtype is torch.float32 and same_bits(value, state[2]["exp_avg_sq"]) for value in found.values()
        )
    close(optimizer)


# --- Between encodings -----------------------------------------------------------------------------------------------

ENCODINGS: dict[str, Any] = {
    "exact": "exact",
    "bf16": "bf16",
    "int8": "int8",
    "packed": "packed",
    "mixed": {"exp_avg": "bf16"},
    "both": {"exp_avg": "bf16", "exp_avg_sq": "int8"},
    "packed-bf16": {"exp_avg": "bf16", "exp_avg_sq": "packed"},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", ["state_dict", "checkpoint", "assigned"])
@pytest.mark.parametrize("after", ENCODINGS)
@pytest.mark.parametrize("before", ENCODINGS)
def test_loading_between_encodings(nvme_path: Path, tmp_path: Path, before: str, after: str, way: str) -> None:
    # What is in memory has no files to link.
    in_memory = {"device": "cpu"} if before == after in LOSSY else {}
    model, optimizer = wrap(adamw, nvme_path, state={"encoding": ENCODINGS[before], **in_memory})
    run(model, optimizer)
    was = optimizer.state_dict()
    other, loaded = wrap(adamw, nvme_path, state={"encoding": ENCODINGS[after], **in_memory})
    if way == "checkpoint":
        swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
        swapper.load_checkpoint(tmp_path / "saved", other, loaded)
    elif way == "assigned":
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            loaded.state[q] = swapper.of(optimizer).state(p)
    else:
        loaded.load_state_dict(was)
    now = loaded.state_dict()
    steps = 0 if way == "assigned" or before in ("exact", "packed") else 4
    for number, p in enumerate(other.parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            value = was["state"][number][key]
            wanted = ENCODINGS[after]
            if p.numel() >= LARGE_NUMEL:
                encoding = wanted if isinstance(wanted, str) else wanted.get(key, "exact")
                value = rounded(value.reshape(-1), 0, RoundingKey(key, steps, number), encoding).view(value.shape)
            assert same_bits(now["state"][number][key], value)
    close(optimizer)
    close(loaded)


def test_wrapping_an_optimizer_that_has_state(nvme_path: Path) -> None:
    model = make_model()
    optimizer = adamw(list(model.parameters()))
    run(model, optimizer)
    was = copy.deepcopy(optimizer.state_dict())
    swapper.wrap_optimizer(optimizer, config_of(nvme_path))
    now = optimizer.state_dict()["state"][2]["exp_avg"]
    expected = rounded(was["state"][2]["exp_avg"].reshape(-1), 0, RoundingKey("exp_avg", 0, 2))
    assert same_bits(now.reshape(-1), expected)
    close(optimizer)


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_checkpoint_and_its_files_say_how_state_is_stored(nvme_path: Path, tmp_path: Path, encoding: str) -> None:
    model, optimizer = wrap(adamw, nvme_path, state={"encoding": {"exp_avg": encoding}}, bucket_bytes="8MiB")
    run(model, optimizer)
    state = optimizer.state_dict()["state"]
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    index = json.loads((tmp_path / "saved" / "index.json").read_text())["optimizers"][0]
    assert index["encoding"] == encoding and index["encoded_steps"] == 4
    assert [each.get("encodings", {}) for each in index["parameters"]] == [
        {"exp_avg": encoding} if each.numel() >= LARGE_NUMEL else {} for each in model.parameters()
    ]
    (path,) = (tmp_path / "saved").glob("optimizer-*.safetensors")
    header = header_of(path)
    names = [name for name in header if name.endswith(".exp_avg") and not name.startswith("scales.")]
    assert names and header["__metadata__"] == dict.fromkeys(names, encoding)
    assert {f"scales.{name}" for name in names if encoding == "int8"} == {n for n in header if n.startswith("scales.")}
    tensors = load_file(path)
    stored = {tuple(value.shape): name for name, value in tensors.items() if name in names}
    for number in (0, 2):
        value = state[number]["exp_avg"]
        name = stored[tuple(value.shape)]
        if encoding == "bf16":
            assert tensors[name].dtype is torch.bfloat16 and same_bits(tensors[name].float(), value)
            continue
        found = torch.empty(value.numel())
        decode_int8(tensors[name].view(-1), tensors[f"scales.{name}"], found)
        assert same_bits(found.view(value.shape), value)
    shown = run_command("checkpoint", "show", tmp_path / "saved").output
    assert f"encoding {encoding}" in shown and f"exp_avg (float32 as {encoding})" in shown.replace("\n", " ")
    close(optimizer)


def edit_index(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads((path / "index.json").read_text())
    for optimizer in fields["optimizers"]:
        edit(optimizer)
    fields.pop("crc32c")
    (path / "index.json").write_bytes(with_checksum(json.dumps(fields, separators=(",", ":")).encode()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("says", ["exact", *ALL])
@pytest.mark.parametrize("encoding", ALL)
def test_a_checkpoint_whose_index_says_another_encoding_is_refused(
    nvme_path: Path, tmp_path: Path, encoding: str, says: str
) -> None:
    model, optimizer = wrap(adamw, nvme_path, state={"encoding": encoding})
    run(model, optimizer)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)

    def edit(saved: dict[str, Any]) -> None:
        for parameter in saved["parameters"]:
            encodings = parameter.pop("encodings", {})
            if says != "exact":
                parameter["encodings"] = dict.fromkeys(encodings, says)

    edit_index(tmp_path / "saved", edit)
    if says == encoding:
        swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    else:
        with pytest.raises(swapper.SwapError, match=r"does not fit together|lacks tensor"):
            swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    close(optimizer)


@pytest.mark.parametrize("damage", ["name", "shape", "dtype"])
def test_scales_that_are_not_as_they_must_be_are_refused(nvme_path: Path, tmp_path: Path, damage: str) -> None:
    """The header of a record says another thing of them; its checksum was made anew."""
    model, optimizer = wrap(adamw, nvme_path, state={"encoding": "int8"}, bucket_bytes="8MiB")
    run(model, optimizer)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    (path,) = (tmp_path / "saved").glob("optimizer-*.safetensors")
    header = header_of(path)
    name = next(name for name in header if name.startswith("scales."))
    entry = header[name]
    if damage == "name":
        header["scalos" + name.removeprefix("scales")] = header.pop(name)
    elif damage == "shape":
        entry["shape"] = [1, *entry["shape"]]
    else:
        entry["dtype"] = "I32"
    data = bytearray(path.read_bytes())
    room = int.from_bytes(data[:8], "little")
    order = sorted(header, key=lambda key: header[key].get("data_offsets", [0]))
    data[8 : 8 + room] = json.dumps({key: header[key] for key in order}, separators=(",", ":")).encode().ljust(room)
    path.write_bytes(data)
    fields = json.loads((tmp_path / "saved" / "index.json").read_text())
    fields["files"][path.name]["crc32c"] = checksum(torch.frombuffer(data, dtype=torch.uint8))
    fields.pop("crc32c")
    (tmp_path / "saved" / "index.json").write_bytes(with_checksum(json.dumps(fields, separators=(",", ":")).encode()))
    with pytest.raises(swapper.SwapError, match=r"does not fit together|scales\.\d"):
        swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    close(optimizer)


# --- Bytes -----------------------------------------------------------------------------------------------------------


BYTES_OF_TWO = {"exact": 8, "bf16": 4, "int8": 2 + 2 * 4 / 256}
"""Of each element of a parameter, of two tensors of state."""


def test_fewer_bytes_move(nvme_path: Path) -> None:
    for encoding, per_element in BYTES_OF_TWO.items():
        settings: dict[str, Any] = {"state": {"encoding": encoding}, "bucket_bytes": "2MiB"}
        model, optimizer = wrap(adamw, nvme_path, **copy.deepcopy(settings))
        run(model, optimizer)
        large = sum(p.numel() for p in model.parameters() if p.numel() >= LARGE_NUMEL)
        found = swapper.of(optimizer).stats().state_bytes
        report = swapper.check(
            model, optimizer, config_of(nvme_path, state={"encoding": encoding}, bucket_bytes="2MiB")
        )
        assert report.state_bytes == found
        assert report.encoded_numel == (2 * large if encoding != "exact" else 0)
        assert report.int8_numel == (2 * large if encoding == "int8" else 0)
        for name in LOSSY:
            assert (f"rounded to {name}, which is lossy" in str(report)) == (encoding == name)
        assert (f" {2 * large:,} values" in str(report)) == (encoding != "exact")
        assert large * per_element <= found <= large * per_element + 4 * 8192
        close(optimizer)


@pytest.mark.parametrize(("encoding", "bar"), [("bf16", 6.05), ("int8", 4.1)])
def test_bytes_of_a_step_with_masters(nvme_path: Path, encoding: str, bar: float) -> None:
    """Each way, for a parameter in bf16, by our own counters."""
    model = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).to(torch.bfloat16)
    optimizer = adamw(list(model.parameters()))
    state = {"device": "nvme", "encoding": encoding, "master_weights": True}
    config = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="40MiB", offload_optimizer=state)
    swapper.wrap_optimizer(optimizer, config)
    numel = sum(p.numel() for p in model.parameters())
    moved = []
    for _ in range(3):
        before = swapper.of(optimizer).stats()
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        swapper.of(optimizer).flush()
        after = swapper.of(optimizer).stats()
        moved.append((after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written))
    assert 0 < moved[-1][0] <= bar * numel and 0 < moved[-1][1] <= bar * numel, moved
    close(optimizer)


def planned(
    numel: int, bucket_bytes: int, encoding: tuple[str, str], master: str
) -> tuple[nn.Parameter, list[Segment]]:
    """A parameter with two tensors of state, and how it is cut."""
    p = nn.Parameter(torch.empty(numel, dtype=torch.bfloat16 if master else torch.float32))
    encodings = dict(zip("ab", encoding, strict=True))
    segments = plan_segments(
        OptimizerParameter(p),
        [StateSpec(key, torch.float32, (numel,), (1,)) for key in "ab"],
        segmented=True,
        low_precision=False,
        threads=1,
        master=master,
        bucket_bytes=bucket_bytes,
        remote=False,
        moves_gradient=False,
        encode=lambda spec: dataclasses.replace(spec, encoding=encodings[spec.key]),
    )
    return p, segments


def used_bytes(bucket: Bucket) -> int:
    """Of its record without the header, and of its scratch."""
    layout, ties_bytes = bucket.layout, sum(segment.tie_bytes_max for segment in bucket.segments)
    return layout.tail_offset_bytes - layout.payload_bytes + ties_bytes + bucket.scratch_bytes


@pytest.mark.parametrize("master", ["", "split"])
@pytest.mark.parametrize("encoding", [("int8", "int8"), ("int8", "exact"), ("bf16", "int8"), ("bf16", "bf16")])
def test_buckets_are_not_longer_than_they_may_be(encoding: tuple[str, str], master: str) -> None:
    """With scales and what is decoded; and cuts are at blocks where there are any."""
    chance = random.Random(0)
    key = RecordKey(0, "optim", 0)
    for _ in range(100):
        numel, bucket_bytes = chance.randrange(LARGE_NUMEL, 1 << 20), chance.randrange(4, 512) * 4096
        _p, segments = planned(numel, bucket_bytes, encoding, master)
        used = [used_bytes(Bucket(key, [segment], False)) for segment in segments]
        assert max(used) <= bucket_bytes
        # All are about as long as they may be.
        assert len(segments) <= 1.1 * sum(used) / bucket_bytes + 1, (numel, bucket_bytes)
        assert all(segment.start % (256 if "int8" in encoding else 64) == 0 for segment in segments)
    for _ in range(20):
        few = [planned(chance.randrange(LARGE_NUMEL, 1 << 13), 1 << 20, encoding, master) for _ in range(30)]
        segments = [segment for _p, mine in few for segment in mine]
        # Just so long that those together need it, and a little less.
        bucket_bytes = used_bytes(Bucket(key, segments[:10], False)) - chance.randrange(2) * chance.randrange(600)
        buckets = plan_buckets(0, 0, segments, bucket_bytes, False, False, lambda p: None)
        assert all(used_bytes(bucket) <= bucket_bytes for bucket in buckets)


def test_a_pool_without_room_for_decoded_state_is_refused(nvme_path: Path) -> None:
    """A bucket that is stepped whole has its record three times, and all of its state decoded."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    numel = 512 * 512
    muon = OPTIMIZERS["Muon"]
    message = error_of(lambda: wrap(muon, nvme_path, model, pool_bytes="2MiB", bucket_bytes="64KiB"))
    assert message.startswith("pool_bytes: ")
    least = 3 * 2 * numel + 4 * numel
    _, optimizer = wrap(muon, nvme_path, model, pool_bytes=least + (64 << 10), bucket_bytes="64KiB")
    assert swapper.of(optimizer).stats().pool_bytes <= least + (64 << 10)
    close(optimizer)


def test_a_difference_of_averages_stays_positive(nvme_path: Path) -> None:
    """`RMSprop(centered=True)` takes the root of one: gradients that vary little made parameters NaN."""
    p = nn.Parameter(torch.zeros(LARGE_NUMEL))
    optimizer = torch.optim.RMSprop([p], lr=1e-4, centered=True, momentum=0.9)
    swapper.wrap_optimizer(optimizer, config_of(nvme_path))
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        p.grad = 1 + 0.1 * torch.randn(p.shape, generator=generator)
        optimizer.step()
    assert p.isfinite().all()
    state = swapper.of(optimizer).state(p)
    halves = {key: not (value.view(torch.int32) & 0xFFFF).any() for key, value in state.items() if value.dim()}
    assert halves == {"square_avg": False, "grad_avg": False, "momentum_buffer": True}
    close(optimizer)


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_small_averages_of_squares_do_not_become_zero(nvme_path: Path, scale: float) -> None:
    """In one block with large ones: an update would be divided by `eps` alone."""
    p = nn.Parameter(torch.zeros(LARGE_NUMEL))
    optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.0, eps=1e-30)
    swapper.wrap_optimizer(optimizer, config_of(nvme_path, state={"encoding": {"exp_avg_sq": "int8"}}))
    sizes = torch.where(torch.arange(LARGE_NUMEL) % 7 == 0, 0.0, torch.logspace(0, -4, LARGE_NUMEL))
    sizes = sizes[torch.randperm(LARGE_NUMEL, generator=torch.Generator().manual_seed(1))] * scale
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        before = p.detach().clone()
        p.grad = sizes * torch.randn(p.shape, generator=generator)
        optimizer.step()
        assert (p.detach() - before).abs().max() < 10e-3
    assert not p.detach()[sizes == 0].any()
    assert (swapper.of(optimizer).state(p)["exp_avg_sq"][sizes > 0] > 0).all()
    close(optimizer)


@pytest.mark.parametrize("encoding", LOSSY)
def test_what_is_not_finite_is_so_where_it_is_in_plain_torch(nvme_path: Path, encoding: str) -> None:
    plain, (model, optimizer) = make_model(), wrap(adamw, nvme_path, state={"encoding": encoding})
    other = adamw(list(plain.parameters()))
    for seed in range(3):
        for each, stepped in ((plain, other), (model, optimizer)):
            backward(each, seed)
            if seed == 1:
                flat = each[2].weight.grad.view(-1)
                flat[5], flat[700], flat[5000] = math.inf, math.nan, -math.inf
            stepped.step()
            stepped.zero_grad()
    for number, state in optimizer.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            expected = other.state_dict()["state"][number][key]
            assert torch.equal(state[key].isnan(), expected.isnan())
            assert torch.equal(state[key].isinf(), expected.isinf())
    assert torch.equal(model[2].weight.isnan(), plain[2].weight.isnan())
    close(optimizer)


class Float32Momentum(Optimizer):
    """A user's own, with state in fp32 for parameters in bf16: their kernels are cut where torch's threads cut."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                    state["momentum"].mul_(0.9).add_(p.grad.float())
                    p.sub_(state["momentum"].to(p.dtype), alpha=group["lr"])


swapper.register_elementwise(Float32Momentum)


@pytest.mark.parametrize("threads", [1, 3])
def test_state_in_fp32_of_parameters_in_bf16(nvme_path: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    shape = (301, 333)  # Cut by torch at places that are no multiples of 256.

    def train(p: nn.Parameter, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(2)
        for _ in range(4):
            p.grad = torch.randn(shape, generator=generator).to(torch.bfloat16)
            optimizer.step()

    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    plain, p = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    train(plain, Reference(Float32Momentum([plain]), "int8"))
    optimizer = Float32Momentum([p])
    settings: dict[str, Any] = {"state": {"encoding": "int8"}, "bucket_bytes": "64KiB"}
    swapper.wrap_optimizer(optimizer, config_of(nvme_path, **settings))
    train(p, optimizer)
    assert same_bits(p.detach(), plain.detach())
    close(optimizer)


@pytest.mark.parametrize("encoding", ALL)
def test_rows_of_adafactor_stay_exact_where_they_have_the_shape_of_the_parameter(
    nvme_path: Path, encoding: str
) -> None:
    p = nn.Parameter(torch.ones(2 * LARGE_NUMEL, 1))
    optimizer = torch.optim.Adafactor([p])
    swapper.wrap_optimizer(optimizer, config_of(nvme_path, state={"encoding": encoding}))
    plain = nn.Parameter(torch.ones(2 * LARGE_NUMEL, 1))
    other = torch.optim.Adafactor([plain])
    for seed in range(3):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        plain.grad = p.grad.clone()
        optimizer.step()
        other.step()
    assert same_bits(p.detach(), plain.detach())
    assert same_bits(swapper.of(optimizer).state(p)["row_var"], other.state[plain]["row_var"])
    close(optimizer)


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "says"),
    [
        ({"exp_avg_sqr": "bf16"}, "the state of AdamW has no 'exp_avg_sqr'; it has exp_avg, exp_avg_sq, step"),
        ({"max_exp_avg_sq": "bf16"}, "max_exp_avg_sq is always exact: "),
        ({"sum": "bf16"}, "sum is always exact: it only grows"),
        ({"row_var": "int8"}, "row_var is always exact: it is of rows"),
        ({"square_avg": "bf16"}, "square_avg of RMSprop(centered=True) is always exact: "),
    ],
    ids=["unknown", "maximum", "sum", "rows", "centered"],
)
def test_keys_that_cannot_be_encoded_are_refused(nvme_path: Path, encoding: dict[str, str], says: str) -> None:
    make = functools.partial(torch.optim.RMSprop, centered=True) if "square_avg" in encoding else adamw
    message = error_of(lambda: wrap(make, nvme_path, state={"encoding": encoding}))
    assert message.startswith("offload_optimizer.encoding: ") and says in message


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"device": "none"}, "bf16 has no use with offload_optimizer.device: none"),
        ({"device": "none", "encoding": "packed"}, "packed has no use with offload_optimizer.device: none"),
        ({"step_device": "device", "encoding": "packed"}, "packed is for steps on the CPU"),
        ({"device": "none", "encoding": {"a": "int8", "b": "bf16"}}, "bf16, int8 has no use with offload_optimizer."),
        ({"step_device": "device"}, "is for steps on the CPU"),
        (
            {"encoding": {"exp_avg": "bf61"}},
            "exp_avg: 'bf61' is not one of exact, packed, unpacked, bf16, int8; did you mean 'bf16'?",
        ),
        ({"encoding": {1: "bf16"}}, "1 is not the name of a tensor of the state"),
    ],
    ids=["none", "none-packed", "device-packed", "none-by-key", "device", "typo", "number"],
)
def test_configs_that_cannot_be_are_refused(nvme_path: Path, state: dict[str, Any], says: str) -> None:
    message = error_of(lambda: config_of(nvme_path, state=state))
    assert message.startswith("offload_optimizer.encoding: ") and says in message


@pytest.mark.parametrize("name", ["Adagrad", "Rprop", "SGD-plain", "AdamW"])
def test_a_setting_without_effect_is_said(nvme_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = wrap(CLASSES[name], nvme_path)
    assert (f"no state of {type(optimizer).__name__} is encoded" in caplog.text) == (name != "AdamW")
    close(optimizer)


# --- Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["bf16", "packed"])
def test_a_write_that_fails(nvme_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """As with exact state: the next step raises, and nothing goes on before both are loaded again."""
    plan = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    model, optimizer = wrap(adamw, nvme_path, pool_bytes="1MiB", state={"encoding": encoding})
    run(model, optimizer, range(2))
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    plan.fail_write_at = 2
    with pytest.raises(swapper.SwapIOError) as caught:
        run(model, optimizer, range(2, 4))
    assert caught.value.errno == errno.EIO and caught.value.operation == "write"
    with pytest.raises(swapper.SwapError):
        optimizer.state_dict()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    run(model, optimizer, range(2, 4))
    plain, state = reference_run(encoding)
    assert_same(plain, model)
    assert_same_state(optimizer.state_dict(), state)
    close(optimizer)


@pytest.mark.parametrize("encoding", ["bf16", "packed"])
def test_a_step_that_fails_in_the_middle_counts_for_nothing(nvme_path: Path, encoding: str) -> None:
    """Loaded again, the run goes on with the random bits of the step that failed."""

    class Failing(torch.optim.AdamW):
        fails_in = -1

        def step(self, closure: Any = None) -> Any:
            Failing.fails_in -= 1
            if Failing.fails_in == 0:
                raise RuntimeError("on purpose")
            return super().step(closure)

    model, optimizer = wrap(lambda p: Failing(p, lr=1e-2), nvme_path, state={"encoding": encoding})
    run(model, optimizer, range(2))
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    Failing.fails_in = 3
    with pytest.raises(RuntimeError, match="on purpose"):
        run(model, optimizer, range(2, 3))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    run(model, optimizer, range(2, 4))
    assert_same(reference_run(encoding)[0], model)
    close(optimizer)


assert WIDTH * 40 >= LARGE_NUMEL > 3 * WIDTH, "some parameters are large and some are small"
