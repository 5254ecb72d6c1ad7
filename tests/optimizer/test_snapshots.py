"""A load of what the optimizer's own `state_dict()` has handed out moves nothing, and sees whatever was changed."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from ranks import in_processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from twins import bits

import swapper
from swapper.hf import prepare

SIZES = ((300, 40), (7,), (64, 16))


def config(nvme_path: Path, **settings: Any) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="4MiB",
        bucket_bytes="64KiB",
        offload_optimizer={"device": "nvme", **settings},
    )


def step(optimizer: Any, seeds: range) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def stepped(nvme_path: Path | None, dtype: torch.dtype = torch.float32, steps: int = 2, **settings: Any) -> Any:
    """An AdamW after some steps; plain without `nvme_path`. Its first parameter has several segments."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    optimizer: Any = torch.optim.AdamW(parameters, lr=1e-2)
    if nvme_path is not None:
        swapper.wrap_optimizer(optimizer, config(nvme_path, **settings))
    step(optimizer, range(steps))
    return optimizer


def moved(optimizer: Any, action: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `action` reads and writes."""
    optimizer.swapper.flush()
    before = optimizer.swapper.stats()
    action()
    optimizer.swapper.flush()
    after = optimizer.swapper.stats()
    return after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written


@pytest.mark.parametrize("how", ["fp32", "fp64", "masters", "encoded", "resident"])
def test_a_load_of_an_unchanged_snapshot_moves_nothing(nvme_path: Path, how: str) -> None:
    dtype = {"fp64": torch.float64, "masters": torch.bfloat16}.get(how, torch.float32)
    settings: dict[str, dict[str, Any]] = {
        "masters": {"master_weights": True},
        "encoded": {"encoding": "int8"},
        "resident": {"resident_bytes": "256KiB"},
    }
    optimizer, other = (stepped(nvme_path, dtype, **settings.get(how, {})) for _ in range(2))
    saved = optimizer.state_dict()
    as_accelerate = {"state": {i: dict(e) for i, e in saved["state"].items()}}  # It makes the dictionaries anew.
    assert moved(optimizer, lambda: optimizer.load_state_dict({**saved, **as_accelerate})) == (0, 0)
    assert moved(optimizer, lambda: optimizer.load_state_dict(saved)) == (0, 0)
    assert bits(optimizer.state_dict()) == bits(other.state_dict())
    for each in (optimizer, other):
        step(each, range(2, 4))
    assert bits(optimizer.state_dict()) == bits(other.state_dict())
    for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert bits(p) == bits(q)


def by_pointer(value: torch.Tensor) -> None:
    ctypes.c_uint8.from_address(value.data_ptr() + value.nbytes - 1).value ^= 1


def by_numpy(value: torch.Tensor) -> None:
    value.numpy().reshape(-1)[-1] += 1


def in_inference_mode(value: torch.Tensor) -> None:
    with torch.inference_mode():
        value.detach().reshape(-1)[-1].add_(1)


WRITERS: dict[str, Callable[[torch.Tensor], object]] = {
    "torch": lambda value: value.reshape(-1)[-1].add_(1),
    "data": lambda value: value.data.view(-1)[-1].add_(1),
    "numpy": by_numpy,
    "pointer": by_pointer,
    "inference": in_inference_mode,
    "bits": lambda value: value.data.view(-1).view(torch.uint8)[0].bitwise_xor_(128),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("which", [(0, "exp_avg"), (2, "exp_avg_sq"), (1, "step")], ids=str)
@pytest.mark.parametrize("writer", WRITERS)
def test_one_element_changed_in_any_way_is_loaded(
    nvme_path: Path, writer: str, which: tuple[int, str], dtype: torch.dtype
) -> None:
    optimizer, plain = stepped(nvme_path, dtype), stepped(None, dtype)
    saved, expected = optimizer.state_dict(), plain.state_dict()
    before = bits(saved["state"])
    for each in (saved, expected):
        WRITERS[writer](each["state"][which[0]][which[1]])
    assert bits(saved["state"]) != before
    wanted = bits(saved["state"])
    assert wanted == bits(expected["state"])
    assert moved(optimizer, lambda: optimizer.load_state_dict(saved))[1] > 0
    assert bits(optimizer.state_dict()["state"]) == wanted
    plain.load_state_dict(expected)
    for optimizer_ in (optimizer, plain):
        step(optimizer_, range(2, 4))
    assert bits(optimizer.state_dict()["state"]) == bits(plain.state_dict()["state"])


def replaced(saved: dict[str, Any], optimizer: Any) -> None:
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg_sq"]


def seen_otherwise(saved: dict[str, Any], optimizer: Any) -> None:
    value = saved["state"][2]["exp_avg"]
    saved["state"][2]["exp_avg"] = value.as_strided(value.shape, (1, SIZES[2][0]))


def swapped_over(saved: dict[str, Any], optimizer: Any) -> None:
    entries = saved["state"][0]
    entries["exp_avg"], entries["exp_avg_sq"] = entries["exp_avg_sq"], entries["exp_avg"]


def one_less(saved: dict[str, Any], optimizer: Any) -> None:
    del saved["state"][1]


def one_name_more(saved: dict[str, Any], optimizer: Any) -> None:
    saved["state"][1]["more"] = torch.tensor(1.0)


def stepped_since(saved: dict[str, Any], optimizer: Any) -> None:
    step(optimizer, range(7, 8))


def assigned_since(saved: dict[str, Any], optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][2]
    entries = optimizer.swapper.state(p)
    entries["exp_avg"].add_(1)
    optimizer.state[p] = entries


def forgotten_since(saved: dict[str, Any], optimizer: Any) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][1]]


def loaded_since(saved: dict[str, Any], optimizer: Any) -> None:
    other = copy.deepcopy(optimizer.state_dict())
    other["state"][0]["exp_avg"].add_(1)
    optimizer.load_state_dict(other)


CHANGES = (
    replaced,
    seen_otherwise,
    swapped_over,
    one_less,
    one_name_more,
    stepped_since,
    assigned_since,
    forgotten_since,
    loaded_since,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_changed_since_the_snapshot_is_loaded(nvme_path: Path, change: Callable[..., None]) -> None:
    optimizer = stepped(nvme_path)
    saved = optimizer.state_dict()
    change(saved, optimizer)
    wanted = bits(copy.deepcopy(saved["state"]))
    optimizer.load_state_dict(saved)
    del saved
    found = optimizer.state_dict()["state"]
    for entries in found.values():
        for key, value in entries.items():
            entries[key] = value.contiguous()
    assert [{k: v[3] for k, v in e.items()} for e in bits(found).values()] == [
        {k: v[3] for k, v in e.items()} for e in wanted.values()
    ]


@pytest.mark.parametrize("found", ["by a step", "by looking"])
def test_a_load_mends_what_cannot_be_read(nvme_path: Path, found: str) -> None:
    parameter = nn.Parameter(torch.randn(900, 700, generator=torch.Generator().manual_seed(1)))
    optimizer: Any = torch.optim.AdamW([parameter], lr=1e-2)
    swapper.wrap_optimizer(optimizer, config(nvme_path).model_copy(update={"verify": "crc32c"}))
    step(optimizer, range(2))
    optimizer.swapper.flush()
    saved = optimizer.state_dict()
    wanted = bits(copy.deepcopy(saved["state"]))
    for file in (file for file in nvme_path.glob("swapper-*/*") if file.stat().st_size > 8192):
        with file.open("r+b") as opened:
            opened.seek(5000)
            byte = opened.read(1)[0]
            opened.seek(5000)
            opened.write(bytes([byte ^ 1]))
    with pytest.raises(swapper.SwapIOError, match="checksum"):
        step(optimizer, range(2, 3)) if found == "by a step" else optimizer.swapper.state(parameter)
    optimizer.load_state_dict(saved)
    del saved
    assert bits(optimizer.state_dict()["state"]) == wanted
    step(optimizer, range(2, 3))


@pytest.mark.parametrize("of", ["state", "gradients"])
def test_the_steps_that_random_bits_are_of_are_loaded(nvme_path: Path, of: str) -> None:
    optimizer: Any
    if of == "state":
        optimizer = stepped(nvme_path, encoding="int8")
    else:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.randn(300, 40))], lr=1e-2)
        gradients = swapper.config.OffloadGradientConfig(device="nvme", encoding="bf16")
        swapper.wrap_optimizer(optimizer, config(nvme_path).model_copy(update={"offload_gradient": gradients}))
        step(optimizer, range(2))
    saved = optimizer.state_dict()
    saved["swapper_encoded_steps"] += 3
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["swapper_encoded_steps"] == 5


def test_state_of_a_parameter_outside_of_the_groups_is_replaced_too(nvme_path: Path) -> None:
    optimizer = stepped(nvme_path)
    taken = optimizer.param_groups[0]["params"].pop()
    saved = optimizer.state_dict()
    assert moved(optimizer, lambda: optimizer.load_state_dict(saved))[1] > 0
    assert not optimizer.swapper.state(taken)


def test_a_load_casts_step_as_in_plain_pytorch(nvme_path: Path) -> None:
    found = []
    for path in (nvme_path, None):
        optimizer = stepped(path)
        for p in optimizer.param_groups[0]["params"]:
            if path is None:
                optimizer.state[p]["step"] = optimizer.state[p]["step"].double()
            else:
                entries = optimizer.swapper.state(p)
                optimizer.state[p] = {**entries, "step": entries["step"].double()}
        saved = optimizer.state_dict()
        saved["param_groups"][0]["fused"] = True
        optimizer.load_state_dict(saved)
        found.append(bits(optimizer.state_dict()["state"]))
    assert found[0] == found[1] and found[0][0]["step"][0] is torch.float32


def test_accelerate_moves_no_state_when_it_prepares_an_optimizer(nvme_path: Path) -> None:
    model = nn.Linear(300, 40)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    swapper.wrap_optimizer(optimizer, config(nvme_path))
    step(optimizer, range(2))
    length_bytes = optimizer.swapper.stats().state_bytes
    before = bits(optimizer.state_dict()["state"])
    read, written = moved(optimizer, lambda: Accelerator(cpu=True).prepare(model, optimizer))
    assert written == 0 and read <= length_bytes + 4096 * 8  # Of `state_dict()`, which has it on the drive already.
    assert moved(optimizer, lambda: prepare(Accelerator(cpu=True), model, optimizer, config(nvme_path))) == (0, 0)
    assert bits(optimizer.state_dict()["state"]) == before


def load_in_shards(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    fully_shard(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    swapper.wrap_optimizer(optimizer, config(Path(directory)))
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert isinstance(saved["state"][0]["exp_avg"], DTensor)
    assert moved(optimizer, lambda: optimizer.load_state_dict(saved)) == (0, 0)
    if rank == 1:
        saved["state"][0]["exp_avg"].to_local().numpy()[0] += 1
    wanted = bits(saved["state"][0]["exp_avg"].to_local())
    assert moved(optimizer, lambda: optimizer.load_state_dict(saved))[1] > 0  # On both, as what one rank does.
    assert bits(optimizer.state_dict()["state"][0]["exp_avg"].to_local()) == wanted
    optimizer.swapper.close()
    dist.destroy_process_group()


@pytest.mark.long
def test_ranks_load_together_what_one_of_them_has_changed(nvme_path: Path) -> None:
    in_processes(load_in_shards, str(nvme_path))
