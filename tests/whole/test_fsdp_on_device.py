"""Swapping after `fully_shard` on an accelerator: ranks with a simulated device each, to the bit as plain FSDP2 there.

The device does work late, or only when somebody waits, and collectives are late too (`device_ranks`).
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from device_ranks import in_device_processes
from sampling import ALL, SEED
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import swapper
from swapper.config import OffloadConfig
from swapper.storage.cache import RecordCache
from swapper.storage.store import RecordKey

WIDTH, HIDDEN, BLOCKS = 60, 301, 3
DEVICE = "sim"
ORDERS = "sim-lazy", "sim-random"


class Block(nn.Module):
    """301 rows are uneven on two ranks and on three; of one row the second rank has none."""

    def __init__(self, checkpoints: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return x + self.down(torch.tanh(self.up(y))) * torch.sigmoid(self.gate(y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return out


class Net(nn.Module):
    """The head is tied to the embedding, one layer is frozen, and one is not used."""

    def __init__(self, checkpoints: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpoints, hidden) for _ in range(BLOCKS))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.never = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.frozen(x)).float().logsumexp(-1).sum()
        return out


@dataclass
class Case:
    dtype: torch.dtype = torch.float32
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    masters: bool = False
    step_device: str = "device"
    state: str = "nvme"
    reshard: bool = True
    mixed: bool = False
    clips: bool = False
    micro_batches: int = 1
    syncs_all: bool = False  # each micro batch; else the last
    mesh: str = "shard"  # or "hybrid", "columns", "tensor": two dimensions, Shard(1), tensor parallelism and FSDP2
    checkpoints: bool = False
    prefetches: bool = False
    in_backward: bool = False
    evaluates: bool = False
    keeps_unsharded: bool = False  # set_reshard_after_backward(False) between micro batches
    grouped: bool = False  # two blocks in one call of fully_shard
    steps: int = 4


def cases(count: int, rank_count: int) -> Iterator[Case]:
    chance = random.Random(f"{SEED} {rank_count} on a device")
    classes: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
    ]
    for _ in range(count):
        dtype = chance.choice([torch.float32, torch.bfloat16])
        in_backward = chance.random() < 0.3
        cls, options = chance.choice(classes)
        meshes = [
            "shard",
            "shard",
            "hybrid",
            "columns",
            *(["tensor"] if not options.keys() & {"foreach", "fused"} else []),
        ]
        mesh = chance.choice(meshes)
        micro_batches = chance.choice([1, 2])
        yield Case(
            dtype,
            cls,
            options,
            dtype is torch.bfloat16 and chance.random() < 0.5,
            step_device=chance.choice(["cpu", "device"]),
            state=chance.choice(["nvme", "nvme", "cpu"]),
            reshard=chance.random() < 0.6,
            mixed=dtype is torch.float32 and chance.random() < 0.5,
            clips=not in_backward and mesh != "tensor" and chance.random() < 0.5,
            micro_batches=micro_batches,
            syncs_all=chance.random() < 0.5,
            mesh=mesh,
            checkpoints=chance.random() < 0.4,
            prefetches=chance.random() < 0.4,
            in_backward=in_backward,
            evaluates=chance.random() < 0.5,
            keeps_unsharded=micro_batches > 1 and chance.random() < 0.5,
            grouped=chance.random() < 0.3,
        )


def config_of(directory: str, state: dict[str, Any] | None = None, **more: Any) -> OffloadConfig:
    given = {"device": "nvme", **(state or {})}
    return OffloadConfig(
        nvme_path=directory, bucket_bytes="16KiB", offload_optimizer=given, **{"pool_bytes": "2MiB", **more}
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor) != isinstance(b, DTensor):
        return False
    if isinstance(a, DTensor) and (a.placements, a.shape, a.stride()) != (b.placements, b.shape, b.stride()):
        return False
    a, b = (local(each).detach().cpu().contiguous().reshape(-1) for each in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def mesh_of(kind: str, device: str) -> DeviceMesh:
    count = torch.distributed.get_world_size()
    if kind == "hybrid":
        return init_device_mesh(device, (count, 1), mesh_dim_names=("replicate", "shard"))
    if kind == "tensor":
        return init_device_mesh(device, (1, count), mesh_dim_names=("data", "tensor"))
    return init_device_mesh(device, (count,))


def columns(parameter: nn.Parameter) -> Shard | None:
    """FSDP2 wants those shards even."""
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 6 == 0 else None


def sharded(case: Case, seed: int = 0, device: str = DEVICE) -> Net:
    torch.manual_seed(seed)
    net = Net(case.checkpoints, 300 if case.mesh == "tensor" else HIDDEN).to(case.dtype).to(device)
    if case.in_backward:  # Else a bucket would wait for it.
        net.never.requires_grad_(False)
    mesh = mesh_of(case.mesh, device)
    if case.mesh == "tensor":
        for block in net.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["data"]
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.mesh == "columns":
        options["shard_placement_fn"] = columns
    blocks = list(net.blocks)
    if case.grouped:
        fully_shard(blocks[:2], **options)
        blocks = blocks[2:]
    for module in (*blocks, net):
        fully_shard(module, **options)
    if case.prefetches:
        for first, second in itertools.pairwise(blocks):
            assert isinstance(first, FSDPModule) and isinstance(second, FSDPModule)
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
    return net


def tokens_of(count: int, rank: int, device: str = DEVICE) -> torch.Tensor:
    return torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(100 * count + rank)).to(device)


class Twins:
    """A plain and a swapped model, each sharded."""

    def __init__(self, directory: str, case: Case) -> None:
        self.case, self.count = case, 0
        self.models = [sharded(case) for _ in range(2)]
        self.parameters = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.masters: list[torch.Tensor] = []
        plain: list[torch.Tensor] = list(self.parameters[0])
        if case.masters:
            self.masters = plain = [local(p).detach().to(torch.float32, copy=True).requires_grad_() for p in plain]
        self.optimizers = [case.cls(each, lr=1e-2, **case.options) for each in (plain, self.parameters[1])]
        state = {
            "device": case.state,
            "step_device": case.step_device,
            "master_weights": case.masters,
            "step_in_backward": case.in_backward,
        }
        count = case.micro_batches if case.syncs_all else 1  # Else FSDP2 adds them up before they arrive.
        given = config_of(directory, state, gradient_accumulation_steps=count)
        swapper.wrap_optimizer(self.optimizers[1], given)

    def train(self) -> None:
        for i in range(self.case.micro_batches):
            self.count += 1
            last = i + 1 == self.case.micro_batches
            tokens = tokens_of(self.count, 0 if self.case.mesh == "tensor" else torch.distributed.get_rank())
            losses = []
            for model in self.models:
                assert isinstance(model, FSDPModule)
                if self.case.evaluates:
                    with torch.no_grad():
                        losses.append(model(tokens))
                model.set_requires_gradient_sync(self.case.syncs_all or last)
                model.set_reshard_after_backward(last or not self.case.keeps_unsharded)
                losses.append(model(tokens))
                losses[-1].backward()
            if self.count % 2:  # Else the host is ahead of the device.
                half = len(losses) // 2
                assert all(map(same, losses[:half], losses[half:]))
        if self.case.clips:
            norms = [torch.nn.utils.clip_grad_norm_(self.parameters[0], 0.3)]
            norms.append(swapper.of(self.optimizers[1]).clip_grad_norm_(0.3))
            assert self.count % 2 or same(*norms)
        for p, master in zip(self.parameters[0], self.masters, strict=False):
            master.grad = None if p.grad is None else local(p.grad).to(master.dtype)
        for optimizer in self.optimizers:
            optimizer.step()
        for p, master in zip(self.parameters[0], self.masters, strict=False):
            local(p).detach().copy_(master.detach())
        for model in self.models:
            model.zero_grad()

    def compare(self) -> None:
        for (name, p), q in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert same(p, q), name

    def compare_state(self) -> None:
        plain, swapped = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert plain.keys() == swapped.keys()
        for number, entries in plain.items():
            found = dict(swapped[number])
            if self.case.masters:
                assert same(local(found.pop("master_param")), self.masters[number])
            assert list(entries) == list(found)
            for key, value in entries.items():
                mine = found[key]
                assert same(value, local(mine) if self.masters and isinstance(mine, DTensor) else mine), (number, key)

    def close(self) -> None:
        swapper.of(self.optimizers[1]).close()


def train_cases(rank: int, directory: str, count: int) -> None:
    for case in cases(count, torch.distributed.get_world_size()):
        try:
            twins = Twins(directory, case)
            for step in range(case.steps):
                twins.train()
                if step in (1, case.steps - 1):
                    twins.compare()
                if step == 1:
                    twins.compare_state()
                    mine = twins.optimizers[1]
                    mine.load_state_dict(mine.state_dict())
            twins.compare_state()
            twins.close()
        except BaseException as error:
            error.add_note(f"in rank {rank}: {case}")
            raise


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", ORDERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_same_bits_as_plain_fsdp(nvme_path: Path, settings: str, count: int, leaves_nothing: None) -> None:
    in_device_processes(train_cases, str(nvme_path), 12 if ALL else 3, settings=settings, count=count)


# --- Failures --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unreadable_state(at: int) -> Iterator[None]:
    """The record of state that is taken as the `at`-th cannot be read."""
    take, left = RecordCache.take, at

    def fails(cache: RecordCache, key: RecordKey, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= key.kind != "grad"
        if left == 0:
            left = -1
            raise swapper.SwapError("cannot be read")
        return take(cache, key, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordCache, "take", fails)
        yield
    assert left < 0


def fail_on_one_rank(rank: int, directory: str) -> None:
    """A step, in backward or after it, cannot read state on one rank: all raise that, and go on after a load.

    The ranks agree on the host, and over the device where the process group has nothing else.
    """
    for failing, over_device, case in (
        (1, False, Case()),
        (0, True, Case(step_device="cpu")),
        (1, True, Case(in_backward=True)),
        (0, False, Case(in_backward=True, step_device="cpu")),
    ):
        twins = Twins(directory, case)
        (plain, net), (of_plain, mine) = twins.models, twins.optimizers
        with pytest.MonkeyPatch.context() as patch:
            if over_device:
                patch.setattr(torch.distributed.distributed_c10d, "_get_object_coll_device", lambda group=None: DEVICE)
            twins.train()
            for model in twins.models if not case.in_backward else (plain,):
                model(tokens_of(2, rank)).backward()
            fails = unreadable_state(2) if rank == failing else contextlib.nullcontext()
            with fails, pytest.raises(swapper.SwapError, match="cannot be read") as caught:
                mine.step() if not case.in_backward else net(tokens_of(2, rank)).backward()
            assert (f"on rank {failing}" in str(caught.value)) == (rank != failing)
            with pytest.raises(swapper.SwapError, match="load both from a checkpoint"):
                mine.step()
            of_plain.step()
            net.load_state_dict(plain.state_dict())
            mine.load_state_dict(of_plain.state_dict())
            for model in twins.models:
                model.zero_grad()
            twins.train()
            twins.compare()
            twins.compare_state()
            twins.close()


@pytest.mark.parametrize("settings", ORDERS)
def test_what_fails_on_one_rank_is_raised_by_all(nvme_path: Path, settings: str, leaves_nothing: None) -> None:
    in_device_processes(fail_on_one_rank, str(nvme_path), settings=settings)


# --- Checkpoints -----------------------------------------------------------------------------------------------------

SAVED = [
    Case(),
    Case(torch.bfloat16, masters=True, step_device="cpu"),
    Case(torch.bfloat16, torch.optim.SGD, {"momentum": 0.9}, masters=True, mesh="columns"),
]
if not ALL:
    SAVED = random.Random(SEED).sample(SAVED, 1)


def made(case: Case, directory: str, seed: int, device: str, whole: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    if whole:
        torch.manual_seed(seed)
        net = Net().to(case.dtype).to(device)
    else:
        net = sharded(case, seed, device)
    optimizer = case.cls([p for p in net.parameters() if p.requires_grad], lr=1e-2, **case.options)
    state = {"master_weights": case.masters, "step_device": case.step_device if device == DEVICE else "auto"}
    swapper.wrap_optimizer(optimizer, config_of(directory, state))
    return net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer, device: str, count: int) -> None:
    net(tokens_of(count, 0, device)).backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All values, whole, on the CPU."""

    def full(value: Any) -> Any:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    found = {name: full(value) for name, value in net.state_dict().items()}
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": full(value) for key, value in entries.items()}
    return found


def save_all(rank: int, directory: str, nvme: str) -> None:
    for number, case in enumerate(SAVED):
        net, optimizer = made(case, nvme, 0, DEVICE)
        for count in range(2):
            step(net, optimizer, DEVICE, count)
        path = f"{directory}/{number}"
        swapper.save_checkpoint(path, net, optimizer).wait()
        found = everything(net, optimizer)
        step(net, optimizer, DEVICE, 2)
        after = everything(net, optimizer)
        if rank == 0:
            torch.save((found, after), f"{path}.pt")
        # As many ranks train on as if training had not ended.
        other, fresh = made(case, nvme, 1, DEVICE)
        swapper.load_checkpoint(path, other, fresh)
        step(other, fresh, DEVICE, 2)
        assert_equal(everything(other, fresh), after)
        for each in (optimizer, fresh):
            swapper.of(each).close()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for name, value in expected.items():
        same_value = same(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
        assert same_value, name


def load_all(rank: int, directory: str, nvme: str, device: str, whole: bool) -> None:
    for number, case in enumerate(SAVED):
        net, optimizer = made(case, nvme, 1, device, whole)
        swapper.load_checkpoint(f"{directory}/{number}", net, optimizer)
        assert_equal(everything(net, optimizer), torch.load(f"{directory}/{number}.pt")[0])
        step(net, optimizer, device, 2)
        swapper.of(optimizer).close()


def load_on_the_host(rank: int, *args: Any) -> None:
    torch.distributed.init_process_group("gloo")
    try:
        load_all(rank, *args)
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", ORDERS)
@pytest.mark.parametrize("before", [2, 3])
def test_checkpoints_load_on_other_ranks_and_devices(
    nvme_path: Path, tmp_path: Path, settings: str, before: int, leaves_nothing: None
) -> None:
    """Saved on a device they load there, on the CPU, on fewer ranks, and in a model that is not sharded."""
    in_device_processes(save_all, str(tmp_path), str(nvme_path), settings=settings, count=before)
    given = str(tmp_path), str(nvme_path)
    in_device_processes(load_all, *given, DEVICE, False, settings=settings, count=before - 1)
    in_device_processes(load_all, *given, DEVICE, True, settings=settings, count=1)
    ranks.in_processes(load_on_the_host, *given, "cpu", False, ranks=2)
